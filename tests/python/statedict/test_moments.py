"""8-bit moments from float moments and back, in state dicts and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.state.moments import dequantize, quantize
from torchopt_ext.statedict.dcp import load

from ...support.compare import assert_same_bits

CODES = {m.codes: torch.uint8 if m.as_root else torch.int8 for m in ADAM.moments}
CODES_OF = {m.name: m.codes for m in ADAM.moments}
SCALES = {m.scale: m.name for m in ADAM.moments}

BF16 = torch.bfloat16
KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02),
    "fp32": lambda m: FusedAdamW(m.parameters(), lr=0.02, state_dtype=torch.float32),
    "bf16": lambda m: FusedAdamW(m.parameters(), lr=0.02, state_dtype=BF16),
    "int8": lambda m: FusedAdamW(m.parameters(), lr=0.02, state_dtype="int8"),
}
PAIRS = [(kind, "int8") for kind in KINDS] + [("int8", "fp32"), ("int8", "bf16")]
each_pair = pytest.mark.parametrize(("saved", "kept"), PAIRS)


def container(model: nn.Module, kind: str) -> Any:
    cls = torch.optim.AdamW if kind == "torch" else FusedAdamW
    dtypes: dict[str, Any] = {"bf16": {"state_dtype": BF16}, "int8": {"state_dtype": "int8"}}
    return OptimizersContainer([model], cls, {"lr": 0.02, **dtypes.get(kind, {})})


def model_of(seed: int) -> nn.Module:
    """Has rows of three groups and a rest, 3-D rows of two groups, and short rows."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(200, 30), nn.Conv1d(8, 5, 16), nn.LayerNorm(30), nn.Linear(7, 5))


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def expected_codes(name: str, moment: Tensor) -> tuple[Any, Any]:
    """Computes docs/numerics.md section 11, rounded to nearest."""
    rows = moment.flatten(1).numpy()
    value = rows if name != "exp_avg_sq" else np.sqrt(rows)
    most = np.maximum.reduceat(abs(value), range(0, rows.shape[1], 64), axis=1)
    scale = most / np.float32(127 if name != "exp_avg_sq" else 256)
    each = scale[:, np.arange(rows.shape[1]) // 64]
    code = np.rint(value * (np.float32(1) / np.maximum(each, np.float32(2**-126))))
    code = code if name != "exp_avg_sq" else np.maximum(code - 1, 0)
    return code.reshape(moment.shape), scale


@pytest.mark.parametrize("shape", [(30, 200), (5, 8, 16), (2, 64), (0, 70), (3, 300_001)])
@pytest.mark.parametrize("name", CODES_OF)
def test_codes_are_the_documented_ones_and_keep(name: str, shape: tuple[int, ...]) -> None:
    moment = torch.randn(shape) * torch.randn(shape).exp()
    moment = moment.square() if name == "exp_avg_sq" else moment
    moment[:1, :64] = 0
    codes, scales = quantize(name, moment)
    code, scale = expected_codes(name, moment)
    assert codes.dtype == CODES[CODES_OF[name]]
    assert np.array_equal(codes.numpy(), code)
    assert np.array_equal(scales.numpy(), scale)
    back = dequantize(name, codes, scales)
    again, _ = quantize(name, back)
    assert again.equal(codes)
    assert not (back == 0)[moment > 0].any() or name != "exp_avg_sq"


def test_what_is_not_finite_stays_so() -> None:
    moment = torch.ones(2, 128)
    moment[0, 3], moment[1, 70] = torch.nan, torch.inf
    for name in CODES_OF:
        back = dequantize(name, *quantize(name, moment))
        finite = back.isfinite().view(4, 64).any(1)
        assert finite.tolist() == [False, True, True, False]


def assert_converted(saved: Any, model: nn.Module, loaded: Any, other: nn.Module, to: str) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        source, state = saved.state[p], loaded.state[q]
        for scale, name in SCALES.items():
            code = CODES_OF[name]
            if scale in source and scale in state:
                assert_same_bits([state[code], state[scale]], [source[code], source[scale]])
            elif scale in state:
                codes, scales = quantize(name, source[name].float())
                assert_same_bits([state[code], state[scale]], [codes, scales])
            else:
                coded = scale in source
                exact = dequantize(name, source[code], source[scale]) if coded else source[name]
                dtype = BF16 if to == "bf16" else torch.float32
                assert_same_bits([state[name]], [exact.to(dtype)])
                assert code not in state
        assert float(state["step"]) == float(source["step"])


@each_pair
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_by_index(saved: str, kept: str, steps: int, way: str, tmp_path: Path) -> None:
    model, other = model_of(1), model_of(2)
    source, target = KINDS[saved](model), KINDS[kept](other)
    for seed in range(3):
        train(model, source, seed)
    for seed in range(steps):
        train(other, target, 10 + seed)
    before = copy.deepcopy(source.state_dict())
    if way == "state dict":
        target.load_state_dict(source.state_dict())
    else:
        dcp.save({"optimizer": source}, checkpoint_id=tmp_path / "saved")
        load({"optimizer": target}, checkpoint_id=tmp_path / "saved")
    assert_converted(source, model, target, other, kept)
    train(other, target, 7)
    for index, entry in source.state_dict()["state"].items():
        assert_same_bits(entry.values(), before["state"][index].values())


@each_pair
@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_by_name(saved: str, kept: str, way: str, tmp_path: Path) -> None:
    model, other = model_of(1), model_of(2)
    source, target = container(model, saved), container(other, kept)
    for seed in range(3):
        train(model, source, seed)
    train(other, target, 10)
    if way == "state dict":
        target.load_state_dict(source.state_dict())
    else:
        dcp.save({"optimizer": source}, checkpoint_id=tmp_path / "saved")
        load({"optimizer": target}, checkpoint_id=tmp_path / "saved")
    assert_converted(source.optimizers[0], model, target.optimizers[0], other, kept)
    train(other, target, 7)


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
def test_a_layout_that_changed_since_the_last_step(first: torch.memory_format) -> None:
    """A container loads as FusedAdamW does: parameters that are not contiguous have no codes."""
    weights = []
    for make in (container, lambda model, kind: KINDS[kind](model)):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Conv2d(16, 4, 3)).to(memory_format=first)
        optimizer = make(model, "int8")
        train(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        last = {torch.contiguous_format, torch.channels_last} - {first}
        model.to(memory_format=last.pop())
        optimizer.load_state_dict(saved)
        train(model, optimizer, 2)
        weights.append(model.state_dict().values())
    assert_same_bits(*weights)


@pytest.mark.parametrize("kept", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("exp_avg_scale_v2", None, "scale_v2 of parameter 0 is missing beside 8-bit moments"),
        ("exp_avg_scale_v2", lambda t: t[:, :1], r"scale_v2 of parameter 0 has shape \(30, 1\)"),
        ("exp_avg_scale_v2", "exp_avg_scale_v3", "v3 of parameter 0 is of another format"),
        ("exp_avg_scale_v2", lambda t: t.to_sparse(), "scale_v2 of parameter 0 has .*sparse"),
        ("exp_avg_sq_codes", lambda t: t.to(torch.int8), "sq_codes of parameter 0 is torch.int8"),
        ("exp_avg_codes", lambda t: t.float(), "codes of parameter 0 is torch.float32"),
        ("exp_avg_codes", "exp_avg", "exp_avg of parameter 0 is torch.int8"),
    ],
)
def test_wrong_codes_are_rejected(kept: str, name: str, change: Any, problem: str) -> None:
    model, other = model_of(1), model_of(2)
    source, target = KINDS["int8"](model), KINDS[kept](other)
    train(model, source, 1)
    train(other, target, 1)
    saved = copy.deepcopy(source.state_dict())
    value = saved["state"][0].pop(name)
    if isinstance(change, str):  # renamed
        saved["state"][0][change] = value
    elif change is not None:
        saved["state"][0][name] = change(value)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=problem):
        target.load_state_dict(saved)
    for index, entry in target.state_dict()["state"].items():
        assert_same_bits(entry.values(), before["state"][index].values())
