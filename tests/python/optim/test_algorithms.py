"""Every algorithm against its definition, in every way to hold weights and state, and mixed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD, digest
from torchopt_ext.state.algorithms import ALGORITHMS
from torchopt_ext.zero import ZeroRedundancyOptimizer

SHAPES = ((5, 200), (33,), (7, 3, 64), (0, 4), ())
SGDS: Sequence[dict[str, Any]] = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
)
LIONS: Sequence[dict[str, Any]] = (
    {},
    {"betas": (0.3, 0.6), "weight_decay": 0.1},
    {"betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": True},
)
MADE: dict[str, Callable[..., FusedOptimizer]] = {
    "adamw": FusedAdamW,
    "lion": FusedLion,
    "sgd": lambda params, **more: FusedSGD(params, momentum=0.9, **more),
    "sgd without momentum": FusedSGD,
}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "fp16, master": (torch.float16, {"master_weights": "fp32"}),
    "bf16": (torch.bfloat16, {}),
    "bf16, master": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16, remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16, random": (torch.bfloat16, {"stochastic_rounding": True}),
    "fp32, bf16 state": (torch.float32, {"state_dtype": torch.bfloat16}),
    "fp32, int8": (torch.float32, {"state_dtype": "int8"}),
    "bf16, int8, remainder8": (
        torch.bfloat16,
        {"state_dtype": "int8", "master_weights": "remainder8", "stochastic_rounding": True},
    ),
}
each_kind = pytest.mark.parametrize("kind", MADE)
each_way = pytest.mark.parametrize("way", WAYS)


def params_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def set_gradients(params: Sequence[Tensor], seed: int, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = (factor * torch.randn(param.shape)).to(param.dtype)


def train(optimizer: Any, params: Sequence[Tensor], seeds: Sequence[int]) -> None:
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def same_bits(ours: Any, others: Any) -> bool:
    return bool(digest(ours).equal(digest(others)))


def lion_step(params: Sequence[Tensor], averages: list[Tensor], lr: float, **group: Any) -> None:
    """arXiv:2302.06675, algorithm 2."""
    first, second = group.get("betas", (0.9, 0.99))
    for param, average in zip(params, averages, strict=True):
        assert param.grad is not None
        grad = -param.grad if group.get("maximize") else param.grad
        update = (first * average + (1 - first) * grad).sign()
        param.sub_(lr * (update + group.get("weight_decay", 0.0) * param))
        average.mul_(second).add_(grad, alpha=1 - second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", LIONS)
def test_lion_is_the_papers(group: dict[str, Any], dtype: torch.dtype) -> None:
    params, wide = params_of(dtype), [p.detach().double() for p in params_of(dtype)]
    optimizer = FusedLion(params, lr=1e-2, **group)
    averages = [torch.zeros_like(weight) for weight in wide]
    for seed in range(5):
        set_gradients(params, seed)
        optimizer.step()
        for param, weight in zip(params, wide, strict=True):
            assert param.grad is not None
            weight.grad = param.grad.double()
        lion_step(wide, averages, 1e-2, **group)
    for param, weight, average in zip(params, wide, averages, strict=True):
        torch.testing.assert_close(param.double(), weight, rtol=1e-6, atol=1e-6)
        held = optimizer.state[param]["exp_avg"]
        torch.testing.assert_close(held.double(), average, rtol=1e-5, atol=1e-6)


def test_the_sign_of_lion() -> None:
    """Zeros do not move, the smallest number does, and a NaN shows."""
    values = [0.0, -0.0, 1e-44, -1e-44, torch.inf, -torch.inf, torch.nan, 3e38]
    param = nn.Parameter(torch.zeros(len(values)))
    param.grad = torch.tensor(values)
    FusedLion([param], lr=0.5, betas=(0.75, 0.9)).step()
    expected = torch.tensor([0.0, 0.0, -0.5, 0.5, -0.5, 0.5, torch.nan, -0.5])
    torch.testing.assert_close(param.detach(), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", SGDS)
def test_sgd_is_torchs(group: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = params_of(dtype), params_of(dtype)
    optimizer, stock = FusedSGD(ours, lr=1e-2, **group), torch.optim.SGD(theirs, lr=1e-2, **group)
    train(optimizer, ours, range(4))
    train(stock, theirs, range(4))
    torch.testing.assert_close(ours, theirs)
    # State dicts go in both directions.
    loaded = FusedSGD(theirs, lr=1.0, **group)
    loaded.load_state_dict(copy.deepcopy(stock.state_dict()))
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for weight, other in zip(ours, theirs, strict=True):
            other.copy_(weight)
    resumed = [nn.Parameter(p.detach().clone()) for p in theirs]
    twin = FusedSGD(resumed, lr=1.0, **group)
    twin.load_state_dict(copy.deepcopy(loaded.state_dict()))
    train(stock, theirs, range(4, 7))
    train(optimizer, ours, range(4, 7))
    train(twin, resumed, range(4, 7))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(resumed, theirs)


@each_way
@each_kind
def test_every_way_to_hold(kind: str, way: str) -> None:
    """A low-precision step is within its roundings of the same step in fp64, and is resumed."""
    dtype, options = WAYS[way]
    params = params_of(dtype)
    wide = [nn.Parameter(p.detach().double()) for p in params]
    optimizer = MADE[kind](params, lr=1e-2, weight_decay=0.1, fp32_moments=(), **options)
    exact = MADE[kind](wide, lr=1e-2, weight_decay=0.1)
    for seed in range(4):
        set_gradients(params, seed)
        for param, other in zip(params, wide, strict=True):
            assert param.grad is not None
            other.grad = param.grad.double()
        optimizer.step()
        exact.step()
    eps = torch.finfo(dtype).eps
    # A sign may flip where the average is about zero: one step of 2 * lr each time.
    atol = 4 * 2e-2 if kind == "lion" and way != "fp64" else 1e-2 if "int8" in way else 1e-3
    for param, other in zip(params, wide, strict=True):
        torch.testing.assert_close(param.double(), other.data, rtol=4 * eps, atol=atol + eps)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = MADE[kind](twins, lr=1.0, fp32_moments=(), **options)
    twin.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    copied = copy.deepcopy(optimizer)
    train(optimizer, params, [9, 10])
    train(twin, twins, [9, 10])
    assert same_bits(params, twins)
    assert digest(optimizer).equal(digest(twin))
    copies = [param for group in copied.param_groups for param in group["params"]]
    train(copied, copies, [9, 10])
    assert same_bits(params, copies)


@each_way
@each_kind
def test_clipping_is_in_the_step(kind: str, way: str) -> None:
    """Clipping equals gradients that were multiplied by a power of two, and overflow skips."""
    dtype, options = WAYS[way]
    params, others = params_of(dtype), params_of(dtype)
    optimizer = MADE[kind](params, skip_nonfinite=True, fp32_moments=(), **options)
    set_gradients(params, 0)
    norm = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in params]))
    optimizer.max_grad_norm = float(norm) / 4 * (1 + 1e-6)  # torch adds 1e-6 to the norm
    set_gradients(others, 0, 0.25)
    optimizer.step()
    MADE[kind](others, fp32_moments=(), **options).step()
    factor = float(optimizer.control.clip_factor)
    assert factor == pytest.approx(0.25, rel=1e-6)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(params, others, rtol=tolerance, atol=1e-6)
    before = digest(optimizer).clone()
    params[0].grad[0, 0] = torch.inf
    optimizer.step()
    assert digest(optimizer).equal(before)
    assert float(optimizer.control.skipped_steps) == 1


def test_groups_of_several_algorithms() -> None:
    """One object steps as separate optimizers with one norm, and is resumed with other groups."""

    def build(params: list[nn.Parameter]) -> FusedOptimizer:
        return FusedOptimizer(
            [
                {"params": params[:1], "algorithm": "lion", "betas": (0.8, 0.9)},
                {"params": params[1:2], "algorithm": "sgd", "momentum": 0.9, "lr": 0.5},
                {"params": params[2:3], "algorithm": "adam"},
                {"params": params[3:]},
            ],
            lr=1e-2,
            weight_decay=0.1,
            max_grad_norm=1.0,
        )

    params, apart = params_of(), params_of()
    together = build(params)
    alone = [
        FusedLion(apart[:1], 1e-2, (0.8, 0.9), 0.1),
        FusedSGD(apart[1:2], 0.5, 0.9, weight_decay=0.1),
        FusedAdam(apart[2:3], lr=1e-2, weight_decay=0.1),
        FusedAdamW(apart[3:], lr=1e-2, weight_decay=0.1),
    ]
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(apart, seed)
        together.step()
        factor = float(together.control.clip_factor)
        for param in apart:
            assert param.grad is not None
            param.grad *= factor
        for optimizer in alone:
            optimizer.step()
        torch.testing.assert_close(params, apart, rtol=1e-6, atol=1e-7)
    states = [set(together.state[param]) - {"torchopt_ext.control"} for param in params]
    assert states[:2] == [{"step", "exp_avg"}, {"step", "momentum_buffer"}]
    assert all(state == {"step", "exp_avg", "exp_avg_sq"} for state in states[2:])
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = build(twins)
    twin.load_state_dict(together.state_dict())
    train(together, params, [7])
    train(twin, twins, [7])
    assert same_bits(params, twins)
    # Another algorithm from now on: its state is made, what it does not use stays.
    together.param_groups[0].update(algorithm="sgd", momentum=0.9, dampening=0.0, nesterov=False)
    train(together, params, [8])
    assert {"exp_avg", "momentum_buffer"} <= together.state[params[0]].keys()


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda p: FusedOptimizer(p, algorithm="lions"), ValueError, "did you mean 'lion'"),
        (lambda p: FusedOptimizer(p, algorithm="lion", amsgrad=True), TypeError, "'amsgrad'"),
        (lambda p: FusedOptimizer(p, momentun=0.9, algorithm="sgd"), TypeError, "mean 'momentum'"),
        (lambda p: FusedOptimizer(p, max_grad_nom=1.0), TypeError, "mean 'max_grad_norm'"),
        (
            lambda p: FusedOptimizer([{"params": p, "algorithm": "sgd", "betas": (0.9, 0.99)}]),
            TypeError,
            "a param group of 'sgd' has no argument 'betas'",
        ),
        (
            lambda p: FusedAdamW([{"params": p, "algorithm": "lion", "betas": (0.9, 1.5)}]),
            ValueError,
            "beta parameter at index 1: 1.5",
        ),
        (
            lambda p: FusedLion([{"params": p, "amsgrad": True}]),
            TypeError,
            "a param group of 'lion' has no argument 'amsgrad'",
        ),
        (lambda p: FusedSGD(p, momentum=-1.0), ValueError, "Invalid momentum value: -1"),
        (lambda p: FusedSGD(p, nesterov=True), ValueError, "Nesterov momentum requires"),
        (lambda p: FusedSGD(p, lr=-1.0), ValueError, "Invalid learning rate: -1"),
        (lambda p: FusedLion(p, betas=0.9), TypeError, "betas is 0.9, expected two numbers"),
        (lambda p: FusedLion(p, maximize="no"), TypeError, "maximize is 'no', expected a bool"),
    ],
)
def test_what_an_algorithm_does_not_have(build: Any, error: type, message: str) -> None:
    params = params_of()
    group = {"params": params}
    with pytest.raises(error, match=message):
        build(params)
    assert FusedLion([group]).param_groups[0]["betas"] == (0.9, 0.99)


@pytest.mark.parametrize("kept", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("saved", ["adamw", "lion", "sgd"])
def test_a_state_dict_of_another_algorithm(saved: str, kept: str) -> None:
    source, params = params_of(), params_of()
    giver, taker = MADE[saved](source), MADE[kept](params)
    train(giver, source, [0])
    train(taker, params, [1])
    before = digest(taker).clone()
    if saved == kept:
        taker.load_state_dict(giver.state_dict())
        return
    names = {"adamw": "adam"}
    expected = f"group 0 is of {names.get(saved, saved)}, expected {names.get(kept, kept)}"
    with pytest.raises(ValueError, match=expected):
        taker.load_state_dict(giver.state_dict())
    assert digest(taker).equal(before)


def test_the_first_step_and_a_change_of_momentum() -> None:
    """The buffer begins as the gradient, also if the momentum is set later."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9, dampening=0.5)
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0] * 3
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].tolist() == pytest.approx([1.4] * 3)
    optimizer.param_groups[0]["momentum"] = 0.0
    before = param.detach().clone()
    optimizer.step()
    assert (before - param).tolist() == pytest.approx([1.0] * 3)


def test_declarations() -> None:
    """What is declared is what steps read: an operator and defaults that build."""
    for name, algorithm in ALGORITHMS.items():
        schema = getattr(torch.ops.torchopt_ext, f"{name}_").default._schema
        arguments = {argument.name for argument in schema.arguments}
        assert algorithm.arguments({}).keys() <= arguments
        assert {f"{state.name}s" for state in algorithm.states} <= arguments
        optimizer = FusedOptimizer(params_of(), algorithm=name, lr=0.1)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_operators_of_every_algorithm() -> None:
    """An operator gives the bits of the class."""
    from torchopt_ext import ops

    control = ops.new_control("cpu")
    for name, kind in (("lion", "lion"), ("sgd", "sgd")):
        params, others = params_of(), [p.detach().clone() for p in params_of()]
        optimizer = MADE[kind](params, lr=1e-2)
        group, algorithm = optimizer.param_groups[0], ALGORITHMS[name]
        states = [[torch.zeros_like(p) for p in others] for _ in algorithm.states]
        steps = [torch.zeros(()) for _ in others]
        for seed in range(3):
            set_gradients(params, seed)
            grads = [p.grad for p in params]
            operator = getattr(torch.ops.torchopt_ext, f"{name}_").default
            operator(others, grads, *states, steps, control, **algorithm.arguments(group))
            optimizer.step()
        assert same_bits(params, others)
        assert same_bits([optimizer.state[p][algorithm.states[0].name] for p in params], states[0])


@pytest.mark.parametrize("cls", [FusedLion, FusedSGD, FusedAdamW])
@pytest.mark.parametrize("algorithm", ["adamw", "adam", "lion", "sgd"])
def test_a_group_keeps_its_algorithm_and_its_own_options(cls: Any, algorithm: str) -> None:
    """In copies and after state dicts, also torch's, which do not name the algorithm."""
    params = params_of()
    given = {"algorithm": algorithm, "decoupled_weight_decay": True, "lr": 0.02}
    given |= {"momentum": 0.9} if algorithm == "sgd" else {"betas": (0.8, 0.9)}
    optimizer = cls([{"params": params, **given}])
    assert optimizer.param_groups[0].items() >= given.items()
    set_gradients(params, 0)
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.param_groups[0].items() >= given.items()
        assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].items() >= given.items()
    del saved["param_groups"][0]["algorithm"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].items() >= given.items()
    torchs = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    if algorithm in torchs:
        others = params_of()
        of_torch = torchs[algorithm](others, **{"momentum": 0.9} if algorithm == "sgd" else {})
        train(of_torch, others, [0])
        optimizer.load_state_dict(of_torch.state_dict())
        assert optimizer.param_groups[0]["algorithm"] == algorithm
        train(optimizer, params, [1])


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (FusedAdamW, {"decay_follows_lr": True}, "decay_follows_lr is True"),
        (FusedAdamW, {"decay_follows_lr": -1.0}, "Invalid decay_follows_lr value: -1"),
        (FusedLion, {"cautious_weight_decay": "x"}, "cautious_weight_decay is 'x'"),
        (FusedSGD, {"momentum": -1.0}, "Invalid momentum value: -1"),
        (FusedSGD, {"nesterov": True}, "Nesterov momentum requires a momentum"),
        (FusedSGD, {"cautious_weight_decay": True}, "require decoupled_weight_decay"),
    ],
)
def test_a_load_rejects_what_a_step_would(cls: Any, wrong: dict[str, Any], message: str) -> None:
    optimizer = cls(params_of())
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(wrong)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before


def test_sgd_rejects_a_state_dict_of_rmsprop() -> None:
    params = params_of()
    rmsprop = torch.optim.RMSprop(params, momentum=0.9)
    train(rmsprop, params, [0])
    with pytest.raises(ValueError, match="lacks dampening, nesterov"):
        FusedSGD(params_of(), momentum=0.9).load_state_dict(rmsprop.state_dict())


def test_groups_of_another_algorithm_join_zero(one_rank: Any) -> None:
    """With the defaults of their own algorithm, as in the optimizer that is not sharded."""
    for partition in ("greedy", "balanced"):
        first, second = params_of()[:2]
        sharded = ZeroRedundancyOptimizer([first], FusedAdamW, lr=0.1, partition=partition)
        plain = FusedAdamW([copy.deepcopy(first)], lr=0.1)
        for algorithm, param in (("lion", second), ("adam", nn.Parameter(torch.ones(3)))):
            sharded.add_param_group({"params": [param], "algorithm": algorithm})
            plain.add_param_group({"params": [copy.deepcopy(param)], "algorithm": algorithm})
        pairs = zip(sharded.param_groups, plain.param_groups, strict=True)
        for ours, expected in pairs:
            assert {k: v for k, v in ours.items() if k != "params"} == {
                k: v for k, v in expected.items() if k != "params"
            }


def test_a_digest_reads_weights_before_the_first_step() -> None:
    params, others = params_of(), params_of()
    with torch.no_grad():
        others[1][3] += 1
    assert not same_bits(FusedSGD(params), FusedSGD(others))
    assert same_bits(FusedSGD(params), FusedSGD(params_of()))
    with pytest.raises(TypeError, match="expected an optimizer or an iterable of tensors"):
        digest(params[0])
