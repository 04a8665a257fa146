"""Cases of test_workers.py: ZeRO in a training loop ends where a plain optimizer ends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim as stock
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from zero_common import (
    FUSED,
    KINDS,
    PARTITIONS,
    ROUNDING,
    SHARDED,
    Cases,
    Traffic,
    furthest,
    layers,
    own_group,
    parameters,
    plain_over,
    whole_state,
    zero_over,
)

from tests.support.compare import assert_same, difference
from tests.support.problems import copy_params, set_gradients, train
from tests.support.ranks import counted_calls, gathered, run_cases
from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.zero import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

BF16 = torch.bfloat16
DATA = torch.ones(2, 70)


def against_plain(
    run: Callable[[Any, Any], Any],
    kind: str = "SGD",
    model: Callable[[], nn.Module] = lambda: layers(4),
    **options: Any,
) -> None:
    """Asserts that a program ends with the same weights, whichever optimizer it has. All ranks have
    the same data."""
    one, other = model(), model()
    run(one, zero_over(one.parameters(), kind, **options))
    run(other, plain_over(other.parameters(), kind))
    assert furthest(one, other) <= ROUNDING


# ---- owners and buckets --------------------------------------------------------------------------


def frozen(**options: Any) -> None:
    """Trainable elements are spread and sent, frozen ones are not.

    torch's rule would give the ranks 0, 300, 300 and 200 trainable elements.
    """
    params = parameters([(400,), (30, 10), (300,), (100,), (100,), (50,)])
    for number in (0, 5):
        params[number].requires_grad_(False)
    zero = zero_over(params, "AdamW", **options)
    owner_of = zero.partition.owner
    loads = [0] * 4
    for param in params[1:5]:
        loads[owner_of[param]] += param.numel()
    assert sorted(loads) == [100, 100, 300, 300]
    owners = [owner_of[param] for param in params]
    with Traffic() as traffic:
        train(zero, range(2), params[1:5])
    # In each step the ranks agree twice on whether to take it, by 16 bytes. A bucket adds less than
    # 64 bytes per parameter.
    exact = 2 * (800 * 4 + 2 * 16)
    assert exact <= traffic.bytes.total() <= exact + (2 * 4 * 64 if options else 0)
    params[0].requires_grad_(True)
    train(zero, range(1), params[:5])
    assert gathered(owners) == [[owner_of[p] for p in params]] * 4


PLANS: list[list[list[tuple[int, ...]]]] = [
    [[(400,), (300,), (300,), (100,), (100,)]],
    [[(3, 3)] * 9, [(5,), (0,), (7, 2)], [(1,)]],
    [[(i * 37 % 101,) for i in range(40)], [(i * 53 % 97, 2) for i in range(30)]],
    [[(2,)]],
]


def torchs_plan() -> None:
    """The owners are those of torch's class."""
    for shapes in PLANS:
        params = [parameters(of) for of in shapes]
        groups = [{"params": of} for of in params]
        theirs: Any = stock.ZeroRedundancyOptimizer(copy.copy(groups), torch.optim.SGD, lr=0.1)
        ours: Any = ZeroRedundancyOptimizer(copy.copy(groups), torch.optim.SGD, lr=0.1)
        index = {p: i for i, p in enumerate(p for of in params for p in of)}
        plan = [
            [[index[p] for p in group["params"]] for group in of_rank]
            for of_rank in theirs._partition_parameters()
        ]
        numbers = [[[index[p] for p in of] for of in group] for group in ours.partition.params]
        assert [list(groups) for groups in zip(*numbers, strict=True)] == plan


def buckets(dtype: torch.dtype) -> None:
    """Buckets keep strides. Each parameter begins at a multiple of 64 bytes in one of four."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, 1), nn.Conv2d(7, 3, 3))
    params = [*model.to(dtype).to(memory_format=torch.channels_last).parameters()]
    strides = [p.stride() for p in params]
    zero = zero_over(params, parameters_as_bucket_view=True)
    train(zero, range(3))
    assert [p.stride() for p in params] == strides
    assert params[0].is_contiguous(memory_format=torch.channels_last)
    assert len({p.untyped_storage().data_ptr() for p in params}) == 4
    assert max(p.data_ptr() % 64 for p in params) == 0


def chosen_owners() -> None:
    params = parameters()
    plain_params = copy_params(params)
    owners = [number // 2 for number in range(6)]
    per_rank = [[p for p, of in zip(params, owners, strict=True) if of == r] for r in range(4)]
    zero = zero_over(params, "AdamW", params_per_rank=per_rank)
    plain = plain_over(plain_params, "AdamW")
    for optimizer in (zero, plain):
        train(optimizer, range(3))
    assert [zero.partition.owner[p] for p in params] == owners
    assert [bool(zero.state.get(p)) for p in params] == [of == dist.get_rank() for of in owners]
    assert_same(params, plain_params)
    assert_same(whole_state(zero), plain.state_dict())


def gathers_two_buckets() -> None:
    """At most two buckets of parameters are in flight at a time, as on NCCL."""
    model = layers(6)
    zero = zero_over(model.parameters(), "SGD", **SHARDED)
    partition, flying = zero.partition, []
    partition.gathers = True
    gather = partition._gather
    partition._gather = lambda b: (flying.append(len(partition._updates_in_flight)), gather(b))[1]
    model(DATA).sum().backward()
    zero.step()
    assert len(partition.all_buckets) > max(flying) + 1 == 2


# ---- backward passes, closures, what is done to weights and gradients ----------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("as if memory were short")


def failed_backward(model: Any, optimizer: Any) -> None:
    data = DATA.clone().requires_grad_()
    for segment in (lambda x: x, lambda x: checkpoint(model[1], x, use_reentrant=True)):
        loss = segment(model[2:](Failing.apply(model[:2](data)))).mean()
        with pytest.raises(MemoryError):
            loss.backward()
        for again in range(3):
            if again:  # the first pass adds to what the failed pass left
                optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()


def reentrant_and_tied(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        x = DATA.clone().requires_grad_()
        for _ in range(2):  # the same layers twice, in separate segments
            x = checkpoint(model[:2], x, use_reentrant=True)
        model[2:](x).square().mean().backward()
        optimizer.step()


def closure_replaces_memory(model: Any, optimizer: Any) -> None:
    def closure() -> Tensor:
        for param in model.parameters():
            param.data = param.data.clone()
        optimizer.zero_grad()
        loss = model(DATA).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        model = layers(4)
    for param in model.parameters():
        param.data = param.detach().clone()
    return model


def scheduled(model: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    for seed in range(4):
        train(optimizer, [seed])
        scheduler.step()
    if isinstance(optimizer, ZeroRedundancyOptimizer):  # a copy does not keep the scheduler's patch
        twin, copied = copy.deepcopy((model, optimizer))
        train(copied, [4])
        assert furthest(model, twin) > 0
    train(optimizer, [4])


def permuted() -> nn.Module:
    """A parameter of which cut gradients are copies."""
    torch.manual_seed(0)
    weight = torch.randn(10, 80, 3, 3).contiguous(memory_format=torch.channels_last)
    return nn.ParameterList([nn.Parameter(weight)])


def clipped(model: Any, optimizer: Any) -> None:
    """Clipping reaches gradients that were copied; what is done to them afterwards, too."""
    for max_norm, factor in ((1.0, 1.0), (math.inf, 2.0)):
        for param in model.parameters():
            param.grad = torch.arange(float(param.numel())).view(param.shape).to(param.dtype)
        clip = getattr(optimizer, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_,
                                                             [*model.parameters()]))  # fmt: skip
        norm = clip(max_norm)
        if factor != 1.0:
            for param in model.parameters():
                param.grad *= factor
        optimizer.step()
        expected = math.sqrt(sum(n * n for p in model.parameters() for n in range(p.numel())))
        assert norm.item() == pytest.approx(expected, rel=1e-5)


def complex_numbers() -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.ones(5, dtype=torch.complex64)) for _ in "ab")


def by_lbfgs() -> None:
    """LBFGS is done after one call of the closure on one rank only."""
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(4))]
    dist.broadcast(params[1].data, 0)
    plain_params, calls = copy_params(params), 0
    options: dict[str, Any] = {"lr": 0.1, "max_iter": 5}
    zero = ZeroRedundancyOptimizer(params, torch.optim.LBFGS, **options)

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
    assert sorted(gathered(calls)) == [2, 10]
    for optimizer in [torch.optim.LBFGS([param], **options) for param in plain_params]:
        for _ in range(2):
            optimizer.step(partial(closure, plain_params))
    assert_same(params, plain_params)


def masters_from_fp32(partition: str) -> None:
    """All ranks' parameters take the weights, and masters all of their bits."""
    exact = layers(2)
    options = {"master_weights": "remainder"}
    zeros = [copy.deepcopy(exact).to(BF16) for _ in range(2)]
    for model in zeros:
        for param in model.parameters():
            param.data.zero_()
    zero = zero_over(zeros[0].named_parameters(), partition=partition, **options)
    plain = plain_over(zeros[1].named_parameters(), **options)
    for optimizer in (zero, plain):
        optimizer.refresh_masters(from_=exact.state_dict())
    for _ in range(2):
        assert_same(*([*model.parameters()] for model in zeros))
        for optimizer in (zero, plain):
            train(optimizer, [0])
    zero.max_grad_norm = 0.25
    assert zero.optim.max_grad_norm == 0.25


def unwritten_weights(partition: str, gathers: bool) -> None:
    """Masters are compared with weights after user code has written to them, and only then."""
    model = layers(3).to(BF16)
    zero = zero_over(model.parameters(), partition=partition, master_weights="fp32")
    zero.partition.gathers = gathers
    for step in range(6):
        if step in (2, 4):
            for param in model.parameters():
                param.detach()[::2] *= -0.5
        set_gradients(model.parameters(), seed=step)
        with counted_calls(torch.ops.aten.where.self) as calls:
            zero.step()
        assert any(gathered(bool(calls))) == (step in (2, 4)), step


def by_another_callable(bad: bool) -> None:
    """Norms and skips do not depend on the callable that makes the local optimizer."""
    clips: dict[str, Any] = {"max_grad_norm": 0.01, "eps": 1e-2}
    makes: list[Any] = [
        partial(FusedAdamW, **clips),
        lambda params, **options: FusedAdamW(params, **clips, **options),
        FusedAdamW,
    ]
    ends = []
    for make in makes:
        params = parameters()
        options = clips if make is FusedAdamW else {}
        zero: Any = ZeroRedundancyOptimizer(params, make, lr=0.1, **options)
        set_gradients(params)
        if bad:
            params[0].grad[0] = torch.inf  # type: ignore[index]
        zero.skip_nonfinite = bad
        zero.step()
        assert bool(zero.control.skip) == bad
        ends.append([*params, torch.zeros(()) if bad else zero.control.grad_norm])
    for other in ends[:-1]:
        assert_same(other, ends[-1])


# ---- gradient scalers ----------------------------------------------------------------------------


def scaled(scaler_class: Any, kind: str, bad: str, unscale: bool = False, **options: Any) -> None:
    """Takes five steps. In the third, a gradient overflows on its owner or on all ranks: all skip.

    Steps whose flag the ranks exchange are not read on the host.
    """
    params = parameters()
    plain_params = copy_params(params)
    fused = {"fused": options["fused"]} if "fused" in options else {}
    zero, plain = zero_over(params, kind, **options), plain_over(plain_params, kind, **fused)
    scaler = scaler_class("cpu", init_scale=1.0 if bad == "none" else 1024.0, growth_interval=100)
    reads, read = [], scaler._maybe_opt_step
    scaler._maybe_opt_step = lambda *args, **kwargs: (reads.append(1), read(*args, **kwargs))[1]
    scaler.scale(torch.ones(1))
    owner = zero.partition.owner[params[3]] if "partition" not in options else 0
    for step in range(5):
        before, skips = [p.detach().clone() for p in params], step == 2 and bad != "none"
        set_gradients(params, seed=step, scale=scaler.get_scale())
        if skips and (bad == "all" or dist.get_rank() == owner):
            params[3].grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
        if unscale:
            scaler.unscale_(zero)
        scaler.step(zero)
        scaler.update()
        assert (difference([p.detach() for p in params], before) == "") == skips
        if not skips:
            train(plain, [step])
    assert scaler.get_scale() == (1.0 if bad == "none" else 512.0)
    assert not reads or bad == "all"
    assert not {"grad_scale", "found_inf"} & vars(zero.optim).keys()
    assert_same(params, plain_params)


# ---- overlap with DDP ----------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 9), nn.Tanh(), nn.Linear(9, 3))


def overlap(
    kind: str,
    interleaved: bool,
    shard_buckets: bool,
    ranks: Sequence[int],
    schedule: bool = False,
    find_unused: bool = False,
) -> None:
    """The weights equal bitwise DDP with the plain optimizer, also under a schedule."""
    group: Any = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return
    idle = 1 if find_unused else 2  # backward passes until DDP's final buckets are known
    models = [small_model() for _ in range(2)]
    of_ddp: dict[str, Any] = {"bucket_cap_mb": 0.0004, "gradient_as_bucket_view": interleaved}
    ddp, plain_ddp = (
        DDP(m, process_group=group, find_unused_parameters=find_unused, **of_ddp) for m in models
    )
    zero = zero_over(ddp.parameters(), kind, process_group=group, overlap_with_ddp=True)
    seen: set[int] = set()

    def average(state: Any, bucket: Any) -> Any:
        seen.add(bucket.index())
        if not find_unused:
            return allreduce_hook(state, bucket)
        share = bucket.buffer() / len(ranks)  # not reduced in place
        work: Any = dist.all_reduce(share, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    wrap = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(group, wrap(average, ddp, zero, shard_buckets=shard_buckets))
    plain = plain_over(plain_ddp.parameters(), kind)
    pairs = ((ddp, zero), (plain_ddp, plain))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.25) for _, o in pairs if schedule]
    for step in range(7):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        data = torch.randn(6, 5, generator=generator)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            if optimizer is zero or step >= idle:
                optimizer.step()
        for scheduler in schedules:
            scheduler.step()
        for model in models if step == 4 else []:
            model[2].bias.data = model[2].bias.data * 0.5
    saved, expected = whole_state(zero)["state"], plain.state_dict()["state"]
    assert len(seen) > 1
    assert furthest(models[0], small_model()) > 0
    assert_same(*([*model.parameters()] for model in models))
    assert len(zero.state) < 6
    assert sum(gathered(len(zero.state), group)) == 6
    for number, entry in expected.items():
        assert all(saved[number][name].equal(value) for name, value in entry.items())


# ---- all of them ---------------------------------------------------------------------------------


def cases_of_two() -> Cases:
    table: Cases = {"LBFGS": by_lbfgs, "gathers two buckets": gathers_two_buckets}
    for run in (failed_backward, reentrant_and_tied):
        table[run.__name__] = partial(against_plain, run, **SHARDED)
    for name, options in PARTITIONS.items():
        for run in (closure_replaces_memory, scheduled):
            table[f"{run.__name__} {name}"] = partial(against_plain, run, **options)
        for model in (permuted, complex_numbers):
            case = partial(against_plain, clipped, model=model, **options)
            table[f"clipped {model.__name__} {name}"] = case
        table[f"made in inference mode {name}"] = partial(
            against_plain, lambda _, o: train(o, range(2)), "FusedAdamW", made_in_inference_mode,
            **options,
        )  # fmt: skip
        ours = partial(scaled, GradScaler, "FusedAdamW", **options)
        table[f"our scaler {name}"] = partial(ours, "owner")
        table[f"our scaler {name}, unscaled before"] = partial(ours, "owner", unscale=True)
        table[f"our scaler, all well, {name}"] = partial(ours, "none")
    for bad in ("none", "all"):
        theirs = partial(scaled, torch.amp.GradScaler)
        table[f"stock scaler, FusedAdamW, {bad}"] = partial(theirs, "FusedAdamW", bad)
        table[f"stock scaler, fused AdamW, {bad}"] = partial(theirs, "AdamW", bad, fused=True)
        table[f"by another callable {bad}"] = partial(by_another_callable, bad == "all")
    for partition in ("greedy", "balanced"):
        table[f"masters from fp32 {partition}"] = partial(masters_from_fp32, partition)
        for gathers in (False, True):
            case = partial(unwritten_weights, partition, gathers)
            table[f"unwritten weights {partition} {gathers}"] = case
    for kind, interleaved, schedule in product(KINDS, (False, True), (False, True)):
        case = partial(overlap, kind, interleaved, True, [0, 1], schedule, schedule)
        table[f"overlap {kind} {interleaved=} {schedule=}"] = case
    return table | {
        f"overlap {kind}": partial(overlap, kind, False, True, [0, 1]) for kind in FUSED
    }


def cases_of_four() -> Cases:
    table: Cases = {"plan": torchs_plan, "params_per_rank": chosen_owners}
    for name in ("greedy", "bucket view"):
        table[f"frozen {name}"] = partial(frozen, **PARTITIONS[name])
    table |= {f"buckets {dtype}": partial(buckets, dtype) for dtype in (torch.float32, BF16)}
    kinds = ("AdamW", "FusedAdamW")
    for kind, interleaved, shard in product(kinds, (False, True), (False, True)):
        case = partial(overlap, kind, interleaved, shard, [2, 3])
        table[f"overlap in a subgroup {kind} {interleaved=} {shard=}"] = case
    return table


if __name__ == "__main__":
    run_cases(lambda: cases_of_two() if dist.get_world_size() == 2 else cases_of_four(), own_group)
