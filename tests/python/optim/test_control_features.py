"""Gradient write-back, schedules in the control block, and step counters in one vector."""

from __future__ import annotations

import copy
import io
import math
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, ops
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim import fused_step
from torchopt_ext.optim import step as step_module
from torchopt_ext.state.entries import CONTROL_KEY

from .subject import (
    OURS,
    TORCH,
    assert_same_bits,
    bits,
    make_params,
    set_gradients,
    snapshot,
    through_file,
    train,
)

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# ---- write_back_gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16], ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"maximize": True, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0**6])
def test_gradients_become_unscaled_and_clipped(
    dtype: torch.dtype, kwargs: dict[str, Any], scale: float | None
) -> None:
    """The step stores each gradient times the factor of docs/numerics.md section 4, computed in the
    compute type and rounded once, without sign and weight decay. The update does not change."""
    shapes = ((3, 4), (7,), (), (2, 1031), (0, 3))
    params, others = make_params(shapes, dtype), make_params(shapes, dtype)
    ours = OURS["Adam"](params, max_grad_norm=0.7, write_back_gradients=True, **kwargs)
    plain = OURS["Adam"](others, max_grad_norm=0.7, **kwargs)
    for step in range(3):
        set_gradients(params, others, seed=step, scale=scale or 1.0)
        given = [p.grad.clone() for p in params]
        versions = [p.grad._version for p in params]
        for optimizer in (ours, plain):
            if scale is not None:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
            optimizer.step()
        assert 0 < float(ours.control.clip_factor) < 1
        wide = FP64 if dtype == FP64 else FP32
        factor = ours.control.grad_factor.to(wide)
        assert_same_bits([p.grad for p in params], [(g.to(wide) * factor).to(dtype) for g in given])
        assert_same_bits([q.grad for q in others], given)
        for p, version in zip(params, versions, strict=True):
            assert p.grad._version > version
        assert snapshot(ours) == snapshot(plain)
    norm = torch.stack([p.grad.double().norm() for p in params]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.7, dtype=FP64), rtol=2e-3, atol=0)


def test_a_float32_gradient_of_a_bf16_parameter_is_written_back() -> None:
    p = nn.Parameter(torch.ones(600, dtype=BF16))
    p.grad_dtype = FP32
    p.grad = torch.randn(600, generator=torch.Generator().manual_seed(0))
    given = p.grad.clone()
    optimizer = OURS["AdamW"](
        [p], max_grad_norm=0.1, master_weights="remainder", write_back_gradients=True
    )
    optimizer.step()
    assert_same_bits([p.grad], [given * optimizer.control.grad_factor.float()])


@pytest.mark.parametrize("which", ["transposed", "strided", "expanded"])
def test_gradients_that_would_be_copied_are_refused(which: str) -> None:
    """A gradient that the step would copy cannot be written back; nothing changes."""
    params = make_params(((4, 6), (6, 6)))
    optimizer = OURS["AdamW"](params, max_grad_norm=0.1, write_back_gradients=True)
    set_gradients(params)
    optimizer.step()
    set_gradients(params, seed=1)
    params[1].grad = {
        "transposed": torch.randn(6, 6).t(),
        "strided": torch.randn(6, 12)[:, ::2],
        "expanded": torch.randn(6, 1).expand(6, 6),
    }[which]
    before = snapshot(optimizer), [bits(p.grad) for p in params]
    with pytest.raises(RuntimeError, match=r"gradient 1 has strides"):
        optimizer.step()
    assert (snapshot(optimizer), [bits(p.grad) for p in params]) == before
    params[1].grad = params[1].grad.contiguous()
    optimizer.step()
    assert snapshot(optimizer) != before[0]


def test_gradients_of_a_skipped_step_stay() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](
        params, max_grad_norm=0.1, skip_nonfinite=True, write_back_gradients=True
    )
    set_gradients(params)
    params[1].grad[3] = math.inf
    given = [bits(p.grad) for p in params]
    optimizer.step()
    assert [bits(p.grad) for p in params] == given


# ---- capture -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["float", "tensor", "schedule"])
def test_a_capture_says_that_a_float_lr_stays(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "is_captured", lambda: True)
    params = make_params()
    optimizer = OURS["AdamW"](params, lr=torch.tensor(0.25) if way == "tensor" else 0.25)
    if way == "schedule":
        optimizer.set_schedule(**SCHEDULE)
    set_gradients(params)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["keeps the learning rates [0.25]" in str(w.message) for w in found] == [True] * (
        way == "float"
    )


# ---- set_schedule --------------------------------------------------------------------------------

SCHEDULE: dict[str, Any] = {"warmup_steps": 4, "stable_steps": 6, "decay_steps": 12}


def with_lambda_lr(
    params: list[nn.Parameter], lrs: list[float], schedule: dict[str, Any], **kwargs: Any
) -> tuple[Any, Any]:
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, lrs, strict=True)]
    optimizer = OURS["AdamW"](groups, **kwargs)
    factor = lambda step: ops.lr_factor(step, **schedule)  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("min_factor", [0.0, 0.1])
def test_schedule_is_lambda_lr(decay_type: str, generation: int, min_factor: float) -> None:
    """30 steps match LambdaLR past the schedule's end, for groups with different learning rates."""
    schedule = {**SCHEDULE, "decay_type": decay_type, "generation": generation,
                "min_factor": min_factor}  # fmt: skip
    mine, theirs, lrs = make_params(), make_params(), [0.1, 0.02, 0.03, 0.7]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(mine, lrs, strict=True)]
    ours = OURS["AdamW"](groups)
    ours.set_schedule(**schedule)
    reference, scheduler = with_lambda_lr(theirs, lrs, schedule)
    factors = []
    for step in range(30):
        set_gradients(mine, theirs, seed=step)
        ours.step()
        reference.step()
        factors.append(float(ours.control.lr_factor))
        assert factors[-1] == ops.lr_factor(step, **schedule)
        assert [group["lr"] for group in ours.param_groups] == lrs
        assert_same_bits(mine, theirs)
        scheduler.step()
    assert len(set(factors)) > 12
    assert factors[-1] == min_factor


@pytest.mark.parametrize("endless", SCHEDULE)
def test_a_part_of_a_schedule_may_be_endless(endless: str) -> None:
    """Any part may be sys.maxsize, which rounds up to 2**63 as a double: above int64."""
    params = make_params()
    optimizer = OURS["AdamW"](params)
    optimizer.set_schedule(
        **{**SCHEDULE, "warmup_steps": 1, "stable_steps": 0, endless: sys.maxsize}
    )
    for _ in range(4):
        set_gradients(params)
        optimizer.step()
    assert float(optimizer.control.lr_factor) == pytest.approx(
        {"warmup_steps": 0.0, "stable_steps": 1.0, "decay_steps": 1.0}[endless], abs=1e-12
    )


def test_a_skipped_step_does_not_advance_the_schedule() -> None:
    schedule = {**SCHEDULE, "decay_type": "cosine"}
    mine, theirs = make_params(), make_params()
    ours = OURS["AdamW"](mine, lr=0.1, skip_nonfinite=True)
    ours.set_schedule(**schedule)
    reference, scheduler = with_lambda_lr(theirs, [0.1] * 4, schedule)
    for step in range(20):
        set_gradients(mine, theirs, seed=step)
        if step % 3 == 1:
            mine[2].grad.fill_(math.nan)
            ours.step()
            continue
        ours.step()
        reference.step()
        scheduler.step()
        assert_same_bits(mine, theirs)
    assert float(ours.control.skipped_steps) == 7


def test_a_copy_goes_on_with_the_schedule() -> None:
    """A copy resumes at the same place, skipped steps included; ../statedict tests state dicts."""
    params = make_params()
    optimizer = OURS["AdamW"](params, lr=0.1, skip_nonfinite=True)
    optimizer.set_schedule(**SCHEDULE)
    for step in range(9):
        set_gradients(params, seed=step, scale=math.inf if step == 3 else 1.0)
        optimizer.step()
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, copied):
        for step in range(9, 15):
            set_gradients(each.param_groups[0]["params"], seed=step)
            each.step()
    assert snapshot(copied) == snapshot(optimizer)
    assert float(copied.control.lr_factor) == float(optimizer.control.lr_factor) < 1
    assert (float(copied.control.steps), float(copied.control.skipped_steps)) == (15, 1)


def test_a_checkpoint_does_not_decide_settings() -> None:
    """A loaded checkpoint does not override the clipping threshold or the schedule."""
    params = make_params()
    first = OURS["AdamW"](params, max_grad_norm=1.0)
    first.set_schedule(**SCHEDULE)
    second = OURS["AdamW"](make_params(), max_grad_norm=0.25)
    second.set_schedule(**{**SCHEDULE, "warmup_steps": 9})
    second.load_state_dict(first.state_dict())
    assert second.max_grad_norm == 0.25
    assert float(second.control.max_grad_norm) == 0.25
    assert float(second.control.warmup_steps) == 9


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"steps": "many"}, "of 0 or more"),
        ({"steps": None}, "of 0 or more"),
        ({"loss_scale": -1.0}, "of 0 or more"),
        ([1.0], "a dict"),
        (3.0, "a dict"),
    ],
    ids=str,
)
def test_a_wrong_control_entry_is_refused_before_anything_changes(
    wrong: Any, expected: str
) -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params, lr=0.1)
    optimizer.set_schedule(**SCHEDULE)
    set_gradients(params)
    optimizer.step()
    saved = through_file(optimizer.state_dict())
    optimizer.step()
    before, steps = snapshot(optimizer), float(optimizer.control.steps)
    saved["state"][0][CONTROL_KEY] = wrong
    with pytest.raises(ValueError, match=rf"torchopt_ext\.control.*{expected}"):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before
    assert float(optimizer.control.steps) == steps


def test_a_loss_scale_that_the_checkpoint_lacks_begins_anew() -> None:
    _, first = stepped()
    first.set_schedule(**SCHEDULE)
    first.step()
    _, second = stepped()
    second.set_schedule(**SCHEDULE)
    second.set_loss_scale(1024.0)
    with pytest.warns(UserWarning, match="without a loss scale: it begins anew, with 1024"):
        second.load_state_dict(first.state_dict())
    assert float(second.control.loss_scale) == 1024.0
    assert float(second.control.steps) == 2


def test_gradients_that_nobody_scales_are_not_divided_by_a_loaded_loss_scale() -> None:
    _, saved = stepped(4)
    saved.set_loss_scale(65536.0)
    (param, *_), optimizer = stepped(4)
    optimizer.max_grad_norm = 1.0
    optimizer.load_state_dict(saved.state_dict())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = None
    param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    assert optimizer.control.loss_scale == 1.0
    assert optimizer.control.grad_norm == 2.0 * param.numel() ** 0.5


def test_state_that_belongs_to_no_parameter_is_loaded_as_by_torch() -> None:
    for cls in (torch.optim.AdamW, OURS["AdamW"]):
        optimizer = cls([nn.Parameter(torch.ones(2))])
        optimizer.state["epoch"] = 5
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["epoch"] == 5


def test_the_extra_key_is_there_only_when_used_and_torch_ignores_it() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params, max_grad_norm=1.0, skip_nonfinite=True, lr=1.0)
    set_gradients(params)
    optimizer.step()
    assert CONTROL_KEY not in optimizer.state_dict()["state"][0]
    optimizer.set_schedule(**SCHEDULE)
    saved = optimizer.state_dict()
    assert [i for i, entry in saved["state"].items() if CONTROL_KEY in entry] == [0]
    others = make_params()
    theirs = TORCH["AdamW"](others, lr=1e-3, fused=True)
    theirs.load_state_dict(saved)
    assert theirs.param_groups[0]["lr"] == 1.0
    set_gradients(others)
    theirs.step()


def test_a_schedule_set_late_continues_from_the_steps_done() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params)
    for step in range(13):
        if step == 6:
            optimizer.set_schedule(**SCHEDULE)
        set_gradients(params, seed=step)
        optimizer.step()
        expected = ops.lr_factor(step, **SCHEDULE) if step >= 6 else 1.0
        assert float(optimizer.control.lr_factor) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup_steps": -1},
        {"decay_type": "quadratic"},
        {"min_factor": 2.0},
        {"generation": 3},
    ],
    ids=str,
)
def test_a_refused_schedule_changes_nothing(wrong: dict[str, Any]) -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params)
    set_gradients(params)
    optimizer.step()
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.set_schedule(**{**SCHEDULE, **wrong})
    assert not any(CONTROL_KEY in entry for entry in optimizer.state_dict()["state"].values())
    optimizer.step()
    assert float(optimizer.control.lr_factor) == 1
    assert float(optimizer.control.scheduled) == 0


@pytest.mark.parametrize("joint", [False, True])
def test_schedule_of_several_optimizers(joint: bool) -> None:
    """Each optimizer follows its own schedule, with a joint norm or without."""
    kwargs = {"lr": 0.1, "max_grad_norm": 0.5} if joint else {"lr": 0.1}
    parts = [nn.Linear(3, 4), nn.Linear(4, 2)]
    container = OptimizersContainer(parts, OURS["AdamW"], kwargs)
    for i, optimizer in enumerate(container.optimizers):
        optimizer.set_schedule(**{**SCHEDULE, "warmup_steps": 4 + i})
    params = [p for part in parts for p in part.parameters()]
    for step in range(3):
        set_gradients(params, seed=step)
        container.step()
        for i, optimizer in enumerate(container.optimizers):
            wanted = ops.lr_factor(step, **{**SCHEDULE, "warmup_steps": 4 + i})
            assert float(optimizer.control.lr_factor) == wanted


# ---- gradients of another dtype ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "gradient"),
    [(FP32, FP64), (FP64, FP32), (FP64, BF16), (BF16, FP16), (FP16, BF16),
     (BF16, FP64), (BF16, torch.int64)],
)  # fmt: skip
@pytest.mark.parametrize("named", [False, True])
def test_a_gradient_of_another_dtype_is_refused_by_name(
    param: torch.dtype, gradient: torch.dtype, named: bool
) -> None:
    params = make_params(dtype=param)
    given: Any = [(f"layer.{i}", p) for i, p in enumerate(params)] if named else params
    optimizer = OURS["AdamW"](given, max_grad_norm=1.0)
    set_gradients(params)
    optimizer.step()
    set_gradients(params, seed=1)
    params[2].grad = None
    params[2].grad_dtype = None
    params[2].grad = torch.ones_like(params[2], dtype=gradient)
    before = snapshot(optimizer)
    match = r"gradient .*layer\.2" if named else r"gradient 2"
    with pytest.raises(RuntimeError, match=match) as error:
        optimizer.step()
    text = str(error.value).lower()
    kinds = {FP32: "float", BF16: "bfloat16", FP16: "half", FP64: "double", torch.int64: "long"}
    assert kinds[gradient] in text
    assert snapshot(optimizer) == before
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()
    assert snapshot(optimizer) != before


# ---- step counters -------------------------------------------------------------------------------


def stepped(number: int = 40, **kwargs: Any) -> tuple[list[nn.Parameter], Any]:
    params = make_params([(2,)] * number)
    optimizer = OURS["AdamW"](params, **kwargs)
    set_gradients(params)
    optimizer.step()
    return params, optimizer


def steps_of(optimizer: Any) -> list[torch.Tensor]:
    return [entry["step"] for entry in optimizer.state.values()]


def test_steps_are_views_into_one_vector() -> None:
    params = make_params()
    optimizer = OURS["AdamW"](params)
    for _ in range(3):
        set_gradients(params)
        optimizer.step()
    steps = [optimizer.state[p]["step"] for p in params]
    assert len({s.untyped_storage().data_ptr() for s in steps}) == 1
    assert [s.data_ptr() - steps[0].data_ptr() for s in steps] == [0, 4, 8, 12]
    assert all(s.shape == () and s.dtype == FP32 and s == 3 for s in steps)


def test_saved_steps_have_memory_of_their_own() -> None:
    params, optimizer = stepped()
    saved = optimizer.state_dict()
    memory = {s.untyped_storage().data_ptr() for s in steps_of(optimizer)}
    for entry in saved["state"].values():
        storage = entry["step"].untyped_storage()
        assert storage.nbytes() == 4
        assert storage.data_ptr() not in memory
        memory.add(storage.data_ptr())
    optimizer.step()
    assert all(entry["step"] == 1 for entry in saved["state"].values())
    # torch's optimizer with as many parameters saves about as much.
    theirs = TORCH["AdamW"](make_params([(2,)] * len(params)))
    set_gradients(theirs.param_groups[0]["params"])
    theirs.step()
    sizes = []
    for state_dict in (saved, theirs.state_dict()):
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        sizes.append(buffer.tell())
    assert sizes[0] < 1.1 * sizes[1]


def test_a_containers_state_dict_does_not_carry_the_vector() -> None:
    part = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    container = OptimizersContainer([part], OURS["AdamW"], {"lr": 0.1})
    set_gradients(part.parameters())
    container.step()
    steps = [v for key, v in container.state_dict().items() if key.endswith(".step")]
    assert [step.untyped_storage().nbytes() for step in steps] == [4] * 4


# ---- the control view ----------------------------------------------------------------------------


def test_reading_control() -> None:
    params, optimizer = stepped(max_grad_norm=0.5)
    control = optimizer.control
    norm = torch.stack([p.grad.double().square().sum() for p in params]).sum().sqrt()
    torch.testing.assert_close(control.grad_norm, norm, rtol=1e-14, atol=0)
    assert set(ops.CONTROL_FIELDS) <= set(dir(control))
    assert "grad_norm=" in repr(control)
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


def test_fused_step_of_differing_settings_is_refused() -> None:
    first, second = (OURS["AdamW"](make_params(), max_grad_norm=n) for n in (1.0, 2.0))
    for optimizer in (first, second):
        set_gradients(optimizer.param_groups[0]["params"])
    before = snapshot(first), snapshot(second)
    with pytest.raises(ValueError, match="differ"):
        fused_step([first, second])
    assert (snapshot(first), snapshot(second)) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"init_scale": 1e300},
        {"growth_interval": 0},
        {"growth_interval": math.nan},
        {"growth_interval": 1.5},
        {"hysteresis": 1.5},
        {"growth_factor": 0.5},
        {"growth_factor": math.inf},
        {"backoff_factor": 1.5},
        {"backoff_factor": 0.0},
        {"hysteresis": -1},
        {"hysteresis": math.nan},
        {"min_scale": -1.0},
        {"min_scale": math.inf},
        {"max_scale": math.nan},
        {"min_scale": 4.0, "max_scale": 2.0},
        {"min_scale": 16.0},
        {"max_scale": 4.0},
    ],
    ids=str,
)
def test_a_loss_scale_that_cannot_be_followed_is_refused(wrong: dict[str, Any]) -> None:
    params = make_params([(3,)])
    optimizer = OURS["AdamW"](params, lr=0.1)
    set_gradients(params)
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="Invalid"):
        optimizer.set_loss_scale(**{"init_scale": 8.0, **wrong})
    assert snapshot(optimizer) == before
    assert optimizer.control.loss_scale == 1.0


def test_a_schedule_multiplies_a_tensor_lr() -> None:
    rate = torch.tensor(0.1)
    param_lists = [make_params() for _ in range(3)]
    optimizers = [FusedAdamW(p, lr=lr) for p, lr in zip(param_lists, (rate, 0.1, 0.1), strict=True)]
    optimizers[1].param_groups[0]["lr"] = rate.item()
    for optimizer in optimizers[:2]:
        optimizer.set_schedule(warmup_steps=4, stable_steps=0, decay_steps=3)
    train(optimizers, param_lists, 6)
    for with_tensor, with_number, without in zip(*param_lists, strict=True):
        assert bits(with_tensor) == bits(with_number) != bits(without)
