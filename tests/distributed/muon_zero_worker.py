"""Cases of test_workers.py: ranks share Muon's matrices by ZeRO, or divide equal ones."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.distributed.muon_worker import NORMUON, WAYS, Run
from tests.support.compare import assert_same, assert_same_bits
from tests.support.problems import set_gradients
from tests.support.ranks import gathered, run_cases
from torchopt_ext import _C, FusedMuon, ZeroRedundancyOptimizer, digest
from torchopt_ext.optim import exchange
from torchopt_ext.statedict.dcp import load
from torchopt_ext.zero.ranks import Ranks

BALANCED: Any = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon, partition="balanced")


def zero_has_one_process_bits(way: str, **options: Any) -> None:
    """State as it was saved by one process loads, and is saved alike."""
    alone = Run(way=way).train(0, 1)
    build = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon, **options)
    shared = Run(way=way, build=build)
    for p, q in zip(shared.params, alone.params, strict=True):
        p.data.copy_(q)
    shared.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    for run in (alone, shared):
        run.train(2, 3)
        run.params[1].requires_grad_(False)
        run.set_gradients(4, without=(1,))
        run.optimizer.step()
        run.params[1].requires_grad_(True)
        run.params.append(nn.Parameter(torch.full((9, 20), 0.5, dtype=run.params[0].dtype)))
        run.optimizer.add_param_group({"params": [run.params[-1]]})
        run.train(5)
    assert_same_bits(shared.weights(), alone.weights())
    counts = [int(run.optimizer.control.orthogonalized) for run in (alone, shared)]
    assert counts[0] == (
        counts[1] if options["partition"] == "balanced" else sum(gathered(counts[1]))
    )
    folder = Path(gathered(tempfile.mkdtemp())[0])
    dcp.save({"optimizer": shared.optimizer}, checkpoint_id=folder)
    other = Run(way=way, build=build)
    other.params.append(nn.Parameter(torch.zeros(9, 20, dtype=other.params[0].dtype)))
    other.optimizer.add_param_group({"params": [other.params[-1]]})
    for p, q in zip(other.params, alone.params, strict=True):
        p.data.copy_(q)
    load({"optimizer": other.optimizer}, checkpoint_id=folder)
    for run in (alone, shared, other):
        run.train(6)
    assert_same_bits(other.weights(), alone.weights())
    shared.optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same(shared.optimizer.state_dict()["state"], alone.optimizer.state_dict()["state"])
    copied = copy.deepcopy(shared.optimizer)
    assert_same_bits(
        [p.detach() for g in copied.param_groups for p in g["params"]], shared.weights()
    )


def normuon_is_cut_between_rows(**options: Any) -> None:
    """Inside experts, between rows that a cut would otherwise divide, and where rows are short."""
    shapes = ((3, 40, 256), (3, 9000), (128, 27), (50, 100), (2, 70), (1, 70))

    def build(cls: Callable[..., Any], **more: Any) -> tuple[list[nn.Parameter], Any]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        return params, cls(params, lr=0.1, beta2=0.9, max_grad_norm=0.1, **options, **more)

    (expected, alone), (params, zero) = build(FusedMuon), build(BALANCED, bucket_elements=1)
    for seed in range(3):
        for run, optimizer in ((expected, alone), (params, zero)):
            set_gradients(run, seed=seed)
            optimizer.step()
    assert_same_bits(params, expected)
    saved = copy.deepcopy(alone.state_dict())
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same(zero.state_dict()["state"], saved["state"])
    others, other = build(BALANCED, bucket_elements=1)
    for p, q in zip(others, expected, strict=True):
        p.data.copy_(q)
    other.load_state_dict(saved)
    ours = digest(other).sum()
    dist.all_reduce(ours)
    assert int(ours) == int(digest(alone).sum())
    for run, optimizer in ((expected, alone), (params, zero), (others, other)):
        set_gradients(run, seed=3)
        optimizer.step()
    assert_same_bits(params, expected)
    assert_same_bits(others, expected)
    world = dist.get_world_size()
    parts = [part for part in zero.local.parts if not part.is_empty]
    number = {param: k for k, param in enumerate(params)}
    held = gathered([(number[part.param], part.begin, part.end) for part in parts])
    ranks = [sum(any(k == n for k, _, _ in of) for of in held) for n in range(len(shapes))]
    assert world == 1 or all(count > 1 for count in ranks[:4])
    assert world != 2 or any(begin % (40 * 256) for of in held for k, begin, _ in of if k == 0)
    assert not any(begin % shapes[k][-1] for of in held for k, begin, _ in of)


def rows_that_were_cut_reject_normuon() -> None:
    params = [nn.Parameter(torch.ones(1, 9000))]
    zero = BALANCED(params)
    params[0].grad = torch.ones(1, 9000)
    zero.step()
    before = params[0].detach().clone()
    zero.param_groups[0]["beta2"] = 0.9
    with pytest.raises(ValueError, match=r"cut between ranks inside rows, .* build the optimizer"):
        zero.step()
    assert_same_bits(params, [before])


def parts_without_matrices_reject_muon(first_step: int, alone: bool) -> None:
    """Of a group that becomes Muon's after it was divided by elements, also on one rank alone."""

    def build(cls: Callable[..., Any]) -> tuple[list[nn.Parameter], Any]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(64, 64, generator=generator)) for _ in range(3)]
        groups = [{"params": params[:2], "algorithm": "adamw"}, {"params": params[2:]}]
        return params, cls(groups, lr=0.1)

    (expected, one), (params, zero) = build(FusedMuon), build(BALANCED)
    for run, optimizer in ((expected, one), (params, zero)):
        for seed in range(first_step):
            set_gradients(run, seed=seed)
            optimizer.step()
    group = zero.param_groups[0]
    if not alone or dist.get_rank() == 0:
        group["algorithm"] = "muon"
    set_gradients(params, seed=9)
    before = [p.detach().clone() for p in params]
    message = "param group 0 is of Muon, but partition='balanced' has divided it"
    with pytest.raises((ValueError, RuntimeError), match=rf"{message}|rank 0 rejected"):
        zero.step()
    saved = FusedMuon([{"params": params[:2]}, {"params": params[2:]}]).state_dict()
    with pytest.raises(ValueError, match=rf"{message}|group 0 is of muon, expected adam"):
        zero.load_state_dict(saved)
    assert_same_bits(params, before)
    group["algorithm"] = "adamw"
    for run, optimizer in ((expected, one), (params, zero)):
        set_gradients(run, seed=first_step)
        optimizer.step()
    assert_same_bits(params, expected)


def greedy_groups_become_muons() -> None:
    """Whole parameters do, and load what one process saved after the same change."""

    def build(cls: Callable[..., Any]) -> tuple[list[nn.Parameter], Any]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(8, 12, generator=generator)) for _ in range(3)]
        optimizer = cls([{"params": params, "algorithm": "adamw"}], FusedMuon, lr=0.1)
        optimizer.param_groups[0] |= {"algorithm": "muon", "momentum": 0.95, "nesterov": True}
        return params, optimizer

    expected, one = build(lambda groups, cls, **settings: cls(groups, **settings))
    params, zero = build(ZeroRedundancyOptimizer)
    set_gradients(expected)
    one.step()
    for p, q in zip(params, expected, strict=True):
        p.data.copy_(q)
    zero.load_state_dict(copy.deepcopy(one.state_dict()))
    for run, optimizer in ((expected, one), (params, zero)):
        set_gradients(run, seed=1)
        optimizer.step()
    assert_same_bits(params, expected)
    assert sum(gathered(int(zero.control.orthogonalized))) == 3


def keys_that_groups_lose_are_lost() -> None:
    """Also after a step that was rejected."""
    (_, one), (_, zero) = runs = [
        ([p := nn.Parameter(torch.arange(96.0).sin().view(8, 12))], build([p], lr=0.1, beta2=0.9))
        for build in (FusedMuon, partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon))
    ]
    for seed in range(3):
        for params, optimizer in runs:
            set_gradients(params, seed=seed)
            optimizer.step()
        for optimizer in (one, zero):
            optimizer.param_groups[0].pop("beta2", None)
        zero.param_groups[0] |= {"num_heads": 5}
        set_gradients(runs[1][0])
        with pytest.raises((ValueError, RuntimeError), match=r"num_heads 5 do not|rank 0 reject"):
            zero.step()
        del zero.param_groups[0]["num_heads"]
    assert_same_bits(runs[1][0], runs[0][0])


def ranks_raise_together() -> None:
    """What one rank alone does: its closure raises, or a group gets an unknown algorithm."""
    balanced = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon, partition="balanced")
    over = partial(FusedMuon, orthogonalize_over=dist.group.WORLD)
    world = dist.get_world_size()
    for build in (balanced, over):
        run = Run(build=build).train(0)
        before = [weight.clone() for weight in run.weights()]
        run.set_gradients(1)

        def closure() -> float:
            if dist.get_rank() == 0:
                raise KeyError("mine")
            return 0.0

        if build is balanced:
            with pytest.raises((KeyError, RuntimeError), match=r"mine|rank 0 rejected"):
                run.optimizer.step(closure)
        if dist.get_rank() == 0:
            run.optimizer.param_groups[0]["algorithm"] = "mouon"
        with pytest.raises((ValueError, RuntimeError), match=r"mouon|rank 0 rejected"):
            run.optimizer.step()
        run.optimizer.param_groups[0]["algorithm"] = "muon"
        assert_same_bits(run.weights(), before)
        run.train(1)
    run = Run(build=balanced).train(0)
    run.optimizer.param_groups[6]["flatten"] = True  # the experts
    run.set_gradients(1)
    if world > 1:
        with pytest.raises((ValueError, RuntimeError), match="was cut between ranks with flatten"):
            run.optimizer.step()
        with pytest.raises(ValueError, match="is a part of a weight"):
            run.optimizer.optim.scale_(
                run.optimizer.optim.param_groups[0]["params"][0], torch.ones(2)
            )


def several_parameters_a_bucket() -> None:
    """Also without elements, and with torch's own state; gradients as backward makes them."""

    def trained(build: Callable[..., Any]) -> Any:
        generator = torch.Generator().manual_seed(0)
        shapes = ((24, 40), (40, 24), (0, 5), (1, 7))
        params = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        torchs: Any = torch.optim.Muon(params, lr=0.1)
        for p in params:
            p.grad = torch.ones_like(p)
        torchs.step()
        optimizer = build(params, lr=0.1)
        optimizer.load_state_dict(torchs.state_dict())
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([p.square().sum() for p in params]).sum().backward()
            optimizer.step()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict()
        saved = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
        return [p.detach() for p in params], saved

    expected, saved = trained(FusedMuon)
    for sharded in (False, True):
        zero = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon, partition="balanced")
        ours, state = trained(partial(zero, sharded_gradients=sharded))
        if not sharded or dist.get_world_size() in (1, 2, 4):
            assert_same_bits(ours, expected)
            assert_same(state, saved)


def zero_divides_by_cost() -> None:
    """The rank of an embedding gets fewer matrices, but some."""
    world, matrices = dist.get_world_size(), 4 * dist.get_world_size()
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(matrices)]
    embedding = nn.Parameter(torch.ones(64 * matrices // 2, 64))
    groups = [{"params": [embedding], "algorithm": "adamw"}, {"params": params}]
    zero: Any = ZeroRedundancyOptimizer(groups, FusedMuon)
    assert len(zero.partition.owner) == matrices + 1
    flops = [0] * world
    for param, rank in zero.partition.owner.items():
        flops[rank] += 5 * 64 * 64 * 6 * 64 if param is not embedding else 0
    most = max(flops) * world / sum(flops)
    assert most < 1.3, most


def a_rejected_step_changes_nothing() -> None:
    balanced = {"partition": "balanced", "optimizer_class": FusedMuon}
    run = Run(build=partial(ZeroRedundancyOptimizer, **balanced)).train(0)
    before = [weight.clone() for weight in run.weights()]

    def failing(*_: Any) -> None:
        if dist.get_rank() == 0:
            raise KeyError("mine")

    hook = run.optimizer.register_step_pre_hook(failing)
    run.set_gradients(1)
    with pytest.raises((KeyError, RuntimeError), match=r"mine|rank 0"):
        run.optimizer.step()
    hook.remove()
    assert_same_bits(run.weights(), before)
    run.train(1)


def a_failing_return_says_what_to_do() -> None:
    """Ranks have stepped when one of them does not get the others' weights."""
    for partition in ("greedy", "balanced"):
        build = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon, partition=partition)
        run = Run(build=build).train(0)
        run.set_gradients(1)
        with (
            mock.patch.object(Ranks, "broadcast", side_effect=RuntimeError("no route")),
            pytest.raises(RuntimeError, match=r"may differ now: load a checkpoint.*no route"),
        ):
            run.optimizer.step()


def owners_have_one_process_bits(way: str) -> None:
    alone, shared = Run(way=way), Run(way=way, orthogonalize_over=dist.group.WORLD)
    alone.train(0, 1, 2, 3)
    shared.train(0, 1, 2)
    with mock.patch.object(exchange._C, "orthogonalize_", wraps=_C.orthogonalize_) as products:
        shared.train(3)
    assert_same_bits(shared.weights(), alone.weights())
    assert_same_bits(shared.moments(), alone.moments())
    counts = [int(run.optimizer.control.orthogonalized) for run in (alone, shared)]
    own = sum(len(call.args[1]) for call in products.call_args_list)
    assert counts[0] == counts[1] == sum(gathered(own))
    assert dist.get_world_size() == 1 or max(gathered(own)) < counts[0]
    copied = copy.deepcopy(shared.optimizer)
    assert copied.orthogonalize_over is dist.group.WORLD
    with pytest.raises(TypeError, match="with orthogonalize_over cannot be pickled"):
        pickle.dumps(shared.optimizer)
    overflowed = Run(way=way, orthogonalize_over=dist.group.WORLD, skip_nonfinite=True).train(0)
    before = [weight.clone() for weight in overflowed.weights()]
    overflowed.set_gradients(1)
    if dist.get_rank() == 0:
        overflowed.params[0].grad[0, 0] = torch.nan
    overflowed.optimizer.step()
    assert_same_bits(overflowed.weights(), before)
    assert float(overflowed.optimizer.control.skipped_steps) == 1
    if dist.get_world_size() > 1:
        zero = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon)
        with pytest.raises(ValueError, match="orthogonalize_over is for equal parameters"):
            Run(build=zero, orthogonalize_over=dist.group.WORLD)


def cases() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        "by cost": zero_divides_by_cost,
        "rejection": a_rejected_step_changes_nothing,
        "together": ranks_raise_together,
        "becomes Muon's, greedy": greedy_groups_become_muons,
        "lost keys": keys_that_groups_lose_are_lost,
        "several": several_parameters_a_bucket,
        "between rows": normuon_is_cut_between_rows,
        "between rows, int8": partial(normuon_is_cut_between_rows, state_dtype="int8"),
    }
    if dist.get_world_size() > 1:
        found["return"] = a_failing_return_says_what_to_do
        found["inside rows"] = rows_that_were_cut_reject_normuon
        for first_step in (0, 1):
            for alone in (False, True):
                found[f"becomes Muon's, {first_step}, {alone}"] = partial(
                    parts_without_matrices_reject_muon, first_step, alone
                )
    for way in (*WAYS, "NorMuon, fp32", "NorMuon, remainder8, random"):
        zero = partial(zero_has_one_process_bits, way)
        found[f"balanced, {way}"] = partial(zero, partition="balanced", bucket_elements=1000)
    for way in WAYS | NORMUON:
        found[f"owners, {way}"] = partial(owners_have_one_process_bits, way)
    for way in ("fp32", "NorMuon, fp32"):
        found[f"greedy, {way}"] = partial(zero_has_one_process_bits, way, partition="greedy")
    if dist.get_world_size() in (2, 4):  # sums of equal gradients have one rounding
        sharded = {"partition": "balanced", "sharded_gradients": True}
        found["sharded gradients"] = partial(zero_has_one_process_bits, "fp32", **sharded)
    return found


if __name__ == "__main__":
    run_cases(cases)
