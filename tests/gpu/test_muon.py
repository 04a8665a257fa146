"""A step of Muon and AdamW does not wait for the device, has few launches, and can be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedMuon

from .support import bits, carved, make_params, marks, on, set_gradients
from .test_host import calls_of, change, lr_tensor, step_without_waiting

pytestmark = marks

each_way = pytest.mark.parametrize("kwargs", [{}, {"track": True}], ids=["", "tracked"])


def muon(params: list[nn.Parameter], **options: Any) -> FusedMuon:
    """Returns an optimizer of Muon for the matrices and AdamW for the rest."""
    matrices = [p for p in params if p.dim() == 2 and p.numel()]
    rest = [p for p in params if p.dim() != 2 or not p.numel()]
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    return FusedMuon(groups, **{"lr": lr_tensor(), "max_grad_norm": 1.0, **options})


def warmed_up(**options: Any) -> tuple[list[nn.Parameter], FusedMuon]:
    params = make_params("cuda")
    optimizer = muon(params, **options)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


@each_way
@pytest.mark.parametrize("group", [{}, {"beta2": 0.95}], ids=["muon", "normuon"])
def test_a_step_does_not_wait_for_the_device(group: dict[str, Any], kwargs: dict[str, Any]) -> None:
    params, optimizer = warmed_up(**group, **kwargs)
    step_without_waiting(params, optimizer)


def test_a_step_has_few_launches() -> None:
    """docs/cuda.md: 23 for a batch of matrices, four for the pass before and after it."""
    shape, batch = (40, 64), 50
    params = [
        nn.Parameter(p) for p in on("cuda", carved([shape] * batch + [(7,)], torch.float32, 0))
    ]
    optimizer = muon(params)
    set_gradients(params, 0)
    optimizer.step()
    calls = calls_of(optimizer.step)
    launches = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    # Norm, decision, AdamW's two, and two for the count of matrices. A product may take two.
    assert 0 < launches <= 23 + 15 + 4 + 6, calls
    assert "cudaStreamSynchronize" not in calls


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.bfloat16, {"master_weights": "remainder"}),
        (torch.bfloat16, {"master_weights": "remainder8", "state_dtype": "int8"}),
    ],
)
def test_averages_have_the_cpus_bits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """No product enters them, and AdamW's parameters have all bits. Weights of Muon are near."""
    found = []
    for device in ("cpu", "cuda"):
        params = make_params(device, dtype)
        optimizer = muon(params, lr=0.01, **options)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        found.append((params, optimizer))
    (ours, on_cpu), (theirs, on_gpu) = found
    assert bits(on_cpu.control.grad_norm) == bits(on_gpu.control.grad_norm)
    for p, q in zip(ours, theirs, strict=True):
        of_muon = p.dim() == 2 and p.numel()
        for name, value in on_gpu.state[q].items():
            if not of_muon or not name.startswith("remainder"):
                assert bits(on_cpu.state[p][name]) == bits(value), name
        if of_muon:
            rounding = torch.finfo(dtype).eps
            torch.testing.assert_close(q.cpu(), p, rtol=rounding, atol=5e-3)
        else:
            assert bits(p) == bits(q)


@each_way
def test_a_captured_step_trains_as_eager_ones(kwargs: dict[str, Any]) -> None:
    """KellerJordan/Muon#40: Adam has ``capturable=True``, and Muon has not."""
    lr, eager_lr = lr_tensor(), lr_tensor()
    params, optimizer = warmed_up(lr=lr, **kwargs)
    eager_params, eager = warmed_up(lr=eager_lr, **kwargs)
    before = [bits(p) for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert [bits(p) for p in params] == before  # not run yet
    for step in range(5):
        change(lr, params, step)
        change(eager_lr, eager_params, step)
        graph.replay()
        eager.step()
    for param, other in zip(params, eager_params, strict=True):
        for name, value in eager.state[other].items():  # no product enters the averages
            assert bits(optimizer.state[param][name]) == bits(value)
        # Products may have other kernels in a graph. Five steps of 0.01 at most move an element.
        torch.testing.assert_close(param, other, rtol=0.0, atol=2e-3)
    assert optimizer.control.orthogonalized == eager.control.orthogonalized
    if kwargs:
        ours, theirs = optimizer.telemetry, eager.telemetry
        torch.testing.assert_close(ours.update_norms, theirs.update_norms, rtol=0.05, atol=1e-6)
        assert bits(ours.grad_norms) == bits(theirs.grad_norms)
