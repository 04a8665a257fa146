"""Cases of zero_faults_worker.py about steps: overlap, scalers, schedules, copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import difference, gathered
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from zero_faults_common import (
    FUSED,
    KINDS,
    PARTITIONS,
    Cases,
    assert_same,
    clones,
    give_gradients,
    parameters,
    plain_over,
    raises,
    state_dict_of,
    train,
    zero_over,
)

from torchopt_ext import GradScaler
from torchopt_ext.zero import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

STEPS = 7
LBFGS: dict[str, Any] = {"lr": 0.1, "max_iter": 5}


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 9), nn.Tanh(), nn.Linear(9, 3))


def data_of(step: int) -> Tensor:
    """Returns data that differs on every rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 5, generator=generator)


# ---- overlap with DDP ----------------------------------------------------------------------------


def overlap(
    kind: str,
    interleaved: bool,
    shard_buckets: bool,
    group: Any = None,
    schedule: bool = False,
    find_unused: bool = False,
    **defaults: Any,
) -> None:
    """The weights equal bitwise DDP with the plain optimizer, also under a schedule."""
    idle = 1 if find_unused else 2  # backward passes until DDP's final buckets are known
    group = dist.group.WORLD if group is None else group
    models = [small_model() for _ in range(2)]
    ddp, plain_ddp = (
        DistributedDataParallel(
            m, process_group=group, bucket_cap_mb=0.0004, find_unused_parameters=find_unused
        )
        for m in models
    )
    zero = zero_over(ddp.parameters(), kind, process_group=group, overlap_with_ddp=True, **defaults)
    zero.step()
    load = partial(zero.load_state_dict, {"state": {}, "param_groups": []})
    for call in (zero.state_dict, zero.consolidate_state_dict, load):
        with raises(RuntimeError, "fully initialized"):
            call()
    seen: set[int] = set()

    def average(state: Any, bucket: Any) -> Any:
        seen.add(bucket.index())
        if not find_unused:
            return allreduce_hook(state, bucket)
        own = bucket.buffer() / dist.get_world_size(group)  # not reduced in place
        work: Any = dist.all_reduce(own, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    wrap = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(group, wrap(average, ddp, zero, shard_buckets=shard_buckets))
    plain = plain_over(plain_ddp.parameters(), kind, **defaults)
    optimizers = (zero, plain)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.25) for o in optimizers * schedule]
    start = clones([p.detach() for p in models[0].parameters()])
    for step in range(STEPS):
        for model, optimizer in ((ddp, zero), (plain_ddp, plain)):
            optimizer.zero_grad()
            model(data_of(step)).square().mean().backward()
            if optimizer is zero or step >= idle:
                optimizer.step()
        for scheduler in schedules:
            scheduler.step()
        for model in models if step == 4 else []:
            model[2].bias.data = model[2].bias.data * 0.5
    ours, expected = ([p.detach() for p in m.parameters()] for m in models)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    saved = state_dict_of(zero, rank, size)["state"]
    plain_state = plain.state_dict()["state"]
    assert len(seen) > 1
    assert any(not torch.equal(a, b) for a, b in zip(ours, start, strict=True))
    assert_same(ours, expected)
    assert len(zero.state) < 6
    assert sum(gathered(len(zero.state), group)) == 6
    assert list(saved) == list(plain_state)
    for i, entry in plain_state.items():
        assert all(saved[i][name].equal(value) for name, value in entry.items())


def overlap_subgroup(interleaved: bool, shard_buckets: bool, kind: str) -> None:
    """Overlaps in a group of ranks 2 and 3, whose ranks in the group are 0 and 1."""
    group = dist.new_group([2, 3])
    if dist.get_rank() >= 2:
        overlap(kind, interleaved, shard_buckets, group)


def hook_over_plain_zero() -> None:
    ddp = DistributedDataParallel(small_model())
    zero = zero_over(ddp.parameters(), "AdamW")
    with raises(ValueError, "overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, zero)
    zero = zero_over(ddp.parameters(), "AdamW", overlap_with_ddp=True)
    hook_with_zero_step(allreduce_hook, ddp, zero)
    with raises(ValueError, "a hook already"):
        hook_with_zero_step(allreduce_hook, DistributedDataParallel(small_model()), zero)


# ---- gradient scalers ----------------------------------------------------------------------------


class Counted:
    """Counts how often the scaler takes the path that reads the flag on the host."""

    def __init__(self, scaler: Any) -> None:
        self.calls, self.original = 0, scaler._maybe_opt_step
        scaler._maybe_opt_step = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.original(*args, **kwargs)


def scaled(scaler_class: Any, kind: str, bad: str, unscale: bool = False, **options: Any) -> None:
    """Takes five steps. In the third, a gradient overflows on its owner or on all ranks: all skip.

    Steps whose flag the ranks exchange are not read on the host.
    """
    params, plain_params = parameters(), parameters()
    fused = {"fused": options["fused"]} if "fused" in options else {}
    zero, plain = zero_over(params, kind, **options), plain_over(plain_params, kind, **fused)
    scaler = scaler_class("cpu", init_scale=1.0 if bad == "none" else 1024.0, growth_interval=100)
    counted = Counted(scaler)
    scaler.scale(torch.ones(1))
    moved, scales = [], []
    owner = zero.partition.owner[params[3]] if "partition" not in options else 0
    for step in range(5):
        before = clones([p.detach() for p in params])
        give_gradients(params, step)
        for param in params:
            assert param.grad is not None
            param.grad *= scaler.get_scale()
        if step == 2 and (bad == "all" or (bad == "owner" and dist.get_rank() == owner)):
            assert params[3].grad is not None
            params[3].grad.view(-1)[0] = math.inf
        if unscale:
            scaler.unscale_(zero)
        scaler.step(zero)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(bool(difference([p.detach() for p in params], before)))
        if step != 2 or bad == "none":
            give_gradients(plain_params, step)
            plain.step()
    good = bad == "none"
    assert moved == [True, True, good, True, True]
    assert scales == ([1.0] * 5 if good else [1024.0] * 2 + [512.0] * 3)
    assert counted.calls == 0 or bad == "all"
    assert not {"grad_scale", "found_inf"} & vars(zero.optim).keys()
    assert_same(params, plain_params)


# ---- copies, replaced weights, rounding ----------------------------------------------------------


def copied(kind: str, alone: bool, **options: Any) -> None:
    """Copies an optimizer, alone or with its model. The copy trains first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain_model = small_model(), small_model()
    params, plain_params = list(model.parameters()), list(plain_model.parameters())
    zero, plain = zero_over(params, kind, **options), plain_over(plain_params, kind)
    train(zero, params, range(2))
    train(plain, plain_params, range(2))
    before = clones([p.detach() for p in params])
    state_before = state_dict_of(zero, rank, size)
    if alone:
        twin = copy.deepcopy(zero)
        own = [p for group in twin.param_groups for p in group["params"]]
    else:
        twin_model, twin = copy.deepcopy((model, zero))
        own = list(twin_model.parameters())
    shared = len({p.data_ptr() for p in own} & {p.data_ptr() for p in params})
    train(twin, own, range(2, 4))
    assert shared == 0
    assert_same([p.detach() for p in params], before)
    assert_same(state_dict_of(zero, rank, size), state_before)
    train(zero, params, range(2, 4))
    train(plain, plain_params, range(2, 4))
    assert_same(params, plain_params)
    assert_same(own, plain_params)
    assert_same(state_dict_of(twin, rank, size), clones(plain.state_dict()))


def replaced_weights(kind: str, **options: Any) -> None:
    """Moves the weights to other memory after the optimizer was built."""
    params, plain_params = parameters(), parameters()
    zero, plain = zero_over(params, kind, **options), plain_over(plain_params, kind)
    for turn in range(2):
        for of in (params, plain_params):
            generator = torch.Generator().manual_seed(50 + turn)
            for param in of:
                param.data = torch.randn(param.shape, generator=generator)
        train(zero, params, range(2 * turn, 2 * turn + 2))
        train(plain, plain_params, range(2 * turn, 2 * turn + 2))
    assert_same(params, plain_params)


def exchanged_weights(kind: str, **options: Any) -> None:
    """Parameters exchange memory, and get values whose memory the program keeps, and its own back.

    Parameters that share memory are rejected on all ranks, before anything is changed.
    """
    params, plain_params = parameters([(70, 3)] * 4), parameters([(70, 3)] * 4)
    zero, plain = zero_over(params, kind, **options), plain_over(plain_params, kind)
    for of, optimizer in ((params, zero), (plain_params, plain)):
        train(optimizer, of, range(1))
        of[0].data, of[1].data = of[1].data, of[0].data
        train(optimizer, of, range(1, 2))
        backup = [p.data for p in of]
        values = clones(backup)
        for param in of[:3]:
            param.data = torch.ones_like(param)
        train(optimizer, of, range(2, 3))
        assert_same(backup[:3], values[:3])
        for param, value in zip(of[:3], backup, strict=False):
            param.data = value
        train(optimizer, of, range(3, 5))
    assert_same(params, plain_params)
    own, before = params[1].data, clones([p.detach() for p in params])
    params[1].data = params[0].data
    give_gradients(params, 5)
    with raises(
        RuntimeError, "parameter 0 of shape (70, 3) and parameter 1 of shape", "share memory"
    ):
        zero.step()
    with raises(ValueError, "share memory"):
        zero_over(params, kind, **options)
    with raises(ValueError, "share memory"):
        zero.add_param_group({"params": [nn.Parameter(params[2].data)]})
    params[1].data = own
    assert_same([p.detach() for p in params], before)
    train(zero, params, range(5, 6))
    train(plain, plain_params, range(5, 6))
    assert_same(params, plain_params)


def closures() -> None:
    """Steps by LBFGS, which is done after one call of the closure on one rank only."""
    params, plain_params = parameters([(4,), (4,)]), parameters([(4,), (4,)])
    for of in (params, plain_params):
        of[0].data.zero_()
    zero = ZeroRedundancyOptimizer(params, torch.optim.LBFGS, **LBFGS)
    plain = [torch.optim.LBFGS([param], **LBFGS) for param in plain_params]
    calls = 0

    def closure(of: Sequence[Tensor] = params) -> Tensor:
        nonlocal calls
        calls += 1
        for param in of:
            param.grad = None
        loss = of[0].square().sum() + (of[1] - 3).square().square().sum()
        torch.autograd.backward(loss)
        return loss

    for _ in range(2):
        zero.step(closure)
    found = calls
    for optimizer in plain * 2:
        optimizer.step(partial(closure, plain_params))
    assert sorted(gathered(found)) == [2, 10]
    assert_same(params, plain_params)


# ---- all of them ---------------------------------------------------------------------------------


def cases_of_two() -> Cases:
    found: Cases = {"hook over plain zero": hook_over_plain_zero, "closures": closures}
    for kind in KINDS:
        for name, options in PARTITIONS.items():
            where = f"{kind}, {name}"
            for alone in (True, False):
                name = f"copied {where}{', alone' * alone}"
                found[name] = partial(copied, kind, alone, **options)
            found[f"replaced weights {where}"] = partial(replaced_weights, kind, **options)
            found[f"exchanged weights {where}"] = partial(exchanged_weights, kind, **options)
        for interleaved in (False, True):
            for schedule in (False, True):
                how = ", interleaved" * interleaved + ", schedule" * schedule
                case = partial(overlap, kind, interleaved, True, None, schedule, schedule)
                found[f"overlap {kind}{how}"] = case
    found |= {f"overlap {kind}": partial(overlap, kind, False, True) for kind in FUSED}
    for name, options in PARTITIONS.items():
        ours = partial(scaled, GradScaler, "FusedAdamW", **options)
        found[f"our scaler {name}"] = partial(ours, "owner")
        found[f"our scaler {name}, unscaled before"] = partial(ours, "owner", unscale=True)
        found[f"our scaler, all well, {name}"] = partial(ours, "none")
    for bad in ("none", "all"):
        theirs = partial(scaled, torch.amp.GradScaler)
        found[f"stock scaler, FusedAdamW, {bad}"] = partial(theirs, "FusedAdamW", bad)
        found[f"stock scaler, fused AdamW, {bad}"] = partial(theirs, "AdamW", bad, fused=True)
    return found


def cases_of_four() -> Cases:
    found: Cases = {}
    for kind in ("AdamW", "FusedAdamW"):
        for interleaved in (False, True):
            for shard in (False, True):
                how = f"{kind}{', interleaved' * interleaved}{', shards' * shard}"
                found[f"subgroup {how}"] = partial(overlap_subgroup, interleaved, shard, kind)
    return found
