"""refresh_masters(from_=...) sets masters and remainders from float32 weights without loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.mixed_precision import FSDPadaptOptimizer

from ...support.compare import assert_same_bits, bits
from ..optim.independent import floats, is_upper_tie, join, split8, words

BF16 = torch.bfloat16
ADAM: dict[str, Any] = {"lr": 0.02}


def fp32_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


def container(model: Any, **kwargs: Any) -> OptimizersContainer[Any]:
    parts = [nn.ModuleDict({str(i): model[i]}) for i in range(3)]
    return OptimizersContainer(parts, FusedAdamW, ADAM | kwargs)


def wrapped(cls: Any) -> Callable[..., Any]:
    return lambda model: FSDPadaptOptimizer(cls(model.named_parameters(), **ADAM))


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "masters": lambda m: FusedAdamW(m.named_parameters(), master_weights="fp32", **ADAM),
    "remainders": lambda m: FusedAdamW(m.named_parameters(), master_weights="remainder", **ADAM),
    "container": lambda m: container(m, master_weights="fp32"),
    "8-bit remainders": lambda m: FusedAdamW(
        m.named_parameters(), master_weights="remainder8", **ADAM
    ),
    "container of remainders": lambda m: container(m, master_weights="remainder"),
    "wrapped FusedAdamW": wrapped(FusedAdamW),
    "wrapped AdamW": wrapped(torch.optim.AdamW),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def train(model: nn.Module, optimizer: Any, seeds: Any) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(BF16).to(param.dtype)
        optimizer.step()


def exact_weights(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Returns the weights from which the parameters are rounded."""
    if isinstance(optimizer, FSDPadaptOptimizer):
        return [w for own in optimizer.state_dict()["flat_fp32_weights"].values() for w in own]
    states = [optimizer.state[param] for param in model.parameters()]
    if "master_weight" in states[0]:
        return [state["master_weight"] for state in states]
    (kind,) = {"remainder", "remainder8"} & states[0].keys()
    pairs = zip(model.parameters(), states, strict=True)
    return [floats(join(p, state[kind])).view_as(p) for p, state in pairs]


def kept(weights: Iterable[Tensor], kind: str | None) -> list[Tensor]:
    """Returns the stored part of float32 weights: an 8-bit remainder keeps 24 of their bits."""
    if kind != "remainder8":
        return [weight.detach().clone() for weight in weights]
    split = [(weight, *split8(words(weight))) for weight in weights]
    pairs = [(w, high.astype("int64") << 16, low << 8) for w, high, low in split]
    return [floats((high + low).astype("uint64")).view_as(w) for w, high, low in pairs]


@each_kind
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("by", ["name", "parameter"])
def test_an_fp32_model_becomes_a_bf16_one_with_all_bits(kind: str, steps: int, by: str) -> None:
    """A whole state dict with buffers works, and training continues as in float32."""
    source = fp32_model(seed=1)
    given: Any = {name: value.clone() for name, value in source.state_dict().items()}
    for value in source.parameters():  # a remainder moves ties by one float32
        assert not is_upper_tie(words(value)).any()
    frozen = by == "parameter" and not kind.startswith("container")  # those leave out frozen ones
    model = fp32_model().to(BF16).requires_grad_(not frozen)
    optimizer = KINDS[kind](model)
    model.requires_grad_(True)
    train(model, optimizer, range(steps))
    if by == "parameter":
        pairs = zip(model.parameters(), source.parameters(), strict=True)
        given = {param: value.detach() for param, value in pairs}
    assert optimizer.refresh_masters(from_=given) is None
    assert_same_bits(model.parameters(), [p.to(BF16) for p in source.parameters()])
    eight = "remainder8" if kind == "8-bit remainders" else None
    if not steps and not eight:
        twin = FusedAdamW(source.parameters(), **ADAM, max_grad_norm=optimizer_clip(optimizer))
        train(model, optimizer, [5])
        train(source, twin, [5])
        if kind == "wrapped AdamW":  # torch's formula rounds in another order
            for mine, theirs in zip(
                exact_weights(model, optimizer), source.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)
            return
    assert_same_bits(exact_weights(model, optimizer), kept(source.parameters(), eight))


def optimizer_clip(optimizer: Any) -> float | None:
    return 1.0 if isinstance(optimizer, FSDPadaptOptimizer) else None


WRONG: dict[str, tuple[Any, str]] = {
    "missing": (lambda given: given.pop("2.bias"), "'2.bias' is missing"),
    "shape": (lambda given: given.update({"2.bias": torch.ones(1)}), r"'2.bias' has shape \(1,\)"),
    "dtype": (
        lambda given: given.update({"2.bias": torch.ones(3, dtype=BF16)}),
        "'2.bias' is torch.bfloat16.*float32",
    ),
    "no tensor": (lambda given: given.update({"2.bias": 1.0}), "'2.bias' is of type float"),
    "stranger": (lambda given: given.update({torch.ones(7): torch.ones(7)}), r"a \(7,\) tensor"),
}


def test_a_loaded_state_dict_does_not_rename_parameters() -> None:
    """Its names may be of a compiled model, or of other layers of equal shapes."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))).to(BF16)
    names = dict(model.named_parameters())
    optimizer = FusedAdamW(names.items(), master_weights="remainder")
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    for other in ([f"_orig_mod.{name}" for name in names], [*names][::-1]):
        saved["param_groups"][0]["param_names"] = other
        optimizer.load_state_dict(saved)
        weights = {name: torch.randn(value.shape) for name, value in names.items()}
        optimizer.refresh_masters(from_=weights)
        assert_same_bits(model.parameters(), [weight.to(BF16) for weight in weights.values()])


@pytest.mark.parametrize("compiled", ["neither", "optimizer", "weights", "both"])
@pytest.mark.parametrize("container", [False, True])
def test_names_of_compiled_models(compiled: str, container: bool) -> None:
    model, exact = nn.Linear(8, 8).to(BF16), nn.Linear(8, 8)
    own = torch.compile(model) if compiled in ("optimizer", "both") else model
    given = torch.compile(exact) if compiled in ("weights", "both") else exact
    optimizer: Any
    if container:
        optimizer = OptimizersContainer([own], FusedAdamW, {"master_weights": "fp32"})
    else:
        optimizer = FusedAdamW(own.named_parameters(), master_weights="fp32")
    optimizer.refresh_masters(from_=given.state_dict())
    masters = [optimizer.state[param]["master_weight"] for param in model.parameters()]
    assert_same_bits(masters, exact.parameters())


@each_kind
@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit_change_nothing(kind: str, wrong: str) -> None:
    """The error names all problems, and nothing is set."""
    model = fp32_model().to(BF16)
    optimizer = KINDS[kind](model)
    train(model, optimizer, range(2))
    given: dict[Any, Any] = dict(fp32_model(seed=1).state_dict())
    change, message = WRONG[wrong]
    change(given)
    given["0.bias"] = torch.ones(2)
    tensors = [*model.parameters(), *exact_weights(model, optimizer)]
    before = [bits(tensor) for tensor in tensors]
    with pytest.raises(ValueError, match=rf"'0.bias' has shape \(2,\).*{message}"):
        optimizer.refresh_masters(from_=given)
    assert [bits(tensor) for tensor in tensors] == before


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("stepped", [0, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_masters_that_a_full_state_dict_lacks_are_the_models(
    one_rank: None, stepped: int, model_first: bool, copied: bool
) -> None:
    """torch adds this optimizer's own masters, of the weights before the load."""
    options = StateDictOptions(full_state_dict=True)
    source = fp32_model().to(BF16)
    twin = torch.optim.AdamW(source.parameters(), **ADAM)
    train(source, twin, range(3))
    model = fp32_model(seed=1).to(BF16)
    optimizer = FusedAdamW(model.parameters(), **ADAM, master_weights="fp32")
    train(model, optimizer, range(stepped))
    if model_first:
        model.load_state_dict(source.state_dict())
    saved = get_optimizer_state_dict(source, twin, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    model.load_state_dict(source.state_dict())
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, [3])
    assert_same_bits(model.parameters(), source.parameters())
    # Masters in the dict are loaded and used.
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    masters = [weight.clone() for weight in exact_weights(model, optimizer)]
    masters[0] *= 1 + 2**-12  # rounds to the weight
    for entry, master in zip(saved["state"].values(), masters, strict=True):
        entry["master_weight"] = master
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    train(model, optimizer, [4])
    assert_same_bits(exact_weights(model, optimizer), masters)


@pytest.mark.parametrize("kept", ["fp32", "remainder"])
def test_masters_of_another_kind_come_whole_through_a_full_state_dict(
    one_rank: None, kept: str
) -> None:
    """torch passes both the dict's masters and this optimizer's own."""
    options = StateDictOptions(full_state_dict=True)
    made = {"fp32": "remainder", "remainder": "fp32"}[kept]
    source, model = (fp32_model(seed).to(BF16) for seed in range(2))
    saving = FusedAdamW(source.parameters(), **ADAM, master_weights=kept)
    loading = FusedAdamW(model.parameters(), **ADAM, master_weights=made)
    train(source, saving, range(3))
    saved = get_optimizer_state_dict(source, saving, options=options)
    set_optimizer_state_dict(model, loading, saved, options=options)
    model.load_state_dict(source.state_dict())
    loading.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, loading, [3])
    expected = exact_weights(source, saving)
    for mine, other in zip(exact_weights(model, loading), expected, strict=True):
        # A tie that rounds to an even neighbor moves by its last bit (numerics.md, section 7).
        torch.testing.assert_close(mine, other, rtol=2**-23, atol=0)


@pytest.mark.parametrize("saved_as", ["int8", "fp32"])
def test_a_flat_dict_without_the_moments_says_the_way(one_rank: None, saved_as: str) -> None:
    """torch drops entries that the optimizer does not have."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = nn.Linear(64, 4)
    saving, loading = (
        FusedAdamW(model.parameters(), **ADAM, state_dtype="int8" if kind else None)
        for kind in (saved_as == "int8", saved_as == "fp32")
    )
    train(model, saving, range(2))
    train(model, loading, range(2))
    saved = get_optimizer_state_dict(model, saving, options=options)
    with pytest.raises(ValueError, match=r"is missing \(a flat dict .* the nested dict"):
        set_optimizer_state_dict(model, loading, saved, options=options)


def test_float_moments_become_codes_through_a_full_state_dict(one_rank: None) -> None:
    """torch also passes this optimizer's own scales."""
    options = StateDictOptions(full_state_dict=True)
    source, model, direct = (nn.Linear(64, 4) for _ in range(3))
    twin = torch.optim.AdamW(source.parameters(), **ADAM)
    train(source, twin, range(3))
    ours = [FusedAdamW(m.parameters(), **ADAM, state_dtype="int8") for m in (model, direct)]
    saved = get_optimizer_state_dict(source, twin, options=options)
    set_optimizer_state_dict(model, ours[0], saved, options=options)
    ours[1].load_state_dict(twin.state_dict())
    for name in ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale_v2"):
        found, expected = (
            o.state[m.weight][name] for o, m in zip(ours, (model, direct), strict=True)
        )
        assert_same_bits([found], [expected])


def test_a_models_whole_state_dict_serves() -> None:
    """Frozen 16-bit, float64 and complex parameters take their values from the state dict."""
    frozen = nn.Parameter(torch.ones(3).bfloat16(), requires_grad=False)
    others = [nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float64, torch.complex64)]
    trained = nn.Parameter(torch.ones(4).bfloat16())
    named = [(str(i), p) for i, p in enumerate([frozen, *others, trained])]
    optimizer = FusedAdamW(named, master_weights="fp32")
    given = {name: p.detach() + 1 for name, p in named} | {"3": torch.full((4,), 1 / 3)}
    optimizer.refresh_masters(from_=given)
    assert all(torch.equal(p, given[name].to(p.dtype)) for name, p in named)
    optimizer.init_state()
    with pytest.raises(ValueError, match=r"'3' is torch.bfloat16"):
        optimizer.refresh_masters(from_={**given, "3": trained.detach()})


def test_names_and_masters_have_to_be_there() -> None:
    model = fp32_model().to(BF16)
    given = fp32_model(seed=1).state_dict()
    with pytest.raises(
        ValueError, match=r"parameter 0, of which the optimizer has no name, is mis"
    ):
        FusedAdamW(model.parameters(), master_weights="fp32").refresh_masters(from_=given)
    with pytest.raises(ValueError, match=r"'0.weight' has no master weight, which master_weights="):
        FusedAdamW(model.named_parameters()).refresh_masters(from_=given)
    with pytest.raises(ValueError, match=r"'0.weight' has no master weight"):
        OptimizersContainer([model], torch.optim.AdamW, {}).refresh_masters(from_=given)
    model[2].requires_grad_(False)  # type: ignore[index]
    optimizer = FusedAdamW(model.named_parameters(), master_weights="fp32")
    with pytest.raises(TypeError, match="got list, expected weights by parameter or name"):
        optimizer.refresh_masters(from_=[*given.values()])  # type: ignore[arg-type]
    optimizer.refresh_masters(from_=given)  # also sets frozen parameters, which have no master yet
    assert_same_bits([model[2].weight], [given["2.weight"].to(BF16)])  # type: ignore[index]
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("source", ["torch's", None, "fp32", "remainder", "remainder8"])
@pytest.mark.parametrize("target", [None, "fp32", "remainder", "remainder8"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_flat_dict_with_any_kind_of_master_loads(source: Any, target: Any, steps: int) -> None:
    """A container makes its master from the loaded master, or else from the weight."""
    model, other = fp32_model().to(BF16), fp32_model(seed=1).to(BF16)
    cls = FusedAdamW if source != "torch's" else torch.optim.AdamW
    kwargs = {"master_weights": source} if cls is FusedAdamW else {}
    saving = OptimizersContainer([model], cls, ADAM | kwargs)
    train(model, saving, range(2))
    loading = OptimizersContainer([other], FusedAdamW, {"lr": 0.3, "master_weights": target})
    train(other, loading, range(5, 5 + steps))
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    other.load_state_dict(model.state_dict())
    exact = [p.detach().float() for p in model.parameters()]
    if source not in ("torch's", None):
        exact = exact_weights(model, saving)
    exact = kept(exact, target)
    loading.param_groups[0]["lr"] = 0.0
    train(other, loading, [2])
    assert_same_bits(other.parameters(), model.parameters())
    if target is not None:
        assert_same_bits(exact_weights(other, loading), exact)
    assert all(float(state["step"]) == 3 for state in loading.state.values())
    other[2].requires_grad_(False)
    saved = {k: v for k, v in saving.state_dict().items() if not k.startswith("state.2.")}
    loading.load_state_dict(saved)  # saved before the first step of a layer that is frozen now
    held = loading.state[other[2].weight].keys()
    assert not held & {"master_weight", "remainder", "remainder8"}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_sharded_parameter_takes_its_shard(second_of_two_ranks: Any, placement: Any) -> None:
    """The weight may be whole or a DTensor of the same placement; others are rejected."""
    mesh = second_of_two_ranks
    whole = torch.randn(5, 6)
    placed = distribute_tensor(whole.clone(), mesh, [placement], src_data_rank=None)
    for weight in (whole, placed):
        param = nn.Parameter(torch.zeros_like(placed, dtype=BF16))
        optimizer = FusedAdamW([("w", param)], master_weights="fp32")
        optimizer.refresh_masters(from_={"w": weight})
        assert_same_bits([optimizer.state[param]["master_weight"].to_local()], [placed.to_local()])
        assert_same_bits([param.to_local()], [placed.to_local().to(BF16)])  # type: ignore[attr-defined]
    other = Replicate() if placement != Replicate() else Shard(0)
    for ranks, how in (mesh, other), (DeviceMesh("cpu", [1, 0]), placement):
        wrong = distribute_tensor(whole, ranks, [how], src_data_rank=None)
        with pytest.raises(ValueError, match="'w' is placed"):
            optimizer.refresh_masters(from_={"w": wrong})
    plain = FusedAdamW([("w", nn.Parameter(whole.to(BF16)))], master_weights="fp32")
    with pytest.raises(ValueError, match=r"'w' is placed .* a plain tensor"):
        plain.refresh_masters(from_={"w": copy.copy(placed)})


@pytest.mark.parametrize("masters", ["fp32", "remainder", "remainder8"])
def test_a_state_dict_before_the_first_step_is_complete(masters: str) -> None:
    exact = fp32_model()
    models = [copy.deepcopy(exact).to(BF16) for _ in range(2)]
    for model in models:
        model[1].float()  # has no masters
    first, resumed = (FusedAdamW(m.named_parameters(), master_weights=masters) for m in models)
    first.refresh_masters(from_=exact.state_dict())
    assert len(first.state) == len([*models[0].parameters()])
    resumed.load_state_dict(first.state_dict())
    for model, optimizer in zip(models, (first, resumed), strict=True):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert_same_bits([*models[0].parameters()], [*models[1].parameters()])
    for own, loaded in zip(*(model.parameters() for model in models), strict=True):
        one, other = first.state[own], resumed.state[loaded]
        assert one.keys() == other.keys()
        assert_same_bits(one.values(), [other[name] for name in one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_which_none_is_known_are_rejected(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    given = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="no parameter's name is among"):
        FusedAdamW(model.parameters()).refresh_masters(from_=given)
