"""FTManager averages the gradients of replica groups parameter by parameter."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext.trainer.ft import FTManager


class Peer:
    """A torchft.Manager whose one other replica group has given tensors, in the order of calls."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def allreduce(self, tensor: Tensor) -> Any:
        tensor.copy_((tensor + self.tensors.pop(0)) / 2)
        return SimpleNamespace(wait=lambda: None)


def test_gradients_that_groups_lack_count_as_zeros() -> None:
    """The other group lacks the third gradient, this group the second, and both the fourth."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
    for param, value in zip(model, (1.0, None, 100.0, None), strict=True):
        param.grad = None if value is None else torch.full((2,), value)
    peers = [torch.full((2,), value) for value in (3.0, 20.0, 0.0, 0.0)]
    peer = Peer([torch.tensor([1.0, 1.0, 0.0, 0.0]), *peers])
    FTManager(peer, 2).average_gradients([model])
    averages = [None if p.grad is None else p.grad.tolist() for p in model]
    assert averages == [[2.0, 2.0], [10.0, 10.0], [50.0, 50.0], None]
    assert peer.tensors == []
