"""Gradient write-back, schedule and loss scale in the control block, and step counts."""

from __future__ import annotations

import copy
import io
import math
import random
import re
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdam, FusedAdamW, GradScaler, ops
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim import step as step_module

from ...support import oracle
from ...support.compare import assert_same_bits, bits, snapshot, unchanged
from ...support.problems import copied, make_params, params_of, set_gradients, train
from ...support.ways import BF16, FP16, FP32, FP64

SCHEDULE: dict[str, Any] = {"warmup_steps": 4, "stable_steps": 6, "decay_steps": 12}

# ---- write_back_gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16, None], ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"maximize": True, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0**6])
def test_gradients_become_unscaled_and_clipped(
    dtype: torch.dtype | None, kwargs: dict[str, Any], scale: float | None
) -> None:
    """The step stores each gradient times the factor of docs/numerics.md section 4, computed in the
    compute type and rounded once, without sign and weight decay. The update does not change.

    None stands for bf16 parameters with fp32 gradients and masters.
    """
    shapes = ((3, 4), (7,), (), (2, 1031), (0, 3))
    runs = []
    for write_back in (True, False):
        params = make_params(shapes, dtype or BF16)
        for p in params:
            p.grad_dtype = dtype or FP32
        more = {"write_back_gradients": write_back, "max_grad_norm": 0.7, **kwargs}
        more |= {} if dtype else {"master_weights": "remainder"}
        runs.append((params, FusedAdam(params, **more)))
    (params, ours), (others, plain) = runs
    for step in range(3):
        set_gradients(params, others, seed=step, scale=scale or 1.0)
        before = [p.grad.clone() for p in params]
        versions = [p.grad._version for p in (*params, *others)]
        for optimizer in (ours, plain):
            if scale is not None:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
            optimizer.step()
        assert 0 < float(ours.control.clip_factor) < 1
        wide = FP64 if dtype == FP64 else FP32
        factor = ours.control.grad_factor.to(wide)
        expected = [(g.to(wide) * factor).to(g.dtype) for g in before]
        assert_same_bits([p.grad for p in params], expected)
        assert_same_bits([q.grad for q in others], before)
        written = [p.grad._version for p in (*params, *others)]
        changed = [new > old for new, old in zip(written, versions, strict=True)]
        assert changed == [True] * len(params) + [False] * len(others)
        assert snapshot(ours) == snapshot(plain)
    norm = torch.stack([p.grad.double().norm() for p in params]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.7, dtype=FP64), rtol=2e-3, atol=0)
    ours.skip_nonfinite = True
    params[3].grad[1, 3] = math.inf
    with unchanged(*(p.grad for p in params)):  # a skipped step leaves gradients
        ours.step()


# ---- schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("min_factor", [0.0, 0.1])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedule(decay_type: str, generation: int, min_factor: float, tensor_lr: bool) -> None:
    """The factor counts steps that were made, and multiplies each group's learning rate."""
    schedule = {**SCHEDULE, "decay_type": decay_type, "generation": generation,
                "min_factor": min_factor}  # fmt: skip
    lrs = [0.125, 0.25, 0.5, 0.75]  # exact in float32
    ours, plain = (
        FusedAdamW([{"params": [p], "lr": torch.tensor(lr) if tensor_lr else lr}
                    for p, lr in zip(make_params(), lrs, strict=True)], skip_nonfinite=True)
        for _ in range(2)
    )  # fmt: skip
    ours.set_schedule(**schedule)
    factors: list[float] = []
    for seed in range(36):
        set_gradients(params_of(ours), params_of(plain), seed=seed)
        if seed % 6 == 1:
            params_of(ours)[2].grad.fill_(math.nan)
            ours.step()
            continue
        ours.step()
        factors.append(float(ours.control.lr_factor))
        assert factors[-1] == oracle.lr_factor(len(factors) - 1, **schedule)
        for group, lr in zip(plain.param_groups, lrs, strict=True):
            group["lr"] = lr * factors[-1]
        plain.step()
        assert_same_bits(params_of(ours), params_of(plain))
        assert [float(group["lr"]) for group in ours.param_groups] == lrs
    assert len(set(factors)) > 12 and factors[-1] == min_factor
    assert float(ours.control.skipped_steps) == 6


@pytest.mark.parametrize("endless", SCHEDULE)
def test_a_part_of_a_schedule_may_be_endless(endless: str) -> None:
    """Any part may be sys.maxsize, which rounds up to 2**63 as a double: above int64."""
    optimizer = FusedAdamW(make_params())
    lengths = {**SCHEDULE, "warmup_steps": 1, "stable_steps": 0, endless: sys.maxsize}
    optimizer.set_schedule(**lengths)
    train(optimizer, range(4))
    assert float(optimizer.control.lr_factor) == pytest.approx(
        {"warmup_steps": 0.0, "stable_steps": 1.0, "decay_steps": 1.0}[endless], abs=1e-12
    )


def test_a_checkpoint_does_not_decide_settings() -> None:
    """A loaded checkpoint does not override the clipping threshold or the schedule."""
    first, second = (FusedAdamW(make_params(), max_grad_norm=norm) for norm in (1.0, 0.25))
    first.set_schedule(**SCHEDULE)
    second.set_schedule(**{**SCHEDULE, "warmup_steps": 9})
    second.load_state_dict(first.state_dict())
    assert second.max_grad_norm == float(second.control.max_grad_norm) == 0.25
    assert float(second.control.warmup_steps) == 9


@pytest.mark.parametrize("kwargs", [{}, {"max_grad_norm": 0.5}], ids=["apart", "joint"])
def test_schedules_of_several_optimizers(kwargs: dict[str, Any]) -> None:
    parts = [nn.Linear(3, 4), nn.Linear(4, 2)]
    container = OptimizersContainer(parts, FusedAdamW, {"lr": 0.1, **kwargs})
    schedules = [{**SCHEDULE, "warmup_steps": 4 + i} for i in range(2)]
    for optimizer, schedule in zip(container.optimizers, schedules, strict=True):
        optimizer.set_schedule(**schedule)
    for step in range(3):
        set_gradients(p for part in parts for p in part.parameters())
        container.step()
        for optimizer, schedule in zip(container.optimizers, schedules, strict=True):
            assert float(optimizer.control.lr_factor) == oracle.lr_factor(step, **schedule)


@pytest.mark.parametrize("way", ["float", "tensor", "schedule"])
def test_a_capture_says_that_a_float_lr_stays(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "is_captured", lambda: True)
    optimizer = FusedAdamW(make_params(), lr=torch.tensor(0.25) if way == "tensor" else 0.25)
    if way == "schedule":
        optimizer.set_schedule(**SCHEDULE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, [0])
    warned = ["keeps the learning rates [0.25]" in str(w.message) for w in caught]
    assert warned == [True] * (way == "float")


# ---- loss scale, and gradient scalers ------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"hysteresis": 2}, {"growth_interval": 1, "max_scale": 64.0, "min_scale": 1.0}],
    ids=str,
)
def test_the_loss_scale_follows_overflows(settings: dict[str, Any]) -> None:
    """Good steps are those of a run without a scale, and a resumed run has the scale."""
    settings = {"growth_interval": 2} | settings
    optimizer, plain = FusedAdamW(make_params(), lr=0.1), FusedAdamW(make_params(), lr=0.1)
    optimizer.set_loss_scale(8.0, **settings)
    unlimited = {"max_scale": 0.0, "min_scale": 0.0}
    expected = oracle.LossScale(8.0, **unlimited | settings)
    overflows = random.Random(1)
    for seed in range(30):
        overflow = overflows.random() < 0.4
        train(optimizer, [seed], scale=math.inf if overflow else expected.scale)
        if not overflow:
            train(plain, [seed])
        assert float(optimizer.control.loss_scale) == expected.update(overflow)
    assert_same_bits(params_of(optimizer), params_of(plain))
    resumed = FusedAdamW(make_params())
    resumed.set_loss_scale(1.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert float(resumed.control.loss_scale) == expected.scale
    # Nobody scales for an optimizer that has set no scale.
    without = copied(optimizer, max_grad_norm=1.0)
    train(without, [99])
    assert without.control.loss_scale == 1.0


def test_a_loss_scale_that_the_checkpoint_lacks_begins_anew() -> None:
    first, second = FusedAdamW(make_params()), FusedAdamW(make_params())
    for optimizer in (first, second):
        optimizer.set_schedule(**SCHEDULE)
    train(first, range(2))
    second.set_loss_scale(1024.0)
    with pytest.warns(UserWarning, match="without a loss scale: it begins anew, with 1024"):
        second.load_state_dict(first.state_dict())
    assert float(second.control.loss_scale) == 1024.0
    assert float(second.control.steps) == 2


def scaled_step(scaler: GradScaler, optimizer: Any, value: float = 0.5) -> None:
    for p in params_of(optimizer):
        p.grad = torch.full_like(p, value)
    scaler.scale(torch.zeros(1))
    scaler.step(optimizer)


@pytest.mark.parametrize("change", ["deepcopy", "skip_nonfinite", "nothing"])
def test_what_a_scaler_asks_for_holds_in_its_steps_only(change: str) -> None:
    optimizer, scaler = FusedAdamW(make_params(), max_grad_norm=1.0), GradScaler("cpu")
    scaled_step(scaler, optimizer)
    scaler.update()
    if change == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    elif change == "skip_nonfinite":
        optimizer.skip_nonfinite = False
        with unchanged(*params_of(optimizer)):
            scaled_step(scaler, optimizer, math.inf)
    train(optimizer, [0], scale=math.nan)
    assert optimizer.control.skip == 0
    assert all(p.isnan().all() for p in params_of(optimizer))


def test_a_step_before_update_does_not_hide_an_overflow() -> None:
    optimizer, scaler = FusedAdamW(make_params()), GradScaler("cpu", init_scale=2.0)
    scaled_step(scaler, optimizer, math.inf)
    train(optimizer, [0])
    scaler.update()
    assert scaler.get_scale() == 1.0


def test_an_optimizer_without_gradients_knows_the_joint_decision() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    container = OptimizersContainer(parts, FusedAdamW, {"max_grad_norm": 1.0})
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(1))
    for p in parts[1].parameters():
        p.grad = torch.full_like(p, math.inf)
    scaler.step(container)
    scaler.update()
    assert [float(opt.control.found_inf) for opt in container.optimizers] == [1.0, 1.0]
    assert scaler.get_scale() == 1.0


# ---- step counts, and the view of the control block ----------------------------------------------


def test_steps_are_views_into_one_vector_and_saved_apart() -> None:
    params = make_params([(2,)] * 40)
    optimizer = FusedAdamW(params)
    train(optimizer, range(3))
    steps = [optimizer.state[p]["step"] for p in params]
    assert len({s.untyped_storage().data_ptr() for s in steps}) == 1
    assert [s.data_ptr() - steps[0].data_ptr() for s in steps] == [4 * i for i in range(40)]
    assert all(s.shape == () and s.dtype == FP32 and s == 3 for s in steps)
    saved = optimizer.state_dict()
    memory = {s.untyped_storage().data_ptr() for s in steps}
    for entry in saved["state"].values():
        storage = entry["step"].untyped_storage()
        assert storage.nbytes() == 4 and storage.data_ptr() not in memory
        memory.add(storage.data_ptr())
    optimizer.step()
    assert all(entry["step"] == 3 for entry in saved["state"].values())
    theirs = torch.optim.AdamW(make_params([(2,)] * 40))
    train(theirs, [0])
    sizes = []
    for state_dict in (saved, theirs.state_dict()):
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        sizes.append(buffer.tell())
    assert sizes[0] < 1.1 * sizes[1]
    container = OptimizersContainer([nn.Linear(3, 4)], FusedAdamW, {"lr": 0.1})
    set_gradients(params_of(container.optimizers[0]))
    container.step()
    steps = [v for key, v in container.state_dict().items() if key.endswith(".step")]
    assert [step.untyped_storage().nbytes() for step in steps] == [4] * 2


def test_reading_control() -> None:
    optimizer = FusedAdamW(make_params(), max_grad_norm=0.5)
    with torch.inference_mode():
        assert optimizer.control.steps == 0
    train(optimizer, [0])
    control, params = optimizer.control, params_of(optimizer)
    norm = torch.stack([p.grad.double().square().sum() for p in params]).sum().sqrt()
    torch.testing.assert_close(control.grad_norm, norm, rtol=1e-14, atol=0)
    assert set(ops.CONTROL_FIELDS) <= set(dir(control))
    fields = ", ".join(("steps=1", "skipped_steps=0", "skip=0", "grad_norm=.*", "clip_factor=.*"))
    assert re.fullmatch(rf"ControlView\({fields}\)", repr(control))
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = control.no_such_field
    norms, steps = [], []
    for _ in range(2):
        norms.append(control.grad_norm)
        steps.append(control.steps)
        params[0].grad.mul_(2)
        optimizer.step()
    assert float(norms[0]) < float(norms[1]) < float(control.grad_norm), "copies, as documented"
    assert [float(s) for s in (*steps, control.steps)] == [1, 2, 3]


def test_state_that_belongs_to_no_parameter_is_loaded_as_by_torch() -> None:
    for cls in (torch.optim.AdamW, FusedAdamW):
        optimizer: Any = cls(make_params([(2,)]))
        optimizer.state["epoch"] = 5
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["epoch"] == 5


def test_a_load_keeps_the_count_of_copied_gradients() -> None:
    (p,) = make_params([(2, 3)])
    optimizer = FusedAdamW([p])
    p.grad = torch.ones(3, 2).t()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.gradients_copied == 1
    assert bits(p) != bits(make_params([(2, 3)])[0])


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", FP32), ("float32", FP32), ("bf16", BF16), ("bfloat16", BF16)]
)
def test_state_dtype_by_name(name: Any, dtype: torch.dtype) -> None:
    optimizer = FusedAdamW(make_params(), state_dtype=name)
    assert optimizer.options == FusedAdamW(make_params(), state_dtype=dtype).options
    train(optimizer, [0])
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {dtype}
