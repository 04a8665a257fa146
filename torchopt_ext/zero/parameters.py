"""The whole parameters of a sharded optimizer: what messages call them, and what they must be."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.optim.norm import is_flattened
from torchopt_ext.state.params import named_group_params, named_params


class Parameters:
    """The parameters in a sharded optimizer's groups.

    Attributes:
        parameter_names: names by group, if the groups have no ``param_names``: set by containers.
    """

    parameter_names: Sequence[Sequence[str]] = ()

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def called(self, param: Tensor) -> str:
        """Returns what messages call a parameter: its name if the user gave one, and its shape."""
        shape = f"of shape {tuple(param.shape)}"
        for number, (name, other) in enumerate(named_params(self)):
            if other is param:
                return f"parameter {name or number!r} {shape}"
        return f"a parameter {shape}"

    def describe(self) -> list[str]:
        """Describes each parameter in one line, equal on all ranks that hold the same model."""
        return [
            f"{name!r}: " * bool(name)
            + f"{param.dtype} {tuple(param.shape)} with strides {param.stride()}, "
            + ("trainable" if param.requires_grad else "frozen")
            + f", in group {number}"
            for number, _, name, param in named_group_params(self)
        ]

    def check_dense(self, allow_mixed_dtypes: bool) -> None:
        """Raises ValueError for sparse parameters, DTensors, memory that parameters share, and
        dtypes that differ unless allowed."""
        first, params = "", named_params(self)
        for number, (name, param) in enumerate(params):
            what = f"parameter {name or number!r}"
            first = first or what
            if param.layout is not torch.strided:
                raise ValueError(f"{what} has layout {param.layout}, expected a dense one")
            if hasattr(param, "placements"):
                raise ValueError(
                    f"{what} is a DTensor, which is sharded already: step it with FusedAdamW"
                )
            if is_flattened(param):
                raise ValueError(
                    f"{what} is flattened by FullyShardedDataParallel, which shards it already: "
                    f"step it with FusedAdamW"
                )
            if param.dtype != params[0][1].dtype and not allow_mixed_dtypes:
                raise ValueError(
                    f"{what} has dtype {param.dtype}, {first} {params[0][1].dtype}: "
                    f"allow_mixed_dtypes=True shards each dtype by itself"
                )
        self.check_untied(ValueError)

    def check_untied(self, error: type[Exception] = RuntimeError) -> None:
        """Raises ``error`` if parameters share memory: owners would not see both updates."""
        params = [param for _, param in named_params(self) if param.numel() and not param.is_meta]
        spans = sorted(
            (str(p.device), p.data_ptr(), p.nbytes if p.is_contiguous() else 1, number)
            for number, p in enumerate(params)
        )
        for (device, start, nbytes, number), (other, after, _, following) in pairwise(spans):
            if device == other and after < start + nbytes:
                one, two = (self.called(params[which]) for which in sorted((number, following)))
                raise error(
                    f"{one} and {two} share memory, but each is sharded by itself: tie them as one "
                    f"Parameter object, or give each memory of its own"
                )

    def check_frozen(self, frozen: Iterable[Tensor]) -> None:
        """Raises RuntimeError if a parameter that was frozen at every step has a gradient.

        Its owner would apply the gradient. Other ranks cannot know: they may have no gradient.
        """
        for param in frozen:
            if param.grad is not None:
                raise RuntimeError(
                    f"{self.called(param)} has a gradient, but it was frozen in every step, so the "
                    f"other ranks expect no update: freeze it after the step, or clear its gradient"
                )
