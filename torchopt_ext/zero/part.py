"""A part of a parameter, as one rank's optimizer sees it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.state.quantized import SCALES, can_quantize, groups_before, scale_shape


@dataclass(frozen=True, eq=False)
class Part:
    """Elements [begin, end) of a parameter, in the order in which they lie in memory."""

    param: Tensor
    begin: int
    end: int
    tensor: Tensor  # that the local optimizer steps; ``param`` where parameters stay whole

    def divides(self, value: Any) -> bool:
        """Returns whether a state entry is a part, with one value for each element, of a whole."""
        fits = isinstance(value, Tensor) and value.shape == self.tensor.shape
        return fits and not self.is_whole

    def of_entry(self, name: Any) -> "Part":
        """Returns this part as a range of the state entry ``name``: scales are counted by group.

        Parts of a balanced partition begin and end at rows or blocks, so they hold whole groups.
        """
        if name not in SCALES or not can_quantize(self.param):
            return self
        begin, end = (groups_before(self.param, element) for element in (self.begin, self.end))
        param, tensor = (
            torch.empty(scale_shape(like), dtype=torch.float32, device="meta")
            for like in (self.param, self.tensor)
        )
        return Part(param, begin, end, tensor)

    def cut(self, whole: Tensor) -> Tensor:
        """Cuts this part out of a tensor of the parameter's shape. The result is mostly a view."""
        if self.is_whole:
            return whole
        return in_memory_order(whole, self.param)[self.begin : self.end].view(self.tensor.shape)

    def of(self, value: Any) -> Any:
        """Cuts this part out of a parameter's state entry. Returns other shapes unchanged."""
        whole = isinstance(value, Tensor) and value.shape == self.param.shape and value.dim() > 0
        return self.cut(value) if whole and not self.is_whole else value

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape == self.param.shape and self.end - self.begin == self.param.numel()


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Returns a dense tensor's dimensions, outermost in memory first; ascending if not dense."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d], d)))


def in_memory_order(value: Tensor, like: Tensor) -> Tensor:
    """Flattens ``value`` in the memory order of ``like``, a tensor of the same shape."""
    return value.permute(memory_order(like)).reshape(-1)


def view_in(flat: Tensor, start: int, param: Tensor) -> Tensor:
    """Returns a parameter's place in a bucket as a view in its own order of dimensions."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat.as_strided(param.shape, param.stride(), start)
    return flat[start : start + param.numel()].view(param.shape)
