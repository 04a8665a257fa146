"""Cases of test_workers.py: any operations leave a sharded and a plain optimizer the same bits.

In every mode, so do any changes around the steps of a training loop, or all ranks raise.
"""

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
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

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


def whole_and_sharded(kind: Any, **options: Any) -> None:
    """FSDP2's shards and ZeRO's have the bits of a whole optimizer of any algorithm."""
    torch.manual_seed(0)
    options |= {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 1.0}
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 7), nn.Linear(7, 1)).to(torch.bfloat16)
    cut = fully_shard(copy.deepcopy(model))
    zero = {name: copy.deepcopy(model) for name in PARTITIONS}
    optimizers = [kind(of.parameters(), **options) for of in (model, cut)]
    for name, of in zero.items():
        how = PARTITIONS[name]
        optimizers.append(ZeroRedundancyOptimizer(of.parameters(), kind, **how, **options))
    models = (model, cut, *zero.values())
    params = list(zip(*(of.parameters() for of in models), strict=True))
    for _ in range(3):
        for whole, shard, *copies in params:
            whole.grad = torch.randn(whole.shape).to(whole.dtype)
            shard.grad = distribute_tensor(whole.grad, shard.device_mesh, shard.placements)
            for own in copies:
                own.grad = whole.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for whole, shard, *copies in params:
            for found in (shard.full_tensor(), *copies):
                assert not difference(found, whole)


# ---- training ------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    **PARTITIONS,
    "hook": PARTITIONS["balanced"],
    "sharded": {**PARTITIONS["balanced"], "sharded_gradients": True},
}


class Model(nn.Module):
    """Parameters whose gradients are the tensors given to ``forward``."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(value.clone()) for value in values])

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(p * g).sum() for p, g in pairs if g is not None]).sum()


class Training:
    """A program that trains a model in a mode, and a twin by the averages of all ranks' gradients.

    Gradients are small integers, so averages over two ranks are exact.
    """

    def __init__(self, choose: random.Random, mode: str) -> None:
        self._choose, self._mode = choose, mode
        values = [torch.randn(shape) for shape in (*SHAPES, *SHAPES[-2:])]
        self._models = [Model(values) for _ in range(2)]
        options: dict[str, Any] = {"lr": 0.1, "max_grad_norm": 1.0}
        zero = ZeroRedundancyOptimizer(
            self._models[0].parameters(), FusedAdamW, **MODES[mode], **options
        )
        self._optimizers = zero, FusedAdamW(self._models[1].parameters(), **options)
        self.make_ddp()

    def _draw(self, param: Tensor) -> Tensor:
        return torch.randint(-4, 5, param.shape).float()

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _backward(self) -> None:
        """Gradients of ranks differ where the program or DDP is to average them."""
        gradients: list[list[Tensor | None]] = [[] for _ in range(dist.get_world_size())]
        for number, param in enumerate(self._models[1].weights):
            used = param.requires_grad and (number == 0 or self._choose.random() < 0.9)
            common, known = self._draw(param), self._mode == "sharded" or number in self._known
            for rank, of_rank in enumerate(gradients):
                sign = known * (1 - 2 * (rank % 2))
                of_rank.append(common + sign if used else None)
        self._run(gradients[dist.get_rank()]).backward()
        for of_rank in gradients:
            (self._models[1](of_rank) / len(gradients)).backward()

    def _step(self) -> None:
        """Steps both. If the mode cannot, all ranks raise, and nothing is changed."""
        before, error = [p.detach().clone() for p in self._models[0].parameters()], ""
        try:
            self._optimizers[0].step()
        except RuntimeError as problem:
            error = str(problem)
        assert len({bool(e) for e in gathered(error)}) == 1, error
        if error:
            assert "p.grad" in error, error
            assert not difference([p.detach() for p in self._models[0].parameters()], before)
        else:
            self._optimizers[1].step()
        self._zero_grad()

    def train(self) -> None:
        for _ in range(self._choose.randint(1, 2)):
            self._backward()
        self._step()

    def set_gradients(self) -> None:
        if self._choose.random() < 0.3:
            self._backward()
        for param, plain in zip(*(model.weights for model in self._models), strict=True):
            if plain.requires_grad:
                plain.grad = self._draw(plain)
                param.grad = plain.grad.clone()
        self._step()

    def make_ddp(self) -> None:
        self._known = {n for n, p in enumerate(self._models[0].weights) if p.requires_grad}
        self._run: nn.Module = self._models[0]
        if self._mode != "sharded":
            view = self._choose.random() < 0.5
            self._run = ddp = DDP(self._run, None, gradient_as_bucket_view=view,
                                  find_unused_parameters=True)  # fmt: skip
            if self._mode == "hook":
                ddp.register_comm_hook(None, reduce_scatter_hook(self._optimizers[0]))

    def freeze_or_unfreeze(self) -> None:
        number = self._choose.randrange(1, len(self._models[0].weights))
        for model in self._models:
            model.weights[number].requires_grad_(not model.weights[number].requires_grad)

    def add_group(self) -> None:
        value = torch.randn(self._choose.choice(SHAPES))
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            model.weights.append(nn.Parameter(value.clone()))
            optimizer.add_param_group({"params": [model.weights[-1]], "weight_decay": 0.3})

    def replace_memory(self) -> None:
        one, other = self._choose.sample(range(len(self._models[0].weights)), 2)
        exchanges = len({self._models[0].weights[n].shape for n in (one, other)}) == 1
        for model in self._models:
            p, q = model.weights[one], model.weights[other]
            p.data, q.data = (q.data, p.data) if exchanges else (p.data * 0.5, q.data)

    def check(self) -> None:
        for param, plain in zip(*(model.weights for model in self._models), strict=True):
            assert not difference(param.detach(), plain.detach())


def any_training(seed: int, mode: str) -> None:
    torch.manual_seed(seed)
    training, choose = Training(random.Random(seed), mode), random.Random(seed)
    others = [name for name in vars(Training) if not name.startswith("_") and name != "check"]
    done = []
    for _ in range(30):
        done.append(choose.choice(["train", choose.choice(others)]))
        try:
            getattr(training, done[-1])()
            training.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {mode}: {done}") from error


def cases() -> dict[str, Callable[[], None]]:
    masters = [{}, {"master_weights": "fp32"}, {"master_weights": "remainder"}]
    found = {
        f"training, {mode} {n}": partial(any_training, n, mode) for mode in MODES for n in range(6)
    }
    found |= {
        f"whole and sharded, {kind.__name__} {options}": partial(whole_and_sharded, kind, **options)
        for kind, options in (
            (FusedLion, {"master_weights": "fp32"}),
            (FusedLion, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
            (FusedSGD, {"master_weights": "remainder"}),
            (FusedSGD, {"momentum": 0.9, "nesterov": True}),
        )
    }
    return found | {
        f"{partition} {seed}": partial(
            any_operations, seed, partition, **masters[seed % 3],
            max_grad_norm=1.0, skip_nonfinite=True, lr=0.01, amsgrad=seed % 2 == 1,
        )
        for partition in PARTITIONS
        for seed in range(6)
    }  # fmt: skip


if __name__ == "__main__":
    run_cases(cases)
