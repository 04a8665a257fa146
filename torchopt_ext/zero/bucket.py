"""A communication bucket: parameters that lie in one tensor, divided among the ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchopt_ext.zero.part import Part, view_in


@dataclass(eq=False)
class Bucket:
    number: int  # its place among the optimizer's buckets
    flat: Tensor  # 1-D, of the parameters, padded at the end for the last rank's window
    cuts: list[int]  # rank r owns elements [cuts[r], cuts[r + 1])
    window: int  # the elements of the largest share; every rank sends this many
    starts: dict[Tensor, int] = field(default_factory=dict)  # each parameter's first element
    places: list[Tensor] = field(default_factory=list)  # the parameters' views of ``flat``
    parts: list[Part] = field(default_factory=list)  # this rank's
    sent: bool = False  # ranks exchange updates: a parameter was trainable at some time
    staging: Tensor | None = None  # gradients of this backward pass, one window for each rank
    arrived: set[Tensor] = field(default_factory=set)  # whose gradient is in ``staging``
    grad: Tensor | None = None  # this rank's elements of the reduced gradient

    def note_trainable(self) -> bool:
        """Notes trainable parameters. Returns whether ranks send the bucket's updates."""
        self.sent = self.sent or any(param.requires_grad for param in self.starts)
        return self.sent

    @property
    def is_complete(self) -> bool:
        """Whether every trainable parameter's gradient has arrived."""
        return all(p in self.arrived or not p.requires_grad for p in self.starts)

    def lay(self, param: Tensor, start: int) -> None:
        """Moves a parameter to its place."""
        self.starts[param] = start
        self.places.append(view_in(self.flat, start, param))
        param.data = self.places[-1].copy_(param.detach())

    def is_moved(self, called: Callable[[Tensor], str]) -> bool:
        """Returns whether the memory of a parameter was replaced (``p.data = ...``).

        Raises:
            RuntimeError: the shape, dtype or device of a parameter has changed; names it.
        """
        pairs = [*zip(self.starts, self.places, strict=True)]
        for param, place in pairs:
            is_now, was = ((t.shape, t.dtype, t.device) for t in (param, place))
            if is_now != was:
                raise RuntimeError(
                    f"{called(param)}, {param.dtype} on {param.device}, had shape "
                    f"{tuple(place.shape)}, {place.dtype} on {place.device}: build the optimizer "
                    f"after changing or moving the model"
                )
        return any(p.data_ptr() != place.data_ptr() for p, place in pairs if p.numel())

    @torch.no_grad()
    def lay_anew(self) -> None:
        """Moves all parameters to other memory: the user may hold the memory they had."""
        flat = self.flat = torch.zeros_like(self.flat)
        former, self.places = self.places, []
        for (param, start), place in zip(self.starts.items(), former, strict=True):
            self.places.append(view_in(flat, start, place))
            param.data = self.places[-1].copy_(param.detach())
        for part in self.parts:
            old = part.tensor
            old.data = flat.as_strided(old.shape, old.stride(), old.storage_offset())
