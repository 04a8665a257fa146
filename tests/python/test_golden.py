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
from torchopt_ext import _C, FusedAdamW, ops
from torchopt_ext.state.algorithms import ALGORITHMS
from torchopt_ext.state.storage import split_master

pytestmark = pytest.mark.newest_torch
TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS / "golden", TESTS / "python" / "ops"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
generate = importlib.import_module("generate")
softfloat = importlib.import_module("softfloat")
exact_reference = importlib.import_module("exact_reference")

LARGE = ("adam.json", "algorithms.json", "sumsq.json")
FIELD = {name: index for index, name in enumerate(ops.CONTROL_FIELDS)}


def cases(name: str) -> list[dict[str, Any]]:
    result = json.loads((TESTS / "golden" / f"{name}.json").read_text())
    assert result
    return result


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


def check_accumulator(accumulator: torch.Tensor, case: dict[str, Any]) -> None:
    assert hexed(ops.accumulator_total(accumulator)) == case["total"]
    entries = {str(k): x for k, x in enumerate(accumulator.tolist()) if x}
    assert entries == case["accumulator"]


def label(case: dict[str, Any]) -> str:
    return "-".join(f"{v}" for k, v in case.items() if k in ("dtype", "shape", "strides", "values"))


@pytest.mark.parametrize("index", range(len(generate.ADAM_CASES)))
def test_adam(index: int) -> None:
    matching = cases("adam")[4 * index : 4 * index + 4]
    assert [c["dtype"] for c in matching] == ["float32", "float64", "bfloat16", "float16"]
    for case in matching:
        state = {k: tensor(case["dtype"], x) for k, x in case["before"].items()}
        step = torch.tensor(float(case["t"]))
        control = ops.new_control()
        control[FIELD["grad_factor"]] = case["grad_factor"]
        for text in case["grads"]:
            ops.adam_(
                [state["p"]],
                [tensor(case["dtype"], text)],
                [state["m"]],
                [state["v"]],
                [state["vmax"]] if case["amsgrad"] else [],
                [step],
                control,
                lr=case["lr"],
                beta1=case["beta1"],
                beta2=case["beta2"],
                eps=case["eps"],
                weight_decay=case["weight_decay"],
                decoupled_weight_decay=case["decoupled"],
                maximize=case["maximize"],
            )
        assert {k: hexed(x) for k, x in state.items()} == case["after"]
        assert step.item() == case["t"] + len(case["grads"])


def test_every_algorithm() -> None:
    names = {"decoupled": "decoupled_weight_decay", "cautious": "cautious_weight_decay"}
    names |= {"peak": "decay_follows_lr"}
    for case in cases("algorithms"):
        state = {k: tensor(case["dtype"], x) for k, x in case["before"].items()}
        control, step = ops.new_control(), torch.tensor(float(case["t"]))
        arguments = {names.get(k, k): value for k, value in case["arguments"].items()}
        control[FIELD["grad_factor"]] = arguments.pop("grad_factor")
        declared = ALGORITHMS[case["algorithm"]].states
        moments = [[state[k]] if k in state else [] for k in ("m", "v", "vmax")[: len(declared)]]
        for text in case["grads"]:
            getattr(torch.ops.torchopt_ext, f"{case['algorithm']}_")(
                [state["p"]], [tensor(case["dtype"], text)], *moments, [step], control, **arguments
            )
        assert {k: hexed(x) for k, x in state.items()} == case["after"], case
        assert step.item() == case["t"] + len(case["grads"])


@pytest.mark.parametrize("case", cases("sumsq"), ids=label)
def test_sum_of_squares(case: dict[str, Any]) -> None:
    fmt = softfloat.FORMATS[case["dtype"]]
    bits = generate.tensor_elements(fmt, math.prod(case["shape"]), case["seed"], case["values"])
    flat = exact_reference.from_bits(getattr(torch, case["dtype"]), bits)
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_([flat.as_strided(case["shape"], case["strides"])], accumulator)
    check_accumulator(accumulator, case)


def test_accumulator() -> None:
    for case in cases("accumulator"):
        check_accumulator(filled_accumulator(tensor("float64", case["doubles"])), case)


def test_control() -> None:
    for case in cases("control"):
        control = ops.new_control(
            max_grad_norm=tensor("float64", case["max_grad_norm"]).item(),
            skip_nonfinite=case["skip_nonfinite"],
        )
        scaler = {
            "grad_scale": case["grad_scale"],
            "found_inf": case["scaler_found_inf"],
        }
        ops.control_update_(
            control,
            filled_accumulator(tensor("float64", case["doubles"])),
            **{k: None if x is None else torch.tensor(float(x)) for k, x in scaler.items()},
        )
        fields = ("grad_norm", "clip_factor", "grad_factor", "found_inf", "skip")
        got = {name: hexed(control[FIELD[name]]) for name in fields}
        assert got == {name: case[name] for name in fields}, case


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


def bfloat16_step(
    weights: torch.Tensor, state: dict[str, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Runs a step that keeps the weights: lr 0, decay 0, gradient 0."""
    param = torch.nn.Parameter(weights.clone())
    optimizer = FusedAdamW([param], lr=0.0, weight_decay=0.0, **options)
    optimizer.init_state()
    optimizer.state[param].update(state)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("remainder", torch.int16), ("remainder8", torch.int8)]
)
def test_remainder(kind: str, dtype: torch.dtype) -> None:
    for case in cases(kind):
        weights, want = tensor("float32", case["weights"]), tensor("bfloat16", case["parameters"])
        remainders = torch.tensor(case["remainders"], dtype=dtype)
        from_python = split_master(weights, dtype)
        assert hexed(from_python[0]) == case["parameters"]
        assert from_python[1].equal(remainders)
        got, state = bfloat16_step(want, {kind: remainders}, master_weights=kind)
        assert hexed(got) == case["parameters"]  # joined and split again by the step
        assert state[kind].equal(remainders)


def test_stochastic_rounding() -> None:
    for case in cases("stochastic"):
        before = tensor("float32", case["before"])
        params = [torch.nn.Parameter(torch.ones(before.shape)) for _ in range(3)]
        optimizer = FusedAdamW(
            params,
            lr=0.0,
            weight_decay=0.0,
            betas=(0.5, 0.5),
            state_dtype=torch.bfloat16,
            stochastic_rounding=True,
            rounding_seed=case["seed"],
        )
        param = params[case["parameter"]]
        optimizer.init_state()
        optimizer.state[param]["step"].fill_(case["step"] - 1)
        finite = torch.isfinite(before * 2)
        # exp_avg becomes g - 0.5 * (g - 0), which is exactly `before`.
        param.grad = torch.where(finite, before * 2, 0.0)
        optimizer.step()
        got = optimizer.state[param]["exp_avg"]
        assert got[finite].equal(tensor("bfloat16", case["after"][1])[finite])
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


def test_files_are_what_the_program_writes() -> None:
    for name, expected in generate.FILES.items():
        if name in LARGE:
            continue  # seconds each, so the slow test below compares them
        assert (TESTS / "golden" / name).read_text() == generate.text_of(expected())


@pytest.mark.slow
def test_large_files_are_what_the_program_writes() -> None:
    for name in LARGE:
        expected = generate.text_of(generate.FILES[name]())
        assert (TESTS / "golden" / name).read_text() == expected
