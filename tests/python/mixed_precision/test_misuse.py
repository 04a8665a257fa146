"""Mistakes in scripts around FSDPadaptOptimizer raise at once, or have the intended effect."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.mixed_precision.master_optimizer import skips_on_device

BASES: dict[str, Any] = {"fused": FusedAdamW, "adamw": AdamW}
every_base = pytest.mark.parametrize("base", BASES)


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4, dtype=dtype)), nn.Parameter(torch.ones(5, dtype=dtype))]


def give(params: list[nn.Parameter], value: float = 0.5) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)


@every_base
def test_a_base_outlives_its_wrapper(base: str) -> None:
    """A fused base still has the model's parameters; others have masters of no wrapper."""
    params = parameters()
    optimizer = BASES[base](params)
    wrapper = FSDPadaptOptimizer(optimizer)
    copied = copy.deepcopy(wrapper)
    for inner in (optimizer, copied.optim):
        with pytest.raises(TypeError, match="another FSDPadaptOptimizer"):
            FSDPadaptOptimizer(inner)
    give(params)
    assert wrapper.step()
    del wrapper
    if base == "fused":
        FSDPadaptOptimizer(optimizer)
    else:
        with pytest.raises(TypeError, match="masters of another"):
            FSDPadaptOptimizer(optimizer)


def test_a_parameter_without_shape() -> None:
    model = nn.LazyLinear(3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="run the model once"):
        FSDPadaptOptimizer(SGD(model.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice() -> None:
    params = parameters()
    with pytest.raises(ValueError, match="group 0 has a parameter twice"):
        FSDPadaptOptimizer(SGD([params[0], params[0]], lr=0.1))


def test_plain_backward_after_a_failed_step() -> None:
    """A failed step drops its gradients, and also the record of how they were scaled."""

    class Fails(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("failed")

    params = parameters()
    optimizer = FSDPadaptOptimizer(Fails(params, lr=0.1), grad_scal_cfg={"initial_scale": 8.0})
    optimizer.backward(sum(p.square().sum() for p in params))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="failed"):
        optimizer.step()
    torch.stack([p.square().sum() for p in params]).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward"):
        optimizer.step()


def test_a_model_that_becomes_bf16_later() -> None:
    """A model that becomes bf16 gets masters from then on."""
    model = nn.Linear(4, 3)
    optimizer = FSDPadaptOptimizer(SGD(model.parameters(), lr=1e-4))
    give(list(model.parameters()))
    assert optimizer.step()
    model.bfloat16()
    start = model.weight.detach().clone()
    for _ in range(40):  # each step is below half of a weight's last bit
        give(list(model.parameters()), 1.0)
        assert optimizer.step()
    assert not model.weight.detach().equal(start)
    masters = optimizer.state_dict()["flat_fp32_weights"][0]
    assert all(master.dtype == torch.float32 for master in masters)


def test_a_base_that_keeps_its_gradients() -> None:
    """The next step does not reuse the memory of gradients that the base keeps."""

    class Keeps(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("seen", []).append(p.grad)

    params = parameters()
    optimizer = FSDPadaptOptimizer(Keeps(params), clip_grad_norm=0.0)
    for value in (0.25, 0.5):
        give(params, value)
        optimizer.step()
    for entry in optimizer.state.values():
        assert [grad.unique().tolist() for grad in entry["seen"]] == [[0.25], [0.5]]


@pytest.mark.parametrize("mapping", [MappingProxyType, type("Own", (dict,), {})])
def test_no_mapping_of_state_is_shared(mapping: Any) -> None:
    params = parameters()
    optimizer = FSDPadaptOptimizer(AdamW(params))
    give(params, 0.5)
    optimizer.step()
    saved = optimizer.state_dict(snapshot=True)
    base = saved["base_optim_states"]
    entries = {index: mapping(entry) for index, entry in base["state"].items()}
    before = copy.deepcopy(base["state"])
    optimizer.load_state_dict(saved | {"base_optim_states": base | {"state": mapping(entries)}})
    give(params, 0.5)
    optimizer.step()
    for index, entry in base["state"].items():
        assert all(value.equal(before[index][name]) for name, value in entry.items())


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda p: AdamW(p, fused=True), True),
        (lambda p: AdamW(p), False),
        (lambda p: torch.optim.Adam(p, fused=True), True),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True), False),
    ],
)
def test_whose_steps_skip_without_the_host(optimizer: Any, expected: bool) -> None:
    assert skips_on_device(optimizer(parameters())) == expected


def test_the_state_of_another_kind_of_optimizer() -> None:
    params = parameters()
    adamw, sgd = FSDPadaptOptimizer(AdamW(params)), FSDPadaptOptimizer(SGD(parameters(), lr=0.1))
    with pytest.raises(ValueError, match="momentum"):
        sgd.load_state_dict(adamw.state_dict())
    assert sgd.param_groups[0]["momentum"] == 0
