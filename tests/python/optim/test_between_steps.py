"""What docs/between_steps.md says of changes between steps, where no other test does."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.state.masters import weight_of

from ...support.compare import assert_same_bits, snapshot, unchanged
from ...support.problems import make_params, params_of, set_gradients, train
from ...support.ways import BF16, FP32, FP64

TESTS = Path(__file__).parents[1]
HELD: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "masters": (BF16, {"master_weights": "fp32"}),
    "remainders": (BF16, {"master_weights": "remainder8", "state_dtype": "int8"}),
    "random": (BF16, {"stochastic_rounding": True}),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
ways = pytest.mark.parametrize("way", HELD)


def started(way: str = "fp32", steps: int = 2, seed: int = 0) -> Any:
    dtype, options = HELD[way]
    optimizer = FusedAdamW(make_params(dtype=dtype, seed=seed), lr=0.02, **options)
    train(optimizer, range(steps))
    return optimizer


def test_each_statement_names_its_tests() -> None:
    """Every paragraph and item of the page ends with a comment that names tests."""
    page = (TESTS.parents[1] / "docs/between_steps.md").read_text()
    text = re.sub(r"^```.*?^```$|^<!-- setup.*?^-->$", "", page, flags=re.M | re.S)
    statements = [s.strip() for s in re.split(r"\n\s*\n|\n(?=- )", text)]
    statements = [s for s in statements if s and not s.startswith("#") and not s.endswith("?")]
    assert len(statements) > 30
    for statement in statements:
        named = re.findall(r"(\S+)::(\w+)", statement)
        assert named and statement.endswith("-->"), statement
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"


# ---- weights -----------------------------------------------------------------------------------


def test_a_remainder_completes_a_written_weight() -> None:
    optimizer = FusedAdamW(make_params([(64, 64)], BF16), lr=0.02, master_weights="remainder")
    train(optimizer, range(2))
    (weight,) = params_of(optimizer)
    remainder = optimizer.state[weight]["remainder"].clone()
    assert remainder.any()
    with torch.no_grad():
        weight.mul_(1.5)
    written = weight.detach().clone()
    optimizer.param_groups[0].update(lr=0.0)
    train(optimizer, [2])
    assert_same_bits([weight, optimizer.state[weight]["remainder"]], [written, remainder])


@pytest.mark.parametrize("kind", ["remainder", "remainder8"])
def test_a_remainder_adds_at_most_half_a_step(kind: str) -> None:
    optimizer = FusedAdamW(make_params([(64, 64)], BF16), lr=0.02, master_weights=kind)
    train(optimizer, range(2))
    (weight,) = params_of(optimizer)
    with torch.no_grad():
        weight.mul_(1.5)
    written = weight.detach().float()
    added = (weight_of(weight, optimizer.state[weight]) - written).abs()
    exponents = torch.frexp(written).exponent - 8  # bf16 has 8 bits
    step = torch.ldexp(torch.ones_like(written), exponents)
    assert added.any() and bool((added <= step / 2).all())


UNCOUNTED: dict[str, Callable[[Tensor], object]] = {
    "data": lambda p: p.data.mul_(1.5),
    "numpy": lambda p: p.detach().view(torch.int16).numpy().fill(0x4000),
    "storage": lambda p: p.untyped_storage().copy_((p.detach() * 1.5).untyped_storage()),
}


@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_that_torch_does_not_count(write: str) -> None:
    ours, plain = started("masters"), started("masters")
    for p in params_of(ours):
        UNCOUNTED[write](p)
    assert not torch.equal(params_of(ours)[0], params_of(plain)[0])
    train(ours, [2])
    train(plain, [2])
    assert snapshot(ours) == snapshot(plain)


def test_collectives_and_foreach_on_dtensors_are_not_counted(one_rank: None) -> None:
    """If a later torch counts them, they are writes like others."""
    weight = make_params()[0]
    dist.broadcast(weight.detach(), 0)
    assert weight._version == 0
    sharded = fully_shard(nn.Linear(4, 4)).weight
    before = sharded._version
    torch._foreach_mul_([sharded.detach()], 0.5)
    assert sharded._version == before


@pytest.mark.parametrize(("before", "after"), [(FP32, FP64), (FP64, BF16)])
def test_a_change_to_or_from_float64_raises(before: torch.dtype, after: torch.dtype) -> None:
    optimizer = FusedAdamW(make_params(dtype=before))
    train(optimizer, [0])
    for p in params_of(optimizer):
        p.grad, p.data = None, p.detach().to(after)
    set_gradients(params_of(optimizer))
    with unchanged(optimizer), pytest.raises(RuntimeError, match="float64 goes with float64 only"):
        optimizer.step()


# ---- gradients, freezing -----------------------------------------------------------------------


@ways
def test_a_gradient_of_none_leaves_all_as_it_is(way: str) -> None:
    optimizer = started(way)
    optimizer.zero_grad()
    others = params_of(optimizer)[1:]
    left = params_of(optimizer)[0]
    with unchanged(left, *optimizer.state[left].values()):
        train(optimizer, [2], others)
    assert optimizer.state[others[0]]["step"] == 3


def test_a_gradient_of_zeros_is_a_step() -> None:
    runs = [
        cls(make_params(), lr=0.02, weight_decay=0.1) for cls in (FusedAdamW, torch.optim.AdamW)
    ]
    for optimizer in runs:
        train(optimizer, [0])
        optimizer.zero_grad(set_to_none=False)
        before = [p.detach().clone() for p in params_of(optimizer)]
        optimizer.step()
        assert not any(map(torch.equal, before, params_of(optimizer)))
        assert all(entry["step"] == 2 for entry in optimizer.state.values())
    torch.testing.assert_close(params_of(runs[0]), params_of(runs[1]))
    ours, torchs = ([[*map(o.state[p].get, MOMENTS)] for p in params_of(o)] for o in runs)
    torch.testing.assert_close(ours, torchs)


def test_a_frozen_parameter_with_a_gradient_is_stepped() -> None:
    optimizers = [cls(make_params(), lr=0.02) for cls in (FusedAdamW, torch.optim.AdamW)]
    for optimizer in optimizers:
        set_gradients(params_of(optimizer))
        for p in params_of(optimizer):
            p.requires_grad_(False)
        optimizer.step()
        assert [optimizer.state[p]["step"] for p in params_of(optimizer)] == [1, 1, 1, 1]
    torch.testing.assert_close(params_of(optimizers[0]), params_of(optimizers[1]))


@ways
def test_a_parameter_that_was_frozen_at_first_begins_at_step_0(way: str) -> None:
    dtype, options = HELD[way]
    frozen, others = make_params([(4, 64)], dtype, seed=3), make_params(dtype=dtype)
    frozen[0].requires_grad_(False)
    optimizer = FusedAdamW([*others, *frozen], **options)
    train(optimizer, range(2), others)
    frozen[0].requires_grad_()
    train(optimizer, [2])
    assert optimizer.state[frozen[0]]["step"] == 1 and optimizer.state[others[0]]["step"] == 3


# ---- state -------------------------------------------------------------------------------------


def test_a_schedule_goes_on_after_the_state_was_cleared() -> None:
    ours, plain = started(steps=0), started(steps=0)
    for optimizer in (ours, plain):
        optimizer.set_schedule(warmup_steps=4, stable_steps=2, decay_steps=4)
        train(optimizer, range(3))
    ours.state.clear()
    for optimizer in (ours, plain):
        train(optimizer, [3])
    assert all(entry["step"] == 1 for entry in ours.state.values())
    assert ours.control.steps == 4 and ours.control.lr_factor == plain.control.lr_factor


@ways
def test_state_that_moves_to_another_parameter_goes_on_there(way: str) -> None:
    ours, plain = started(way), started(way)
    params = ours.param_groups[0]["params"]
    old, params[0] = params[0], nn.Parameter(params[0].detach().clone())
    ours.state[params[0]] = ours.state.pop(old)
    assert_go_on_alike(ours, plain)


# ---- learning-rate tests, PBT, Lookahead, EMA --------------------------------------------------


def saved(optimizer: Any) -> Any:
    """As the state dicts of model and optimizer, copied."""
    return copy.deepcopy(([p.detach() for p in params_of(optimizer)], optimizer.state_dict()))


def load(optimizer: Any, saved: Any) -> None:
    with torch.no_grad():
        for p, value in zip(params_of(optimizer), saved[0], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved[1])


def assert_go_on_alike(ours: Any, other: Any) -> None:
    train(ours, range(10, 13))
    train(other, range(10, 13))
    assert snapshot(ours) == snapshot(other)


@ways
def test_a_learning_rate_range_test_leaves_no_trace(way: str) -> None:
    tested, plain = started(way), started(way)
    for optimizer in (tested, plain):
        optimizer.set_schedule(warmup_steps=9, stable_steps=0, decay_steps=9)
    kept = saved(tested)
    for exponent in range(-5, 0):
        tested.param_groups[0]["lr"] = 10.0**exponent
        train(tested, [exponent + 20])
    load(tested, kept)
    assert_go_on_alike(tested, plain)


@ways
def test_population_based_training(way: str) -> None:
    better, worse = started(way), started(way, steps=3, seed=5)
    load(worse, saved(better))
    for member in (better, worse):
        member.param_groups[0]["lr"] *= 1.2
    assert_go_on_alike(worse, better)


def lookahead(optimizer: Any, slow: list[Tensor], then: Callable[[], None]) -> None:
    """Makes six steps. After each third the weights go halfway back to the slow ones."""
    for step in range(6):
        train(optimizer, [step])
        if step % 3 == 2:
            with torch.no_grad():
                for p, kept in zip(params_of(optimizer), slow, strict=True):
                    kept.add_(p.detach() - kept, alpha=0.5)
                    p.copy_(kept)
            then()


def test_lookahead() -> None:
    """A master is the weight that was written, where it is another than before."""
    ours, by_hand = started("masters", 0), started("masters", 0)
    slow = [p.detach().clone() for p in params_of(ours)]
    lookahead(ours, copy.deepcopy(slow), lambda: None)
    lookahead(by_hand, slow, lambda: refresh_written(by_hand))
    assert_go_on_alike(ours, by_hand)


def refresh_written(optimizer: Any) -> None:
    masters = {p: optimizer.state[p]["master_weight"] for p in params_of(optimizer)}
    optimizer.refresh_masters(
        from_={p: torch.where(w.to(p.dtype) == p, w, p.float()) for p, w in masters.items()}
    )


@ways
def test_averaging_weights_leaves_no_trace(way: str) -> None:
    runs = []
    for averages in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 4).to(HELD[way][0])
        optimizer = FusedAdamW(model.parameters(), **HELD[way][1])
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(4):
            train(optimizer, [step])
            if averages:
                averaged.update_parameters(model)
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


# ---- exceptions, ranks -------------------------------------------------------------------------


def test_a_container_of_torchs_classes_steps_its_parts_one_by_one() -> None:
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    container = OptimizersContainer(parts, torch.optim.AdamW, {"lr": 0.1})
    before = copy.deepcopy([[*part.parameters()] for part in parts])
    set_gradients(*(part.parameters() for part in parts))
    container.optimizers[1].register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        container.step()
    assert not torch.equal(parts[0].weight, before[0][0])
    assert_same_bits(parts[1].parameters(), before[1])


@pytest.mark.parametrize(
    ("options", "communicates"),
    [
        ({}, False),
        ({"max_grad_norm": 1.0}, True),
        ({"max_grad_norm": math.inf}, True),
        ({"skip_nonfinite": True}, True),
    ],
)
def test_only_a_step_with_a_norm_or_a_check_communicates(
    options: dict[str, Any], communicates: bool, second_of_two_ranks: Any
) -> None:
    optimizer = FusedAdamW(make_params(), process_group=dist.group.WORLD, **options)
    set_gradients(params_of(optimizer))
    with CommDebugMode() as seen:
        optimizer.step()
    assert (seen.get_total_counts() > 0) == communicates
