"""Our containers in torchtitan 0.3, compared with torchtitan's own: the behavior of its unit tests
(tests/unit_tests/test_optimizer_param_groups.py, test_state_dict_keys.py), our options, and
rejected configurations."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedSGD

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as stock
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import ParamGroupConfig

from torchopt_ext.integrations import torchtitan_0_3 as ours


def model(dtype: torch.dtype = torch.float32, *, recomputes: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for i in "01"})
    if recomputes:
        layers["1"] = checkpoint_wrapper(layers["1"])
    whole = nn.Module()
    whole.layers, whole.lm_head = layers, nn.Linear(4, 3, bias=False)
    return whole.to(dtype)


def backward(part: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in part.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def group(pattern: str = ".*", name: str = "AdamW", **options: Any) -> ParamGroupConfig:
    return ParamGroupConfig(
        pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-2} | options
    )


def build(kind: Any, parts: Any, *groups: ParamGroupConfig, **fields: Any) -> Any:
    config = kind.OptimizersContainer.Config(param_groups=list(groups or [group()]), **fields)
    return config.build(model_parts=parts if isinstance(parts, list) else [parts])


SEVERAL = [
    group("norm|bias", weight_decay=0.0),
    group("lm_head", "Adam", lr=3e-3, betas=(0.8, 0.9)),
    group(".*", weight_decay=0.1, betas=(0.9, 0.95)),
]


# ---- moments of 8 bits ---------------------------------------------------------------------------


def test_embeddings_keep_fp32_moments() -> None:
    part = nn.ModuleDict({"tok": nn.Embedding(9, 64), "body": checkpoint_wrapper(nn.Linear(64, 9))})
    groups = [group("tok", weight_decay=0.0), group(".*", "Adam")]
    by_name = {FACTORY: {n: {"state_dtype": "int8", "fp32_moments": ()} for n in ("AdamW", "Adam")}}
    for fields, expected in (
        ({"state_dtype": "int8"}, [torch.float32, torch.int8]),
        ({"state_dtype": "int8", "fp32_moments": []}, [torch.int8, torch.int8]),
        ({"state_dtype": "int8", "fp32_moments": [r"^body\.w"]}, [torch.int8, torch.float32]),
        (by_name, [torch.int8, torch.int8]),
    ):
        container = build(ours, part, *groups, **fields)
        for optimizer in container:
            optimizer.init_state()
        states = [container.state[p] for p in part.parameters() if p.dim() > 1]
        kept = [s.get("exp_avg", s.get("exp_avg_codes")).dtype for s in states]
        assert kept == expected


# ---- groups and names ---------------------------------------------------------------------------


def test_first_pattern_that_matches_decides() -> None:
    part = model()
    adamw, adam = build(ours, part, *SEVERAL)
    assert [type(adamw), type(adam)] == [FusedAdamW, FusedAdam]
    assert [g["param_names"] for g in adam.param_groups] == [["lm_head.weight"]]
    assert adam.param_groups[0]["betas"] == (0.8, 0.9)
    vectors = [n for n, p in part.named_parameters() if n.endswith("bias")]
    assert len(adamw.param_groups[0]["params"]) == len(vectors)
    theirs = [g for optimizer in build(stock, part, *SEVERAL) for g in optimizer.param_groups]
    for own, their in zip([*adamw.param_groups, *adam.param_groups], theirs, strict=True):
        settings = [{k: v for k, v in g.items() if k != "params"} for g in (own, their)]
        assert settings[0] == settings[1]
        assert list(map(id, own["params"])) == list(map(id, their["params"]))


@pytest.mark.parametrize(
    ("name", "implementation", "expected"),
    [
        ("AdamW", "fused", FusedAdamW),
        ("Adam", "fused", FusedAdam),
        ("AdamW", "fused_opt_states_bf16", FusedAdamW),
        ("AdamW", "foreach", torch.optim.AdamW),
        ("Adam", "for-loop", torch.optim.Adam),
        ("FusedAdamW", "fused", FusedAdamW),
        ("FusedAdam", "fused", FusedAdam),
        ("Lion", "fused", FusedLion),
        ("FusedSGD", "fused", FusedSGD),
    ],
)
def test_what_a_name_stands_for(name: str, implementation: str, expected: type) -> None:
    (optimizer,) = build(ours, model(), group(".*", name), implementation=implementation)
    assert type(optimizer) is expected


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_groups_override_the_implementation(name: str) -> None:
    groups = [group("bias", name, fused=False, lr=1e-3), group(".*", name, fused=False)]
    found, expected = (list(build(kind, model(), *groups)) for kind in (ours, stock))
    assert [type(o) for o in found] == [type(o) for o in expected] == [getattr(torch.optim, name)]
    for own, their in zip(found[0].param_groups, expected[0].param_groups, strict=True):
        assert own.keys() == their.keys()
        assert all(own[key] == their[key] for key in own if key != "params")
    (foreach,) = build(ours, model(), groups[0], group(".*", name), implementation="foreach")
    assert type(foreach) is getattr(torch.optim, name)
    mixed = [group("bias", f"Fused{name}"), group(".*", name, fused=False)]
    types = [type(optimizer) for optimizer in build(ours, model(), *mixed)]
    assert types == [ours.FUSED[name], getattr(torch.optim, name)]


def test_ours_takes_adamw_groups_beside_muon() -> None:
    """DistMuon itself needs CUDA, so torch's Muon takes the same groups in its place."""
    seen = []

    def muon(groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Muon:
        seen.extend((g["fused"], g["foreach"]) for g in groups)
        assert arguments == {"momentum": 0.9}
        return torch.optim.Muon(groups, **arguments)

    class Mixed(ours.OptimizersContainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(ours.OptimizersContainer.Config):
            pass

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return {"DistMuon": muon}[name]

    part = model()
    groups = [group(r"layers.*0\.weight", "DistMuon", weight_decay=0.1), group()]
    config = Mixed.Config(
        param_groups=groups, optimizer_factory_kwargs_by_name={"DistMuon": {"momentum": 0.9}}
    )
    optimizers = config.build(model_parts=[part])
    assert [type(o) for o in optimizers] == [torch.optim.Muon, FusedAdamW]
    assert seen == [(False, False)]  # DistMuon rejects groups that are fused or foreach
    expected = copy.deepcopy(part)
    named = dict(expected.named_parameters())
    theirs = [
        torch.optim.Muon([p for n, p in named.items() if "0.weight" in n], lr=1e-2, momentum=0.9),
        torch.optim.AdamW([p for n, p in named.items() if "0.weight" not in n], lr=1e-2),
    ]
    for seed in range(3):
        for whole in (part, expected):
            backward(whole, seed)
        optimizers.step()
        for optimizer in theirs:
            optimizer.step()
    for found, wanted in zip(part.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    loaded = config.build(model_parts=[model()])
    loaded.load_state_dict(optimizers.state_dict())
    for found, wanted in zip(loaded.optimizers, optimizers.optimizers, strict=True):
        for own, other in zip(found.state.values(), wanted.state.values(), strict=True):
            assert own.keys() == other.keys()
            assert all(torch.equal(own[name], other[name]) for name in own)


# ---- state dicts --------------------------------------------------------------------------------


def values(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


@pytest.mark.parametrize("stepped", [False, True])
def test_state_dict_keys_are_stock_keys(stepped: bool) -> None:
    found, expected = ({}, {})
    for kind, state in ((ours, found), (stock, expected)):
        part = model()
        container = build(kind, part, *SEVERAL)
        kind.LRSchedulersContainer.Config().build(optimizers=container, training_steps=10)
        if stepped:
            backward(part, 0)
            container.step()
        state |= values(container.state_dict())
    assert found.keys() == expected.keys()
    assert "state.layers.1.0.weight.exp_avg" in found  # without the names of module wrappers
    assert not any(key.endswith((".param_names", ".pattern")) for key in found)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        else:
            assert found[key] == value, key
    if not stepped:  # torchtitan's container counts the step that makes the state
        assert found["state.lm_head.weight.step"] == 0


@pytest.mark.parametrize("kinds", [(ours, stock), (stock, ours)], ids=["to stock", "from stock"])
def test_state_crosses_bit_for_bit(kinds: tuple[Any, Any]) -> None:
    part = model()
    saving = build(kinds[0], part, *SEVERAL)
    backward(part, 0)
    saving.step()
    saved = values(saving.state_dict())
    loading = build(kinds[1], model(), *SEVERAL)
    loading.load_state_dict(values(saved))
    loaded = loading.state_dict()
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        same = torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else True
        assert same, key


def test_a_missing_key_changes_nothing() -> None:
    part = model()
    container = build(ours, part, *SEVERAL)
    before = values(container.state_dict())
    saved = before | {"state.lm_head.weight.exp_avg": torch.ones(3, 4)}
    del saved["state.layers.0.0.weight.exp_avg"]
    with pytest.raises(KeyError, match=r"layers\.0\.0\.weight\.exp_avg"):
        container.load_state_dict(saved)
    after = values(container.state_dict())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], v) for k, v in before.items() if isinstance(v, torch.Tensor))


def test_state_before_the_first_step_counts_no_step() -> None:
    parts, containers = [model(), model()], []
    for part, early in zip(parts, (True, False), strict=True):
        containers.append(build(ours, part, *SEVERAL))
        if early:  # as a fault-tolerant job and every load do
            containers[-1].load_state_dict(values(containers[-1].state_dict()))
        backward(part, 0)
        containers[-1].step()
    assert containers[0].state_dict()["state.lm_head.weight.step"] == 1
    assert all(map(torch.equal, *(part.parameters() for part in parts)))


def test_param_groups_of_the_container_follow_the_schedule() -> None:
    container = build(ours, model(), *SEVERAL)
    config = ours.LRSchedulersContainer.Config(warmup_steps=2)
    schedulers = config.build(optimizers=container, training_steps=10)
    assert [g["lr"] for g in container.param_groups] == [5e-3, 5e-3, 1.5e-3]
    backward(container.model_parts[0], 0)
    container.step()
    schedulers.step()
    assert [g["lr"] for g in container.param_groups] == [1e-2, 1e-2, 3e-3]


# ---- hooks --------------------------------------------------------------------------------------


def test_a_hook_on_the_container_fires_once_a_step() -> None:
    part = model()
    container = build(ours, part, *SEVERAL)
    fired = []
    container.register_step_post_hook(lambda *_: fired.append(part.lm_head.weight.sum().item()))
    backward(part, 0)
    container.step()
    assert fired == [part.lm_head.weight.sum().item()]


@pytest.mark.parametrize("kind", [ours, stock], ids=["ours", "stock"])
def test_expert_biases_move_before_the_step(kind: Any) -> None:
    part = model(recomputes=False)
    for block in part.layers.values():
        block.moe_enabled = True
        block.moe = nn.Module()
        block.moe.load_balance_coeff = 0.1
        block.moe.register_buffer("tokens_per_expert_E", torch.tensor([3.0, 1.0, 2.0, 2.0]))
        block.moe.register_buffer("expert_bias_E", torch.zeros(4))
    container = build(kind, part)
    dims = SimpleNamespace(ep_enabled=False, tp=1, get_optional_mesh=lambda name: None)
    stock.register_moe_load_balancing_hook(container, [part], dims)
    for steps in (1, 2):
        backward(part, steps)
        container.step()
        for block in part.layers.values():
            expected = torch.tensor([-0.1, 0.1, 0.0, 0.0])
            torch.testing.assert_close(block.moe.expert_bias_E, steps * expected)
            assert not block.moe.tokens_per_expert_E.any()
            block.moe.tokens_per_expert_E.copy_(torch.tensor([3.0, 1.0, 2.0, 2.0]))


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["fields", "by name"])
def test_every_option_reaches_the_optimizer(by_name: bool) -> None:
    fields = {
        "max_grad_norm": 0.5,
        "skip_nonfinite": True,
        "master_weights": "remainder",
        "state_dtype": "bfloat16",
        "stochastic_rounding": False,
        "write_back_gradients": True,
        "track": ["norms"],
    }
    if by_name:
        fields = {"optimizer_factory_kwargs_by_name": {"FusedAdamW": fields}}
    part = model(torch.bfloat16)
    container = build(ours, part, group(".*", "FusedAdamW"), **fields)
    (optimizer,) = container
    assert (optimizer.max_grad_norm, optimizer.skip_nonfinite) == (0.5, True)
    backward(part, 0)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in part.parameters()))
    container.step()
    state = optimizer.state[part.lm_head.weight]
    assert state["remainder"].dtype == torch.int16
    assert state["exp_avg"].dtype == torch.bfloat16
    assert container.control.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    assert len(optimizer.telemetry.grad_norms) == len(list(part.parameters()))
    written = math.sqrt(sum(p.grad.double().square().sum().item() for p in part.parameters()))
    assert written == pytest.approx(0.5, rel=1e-2)
    before = [p.detach().clone() for p in part.parameters()]
    part.lm_head.weight.grad[0, 0] = math.nan
    container.step()
    assert all(map(torch.equal, before, part.parameters()))


def test_arguments_of_a_name_and_fields_complete_each_other() -> None:
    """Each option has an effect on one of the two optimizers, although not on both."""
    part = nn.ModuleDict({"body": nn.Linear(64, 64), "lm_head": nn.Linear(64, 9)})
    rounding = {"state_dtype": "int8", "stochastic_rounding": True}
    other = {"rounding_seed": 3, "fp32_moments": []}
    without = {"state_dtype": "float32", "stochastic_rounding": False}
    for fields in (
        {FACTORY: {"AdamW": rounding | other}},
        {FACTORY: {"AdamW": rounding}} | other,
        {FACTORY: {"Adam": without}} | rounding | other,
    ):
        container = build(ours, part, group("lm_head", "Adam"), group(), **fields)
        for optimizer in container:
            optimizer.init_state()
        states = [container.state[getattr(part, n).weight] for n in part]
        kept = [s.get("exp_avg", s.get("exp_avg_codes")).dtype for s in states]
        assert kept == [torch.int8, torch.float32]


def test_random_rounding_follows_its_seed() -> None:
    ends = []
    for seed in (1, 1, 2):
        part = model(torch.bfloat16)
        container = build(ours, part, stochastic_rounding=True, rounding_seed=seed)
        for step in range(3):
            backward(part, step)
            container.step()
        ends.append(torch.cat([p.detach().flatten() for p in part.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_bf16_states_are_rounded_and_stay_bf16() -> None:
    """Compares with a formula, as torch's fused CPU kernel does not support bf16 states."""
    bf16 = {"implementation": "fused_opt_states_bf16"}
    part = model()
    container = build(ours, part, group(weight_decay=0.1), **bf16)
    weights = [p.detach().clone() for p in part.parameters()]
    expected = [(w, torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in range(1, 6):
        backward(part, step)
        for (weight, mean, square), param in zip(expected, part.parameters(), strict=True):
            mean.lerp_(param.grad, 0.1)
            square.lerp_(param.grad**2, 0.001)
            size = (square / (1 - 0.999**step)).sqrt() + 1e-8
            weight.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * mean / (1 - 0.9**step) / size)
            for moment in (mean, square):
                moment.copy_(moment.bfloat16())
        container.step()
    for weight, param in zip(weights, part.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-3, atol=1e-4)
    saved = values(container.state_dict())
    moments = [k for k in saved if k.endswith(("exp_avg", "exp_avg_sq"))]
    assert {saved[key].dtype for key in moments} == {torch.bfloat16}
    resumed = build(ours, model(), **bf16)
    resumed.load_state_dict(saved)
    loaded = resumed.state_dict()
    assert all(loaded[key].dtype == torch.bfloat16 for key in moments)
    assert all(torch.equal(loaded[key], saved[key]) for key in moments)


@pytest.mark.parametrize("option", [{"master_weights": "fp32"}, {"stochastic_rounding": True}])
def test_an_option_is_judged_by_the_parameters_that_it_is_for(option: dict[str, Any]) -> None:
    """A field is for all parts and names together, an argument of one name for its parameters."""
    low, full = model(torch.bfloat16), model()
    mixed, groups = nn.ModuleDict({"low": low, "full": full}), [group("^low", "Adam"), group()]
    assert len(build(ours, [low, full], **option)) == 2
    assert len(build(ours, mixed, *groups, **option)) == 2
    assert len(build(ours, mixed, *groups, **{FACTORY: {"Adam": option}})) == 2
    (name,) = option
    with pytest.raises(ValueError, match=f"^AdamW: {name} has no effect"):
        build(ours, mixed, *groups, **{FACTORY: {"AdamW": option}})
    with pytest.raises(ValueError, match=f"^Adam, AdamW: {name} has no effect"):
        build(ours, mixed.float(), *groups, **option)


def test_pipeline_stages_judge_options_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that raised alone would leave the others waiting in the collective."""
    sent: list[str] = []

    def all_gather_text(text: str, *_: Any) -> list[str]:
        sent.append(text)
        return sent

    monkeypatch.setattr(ours, "all_gather_text", all_gather_text)
    for _ in range(2):
        with pytest.raises(ValueError, match="master_weights has no effect"):
            build(ours, model(), master_weights="fp32")
    assert len(sent) == 2
    build(ours, model(torch.bfloat16), master_weights="fp32")
    build(ours, model(), master_weights="fp32")  # the other stage has bfloat16


# ---- what is rejected ---------------------------------------------------------------------------

FACTORY = "optimizer_factory_kwargs_by_name"
REJECTED = {
    "unknown name": (NotImplementedError, "RMSprop", [group(".*", "RMSprop")], {}),
    "unknown implementation": (AssertionError, "'quick'", [], {"implementation": "quick"}),
    "pattern without match": (ValueError, "'router'", [group("router"), group()], {}),
    "pattern after all": (ValueError, "before them: \\['bias'\\]", [group(), group("bias")], {}),
    "parameter without pattern": (AssertionError, "lm_head.weight", [group("layers")], {}),
    "no groups": (AssertionError, "lm_head", None, {}),
    "option in a group": (ValueError, "max_grad_norm", [group(max_grad_norm=1.0)], {}),
    "group not fused": (ValueError, "always fused", [group(".*", "FusedAdamW", fused=False)], {}),
    "one of two groups not fused": (
        ValueError,
        "optimizer_kwargs\\['fused'\\] is False .* 'AdamW', but not in all .* 'FusedAdamW'",
        [group("bias", fused=False), group()],
        {},
    ),
    "bf16 states not fused": (
        ValueError,
        "optimizer_kwargs\\['fused'\\] is False .* needs a fused step",
        [group(fused=False)],
        {"implementation": "fused_opt_states_bf16"},
    ),
    "group foreach": (ValueError, "always fused", [group(foreach=True)], {}),
    "arguments of nobody": (ValueError, "\\['Adam'\\]", [], {FACTORY: {"Adam": {}}}),
    "option for torch's": (
        ValueError,
        "skip_nonfinite.* no effect",
        [],
        {"skip_nonfinite": True, "implementation": "foreach"},
    ),
    "bf16 states of nobody": (
        ValueError,
        "state_dtype.* no effect",
        [group(".*", "DistMuon")],
        {"implementation": "fused_opt_states_bf16"},
    ),
    "bf16 states in float32": (
        ValueError,
        "contradicts",
        [],
        {"implementation": "fused_opt_states_bf16", "state_dtype": "float32"},
    ),
    "implementation of nobody": (
        ValueError,
        "'foreach' would have no effect",
        [group(".*", "FusedAdamW")],
        {"implementation": "foreach"},
    ),
    "write back unclipped": (ValueError, "not clip", [], {"write_back_gradients": True}),
    "seed of nothing": (ValueError, "rounding_seed", [], {"rounding_seed": 3}),
    "seed of nothing by name": (
        ValueError,
        "AdamW: rounding_seed",
        [],
        {FACTORY: {"AdamW": {"rounding_seed": 3}}},
    ),
    "fp32 moments of floats by name": (
        ValueError,
        "AdamW: fp32_moments .* no effect",
        [],
        {FACTORY: {"AdamW": {"fp32_moments": ["lm_head"]}}},
    ),
    "fp32 moments of floats": (ValueError, "no effect", [], {"fp32_moments": ["lm_head"]}),
    "fp32 moments of nothing": (
        ValueError,
        "no parameter has a name with 'tok'",
        [],
        {"state_dtype": "int8", "fp32_moments": ["tok"]},
    ),
    "two thresholds": (
        ValueError,
        "one decision",
        [group("lm_head", "Adam"), group()],
        {FACTORY: {"AdamW": {"max_grad_norm": 1.0}}},
    ),
    "bad threshold": (ValueError, "max_grad_norm: -1", [], {"max_grad_norm": -1.0}),
    "deferred clipping beside a threshold": (
        ValueError,
        "max_grad_norm is 1.0",
        [],
        {"deferred_clipping": True, "max_grad_norm": 1.0},
    ),
    "deferred clipping of torch's": (
        ValueError,
        "AdamW, whose step cannot clip",
        [],
        {"deferred_clipping": True, "implementation": "foreach"},
    ),
    "masters of float32": (
        ValueError,
        "master_weights has no effect",
        [],
        {"master_weights": "fp32"},
    ),
    "unknown argument": (TypeError, "speed", [], {FACTORY: {"AdamW": {"speed": 1}}}),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str) -> None:
    error, message, groups, fields = REJECTED[case]
    config = ours.OptimizersContainer.Config(
        param_groups=[] if groups is None else groups or [group()], **fields
    )
    with pytest.raises(error, match=message):
        config.build(model_parts=[model()])


def without_lm_head() -> nn.Module:
    part = model()
    del part.lm_head
    return part


CHECKPOINTS: dict[str, tuple[Callable[[], nn.Module] | None, type[Exception], str]] = {
    "without optimizer": (None, ValueError, "has no 'optimizer'"),
    "of another model": (
        lambda: nn.Linear(2, 2),
        KeyError,
        r"'state\.layers\.0\.0\.bias\.step' is missing",
    ),
    "without a layer": (without_lm_head, KeyError, r"'state\.lm_head\.weight\.step' is missing"),
    "without a file": (model, RuntimeError, "reading the optimizer state: rank 0"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(case: str, tmp_path: Path) -> None:
    make, error, message = CHECKPOINTS[case]
    saved = {"optimizer": build(ours, make())} if make else {"model": nn.Linear(2, 2)}
    dcp.save(saved, checkpoint_id=tmp_path)
    if case == "without a file":
        (tmp_path / "__0_0.distcp").unlink()
    part = model()
    container = build(ours, part, *SEVERAL)
    backward(part, 0)
    container.step()
    before = values(container.state_dict())
    manager = SimpleNamespace(states={})
    with pytest.raises(error, match=message):
        CheckpointManager.dcp_load(manager, {"optimizer": container}, str(tmp_path), False, False)
    after = container.state_dict()
    assert after.keys() == before.keys()
    for key, value in before.items():
        same = torch.equal(after[key], value) if isinstance(value, torch.Tensor) else True
        assert same, key


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_masters_follow_weights_loaded_without_the_optimizer(tmp_path: Path) -> None:
    """As from a seed checkpoint, which a fault-tolerant job loads when it has made its masters."""

    def load(state_dict: dict[str, Any], folder: str) -> None:
        CheckpointManager.dcp_load(manager, state_dict, str(tmp_path / folder), False, False)

    part, seed = model(torch.bfloat16), copy.deepcopy(model(torch.bfloat16))
    with torch.no_grad():
        for param in seed.parameters():
            param.mul_(0.75)
    loader = LambdaLR(torch.optim.SGD(part.parameters()), lambda step: 1.0)  # any Stateful
    dcp.save(ModelWrapper([seed]).state_dict(), checkpoint_id=tmp_path / "seed")
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "loader")
    container = build(ours, part, master_weights="fp32")
    container.state_dict()
    wrapper = ModelWrapper([part])
    manager = SimpleNamespace(
        states={"model": wrapper, "optimizer": container, "dataloader": loader}
    )
    load(wrapper.state_dict(), "seed")
    for g in container.param_groups:
        g["lr"] = 0.0
    backward(part, 0)
    container.step()
    assert all(map(torch.equal, part.parameters(), seed.parameters()))
    masters = [container.state[param]["master_weight"] for param in part.parameters()]
    for master in masters:
        master += 2.0**-20
    kept = copy.deepcopy(masters)
    load({"dataloader": loader}, "loader")  # of a replica group alone
    assert all(map(torch.equal, masters, kept))


def test_several_optimizers_run_a_closure_once() -> None:
    part = model()
    container = build(ours, part, *SEVERAL)
    before, calls = copy.deepcopy(part), []

    def closure() -> float:
        calls.append(backward(part, 0))
        return 2.5

    assert container.step(closure) == 2.5 and len(calls) == 1
    assert not any(map(torch.equal, part.parameters(), before.parameters()))


def test_parts_that_cannot_be_trained_are_rejected() -> None:
    frozen, meta = model().requires_grad_(False), model().to("meta")
    with pytest.raises(ValueError, match="match no trainable parameter"):
        build(ours, frozen)
    with pytest.raises(ValueError, match=r"'layers\.0\.0\.weight' of model part 1 is on the meta"):
        build(ours, [model(), meta])
    shared = model()
    with pytest.raises(ValueError, match="two optimizers would step it"):
        build(ours, [shared, shared])
    # One of several parts may be frozen, and then has no state.
    container = build(ours, [model(), frozen])
    backward(container.model_parts[0], 0)
    container.step()
    assert "state.lm_head.weight.exp_avg" in container.state_dict()


def test_a_frozen_pipeline_stage_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other stages would wait for this stage's share of the norm."""
    # Other stages have parameters.
    monkeypatch.setattr(ours, "_dtypes_everywhere", lambda *_: [{torch.float32}])
    container = build(ours, model().requires_grad_(False), *SEVERAL[:1], deferred_clipping=True)
    schedule = ours.LRSchedulersContainer.Config(warmup_steps=0)
    assert len(schedule.build(optimizers=container, training_steps=2)) == 1
    assert container.deferred_clipping.clip(1.0) == 0.0
    container.step()
    assert container.state_dict() == {}
