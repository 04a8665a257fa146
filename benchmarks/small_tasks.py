"""Two tasks that small models learn in a minute, with data that every machine has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.data import load_text
from examples.model import Transformer

Batch = tuple[Tensor, Tensor]  # inputs, and int64 classes
HELD_OUT = 20  # batches


@dataclass(frozen=True)
class Task:
    name: str
    model: Callable[[int], nn.Module]  # takes a seed
    batches: Callable[[int], Iterator[Batch]]  # takes a seed; yields without end
    held_out: list[Batch]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the mean cross-entropy in nats. Casts float inputs to the parameters' dtype."""
    inputs, classes = batch
    if inputs.is_floating_point():
        inputs = inputs.to(next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), classes.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, task: Task) -> float:
    return sum(loss_of(model, batch).item() for batch in task.held_out) / len(task.held_out)


@cache
def text(dim: int = 64, length: int = 64, size: int = 8) -> Task:
    """Predicts the next byte of the demo's text with a small version of the demo's transformer."""
    train, held_out = load_text()

    def batches(seed: int, source: Tensor = train) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(source) - length, (size, 1), generator=generator)
            window = source[starts + torch.arange(length + 1)].long()
            yield window[:, :-1], window[:, 1:]

    def model(seed: int) -> nn.Module:
        return Transformer(dim=dim, n_layers=2, n_heads=4, max_seq_len=length, seed=seed)

    check = batches(0, held_out)
    return Task("transformer", model, batches, [next(check) for _ in range(HELD_OUT)])


def perceptron(features: int, width: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), nn.GELU(),
        nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, classes),
    )  # fmt: skip


@cache
def teacher(features: int = 64, width: int = 256, size: int = 128) -> Task:
    """Learns the classes that a random perceptron gives to Gaussian points."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        labels = perceptron(features, width)
        for parameter in labels.parameters():
            nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            inputs = torch.randn(size, features, generator=generator)
            with torch.no_grad():
                classes = labels(inputs).argmax(-1)
            yield inputs, classes

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return perceptron(features, width)

    check = batches(0)
    return Task("perceptron", model, batches, [next(check) for _ in range(HELD_OUT)])
