"""ZeroRedundancyOptimizer on one rank behaves like the optimizer that it wraps."""

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Iterator, Sequence
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

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedSGD, GradScaler
from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.ranks import LARGE, MAX_PACKED_BYTES, Ranks, batches

from ...distributed.rank_cases import difference

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

every_kind = pytest.mark.parametrize("kind", KINDS)
every_partition = pytest.mark.parametrize("partition", PARTITIONS)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    timeout = datetime.timedelta(seconds=20)
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: Sequence[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def train(optimizer: Any, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def pair(kind: str, partition: str = "greedy", groups: bool = False, **kwargs: Any) -> Any:
    """Returns our optimizer and the plain optimizer, each with its own named parameters."""
    optimizer_class, defaults = KINDS[kind]
    of = [parameters(), parameters()]
    params: list[Any] = [[(f"p{i}", p) for i, p in enumerate(own)] for own in of]
    if groups:
        params = [[{"params": p[:3], "lr": 0.02}, {"params": p[3:], "lr": 0.03}] for p in params]
    defaults = {**defaults, **kwargs}
    zero = ZeroRedundancyOptimizer(
        params[0], optimizer_class, **{**PARTITIONS[partition], **defaults}
    )
    return zero, of[0], optimizer_class(params[1], **defaults), of[1]


def state_dict_of(zero: Any) -> Any:
    zero.consolidate_state_dict()
    return zero.state_dict()


def check_same(found: Any, expected: Any) -> None:
    assert difference(found, expected) == ""


def test_a_bucket_is_filled_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one bucket's parameters are in memory twice."""
    params = parameters([(64,)] * 4)
    own = [param.data_ptr() for param in params]
    moved: list[int] = []
    zeros = torch.zeros

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        moved.append(sum(p.data_ptr() != at for p, at in zip(params, own, strict=True)))
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", noting)
    buckets = BalancedBuckets(
        Ranks.of(None), Parameters([]), bucket_elements=64, sharded_gradients=False
    )
    buckets.add_group(params)
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


# ---- what is accepted ----------------------------------------------------------------------------


class Unknown(torch.optim.SGD):
    """An optimizer that is neither known to be elementwise nor functional."""


@pytest.mark.parametrize(
    ("params", "kwargs", "error", "message"),
    [
        (torch.ones(3), {}, TypeError, "iterable of Tensors"),
        (3, {}, TypeError, "iterable"),
        ([], {}, ValueError, "empty parameter list"),
        ([{"params": []}], {}, ValueError, "empty parameter list"),
        ([torch.ones(2), 1.5], {}, TypeError, "one of the params is float"),
        ([{"lr": 1.0}], {}, KeyError, "params"),
        ([torch.ones(2), {"params": [torch.ones(2)]}], {}, TypeError, "one of the params is dict"),
        ([{"params": [torch.ones(2)]}, torch.ones(2, 2)], {}, TypeError, "not a mapping"),
        ([torch.ones(2), torch.ones(2).bfloat16()], {}, ValueError, "bfloat16"),
        ([torch.eye(2).to_sparse()], {}, ValueError, "dense"),
        ("good", {"partition": "even"}, ValueError, "'even'"),
        ("good", {"partition": "balanced", "overlap_with_ddp": True}, ValueError, "overlap"),
        ("good", {"sharded_gradients": True}, ValueError, "sharded_gradients=True needs"),
        ("good", {"elementwise": True}, ValueError, "elementwise=True needs"),
        ("good", {"bucket_elements": 0}, ValueError, "bucket_elements=0 needs"),
        ("good", {"params_per_rank": [[]], "overlap_with_ddp": True}, ValueError, "DDP's buckets"),
        ("twice", {}, ValueError, "more than one parameter group"),
    ],
)
def test_arguments_are_checked(
    params: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    if params == "good" or params == "twice":
        p = parameters()
        params = [{"params": p}, {"params": p[:1]}] if params == "twice" else p
    with pytest.raises(error, match=message):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **kwargs)


def test_schedules_may_miss_0_by_a_rounding() -> None:
    params = parameters()
    functional = functional_optim_map[FusedAdamW](params, lr=0.1)
    functional.param_group["lr"] = -3e-19
    functional.step([torch.ones_like(param) for param in params])
    functional.param_group["lr"] = float("nan")
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        functional.step([torch.ones_like(param) for param in params])


def test_functional_optimizers_are_for_overlap() -> None:
    functional = functional_optim_map[torch.optim.AdamW]
    with pytest.raises(ValueError, match="functional optimizer"):
        ZeroRedundancyOptimizer(parameters(), functional, lr=0.1)
    with pytest.raises(ValueError, match="Unknown"):
        ZeroRedundancyOptimizer(parameters(), Unknown, overlap_with_ddp=True, lr=0.1)
    groups = [{"params": [p]} for p in parameters()]
    with pytest.raises(ValueError, match="one param group"):
        ZeroRedundancyOptimizer(groups, torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    for kind in (FusedAdam, FusedAdamW, FusedLion, FusedSGD):
        with pytest.raises(ValueError, match="have no norms"):
            ZeroRedundancyOptimizer(
                parameters(), kind, overlap_with_ddp=True, lr=0.1, max_grad_norm=1.0
            )
    for known in (functional, torch.optim.AdamW, FusedAdam, FusedAdamW):
        zero = ZeroRedundancyOptimizer(parameters(), known, overlap_with_ddp=True, lr=0.1)
        before = [p.detach().clone() for p in zero.param_groups[0]["params"]]
        give_gradients(zero.param_groups[0]["params"], 0)
        assert zero.step() is None
        check_same([p.detach() for p in zero.param_groups[0]["params"]], before)
        with pytest.raises(RuntimeError, match="fully initialized"):
            zero.consolidate_state_dict()
        with pytest.raises(RuntimeError, match="before clipping"):
            zero.clip_grad_norm_(1.0)
        for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
            scaler.scale(torch.ones(()))
            with pytest.raises(RuntimeError, match="use no scaler"):
                scaler.step(zero)


@pytest.mark.parametrize(("kind", "device"), [(torch.optim.AdamW, "cpu"), (FusedAdamW, "meta")])
def test_steps_in_backward_find_loaded_counts_where_they_need_them(kind: Any, device: str) -> None:
    plain_params = parameters()
    plain = kind(plain_params, lr=0.1)
    train(plain, plain_params, range(1))
    params = [nn.Parameter(p.detach().to("meta")) for p in plain_params]
    zero = ZeroRedundancyOptimizer(params, kind, overlap_with_ddp=True, lr=0.1)
    zero._overlap_info.params_per_bucket.append(params)
    zero._init_zero_for_overlap()
    zero.load_state_dict(plain.state_dict())
    assert {entry["step"].device.type for entry in zero.optim.state.values()} == {device}


@every_kind
def test_torchs_own_hook(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's hook rejects gloo, with which ranks may wait for each other; here is one rank."""
    models = [nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ddp = DistributedDataParallel(models[0], bucket_cap_mb=0.01)
    cls, defaults = KINDS[kind]
    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, **defaults)
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
    check_same(list(models[0].state_dict().values()), list(models[1].state_dict().values()))


@pytest.mark.parametrize(
    "options", [{"state_dtype": "int8"}, {"master_weights": "fp32"}, {"stochastic_rounding": True}]
)
def test_steps_in_backward_hold_plain_state_only(options: dict[str, Any]) -> None:
    functional = functional_optim_map[FusedAdamW]
    with pytest.raises(ValueError, match=f"state dtypes.*{next(iter(options))}"):
        functional(parameters(), **options)


def test_balanced_wants_elementwise_optimizers() -> None:
    with pytest.raises(ValueError, match="elementwise=True"):
        ZeroRedundancyOptimizer(parameters(), Unknown, partition="balanced", lr=0.1)
    params, plain_params = parameters(), parameters()
    zero = ZeroRedundancyOptimizer(params, Unknown, partition="balanced", elementwise=True, lr=0.1)
    train(zero, params, range(2))
    train(Unknown(plain_params, lr=0.1), plain_params, range(2))
    check_same([p.detach() for p in params], [p.detach() for p in plain_params])


@every_partition
def test_other_optimizers_reject_one_ranks_part(partition: str) -> None:
    params = parameters()
    kind, kwargs = KINDS["FusedAdamW"]
    zero = ZeroRedundancyOptimizer(params, kind, **kwargs, **PARTITIONS[partition])
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    plain = FusedAdamW(parameters())
    with pytest.raises(ValueError, match="exp_avg of parameter 0 is one rank's part: call consol"):
        plain.load_state_dict(zero.state_dict())
    assert not plain.state
    zero.consolidate_state_dict()
    plain.load_state_dict(zero.state_dict())


def test_pickling_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(pair("AdamW")[0])


# ---- hooks ---------------------------------------------------------------------------------------


@every_kind
def test_step_hooks(kind: str) -> None:
    """Global and own hooks run once a step, for the wrapper only."""
    zero, params, _, _ = pair(kind)
    seen: list[tuple[str, Any]] = []

    def noted(what: str) -> Any:
        return lambda optimizer, args, kwargs: seen.append((what, optimizer))

    handles = [
        register_optimizer_step_pre_hook(noted("pre")),
        register_optimizer_step_post_hook(noted("post")),
        zero.register_step_pre_hook(noted("own pre")),
        zero.register_step_post_hook(noted("own post")),
    ]
    try:
        train(zero, params, range(2))
    finally:
        for handle in handles:
            handle.remove()
    once = ["pre", "own pre", "own post", "post"]
    assert sorted(what for what, _ in seen[:4]) == sorted(once)
    assert [what for what, _ in seen[:4]] == [what for what, _ in seen[4:]]
    assert len(seen) == 8
    assert all(optimizer is zero for _, optimizer in seen)
    train(zero, params, range(2, 3))
    assert len(seen) == 8


@every_kind
def test_global_hooks_survive_a_step_that_raises(kind: str) -> None:
    zero = pair(kind)[0]
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))

    def fails() -> float:
        raise KeyError("no batch")

    try:
        with pytest.raises(KeyError, match="no batch"):
            zero.step(fails)
        other = torch.optim.SGD(parameters(), lr=0.1)
        other.step()
    finally:
        handle.remove()
    assert seen == [zero, other]


@every_kind
def test_state_dict_hooks(kind: str) -> None:
    zero, params, _, _ = pair(kind)
    train(zero, params, range(1))
    order: list[str] = []

    def post(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert optimizer is zero and list(saved) == ["state", "param_groups"]
        order.append("post")
        return {**saved, "note": 1}

    zero.register_state_dict_pre_hook(lambda optimizer: order.append("pre"))
    zero.register_state_dict_post_hook(post)
    saved = state_dict_of(zero)
    assert order == ["pre", "post"]
    assert saved["note"] == 1


@pytest.mark.parametrize("change", ["add_param_group", "deepcopy"])
@every_partition
def test_a_learning_rate_set_since_the_last_step_stays(partition: str, change: str) -> None:
    first, *others = parameters()
    zero = ZeroRedundancyOptimizer([first], FusedAdamW, lr=0.1, **PARTITIONS[partition])
    zero.param_groups[0]["lr"] = 0.2
    if change == "deepcopy":
        zero = copy.deepcopy(zero)
    else:
        zero.add_param_group({"params": others})
    assert zero.param_groups[0]["lr"] == 0.2


@every_partition
@every_kind
def test_load_hooks_may_adapt_the_dict(kind: str, partition: str) -> None:
    zero, _, plain, plain_params = pair(kind, partition)
    train(plain, plain_params, range(2))
    given = plain.state_dict()
    order: list[str] = []

    def rename(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert optimizer is zero and saved is not wrapped
        order.append("pre")
        return dict(saved["inner"])

    wrapped = {"inner": given}
    zero.register_load_state_dict_pre_hook(rename)
    zero.register_load_state_dict_post_hook(lambda optimizer: order.append("post"))
    zero.load_state_dict(wrapped)
    assert order == ["pre", "post"]
    assert list(wrapped) == ["inner"]
    check_same(state_dict_of(zero), given)


# ---- steps ---------------------------------------------------------------------------------------


@every_partition
@every_kind
def test_closures(kind: str, partition: str) -> None:
    zero, params, plain, plain_params = pair(kind, partition)
    for optimizer, of in ((zero, params), (plain, plain_params)):

        def closure(optimizer: Any = optimizer, of: Any = of) -> Tensor:
            optimizer.zero_grad()
            assert torch.is_grad_enabled()
            loss = torch.stack([p.square().sum() for p in of]).sum()
            torch.autograd.backward(loss)
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        losses += [optimizer.step(closure=closure).item()]
        if optimizer is zero:
            expected = losses
    assert losses == expected
    check_same([p.detach() for p in params], [p.detach() for p in plain_params])


class Verbose(torch.optim.SGD):
    """An optimizer whose step takes arguments and adds keys to its groups."""

    def step(self, closure: Any = None, *, calls: Any = None, **kwargs: Any) -> Any:
        for group in self.param_groups:
            group["rounds"] = group.get("rounds", 0) + 1
        if calls is not None:
            calls.append((len(self.param_groups), kwargs))
        return super().step(closure)


def test_step_arguments_and_new_keys() -> None:
    params = parameters()
    zero = ZeroRedundancyOptimizer(
        [{"params": params[:2]}, {"params": params[2:], "tag": "b"}], Verbose, lr=0.1
    )
    calls: list[Any] = []
    for step in range(2):
        give_gradients(params, step)
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
    zero, params, plain, plain_params = pair(kind, partition, groups=True)
    for optimizer, of in ((zero, params), (plain, plain_params)):
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(6):
            give_gradients(of, step)
            optimizer.step()
            scheduler.step()
    check_same([p.detach() for p in params], [p.detach() for p in plain_params])
    check_same(state_dict_of(zero), plain.state_dict())


@pytest.mark.parametrize(("saved_as", "loaded_as"), [(True, True), (True, False), (False, True)])
@every_partition
def test_torchs_fused_adamw_resumes(partition: str, saved_as: bool, loaded_as: bool) -> None:
    """Steps stay tensors where the local optimizer needs tensors."""
    _, _, plain, plain_params = pair("AdamW", fused=saved_as)
    zero, params, again, again_params = pair("AdamW", partition, fused=loaded_as)
    train(plain, plain_params, range(2))
    saved = plain.state_dict()
    with torch.no_grad():
        for p, q, r in zip(plain_params, params, again_params, strict=True):
            q.copy_(p)
            r.copy_(p)
    zero.load_state_dict(saved)
    again.load_state_dict(copy.deepcopy(saved))
    for theirs, mine in zip(again.state.values(), zero.state.values(), strict=True):
        kinds = [(s.dtype, s.device, s.shape) for s in (theirs["step"], mine["step"])]
        assert kinds[0] == kinds[1]
    train(zero, params, range(2, 5))
    train(again, again_params, range(2, 5))
    check_same(state_dict_of(zero), again.state_dict())
    check_same([p.detach() for p in params], [p.detach() for p in again_params])


# ---- damaged state dicts -------------------------------------------------------------------------


@every_partition
@every_kind
def test_the_state_dict_of_another_model(kind: str, partition: str) -> None:
    zero, params, _, _ = pair(kind, partition)
    train(zero, params, range(1))
    before = copy.deepcopy(state_dict_of(zero))
    optimizer_class, defaults = KINDS[kind]
    for shapes in ([(7, 5)], [*SHAPES, (2,)], [(5, 7), (33,), (4, 3), (64,)]):
        others = parameters(shapes)
        other = optimizer_class(others, **defaults)
        train(other, others, range(1))
        with pytest.raises(ValueError, match="param"):
            zero.load_state_dict(other.state_dict())
        check_same(state_dict_of(zero), before)


@every_partition
@pytest.mark.parametrize(("kind", "name"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer")])
def test_one_element_does_not_fit_many(kind: str, name: str, partition: str) -> None:
    """A single element would broadcast, or fail only in the next step."""
    zero, _, plain, plain_params = pair(kind, partition)
    train(plain, plain_params, range(1))
    saved = plain.state_dict()
    saved["state"][1][name] = torch.ones(1)
    with pytest.raises(ValueError, match=rf"{name} of parameter 1"):
        zero.load_state_dict(saved)


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
        elif how == "double" and isinstance(value, dict):
            value[junk if isinstance(junk, int | str) else 99] = copy.deepcopy(inner)
        elif isinstance(inner, Tensor):
            value[key] = inner.t() if inner.dim() == 2 else inner.reshape(1, -1)
        elif isinstance(inner, list):
            inner.reverse()
        return


def kept(zero: Any) -> Any:
    settings = [
        [{key: value for key, value in group.items() if key != "params"} for group in groups]
        for groups in (zero.param_groups, zero.optim.param_groups)
    ]
    params = [p.detach() for group in zero.param_groups for p in group["params"]]
    return copy.deepcopy([settings, [dict(entry) for entry in zero.state.values()], params])


some_damage = given(damages=st.lists(DAMAGE, min_size=1, max_size=3))
quickly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def damaged_pair(kind: str, partition: str, damages: list[Any]) -> tuple[Any, Any]:
    """Returns a trained optimizer and a damaged state dict of its plain counterpart."""
    zero, params, plain, plain_params = pair(kind, partition, groups=True)
    train(plain, plain_params, range(2))
    train(zero, params, range(1))
    bad = copy.deepcopy(plain.state_dict())
    for path, how, junk in damages:
        damage(bad, path, how, junk)
    return zero, bad


@every_partition
@every_kind
@quickly
@some_damage
@example(damages=[([1, 0, 16], "replace", torch.ones(2))])  # amsgrad
@example(damages=[([1, 0, 1], "replace", torch.ones(2))])
def test_damaged_state_dicts_load_or_change_nothing(
    kind: str, partition: str, damages: list[Any]
) -> None:
    zero, bad = damaged_pair(kind, partition, damages)
    before = kept(zero)
    try:
        zero.load_state_dict(bad)
    except (ValueError, TypeError, KeyError):
        check_same(kept(zero), before)


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
    from torchopt_ext import _C

    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))]
    params[1].requires_grad_(False)
    assert _C.requires_grad(params) == bytes([1, 0, 1])
    before = _C.addresses(params)
    params[0].data = torch.zeros(3)
    assert _C.addresses(params) != before
    assert len(before) == 24 and before[16:] == bytes(8)
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
    for call in (_C.requires_grad, _C.addresses, _C.clear_gradients, _C.increment_versions):
        with pytest.raises(TypeError, match="item 0 is no tensor"):
            call([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 tensors for 3 params"):
        _C.share_gradients(parts, params)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_state_that_holds_itself_is_refused(kind: str) -> None:
    cls, kwargs = KINDS[kind]
    zero = ZeroRedundancyOptimizer(parameters(), cls, **kwargs)
    plain = cls(parameters(), **kwargs)
    endless: list[Any] = []
    endless.append(endless)
    state = plain.state_dict()
    entry = {"step": 1.0, "exp_avg": torch.ones(7, 5), "exp_avg_sq": torch.ones(7, 5)}
    name = "step" if kind == "AdamW" else "momentum_buffer"
    state["state"][0] = entry | {name: endless}
    with pytest.raises(ValueError, match=r"(step|momentum_buffer) of parameter 0 is"):
        zero.load_state_dict(state)
    assert not zero.optim.state
