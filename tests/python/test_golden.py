"""The library matches the golden vectors of tests/golden to the bit."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchopt_ext
from torchopt_ext import _C, FusedAdamW, FusedMuon, ops
from torchopt_ext.state.algorithms import ALGORITHMS
from torchopt_ext.state.storage import split_master

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS / "golden", TESTS / "python" / "ops"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
generate = importlib.import_module("generate")
softfloat = importlib.import_module("softfloat")
exact_reference = importlib.import_module("exact_reference")

LARGE = ("adam.json", "algorithms.json", "sumsq.json")
FIELD = {name: index for index, name in enumerate(ops.CONTROL_FIELDS)}
GROUP_KEYS = {
    "decoupled": "decoupled_weight_decay",
    "cautious": "cautious_weight_decay",
    "peak": "decay_follows_lr",
}


def cases(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((TESTS / "golden" / f"{name}.json").read_text())
    assert vectors
    return vectors


def tensor(dtype: str, text: str) -> torch.Tensor:
    bits = softfloat.unhexed(softfloat.FORMATS[dtype], text)
    return exact_reference.from_bits(getattr(torch, dtype), bits)


def hexed(tensor: torch.Tensor) -> str:
    fmt = exact_reference.format_of(tensor.dtype)
    return softfloat.hexed(fmt, exact_reference.to_bits(tensor))


def filled_accumulator(doubles: torch.Tensor) -> torch.Tensor:
    accumulator = ops.new_accumulator()
    _C.accumulator_add(accumulator, doubles)
    return accumulator


def assert_accumulated(accumulator: torch.Tensor, case: dict[str, Any]) -> None:
    assert hexed(ops.accumulator_total(accumulator)) == case["total"]
    entries = {str(k): x for k, x in enumerate(accumulator.tolist()) if x}
    assert entries == case["accumulator"]


def assert_stepped(algorithm: str, case: dict[str, Any], arguments: dict[str, Any]) -> None:
    state = {k: tensor(case["dtype"], x) for k, x in case["before"].items()}
    control, step = ops.new_control(), torch.tensor(float(case["t"]))
    control[FIELD["grad_factor"]] = arguments.pop("grad_factor")
    names = ("m", "v", "vmax")[: len(ALGORITHMS[algorithm].states)]
    moments = [[state[name]] if name in state else [] for name in names]
    operator = getattr(torch.ops.torchopt_ext, f"{algorithm}_")
    arguments = {GROUP_KEYS.get(k, k): value for k, value in arguments.items()}
    for text in case["grads"]:
        gradient = tensor(case["dtype"], text)
        operator([state["p"]], [gradient], *moments, [step], control, **arguments)
    assert {k: hexed(x) for k, x in state.items()} == case["after"], case
    assert step.item() == case["t"] + len(case["grads"])


@pytest.mark.parametrize("index", range(len(generate.ADAM_CASES)))
def test_adam(index: int) -> None:
    matching = cases("adam")[4 * index : 4 * index + 4]
    assert [c["dtype"] for c in matching] == ["float32", "float64", "bfloat16", "float16"]
    for case in matching:
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
        assert_stepped("adam", case, {name: case[name] for name in (*names, "grad_factor")})


def test_every_algorithm() -> None:
    for case in cases("algorithms"):
        assert_stepped(case["algorithm"], case, case["arguments"])


def test_muon() -> None:
    for case in cases("muon"):
        param = torch.nn.Parameter(tensor(case["dtype"], case["before"]).view(case["shape"]))
        optimizer = FusedMuon([param], **case["arguments"])
        for text in case["grads"]:
            param.grad = tensor(case["dtype"], text).view(case["shape"])
            optimizer.step()
        after = {"p": param.detach(), **optimizer.state[param]}
        assert {k: hexed(x) for k, x in after.items() if k != "step"} == case["after"], case


def label(case: dict[str, Any]) -> str:
    return "-".join(f"{v}" for k, v in case.items() if k in ("dtype", "shape", "strides", "values"))


@pytest.mark.parametrize("case", cases("sumsq"), ids=label)
def test_sum_of_squares(case: dict[str, Any]) -> None:
    fmt = softfloat.FORMATS[case["dtype"]]
    bits = generate.tensor_elements(fmt, math.prod(case["shape"]), case["seed"], case["values"])
    flat = exact_reference.from_bits(getattr(torch, case["dtype"]), bits)
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_([flat.as_strided(case["shape"], case["strides"])], accumulator)
    assert_accumulated(accumulator, case)


def test_accumulator() -> None:
    for case in cases("accumulator"):
        assert_accumulated(filled_accumulator(tensor("float64", case["doubles"])), case)


def test_control() -> None:
    fields = ("grad_norm", "clip_factor", "grad_factor", "found_inf", "skip")
    for case in cases("control"):
        control = ops.new_control(
            max_grad_norm=tensor("float64", case["max_grad_norm"]).item(),
            skip_nonfinite=case["skip_nonfinite"],
        )
        scaler = [case["grad_scale"], case["scaler_found_inf"]]
        accumulator = filled_accumulator(tensor("float64", case["doubles"]))
        tensors = [None if x is None else torch.tensor(float(x)) for x in scaler]
        ops.control_update_(control, accumulator, *tensors)
        actual = {name: hexed(control[FIELD[name]]) for name in fields}
        assert actual == {name: case[name] for name in fields}, case


def test_lr_factor() -> None:
    for case in cases("lr_factor"):
        arguments = {k: x for k, x in case.items() if k not in ("steps", "factors")}
        factors = [ops.lr_factor(step, **arguments) for step in case["steps"]]
        assert hexed(torch.tensor(factors, dtype=torch.float64)) == case["factors"], case
        assert hexed(ops.lr_factor(torch.tensor(case["steps"]), **arguments)) == case["factors"]


def test_partition() -> None:
    for case in cases("partition"):
        ranks = ops.partition_greedy(case["numels"], case["world_size"], case["initial_loads"])
        assert list(ranks) == case["ranks"], case


@pytest.mark.parametrize(
    ("kind", "dtype"), [("remainder", torch.int16), ("remainder8", torch.int8)]
)
def test_remainder(kind: str, dtype: torch.dtype) -> None:
    """Python splits as documented, and a step that keeps the weight joins and splits again."""
    for case in cases(kind):
        remainders = torch.tensor(case["remainders"], dtype=dtype)
        weight, rest = split_master(tensor("float32", case["weights"]), dtype)
        assert hexed(weight) == case["parameters"] and rest.equal(remainders)
        param = torch.nn.Parameter(tensor("bfloat16", case["parameters"]))
        optimizer = FusedAdamW([param], lr=0.0, weight_decay=0.0, master_weights=kind)
        optimizer.init_state()
        optimizer.state[param][kind] = remainders.clone()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert hexed(param.detach()) == case["parameters"]
        assert optimizer.state[param][kind].equal(remainders)


def test_stochastic_rounding() -> None:
    for case in cases("stochastic"):
        before = tensor("float32", case["before"])
        params = [torch.nn.Parameter(torch.ones(before.shape)) for _ in range(3)]
        optimizer = FusedAdamW(
            params, 0.0, (0.5, 0.5), weight_decay=0.0, state_dtype=torch.bfloat16,
            stochastic_rounding=True, rounding_seed=case["seed"],
        )  # fmt: skip
        param = params[case["parameter"]]
        optimizer.init_state()
        optimizer.state[param]["step"].fill_(case["step"] - 1)
        finite = torch.isfinite(before * 2)
        # exp_avg becomes g - 0.5 * (g - 0), which is exactly `before`.
        param.grad = torch.where(finite, before * 2, 0.0)
        optimizer.step()
        actual = optimizer.state[param]["exp_avg"]
        assert actual[finite].equal(tensor("bfloat16", case["after"][1])[finite])
        assert finite.sum() > 60


def test_digest() -> None:
    for case in cases("digest"):
        values = tensor(case["dtype"], case["bits"])
        tensors = [torch.zeros(0)] * case["parameter"] + [values]
        assert int(torchopt_ext.digest(tensors)[-1]) % 2**64 == case["digest"], case


def test_loss_scale() -> None:
    for case in cases("loss_scale"):
        control = ops.new_control(**case["settings"])
        scale = torch.tensor(float(case["settings"]["loss_scale"]))
        scales = []
        for overflow in case["overflows"]:
            ops.loss_scale_update_(control, torch.tensor(float(overflow)), scale)
            scales.append(scale.item())
        assert hexed(torch.tensor(scales)) == case["scales"], case["settings"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in generate.FILES]
)
def test_files_are_what_the_program_writes(name: str) -> None:
    assert (TESTS / "golden" / name).read_text() == generate.text_of(generate.FILES[name]())
