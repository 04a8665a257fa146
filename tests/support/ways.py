"""The ways to hold a parameter and its state, and the classes that step it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedMuon, FusedSGD
from torchopt_ext.state.algorithms import ALGORITHMS

from .problems import SHAPES, make_params

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

OURS = {
    "Adam": FusedAdam, "AdamW": FusedAdamW, "Lion": FusedLion, "SGD": FusedSGD, "Muon": FusedMuon,
}  # fmt: skip
TORCH = {name: getattr(torch.optim, name) for name in OURS if name != "Lion"}
MASTER_ENTRY = {"fp32": "master_weight", "remainder": "remainder", "remainder8": "remainder8"}
"""The entry in a parameter's state for each value of ``master_weights``."""


@dataclass(frozen=True)
class Way:
    """The dtype of parameters, and the options that say how weight and moments are held."""

    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        return self.options.get("state_dtype") == "int8"

    @property
    def master(self) -> str | None:
        """The entry with what the parameter does not hold of its weight."""
        return MASTER_ENTRY.get(self.options.get("master_weights", ""))

    def build(
        self,
        name: str = "AdamW",
        params: Iterable[Any] | None = None,
        shapes: Iterable[tuple[int, ...]] = SHAPES,
        **more: Any,
    ) -> tuple[list[nn.Parameter], Any]:
        """Returns parameters, by default new ones, and an optimizer of a class of ``KINDS``.

        Muon gets those of the shapes that are matrices.
        """
        if name.startswith("Muon"):
            shapes = [shape for shape in shapes if len(shape) > 1]
        params = make_params(shapes, self.dtype) if params is None else list(params)
        cls, options = KINDS[name]
        return params, cls(params, **options | self.options | more)


RANDOM: dict[str, Any] = {"stochastic_rounding": True}
INT8: dict[str, Any] = {"state_dtype": "int8", "fp32_moments": ()}

WAYS = {
    "fp32": Way(FP32),
    "fp32, bf16 state": Way(FP32, {"state_dtype": BF16}),
    "fp32, int8": Way(FP32, INT8),
    "fp64": Way(FP64),
    "fp16": Way(FP16),
    "fp16, master": Way(FP16, {"master_weights": "fp32"}),
    "bf16": Way(BF16),
    "bf16, fp32 state": Way(BF16, {"state_dtype": FP32}),
    "bf16, random": Way(BF16, RANDOM),
    "bf16, master": Way(BF16, {"master_weights": "fp32"}),
    "bf16, master, bf16 state": Way(BF16, {"master_weights": "fp32", "state_dtype": BF16}),
    "bf16, remainder": Way(BF16, {"master_weights": "remainder"}),
    "bf16, remainder, bf16 state, random": Way(
        BF16, {"master_weights": "remainder", "state_dtype": BF16} | RANDOM
    ),
    "bf16, remainder, int8": Way(BF16, {"master_weights": "remainder"} | INT8),
    "bf16, remainder8": Way(BF16, {"master_weights": "remainder8"}),
    "bf16, remainder8, random": Way(BF16, {"master_weights": "remainder8"} | RANDOM),
    "bf16, remainder8, int8, random": Way(BF16, {"master_weights": "remainder8"} | INT8 | RANDOM),
}
"""Every way to hold a weight, with every dtype of state that is held differently beside it."""

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {name: (cls, {}) for name, cls in OURS.items()}
"""Class and options of an optimizer, for every set of states that an algorithm may have."""
for _name in OURS:
    _algorithm = ALGORITHMS[_name.lower().removesuffix("w")]
    for _key in sorted({state.when for state in _algorithm.states if state.when}):
        _value = 0.9 if isinstance(_algorithm.defaults[_key], float) else True
        KINDS[f"{_name}, {_key}"] = (OURS[_name], {_key: _value})


def hybrid(
    params: Iterable[nn.Parameter] | None = None, dtype: torch.dtype = FP32, **options: Any
) -> tuple[list[nn.Parameter], FusedMuon]:
    """Returns parameters and one optimizer: Muon for two matrices, others for a parameter each."""
    shapes = [(16, 24), (24, 16), (5,), (7, 3), (4, 6), (3,)]
    params = make_params(shapes, dtype) if params is None else list(params)
    others: tuple[dict[str, Any], ...] = (
        {"algorithm": "adamw"},
        {"algorithm": "lion"},
        {"algorithm": "adam"},
        {"algorithm": "sgd", "momentum": 0.9},
    )
    rest = [{"params": [p], **keys} for p, keys in zip(params[2:], others, strict=True)]
    return params, FusedMuon([{"params": params[:2]}, *rest], **{"lr": 0.02} | options)


def is_possible(kind: str, way: str) -> bool:
    """Whether a kind of optimizer can be held in this way: no 8 bits beside amsgrad's maximum."""
    return not (WAYS[way].is_quantized and "amsgrad" in KINDS[kind][1])


each_class = pytest.mark.parametrize("name", ["Adam", "AdamW"])  # torch's classes
each_way = pytest.mark.parametrize("way", WAYS)
each_kind_and_way = pytest.mark.parametrize(
    ("kind", "way"), [(kind, way) for kind in KINDS for way in WAYS if is_possible(kind, way)]
)
