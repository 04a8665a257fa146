"""Other libraries' AdamW on the CPU, if installed. None of them clips in its step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from bf16_cases import INT8, OPTIONS
from cases import FUSED, OURS, STEP, fp32_cases, gradients_of, params_with
from group import Case, Group
from shapes import Shapes
from torch import Tensor, nn
from torch.optim import Optimizer

from torchopt_ext import FusedAdamW

LR, DECAY = 1e-3, 1e-2  # torch's defaults; other libraries' differ


@dataclass(frozen=True)
class Peer:
    """An optimizer of another library. ``make`` raises ImportError if it is not installed."""

    name: str
    package: str
    lacks: str
    make: Callable[[list[nn.Parameter]], Optimizer]
    rounds: int

    def __str__(self) -> str:
        try:
            installed = f" ({self.package} {version(self.package)})"
        except PackageNotFoundError:
            installed = ""
        return f"{self.name}{installed}: {self.lacks}"


def torchao(params: list[nn.Parameter]) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=LR, weight_decay=DECAY)


def bitsandbytes(params: list[nn.Parameter]) -> Optimizer:
    import bitsandbytes as bnb

    return bnb.optim.AdamW(params, lr=LR, weight_decay=DECAY)


def bitsandbytes_8bit(params: list[nn.Parameter]) -> Optimizer:
    import bitsandbytes as bnb

    return bnb.optim.AdamW8bit(params, lr=LR, weight_decay=DECAY)


def deepspeed(params: list[nn.Parameter]) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # DeepSpeed compiles its operator and searches PATH for ninja, which pip puts next to python.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + beside
    return DeepSpeedCPUAdam(params, lr=LR, weight_decay=DECAY)


PEERS = [
    Peer(
        "DeepSpeedCPUAdam",
        "deepspeed",
        "the step alone, without clipping or overflow check; one call for each tensor; compiles "
        "itself on first use",
        deepspeed,
        rounds=15,
    ),
    Peer(
        "bitsandbytes AdamW",
        "bitsandbytes",
        "the 32-bit step alone, without clipping or overflow check; made for GPUs, on the CPU "
        "it is written in torch operators",
        bitsandbytes,
        rounds=5,
    ),
    Peer(
        "torchao AdamW8bit",
        "torchao",
        "the step alone, without clipping or overflow check; moments of 8 bits (32 in tensors "
        "below 4,096 elements), so it saves memory where the others are accurate; made for GPUs",
        torchao,
        rounds=3,
    ),
]

BITSANDBYTES_8BIT, TORCHAO_8BIT = "bitsandbytes AdamW8bit", "torchao AdamW8bit"
# 8-bit optimizers over bf16 weights, which they round to nearest.
PEERS_8BIT = [
    Peer(
        BITSANDBYTES_8BIT,
        "bitsandbytes",
        "the step alone on bf16 weights; blocks of 256 elements",
        bitsandbytes_8bit,
        rounds=5,
    ),
    Peer(
        TORCHAO_8BIT,
        "torchao",
        "the step alone on bf16 weights; blocks of 256 elements",
        torchao,
        rounds=3,
    ),
]


def build_peer_8bit(peer: Peer, name: str, shapes: Shapes) -> Group:
    """Builds the peer's step over bf16 weights, and ours with 8-bit moments and remainders.

    Raises:
        ImportError: the peer is not installed.
    """
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    ours = FusedAdamW(params_with(gradients), lr=LR, weight_decay=DECAY, **OPTIONS[INT8])
    cases = [
        Case(peer.name, STEP, made(peer, gradients).step, None),
        Case(INT8, STEP, ours.step, None),
    ]
    return Group(name, shapes, cases, baseline=peer.name, rounds=peer.rounds)


def made(peer: Peer, gradients: list[Tensor]) -> Optimizer:
    try:
        return peer.make(params_with(gradients))
    except ImportError as error:
        raise ImportError(f"{peer.name}: not installed: pip install {peer.package}") from error


def build_peer(peer: Peer, name: str, shapes: Shapes) -> Group:
    """Builds the peer's step, ours and torch fused. Only the peer's step gets a row.

    Raises:
        ImportError: the peer is not installed.
    """
    gradients = gradients_of(shapes, torch.float32, "cpu")
    cases = [Case(peer.name, STEP, made(peer, gradients).step, None)]
    for implementation in (OURS, FUSED):
        cases += fp32_cases(implementation, gradients, "cpu", (STEP,), loops=False)
    return Group(name, shapes, cases, baseline=FUSED, shown=(peer.name,), rounds=peer.rounds)
