"""What each algorithm defines, groups of several, and the options of their weight decay.

test_every_way.py has the bits.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD, digest, ops
from torchopt_ext.optim.joint import JointStep, only_param
from torchopt_ext.state.algorithms import ALGORITHMS, Algorithm
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import assert_same_bits, snapshot
from ...support.problems import copy_params, make_params, params_of, set_gradients, train
from ...support.ways import BF16, INT8, OURS, TORCH, WAYS, Way

SHAPES = ((5, 200), (33,), (7, 3, 64), (0, 4), ())
SGDS: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
)

# ---- definitions ---------------------------------------------------------------------------------


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
    """State dicts go in both directions."""
    ours, theirs = (
        cls(make_params(SHAPES, dtype), lr=1e-2, **group) for cls in (FusedSGD, torch.optim.SGD)
    )
    for each in (ours, theirs):
        train(each, range(4))
    torch.testing.assert_close(params_of(ours), params_of(theirs))
    loaded = FusedSGD(copy_params(params_of(theirs)), lr=1.0, **group)
    loaded.load_state_dict(copy.deepcopy(theirs.state_dict()))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for each in (ours, theirs, loaded):
        train(each, range(4, 7))
    torch.testing.assert_close(params_of(ours), params_of(theirs))
    torch.testing.assert_close(params_of(loaded), params_of(theirs))


def test_the_first_step_and_a_change_of_momentum() -> None:
    """The buffer begins as the gradient, also if the momentum is set later."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9, dampening=0.5)
    param.grad = torch.ones(3)
    for expected in (1.0, 1.4):
        optimizer.step()
        buffer = optimizer.state[param]["momentum_buffer"].tolist()
        assert buffer == pytest.approx([expected] * 3)
    optimizer.param_groups[0]["momentum"] = 0.0
    before = param.detach().clone()
    optimizer.step()
    assert (before - param).tolist() == pytest.approx([1.0] * 3)


def arguments_of(algorithm: Algorithm, group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's values as arguments of the algorithm's operator."""
    values = {**algorithm.defaults, **group}
    return {
        hyper.name: values[hyper.key] if hyper.index < 0 else values[hyper.key][hyper.index]
        for hyper in algorithm.hypers
        if hyper.in_operator
    }


def test_declarations() -> None:
    """What is declared is what steps read: an operator and defaults that build."""
    for name, algorithm in ALGORITHMS.items():
        schema = getattr(torch.ops.torchopt_ext, f"{name}_").default._schema
        arguments = {argument.name for argument in schema.arguments}
        assert arguments_of(algorithm, {}).keys() <= arguments
        assert {f"{state.name}s" for state in algorithm.states} <= arguments
        optimizer = FusedOptimizer(make_params([(3, 4)]), algorithm=name, lr=0.1)
        assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("name", "kwargs"), [("lion", {}), ("sgd", {"momentum": 0.9})])
def test_operators(name: str, kwargs: dict[str, float]) -> None:
    """An operator gives the bits of the class."""
    params, algorithm = make_params(SHAPES), ALGORITHMS[name]
    others = [p.detach().clone() for p in params]
    optimizer = FusedOptimizer(params, algorithm=name, lr=1e-2, **kwargs)
    states = [[torch.zeros_like(p) for p in others] for _ in algorithm.states]
    steps = [torch.zeros(()) for _ in others]
    arguments = arguments_of(algorithm, optimizer.param_groups[0])
    operator, control = getattr(torch.ops.torchopt_ext, f"{name}_").default, ops.new_control("cpu")
    for seed in range(3):
        train(optimizer, [seed])
        operator(others, [p.grad for p in params], *states, steps, control, **arguments)
    assert_same_bits(params, others)
    held = [optimizer.state[p][algorithm.states[0].name] for p in params]
    assert_same_bits(held, states[0])


# ---- groups --------------------------------------------------------------------------------------


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

    apart = make_params(SHAPES)
    together = build(make_params(SHAPES))
    alone = [
        FusedLion(apart[:1], 1e-2, (0.8, 0.9), 0.1),
        FusedSGD(apart[1:2], 0.5, 0.9, weight_decay=0.1),
        FusedAdam(apart[2:3], lr=1e-2, weight_decay=0.1),
        FusedAdamW(apart[3:], lr=1e-2, weight_decay=0.1),
    ]
    for seed in range(3):
        train(together, [seed])
        set_gradients(apart, seed=seed, scale=float(together.control.clip_factor))
        for optimizer in alone:
            optimizer.step()
        torch.testing.assert_close(params_of(together), apart, rtol=1e-6, atol=1e-7)
    params = params_of(together)
    states = [set(together.state[param]) - {"torchopt_ext.control"} for param in params]
    assert states[:2] == [{"step", "exp_avg"}, {"step", "momentum_buffer"}]
    assert all(state == {"step", "exp_avg", "exp_avg_sq"} for state in states[2:])
    twin = build(copy_params(params))
    twin.load_state_dict(together.state_dict())
    for each in (together, twin):
        train(each, [7])
    assert snapshot(together) == snapshot(twin)
    # Another algorithm from now on: its state is made, what it does not use stays.
    together.param_groups[0].update(algorithm="sgd", momentum=0.9, dampening=0.0, nesterov=False)
    train(together, [8])
    assert {"exp_avg", "momentum_buffer"} <= together.state[params[0]].keys()


@pytest.mark.parametrize("cls", [FusedLion, FusedSGD, FusedAdamW])
@pytest.mark.parametrize("name", OURS)
def test_a_group_keeps_its_algorithm_and_its_options(cls: Any, name: str) -> None:
    """In copies and after state dicts, also torch's, which do not name the algorithm."""
    options = {"algorithm": name.lower(), "decoupled_weight_decay": True, "lr": 0.02}
    options |= {"momentum": 0.9} if name in ("SGD", "Muon") else {"betas": (0.8, 0.9)}
    optimizer = cls([{"params": make_params([(3, 4), (6, 5)]), **options}])
    assert optimizer.param_groups[0].items() >= options.items()
    train(optimizer, [0])
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.param_groups[0].items() >= options.items()
        assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    saved = copy.deepcopy(optimizer.state_dict())
    for removed in ("no such key", "algorithm"):
        saved["param_groups"][0].pop(removed, None)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.param_groups[0].items() >= options.items()
    if name in TORCH:
        of_torch = TORCH[name](
            make_params([(3, 4), (6, 5)]), **{"momentum": 0.9} if name == "SGD" else {}
        )
        train(of_torch, [0])
        optimizer.load_state_dict(of_torch.state_dict())
        assert optimizer.param_groups[0]["algorithm"] == name.lower()
        train(optimizer, [1])


@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_groups_of_another_algorithm_join_zero(partition: str, one_rank: Any) -> None:
    """With the defaults of their own algorithm, as in the optimizer that is not sharded."""
    first, second, third = make_params([(3, 4), (7,), (3,)])
    sharded = ZeroRedundancyOptimizer([first], FusedAdamW, lr=0.1, partition=partition)
    plain = FusedAdamW(copy_params([first]), lr=0.1)
    for algorithm, param in (("lion", second), ("adam", third)):
        sharded.add_param_group({"params": [param], "algorithm": algorithm})
        plain.add_param_group({"params": copy_params([param]), "algorithm": algorithm})
    ours, expected = (
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in (sharded, plain)
    )
    assert ours == expected


def test_a_digest_reads_weights_before_the_first_step() -> None:
    optimizers = [FusedSGD(make_params()) for _ in range(3)]
    params_of(optimizers[2])[1].data[3] += 1
    digests = [digest(optimizer).tolist() for optimizer in optimizers]
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(TypeError, match="expected an optimizer or an iterable of tensors"):
        digest(params_of(optimizers[0])[0])


# ---- cautious_weight_decay, decay_follows_lr -----------------------------------------------------

DECAYS: tuple[dict[str, Any], ...] = (
    {"cautious_weight_decay": True},
    {"decay_follows_lr": 0.2},
    {"cautious_weight_decay": True, "decay_follows_lr": True, "maximize": True},
)
DECOUPLED: dict[str, Any] = {"decoupled_weight_decay": True}
EIGHT_BITS = {
    "fp32, int8": WAYS["fp32, int8"],
    "bf16, master, int8": Way(BF16, {"master_weights": "fp32", **INT8}),
}
each_kind = pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lion", "SGD, momentum"])


@each_kind
@pytest.mark.parametrize("way", EIGHT_BITS)
@pytest.mark.parametrize("options", DECAYS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_decay_beside_8_bits(kind: str, way: str, options: dict[str, Any], tensor_lr: bool) -> None:
    """The decay is what a step adds to the step of a copy without weight decay."""
    lr: Any = torch.tensor(0.1) if tensor_lr else 0.1
    more = {"lr": lr, "weight_decay": 0.5, **DECOUPLED, **options}
    params, optimizer = EIGHT_BITS[way].build(kind, shapes=SHAPES, **more)
    params[0].data[0, :50] = 0.0
    peak = optimizer.param_groups[0].get("decay_follows_lr")
    assert options.get("decay_follows_lr", 0.1) is not True or peak == pytest.approx(0.1)
    optimizer.init_state()
    opposite = 0
    for seed, rate in enumerate((0.1, 0.06, 0.3)):
        optimizer.param_groups[0]["lr"] = lr.fill_(rate) if tensor_lr else rate
        plain = copy.deepcopy(optimizer)
        plain.param_groups[0]["weight_decay"] = 0.0
        before = weights_of(optimizer)
        for each in (optimizer, plain):
            set_gradients(params_of(each), seed=seed)
            params_of(each)[0].grad[1, :50] = 0.0
            each.step()
        for p, ours, without in zip(before, weights_of(optimizer), weights_of(plain), strict=True):
            decays = torch.ones_like(p)
            if options.get("cautious_weight_decay"):
                decays = ((p - without) * p >= 0).double()
                opposite += int((decays == 0).sum())
            factor = rate * 0.5 * (1 if peak is None else rate / peak)
            expected = without - factor * decays * p
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert bool(opposite) is bool(options.get("cautious_weight_decay"))


def weights_of(optimizer: FusedOptimizer) -> list[Tensor]:
    held = [optimizer.state[param].get("master_weight", param) for param in params_of(optimizer)]
    return [weight.detach().double().clone() for weight in held]


def test_the_smallest_products_have_a_sign() -> None:
    """A product of direction and weight would round to 0 here."""
    tiny = 1e-30
    param = nn.Parameter(torch.tensor([tiny, -tiny, tiny, -tiny]))
    param.grad = torch.tensor([tiny, tiny, -tiny, -tiny])
    expected = param.detach() - 0.5 * torch.tensor([tiny, 0.0, 0.0, -tiny]) - param.grad
    more = {"weight_decay": 0.5, "cautious_weight_decay": True, **DECOUPLED}
    FusedSGD([param], lr=1.0, momentum=0.9, **more).step()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0)


@each_kind
def test_groups_have_the_keys_where_they_are_set(kind: str) -> None:
    """State dicts of torch lack them, and must load; groups may differ."""
    options = {"cautious_weight_decay": True, "decay_follows_lr": 0.5}
    plain = WAYS["fp32"]

    def groups(*more: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"params": [p], **m} for p, m in zip(make_params()[:3], more, strict=True)]

    unset = {"cautious_weight_decay": False, "decay_follows_lr": 0.0, **DECOUPLED}
    assert not options.keys() & plain.build(kind, **unset)[1].param_groups[0].keys()
    chosen = groups(options, {"lr": 0.3, "decay_follows_lr": True}, {})
    mixed = plain.build(kind, chosen, **DECOUPLED)[1]
    assert mixed.param_groups[0].items() >= options.items()
    assert mixed.param_groups[1]["decay_follows_lr"] == 0.3
    assert not options.keys() & mixed.param_groups[2].keys()
    saved = copy.deepcopy(mixed.state_dict())
    restored = plain.build(kind, groups({}, {}, {}), **DECOUPLED)[1]
    restored.load_state_dict(saved)
    assert restored.param_groups[0].items() >= options.items()
    for name in options:
        saved["param_groups"][0].pop(name)
    mixed.load_state_dict(saved)
    assert mixed.param_groups[0].items() >= options.items()


# ---- bias_correction=False: the moments are used as they are, as in apex and TransformerEngine ---


@pytest.mark.parametrize(
    "way", ["fp32", "fp32, int8", "fp16", "bf16, master", "bf16, remainder8, int8, random"]
)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_without_correction_the_bits_are_those_after_many_steps(way: str, tensor_lr: bool) -> None:
    kind = "AdamW, amsgrad" if way == "fp32" else "AdamW"
    runs = []
    for more in ({"bias_correction": False}, {}):
        lr: Any = torch.tensor(1e-2) if tensor_lr else 1e-2
        shapes = [(3, 130), (7,), ()]
        _, optimizer = WAYS[way].build(kind, shapes=shapes, lr=lr, max_grad_norm=0.5, **more)
        optimizer.init_state()
        for state in optimizer.state.values():
            state["step"].fill_(2.0**20)  # beta**step is 0 in float64: the corrections are 1
        train(optimizer, range(3))
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_groups_have_torchs_keys_unless_the_correction_is_off() -> None:
    """A checkpoint of torchtitan, for example, has no other keys."""
    on, off = (FusedAdam(make_params(), bias_correction=value) for value in (True, False))
    torchs = torch.optim.Adam(make_params())
    assert on.param_groups[0].keys() == torchs.param_groups[0].keys()
    assert off.state_dict()["param_groups"][0]["bias_correction"] is False
    off.load_state_dict(torchs.state_dict())  # has no value, so the optimizer's stays
    assert off.param_groups[0]["bias_correction"] is False
    on.load_state_dict(off.state_dict())
    assert on.param_groups[0]["bias_correction"] is False
    assert copy.deepcopy(on).param_groups[0]["bias_correction"] is False


def test_joint_steps() -> None:
    values = [True, False, True, False]
    joint, whole = make_params(), make_params()
    singles = [FusedAdam([p], bias_correction=v) for p, v in zip(joint, values, strict=True)]
    assert [only_param(single) for single in singles] == joint
    groups = [{"params": [p], "bias_correction": v} for p, v in zip(whole, values, strict=True)]
    optimizer, together = FusedAdam(groups), JointStep(singles)
    for seed in range(3):
        set_gradients(joint, whole, seed=seed)
        optimizer.step()
        together.step_all(FusedAdam.step)
    assert_same_bits(joint, whole)
