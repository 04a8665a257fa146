"""The optimizers under test, their torch counterparts, and small problems to run them on."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
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
from torch.testing._internal.common_utils import TestCase

from torchopt_ext import FusedAdam, FusedAdamW

OURS = {"Adam": FusedAdam, "AdamW": FusedAdamW}
TORCH = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
NAMES = tuple(OURS)

CASE = TestCase()  # torch's comparison of nested containers, and its tolerances per dtype
assert_equal_nested = functools.partial(CASE.assertEqual, rtol=0, atol=0)
each_class = pytest.mark.parametrize("name", NAMES)


def optimizer_info(name: str) -> OptimizerInfo:
    """Returns torch's description of Adam or AdamW with our class, and the fused kernel only."""
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
    """Returns every configuration in which torch tests Adam on a CPU."""
    return _get_optim_inputs_including_global_cliquey_kwargs(
        "cpu", torch.float32, optimizer_info(name)
    )


def inputs() -> Any:
    """Parametrizes over class and configuration; each test gets its own configuration."""
    cases = [
        pytest.param(name, (name, index), id=f"{name}-{given.desc}")
        for name in NAMES
        for index, given in enumerate(optimizer_inputs(name))
    ]
    return pytest.mark.parametrize(("name", "kwargs"), cases, indirect=["kwargs"])


class Regression:
    """A least-squares problem on five inputs. Autograd computes its gradients."""

    def __init__(self) -> None:
        self.params = make_params([(10, 5), (10,)])
        self.weight, self.bias = self.params
        self.input = torch.linspace(-1, 1, 5)

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).square().sum()

    def backward(self, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)


def make_params(
    shapes: Iterable[tuple[int, ...]] = ((3, 4), (7,), (), (2, 3, 5)),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def copy_params(params: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def set_gradients(*param_lists: Iterable[Tensor], seed: int = 0, scale: float = 1.0) -> None:
    """Gives every list of parameters the same random gradients."""
    for params in param_lists:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def train(
    optimizers: list[torch.optim.Optimizer],
    param_lists: list[list[nn.Parameter]],
    steps: int,
    first_seed: int = 0,
    each_step: Callable[[], object] = lambda: None,
) -> None:
    """Steps every optimizer with the same gradients."""
    for step in range(steps):
        set_gradients(*param_lists, seed=first_seed + step)
        for optimizer in optimizers:
            optimizer.step()
        each_step()


def through_file(state_dict: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def bits(tensor: Tensor) -> bytes:
    """Returns the tensor's bytes, so that NaN and signed zeros compare too."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def snapshot(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Returns every byte of parameters and per-parameter state, in a fixed order."""
    content: list[bytes] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            content.append(bits(p))
            state = optimizer.state.get(p, {})
            names = sorted(name for name, value in state.items() if isinstance(value, Tensor))
            content += [name.encode() + bits(state[name]) for name in names]
    return content


def assert_close_to_torch(ours: Iterable[Tensor], reference: Iterable[Tensor]) -> None:
    """Asserts equality up to rounding, as torch's kernels round in a different order."""
    for mine, theirs in zip(ours, reference, strict=True):
        wide = mine.dtype in (torch.float32, torch.float64)
        rtol, atol = (2e-6, 1e-7) if wide else (1e-2, 5e-3)
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def assert_same_bits(ours: Iterable[Tensor], reference: Iterable[Tensor]) -> None:
    for index, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        assert bits(mine) == bits(theirs), f"tensor {index}: {mine} and {theirs}"
