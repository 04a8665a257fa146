"""refresh_masters(from_=...) sets masters and remainders from float32 weights without loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchopt_ext import FusedAdamW
from torchopt_ext.containers import OptimizersContainer

from ...support.compare import assert_same_bits, unchanged
from ...support.oracle import is_upper_tie, words
from .jobs import LAYOUTS, exact_weights, kept, train

BF16 = torch.bfloat16


def fp32_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


each_row = pytest.mark.parametrize(
    ("layout", "held"),
    [
        *(("optimizer", held) for held in ("fp32", "remainder", "remainder8")),
        *(("container", held) for held in ("fp32", "remainder")),
        *(("adapted", held) for held in ("plain", "torch")),
    ],
)


@each_row
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("by", ["name", "parameter"])
def test_an_fp32_model_becomes_a_bf16_one_with_all_bits(
    layout: str, held: str, steps: int, by: str
) -> None:
    """A whole state dict with buffers works, and training continues as in float32."""
    source = fp32_model(seed=1)
    weights: Any = {name: value.clone() for name, value in source.state_dict().items()}
    for value in source.parameters():  # a remainder moves ties by one float32
        assert not is_upper_tie(words(value)).any()
    frozen = by == "parameter" and layout != "container"  # that leaves out frozen ones
    model = fp32_model().to(BF16).requires_grad_(not frozen)
    optimizer = LAYOUTS[layout](model, held)
    model.requires_grad_(True)
    train(model, optimizer, range(steps))
    if by == "parameter":
        pairs = zip(model.parameters(), source.parameters(), strict=True)
        weights = {param: value.detach() for param, value in pairs}
    assert optimizer.refresh_masters(from_=weights) is None
    assert_same_bits(model.parameters(), [p.to(BF16) for p in source.parameters()])
    if steps or held == "remainder8":
        exact = kept(source.parameters(), held if layout != "adapted" else "fp32")
        assert_same_bits(exact_weights(model, optimizer), exact)
        return
    clip = getattr(optimizer, "max_grad_norm", None)
    twin = FusedAdamW(source.parameters(), lr=0.02, max_grad_norm=clip)
    for each in ((model, optimizer), (source, twin)):
        train(*each, [5])
    rounding = 1e-6 if held == "torch" else 0.0  # torch's formula rounds in another order
    for exact, weight in zip(exact_weights(model, optimizer), source.parameters(), strict=True):
        torch.testing.assert_close(exact, weight.detach(), rtol=rounding, atol=rounding / 10)


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


@each_row
@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit_change_nothing(layout: str, held: str, wrong: str) -> None:
    """The error names all problems, and nothing is set."""
    model = fp32_model().to(BF16)
    optimizer = LAYOUTS[layout](model, held)
    train(model, optimizer, range(2))
    given: dict[Any, Any] = dict(fp32_model(seed=1).state_dict())
    change, message = WRONG[wrong]
    change(given)
    given["0.bias"] = torch.ones(2)
    with (
        unchanged(optimizer, model),
        pytest.raises(ValueError, match=rf"'0.bias' has shape \(2,\).*{message}"),
    ):
        optimizer.refresh_masters(from_=given)


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


def test_a_layer_saved_before_its_first_step_gets_no_master() -> None:
    """It may be frozen now, and is absent from the dict."""
    model = fp32_model().to(BF16)
    optimizer = LAYOUTS["container"](model, "fp32")
    train(model, optimizer, range(2))
    model[2].requires_grad_(False)  # type: ignore[index]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict({k: v for k, v in saved.items() if not k.startswith("state.2.")})
    assert "master_weight" not in optimizer.state[model[2].weight]  # type: ignore[index]


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
