"""Cases of test_workers.py: whatever users do between steps, sharded and plain have the same bits.

In every mode so do changes around the steps of a training loop, or all ranks raise.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_common import PARTITIONS, Params, whole_state

from tests.support.compare import assert_same, difference, unchanged
from tests.support.problems import copy_params, make_params, params_of, set_gradients
from tests.support.ranks import gathered, run_cases
from tests.support.tiers import in_tier
from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

SHAPES: list[tuple[int, ...]] = [
    (3,), (4, 5), (), (70, 3), (2, 3, 4), (96, 96), (300,), (64, 32, 3, 3), (0, 4)
]  # fmt: skip
ADAM = {"lr": 0.01, "weight_decay": 0.1}
CLIPPED = {"max_grad_norm": 1.0, "skip_nonfinite": True}
BF16 = {"dtype": torch.bfloat16}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, ADAM),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "FusedAdamW": (FusedAdamW, ADAM | CLIPPED | {"amsgrad": True}),
    "FusedAdamW, int8": (FusedAdamW, ADAM | {"state_dtype": "int8"}),
    "FusedAdamW, fp32 masters": (FusedAdamW, ADAM | CLIPPED | BF16 | {"master_weights": "fp32"}),
    "FusedAdamW, remainders": (
        FusedAdamW, ADAM | BF16 | {"master_weights": "remainder", "stochastic_rounding": True}
    ),
    "FusedLion": (FusedLion, ADAM | CLIPPED),
    "FusedSGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
}  # fmt: skip


class Twins:
    """Optimizers over equal parameters. Each public method does the same to both."""

    def __init__(self, choose: random.Random, kind: str, partition: str) -> None:
        self._choose, self._partition = choose, partition
        self._class, options = KINDS[kind]
        self._options = {key: value for key, value in options.items() if key != "dtype"}
        self._dtype = options.get("dtype", torch.float32)
        self._kept: list[tuple[Tensor, Tensor]] = []  # memory that the user holds, and its values
        self._groups: list[tuple[Params, Params]] = [self._new_params()]
        self._sharded = self._new_sharded()
        self._plain = self._class([{"params": p} for _, p in self._groups], **self._options)

    def _new_params(self, dtype: torch.dtype | None = None) -> tuple[Params, Params]:
        shapes = self._choose.choices(SHAPES, k=self._choose.randint(2, 5))
        params = make_params(shapes, dtype or self._dtype, seed=self._choose.randrange(1000))
        return params, copy_params(params)

    def _new_sharded(self) -> Any:
        groups = [{"params": params} for params, _ in self._groups]
        options = {"allow_mixed_dtypes": True, **PARTITIONS[self._partition], **self._options}
        return ZeroRedundancyOptimizer(groups, self._class, **options)

    def _both(self) -> Iterator[tuple[Any, Params]]:
        """Yields both optimizers with their parameters."""
        for side, optimizer in enumerate((self._sharded, self._plain)):
            yield optimizer, [param for group in self._groups for param in group[side]]

    def _give_gradients(self, seed: int) -> None:
        for _, params in self._both():
            set_gradients(params, seed=seed)
            choose = random.Random(seed)
            for param in params:
                if choose.random() < 0.1 or not param.requires_grad:
                    param.grad = None
                elif choose.random() < 0.02 and "skip_nonfinite" in self._options:
                    param.grad.fill_(torch.nan)

    def step(self) -> None:
        self._give_gradients(self._choose.randrange(1000))
        for optimizer, _ in self._both():
            optimizer.step()

    def step_by_a_closure(self) -> None:
        seed = self._choose.randrange(1000)
        losses = []
        for optimizer, _ in self._both():
            losses.append(optimizer.step(lambda: self._give_gradients(seed) or seed))
        assert losses == [seed] * 2

    def set_learning_rate(self) -> None:
        number, lr = self._choose.randrange(len(self._groups)), self._choose.random() * 0.1
        for optimizer, _ in self._both():
            optimizer.param_groups[number]["lr"] = lr

    def add_group(self) -> None:
        dtype = self._choose.choice([None, torch.bfloat16])
        self._groups.append(self._new_params(dtype))
        for side, optimizer in enumerate((self._sharded, self._plain)):
            optimizer.add_param_group({"params": self._groups[-1][side], "weight_decay": 0.3})

    def freeze_or_unfreeze(self) -> None:
        """The next step applies the gradient of a parameter that was frozen after backward."""
        number = self._choose.randrange(len(self._groups[0][0]))
        self._give_gradients(self._choose.randrange(1000))
        for of in self._groups[0]:
            of[number].requires_grad_(not of[number].requires_grad)
        for optimizer, _ in self._both():
            optimizer.step()

    def replace_memory(self) -> None:
        """Parameters exchange memory, or get new memory, or get former memory back."""
        one, other = self._choose.sample(range(len(self._groups[0][0])), 2)
        for _, params in self._both():
            p, q = params[one], params[other]
            self._kept.append((p.data, p.detach().clone()))
            if p.shape == q.shape:
                p.data, q.data = q.data, p.data
                del self._kept[-1]
            else:
                p.data = p.data * 0.5

    def write_weights(self) -> None:
        number = self._choose.randrange(len(self._groups[0][0]))
        for _, params in self._both():
            weight = params[number].detach()
            weight.mul_(torch.where(weight > 0, -0.5, 1.0))

    def change_layout(self) -> None:
        """Balanced rejects it. The other partitions keep it, or another after the next call."""
        turned: list[tuple[Tensor, Tensor]] = []
        for _, params in self._both():
            for param in params:
                if param.dim() == 4:
                    turned.append((param, param.data))
                    other = param.data.to(memory_format=torch.channels_last)
                    param.data = param.data.contiguous() if other is param.data else other
        if self._partition == "balanced" and turned:
            set_gradients([param for param in params_of(self._sharded) if param.requires_grad])
            with unchanged(self._sharded), pytest.raises(RuntimeError, match="has strides"):
                self._sharded.step()
            for param, former in turned:
                param.data = former

    def copy(self) -> None:
        """Goes on with a copy, alone or with its parameters. The original makes another step."""
        (zero, params), _ = self._both()
        if self._choose.random() < 0.5:
            copied = copy.deepcopy(zero)
            of_copy = params_of(copied)
        else:
            of_copy, copied = copy.deepcopy((params, zero))
        with unchanged(copied):
            set_gradients([param for param in params if param.requires_grad], seed=1)
            zero.step()
        self._sharded, rest = copied, iter(of_copy)
        self._groups = [([next(rest) for _ in plain], plain) for _, plain in self._groups]

    def load_own_state(self) -> None:
        self._sharded.load_state_dict(whole_state(self._sharded))

    def load_own_part(self) -> None:
        self._sharded.load_state_dict(self._sharded.state_dict())

    def shard_otherwise(self) -> None:
        state, self._partition = whole_state(self._sharded), self._choose.choice([*PARTITIONS])
        self._sharded = self._new_sharded()
        self._sharded.load_state_dict(state)

    def exchange_states(self) -> None:
        """A fresh sharded optimizer loads the plain one's state, and the reverse."""
        state, of_plain = whole_state(self._sharded), copy.deepcopy(self._plain.state_dict())
        self._sharded = self._new_sharded()
        with unchanged(of_plain):
            self._sharded.load_state_dict(of_plain)
        self._plain = self._class(
            [{"params": params} for _, params in self._groups], **self._options
        )
        self._plain.load_state_dict(state)

    def _check(self, with_state: bool) -> None:
        for sharded, plain in self._groups:
            assert_same(sharded, plain)
        for memory, values in self._kept:
            assert_same(memory, values)
        if with_state:
            expected = self._plain.state_dict()
            expected["state"] = dict(sorted(expected["state"].items()))
            assert_same(whole_state(self._sharded), expected)


def any_operations(kind: str, partition: str, seed: int) -> None:
    """Makes every operation in some order, with steps before and after it."""
    choose = random.Random(seed)
    twins, done = Twins(choose, kind, partition), list[str]()
    names = [name for name in vars(Twins) if not name.startswith("_") and name != "step"]
    if "Fused" not in kind:  # torch's kernels round differently in other layouts
        names.remove("change_layout")
    for name in choose.sample(names, len(names)):
        for each in ("step", name, "step"):
            done.append(each)
            try:
                getattr(twins, each)()
                twins._check(with_state=each != "step" or done[-2:] == [name, "step"])
            except Exception as error:
                raise AssertionError(f"seed {seed}, {kind}, {partition}: {done}") from error


def whole_and_sharded(kind: Any, **options: Any) -> None:
    """FSDP2's shards have the bits of a whole optimizer of any algorithm."""
    torch.manual_seed(0)
    options |= {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 1.0}
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 7), nn.Linear(7, 1)).to(torch.bfloat16)
    cut = fully_shard(copy.deepcopy(model))
    optimizers = [kind(of.parameters(), **options) for of in (model, cut)]
    for seed in range(3):
        set_gradients(model.parameters(), seed=seed)
        for whole, shard in zip(model.parameters(), cut.parameters(), strict=True):
            shard.grad = distribute_tensor(whole.grad, shard.device_mesh, shard.placements)
        for optimizer in optimizers:
            optimizer.step()
        assert_same([p.full_tensor() for p in cut.parameters()], [*model.parameters()])


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
            common, known = self._draw(param), self._mode == "sharded" or number in self._known
            used = number == 0 or self._choose.random() < 0.9
            for rank, of_rank in enumerate(gradients):
                sign = known * (1 - 2 * (rank % 2))
                here = used if not known else number == 0 or self._choose.random() < 0.9
                of_rank.append(common + sign if here and param.requires_grad else None)
        self._run(gradients[dist.get_rank()]).backward()
        for of_rank in gradients:
            (self._models[1](of_rank) / len(gradients)).backward()

    def _step(self, says: str = "p.grad") -> bool:
        """Steps both. If the mode cannot, all ranks raise, nothing is changed; returns False."""
        before, error = [p.detach().clone() for p in self._models[0].parameters()], ""
        try:
            self._optimizers[0].step()
        except RuntimeError as problem:
            error = str(problem)
        errors = gathered(error)
        assert len({bool(e) for e in errors}) == 1, errors
        if error:
            assert any(says in e for e in errors), errors
            assert not difference([p.detach() for p in self._models[0].parameters()], before)
        else:
            self._optimizers[1].step()
        self._zero_grad()
        return not error

    def train(self) -> None:
        for _ in range(self._choose.randint(1, 2)):
            self._backward()
        self._step()

    def step_twice(self) -> None:
        self._backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._step()

    def set_gradients(self) -> None:
        """If backward has reduced others, all ranks raise, or if only one rank sets gradients."""
        if self._choose.random() < 0.3:
            self._backward()
        alone = self._mode in ("hook", "sharded") and self._choose.random() < 0.3
        for param, plain in zip(*(model.weights for model in self._models), strict=True):
            if plain.requires_grad:
                plain.grad = self._draw(plain)
                param.grad = None if alone and dist.get_rank() else plain.grad.clone()
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

    def add_group(self, has_gradients: bool = False) -> None:
        value = torch.randn(self._choose.choice(SHAPES))
        for model in self._models:
            model.weights.append(nn.Parameter(value.clone()))
        if has_gradients:
            self._backward()
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            optimizer.add_param_group({"params": [model.weights[-1]], "weight_decay": 0.3})
        if has_gradients:
            self._step()

    def add_group_after_backward(self) -> None:
        self.add_group(has_gradients=True)

    def replace_memory(self) -> None:
        one, other = self._choose.sample(range(len(self._models[0].weights)), 2)
        exchanges = len({self._models[0].weights[n].shape for n in (one, other)}) == 1
        for model in self._models:
            p, q = model.weights[one], model.weights[other]
            p.data, q.data = (q.data, p.data) if exchanges else (p.data * 0.5, q.data)

    def change_layout(self) -> None:
        """Elements come to lie in another order for a step, which balanced rejects."""
        weights = self._models[0].weights
        number = self._choose.choice([n for n, p in enumerate(weights) if p.dim() in (2, 4)])
        params = [model.weights[number] for model in self._models]
        former = [param.data for param in params]
        transposes = self._choose.random() < 0.5
        for param in params:
            if param.dim() == 4:
                param.data = param.data.to(memory_format=torch.channels_last)
            elif transposes and param.shape[0] == param.shape[1]:
                param.data = param.data.t()
            else:
                param.data = param.data.t().contiguous().t()
        changed = params[0].stride() != former[0].stride() and params[0].numel() > 0
        self.make_ddp()
        self._backward()
        takes = self._mode in ("greedy", "bucket view") or not changed
        assert self._step("has strides") == takes
        for param, data in zip(params, former, strict=True):
            param.data = param.data.contiguous() if takes else data
        self.make_ddp()

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
    table = {
        f"training, {mode} {n}": partial(any_training, n, mode)
        for mode, n in in_tier(product(MODES, range(4)))
    }
    table |= {
        f"whole and sharded, {kind.__name__} {options}": partial(whole_and_sharded, kind, **options)
        for kind, options in (
            (FusedLion, {"master_weights": "fp32"}),
            (FusedLion, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
            (FusedSGD, {"master_weights": "remainder"}),
            (FusedSGD, {"momentum": 0.9, "nesterov": True}),
        )
    }
    return table | {
        f"{kind}, {partition}": partial(any_operations, kind, partition, seed)
        for (seed, kind), partition in in_tier(product(enumerate(KINDS), PARTITIONS))
    }


if __name__ == "__main__":
    run_cases(cases)
