"""Contracts of the operators besides values: refusals without changes, version counters, opcheck,
TorchScript and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_reference import DTYPES, name_of, random_elements
from torch import Tensor

import torchopt_ext  # noqa: F401  registers torch.ops.torchopt_ext
from torchopt_ext import ops

from ...support.compare import assert_same
from .contract import WRONG, assert_compiles_to_one_graph, each_backend, rejected

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
operators = torch.ops.torchopt_ext

HYPER: dict[str, Any] = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
    "maximize": False,
}
LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
ROLES = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state step")
Lists = dict[str, list[Tensor]]


def adam_lists(dtype: torch.dtype = torch.float32, *, amsgrad: bool = True) -> Lists:
    """Returns the lists of three parameters, the last of them 2-D."""
    shapes = ((5,), (70,), (6, 11))
    lists: Lists = {
        name: [
            random_elements(dtype, torch.Size(shape).numel(), 10 * k + i).view(shape).abs()
            for i, shape in enumerate(shapes)
        ]
        for k, name in enumerate(LISTS[:5])
    }
    if not amsgrad:
        lists["max_exp_avg_sqs"] = []
    lists["state_steps"] = [torch.tensor(float(i)) for i in range(3)]
    return lists


def call(lists: Lists, control: Tensor | None = None, **hyper: Any) -> None:
    ops.adam_(
        *(lists[name] for name in LISTS),
        ops.new_control() if control is None else control,
        **(HYPER | hyper),
    )


def everything(lists: Lists) -> list[Tensor]:
    return [x for tensors in lists.values() for x in tensors]


Replacement = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("role", range(5), ids=ROLES[:5])
def test_adam_rejects_a_bad_tensor(role: int, position: int, wrong: str) -> None:
    if role == 1 and wrong in ("gaps", "repeated"):
        pytest.skip("such a gradient is copied")
    change, word = WRONG[wrong]
    lists = adam_lists()
    lists[LISTS[role]][position] = change(lists[LISTS[role]][position])
    if wrong in ("float64", "shape", "more dimensions") and role == 0:
        word = ""  # the error may name any tensor that differs from the parameter
    with rejected(everything(lists), rf"\b{position}\b", word):
        call(lists)


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.long(),
        lambda x: x.to("meta"),
        lambda x: torch.stack([x, x]),
    ],
    ids=["float64", "int64", "meta", "two elements"],
)
def test_adam_rejects_a_bad_step(change: Replacement, position: int) -> None:
    lists = adam_lists()
    lists["state_steps"][position] = change(lists["state_steps"][position])
    with rejected(everything(lists), rf"\b{position}\b"):
        call(lists)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_adam_rejects_lists_of_other_lengths(name: str, change: str) -> None:
    lists = adam_lists()
    if change == "shorter":
        lists[name] = lists[name][:2]
    else:
        lists[name] = [*lists[name], lists[name][0].clone()]
    with rejected(everything(lists), r"\b3\b", r"\b[24]\b"):
        call(lists)


@pytest.mark.parametrize("name", ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"])
@pytest.mark.parametrize(
    ("change", "word"),
    [(lambda x: x.t().contiguous().t(), "strides"), (lambda x: x.bfloat16(), "dtype|BFloat16")],
    ids=["strides", "dtype"],
)
def test_adam_rejects_a_state_unlike_the_others(name: str, change: Replacement, word: str) -> None:
    lists = adam_lists()
    lists[name][2] = change(lists[name][2])
    with rejected(everything(lists), r"\b2\b", word):
        call(lists)


def share(lists: Lists, a: tuple[str, int], b: tuple[str, int], offset: int) -> None:
    """Makes tensor b start `offset` elements into tensor a's memory."""
    first, second = lists[a[0]][a[1]], lists[b[0]][b[1]]
    room = torch.zeros(200, dtype=first.dtype)
    lists[a[0]][a[1]] = room[: first.numel()].view(first.shape).copy_(first)
    part = room[offset : offset + second.numel()]
    lists[b[0]][b[1]] = part.view(second.shape)


@pytest.mark.parametrize(
    ("a", "b", "offset"),
    [
        (("params", 0), ("params", 1), 0),
        (("params", 1), ("params", 2), 69),
        (("params", 1), ("exp_avgs", 1), 0),
        (("exp_avgs", 0), ("exp_avg_sqs", 2), 4),
        (("exp_avg_sqs", 2), ("max_exp_avg_sqs", 2), 0),
        (("params", 1), ("grads", 1), 1),
        (("exp_avgs", 1), ("grads", 2), 10),
        (("state_steps", 0), ("state_steps", 1), 0),
        (("params", 0), ("state_steps", 1), 2),
    ],
    ids=str,
)
def test_adam_rejects_overlapping_memory(
    a: tuple[str, int], b: tuple[str, int], offset: int
) -> None:
    lists = adam_lists()
    share(lists, a, b, offset)
    with rejected(everything(lists), "memory", rf"\b{a[1]}\b", rf"\b{b[1]}\b"):
        call(lists)


def test_what_may_share_memory() -> None:
    """Adjacent parameters, and one gradient for two of them."""
    lists = adam_lists()
    room = torch.zeros(76)
    lists = {name: [x[0], x[0].clone(), x[2]] for name, x in lists.items()}
    lists["params"] = [room[:5], room[5:10], room[10:].view(6, 11)]
    lists["grads"][1] = lists["grads"][0]
    call(lists)
    assert (room != 0).all()


BAD_HYPER: dict[str, list[float]] = {
    "lr": [float("nan")],
    "beta1": [-0.1, 1.0, float("nan")],
    "beta2": [-0.1, 1.0, float("nan")],
    "eps": [-1e-8, float("nan")],
    "weight_decay": [-0.1, float("nan")],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_HYPER.items() for value in values]
)
def test_adam_rejects_bad_arguments(name: str, value: float) -> None:
    lists = adam_lists()
    words = {"lr": "learning rate", "beta1": "beta", "beta2": "beta", "eps": "epsilon"}
    with rejected(everything(lists), words.get(name, name)):
        call(lists, **{name: value})


@pytest.mark.parametrize(
    "lr",
    [torch.ones(2), torch.tensor(1), torch.tensor(0.1, device="meta"), torch.tensor(0.1j)],
    ids=["two elements", "int64", "meta", "complex"],
)
def test_adam_rejects_a_bad_learning_rate_tensor(lr: Tensor) -> None:
    lists = adam_lists()
    with rejected(everything(lists), "lr"):
        call(lists, lr=lr)


@pytest.mark.parametrize(
    "control",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(len(ops.CONTROL_FIELDS)),
        ops.new_control().repeat_interleave(2)[::2],
        ops.new_control().to("meta"),
    ],
    ids=["length", "dtype", "strides", "meta"],
)
def test_bad_control(control: Tensor) -> None:
    lists = adam_lists()
    with rejected([*everything(lists), control], "control|meta"):
        call(lists, control)
    with rejected([control], "control|meta"):
        ops.control_update_(control, ops.new_accumulator())


BAD_ACCUMULATORS = {
    "length": torch.zeros(69, dtype=torch.int64),
    "dtype": torch.zeros(70, dtype=torch.float64),
    "strides": torch.zeros(140, dtype=torch.int64)[::2],
    "meta": torch.zeros(70, dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("accumulator", BAD_ACCUMULATORS.values(), ids=BAD_ACCUMULATORS.keys())
def test_bad_accumulator(accumulator: Tensor) -> None:
    control = ops.new_control()
    with rejected([accumulator], "accumulator|meta"):
        ops.grad_sumsq_([torch.ones(3)], accumulator)
    with rejected([control, accumulator], "accumulator|meta"):
        ops.control_update_(control, accumulator)
    if not accumulator.is_meta:  # for a meta accumulator the total is on meta
        with rejected([accumulator], "accumulator"):
            ops.accumulator_total(accumulator)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("wrong", ["sparse", "complex", "integer", "meta"])
def test_grad_sumsq_rejects_a_bad_tensor(wrong: str, position: int) -> None:
    change, word = WRONG[wrong]
    grads = [torch.ones(5), torch.ones(7), torch.ones(9)]
    grads[position] = change(grads[position])
    accumulator = ops.new_accumulator()
    with rejected([*grads, accumulator], rf"\b{position}\b", word):
        ops.grad_sumsq_(grads, accumulator)


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize(
    "value",
    [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")],
    ids=["two elements", "float64", "meta"],
)
def test_bad_scaler_tensors(name: str, value: Tensor) -> None:
    control, accumulator = ops.new_control(), ops.new_accumulator()
    with rejected([control, accumulator], f"{name}|meta"):
        ops.control_update_(control, accumulator, **{name: value})


def versions(tensors: list[Tensor]) -> list[int]:
    return [x._version for x in tensors]


@by_dtype
@pytest.mark.parametrize("amsgrad", [False, True])
def test_version_counters(dtype: torch.dtype, amsgrad: bool) -> None:
    lists = adam_lists(dtype, amsgrad=amsgrad)
    written = [x for name in LISTS if name != "grads" for x in lists[name]]
    control = ops.new_control()
    read = [*lists["grads"], control]
    before, before_read = versions(written), versions(read)
    call(lists, control)
    assert all(a > b for a, b in zip(versions(written), before, strict=True))
    assert versions(read) == before_read
    accumulator = ops.new_accumulator()
    ops.grad_sumsq_(lists["grads"], accumulator)
    assert accumulator._version > 0
    assert versions(read) == before_read
    version = accumulator._version
    ops.accumulator_total(accumulator)
    ops.control_update_(control, accumulator)
    assert accumulator._version == version
    assert control._version > before_read[-1]


def test_autograd_sees_that_a_parameter_changed() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    with torch.no_grad():
        zeros = torch.zeros(3)
        ops.adam_(
            [p], [torch.ones(3)], [zeros.clone()], [zeros.clone()], [], [torch.tensor(0.0)],
            ops.new_control(), **HYPER,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SCHEDULE: dict[str, Any] = {
    "warmup_steps": 3,
    "stable_steps": 2,
    "decay_steps": 9,
    "decay_type": "cosine",
    "min_factor": 0.1,
    "generation": 2,
}


@by_dtype
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_opcheck_adam(dtype: torch.dtype, amsgrad: bool) -> None:
    lists = list(adam_lists(dtype, amsgrad=amsgrad).values())
    torch.library.opcheck(operators.adam_.default, (*lists, ops.new_control()), HYPER)
    lr = {**HYPER, "lr": torch.tensor(0.1)}
    torch.library.opcheck(operators.adam_.tensor_lr, (*lists, ops.new_control()), lr)


@by_dtype
def test_opcheck_grad_sumsq(dtype: torch.dtype) -> None:
    for grads in ([], adam_lists(dtype)["grads"]):
        torch.library.opcheck(operators.grad_sumsq_.default, (grads, ops.new_accumulator()))


def test_opcheck_the_others() -> None:
    accumulator = ops.new_accumulator()
    one = torch.ones(1)
    torch.library.opcheck(operators.accumulator_total.default, (accumulator,))
    for scaler in ((None, None), (one, one.clone())):
        arguments = (ops.new_control(), accumulator, *scaler)
        torch.library.opcheck(operators.control_update_.default, arguments)
    for steps in (torch.arange(5), torch.arange(6).view(2, 3).t(), torch.tensor(3)):
        torch.library.opcheck(operators.lr_factor.tensor, (steps,), SCHEDULE)
    torch.library.opcheck(operators.lr_factor.default, (5,), SCHEDULE)
    torch.library.opcheck(operators.partition_greedy.default, ([5, 3, 9], 2, [0, 1], [1, 0]))


@torch.jit.script
def scripted_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    accumulator: Tensor,
    control: Tensor,
    step: int,
) -> tuple[Tensor, list[int]]:
    empty: list[Tensor] = []
    torch.ops.torchopt_ext.grad_sumsq_(grads, accumulator)
    torch.ops.torchopt_ext.control_update_(control, accumulator)
    factor = torch.ops.torchopt_ext.lr_factor(
        step, warmup_steps=3, stable_steps=2, decay_steps=9, decay_type="cosine"
    )
    factors = torch.ops.torchopt_ext.lr_factor(
        torch.tensor([step]), warmup_steps=3, stable_steps=2, decay_steps=9, decay_type="cosine"
    )
    torch.ops.torchopt_ext.adam_(
        params, grads, exp_avgs, exp_avg_sqs, empty, steps, control,
        lr=0.1 * factor, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
        decoupled_weight_decay=True, maximize=False,
    )  # fmt: skip
    torch.ops.torchopt_ext.adam_(
        params, grads, exp_avgs, exp_avg_sqs, empty, steps, control,
        lr=0.1 * factors, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
        decoupled_weight_decay=True, maximize=False,
    )  # fmt: skip
    sizes = [p.numel() for p in params]
    ranks = torch.ops.torchopt_ext.partition_greedy(sizes, 2, tie_loads=[1, 0])
    return torch.ops.torchopt_ext.accumulator_total(accumulator), ranks


def step(lists: Lists, accumulator: Tensor, control: Tensor, steps: Any) -> Tensor:
    ops.grad_sumsq_(lists["grads"], accumulator)
    ops.control_update_(control, accumulator)
    schedule = {"warmup_steps": 3, "stable_steps": 2, "decay_steps": 9, "decay_type": "cosine"}
    call(lists, control, lr=0.1 * ops.lr_factor(steps, **schedule))
    call(lists, control, lr=0.1 * ops.lr_factor(torch.as_tensor([steps]), **schedule))
    return ops.accumulator_total(accumulator)


def test_torchscript() -> None:
    scripted, eager = adam_lists(amsgrad=False), adam_lists(amsgrad=False)
    control = ops.new_control(max_grad_norm=0.5)
    total, ranks = scripted_step(
        *(scripted[name] for name in LISTS if name != "max_exp_avg_sqs"),
        ops.new_accumulator(),
        control.clone(),
        7,
    )
    assert torch.equal(total, step(eager, ops.new_accumulator(), control, 7))
    assert ranks == [0, 1, 0]
    assert_same(scripted, eager)


class Stepped(torch.nn.Module):
    """Makes the operators' lists inside the script, from tensors read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Buffer(torch.ones(3))
        self.exp_avg, self.exp_avg_sq = (torch.nn.Buffer(torch.zeros(3)) for _ in range(2))
        self.steps = torch.nn.Buffer(torch.zeros(()))
        self.control = torch.nn.Buffer(ops.new_control())

    def forward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        empty: list[Tensor] = []
        before = self.weight.sum()
        torch.ops.torchopt_ext.adam_(
            [self.weight], [grad], [self.exp_avg], [self.exp_avg_sq], empty, [self.steps],
            self.control, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
            decoupled_weight_decay=True, maximize=False,
        )  # fmt: skip
        copy = torch.zeros(3, dtype=torch.bfloat16)
        torch.ops.torchopt_ext.scaled_copy_([copy], [self.weight], self.control, unscale=False)
        return before, self.weight.sum(), copy


@pytest.mark.parametrize("way", ["script", "trace"])
def test_torchscript_keeps_writes_to_lists_that_it_makes(way: str) -> None:
    """TorchScript keeps calls whose writes its alias analysis could miss."""
    grad = torch.ones(3)
    eager, module = Stepped().eval(), Stepped().eval()
    compiled: Any
    if way == "trace":
        compiled = torch.jit.trace(module, (torch.zeros(3),), check_trace=False)
        eager(torch.zeros(3))
    else:
        compiled = torch.jit.script(module)
    for _ in range(3):
        for a, b in zip(compiled(grad), eager(grad), strict=True):
            assert torch.equal(a, b)


def test_one_element_is_a_tensor_to_the_operators() -> None:
    for steps in (torch.tensor(3), torch.tensor([3])):
        factor = operators.lr_factor(steps, **SCHEDULE)
        assert factor.shape == steps.shape and factor.dtype == torch.float64
    assert isinstance(operators.lr_factor(3, **SCHEDULE), float)
    lists = adam_lists()
    arguments = (*(lists[name] for name in LISTS), ops.new_control())
    with pytest.raises(RuntimeError, match="lr has dtype int64, expected float32 or float64"):
        operators.adam_(*arguments, **HYPER | {"lr": torch.tensor(1)})


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_compile_traces_one_graph(dtype: torch.dtype, backend: str) -> None:
    if backend == "inductor" and dtype == torch.bfloat16:
        pytest.skip("as long again")

    def make() -> tuple[Any, ...]:
        control = ops.new_control(max_grad_norm=0.5)
        return adam_lists(dtype), ops.new_accumulator(), control, torch.tensor(1)

    def run(lists: Lists, accumulator: Tensor, control: Tensor, steps: Tensor) -> Tensor:
        ops.grad_sumsq_(lists["grads"], accumulator)
        ops.control_update_(control, accumulator)
        factor = ops.lr_factor(steps, warmup_steps=3, stable_steps=2, decay_steps=9)
        call(lists, control)
        call(lists, control, lr=0.1 * factor)
        return ops.accumulator_total(accumulator) + factor

    assert_compiles_to_one_graph(run, make, backend)
