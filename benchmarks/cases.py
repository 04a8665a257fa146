"""Cases of AdamW in float32: ours and torch's, by operation, with the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Case, Group
from roofline import OBJECTS, in_turn, loop_case, objects_case
from shapes import Shapes
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD, GradScaler, digest

Calls = dict[str, Callable[[], object]]

OURS, FUSED, FOREACH = "torchopt_ext", "torch fused", "torch foreach"
STEP, CLIP, SCALER = "step", "clip+step", "scaler+clip+step"
AVERAGED, TORCH_AVERAGED = f"{OURS}, average", f"{FUSED} + AveragedModel"
MAX_NORM = 1.0
# With any other scale, unscaling the same gradients repeatedly would end in subnormals, which are
# slow. The growth interval keeps the scale from growing.
SCALER_SETTINGS: dict[str, Any] = {"init_scale": 1.0, "growth_interval": 1_000_000}

# Bytes read and written per float32 parameter. A fused step reads p, g, m, v and writes p, m, v.
# The foreach step makes eight passes: decay 8, lerp of m 12, v*beta2 8, addcmul 12, sqrt 8, div 8,
# add eps 8, addcdiv 16. clip_grad_norm_ reads the gradients, then reads and writes them.
# GradScaler.unscale_ reads and writes the gradients. Ours reads the gradients once for both.
FUSED_STEP, FOREACH_STEP, TORCH_CLIP, TORCH_UNSCALE, NORM = 28, 80, 12, 8, 4
BYTES = {
    (OURS, STEP): FUSED_STEP,
    (OURS, CLIP): NORM + FUSED_STEP,
    (OURS, SCALER): NORM + FUSED_STEP,
    (FUSED, STEP): FUSED_STEP,
    (FUSED, CLIP): TORCH_CLIP + FUSED_STEP,
    (FUSED, SCALER): TORCH_UNSCALE + TORCH_CLIP + FUSED_STEP,
    (FOREACH, STEP): FOREACH_STEP,
    (FOREACH, CLIP): TORCH_CLIP + FOREACH_STEP,
}
READ, UPDATE = "read_fp32", "update_fp32"
ROOFLINE = {
    STEP: f"{OBJECTS} + {UPDATE}",
    CLIP: f"{OBJECTS} + {READ} + {UPDATE}",
    SCALER: f"{OBJECTS} + {READ} + {UPDATE}",
}


def gradients_of(shapes: Shapes, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=dtype, device=device) for s in shapes]


def params_with(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    """Returns parameters whose ``grad`` are the given tensors, not copies.

    After the first time, clipping the same gradients does not change them.
    """
    params = [nn.Parameter(torch.full_like(gradient, 0.02)) for gradient in gradients]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    return params


def build_fp32(
    name: str,
    shapes: Shapes,
    implementations: tuple[str, ...] = (OURS, FUSED, FOREACH),
    operations: tuple[str, ...] = (STEP, CLIP, SCALER),
    flushed: bool = False,
    loops: bool = True,
) -> Group:
    """Builds every implementation and operation. Each implementation has its own parameters."""
    gradients = gradients_of(shapes, torch.float32, "cpu")
    cases = [
        case
        for implementation in implementations
        for case in fp32_cases(implementation, gradients, "cpu", operations, loops)
    ]
    return Group(name, shapes, cases, baseline=FUSED, flushed=flushed)


def fp32_cases(
    implementation: str,
    gradients: list[torch.Tensor],
    device: str,
    operations: tuple[str, ...],
    loops: bool = True,
) -> list[Case]:
    """Returns one implementation's operations and, for ours on the CPU, the roofline's loops."""
    params = params_with(gradients)
    plain: list[Case] = []
    if implementation == OURS:
        optimizer = FusedAdamW(params)
        calls = our_calls(optimizer, device)
        if loops and device == "cpu":
            plain = fp32_loops(optimizer)
    else:
        calls = torch_calls(params, implementation, device)
    return [
        Case(
            implementation,
            operation,
            calls[operation],
            BYTES[implementation, operation],
            ROOFLINE[operation] if implementation == OURS else None,
        )
        for operation in operations
        if (implementation, operation) in BYTES
    ] + plain


def fp32_loops(optimizer: FusedAdamW) -> list[Case]:
    """Returns the roofline's loops over the optimizer's own tensors. They keep the values."""
    optimizer.step()  # creates the state
    params = optimizer.param_groups[0]["params"]
    gradients = [p.grad for p in params]
    state = [optimizer.state[p] for p in params]
    moments = [[entry[name] for entry in state] for name in ("exp_avg", "exp_avg_sq")]
    objects = objects_case(gradients, params, *moments, [entry["step"] for entry in state])
    read, update = loop_case(READ, gradients), loop_case(UPDATE, gradients, params, *moments)
    return [objects, update, in_turn(objects, update), in_turn(objects, read, update)]


def ready_scaler(scaler: torch.amp.GradScaler, device: str) -> torch.amp.GradScaler:
    """Returns the scaler after it scaled a loss, which creates its tensors."""
    scaler.scale(torch.zeros((), device=device))
    return scaler


def our_calls(optimizer: FusedAdamW, device: str) -> Calls:
    scaler = ready_scaler(GradScaler(device, **SCALER_SETTINGS), device)

    def step(max_norm: float | None, stepped: Callable[[], object] = optimizer.step) -> None:
        if optimizer.max_grad_norm != max_norm:  # only in the call before the timed calls
            optimizer.max_grad_norm = max_norm
        stepped()

    def scaled_step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return {
        STEP: partial(step, None),
        CLIP: partial(step, MAX_NORM),
        SCALER: partial(step, MAX_NORM, scaled_step),
    }


def torch_calls(params: list[nn.Parameter], implementation: str, device: str) -> Calls:
    optimizer = torch.optim.AdamW(params, **{implementation.removeprefix("torch "): True})
    scaler = ready_scaler(torch.amp.GradScaler(device, **SCALER_SETTINGS), device)

    def scaled_step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return {
        STEP: optimizer.step,
        CLIP: partial(clip_and_step, params, optimizer),
        SCALER: scaled_step,
    }


def clip_and_step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(params, MAX_NORM)
    optimizer.step()


TRACKED = {
    OURS: (),
    f"{OURS}, norms": ("norms",),
    f"{OURS}, lost updates": ("lost_updates",),
    f"{OURS}, both": ("norms", "lost_updates"),
}


def build_tracked(name: str, shapes: Shapes) -> Group:
    """Builds steps that track or that a digest follows, and the same step alone."""
    gradients = gradients_of(shapes, torch.float32, "cpu")
    cases = []
    for implementation, track in TRACKED.items():
        optimizer = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM, track=track)
        cases.append(Case(implementation, CLIP, optimizer.step, BYTES[OURS, CLIP]))
    last = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM)

    def step_and_digest() -> None:
        last.step()
        digest(last)

    cases.append(Case(f"{OURS}, then a digest", CLIP, step_and_digest, BYTES[OURS, CLIP] + 12))
    return Group(name, shapes, cases, baseline=OURS)


def build_averaged(name: str, shapes: Shapes) -> Group:
    """Builds steps that keep a moving average of the weights, and ours alone."""
    gradients = gradients_of(shapes, torch.float32, "cpu")
    alone = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM)
    ours = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM, ema_decay=0.999)
    params = params_with(gradients)
    clipped = partial(clip_and_step, params, torch.optim.AdamW(params, fused=True))
    model = nn.ParameterList(params)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def step_and_average() -> None:
        clipped()
        average.update_parameters(model)

    cases = [
        Case(OURS, CLIP, alone.step, BYTES[OURS, CLIP]),
        Case(AVERAGED, CLIP, ours.step, BYTES[OURS, CLIP] + 8),
        Case(TORCH_AVERAGED, CLIP, step_and_average, BYTES[FUSED, CLIP] + 12),
    ]
    return Group(name, shapes, cases, baseline=TORCH_AVERAGED)


# Ours, torch's class if there is one, options, and states.
ALGORITHMS: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
    "Lion": (FusedLion, None, {}, ("exp_avg",)),
    "SGD with momentum": (FusedSGD, torch.optim.SGD, {"momentum": 0.9}, ("momentum_buffer",)),
    "SGD": (FusedSGD, torch.optim.SGD, {}, ()),
}


def build_algorithms(name: str, shapes: Shapes) -> Group:
    """Builds clipped steps of the other algorithms, and torch's where torch has one."""
    gradients = gradients_of(shapes, torch.float32, "cpu")
    cases: list[Case] = []
    for algorithm, (kind, stock, options, states) in ALGORITHMS.items():
        params = params_with(gradients)
        ours = kind(params, max_grad_norm=MAX_NORM, lr=1e-3, **options)
        ours.step()  # creates the state
        held = [[ours.state[p][state] for p in params] for state in states]
        update = loop_case(f"{UPDATE}_{len(states)}", gradients, params, *held)
        plain = in_turn(loop_case(READ, gradients), update)
        moved, operation = plain.bytes_per_parameter, f"{CLIP}, {algorithm}"
        cases.append(Case(OURS, operation, ours.step, moved, plain.operation))
        if stock is not None:
            theirs = params_with(gradients)
            call = partial(clip_and_step, theirs, stock(theirs, lr=1e-3, fused=True, **options))
            cases.append(Case(FUSED, operation, call, moved and moved - NORM + TORCH_CLIP))
        if plain.operation not in {case.operation for case in cases}:
            cases.append(plain)
    return Group(name, shapes, cases, baseline=FUSED)
