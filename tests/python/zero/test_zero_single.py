"""ZeroRedundancyOptimizer on one rank behaves like the optimizer that it wraps."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim.utils import functional_optim_map
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.support.compare import assert_same, contents, unchanged
from tests.support.problems import make_params, params_of, set_gradients, train
from torchopt_ext import _C, FusedAdam, FusedAdamW, FusedLion, FusedSGD, GradScaler
from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.ranks import LARGE, MAX_PACKED_BYTES, Ranks, batches

SHAPES = [(7, 5), (33,), (4, 3), (64,)]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "FusedAdamW": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "FusedLion": (FusedLion, {"lr": 0.01, "weight_decay": 0.1}),
    "FusedSGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "bucket view": {"parameters_as_bucket_view": True},
    "balanced": {"partition": "balanced", "bucket_elements": 64},
}

SHARDED = {**PARTITIONS["balanced"], "sharded_gradients": True}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_partition = pytest.mark.parametrize("partition", PARTITIONS)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def pair(kind: str = "AdamW", partition: str = "greedy", **kwargs: Any) -> tuple[Any, Any]:
    """Returns our optimizer and the plain optimizer, each with two groups of named parameters."""
    optimizer_class, defaults = KINDS[kind]
    groups = []
    for _ in range(2):
        named = [(f"p{i}", p) for i, p in enumerate(make_params(SHAPES))]
        groups.append([{"params": named[:3], "lr": 0.02}, {"params": named[3:], "lr": 0.03}])
    options = {**defaults, **kwargs}
    zero = ZeroRedundancyOptimizer(
        groups[0], optimizer_class, **{**PARTITIONS[partition], **options}
    )
    return zero, optimizer_class(groups[1], **options)


def state_dict_of(zero: Any) -> Any:
    zero.consolidate_state_dict()
    return zero.state_dict()


def test_a_bucket_is_filled_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one bucket's parameters are in memory twice."""
    params = make_params([(64,)] * 4)
    places, moved, zeros = [param.data_ptr() for param in params], list[int](), torch.zeros

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        moved.append(sum(p.data_ptr() != at for p, at in zip(params, places, strict=True)))
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", noting)
    BalancedBuckets(Ranks.of(None), Parameters([]), 64, False).add_group(params)
    assert moved == [0, 1, 2, 3]


def test_large_tensors_do_not_part_small_ones() -> None:
    """A split at each large tensor would cost two more messages per layer."""
    sizes = [LARGE, 4, 8, LARGE, LARGE - 4, 4, *[LARGE - 4] * 16]
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    together = [[tensor.nbytes for tensor in batch] for batch in batches(tensors)]
    full = MAX_PACKED_BYTES // LARGE  # tensors just below LARGE
    assert together[:2] == [[LARGE], [LARGE]]
    assert together[2] == [4, 8, LARGE - 4, 4, *[LARGE - 4] * (full - 1)]
    assert together[3:] == [[LARGE - 4] * (17 - full)]


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*PARTITIONS.values(), SHARDED])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["channel", "transposed", "expanded"])
def test_memory_shared_with_or_inside_a_parameter(how: str, late: bool, options: Any) -> None:
    """Its elements do not lie one after another, or one stands for several."""
    weight = nn.Parameter(torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last))
    matrix, other = nn.Parameter(torch.randn(6, 6).t()), nn.Parameter(torch.zeros(36))

    def share() -> None:
        if how == "channel":
            other.data = weight.data.permute(0, 2, 3, 1).reshape(-1)[36:72]
        elif how == "transposed":
            other.data = matrix.data.t().reshape(-1)
        else:
            other.data = torch.zeros(1).expand(36)

    if not late:
        share()
        with pytest.raises((RuntimeError, ValueError), match="share memory"):
            ZeroRedundancyOptimizer([weight, matrix, other], FusedSGD, lr=0.1, **options)
        return
    zero: Any = ZeroRedundancyOptimizer([weight, matrix, other], FusedSGD, lr=0.1, **options)
    share()
    set_gradients([weight, matrix, other], seed=0)
    with (
        unchanged(*(p.detach() for p in (weight, matrix, other))),
        pytest.raises(RuntimeError, match="share memory"),
    ):
        zero.step()


@pytest.mark.parametrize("partition", ["bucket view", "balanced"])
def test_files_of_a_model_and_of_its_layers(partition: str, tmp_path: Path) -> None:
    """What docs/zero_details.md says about torch.save: buckets are written as a whole."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    options = PARTITIONS[partition] | ({"bucket_elements": None} if partition == "balanced" else {})
    zero = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, **options)
    whole = sum(p.nbytes for p in model.parameters())
    layer = model[0].state_dict()

    def bytes_of(value: Any) -> int:
        torch.save(value, tmp_path / "file")
        return (tmp_path / "file").stat().st_size

    assert whole <= bytes_of(model.state_dict()) < 1.2 * whole
    assert bytes_of(layer) > whole
    assert bytes_of({name: value.clone() for name, value in layer.items()}) < whole / 8
    del zero


# ---- what is accepted ----------------------------------------------------------------------------


class Unknown(torch.optim.SGD):
    """An optimizer that is neither known to be elementwise nor functional."""


FUNCTIONAL: Any = functional_optim_map[torch.optim.AdamW]
OVERLAP: dict[str, Any] = {"overlap_with_ddp": True}
TWO = [{"params": [torch.ones(2)]}, {"params": [torch.ones(3)]}]


@pytest.mark.parametrize(
    ("params", "kwargs", "error", "message"),
    [
        (torch.ones(3), {}, TypeError, "iterable of Tensors"),
        (3, {}, TypeError, "params is 3, expected parameters"),
        ([], {}, ValueError, "empty parameter list"),
        ([{"params": []}], {}, ValueError, "empty parameter list"),
        ([torch.ones(2), 1.5], {}, TypeError, "one of the params is float"),
        ([{"lr": 1.0}], {}, KeyError, "params"),
        ([torch.ones(2), {"params": [torch.ones(2)]}], {}, TypeError, "one of the params is dict"),
        ([{"params": [torch.ones(2)]}, torch.ones(2, 2)], {}, TypeError, "not a mapping"),
        ([torch.ones(2), torch.ones(2).bfloat16()], {}, ValueError, "bfloat16"),
        ([torch.eye(2).to_sparse()], {}, ValueError, "dense"),
        ([TWO[0], {**TWO[0]}], {}, ValueError, "more than one parameter group"),
        (None, {"partition": "even"}, ValueError, "'even'"),
        (None, {"partition": "balanced", **OVERLAP}, ValueError, "overlap"),
        (None, {"sharded_gradients": True}, ValueError, "sharded_gradients=True needs"),
        (None, {"elementwise": True}, ValueError, "elementwise=True needs"),
        (None, {"bucket_elements": 0}, ValueError, "bucket_elements=0 needs"),
        (None, {"params_per_rank": [[]], **OVERLAP}, ValueError, "DDP's buckets"),
        (None, {"timeout": datetime.timedelta(0)}, ValueError, "Invalid timeout"),
        (None, {"optimizer_class": FUNCTIONAL}, ValueError, "functional optimizer"),
        (None, {"optimizer_class": Unknown, **OVERLAP}, ValueError, "Unknown"),
        (None, {"optimizer_class": Unknown, "partition": "balanced"}, ValueError, "elementwise="),
        (TWO, OVERLAP, ValueError, "one param group"),
    ],
)
def test_arguments_are_checked(
    params: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    params = make_params(SHAPES) if params is None else params
    with pytest.raises(error, match=message):
        ZeroRedundancyOptimizer(params, **{"optimizer_class": torch.optim.SGD, "lr": 0.1} | kwargs)


@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamW, FusedLion, FusedSGD])
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"state_dtype": "int8"},
        {"master_weights": "fp32"}, {"stochastic_rounding": True}, {"track": True},
    ],
)  # fmt: skip
def test_steps_in_backward_hold_plain_state_only(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"have no norms.*{next(iter(options))}"):
        ZeroRedundancyOptimizer(make_params(SHAPES), kind, **OVERLAP, **options)


@pytest.mark.parametrize("plain", functional_optim_map)
def test_steps_in_backward_have_the_functional_defaults(plain: Any) -> None:
    params = make_params(SHAPES)
    functional = functional_optim_map[plain]
    expected = functional(params).defaults
    for cls in (plain, functional):
        group = ZeroRedundancyOptimizer(params, cls, **OVERLAP).param_groups[0]
        assert {key: group.get(key, value) for key, value in expected.items()} == expected
        zero = ZeroRedundancyOptimizer(params, cls, **OVERLAP, lr=0.25)
        assert zero.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    "pair", [(Unknown, FUNCTIONAL), (torch.optim.ASGD, Unknown), (Unknown, FusedAdamW)]
)
def test_pairs_that_users_register_are_rejected(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Any, Any]
) -> None:
    monkeypatch.setitem(functional_optim_map, *pair)
    with pytest.raises(ValueError, match=f"{pair[0].__name__}.* expected a FusedOptimizer, or"):
        ZeroRedundancyOptimizer(make_params(SHAPES), pair[0], **OVERLAP)


@dataclasses.dataclass
class Unhashable:
    """A function with settings that makes an optimizer."""

    lr: float

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)


def test_an_unhashable_function_makes_the_optimizer() -> None:
    zero = ZeroRedundancyOptimizer(make_params(SHAPES), Unhashable(0.5))
    assert zero.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="no functional counterpart"):
        ZeroRedundancyOptimizer(make_params(SHAPES), Unhashable(0.5), **OVERLAP)


@pytest.mark.parametrize("kind", [FUNCTIONAL, torch.optim.AdamW, FusedAdam, FusedAdamW])
def test_before_a_hook_has_seen_ddps_buckets(kind: Any) -> None:
    params = make_params(SHAPES)
    zero = ZeroRedundancyOptimizer(params, kind, **OVERLAP, lr=0.1)
    set_gradients(params)
    with unchanged(*params):
        assert zero.step() is None
    calls: list[tuple[Callable[[], Any], str]] = [
        (zero.consolidate_state_dict, "fully initialized"),
        (zero.state_dict, "fully initialized"),
        (lambda: zero.load_state_dict({"state": {}, "param_groups": []}), "fully initialized"),
        (lambda: zero.clip_grad_norm_(1.0), "before clipping"),
        (lambda: zero.add_param_group({"params": make_params([(2,)])}), "one param group"),
        (lambda: copy.deepcopy(zero), "cannot be copied"),
    ]
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
        scaler.scale(torch.ones(()))
        calls.append((lambda scaler=scaler: scaler.step(zero), "use no scaler"))
    for call, message in calls:
        with pytest.raises((RuntimeError, TypeError), match=message):
            call()


@every_kind
def test_torchs_own_hook(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's hook rejects gloo, with which ranks may wait for each other; here is one rank."""
    models = [nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ddp = DistributedDataParallel(models[0], bucket_cap_mb=0.01)
    cls, defaults = KINDS[kind]
    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, **OVERLAP, **defaults)
    with monkeypatch.context() as patched:
        patched.setattr(dist, "get_backend", lambda group: "nccl")
        ddp.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, zero))
    plain = cls(models[1].parameters(), **defaults)
    for step in range(5):
        for model, optimizer in ((ddp, zero), (models[1], plain)):
            optimizer.zero_grad()
            model(torch.ones(2, 70) + step).square().mean().backward()
            if optimizer is plain and step >= 2:  # DDP's final buckets are known
                optimizer.step()
    assert_same(*([*model.state_dict().values()] for model in models))


def test_an_unknown_optimizer_may_be_promised_to_be_elementwise() -> None:
    params, plain_params = make_params(SHAPES), make_params(SHAPES)
    zero = ZeroRedundancyOptimizer(params, Unknown, partition="balanced", elementwise=True, lr=0.1)
    for optimizer in (zero, Unknown(plain_params, lr=0.1)):
        train(optimizer, range(2))
    assert_same(params, plain_params)


@every_partition
def test_other_optimizers_reject_one_ranks_part(partition: str) -> None:
    zero, plain = pair("FusedAdamW", partition)
    train(zero, [0])
    part = zero.state_dict()
    with (
        unchanged(plain),
        pytest.raises(ValueError, match=r"exp_avg of parameter 0 .* is one rank's part: call con"),
    ):
        plain.load_state_dict(part)
    plain.load_state_dict(state_dict_of(zero))


def test_pickling_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(pair()[0])


# ---- hooks ---------------------------------------------------------------------------------------


@every_kind
def test_step_hooks(kind: str) -> None:
    """Global and own hooks run once a step, for the wrapper only."""
    zero, _ = pair(kind)
    seen: list[str] = []

    def noted(what: str) -> Any:
        return lambda optimizer, args, kwargs: seen.append(what if optimizer is zero else "other")

    handles = [
        register_optimizer_step_pre_hook(noted("pre")),
        register_optimizer_step_post_hook(noted("post")),
        zero.register_step_pre_hook(noted("own pre")),
        zero.register_step_post_hook(noted("own post")),
    ]
    try:
        train(zero, range(2))
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(seen[:4]) == sorted(["pre", "own pre", "own post", "post"])
    assert seen[:4] == seen[4:]
    train(zero, range(2, 3))
    assert len(seen) == 8


@every_kind
def test_global_hooks_survive_a_step_that_raises(kind: str) -> None:
    zero, _ = pair(kind)
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))

    def fails() -> float:
        raise KeyError("no batch")

    other = torch.optim.SGD(make_params(SHAPES), lr=0.1)
    try:
        with pytest.raises(KeyError, match="no batch"):
            zero.step(fails)
        other.step()
    finally:
        handle.remove()
    assert seen == [zero, other]


@every_partition
@every_kind
def test_hooks_of_state_dicts_may_adapt_them(kind: str, partition: str) -> None:
    zero, plain = pair(kind, partition)
    train(plain, range(2))
    order: list[str] = []

    def unwrap(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert optimizer is zero and saved is not wrapped
        order.append("load pre")
        return dict(saved["inner"])

    def note(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert optimizer is zero and list(saved) == ["state", "param_groups"]
        order.append("post")
        return {**saved, "note": 1}

    wrapped = {"inner": plain.state_dict()}
    zero.register_load_state_dict_pre_hook(unwrap)
    zero.register_load_state_dict_post_hook(lambda optimizer: order.append("load post"))
    zero.register_state_dict_pre_hook(lambda optimizer: order.append("pre"))
    zero.register_state_dict_post_hook(note)
    zero.load_state_dict(wrapped)
    assert list(wrapped) == ["inner"]
    assert_same(state_dict_of(zero), {**plain.state_dict(), "note": 1})
    assert order == ["load pre", "load post", "pre", "post"]


# ---- steps ---------------------------------------------------------------------------------------


class Verbose(torch.optim.SGD):
    """An optimizer whose step takes arguments and adds keys to its groups."""

    def step(self, closure: Any = None, *, calls: Any = None, **kwargs: Any) -> Any:
        for group in self.param_groups:
            group["rounds"] = group.get("rounds", 0) + 1
        if calls is not None:
            calls.append((len(self.param_groups), kwargs))
        return super().step(closure)


def test_step_arguments_and_new_keys() -> None:
    params, calls = make_params(SHAPES), list[Any]()
    groups = [{"params": params[:2]}, {"params": params[2:], "tag": "b"}]
    zero = ZeroRedundancyOptimizer(groups, Verbose, lr=0.1)
    for seed in range(2):
        set_gradients(params, seed=seed)
        assert zero.step(calls=calls, scale=2) is None
    assert calls == [(2, {"scale": 2})] * 2
    assert [group["rounds"] for group in zero.param_groups] == [2, 2]
    assert [group.get("tag") for group in zero.param_groups] == [None, "b"]
    assert state_dict_of(zero)["param_groups"][1]["rounds"] == 2


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.1], total_steps=8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@every_partition
@every_kind
def test_schedules(kind: str, partition: str, schedule: str) -> None:
    """Learning rates follow schedules, and with OneCycleLR momentum and betas do too."""
    zero, plain = pair(kind, partition)
    for optimizer in (zero, plain):
        scheduler = SCHEDULES[schedule](optimizer)
        for seed in range(6):
            train(optimizer, [seed])
            scheduler.step()
    assert_same(params_of(zero), params_of(plain))
    assert_same(state_dict_of(zero), plain.state_dict())


@every_partition
@every_kind
def test_weights_that_are_read_by_columns(kind: str, partition: str) -> None:
    """As after `p.data = p.data.t()` of a square weight: the memory stays, its order changes."""
    zero, plain = pair(kind, partition)
    for optimizer in (zero, plain):
        train(optimizer, [0])
        matrix = params_of(optimizer)[0]
        memory = matrix.data
        matrix.data = memory.as_strided(matrix.shape, (1, matrix.shape[0]))
        if partition == "balanced":
            set_gradients(params_of(optimizer))
            if optimizer is zero:
                with unchanged(zero), pytest.raises(RuntimeError, match=r"strides \(1, 7\)"):
                    zero.step()
            matrix.data = memory
        train(optimizer, range(1, 4))
    assert_same(params_of(zero), params_of(plain))


@pytest.mark.parametrize("change", ["add_param_group", "deepcopy"])
@every_partition
def test_a_learning_rate_set_since_the_last_step_stays(partition: str, change: str) -> None:
    zero, _ = pair("FusedAdamW", partition)
    zero.param_groups[0]["lr"] = 0.2
    if change == "deepcopy":
        zero = copy.deepcopy(zero)
    else:
        zero.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})
    assert zero.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(("saved_as", "loaded_as"), [(True, True), (True, False), (False, True)])
@every_partition
def test_torchs_fused_adamw_resumes(partition: str, saved_as: bool, loaded_as: bool) -> None:
    """Steps stay tensors where the local optimizer needs tensors."""
    _, source = pair(fused=saved_as)
    zero, plain = pair(partition=partition, fused=loaded_as)
    train(source, range(2))
    for optimizer in (zero, plain):
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    for theirs, ours in zip(plain.state.values(), zero.state.values(), strict=True):
        assert_same(ours["step"], theirs["step"])
    for optimizer in (zero, plain):
        train(optimizer, range(2, 5))
    assert_same(state_dict_of(zero), plain.state_dict())
    assert_same(params_of(zero), params_of(plain))


@every_partition
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdamW"])
def test_autograd_notices_that_weights_have_changed(kind: str, partition: str) -> None:
    """A second backward through an earlier graph raises, as it would use the new weights."""
    cls, kwargs = KINDS[kind]
    params = [nn.Parameter(torch.ones(3, 64)), nn.Parameter(torch.ones(64, 3))]
    zero = ZeroRedundancyOptimizer(params, cls, **PARTITIONS[partition], **kwargs)
    loss = (torch.ones(2, 3) @ params[0] @ params[1]).sum()
    loss.backward(retain_graph=True)
    zero.step()
    zero.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lists_of_parameters() -> None:
    """Covers the C++ helpers that loop over a step's parameters."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))]
    params[1].requires_grad_(False)
    assert _C.requires_grad(params) == bytes([1, 0, 1])
    before = _C.places(params)
    for other in (torch.zeros(3), torch.zeros(6)[::2], torch.zeros(3, 1), torch.zeros(3).int()):
        kept = nn.Parameter(other, requires_grad=False)
        assert _C.places([kept, *params[1:]]) != before
    square = torch.eye(2)
    assert _C.places([square.t()]) != _C.places([square]) != _C.places([square[:1]])
    assert _C.places([params[2]]) == _C.places([torch.ones(0)])
    parts = [torch.zeros(3), torch.zeros(2)]
    params[0].grad = torch.ones(3)
    parts[1].grad = torch.ones(2)
    _C.share_gradients(parts, params[:2])
    assert parts[0].grad is params[0].grad and parts[1].grad is None
    _C.clear_gradients(parts)
    assert parts[0].grad is None and params[0].grad is not None
    version = params[0]._version
    _C.increment_versions(params)
    assert params[0]._version == version + 1
    for call in (_C.requires_grad, _C.places, _C.clear_gradients, _C.increment_versions):
        with pytest.raises(TypeError, match="item 0 is no tensor"):
            call([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 tensors for 3 params"):
        _C.share_gradients(parts, params)


# ---- damaged state dicts -------------------------------------------------------------------------

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1.5, float("nan"), "text", [], {}, [1], (), True, torch.ones(2), torch.ones(())]
)
PATH = st.lists(st.integers(0, 30), min_size=1, max_size=5)
DAMAGE = st.tuples(PATH, st.sampled_from(["delete", "replace", "double", "reverse"]), JUNK)


def damage(root: Any, path: Sequence[int], how: str, junk: Any) -> None:
    """Walks down by positions and damages the item at the end."""
    value: Any = root
    for depth, position in enumerate(path):
        if not isinstance(value, dict | list) or not value:
            return
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[position % len(keys)]
        inner: Any = value[key]
        if depth < len(path) - 1 and isinstance(inner, dict | list) and inner:
            value = inner
            continue
        if how == "delete":
            del value[key]
        elif how == "replace":
            value[key] = junk
        elif how == "double" and isinstance(value, list):
            value.append(copy.deepcopy(inner))
        elif how == "double":
            value[junk if isinstance(junk, int | str) else 99] = copy.deepcopy(inner)
        elif isinstance(inner, Tensor):
            value[key] = inner.t() if inner.dim() == 2 else inner.reshape(1, -1)
        elif isinstance(inner, list):
            inner.reverse()
        return


@every_partition
@every_kind
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3))
@example(damages=[([1, 0, 16], "replace", torch.ones(2))])  # amsgrad
@example(damages=[([1, 0, 1], "replace", torch.ones(2))])
def test_damaged_state_dicts_load_or_change_nothing(
    kind: str, partition: str, damages: list[Any]
) -> None:
    zero, plain = pair(kind, partition)
    train(plain, range(2))
    train(zero, range(1))
    bad = copy.deepcopy(plain.state_dict())
    for each in damages:
        damage(bad, *each)
    before = contents(zero)
    try:
        zero.load_state_dict(bad)
    except (ValueError, TypeError, KeyError):
        assert_same(contents(zero), before)


@every_partition
@pytest.mark.parametrize(("kind", "name"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer")])
@pytest.mark.parametrize("wrong", [torch.ones(1), ENDLESS], ids=["one element", "endless"])
def test_what_would_break_the_next_step_is_rejected(
    kind: str, name: str, partition: str, wrong: Any
) -> None:
    zero, plain = pair(kind, partition)
    train(plain, range(1))
    saved = plain.state_dict()
    saved["state"][1][name] = wrong
    with pytest.raises(ValueError, match=rf"{name} of parameter 1"):
        zero.load_state_dict(saved)
    assert not zero.optim.state
