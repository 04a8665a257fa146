"""Containers, updates and norms inside backward, logs and scripts on the GPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchopt_ext
from torchopt_ext import FusedAdamW, ops
from torchopt_ext.__main__ import main
from torchopt_ext.containers import (
    LRSchedulersContainer,
    OptimizersContainer,
    OptimizersInBackwardContainer,
)

from .support import bits, everything, make_params, marks, set_gradients

pytestmark = marks

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(67, 130), nn.GELU(), nn.Linear(130, 65), nn.GELU(), nn.Linear(65, 5)]
    return nn.Sequential(*layers).to("cuda")


def train(model: nn.Module, step: Callable[[], object], steps: int = 4) -> list[bytes]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        data = torch.randn(9, 67, generator=generator).to("cuda")
        model(data).square().mean().backward()
        step()
    return [bits(p) for p in model.parameters()]


def stepped_by(container: Any, *schedulers: Any) -> Callable[[], None]:
    def step() -> None:
        container.step()
        for scheduler in schedulers:
            scheduler.step()
        container.zero_grad()

    return step


def test_updates_inside_backward_give_the_bits_of_a_step_after_it() -> None:
    """The bits are equal without clipping and with clipping by the norm of all gradients."""
    for norm in ({}, {"max_grad_norm": 0.01}):
        model = make_model()
        twin = copy.deepcopy(model)
        after = OptimizersContainer([model], FusedAdamW, {**SETTINGS, **norm})
        inside = OptimizersInBackwardContainer([twin], FusedAdamW, {**SETTINGS, **norm})
        assert train(model, stepped_by(after)) == train(twin, stepped_by(inside))


def test_schedules_and_checkpoints_of_containers() -> None:
    def make(model: nn.Module) -> tuple[OptimizersContainer, Any]:
        container = OptimizersContainer([model], FusedAdamW, {**SETTINGS, "max_grad_norm": 0.1})
        return container, LRSchedulersContainer(container, lambda step: 1.0 / (1 + step))

    model = make_model()
    container, schedulers = make(model)
    train(model, stepped_by(container, schedulers), 3)
    twin = copy.deepcopy(model)
    other, others = make(twin)
    other.load_state_dict(container.state_dict())
    others.load_state_dict(schedulers.state_dict())
    found = [
        train(net, stepped_by(*both), 3)
        for net, both in ((model, (container, schedulers)), (twin, (other, others)))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("to", ["cpu", "cuda"])
def test_state_moves_between_devices(to: str) -> None:
    """A state dict of one device loads on the other, and the next step gives the same bits."""
    source = "cuda" if to == "cpu" else "cpu"
    found = []
    states: Any = None
    for device in (source, to):
        params = make_params(device, torch.bfloat16)
        optimizer = FusedAdamW(params, master_weights="fp32", max_grad_norm=0.5, **SETTINGS)
        if states is None:
            set_gradients(params, 0)
            optimizer.step()
            states = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
        else:
            with torch.no_grad():
                for param, value in zip(params, states[1], strict=True):
                    param.copy_(value)
            optimizer.load_state_dict(states[0])
        set_gradients(params, 1)
        optimizer.step()
        found.append(everything(params, optimizer))
    assert found[0] == found[1]


def test_a_log_is_written_without_waiting() -> None:
    params = make_params("cuda")
    optimizer = FusedAdamW(params, max_grad_norm=0.5, track=True, **SETTINGS)
    written: list[dict[str, float]] = []
    log = torchopt_ext.log_to(written.append, optimizer, every=2)
    for step in range(6):
        set_gradients(params, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    log.remove()
    assert len(written) == 3
    assert written[-1]["optimizer/grad_norm"] == float(optimizer.control.grad_norm)


def test_a_scripted_step_gives_the_bits_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of examples/torchscript_step.py gives the optimizer's norms and parameters."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from examples.torchscript_step import Step

    params, others = make_params("cuda"), make_params("cuda")
    optimizer = FusedAdamW(others, weight_decay=0.01, max_grad_norm=0.5)
    scripted = torch.jit.script(Step(max_grad_norm=0.5, lr=1e-2).to("cuda"))
    plain = [p.detach() for p in params]
    states = [[torch.zeros_like(p) for p in plain] for _ in range(2)]
    counts = [torch.zeros((), device="cuda") for _ in plain]
    for step in range(3):
        set_gradients(params, step)
        set_gradients(others, step)
        norm = scripted(plain, [p.grad for p in params], *states, counts, step)
        factor = ops.lr_factor(step, warmup_steps=2, stable_steps=4, decay_steps=4)
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        optimizer.step()
        assert bits(norm) == bits(optimizer.control.grad_norm)
    assert [bits(p) for p in plain] == [bits(p) for p in others]


def test_a_compiled_step_gives_the_bits_of_an_eager_one() -> None:
    found = []
    for compiled in (False, True):
        params = make_params("cuda")
        optimizer = FusedAdamW(params, max_grad_norm=0.5, **SETTINGS)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for seed in range(3):
            set_gradients(params, seed)
            step()
        found.append(everything(params, optimizer))
    assert found[0] == found[1]


def test_a_training_step_is_captured_as_a_whole() -> None:
    """Forward, backward and step work in one graph, captured as in torch's documentation."""
    data = torch.randn(9, 67, device="cuda")
    found = []
    for captured in (False, True):
        model = make_model()
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = FusedAdamW(model.parameters(), lr, max_grad_norm=0.01, skip_nonfinite=True)

        def step(model: nn.Module = model, optimizer: FusedAdamW = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(data).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                model(data).square().mean().backward()
                optimizer.step()
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(3):
                step()
        found.append(everything(list(model.parameters()), optimizer))
    assert found[0] == found[1]


def test_the_command_line_names_the_gpu_and_times_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cuda"]["usable"]
    assert found["cuda"]["devices"] == [torch.cuda.get_device_name(0)]
    assert main(["bench", "--params", "1e6", "--device", "cuda"]) == 0
    assert torch.cuda.get_device_name(0) in capsys.readouterr().out
