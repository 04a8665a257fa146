"""Muon in torchtitan 0.3: groups of its DistMuon, as its Kimi recipe declares them, compared with
DistMuon's own functions for matrices and states; and hidden matrices of AdamW's groups."""

import copy
import math
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard

from torchopt_ext import FusedAdamW, FusedMuon

from ...support.compare import assert_same, assert_same_bits

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as stock
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import ParamGroupConfig, default_adamw
from torchtitan.distributed.flex_shard import (
    BlockShard,
    BucketConfig,
    ComputeLayout,
    Owned,
    dist_muon,
)

from torchopt_ext.integrations import torchtitan_0_3 as ours

FACTORY = "optimizer_factory_kwargs_by_name"
BUCKETS = (BucketConfig(name="all", patterns=("layers.*",)),)
MUON = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False, "adjust_lr_fn": "match_rms_adamw"}
AXES = ("dp_shard", "ep")
MATRICES = ["experts", "wq.weight", "wo.weight"]


def model():
    torch.manual_seed(0)
    layers = nn.ModuleDict()
    for number in "01":
        layer = layers[number] = nn.Module()
        layer.wq, layer.wo = nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
        layer.experts = nn.Parameter(torch.randn(3, 4, 6))
    whole = nn.Module()
    whole.tok_embeddings, whole.layers = nn.Embedding(9, 6), layers
    whole.lm_head = nn.Linear(6, 9, bias=False)
    return whole


def layout(*shardings):
    return ComputeLayout(shardings_by_mesh_axis=dict(zip(AXES, shardings, strict=False)))


def layouts(**changed):
    """Returns layouts of the parameters: wq is heads of two rows, and experts are a batch."""
    by_name = {"wq.weight": layout(BlockShard(0, 2)), "wo.weight": layout(Owned())}
    by_name |= {"experts": layout(Shard(0), Shard(0))} | changed
    # Those of other pipeline stages are among them.
    return {f"layers.{i}.{name}": each for i in range(3) for name, each in by_name.items() if each}


def group(pattern=".*", name="AdamW", **options):
    return ParamGroupConfig(
        pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-2} | options
    )


def recipe(*groups, placed=None, implementation="foreach", **fields):
    """Returns a configuration with the arguments of torchtitan's Kimi recipe."""
    groups = groups or (group(r"wq|wo\.weight|experts$", "DistMuon", **MUON), group())
    factory = {"compute_sharding_by_fqn": layouts() if placed is None else placed}
    factory = {"DistMuon": factory | {"bucket_configs": BUCKETS} | fields.pop("factory", {})}
    return stock.OptimizersContainer.Config(
        param_groups=[*groups], implementation=implementation, **{FACTORY: factory}, **fields
    )


def build(kind, config, part=None, **fields):
    config = ours.optimizers(config, **fields) if kind is ours else config
    return config.build(model_parts=[part or model()])


def backward(part, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in part.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def train(container, steps=1, first=0):
    for seed in range(first, first + steps):
        backward(container.model_parts[0], seed)
        container.step()


def named(container):
    return dict(container.model_parts[0].named_parameters())


def assert_near(container, expected, before):
    """Compares what steps changed."""
    for name, param in named(container).items():
        change = (named(expected)[name] - before[name]).norm()
        assert change > 0, name
        assert (param - named(expected)[name]).norm() < 1e-4 * change, name


def weights(container):
    return {name: param.detach().clone() for name, param in named(container).items()}


@pytest.fixture(autouse=True)
def dist_muon_on_cpu(monkeypatch):
    """Lets DistMuon, which needs CUDA, step plain tensors by its own functions for a matrix, with
    products of float64 instead of bfloat16."""
    wide = SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64})

    def initialize(optimizer, *, compute_sharding_by_fqn, bucket_configs):
        optimizer.layouts = compute_sharding_by_fqn
        optimizer.register_load_state_dict_post_hook(dist_muon.DistMuon._validate_groups)

    @torch.no_grad()
    def step(optimizer, closure=None):
        (one,) = optimizer.param_groups
        for name, param in zip(one["param_names"], one["params"], strict=True):
            state = optimizer.state[param]
            state.setdefault("momentum_buffer", torch.zeros_like(param))
            settings = {key: one[key] for key in ("momentum", "nesterov")}
            direction = dist_muon._prepare_muon_input(
                param.grad, state["momentum_buffer"], **settings, out=torch.empty_like(param)
            )
            view = dist_muon._matrix_batch_view_from_compute_layout(
                name, param, optimizer.layouts[name]
            )
            matrices = view.view_as_matrix_batch(direction) if view else direction
            settings = {key: one[key] for key in ("ns_coefficients", "ns_steps", "eps")}
            dist_muon._compute_muon_direction(matrices, **settings, out=matrices)
            settings = {key: one[key] for key in ("lr", "weight_decay", "adjust_lr_fn")}
            dist_muon._apply_muon_update(
                param, direction, **settings, compute_matrix_shape=matrices.shape
            )

    monkeypatch.setattr(dist_muon, "torch", wide)
    monkeypatch.setattr(dist_muon, "_initialize_dist_muon", initialize)
    monkeypatch.setattr(dist_muon.DistMuon, "step", step)


# ---- DistMuon -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "implementation", "expected"),
    [
        ("Muon", "fused", "FusedMuon"),
        ("Muon", "foreach", NotImplementedError),
        ("FusedMuon", "foreach", "FusedMuon"),
        ("DistMuon", "fused", "FusedMuon"),
        ("DistMuon", "for-loop", "FusedMuon"),
        ("DistMuon", "fused_opt_states_bf16", "FusedMuon"),
    ],
)
def test_what_a_name_stands_for(name, implementation, expected):
    groups = [group(r"wq|wo\.weight|experts", name), group()]
    config = stock.OptimizersContainer.Config(param_groups=groups, implementation=implementation)
    if expected is NotImplementedError:
        with pytest.raises(expected, match="Muon"):
            build(ours, config)
        return
    muon, adamw = build(ours, config)
    fused = implementation.startswith("fused")
    assert [type(muon).__name__, type(adamw)] == [
        expected,
        FusedAdamW if fused else torch.optim.AdamW,
    ]


def test_a_recipe_trains_as_with_distmuon():
    found, expected = (build(kind, recipe()) for kind in (ours, stock))
    assert [type(o) for o in found] == [FusedMuon, torch.optim.AdamW]
    before = weights(found)
    for container in (found, expected):
        train(container, 3)
    assert_near(found, expected, before)
    assert found.optimizers[0].control.orthogonalized == 2 * (4 + 1 + 3)
    whole = build(ours, recipe(placed=layouts(**{"wq.weight": layout(Owned())})))
    train(whole, 3)
    with pytest.raises(AssertionError, match=r"wq\.weight"):  # so blocks make a difference
        assert_near(whole, expected, before)


@pytest.mark.parametrize("fused", ["foreach", "fused"])
@pytest.mark.parametrize("kinds", [(ours, stock), (stock, ours)], ids=["to stock", "from stock"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_cross(kinds, fused, tmp_path):
    muon = group(r"wq|wo\.weight|experts$", "DistMuon", **MUON, fused=False)
    config = recipe(muon, group(), implementation=fused)
    saving, loading = (build(kind, config) for kind in kinds)
    train(saving, 2)
    dcp.save({"optimizer": saving}, checkpoint_id=tmp_path)
    loading.model_parts[0].load_state_dict(saving.model_parts[0].state_dict())
    manager = SimpleNamespace(states={})
    CheckpointManager.dcp_load(manager, {"optimizer": loading}, str(tmp_path), False, False)
    found, expected = loading.state_dict(), saving.state_dict()
    mine, theirs = (found, expected) if kinds[0] is stock else (expected, found)
    moments = [key for key in theirs if isinstance(theirs[key], torch.Tensor)]
    assert len([key for key in moments if key.endswith("momentum_buffer")]) == 6
    assert_same({key: mine[key] for key in moments}, {key: theirs[key] for key in moments})
    # Further keys: the count of steps, the algorithm, and the number of blocks.
    further = {key.rpartition(".")[2] for key in mine.keys() - theirs.keys()}
    assert further == {"step", "algorithm", "num_heads"} and not theirs.keys() - mine.keys()
    before = weights(saving)
    for container in (saving, loading):
        train(container, first=2)
    assert_near(loading, saving, before)


def test_several_groups_and_missing_gradients():
    """DistMuon has one group, and raises without a gradient."""
    groups = [group("wq", "DistMuon", momentum=0.5), group(r"wo\.weight|experts$", "DistMuon")]
    container = build(ours, recipe(*groups, group(), factory={"nesterov": False}))
    muon, _ = container
    keys = ("num_heads", "momentum", "nesterov")
    found = [(*(g.get(key) for key in keys), len(g["params"])) for g in muon.param_groups]
    assert found == [(4, 0.5, False, 2), (None, 0.95, False, 4)]
    before = weights(container)
    backward(container.model_parts[0], 0)
    named(container)["layers.0.wq.weight"].grad = None
    container.step()
    unchanged = [name for name, old in before.items() if torch.equal(named(container)[name], old)]
    assert unchanged == ["layers.0.wq.weight"]


def test_kimis_recipe_as_it_stands(monkeypatch):
    for name in ("mm_datasets", "utils.image"):  # need torchvision
        monkeypatch.setitem(sys.modules, f"torchtitan.hf_datasets.multimodal.{name}", MagicMock())
    kimi = pytest.importorskip("torchtitan.models.kimi_k2_7.config_registry")
    config = kimi.kimi_k2_5_debugmodel()
    spec = config.model_spec.model
    del spec.layers[2:]
    with torch.device("meta"):
        part = spec.build()
    part.to_empty(device="cpu")
    muon, adamw = build(ours, config.optimizer, part)
    assert [type(muon), type(adamw)] == [FusedMuon, torch.optim.AdamW]
    heads = {n: g.get("num_heads") for g in muon.param_groups for n in g["param_names"]}
    assert {n for n in heads if heads[n]} == {
        f"layers.{i}.attention.{name}.weight" for i in "01" for name in ("wq", "wkv_b")
    }
    assert {*heads.values()} == {None, spec.first_attention.n_heads}


REJECTED = [
    ("no layout for 'layers.0.wo.weight'", {"wo.weight": None}),
    (r"'layers.0.wq.weight' of shape \(8, 6\)", {"wq.weight": layout(BlockShard(0, 3))}),
    (r"'layers.0.wq.weight' .*\(dim=1", {"wq.weight": layout(BlockShard(1, 2))}),
    ("one number of rows", {"wq.weight": layout(BlockShard(0, 2), BlockShard(0, 4))}),
    ("'layers.0.experts' .* matrix", {"experts": layout(BlockShard(0, 1))}),
]


@pytest.mark.parametrize(("message", "changed"), REJECTED)
def test_layouts_that_are_rejected(message, changed):
    with pytest.raises(ValueError, match=message):
        build(ours, recipe(placed=layouts(**changed)))


@pytest.mark.parametrize(
    ("error", "message", "groups", "fields"),
    [
        (ValueError, "always fused", [group("wq", "DistMuon", foreach=True), group()], {}),
        (ValueError, "no layout for 'layers.0.wo.bias'",
         [group("wq|wo", "DistMuon"), group()], {}),
        (ValueError, "weight of an embedding", [group("tok", "DistMuon"), group()],
         {"placed": {"tok_embeddings.weight": layout(Owned())}}),
        (TypeError, "speed", [], {"factory": {"speed": 1}}),
        (ValueError, r"muon would have no effect: .* \['DistMuon', 'AdamW'\]", [], {"muon": {}}),
        (ValueError, "one decision", [], {"max_grad_norm": 1.0}),
        (TypeError, "betas", [group("wq", "DistMuon"), group()],
         {"muon": {"betas": (0.9, 0.95)}, "implementation": "fused"}),
    ],
)  # fmt: skip
def test_settings_that_are_rejected(error, message, groups, fields):
    of_recipe = {name: fields[name] for name in ("factory", "placed") if name in fields}
    fields = {name: value for name, value in fields.items() if name not in of_recipe}
    with pytest.raises(error, match=message):
        build(ours, recipe(*groups, **of_recipe), **fields)


# ---- one decision -------------------------------------------------------------------------------


def test_one_norm_and_one_decision():
    fields = {"implementation": "fused", "max_grad_norm": 0.5, "skip_nonfinite": True}
    container = build(ours, recipe(), **fields)
    backward(container.model_parts[0], 0)
    norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in named(container).values()))
    container.step()
    for optimizer in container:
        assert float(optimizer.control.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(optimizer.control.clip_factor) == pytest.approx(0.5 / norm, rel=1e-5)
    before = weights(container)
    backward(container.model_parts[0], 1)
    named(container)["lm_head.weight"].grad[0, 0] = math.inf
    container.step()
    assert_same(weights(container), before)


# ---- hidden matrices of AdamW's groups ----------------------------------------------------------


def test_hidden_matrices_move_to_muon():
    container = build(ours, default_adamw(lr=1e-2), muon={"momentum": 0.9})
    (optimizer,) = container
    assert type(optimizer) is FusedAdamW
    _, of_muon = optimizer.param_groups
    assert of_muon["param_names"] == [f"layers.{i}.{name}" for i in "01" for name in MATRICES]
    expected = model()
    matrices = [p for n, p in expected.named_parameters() if n in of_muon["param_names"]]
    others = [p for n, p in expected.named_parameters() if n not in of_muon["param_names"]]
    muon = {"lr": 1e-2, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    by_hand = [
        FusedMuon(matrices, weight_decay=0.1, **muon),
        FusedAdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    train(container, 3)
    for seed in range(3):
        backward(expected, seed)
        for each in by_hand:
            each.step()
    assert_same_bits(container.model_parts[0].parameters(), expected.parameters())


def test_matrices_keep_their_groups_rates():
    groups = [group(r"layers\.0", lr=1e-3, betas=(0.8, 0.9)), group("wo.bias", "SGD"), group()]
    config = stock.OptimizersContainer.Config(param_groups=groups)
    adamw, sgd = build(ours, config, muon={})
    rates = [(g["lr"], g.get("algorithm", "adamw")) for g in adamw.param_groups]
    assert rates == [(1e-3, "muon"), (1e-3, "adamw"), (1e-2, "adamw"), (1e-2, "muon")]
    assert [g["weight_decay"] for g in sgd.param_groups] == [0.0]
    resumed = build(ours, config, muon={})
    saved = copy.deepcopy(resumed.state_dict())
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), saved)
