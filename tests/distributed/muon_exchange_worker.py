"""Cases of test_workers.py: how ranks that share Muon's matrices divide and exchange them.

What users of other distributed Muons complained about, and where it is tested:

    the products never ran, and the loss fell   test_frameworks.py: orthogonalized of each wrapper
    parameters went to AdamW silently           the same; test_muon_groups.py
    accumulation changed the weights            "accumulation"
    a dimension of 72 on 16 ranks               test_owners.py: ranks without a part own nothing
    the first all-to-all hung                   "warm"
    buffers were freed before they were sent    "buffers"
    a gradient that one rank lacks hung         "refuses"; muon_worker.py: refuses_gradients_of_some
    refused beside ZeRO                         muon_zero_worker.py: both partitions; "join"
    ran on shards of rows                       muon_worker.py: has_one_process_bits
    was slow, or infinite, under FSDP           "bytes"; muon_worker.py: an_overflow_changes_nothing
    all ranks computed the same, and waited     "in backward", "model parts", "overlap"
    transfers in fp32                           "bytes, torch.bfloat16"; "bf16"
"""

from __future__ import annotations

import copy
import gc
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.muon_worker import (
    ROWS,
    WHOLE,
    Run,
    counted_bytes,
    failing_transfer,
    layouts,
    placed,
)
from tests.support.compare import assert_same_bits, snapshot
from tests.support.problems import set_gradients
from tests.support.ranks import full_tensor, gathered, run_cases
from torchopt_ext import _C, FusedMuon, ZeroRedundancyOptimizer, muon_groups
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.optim import exchange
from torchopt_ext.state.local import shard_of
from torchopt_ext.statedict.several import rerouted


def in_backward_divides_matrices() -> None:
    """One optimizer for each parameter, also for those between the matrices."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    container: Any = OptimizersInBackwardContainer([model], FusedMuon, {"lr": 0.1})
    with products() as calls:
        model(torch.ones(3, 16)).square().mean().backward()
    assert float(container.control.orthogonalized) == 8  # the last layer is AdamW's
    assert_divided(calls, 8)


def model_parts_divide_matrices() -> None:
    """The parts of an interleaved pipeline have an optimizer each."""
    parts: list[nn.Module] = [nn.Sequential(nn.Linear(16, 16)) for _ in range(8)]
    for part in parts:
        fully_shard(part)
    container: Any = OptimizersContainer(parts, FusedMuon, {"lr": 0.1}, muon=["weight"])
    torch.stack([part(torch.ones(3, 16)).square().mean() for part in parts]).sum().backward()
    with products() as calls:
        container.step()
    assert float(container.control.orthogonalized) == 8
    assert_divided(calls, 8)


def mixed_precision_divides_matrices() -> None:
    """With the bits of the optimizer's own masters."""

    def trained(*, adapted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9))).bfloat16()
        fully_shard(model)
        own: dict[str, Any] = {} if adapted else {"master_weights": "fp32", "max_grad_norm": 0.05}
        optimizer: Any = FusedMuon(muon_groups(model, quiet=True), lr=0.01, **own)
        wrapped: Any = optimizer
        if adapted:
            wrapped = FSDPadaptOptimizer(optimizer, clip_grad_norm=0.05)
        for _ in range(3):
            wrapped.zero_grad()
            loss = model(torch.ones(3, 16, dtype=torch.bfloat16)).float().square().mean()
            wrapped.backward(loss) if adapted else loss.backward()
            with products() as calls:
                wrapped.step()
            assert float(optimizer.control.orthogonalized) == 8
            assert_divided(calls, 8)
        return [full_tensor(p) for p in model.parameters()]

    assert_same_bits(trained(adapted=True), trained(adapted=False))


class Late:
    """A transfer that touches its buffers only when it is waited for, and keeps neither alive."""

    def __init__(self, network: Network, output: Tensor, source: Tensor, *rest: Any, **more: Any):
        self.network = network
        self.buffers = [StorageWeakRef(t.untyped_storage()) for t in (output, source)]
        self.arriving = torch.empty_like(output)
        assert output.storage_offset() == 0
        self.work = network.send(self.arriving, source.clone(), *rest, **more)

    def wait(self, *_: Any) -> None:
        if self.network.collects:
            gc.collect()
        alive = [not buffer.expired() for buffer in self.buffers]
        assert all(alive), f"the buffers (received, sent) are alive: {alive}"
        self.work.wait()
        storage = torch.UntypedStorage._new_with_weak_ptr(self.buffers[0].cdata)
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, self.arriving.shape).copy_(self.arriving)
        self.network.under_way.remove(self)


class Network:
    """Late transfers, and how many are under way when matrices are orthogonalized.

    Attributes:
        most: the most transfers under way at a time.
        hiding: how many are under way at each call of _C.orthogonalize_.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.collects = collects  # cycles of Python objects before each wait
        self.send, self.products = dist.all_to_all_single, _C.orthogonalize_
        self.under_way: list[Late] = []
        self.most, self.hiding = 0, []

    def transfer(self, *args: Any, **more: Any) -> Late:
        assert more["async_op"]
        self.under_way.append(Late(self, *args, **more))
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1]

    def orthogonalize(self, *args: Any) -> Any:
        self.hiding.append(len(self.under_way))
        return self.products(*args)

    @contextmanager
    def used(self) -> Iterator[Network]:
        with (
            mock.patch.object(dist, "all_to_all_single", self.transfer),
            mock.patch.object(exchange._C, "orthogonalize_", self.orthogonalize),
        ):
            yield self


def equal_matrices(**options: Any) -> FusedMuon:
    """Each rank owns as many in each of at least four exchanges."""
    place = placed((dist.get_world_size(),), [ROWS])
    params = [nn.Parameter(place(torch.randn(24, 48))) for _ in range(8 * dist.get_world_size())]
    optimizer = FusedMuon(params, **options)
    for p in params:
        p.grad = place(torch.randn(p.shape))
    optimizer.step()
    return optimizer


def products_hide_transfers() -> None:
    optimizer = equal_matrices()
    with Network().used() as network:
        optimizer.step()
    *early, last = network.hiding
    assert len(early) >= 3
    assert all(early), "the next exchange begins before the products of one"
    assert last, "the one before last returns meanwhile"
    assert network.most <= 3
    assert not network.under_way


def buffers_live_until_waited() -> None:
    place = placed(*layouts()["rows"])
    alone, shared = Run().train(0), Run(place).train(0)
    with Network(collects=True).used():
        shared.train(1)
    assert_same_bits(shared.weights(), alone.train(1).weights())


def connections_are_warm() -> None:
    """A step first connects all ranks of a group, also those without a part, and does so once."""
    world = dist.get_world_size()
    place = placed(*layouts()["rows"])
    never: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    calls: list[tuple[Any, int, bool]] = []
    send = dist.all_to_all_single

    def recorded(output: Tensor, source: Tensor, *rest: Any, **more: Any) -> Any:
        momentum = optimizer.state[params[0]]["momentum_buffer"].to_local()
        calls.append((more["group"], source.numel(), bool(momentum.any())))
        return send(output, source, *rest, **more)

    with (
        mock.patch.object(exchange, "_connected", never),
        mock.patch.object(dist, "all_to_all_single", recorded),
    ):
        for times in (1, 0):
            params = [nn.Parameter(place(torch.ones(1, 8)))]
            optimizer = FusedMuon(params)
            calls.clear()
            for _ in range(2):
                params[0].grad = torch.ones_like(params[0])
                optimizer.step()
            assert calls[:times] == [(dist.group.WORLD, world, False)] * times
            assert len(calls) == times + 2 * 2  # there and back
    assert world == 1 or gathered(params[0].to_local().numel())[1] == 0


def every_rank_sends_the_bytes_of_the_formula(dtype: torch.dtype) -> None:
    """2 b P / W (W - 1) / W bytes for directions of b bytes, if ranks own equally much."""
    optimizer, world = equal_matrices(orthogonalize_dtype=dtype), dist.get_world_size()
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    with counted_bytes() as sent:
        optimizer.step()
    assert sum(sent) == 2 * dtype.itemsize * elements * (world - 1) // world**2


def bf16_has_one_process_bits(layout: str) -> None:
    bf16 = {"orthogonalize_dtype": torch.bfloat16}
    alone = Run(**bf16).train(0, 1, 2)
    shared = Run(placed(*layouts()[layout]), **bf16).train(0, 1, 2)
    assert_same_bits(shared.weights(), alone.weights())
    assert_same_bits(shared.moments(), alone.moments())
    fp32 = Run().train(0, 1, 2).weights()
    assert not all(torch.equal(a, b) for a, b in zip(fp32, alone.weights(), strict=True))


BALANCED: Any = partial(ZeroRedundancyOptimizer, optimizer_class=FusedMuon, partition="balanced")


def over(groups: Any, **options: Any) -> FusedMuon:
    return FusedMuon(groups, orthogonalize_over=dist.group.WORLD, **options)


def equal_ranks_refuse_gradients_of_some(build: Any) -> None:
    run = Run(build=build).train(0)
    before = [weight.clone() for weight in run.weights()]
    for number in (0, 8):
        run.set_gradients(1, without=(number,) if dist.get_rank() else ())
        message = rf"parameter '{number}' has a gradient on ranks \[0\] only"
        with pytest.raises(RuntimeError, match=message):
            run.optimizer.step()
        assert_same_bits(run.weights(), before)
    twin = Run().train(0, 1)
    assert_same_bits(run.train(1).weights(), twin.weights())


def a_failing_transfer_names_what_was_stepped(build: Any) -> None:
    for number in (1, 4, 6):
        run = Run(build=build).train(0)
        before = [weight.clone() for weight in run.weights()]
        run.set_gradients(1)
        with (
            failing_transfer(number),
            pytest.raises(RuntimeError, match=r"no route.* Load a checkpoint") as raised,
        ):
            run.optimizer.step()
        named = re.search(r"were stepped: \[(.*?)\]", str(raised.value))
        assert named
        stepped = {int(n) for n in re.findall(r"\d+", named[1])}
        same = gathered([torch.equal(*pair) for pair in zip(run.weights(), before, strict=True)])
        changed = {n for n in range(len(before)) if not all(of_rank[n] for of_rank in same)}
        assert changed == set().union(*gathered(stepped))
        assert bool(changed - {9, 10}) == (number == 6)  # the first exchange is over


def ranks_with_fewer_inputs_join(partition: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False))
    twin, ddp = copy.deepcopy(model), DistributedDataParallel(model)
    zero: Any = ZeroRedundancyOptimizer(model.parameters(), FusedMuon, partition=partition, lr=0.1)
    optimizer = FusedMuon(twin.parameters(), lr=0.1)
    ranks = range(dist.get_world_size())

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        batch: Tensor = module(torch.full((2, 12), 0.1 * (step + 1) * (rank + 1)))
        return batch.square().mean()

    with Join([ddp, zero]):
        for step in range(2 + dist.get_rank()):
            zero.zero_grad()
            loss(ddp, step, dist.get_rank()).backward()
            zero.step()
    for step in range(1 + len(ranks)):
        optimizer.zero_grad()
        for rank in ranks:
            if step < 2 + rank:
                (loss(twin, step, rank) / len(ranks)).backward()
        optimizer.step()
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def rows_of_tensor_parallel_rows() -> None:
    """fully_shard over tensor parallelism: _StridedShard."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(12, 24, bias=False), nn.Linear(24, 20, bias=False))
    model = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    params: list[Any] = [*model.parameters()]
    assert "_StridedShard" in str(params[0].placements)
    one, ours = FusedMuon(alone.parameters(), lr=0.1), FusedMuon(params, lr=0.1)
    for seed in range(3):
        set_gradients(list(alone.parameters()), seed=seed)
        for p, q in zip(params, alone.parameters(), strict=True):
            p.grad = shard_of(q.grad, p)
        one.step()
        ours.step()
    assert_same_bits([full_tensor(p) for p in params], [p.detach() for p in alone.parameters()])


def experts_are_exchanged_where_they_are_cut() -> None:
    """Whole experts send nothing. Others are exchanged by the ranks that hold their parts only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "cut"))
    values = torch.randn(4, 8, 10, generator=torch.Generator().manual_seed(0))
    for placements, sends in (([Shard(0), WHOLE], False), ([Shard(0), Shard(1)], True)):
        param = nn.Parameter(distribute_tensor(values, mesh, placements, src_data_rank=None))
        alone = nn.Parameter(values.clone())
        ours, one = FusedMuon([param], lr=0.1), FusedMuon([alone], lr=0.1)
        for seed in range(2):
            set_gradients([alone], seed=seed)
            param.grad = shard_of(alone.grad, param)
            one.step()
            with counted_bytes() as sent:
                ours.step()
        assert_same_bits([full_tensor(param)], [alone.detach()])
        # Two experts of four bytes over two ranks: half of each goes to the other, and back.
        others = sum(gathered(sum(sent)))
        assert others == sends * (2 * 4 * values.numel() // 2), (others, sent)


def pipeline_stages_decide_together() -> None:
    """Two stages, each over two ranks: one norm, one decision to skip, one rejection."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(8, 12, generator=generator)) for _ in range(4)]
    alone = FusedMuon(whole, lr=0.1, max_grad_norm=0.5)
    own = whole[2 * stage : 2 * stage + 2]
    params = [nn.Parameter(distribute_tensor(p.detach(), mesh["dp"], [ROWS])) for p in own]
    optimizer = FusedMuon(
        params, lr=0.1, max_grad_norm=0.5, skip_nonfinite=True, process_group=dist.group.WORLD
    )

    def give(seed: int) -> None:
        set_gradients(whole, seed=seed)
        for p, q in zip(params, own, strict=True):
            p.grad = shard_of(q.grad, p)

    give(0)
    optimizer.step()
    alone.step()
    before = snapshot(optimizer)
    give(1)
    if dist.get_rank() == 0:
        params[0].grad._local_tensor[0, 0] = torch.nan
    optimizer.step()
    assert snapshot(optimizer) == before
    assert float(optimizer.control.skipped_steps) == 1
    give(1)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises((RuntimeError, TypeError), match=r"lr|reject"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    assert snapshot(optimizer) == before
    optimizer.step()
    alone.step()
    assert_same_bits([full_tensor(p) for p in params], [p.detach() for p in own])
    assert float(optimizer.control.clip_factor) == float(alone.control.clip_factor) < 1


def a_group_becomes_adamw_and_back() -> None:
    """Through DCP: what another algorithm steps begins anew, and a warning names it."""
    folder = gathered(tempfile.mkdtemp())[0]

    def trained(cut: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = cut(nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 12)))
        params: list[Any] = [*model.parameters()]

        def container(*muon: str) -> Any:
            return OptimizersContainer([model], FusedMuon, {"lr": 0.1}, muon=muon)

        both, one = ("0.weight", "1.weight"), ("0.weight",)
        old = container(*both)
        for seed, (before, after) in enumerate([(both, one), (one, both), (both, None)]):
            whole = [nn.Parameter(torch.empty(p.shape)) for p in params]
            set_gradients(whole, seed=seed)
            for p, q in zip(params, whole, strict=True):
                p.grad = shard_of(q.grad, p) if isinstance(p, DTensor) else q.grad
            old.step()
            if after is None:
                break
            saved = old.state_dict()
            if isinstance(params[0], DTensor):
                dcp.save({"optimizer": old}, checkpoint_id=f"{folder}/{seed}")
                reader = container(*before)
                dcp.load({"optimizer": reader}, checkpoint_id=f"{folder}/{seed}")
                saved = reader.state_dict()
            new = container(*after)
            with pytest.warns(UserWarning, match=r"anew .*: '1.weight' \(\w+, now \w+\)$"):
                new.load_state_dict(rerouted(saved, new.state_dict()))
            steps = [int(value) for key, value in new.state_dict().items() if key.endswith("step")]
            assert sorted(steps) == [0, *[seed + 1] * 3]
            old = new
        return [full_tensor(p) for p in params]

    assert_same_bits(trained(fully_shard), trained(lambda module: module))


def microbatches_have_the_bits_of_one_batch() -> None:
    """The gradients are sums of small integers, so that their order does not matter."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randint(-3, 4, (2, 4, 5, 12), generator=generator).float()
    factors = torch.randint(-3, 4, (2, 4, 5, 20), generator=generator).float()

    def trained(parts: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(12, 20, bias=False))
        optimizer = FusedMuon(model.parameters(), lr=0.1, max_grad_norm=1.0)
        for batch in zip(batches, factors, strict=True):
            optimizer.zero_grad()
            for x, factor in zip(*(t.flatten(0, 1).chunk(parts) for t in batch), strict=True):
                (model(x) * factor).sum().backward()
            optimizer.step()
        return [full_tensor(p) for p in model.parameters()]

    assert_same_bits(trained(4), trained(1))


def products() -> Any:
    return mock.patch.object(exchange._C, "orthogonalize_", wraps=_C.orthogonalize_)


def assert_divided(calls: mock.Mock, counted: float) -> None:
    owned = gathered(sum(len(call.args[1]) for call in calls.call_args_list))
    assert sum(owned) == counted, (owned, counted)
    assert max(owned) - min(owned) <= 1, owned


def cases() -> dict[str, Callable[[], Any]]:
    chosen = [layout for layout in ("rows", "rectangles") if layout in layouts()]
    equal = {"balanced": BALANCED, "over": over}
    found: dict[str, Callable[[], Any]] = {
        "in backward": in_backward_divides_matrices,
        "model parts": model_parts_divide_matrices,
        "mixed precision": mixed_precision_divides_matrices,
        "accumulation": microbatches_have_the_bits_of_one_batch,
        "routing": a_group_becomes_adamw_and_back,
        "warm": connections_are_warm,
        "overlap": products_hide_transfers,
        **{
            f"refuses, {n}": partial(equal_ranks_refuse_gradients_of_some, b)
            for n, b in equal.items()
        },
        **{
            f"fails, {n}": partial(a_failing_transfer_names_what_was_stepped, b)
            for n, b in equal.items()
        },
        **{f"join, {p}": partial(ranks_with_fewer_inputs_join, p) for p in ("greedy", "balanced")},
        "buffers": buffers_live_until_waited,
        **{
            f"bytes, {dtype}": partial(every_rank_sends_the_bytes_of_the_formula, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        },
        **{f"bf16, {layout}": partial(bf16_has_one_process_bits, layout) for layout in chosen},
    }
    if dist.get_world_size() == 4:
        found["stages"] = pipeline_stages_decide_together
        found["strided"] = rows_of_tensor_parallel_rows
        found["experts"] = experts_are_exchanged_where_they_are_cut
    return found


if __name__ == "__main__":
    run_cases(cases)
