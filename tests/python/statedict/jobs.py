"""Ways to hold and save optimizers, and what conversions between them must give, by the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.statedict.dcp import load

from ...support.oracle import floats, join, split, split8, words

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS: dict[str, Any] = {"lr": 0.02}
CODES = {moment.name: moment.codes for moment in ADAM.moments}
SCALES = {moment.name: moment.scale for moment in ADAM.moments}

# How weights and moments are held; "torch" is torch's own AdamW.
HOLDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "plain": {},
    "fp32 moments": {"state_dtype": FP32},
    "int8": {"state_dtype": "int8"},
    "fp32": {"master_weights": "fp32"},
    "fp32, bf16 moments": {"master_weights": "fp32", "state_dtype": BF16},
    "remainder": {"master_weights": "remainder"},
    "remainder8": {"master_weights": "remainder8"},
    "remainder8, int8": {"master_weights": "remainder8", "state_dtype": "int8"},
}
OURS = [held for held in HOLDS if held != "torch"]


def optimizer_of(model: nn.Module, held: str, **options: Any) -> Any:
    cls = torch.optim.AdamW if held == "torch" else FusedAdamW
    return cls(model.named_parameters(), **SETTINGS | HOLDS[held] | options)


def container_of(model: nn.Module, held: str) -> Any:
    cls = torch.optim.AdamW if held == "torch" else FusedAdamW
    return OptimizersContainer([model], cls, SETTINGS | HOLDS[held])


LAYOUTS: dict[str, Callable[[nn.Module, str], Any]] = {
    "optimizer": optimizer_of,
    "container": container_of,
    "in backward": lambda model, held: OptimizersInBackwardContainer(
        [model], FusedAdamW, SETTINGS | HOLDS[held]
    ),
    "adapted": lambda model, held: FSDPadaptOptimizer(optimizer_of(model, held)),
    "adapted SGD": lambda model, _: FSDPadaptOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ),
}


def model_of(seed: int, dtype: torch.dtype = BF16) -> nn.Module:
    """Has rows of three groups and a rest, 3-D rows of two groups, and short rows."""
    torch.manual_seed(seed)
    layers = nn.Linear(200, 30), nn.Conv1d(8, 5, 16), nn.LayerNorm(30), nn.Linear(7, 5)
    return nn.Sequential(*layers).to(dtype)


def train(model: nn.Module, optimizer: Any, seeds: Iterable[int]) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            gradient: Any = torch.randn(p.shape, generator=generator).to(BF16).to(p.dtype)
            if isinstance(p, DTensor):
                layout = p.device_mesh, p.placements
                gradient = distribute_tensor(gradient, *layout, src_data_rank=None)
            p.grad = gradient
        if isinstance(optimizer, OptimizersInBackwardContainer):
            gradients = [(p.grad, setattr(p, "grad", None))[0] for p in model.parameters()]
            torch.autograd.backward([*model.parameters()], gradients)
        optimizer.step()
        optimizer.zero_grad()


def job(
    layout: str, held: str, seed: int, steps: int, dtype: torch.dtype = BF16
) -> tuple[nn.Module, Any]:
    model = model_of(seed, dtype)
    optimizer = LAYOUTS[layout](model, held)
    train(model, optimizer, range(10 * seed, 10 * seed + steps))
    return model, optimizer


def through_checkpoint(path: Any, source: dict[str, Any], target: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(source, checkpoint_id=path)
        load(target, checkpoint_id=path)


# ---- what is held --------------------------------------------------------------------------------


def exact_weights(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Returns the weights from which the parameters are rounded."""
    if isinstance(optimizer, FSDPadaptOptimizer):
        return [w for own in optimizer.state_dict()["flat_fp32_weights"].values() for w in own]
    weights = []
    for param in model.parameters():
        state = optimizer.state[param]
        (kind,) = {"master_weight", "remainder", "remainder8"} & state.keys() or {None}
        if kind is None:
            weights.append(param.detach().float())
        elif kind == "master_weight":
            weights.append(state[kind])
        else:
            weights.append(floats(join(param, state[kind])).view_as(param))
    return weights


def kept(weights: Iterable[Tensor], held: str | None) -> list[Tensor]:
    """Returns what of float32 weights a way to hold them keeps."""
    kind = HOLDS.get(held or "", {"master_weights": held}).get("master_weights")
    if kind not in ("remainder", "remainder8"):
        return [(w if kind else w.to(BF16).float()).detach().clone() for w in weights]
    split_by, shift = (split, 0) if kind == "remainder" else (split8, 8)
    parts = [(w, *split_by(words(w.detach()))) for w in weights]
    pairs = [(w, (high.astype("int64") << 16) + (low << shift)) for w, high, low in parts]
    return [floats(bits.astype("uint64")).view_as(w) for w, bits in pairs]


def codes_of(name: str, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales by docs/numerics.md section 11, rounded to nearest."""
    is_root = name == "exp_avg_sq"
    rows = moment.detach().float().flatten(1).numpy()
    value = np.sqrt(rows) if is_root else rows
    most = np.maximum.reduceat(abs(value), range(0, rows.shape[1], 64), axis=1)
    scale = most / np.float32(256 if is_root else 127)
    each = scale[:, np.arange(rows.shape[1]) // 64]
    code = np.rint(value * (np.float32(1) / np.maximum(each, np.float32(2**-126))))
    code = np.maximum(code - 1, 0).astype("u1") if is_root else code.astype("i1")
    return torch.from_numpy(code.reshape(moment.shape)), torch.from_numpy(scale)


def moment_of(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the moment that codes and scales stand for."""
    rows = codes.flatten(1).numpy().astype(np.float32)
    each = scales.numpy()[:, np.arange(rows.shape[1]) // 64]
    value = np.square((rows + 1) * each) if name == "exp_avg_sq" else rows * each
    return torch.from_numpy(value.reshape(codes.shape))


def expected_moments(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Tensor]:
    """Returns a state's moments as an optimizer holds them that has the state ``like``."""
    found = {}
    for name, codes in CODES.items():
        if codes in state and codes in like:
            found |= {codes: state[codes], SCALES[name]: state[SCALES[name]]}
            continue
        coded = codes in state
        moment = moment_of(name, state[codes], state[SCALES[name]]) if coded else state[name]
        if codes in like:
            found[codes], found[SCALES[name]] = codes_of(name, moment)
        else:
            found[name] = moment.to(like[name].dtype)
    return found


def same_moments(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Tensor]]) -> bool:
    return all(
        value.dtype == state[name].dtype and torch.equal(state[name], value)
        for state, moments in zip(found, expected, strict=True)
        for name, value in moments.items()
    )
