"""Small models, fixed gradients, and the optimizers of all container tests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.containers import OptimizersContainer

from ...support import compare


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sets one thread: more only cost time on such small tensors."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Choice:
    """An optimizer class with arguments."""

    cls: type[torch.optim.Optimizer]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def all_kwargs(self) -> dict[str, Any]:
        betas = {} if self.cls is FusedSGD else {"betas": (0.9, 0.95)}
        return {"lr": 1e-2, "weight_decay": 0.1, **betas, **self.kwargs}

    @property
    def states(self) -> list[str]:
        """The entries of a state beside "step"."""
        others = {FusedLion: ["exp_avg"], FusedSGD: ["momentum_buffer"]}
        amsgrad = ["max_exp_avg_sq"] * self.kwargs.get("amsgrad", False)
        return others.get(self.cls) or ["exp_avg", "exp_avg_sq", *amsgrad]

    def in_its_words(self, text: str) -> str:
        """Returns a text about Adam with the names that the class has."""
        sgd = {"exp_avg": "momentum_buffer", "betas": "momentum"}
        for old, new in sgd.items() if self.cls is FusedSGD else ():
            text = text.replace(old, new)
        return text

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return self.cls(params, **self.all_kwargs())

    def container(self, parts: list[nn.Module], kind: Any = OptimizersContainer, *args: Any) -> Any:
        return kind(parts, self.cls, self.all_kwargs(), *args)


CHOICES = {
    "FusedAdamW": Choice(FusedAdamW, {"fused": True, "foreach": False}),
    "FusedAdam-amsgrad": Choice(FusedAdam, {"amsgrad": True}),
    "AdamW-foreach": Choice(torch.optim.AdamW, {"foreach": True}),
    "AdamW-fused-amsgrad": Choice(torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "Adam-for-loop": Choice(torch.optim.Adam, {"foreach": False}),
    "FusedLion": Choice(FusedLion, {}),
    "FusedSGD-momentum": Choice(FusedSGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.fixture(params=CHOICES)
def choice(request: pytest.FixtureRequest) -> Choice:
    return CHOICES[request.param]


class Model(nn.Module):
    """Layers numbered from `first`, so that parts have different names."""

    def __init__(self, layers: int = 2, first: int = 0) -> None:
        super().__init__()
        numbers = range(first, first + layers)
        blocks = {str(i): nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)) for i in numbers}
        self.layers = nn.ModuleDict(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Model(2, first=0), Model(1, first=2)]


def parameters(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [param for part in parts for param in part.parameters()]


def set_grads(parts: Iterable[nn.Module], seed: int, scale: float = 1.0) -> None:
    """Gives trainable parameters the gradients of a seed."""
    generator = torch.Generator().manual_seed(seed)
    for param in parameters(parts):
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = grad.to(param.dtype) if param.requires_grad else None


def train(optimizer: Any, parts: list[nn.Module], seeds: Iterable[int]) -> None:
    """Steps with the gradients of the given seeds."""
    for seed in seeds:
        set_grads(parts, seed)
        optimizer.step()
        optimizer.zero_grad()


def backward(parts: list[nn.Module], seed: int, scale: Any = lambda loss: loss) -> None:
    """Runs one backward through all parts in a row."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    for part in parts:
        x = part(x.to(next(part.parameters()).dtype))
    scale(x.square().sum()).backward()


def _plain(value: Any) -> Any:
    value = value.state_dict() if isinstance(value, nn.Module) else value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {k: _plain(value[k]) for k in sorted(value)} if isinstance(value, Mapping) else value


def assert_same(left: Any, right: Any) -> None:
    """Compares the bits of modules, lists, or (nested) dicts whose keys have any order."""
    compare.assert_same(_plain(left), _plain(right))
