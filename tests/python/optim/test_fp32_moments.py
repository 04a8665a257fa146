"""fp32_moments selects which parameters keep float32 moments with state_dtype="int8"."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from torchopt_ext import FusedAdam, FusedAdamW, ZeroRedundancyOptimizer, param_groups
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.state.algorithms import ADAM
from torchopt_ext.statedict.dcp import load

from ...support import problems
from ...support.compare import assert_same, assert_same_bits

CODES = {m.codes: torch.uint8 if m.as_root else torch.int8 for m in ADAM.moments}
CODES_OF = {m.name: m.codes for m in ADAM.moments}
SCALES = {m.scale: m.name for m in ADAM.moments}

pytestmark = pytest.mark.newest_torch
INT8: dict[str, Any] = {"lr": 1e-2, "state_dtype": "int8"}


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
    found = []
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        coded = CODES.keys() <= state.keys()
        expected = CODES if coded else dict.fromkeys(CODES_OF, torch.float32)
        assert {k: v.dtype for k, v in state.items() if k in (*CODES, *CODES_OF)} == expected
        assert coded == (SCALES.keys() <= state.keys()) == bool(SCALES.keys() & state.keys())
        found += [name] * coded
    return found


@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
@pytest.mark.parametrize("how", ["parameters", "names", "groups"])
def test_embeddings_keep_them_by_default(
    how: str, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, objects, searches = Model(), gc.get_objects, []
    params: Any = {
        "parameters": model.parameters(),
        "names": model.named_parameters(),
        "groups": param_groups(model),
    }[how]
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(how) or objects())
    optimizer = cls(params, **INT8)
    train(model, optimizer, 1)
    assert eight_bits(model, optimizer) == ["body.weight"]
    assert searches == [how]  # a search reads all objects of the process


@pytest.mark.parametrize("master", [None, "fp32", "remainder8"])
def test_no_other_bit_changes(master: str | None) -> None:
    def run(**options: Any) -> tuple[Model, FusedAdamW]:
        model = Model()
        if master is not None:
            model = model.bfloat16()
        options = {"master_weights": master, "max_grad_norm": 1.0, **options}
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, **options)
        train(model, optimizer, 1, 2, 3)
        return model, optimizer

    model, optimizer = run(state_dtype="int8")
    for options, names in (
        ({"state_dtype": "int8", "fp32_moments": ()}, ["body.weight", "body.bias"]),
        ({"state_dtype": torch.float32}, ["tok.weight", "bag.weight", "body.bias"]),
    ):
        other, expected = run(**options)
        theirs = dict(other.named_parameters())
        for name, param in model.named_parameters():
            if name in names:
                assert_same_bits([param], [theirs[name]])
                assert_same(optimizer.state[param], expected.state[theirs[name]])


@pytest.mark.parametrize(
    ("chosen", "coded"),
    [
        ((), ["tok.weight", "bag.weight", "body.weight"]),
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
    model = Model()
    optimizer = FusedAdamW(model.named_parameters(), **INT8)
    other = Model(1)
    source = FusedAdamW(other.parameters(), **INT8)
    train(other, source, 0)
    for holder, name in ((model.bag, "weight"), (model.body, "weight")):
        old = getattr(holder, name)
        setattr(holder, name, nn.Parameter(old.detach().clone()))
        params = optimizer.param_groups[0]["params"]
        params[[p is old for p in params].index(True)] = getattr(holder, name)
    if loads:
        optimizer.load_state_dict(source.state_dict())
    train(model, optimizer, 1)
    torch.utils.swap_tensors(model.bag.weight, nn.Parameter(torch.ones(5, 64)))
    train(model, optimizer, 2)
    assert eight_bits(model, optimizer) == ["body.weight"]


def test_an_embedding_with_the_id_of_a_freed_parameter() -> None:
    optimizer = FusedAdamW([nn.Parameter(torch.ones(9, 70))], **INT8)
    (freed,) = map(id, optimizer.param_groups[0].pop("params"))
    made = [nn.Embedding(9, 70)]
    while id(made[-1].weight) != freed and len(made) < 1000:
        made.append(nn.Embedding(9, 70))
    optimizer.param_groups[0]["params"] = [made[-1].weight]
    train(made[-1], optimizer, 0)
    assert eight_bits(made[-1], optimizer) == []


def test_copies_keep_the_choice() -> None:
    model = Model()
    optimizer = FusedAdamW(model.named_parameters(), **INT8)
    train(model, optimizer, 1)
    copied_model, copied = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    loaded_model, loaded = torch.load(file, weights_only=False)
    for other, own in ((copied_model, copied), (loaded_model, loaded)):
        own.state.clear()
        train(other, own, 2)
        assert eight_bits(other, own) == ["body.weight"]
        late = nn.Embedding(3, 64)
        own.add_param_group({"params": [("late", late.weight)]})
        late.weight.grad = torch.ones(3, 64)
        own.step()
        assert own.state[late.weight]["exp_avg"].dtype == torch.float32


def test_patterns_need_names_and_groups_cannot_choose() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"pattern 'tok', but the parameters have no names"):
        FusedAdamW(model.parameters(), **INT8, fp32_moments=["tok"])
    with pytest.raises(ValueError, match="fp32_moments: arguments of FusedAdamW for all its"):
        FusedAdamW([{"params": [model.tok.weight], "fp32_moments": ()}], **INT8)


@pytest.mark.parametrize("chosen", [("embedding",), (), ("body", "tok")], ids=str)
@pytest.mark.parametrize("options", [{}, {"master_weights": "remainder8"}], ids=str)
def test_the_estimate_is_what_a_step_allocates(chosen: Any, options: dict[str, Any]) -> None:
    model = Model().to(torch.bfloat16 if options else torch.float32)
    options = {**options, "state_dtype": "int8", "fp32_moments": chosen}
    with torch.device("meta"):
        meta = Model().to(torch.bfloat16 if options.get("master_weights") else torch.float32)
    optimizer = FusedAdamW(model.named_parameters(), **options)
    train(model, optimizer, 1)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    )
    for source in (model, meta):
        (rank,) = FusedAdamW.estimate(source.named_parameters(), **options)
        assert rank.moments == moments
        shards = FusedAdamW.estimate(
            source.named_parameters(), sharding="zero1", world_size=2, **options
        )
        assert sum(shard.moments for shard in shards) == moments


def test_an_estimate_of_a_generator_counts_its_parameters() -> None:
    model = Model()
    assert FusedAdamW.estimate(model.parameters()) == FusedAdamW.estimate([*model.parameters()])
    assert FusedAdamW.estimate(model.parameters())[0].moments > 0


def test_containers_find_embeddings_and_names_of_their_parts() -> None:
    for made in (OptimizersContainer, OptimizersInBackwardContainer):
        for chosen, coded in (
            ({}, [["body.weight"], ["body.weight"]]),
            ({"fp32_moments": ["head"]}, [["bag.weight", "body.weight"]] * 2),
            ({"fp32_moments": ()}, [["tok.weight", "bag.weight", "body.weight"]] * 2),
        ):
            parts: list[nn.Module] = [Model(1), Model(2)]
            container = made(parts, FusedAdamW, {**INT8, **chosen})
            for optimizer in container.optimizers:
                optimizer.init_state()
            assert [eight_bits(part, container) for part in parts] == coded
    container = OptimizersContainer([nn.Linear(64, 2)], FusedAdamW, {**INT8, "process_group": None})
    with pytest.raises(ValueError, match="no parameter has a name with 'emb'"):
        OptimizersContainer([nn.Linear(64, 2)], FusedAdamW, {**INT8, "fp32_moments": ["emb"]})


def test_a_container_sees_names_without_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.ModuleDict({"layers": nn.ModuleList([checkpoint_wrapper(nn.Linear(64, 3))])})
    options = {**INT8, "fp32_moments": [r"layers\.0\.weight"]}
    container = OptimizersContainer([model], FusedAdamW, options)
    container.optimizers[0].init_state()
    assert eight_bits(model, container) == []


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
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_bits([own], [other])
        assert_same(after.state[own], inside.state[other])


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
    def made(model: nn.Module, chosen: Any) -> Any:
        options = {**INT8, "fp32_moments": chosen}
        if contained:
            return OptimizersContainer([model], FusedAdamW, options)
        return FusedAdamW(model.parameters(), **options)

    model, other = Model(), Model()
    source, target = made(model, saved), made(other, kept)
    train(model, source, 1, 2)
    other.load_state_dict(model.state_dict())
    LOADS[way](target, source, tmp_path / "checkpoint")
    train(other, target, 3)
    expected = ["tok.weight", "bag.weight", "body.weight"] if kept == () else ["body.weight"]
    assert eight_bits(other, target) == expected
    train(model, source, 3)
    names = dict(other.named_parameters())
    for name, param in model.named_parameters():
        same = saved == kept or name.startswith("body")
        state, loaded = source.state[param], target.state[names[name]]
        if same:
            assert_same_bits([param], [names[name]])
            assert_same(state, loaded)
        else:
            torch.testing.assert_close(param, names[name], rtol=0, atol=2e-2)
            assert loaded["step"] == 3


def test_the_conversion_is_that_of_other_dtypes() -> None:
    """Moments convert between 8 bits and float32 as in loads that change state_dtype."""
    for saved, kept, like in (
        ((), ("embedding",), {"state_dtype": torch.float32}),
        (("embedding",), (), {"state_dtype": "int8", "fp32_moments": ()}),
    ):
        model = Model()
        source = FusedAdamW(model.parameters(), **INT8, fp32_moments=saved)
        train(model, source, 1)
        target = FusedAdamW(model.parameters(), **INT8, fp32_moments=kept)
        expected = FusedAdamW(model.parameters(), lr=1e-2, **like)
        for optimizer in (target, expected):
            optimizer.load_state_dict(source.state_dict())
        for param in (model.tok.weight, model.bag.weight):
            assert_same(target.state[param], expected.state[param])


def test_zero_passes_it_on(one_rank: None) -> None:
    for chosen, coded in (
        ({}, ["body.weight"]),
        ({"fp32_moments": ("tok",)}, ["bag.weight", "body.weight"]),
    ):
        model = Model()
        named: Any = [*model.named_parameters()]
        zero = ZeroRedundancyOptimizer(named[:2], FusedAdamW, **INT8, **chosen)
        zero.add_param_group({"params": named[2:]})
        train(model, zero, 1)
        assert eight_bits(model, zero.optim) == coded
        with pytest.raises(TypeError, match="fp32_moments is 'tok'"):
            ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, **INT8, fp32_moments="tok")


def test_torchs_state_dicts_go_both_ways() -> None:
    model = Model()
    source = FusedAdamW(model.parameters(), **INT8)
    train(model, source, 1)
    stock = torch.optim.AdamW([model.tok.weight, model.bag.weight], lr=1e-2)
    saved = source.state_dict()
    group = {**saved["param_groups"][0], "params": [0, 1]}
    stock.load_state_dict(
        {"state": {i: saved["state"][i] for i in (0, 1)}, "param_groups": [group]}
    )
    moments: list[Tensor] = [stock.state[p]["exp_avg"] for p in stock.param_groups[0]["params"]]
    assert [m.dtype for m in moments] == [torch.float32] * 2
