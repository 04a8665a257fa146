"""Cases of test_workers.py: any operations leave a sharded and a plain optimizer the same bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import difference, gathered, run_cases
from torch import nn

from torchopt_ext import FusedAdamW
from torchopt_ext.zero import ZeroRedundancyOptimizer

SHAPES: list[tuple[int, ...]] = [(3,), (4, 5), (), (70, 3), (2, 3, 4), (64, 65), (300,)]
PARTITIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "bucket view": {"parameters_as_bucket_view": True},
    "balanced": {"partition": "balanced", "bucket_elements": 512},
}


class Twins:
    """Optimizers over equal parameters. Each public method does the same to both."""

    def __init__(self, choose: random.Random, partition: str, **options: Any) -> None:
        self._choose, self._partition, self._options = choose, partition, options
        self._dtype = torch.bfloat16 if "master_weights" in options else torch.float32
        self._groups = [self._new_params()]
        self._sharded = self._new_sharded()
        params = [{"params": [plain for _, plain in group]} for group in self._groups]
        self._plain = FusedAdamW(params, **options)

    def _new_params(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        shapes = self._choose.choices(SHAPES, k=self._choose.randint(1, 4))
        values = [torch.randn(shape).to(self._dtype) for shape in shapes]
        return [(nn.Parameter(v.clone()), nn.Parameter(v)) for v in values]

    def _new_sharded(self) -> ZeroRedundancyOptimizer:
        params = [{"params": [sharded for sharded, _ in group]} for group in self._groups]
        options = {**PARTITIONS[self._partition], **self._options}
        return ZeroRedundancyOptimizer(params, FusedAdamW, **options)

    def _any_group(self) -> int:
        return self._choose.randrange(len(self._groups))

    def _whole_state(self) -> Any:
        self._sharded.consolidate_state_dict()
        return gathered(None if dist.get_rank() else self._sharded.state_dict())[0]

    def step(self) -> None:
        for sharded, plain in chain(*self._groups):
            sharded.grad = plain.grad = None
            if plain.requires_grad and self._choose.random() < 0.9:
                plain.grad = torch.randn(plain.shape).to(self._dtype)
                if self._choose.random() < 0.02:
                    plain.grad.fill_(torch.nan)
                sharded.grad = plain.grad.clone()
        for optimizer in (self._sharded, self._plain):
            optimizer.step()

    def set_learning_rate(self) -> None:
        number, lr = self._any_group(), self._choose.random()
        for optimizer in (self._sharded, self._plain):
            optimizer.param_groups[number]["lr"] = lr

    def add_group(self) -> None:
        self._groups.append(self._new_params())
        for side, optimizer in enumerate((self._sharded, self._plain)):
            params = [pair[side] for pair in self._groups[-1]]
            optimizer.add_param_group({"params": params, "weight_decay": 0.3})

    def freeze_or_unfreeze(self) -> None:
        for param in self._choose.choice(self._groups[0]):
            param.requires_grad_(not param.requires_grad)
            param.grad = None

    def load_own_state(self) -> None:
        self._sharded.load_state_dict(self._whole_state())

    def shard_otherwise(self) -> None:
        state, self._partition = self._whole_state(), self._choose.choice(list(PARTITIONS))
        self._sharded = self._new_sharded()
        self._sharded.load_state_dict(state)

    def load_plain_state(self) -> None:
        self._sharded = self._new_sharded()
        self._sharded.load_state_dict(copy.deepcopy(self._plain.state_dict()))

    def check(self) -> None:
        for sharded, plain in chain(*self._groups):
            assert not difference(sharded, plain)


def any_operations(seed: int, partition: str, **options: Any) -> None:
    torch.manual_seed(seed)
    twins, choose = Twins(random.Random(seed), partition, **options), random.Random(seed)
    others = [name for name in vars(Twins) if not name.startswith("_")]
    done = []
    for _ in range(30):
        done.append(choose.choice(["step", choose.choice(others)]))
        getattr(twins, done[-1])()
        try:
            twins.check()
        except AssertionError:
            raise AssertionError(f"seed {seed}, {partition}, {options}: {done}") from None


def cases() -> dict[str, Callable[[], None]]:
    masters = [{}, {"master_weights": "fp32"}, {"master_weights": "remainder"}]
    return {
        f"{partition} {seed}": partial(
            any_operations, seed, partition, **masters[seed % 3],
            max_grad_norm=1.0, skip_nonfinite=True, lr=0.01, amsgrad=seed % 2 == 1,
        )
        for partition in PARTITIONS
        for seed in range(6)
    }  # fmt: skip


if __name__ == "__main__":
    run_cases(cases)
