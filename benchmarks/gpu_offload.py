"""The section of gpu_sections.py on states in memory of the host: links, steps, hidden time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cases import CLIP, MAX_NORM, OURS, params_with
from harness import Row
from shapes import BILLION
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.cli.bench_offload import transfers

# Bytes of states that lie on the host, for each parameter, and the options that hold them.
WAYS: dict[str, tuple[float, torch.dtype, dict[str, Any]]] = {
    "fp32 masters": (12, torch.bfloat16, {"master_weights": "fp32"}),
    "remainder": (10, torch.bfloat16, {"master_weights": "remainder"}),
    "remainder8, int8": (
        3, torch.bfloat16, {"master_weights": "remainder8", "state_dtype": "int8"}
    ),
    "fp32": (8, torch.float32, {}),
}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    f"{OURS}, on the GPU": {},
    f"{OURS}, mapped": {"state_device": "cpu"},
    f"{OURS}, staged": {"state_device": "cpu", "offload_step": "staged"},
    f"{OURS}, on the host": {"state_device": "cpu", "offload_step": "host"},
}


def offload(bench: Any) -> Iterator[Row]:
    """Times copies and mapped accesses, steps by place, and a forward that hides them."""
    measures, moved = transfers(torch.device(bench.device))
    for label, measure in measures.items():
        measure()
        times = [1e3 * measure() for _ in range(bench.samples)]
        yield bench.row_of("link and host", label, "torch", moved[label], times, times, times)
    count = sum(torch.Size(shape).numel() for shape in bench.sets[BILLION])
    for name, (states, dtype, options) in WAYS.items():
        for place, where in PLACES.items():
            gradients = bench.gradients(BILLION, dtype)
            params = params_with(gradients)
            optimizer = FusedAdamW(params, max_grad_norm=MAX_NORM, **options, **where)
            crossing = 2 * states * count if where else None
            yield bench.row(f"{BILLION}, {name}", CLIP, place, crossing, optimizer.step)
            del optimizer, params, gradients
    yield from _hidden(bench)


def _hidden(bench: Any) -> Iterator[Row]:
    """Times forward of 16 layers and the step whose end it hides, by number of tokens."""
    width, layers = (4096, 16) if bench.device == "cuda" else (64, 2)
    for tokens in (4096, 16384, 65536) if bench.device == "cuda" else (8,):
        for place in ("no step", "on the GPU", "mapped", "mapped, overlapped"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            model = model.to(bench.device, torch.bfloat16)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            where = {"state_device": "cpu"} if place.startswith("mapped") else {}
            _, _, options = WAYS["remainder"]
            optimizer = FusedAdamW(model.parameters(), max_grad_norm=MAX_NORM, **options, **where)
            if place == "mapped, overlapped":
                optimizer.overlap_forward(*model)
            x = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16)

            @torch.no_grad()
            def call(model: Any = model, x: Any = x, step: Any = optimizer.step) -> None:
                step()
                model(x)

            forward = torch.no_grad()(partial(model, x))
            timed = forward if place == "no step" else call
            name = f"{layers} layers of {width}, {tokens:,} tokens"
            yield bench.row(name, "step, then forward", place, None, timed)
