"""A part of a parameter, as one rank's optimizer sees it, and buckets of parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext.optim.balanced_plan import memory_order
from torchopt_ext.state.by_row import BY_ROW, row_shape, rows_shape
from torchopt_ext.state.pieces import marked_cut
from torchopt_ext.state.quantized import SCALES, can_quantize, groups_before, scale_shape


@dataclass(frozen=True, eq=False)
class Part:
    """Elements [begin, end) of a parameter, in the order in which they lie in memory."""

    param: Tensor
    begin: int
    end: int
    tensor: Tensor  # that the local optimizer steps; ``param`` where parameters stay whole
    # Has the shape, dtype and layout for which the elements count, whatever ``param.data`` is now.
    like: Tensor

    def divides(self, value: Any) -> bool:
        """Returns whether a state entry is a part, with one value for each element, of a whole."""
        fits = isinstance(value, Tensor) and value.shape == self.tensor.shape
        return fits and not self.is_whole

    def of_entry(self, name: Any) -> "Part":
        """Returns this part as a range of the state entry ``name``: scales are counted by group,
        and NorMuon's averages by row of a matrix.

        Parts of a balanced partition begin and end at rows or blocks, so they hold whole groups.
        """
        if name in BY_ROW and (cut := marked_cut(self.tensor)) is not None:
            flatten = {"flatten": cut.flatten}
            shapes = row_shape(self.like.shape, flatten), rows_shape(self.tensor, flatten)
            width = max(1, self.like.numel() // max(1, shapes[0].numel()))
            begin, end = self.begin // width, self.end // width
        elif name in SCALES and can_quantize(self.like):
            shapes = scale_shape(self.like), scale_shape(self.tensor)
            begin, end = (groups_before(self.like, element) for element in (self.begin, self.end))
        else:
            return self
        whole = torch.empty(shapes[0], device="meta")
        # Only an empty part's device matters, in cut().
        tensor = torch.empty(shapes[1], device=self.tensor.device if self.is_empty else "meta")
        return Part(whole, begin, end, tensor, whole)

    def cut(self, whole: Tensor) -> Tensor:
        """Cuts this part out of a tensor of the parameter's shape. The result is mostly a view."""
        if self.is_whole:
            return whole
        if self.is_empty:  # other ranks have all of it, and `whole` may lie on the meta device
            return torch.empty(self.tensor.shape, dtype=whole.dtype, device=self.tensor.device)
        return in_memory_order(whole, self.like)[self.begin : self.end].view(self.tensor.shape)

    def of(self, value: Any) -> Any:
        """Cuts this part out of a parameter's state entry. Returns other shapes unchanged."""
        whole = isinstance(value, Tensor) and value.shape == self.like.shape and value.dim() > 0
        return self.cut(value) if whole and not self.is_whole else value

    def rows(self) -> Tensor:
        """Returns to which row of the parameter each row of ``tensor`` belongs.

        If elements of one row of ``tensor`` belong to several, has a number for each element.
        """
        if self.is_whole:
            return torch.arange(self.tensor.shape[0])
        outermost = memory_order(self.like)[0] == 0
        width = self.tensor.shape[1:].numel() if outermost else 1
        first = torch.arange(self.begin, self.end, max(1, width))
        return first // max(1, self.like.stride(0)) % self.like.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether other ranks have all of the parameter."""
        return self.begin == self.end and not self.is_whole

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape == self.like.shape and self.end - self.begin == self.like.numel()


def element_order(tensor: Tensor) -> list[int]:
    """Returns the memory order of the dimensions that have more than one index."""
    return [d for d in memory_order(tensor) if tensor.shape[d] > 1]


def in_memory_order(value: Tensor, like: Tensor) -> Tensor:
    """Flattens ``value`` in the memory order of ``like``, a tensor of the same shape."""
    return value.permute(memory_order(like)).reshape(-1)


def view_in(flat: Tensor, start: int, param: Tensor) -> Tensor:
    """Returns a parameter's place in a bucket as a view in its own order of dimensions."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat.as_strided(param.shape, param.stride(), start)
    return flat[start : start + param.numel()].view(param.shape)


@dataclass(eq=False)
class Bucket:
    """A communication bucket: parameters that lie in one tensor, divided among the ranks."""

    number: int  # its position among the optimizer's buckets
    flat: Tensor  # 1-D, of the parameters, padded at the end for the last rank's window
    cuts: list[int]  # rank r owns elements [cuts[r], cuts[r + 1])
    window: int  # the elements of the largest share; every rank sends this many
    places: dict[Tensor, Tensor] = field(default_factory=dict)  # each parameter's view of ``flat``
    parts: list[Part] = field(default_factory=list)  # this rank's
    sent: bool = False  # ranks exchange updates: a parameter was trainable at some time
    staging: Tensor | None = None  # gradients of this backward pass, one window for each rank
    arrived: set[Tensor] = field(default_factory=set)  # whose gradient is in ``staging``
    grad: Tensor | None = None  # this rank's elements of the reduced gradient

    def note_trainable(self) -> bool:
        """Notes trainable parameters. Returns whether ranks send the bucket's updates."""
        self.sent = self.sent or any(param.requires_grad for param in self.places)
        return self.sent

    def stage(self, ranks: int) -> Tensor:
        """Returns ``staging``, with zeros where no gradient has arrived."""
        if self.staging is None:
            self.staging = self.flat.new_zeros(ranks * self.window)
        return self.staging

    def range_of(self, rank: int) -> tuple[int, int]:
        """Returns the range of a rank's elements in ``flat``."""
        return self.cuts[rank], self.cuts[rank + 1]

    def share_of(self, rank: int) -> Tensor:
        return self.flat[slice(*self.range_of(rank))]

    @property
    def is_complete(self) -> bool:
        """Whether every trainable parameter's gradient has arrived."""
        return all(p in self.arrived or not p.requires_grad for p in self.places)

    def start(self, param: Tensor) -> int:
        """Returns the parameter's first element in ``flat``."""
        return int(self.places[param].storage_offset())

    def lay(self, param: Tensor, start: int, like: Tensor) -> None:
        """Moves a parameter to its place, with the order of dimensions of ``like``."""
        self.places[param] = view_in(self.flat, start, like)
        param.data = self.places[param].copy_(param.detach())

    def problem(self, param: Tensor, called: Callable[[Tensor], str]) -> str:
        """Says how ``p.data = ...`` has made a parameter unfit for its place, or returns "".

        Where elements lie decides which rank owns them, and for which DDP's buckets have room.
        """
        place = self.places[param]
        if (param.shape, param.dtype, param.device) != (place.shape, place.dtype, place.device):
            return (
                f"{called(param)}, {param.dtype} on {param.device}, had shape "
                f"{tuple(place.shape)}, {place.dtype} on {place.device}: build the optimizer "
                f"after changing or moving the model"
            )
        if param.stride() == place.stride() or element_order(param) == element_order(place):
            return ""
        return (
            f"{called(param)} has strides {param.stride()}, its memory had {place.stride()} when "
            f"the optimizer was built: build the optimizer and DDP after changing the memory "
            f"format, or set values by p.data.copy_()"
        )

    def is_moved(self, called: Callable[[Tensor], str]) -> bool:
        """Returns whether the memory of a parameter was replaced (``p.data = ...``).

        Raises:
            RuntimeError: the new memory has another shape, dtype, device or order of dimensions.
        """
        for param in self.places:
            if problem := self.problem(param, called):
                raise RuntimeError(problem)
        return _C.places(list(self.places)) != _C.places(list(self.places.values()))

    @torch.no_grad()
    def lay_anew(self) -> None:
        """Moves all parameters to other memory: the user may hold the memory they had."""
        self.flat = torch.zeros_like(self.flat)
        for param, place in self.places.items():
            self.lay(param, self.start(param), place)
        for part in self.parts:
            old = part.tensor
            old.data = self.flat.as_strided(old.shape, old.stride(), old.storage_offset())
