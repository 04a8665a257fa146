"""A step's plan and everything that may change under it between two steps.

The measure is always an optimizer built afresh from the parameters and the state as they are.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext.optim import state as state_module

from .subject import OURS, assert_same_bits, bits, make_params, set_gradients, snapshot

BF16 = torch.bfloat16
KWARGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": 1.0}

Setup = tuple[list[nn.Parameter], Any]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every time a plan was built from Python."""
    found: list[int] = []
    build = state_module.build_plan

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return build(*args, **kwargs)

    monkeypatch.setattr(state_module, "build_plan", counting)
    return found


def started(steps: int = 2, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Setup:
    params = make_params(dtype=dtype)
    optimizer = OURS["AdamW"](params, **{**KWARGS, **kwargs})
    for step in range(steps):
        set_gradients(params, seed=step)
        optimizer.step()
    return params, optimizer


def params_of(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def afresh(optimizer: Any, **kwargs: Any) -> Any:
    """A new optimizer over copies of the parameters as they are, with copies of the state."""
    groups = []
    for group in optimizer.param_groups:
        copies = []
        for p in group["params"]:
            q = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            if p.grad is not None:
                q.grad = p.grad.detach().clone()
            copies.append(q)
        groups.append({**group, "params": copies})
    fresh = type(optimizer)(groups, **{**KWARGS, **kwargs})
    saved = copy.deepcopy(optimizer.state_dict())
    missing = [k for k, entry in saved["state"].items() if not entry]
    for k in missing:
        del saved["state"][k]
    fresh.load_state_dict(saved)
    return fresh


def assert_steps_as_a_fresh_one(optimizer: Any, steps: int = 2, **kwargs: Any) -> None:
    for step in range(steps):
        fresh = afresh(optimizer, **kwargs)
        for mine, theirs in zip(params_of(optimizer), params_of(fresh), strict=True):
            if mine.requires_grad:
                set_gradients([mine], [theirs], seed=100 + step)
        before = [bits(p) for p in params_of(optimizer)]
        optimizer.step()
        fresh.step()
        assert snapshot(optimizer) == snapshot(fresh)
        assert [bits(p) for p in params_of(optimizer)] != before


# ---- changes, each a function of parameters and optimizer ----------------------------------------


def clear_gradients(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)


def zero_gradients(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def other_memory(params: list[nn.Parameter], optimizer: Any) -> None:
    for p in params:
        p.data = p.detach() * 1.5


def other_memory_of_one(params: list[nn.Parameter], optimizer: Any) -> None:
    params[2].data = params[2].detach() * 1.5


def other_strides(params: list[nn.Parameter], optimizer: Any) -> None:
    params[0].data = params[0].detach().t().contiguous().t()


def with_gaps(params: list[nn.Parameter], optimizer: Any) -> None:
    params[1].data = torch.randn(2 * params[1].numel())[::2]


def more_parameters(params: list[nn.Parameter], optimizer: Any) -> None:
    more = make_params(((5, 5),), dtype=params[0].dtype, seed=8)
    optimizer.add_param_group({"params": more, "lr": 0.5})


def frozen(params: list[nn.Parameter], optimizer: Any) -> None:
    params[1].requires_grad_(False)
    params[1].grad = None


def removed_parameter(params: list[nn.Parameter], optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"].pop(1)]


def replaced_parameter(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(6, 2).to(params[0].dtype))
    del optimizer.state[params[0]]


def new_moment(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"] * 2


def moment_data(params: list[nn.Parameter], optimizer: Any) -> None:
    entry = optimizer.state[params[0]]
    entry["exp_avg"].data = entry["exp_avg"] * 2
    entry["exp_avg_sq"].data = entry["exp_avg_sq"] * 3


def moment_in_place(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["exp_avg"].mul_(2)


def moment_elsewhere_in_memory(params: list[nn.Parameter], optimizer: Any) -> None:
    entry = optimizer.state[params[0]]
    entry["exp_avg"] = torch.cat([torch.zeros(1), entry["exp_avg"].flatten()])[1:].view(3, 4)


def moment_of_other_strides(params: list[nn.Parameter], optimizer: Any) -> None:
    entry = optimizer.state[params[0]]
    entry["exp_avg"] = entry["exp_avg"].t().contiguous().t()


def new_step(params: list[nn.Parameter], optimizer: Any) -> None:
    for p in params:
        optimizer.state[p]["step"] = torch.tensor(41.0)


def step_in_place(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["step"].fill_(41.0)


def step_data(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[1]]["step"].data = torch.tensor(41.0)


def step_as_a_number(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[1]]["step"] = 41


def new_entry(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]] = {k: v * 1 for k, v in optimizer.state[params[0]].items()}


def no_state(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state.clear()


def no_state_of_one(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[2]].clear()


def lost_entry(params: list[nn.Parameter], optimizer: Any) -> None:
    del optimizer.state[params[0]]["exp_avg_sq"]
    optimizer.state[params[0]]["exp_avg_sq"] = torch.ones_like(params[0]).detach()


def amsgrad(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def hyperparameters(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), eps=0.1, weight_decay=0.0)
    optimizer.param_groups[0]["maximize"] = True


def swapped(params: list[nn.Parameter], optimizer: Any) -> None:
    for p in params:
        p.grad = None
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 1.5))


def two_groups_from_one(params: list[nn.Parameter], optimizer: Any) -> None:
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": first["params"][2:], "lr": 0.7})
    first["params"] = first["params"][:2]


def own_entry(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["note"] = torch.ones(3)


MEMORY_ONLY: list[Callable[..., None]] = [
    clear_gradients, zero_gradients, other_memory, other_memory_of_one,
    moment_data, moment_in_place, step_in_place, hyperparameters, own_entry, frozen,
]  # fmt: skip
STRUCTURAL: list[Callable[..., None]] = [
    other_strides, with_gaps, more_parameters, removed_parameter, replaced_parameter, new_moment,
    moment_elsewhere_in_memory, moment_of_other_strides, new_step, step_data, step_as_a_number,
    new_entry, no_state, no_state_of_one, lost_entry, amsgrad, swapped, two_groups_from_one,
]  # fmt: skip


@pytest.mark.parametrize("change", MEMORY_ONLY + STRUCTURAL, ids=lambda change: change.__name__)
def test_a_change_between_steps(change: Callable[..., None]) -> None:
    params, optimizer = started()
    change(params, optimizer)
    assert_steps_as_a_fresh_one(optimizer)


@pytest.mark.parametrize("kind", ["fp32", "remainder"])
@pytest.mark.parametrize(
    "change",
    [other_memory, no_state, no_state_of_one, more_parameters, new_entry, removed_parameter,
     clear_gradients, new_step, swapped],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_change_under_master_weights(change: Callable[..., None], kind: str) -> None:
    params, optimizer = started(dtype=BF16, master_weights=kind)
    change(params, optimizer)
    if change in (other_memory, swapped):
        optimizer.refresh_masters()  # other values, and the master does not know
    assert_steps_as_a_fresh_one(optimizer, master_weights=kind)


@pytest.mark.parametrize("change", MEMORY_ONLY, ids=lambda change: change.__name__)
def test_no_new_plan_when_only_memory_moved(change: Callable[..., None], builds: list[int]) -> None:
    params, optimizer = started()
    change(params, optimizer)
    builds.clear()
    for step in range(3):
        set_gradients([p for p in params if p.requires_grad], seed=step)
        optimizer.step()
    assert not builds


def test_a_plan_is_built_once(builds: list[int]) -> None:
    params, optimizer = started(steps=0)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        set_gradients(params, seed=step)
        optimizer.step()
    assert len(builds) == 1
    new_moment(params, optimizer)
    set_gradients(params)
    optimizer.step()
    optimizer.step()
    assert len(builds) == 2


def test_gradients_in_turns(builds: list[int]) -> None:
    """Parameters with and without gradient, and a first gradient that comes late."""
    params, optimizer = started(steps=0)
    counts = [0] * len(params)
    for step in range(12):
        fresh = afresh(optimizer)
        present = [i for i in range(len(params)) if (step + 1) % (i + 1) == 0]
        for group in (params, params_of(fresh)):
            for p in group:
                p.grad = None
            set_gradients([group[i] for i in present], seed=step)
        optimizer.step()
        fresh.step()
        for i in present:
            counts[i] += 1
        assert_same_bits(params, params_of(fresh))
        found = [float(optimizer.state[p]["step"]) if optimizer.state[p] else 0 for p in params]
        assert found == counts
    assert len(builds) - 12 <= len(params)  # the fresh ones build one each


# ---- other dtypes and shapes ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "fp32"])
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, BF16), (BF16, torch.float32), (BF16, torch.float16)]
)
def test_another_dtype(kind: str | None, before: torch.dtype, after: torch.dtype) -> None:
    """As model.to(dtype) does it; a master weight comes or goes with the dtype."""
    params, optimizer = started(dtype=before, master_weights=kind)
    for p in params:
        p.grad = None
        p.data = p.detach().to(after)
    fresh = afresh(optimizer, master_weights=kind)
    if kind is None:  # without a wish for a dtype moments are taken as they are
        for p, q in zip(params, params_of(fresh), strict=True):
            fresh.state[q] = copy.deepcopy(dict(optimizer.state[p]))
    set_gradients(params, params_of(fresh), seed=50)
    optimizer.step()
    fresh.step()
    assert_same_bits(params, params_of(fresh))
    for p, q in zip(params, params_of(fresh), strict=True):
        assert p.dtype == after
        assert optimizer.state[p].keys() == fresh.state[q].keys()


def test_to_float64_with_float32_moments_is_refused_by_name() -> None:
    params, optimizer = started()
    before = [bits(v) for v in optimizer.state[params[1]].values()]
    params[1].data = params[1].detach().double()
    params[1].grad = None
    set_gradients(params)
    with pytest.raises(RuntimeError, match=r"exp_avg 1 has dtype Float.* Double"):
        optimizer.step()
    assert [bits(v) for v in optimizer.state[params[1]].values()] == before
    params[1].grad = None
    params[1].data = params[1].detach().float()
    assert_steps_as_a_fresh_one(optimizer)


@pytest.mark.parametrize("size", [(2, 4), (4, 4), (12,)])
def test_another_shape_is_refused_by_name(size: tuple[int, ...]) -> None:
    params, optimizer = started()
    names = {p: [bits(v) for v in optimizer.state[p].values()] for p in params}
    old = params[0].detach().clone()
    params[0].data = torch.randn(size)
    params[0].grad = None
    set_gradients(params)
    with pytest.raises((RuntimeError, ValueError), match=r"exp_avg of parameter 0.*shape"):
        optimizer.step()
    assert {p: [bits(v) for v in optimizer.state[p].values()] for p in params} == names
    params[0].grad = None
    params[0].data = old
    assert_steps_as_a_fresh_one(optimizer)


@pytest.mark.parametrize("way", ["entry", "data"])
def test_shared_state_memory_is_refused(way: str) -> None:
    """Two parameters that would write the same moments."""
    params = make_params(((4,), (4,)))
    optimizer = OURS["AdamW"](params, **KWARGS)
    set_gradients(params)
    optimizer.step()
    if way == "entry":
        optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"]
    else:
        optimizer.state[params[1]]["exp_avg"].data = optimizer.state[params[0]]["exp_avg"]
    with pytest.raises((RuntimeError, ValueError), match="exp_avg"):
        optimizer.step()


# ---- many steps ----------------------------------------------------------------------------------


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.fixture
def _collected() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_collected")
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_grad_norm": 1.0, "skip_nonfinite": True},
        {"master_weights": "remainder", "state_dtype": BF16, "stochastic_rounding": True,
         "max_grad_norm": 1.0, "track": True},
    ],
    ids=["plain", "clipped", "all"],
)  # fmt: skip
def test_soak(kwargs: dict[str, Any]) -> None:
    """10,000 steps with gradients that come and go: neither memory nor objects grow."""
    dtype = BF16 if "master_weights" in kwargs else torch.float32
    params = make_params(((64, 65), (65,), (), (300,)), dtype=dtype)
    optimizer = OURS["AdamW"](params, lr=1e-4, **kwargs)

    def steps(count: int) -> None:
        for step in range(count):
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            for p in params:
                p.grad = torch.ones_like(p)
            if step % 100 == 50:
                new_moment(params, optimizer)
                params[1].data = params[1].detach().clone()
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
            if kwargs.get("track"):
                optimizer.telemetry.digest()

    steps(2000)
    gc.collect()
    objects, pages = len(gc.get_objects()), resident_pages()
    steps(10_000)
    gc.collect()
    assert abs(len(gc.get_objects()) - objects) < 50
    assert resident_pages() - pages < 256  # 1 MB; 10,000 steps of 100 bytes each would show


@pytest.mark.parametrize("count", [3, 2500])
def test_moments_that_changed_roles_in_place_are_noticed(count: int) -> None:
    params = make_params([(2,)] * count)
    optimizer = OURS["AdamW"](params, **KWARGS)
    set_gradients(params)
    optimizer.step()
    entry = optimizer.state[params[count // 2]]
    step, first, second = entry["step"], entry["exp_avg"], entry["exp_avg_sq"]
    entry.clear()
    entry["step"], entry["exp_avg_sq"], entry["exp_avg"] = step, first.abs_(), second
    set_gradients(params, seed=1)
    assert_steps_as_a_fresh_one(optimizer)


def test_entries_that_were_empty_at_first_are_noticed_among_thousands() -> None:
    params = make_params([(2,)] * 2500)
    optimizer = OURS["AdamW"](params, **KWARGS)
    assert not any(optimizer.state[param] for param in params)
    optimizer.step()
    for param in params[2000:]:
        optimizer.state[param]["note"] = torch.zeros(())
    set_gradients(params)
    optimizer.step()
    assert all(optimizer.state[param]["step"].item() == 1.0 for param in params)
    assert_steps_as_a_fresh_one(optimizer)
