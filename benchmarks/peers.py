"""Other libraries' AdamW, if installed. None of them clips in its step. See README.md."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from bf16_cases import INT8, OPTIONS
from cases import FUSED, OURS, STEP, fp32_cases, gradients_of, params_with
from harness import Case, Group
from shapes import Shapes
from torch import Tensor

from torchopt_ext import FusedAdamW

SETTINGS = {"lr": 1e-3, "weight_decay": 1e-2}  # torch's defaults; other libraries' differ


@dataclass(frozen=True)
class Peer:
    """An optimizer of another library: class ``kind`` of ``module``."""

    library: str
    module: str
    kind: str
    rounds: int = 15  # on the CPU, at most

    @property
    def name(self) -> str:
        return f"{self.library} {self.kind}"

    @property
    def eight_bits(self) -> bool:
        return "8bit" in self.kind

    def __str__(self) -> str:
        try:
            return f"{self.name} ({version(self.library)})"
        except PackageNotFoundError:
            return self.name

    def load(self) -> Any:
        """Returns the class.

        Raises:
            ImportError: the library is not installed, or lacks the class.
        """
        # DeepSpeed compiles its operator, and searches PATH for ninja, which is next to python.
        beside = str(Path(sys.executable).parent)
        if beside not in os.environ["PATH"].split(os.pathsep):
            os.environ["PATH"] += os.pathsep + beside
        try:
            return getattr(importlib.import_module(self.module), self.kind)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"{self.name}: pip install {self.library} ({error})") from error

    def make(self, gradients: list[Tensor]) -> Any:
        """Returns the optimizer over parameters with these gradients."""
        return self.load()(params_with(gradients), **SETTINGS)


BITSANDBYTES_8BIT = Peer("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", rounds=5)
TORCHAO_8BIT = Peer("torchao", "torchao.optim", "AdamW8bit", rounds=3)
EIGHT_BITS = (BITSANDBYTES_8BIT, TORCHAO_8BIT)
CPU = [
    Peer("deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    Peer("bitsandbytes", "bitsandbytes.optim", "AdamW", rounds=5),
    TORCHAO_8BIT,
]
GPU = [
    Peer("apex", "apex.optimizers", "FusedAdam"),
    Peer("TransformerEngine", "transformer_engine.pytorch.optimizers", "FusedAdam"),
    Peer("bitsandbytes", "bitsandbytes.optim", "AdamW"),
    *EIGHT_BITS,
]


def build_peer(peer: Peer, name: str, shapes: Shapes) -> Group:
    """Builds the peer's step, ours and torch fused. Only the peer's step gets a row.

    Raises:
        ImportError: the peer is not installed.
    """
    gradients = gradients_of(shapes, torch.float32, "cpu")
    cases = [Case(peer.name, STEP, peer.make(gradients).step)]
    for implementation in (OURS, FUSED):
        cases += fp32_cases(implementation, gradients, "cpu", (STEP,), loops=False)
    return Group(name, shapes, cases, baseline=FUSED, shown=(peer.name,), rounds=peer.rounds)


def build_peer_8bit(peer: Peer, name: str, shapes: Shapes) -> Group:
    """Builds the peer's step over bf16 weights, and ours with 8-bit moments and remainders.

    Raises:
        ImportError: the peer is not installed.
    """
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    ours = FusedAdamW(params_with(gradients), **SETTINGS, **OPTIONS[INT8])
    cases = [Case(peer.name, STEP, peer.make(gradients).step), Case(INT8, STEP, ours.step)]
    return Group(name, shapes, cases, baseline=peer.name, rounds=peer.rounds)
