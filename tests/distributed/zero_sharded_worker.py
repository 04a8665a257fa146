"""Cases of test_workers.py: a sharded step has the bits of one process, however gradients come.

Gradients are small integers, so averages over ranks are exact. DDP divides by the number of ranks
before it adds, which rounds for three ranks: there one process has DDP's averages.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_common import Cases, layers, raises, whole_state

from tests.support.compare import assert_same
from tests.support.ranks import gathered, run_cases
from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

# Long rows that blocks cut, short rows, channels last, scalars, more ranks than rows, and an empty
# tensor in a group, and so a bucket, of its own.
SHAPES = [
    (3, 9000), (70, 100), (5,), (333,), (8, 4, 3, 3), (), (2, 3, 5000), (40, 7), (1, 130), (0, 4)
]  # fmt: skip
STEPS = 6
OVERFLOW_STEP = 3
BF16 = {"dtype": torch.bfloat16}
HELD: dict[str, dict[str, Any]] = {
    "fp32": {},
    "master": BF16 | {"master_weights": "fp32"},
    "remainder": BF16 | {"master_weights": "remainder"},
    "stochastic": BF16 | {"stochastic_rounding": True, "rounding_seed": 7},
    "int8": BF16 | {"master_weights": "remainder8", "state_dtype": "int8"},
}


class Model(nn.Module):
    """Parameters whose gradients are the tensors given to ``forward``."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList()
        for shape in SHAPES:
            weight = torch.randn(shape)
            if len(shape) == 4:
                weight = weight.to(memory_format=torch.channels_last)
            self.weights.append(nn.Parameter(weight.to(dtype)))

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(w * g).sum() for w, g in pairs if g is not None]).sum()


def gradients(step: int, rank: int) -> list[Tensor | None]:
    """Returns a rank's gradients. One of rank 0 overflows in a step."""
    generator = torch.Generator().manual_seed(step)
    size, drawn = dist.get_world_size(), list[Tensor | None]()
    for shape in SHAPES:
        common = torch.randint(-4, 5, shape, generator=generator).float()
        sign = 0 if size % 2 and rank == size - 1 else 1 - 2 * (rank % 2)
        drawn.append(common + sign)
    if step == OVERFLOW_STEP and rank == 0:
        last = drawn[-2]
        assert last is not None
        last[0, -1] = float("nan")
    return drawn


def mean(step: int) -> list[Tensor | None]:
    """Returns the average of all ranks' gradients, over those that use a parameter or not."""
    of_ranks = [gradients(step, rank) for rank in range(dist.get_world_size())]
    return [sum(same) / len(of_ranks) for same in zip(*of_ranks, strict=True)]  # type: ignore


def build(model: Model, partition: str, how: str, held: str = "fp32", **more: Any) -> Any:
    kwargs: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 20.0, "skip_nonfinite": True}
    kwargs |= {key: value for key, value in HELD[held].items() if key != "dtype"} | more
    weights = list(model.weights)
    groups: list[dict[str, Any]] = [
        {"params": weights[:4], "weight_decay": 0.1},
        {"params": weights[4:-1], "weight_decay": 0.0},
        {"params": weights[-1:], "weight_decay": 0.2},
    ]
    if partition == "none":
        return FusedAdamW(groups, **kwargs)
    if partition == "balanced":
        kwargs |= {"bucket_elements": 1 << 12, "sharded_gradients": how == "sharded"}
    zero: Any = ZeroRedundancyOptimizer(groups, FusedAdamW, partition=partition, **kwargs)
    if how == "gathered":  # as on NCCL
        zero.partition.gathers = True
    return zero


class Pair:
    """A sharded optimizer and one over whole tensors, which get the same averages."""

    def __init__(self, partition: str, how: str, held: str = "fp32") -> None:
        dtype = HELD[held].get("dtype", torch.float32)
        self.models = Model(dtype), Model(dtype)
        self.optimizers = (
            build(self.models[0], partition, how, held),
            build(self.models[1], "none", "averaged", held),
        )
        self.averages = how not in ("averaged", "gathered")
        self.runs: list[Any] = list(self.models)
        self.by_ddp = how == "ddp" and dist.get_world_size() == 3
        if how in ("ddp", "hook"):
            self.runs[0] = DDP(self.models[0], gradient_as_bucket_view=how == "hook")
        if self.by_ddp:
            self.runs[1] = DDP(self.models[1])
        if how == "hook":
            self.runs[0].register_comm_hook(None, reduce_scatter_hook(self.optimizers[0]))
        self.norms: list[float] = []

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def losses(self, step: int, unused: tuple[int, ...] = ()) -> list[Tensor]:
        losses = []
        for run, averages in zip(self.runs, (self.averages, self.by_ddp), strict=True):
            values = gradients(step, dist.get_rank()) if averages else mean(step)
            values = [None if number in unused else g for number, g in enumerate(values)]
            dtype = self.models[0].weights[0].dtype
            losses.append(run([None if g is None else g.to(dtype) for g in values]))
        return losses

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self) -> None:
        norms = [optimizer.control.grad_norm for optimizer in self.optimizers]
        assert_same(*norms)
        self.norms.append(float(norms[0]))
        assert_same(*([*model.parameters()] for model in self.models))
        strides = [[p.stride() for p in model.parameters()] for model in self.models]
        assert strides[0] == strides[1]


def train(partition: str, how: str, held: str, passes: int = 1) -> None:
    """Norms, parameters and consolidated state are equal after clipped steps and a skipped step."""
    pair = Pair(partition, how, held)
    for step in range(STEPS):
        pair.zero_grad()
        for number in range(passes):
            for loss in pair.losses(step + 100 * number):
                loss.backward()
        if how == "sharded":
            assert all(p.grad is None for p in pair.models[0].parameters())
        pair.step()
        pair.check()
    assert len(set(pair.norms)) > 2 and any(norm != norm for norm in pair.norms)
    zero, plain = pair.optimizers
    assert_same(whole_state(zero)["state"], plain.state_dict()["state"])


def frozen_and_unused(partition: str, how: str) -> None:
    """Trains with parameters that are frozen, thawed, and unused on all ranks in some steps."""
    pair = Pair(partition, how)
    for step in range(STEPS):
        for model in pair.models:
            model.weights[1].requires_grad_(step >= 2)
            model.weights[0].requires_grad_(step < 4)
        pair.zero_grad()
        unused = [n for n, w in enumerate(pair.models[0].weights) if not w.requires_grad]
        for loss in pair.losses(step, (*unused, *[3] * (step % 2))):
            loss.backward()
        pair.step()
        pair.check()


def scaled(partition: str, how: str) -> None:
    """All scales back off if one rank overflows. Shards reject unscale_() and torch's scaler."""
    pair = Pair(partition, how)
    scalers = [GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    zero = pair.optimizers[0]
    for step in range(STEPS):
        pair.zero_grad()
        both = zip(scalers, pair.losses(step), pair.optimizers, strict=True)
        for scaler, loss, optimizer in both:
            scaler.scale(loss).backward()
            if optimizer is zero and how != "averaged":
                with raises(RuntimeError, "leave unscale_() out"):
                    scaler.unscale_(zero)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
    assert [scaler.get_scale() for scaler in scalers] == [32.0] * 2
    if how != "averaged":
        stock = torch.amp.GradScaler("cpu", init_scale=1.0)
        stock.scale(torch.zeros(()))
        with raises(RuntimeError, "use torchopt_ext.GradScaler"):
            stock.step(zero)


def lazily() -> None:
    """Parameters may arrive during the next forward. The state dict waits for them."""
    models = [layers(3) for _ in range(2)]
    options: dict[str, Any] = {"partition": "balanced", "bucket_elements": 64, "lr": 0.1}
    zero: Any = ZeroRedundancyOptimizer(models[0].parameters(), FusedAdamW, **options)
    zero.overlap_forward(*models[0])
    for model, optimizer in zip(models, (zero, FusedAdamW(models[1].parameters(), lr=0.1)),
                                strict=True):  # fmt: skip
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 70), 0.1 * step)).sum().backward()
            optimizer.step()
    assert zero.partition._updates_in_flight or dist.get_world_size() == 1
    assert_same(*([*model.state_dict().values()] for model in models))


def complex_norms(partition: str) -> None:
    """Norms of gradients whose rows have 31, 40 or 63 complex numbers, or are cut."""
    for shape in ((301, 31), (301, 40), (301, 63), (3, 9001)):
        params = [nn.Parameter(torch.zeros(shape, dtype=torch.complex64)) for _ in range(2)]
        plain = FusedAdamW(params[:1], max_grad_norm=1.0)
        zero: Any = ZeroRedundancyOptimizer(
            params[1:], FusedAdamW, partition=partition, max_grad_norm=1.0,
            bucket_elements=64 if partition == "balanced" else None,
        )  # fmt: skip
        for seed in range(20):
            torch.manual_seed(seed)
            gradient = torch.randn(shape, dtype=torch.complex64)
            for param, optimizer in zip(params, (plain, zero), strict=True):
                param.grad = gradient.clone()
                optimizer.step()
            assert_same(zero.control.grad_norm, plain.control.grad_norm)


def shares() -> None:
    """Every rank holds its share and no more. In every bucket the shares differ by at most a block
    of 4,096 elements."""
    model = Model()
    zero = build(model, "balanced", "averaged")
    model(mean(0)).backward()
    zero.step()
    held = [t for state in zero.state.values() for n, t in state.items() if n != "step"]
    elements = sum(t.numel() for t in held) // 2
    assert sum(t.untyped_storage().nbytes() for t in held) == 8 * elements  # two fp32 moments
    of_ranks = gathered(elements)
    assert sum(of_ranks) == sum(p.numel() for p in model.parameters())
    assert max(of_ranks) - min(of_ranks) <= len(zero.partition.all_buckets) * (4096 + 64)
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())


WAYS = {"greedy": ("averaged", "ddp"),
        "balanced": ("averaged", "gathered", "ddp", "hook", "sharded")}  # fmt: skip


def cases() -> Cases:
    table: Cases = {"lazily": lazily, "shares": shares}
    for partition, how in itertools.chain(
        *([(p, how) for how in ways] for p, ways in WAYS.items())
    ):
        way = f"{partition}, {how}"
        for held in HELD:
            table[f"{held}: {way}"] = partial(train, partition, how, held)
        if how in ("averaged", "sharded"):
            table[f"frozen: {way}"] = partial(frozen_and_unused, partition, how)
        if how in ("averaged", "sharded", "hook"):
            table[f"scaled: {way}"] = partial(scaled, partition, how)
            table[f"twice: {way}"] = partial(train, partition, how, "fp32", passes=2)
    return table | {
        f"complex: {partition}": partial(complex_norms, partition) for partition in WAYS
    }


if __name__ == "__main__":
    run_cases(cases)
