"""fp32_moments selects which parameters keep float32 moments with state_dtype="int8"."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchopt_ext import FusedAdam, FusedAdamW, ZeroRedundancyOptimizer, param_groups
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.statedict.dcp import load

from ...support import problems
from ...support.compare import assert_same, assert_same_bits

CODES = {m.codes: torch.uint8 if m.as_root else torch.int8 for m in ADAM.moments}
CODES_OF = {m.name: m.codes for m in ADAM.moments}
SCALES = {m.scale: m.name for m in ADAM.moments}

INT8: dict[str, Any] = {"lr": 1e-2, "state_dtype": "int8"}
MATRICES = ["tok.weight", "bag.weight", "body.weight"]


class Model(nn.Module):
    """Two embeddings, one tied to the output layer, a matrix with 8-bit moments, and a vector."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok = nn.Embedding(9, 70)
        self.bag = nn.EmbeddingBag(5, 64)
        self.body = nn.Linear(70, 70)
        self.head = nn.Linear(70, 9, bias=False)
        self.head.weight = self.tok.weight


def train(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    problems.train(optimizer, seeds, model.parameters())


def eight_bits(model: nn.Module, optimizer: Any) -> list[str]:
    """Names the parameters with 8-bit moments and scales; the others must have only float32."""
    names = []
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        coded = CODES.keys() <= state.keys()
        expected = CODES if coded else dict.fromkeys(CODES_OF, torch.float32)
        assert {k: v.dtype for k, v in state.items() if k in (*CODES, *CODES_OF)} == expected
        assert coded == (SCALES.keys() <= state.keys()) == bool(SCALES.keys() & state.keys())
        names += [name] * coded
    return names


LISTS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: model.parameters(),
    "names": lambda model: model.named_parameters(),
    "groups": param_groups,
}


@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
@pytest.mark.parametrize("how", LISTS)
def test_embeddings_keep_them_by_default(
    how: str, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, objects, searches = Model(), gc.get_objects, []
    params = LISTS[how](model)
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(how) or objects())
    optimizer = cls(params, **INT8)
    train(model, optimizer, 1)
    assert eight_bits(model, optimizer) == ["body.weight"]
    assert searches == [how]  # a search reads all objects of the process


@pytest.mark.parametrize("master", [None, "fp32", "remainder8"])
def test_no_other_bit_changes(master: str | None) -> None:
    def run(**options: Any) -> tuple[dict[str, Any], FusedAdamW]:
        model = Model() if master is None else Model().bfloat16()
        options = {"master_weights": master, "max_grad_norm": 1.0, **options}
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, **options)
        train(model, optimizer, 1, 2, 3)
        return dict(model.named_parameters()), optimizer

    params, optimizer = run(state_dtype="int8")
    for options, names in (
        ({"state_dtype": "int8", "fp32_moments": ()}, ["body.weight", "body.bias"]),
        ({"state_dtype": torch.float32}, ["tok.weight", "bag.weight", "body.bias"]),
    ):
        others, expected = run(**options)
        for name in names:
            assert_same_bits([params[name]], [others[name]])
            assert_same(optimizer.state[params[name]], expected.state[others[name]])


@pytest.mark.parametrize(
    ("chosen", "coded"),
    [
        ((), MATRICES),
        (("body",), ["tok.weight", "bag.weight"]),
        (["embedding", "^bo"], []),
        ({"k.w"}, ["bag.weight", "body.weight"]),
    ],
)
def test_patterns(chosen: Any, coded: list[str]) -> None:
    model = Model()
    optimizer = FusedAdamW(model.named_parameters(), **INT8, fp32_moments=chosen)
    train(model, optimizer, 1)
    assert eight_bits(model, optimizer) == coded
    if any(pattern != "embedding" for pattern in chosen):
        with pytest.raises(ValueError, match=r"pattern .*, but the parameters have no names"):
            FusedAdamW(model.parameters(), **INT8, fp32_moments=chosen)


def test_parameters_themselves_and_groups_that_come_later() -> None:
    model = Model()
    tok, bag, body, bias = model.parameters()
    optimizer = FusedAdamW([tok, bias], **INT8, fp32_moments=["embedding", tok])
    optimizer.add_param_group({"params": [bag, body]})
    train(model, optimizer, 1)
    assert eight_bits(model, optimizer) == ["body.weight"]


@pytest.mark.parametrize("loads", [False, True])
def test_parameters_that_are_replaced_in_groups(loads: bool) -> None:
    """An embedding whose weight is replaced after building, as Accelerate does for FSDP2."""
    model, other = Model(), Model(1)
    optimizer = FusedAdamW(model.named_parameters(), **INT8)
    source = FusedAdamW(other.parameters(), **INT8)
    train(other, source, 0)
    params = optimizer.param_groups[0]["params"]
    for module in (model.bag, model.body):
        position = [p is module.weight for p in params].index(True)
        params[position] = module.weight = nn.Parameter(module.weight.detach().clone())
    if loads:
        optimizer.load_state_dict(source.state_dict())
    train(model, optimizer, 1)
    torch.utils.swap_tensors(model.bag.weight, nn.Parameter(torch.ones(5, 64)))
    train(model, optimizer, 2)
    assert eight_bits(model, optimizer) == ["body.weight"]


def test_an_embedding_with_the_id_of_a_freed_parameter() -> None:
    optimizer = FusedAdamW([nn.Parameter(torch.ones(9, 70))], **INT8)
    (freed,) = map(id, optimizer.param_groups[0].pop("params"))
    modules = [nn.Embedding(9, 70)]
    while id(modules[-1].weight) != freed and len(modules) < 1000:
        modules.append(nn.Embedding(9, 70))
    optimizer.param_groups[0]["params"] = [modules[-1].weight]
    train(modules[-1], optimizer, 0)
    assert eight_bits(modules[-1], optimizer) == []


def test_copies_keep_the_choice() -> None:
    model = Model()
    optimizer = FusedAdamW(model.named_parameters(), **INT8)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    for other, copied in (copy.deepcopy((model, optimizer)), torch.load(file, weights_only=False)):
        copied.state.clear()
        train(other, copied, 2)
        assert eight_bits(other, copied) == ["body.weight"]
        late = nn.Embedding(3, 64)
        copied.add_param_group({"params": [("late", late.weight)]})
        train(late, copied, 3)
        assert copied.state[late.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("chosen", [("embedding",), (), ("body", "tok")], ids=str)
@pytest.mark.parametrize("options", [{}, {"master_weights": "remainder8"}], ids=str)
def test_the_estimate_is_what_a_step_allocates(chosen: Any, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if options else torch.float32
    options = {**options, "state_dtype": "int8", "fp32_moments": chosen}
    model = Model().to(dtype)
    with torch.device("meta"):
        meta = Model().to(dtype)
    optimizer = FusedAdamW(model.named_parameters(), **options)
    train(model, optimizer, 1)
    entries = [entry for state in optimizer.state.values() for entry in state.items()]
    moments = sum(value.nbytes for name, value in entries if name.startswith("exp_avg"))
    for source in (model, meta):
        (rank,) = FusedAdamW.estimate(source.named_parameters(), **options)
        assert rank.moments == moments
        sharding: dict[str, Any] = {"sharding": "zero1", "world_size": 2}
        shards = FusedAdamW.estimate(source.named_parameters(), **sharding, **options)
        assert sum(shard.moments for shard in shards) == moments
    assert FusedAdamW.estimate(model.parameters()) == FusedAdamW.estimate([*model.parameters()])


def test_names_in_containers() -> None:
    """They are those without wrappers, and a pattern must match one."""
    model = nn.ModuleDict({"layers": nn.ModuleList([checkpoint_wrapper(nn.Linear(64, 3))])})
    options = {**INT8, "fp32_moments": [r"layers\.0\.weight"]}
    container = OptimizersContainer([model], FusedAdamW, options)
    container.optimizers[0].init_state()
    assert eight_bits(model, container) == []
    OptimizersContainer([nn.Linear(64, 2)], FusedAdamW, {**INT8, "process_group": None})
    with pytest.raises(ValueError, match="no parameter has a name with 'emb'"):
        OptimizersContainer([nn.Linear(64, 2)], FusedAdamW, {**INT8, "fp32_moments": ["emb"]})


def test_small_parameters_are_stepped_in_backward_as_after_it() -> None:
    """The joint plan of small parameters holds parameters of both kinds."""
    models = [nn.Sequential(nn.Embedding(9, 70), nn.Linear(70, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    after = OptimizersContainer(models[:1], FusedAdamW, INT8)
    inside = OptimizersInBackwardContainer(models[1:], FusedAdamW, INT8)
    for _ in range(3):
        for model, container in zip(models, (after, inside), strict=True):
            model(torch.arange(9)).square().mean().backward()
            container.step()
            container.zero_grad()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_bits([p], [q])
        assert_same(after.state[p], inside.state[q])


LOADS: dict[str, Any] = {
    "state dict": lambda target, source, folder: target.load_state_dict(source.state_dict()),
    "checkpoint": lambda target, source, folder: (
        dcp.save({"optimizer": source}, checkpoint_id=folder),
        load({"optimizer": target}, checkpoint_id=folder),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("contained", [False, True])
@pytest.mark.parametrize(
    ("saved", "kept"),
    [(("embedding",), ("embedding",)), ((), ("embedding",)), (("embedding",), ())],
)
def test_states_load_with_other_choices(
    saved: Any, kept: Any, contained: bool, way: str, tmp_path: Path
) -> None:
    def build(model: nn.Module, chosen: Any) -> Any:
        options = {**INT8, "fp32_moments": chosen}
        if contained:
            return OptimizersContainer([model], FusedAdamW, options)
        return FusedAdamW(model.parameters(), **options)

    model, other = Model(), Model()
    source, target = build(model, saved), build(other, kept)
    train(model, source, 1, 2)
    other.load_state_dict(model.state_dict())
    LOADS[way](target, source, tmp_path / "checkpoint")
    names = dict(other.named_parameters())
    train(other, target, 3)
    assert eight_bits(other, target) == (MATRICES if kept == () else ["body.weight"])
    train(model, source, 3)
    for name, param in model.named_parameters():
        if saved == kept or name.startswith("body"):
            assert_same_bits([param], [names[name]])
            assert_same(source.state[param], target.state[names[name]])
        else:
            torch.testing.assert_close(param, names[name], rtol=0, atol=2e-2)
            assert target.state[names[name]]["step"] == 3


@pytest.mark.parametrize(
    ("saved", "kept", "like"),
    [
        ((), ("embedding",), {"state_dtype": torch.float32}),
        (("embedding",), (), {"state_dtype": "int8", "fp32_moments": ()}),
    ],
)
def test_the_conversion_is_that_of_other_dtypes(saved: Any, kept: Any, like: Any) -> None:
    model = Model()
    source = FusedAdamW(model.parameters(), **INT8, fp32_moments=saved)
    train(model, source, 1)
    target = FusedAdamW(model.parameters(), **INT8, fp32_moments=kept)
    expected = FusedAdamW(model.parameters(), lr=1e-2, **like)
    for optimizer in (target, expected):
        optimizer.load_state_dict(source.state_dict())
    for param in (model.tok.weight, model.bag.weight):
        assert_same(target.state[param], expected.state[param])


@pytest.mark.parametrize(
    ("chosen", "coded"), [({}, MATRICES[2:]), ({"fp32_moments": ("tok",)}, MATRICES[1:])]
)
def test_zero_passes_it_on(chosen: Any, coded: list[str], one_rank: None) -> None:
    model = Model()
    named: Any = [*model.named_parameters()]
    zero = ZeroRedundancyOptimizer(named[:2], FusedAdamW, **INT8, **chosen)
    zero.add_param_group({"params": named[2:]})
    train(model, zero, 1)
    assert eight_bits(model, zero.optim) == coded
    with pytest.raises(TypeError, match="fp32_moments is 'tok'"):
        ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, **INT8, fp32_moments="tok")
