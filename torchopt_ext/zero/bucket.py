"""A communication bucket: parameters that lie in one tensor, divided among the ranks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchopt_ext.zero.part import Part


@dataclass(eq=False)
class Bucket:
    """One communication bucket.

    Attributes:
        flat: 1-D; holds the parameters, padded at the end for the last rank's window.
        cuts: rank r owns elements [cuts[r], cuts[r + 1]).
        window: the largest rank's number of elements, which every rank sends.
        params: parameters and where they begin.
        layouts: their shapes and strides.
        parts: this rank's parts of them.
        grad: this rank's elements of the reduced gradient, while sharded_gradients holds them.
        returned: whether parameters were trainable at some step, so that others need them.
    """

    flat: Tensor
    cuts: list[int]
    window: int
    params: list[tuple[Tensor, int]]
    layouts: list[tuple[torch.Size, tuple[int, ...]]]
    parts: list[Part] = field(default_factory=list)
    grad: Tensor | None = None
    returned: bool = False
