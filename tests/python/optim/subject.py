"""torch's descriptions of its tests of optimizers, with our classes; a comparison with torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from ...support.problems import SHAPES, make_params
from ...support.ways import OURS, TORCH

NAMES = ("Adam", "AdamW", "Muon")
MATRICES = ((3, 4), (7, 2), (1, 5), (6, 6))


def optimizer_info(name: str) -> OptimizerInfo:
    """Returns torch's description of a class with ours in its place, the fused kernel only."""
    info = next(i for i in optim_db if i.optim_cls is TORCH[name])
    return OptimizerInfo(
        OURS[name],
        optim_inputs_func=info.optim_inputs_func,
        optim_error_inputs_func=info.optim_error_inputs_func,
        scheduler_inputs=info.scheduler_inputs,
        supported_impls=(),
        not_og_supported_flags=info.not_og_supported_flags,
        has_capturable_arg=info.has_capturable_arg,
        supports_fused_on=info.supports_fused_on,
    )


def optimizer_inputs(name: str) -> list[OptimizerInput]:
    """Returns every configuration in which torch tests a class on a CPU."""
    return _get_optim_inputs_including_global_cliquey_kwargs(
        "cpu", torch.float32, optimizer_info(name)
    )


def params_for(name: str) -> list[nn.Parameter]:
    """Returns four new parameters for a class: matrices for Muon."""
    return make_params(MATRICES if name == "Muon" else SHAPES)


def inputs() -> Any:
    """Parametrizes over class and configuration; each test gets its own configuration."""
    cases = [
        pytest.param(name, (name, index), id=f"{name}-{arguments.desc}")
        for name in NAMES
        for index, arguments in enumerate(optimizer_inputs(name))
    ]
    return pytest.mark.parametrize(("name", "kwargs"), cases, indirect=["kwargs"])


class Regression:
    """A least-squares problem on five inputs. Autograd computes its gradients.

    For Muon the bias is a matrix, too.
    """

    def __init__(self, name: str = "AdamW") -> None:
        self.params = make_params([(10, 5), (10, 1) if name == "Muon" else (10,)])
        self.weight, self.bias = self.params
        self.input = torch.linspace(-1, 1, 5)

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias.flatten()).square().sum()

    def backward(self, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss


def assert_close_to_torch(ours: Iterable[Tensor], reference: Iterable[Tensor]) -> None:
    """Asserts equality up to rounding, as torch's kernels round in a different order."""
    for mine, theirs in zip(ours, reference, strict=True):
        wide = mine.dtype in (torch.float32, torch.float64)
        rtol, atol = (2e-6, 1e-7) if wide else (1e-2, 5e-3)
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
