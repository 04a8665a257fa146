"""Our containers in torchtitan 0.3, compared with torchtitan's own: the behavior of its unit tests
(tests/unit_tests/test_optimizer_param_groups.py, test_state_dict_keys.py), our options, and
rejected configurations."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import FusedAdam, FusedAdamW, FusedLion, FusedSGD

from ...support.compare import assert_same, unchanged
from ...support.host_states import count_locks

pytest.importorskip("torchtitan.components.optimizer.utils", reason="torchtitan 0.3 is not there")

from torchtitan.components import optimizer as stock
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import ParamGroupConfig

from torchopt_ext.integrations import torchtitan_0_3 as ours

FACTORY = "optimizer_factory_kwargs_by_name"
BF16_STATES = {"implementation": "fused_opt_states_bf16"}


def model(dtype=torch.float32, *, recomputes=True):
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for i in "01"})
    if recomputes:
        layers["1"] = checkpoint_wrapper(layers["1"])
    whole = nn.Module()
    whole.layers, whole.lm_head = layers, nn.Linear(4, 3, bias=False)
    return whole.to(dtype)


def backward(part, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in part.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def group(pattern=".*", name="AdamW", **options):
    return ParamGroupConfig(
        pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-2} | options
    )


def build(kind, parts, *groups, **fields):
    config = kind.OptimizersContainer.Config(param_groups=list(groups or [group()]), **fields)
    return config.build(model_parts=parts if isinstance(parts, list) else [parts])


def stepped(kind, *groups, dtype=torch.float32, steps=1, **fields):
    """Returns a container after some steps of its model."""
    container = build(kind, model(dtype), *groups, **fields)
    for step in range(steps):
        backward(container.model_parts[0], step)
        container.step()
    return container


def moments(container):
    """Returns the dtypes of the first moments of the matrices, before a first step, too."""
    for optimizer in container:
        optimizer.init_state()
    params = [p for part in container.model_parts for p in part.parameters() if p.dim() > 1]
    states = [container.state[p] for p in params]
    return [s.get("exp_avg", s.get("exp_avg_codes")).dtype for s in states]


def saved_by(container):
    return copy.deepcopy(container.state_dict())


SEVERAL = [
    group("norm|bias", weight_decay=0.0),
    group("lm_head", "Adam", lr=3e-3, betas=(0.8, 0.9)),
    group(".*", weight_decay=0.1, betas=(0.9, 0.95)),
]


# ---- groups and names ---------------------------------------------------------------------------


def test_first_pattern_that_matches_decides():
    part = model()
    adamw, adam = build(ours, part, *SEVERAL)
    assert [type(adamw), type(adam)] == [FusedAdamW, FusedAdam]
    assert [g["param_names"] for g in adam.param_groups] == [["lm_head.weight"]]
    assert adam.param_groups[0]["betas"] == (0.8, 0.9)
    vectors = [n for n, p in part.named_parameters() if n.endswith("bias")]
    assert len(adamw.param_groups[0]["params"]) == len(vectors)
    theirs = [g for optimizer in build(stock, part, *SEVERAL) for g in optimizer.param_groups]
    for found, expected in zip(adamw.param_groups + adam.param_groups, theirs, strict=True):
        settings = [{k: v for k, v in g.items() if k != "params"} for g in (found, expected)]
        assert settings[0] == settings[1]
        assert list(map(id, found["params"])) == list(map(id, expected["params"]))


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
def test_what_a_name_stands_for(name, implementation, expected):
    (optimizer,) = build(ours, model(), group(".*", name), implementation=implementation)
    assert type(optimizer) is expected


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_groups_override_the_implementation(name):
    groups = [group("bias", name, fused=False, lr=1e-3), group(".*", name, fused=False)]
    found, expected = (list(build(kind, model(), *groups)) for kind in (ours, stock))
    assert [type(o) for o in found] == [type(o) for o in expected] == [getattr(torch.optim, name)]
    for mine, their in zip(found[0].param_groups, expected[0].param_groups, strict=True):
        assert mine.keys() == their.keys()
        assert all(mine[key] == their[key] for key in mine if key != "params")
    (foreach,) = build(ours, model(), groups[0], group(".*", name), implementation="foreach")
    assert type(foreach) is getattr(torch.optim, name)
    mixed = [group("bias", f"Fused{name}"), group(".*", name, fused=False)]
    types = [type(optimizer) for optimizer in build(ours, model(), *mixed)]
    assert types == [ours.FUSED[name], getattr(torch.optim, name)]


def test_ours_takes_adamw_groups_beside_an_optimizer_of_others():
    seen = []

    def muon(groups, **arguments):
        seen.extend((g["fused"], g["foreach"]) for g in groups)
        assert arguments == {"momentum": 0.9}
        return torch.optim.Muon(groups, **arguments)

    class Mixed(ours.OptimizersContainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(ours.OptimizersContainer.Config):
            pass

        @staticmethod
        def _resolve_optimizer_factory(name):
            return {"TheirMuon": muon}[name]

    part = model()
    groups = [group(r"layers.*0\.weight", "TheirMuon", weight_decay=0.1), group()]
    config = Mixed.Config(param_groups=groups, **{FACTORY: {"TheirMuon": {"momentum": 0.9}}})
    optimizers = config.build(model_parts=[part])
    assert [type(o) for o in optimizers] == [torch.optim.Muon, FusedAdamW]
    assert seen == [(True, False)]  # the implementation, as in torchtitan
    expected = copy.deepcopy(part)
    named = dict(expected.named_parameters())
    theirs = [
        torch.optim.Muon([p for n, p in named.items() if "0.weight" in n], lr=1e-2, momentum=0.9),
        torch.optim.AdamW([p for n, p in named.items() if "0.weight" not in n], lr=1e-2),
    ]
    for seed in range(3):
        for whole in (part, expected):
            backward(whole, seed)
        for optimizer in (optimizers, *theirs):
            optimizer.step()
    both = [*part.parameters()], [*expected.parameters()]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)
    loaded = config.build(model_parts=[model()])
    loaded.load_state_dict(optimizers.state_dict())
    for found, optimizer in zip(loaded.optimizers, optimizers.optimizers, strict=True):
        assert_same([*found.state.values()], [*optimizer.state.values()])


# ---- state dicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
def test_state_dict_keys_are_stock_keys(steps):
    found, expected = {}, {}
    for kind, state in ((ours, found), (stock, expected)):
        container = build(kind, model(), *SEVERAL)
        kind.LRSchedulersContainer.Config().build(optimizers=container, training_steps=10)
        for step in range(steps):
            backward(container.model_parts[0], step)
            container.step()
        state |= saved_by(container)
    assert found.keys() == expected.keys()
    assert "state.layers.1.0.weight.exp_avg" in found  # without the names of module wrappers
    assert not any(key.endswith((".param_names", ".pattern")) for key in found)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        else:
            assert found[key] == value, key
    assert found["state.lm_head.weight.step"] == steps  # torchtitan's makes state by a step more


@pytest.mark.parametrize("kinds", [(ours, stock), (stock, ours)], ids=["to stock", "from stock"])
def test_state_crosses_bit_for_bit(kinds):
    saved = saved_by(stepped(kinds[0], *SEVERAL))
    loading = build(kinds[1], model(), *SEVERAL)
    loading.load_state_dict(copy.deepcopy(saved))
    loaded = loading.state_dict()
    assert loaded.keys() == saved.keys()
    tensors = [key for key in saved if isinstance(saved[key], torch.Tensor)]
    assert_same([loaded[key] for key in tensors], [saved[key] for key in tensors])


def test_state_before_the_first_step_counts_no_step():
    early, late = (build(ours, model(), *SEVERAL) for _ in range(2))
    early.load_state_dict(saved_by(early))  # as a fault-tolerant job and every load do
    for container in (early, late):
        backward(container.model_parts[0], 0)
        container.step()
    assert early.state_dict()["state.lm_head.weight.step"] == 1
    assert_same(early.model_parts[0].state_dict(), late.model_parts[0].state_dict())


def test_param_groups_of_the_container_follow_the_schedule():
    container = build(ours, model(), *SEVERAL)
    config = ours.LRSchedulersContainer.Config(warmup_steps=2)
    schedulers = config.build(optimizers=container, training_steps=10)
    assert [g["lr"] for g in container.param_groups] == [5e-3, 5e-3, 1.5e-3]
    backward(container.model_parts[0], 0)
    container.step()
    schedulers.step()
    assert [g["lr"] for g in container.param_groups] == [1e-2, 1e-2, 3e-3]


# ---- hooks and closures -------------------------------------------------------------------------


def test_a_hook_and_a_closure_run_once_a_step():
    part = model()
    container = build(ours, part, *SEVERAL)
    before, calls, fired = copy.deepcopy(part), [], []
    container.register_step_post_hook(lambda *_: fired.append(part.lm_head.weight.sum().item()))

    def closure():
        calls.append(backward(part, 0))
        return 2.5

    assert container.step(closure) == 2.5 and len(calls) == 1
    assert not any(map(torch.equal, part.parameters(), before.parameters()))
    assert fired == [part.lm_head.weight.sum().item()]


@pytest.mark.parametrize("kind", [ours, stock], ids=["ours", "stock"])
def test_expert_biases_move_before_the_step(kind):
    part, counts = model(recomputes=False), torch.tensor([3.0, 1.0, 2.0, 2.0])
    for block in part.layers.values():
        block.moe_enabled = True
        block.moe = nn.Module()
        block.moe.load_balance_coeff = 0.1
        block.moe.register_buffer("tokens_per_expert_E", counts.clone())
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
            block.moe.tokens_per_expert_E.copy_(counts)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["fields", "by name"])
def test_every_option_reaches_the_optimizer(by_name):
    fields = {
        "max_grad_norm": 0.5,
        "skip_nonfinite": True,
        "master_weights": "remainder",
        "state_dtype": "bfloat16",
        "stochastic_rounding": True,
        "rounding_seed": 3,
        "write_back_gradients": True,
        "track": ["norms"],
    }
    settings = {FACTORY: {"FusedAdamW": fields}} if by_name else fields
    (optimizer,) = build(ours, model(torch.bfloat16), group(".*", "FusedAdamW"), **settings)
    expected = fields | {"state_dtype": torch.bfloat16, "track": ("norms",)}
    assert {name: getattr(optimizer._options, name) for name in fields} == expected


@pytest.mark.parametrize("by_name", [False, True], ids=["fields", "by name"])
def test_states_lie_on_the_host(by_name, params_on_gpu, monkeypatch):
    """The optimizers of all groups lock memory together, and the fraction counts over all."""
    locks = count_locks(monkeypatch)
    groups = [group("lm_head", "Adam"), group(".*", "AdamW")]
    fields = {"state_device": "cpu", "state_fraction": 0.75}
    settings = {FACTORY: {"Adam": fields, "AdamW": fields}} if by_name else fields
    part = model()
    container = build(ours, part, *groups, **settings)
    (count,) = {*locks}
    assert len(locks) == 2 and 0 < count < len(list(part.parameters()))
    backward(part, 0)
    container.step()
    assert len(locks) == 2
    fraction = container.host_bytes / sum(8 * p.numel() for p in part.parameters())
    assert 0.75 <= fraction < 1.0
    container.move_state("cuda")
    assert container.host_bytes == 0


EMBEDDED, INT8 = [torch.float32, torch.int8], [torch.int8, torch.float32]
ROUNDING = {"state_dtype": "int8", "stochastic_rounding": True}
OTHER = {"rounding_seed": 3, "fp32_moments": []}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state_dtype": "int8"}, EMBEDDED),
        ({"state_dtype": "int8", "fp32_moments": []}, [torch.int8] * 2),
        ({"state_dtype": "int8", "fp32_moments": [r"^body\.w"]}, INT8),
        ({FACTORY: dict.fromkeys(("AdamW", "Adam"), ROUNDING | OTHER)}, [torch.int8] * 2),
        # Each option has an effect on one of the two optimizers, although not on both.
        ({FACTORY: {"AdamW": ROUNDING | OTHER}}, INT8),
        ({FACTORY: {"AdamW": ROUNDING}} | OTHER, INT8),
        (
            {FACTORY: {"Adam": {"state_dtype": "float32", "stochastic_rounding": False}}}
            | ROUNDING
            | OTHER,
            INT8,
        ),
    ],
)
def test_arguments_of_a_name_and_fields_complete_each_other(fields, expected):
    part = nn.ModuleDict({"tok": nn.Embedding(9, 64), "body": checkpoint_wrapper(nn.Linear(64, 9))})
    container = build(ours, part, group("tok"), group(".*", "Adam"), **fields)
    assert moments(container) == expected


def test_bf16_states_are_rounded_and_stay_bf16():
    """Compares with a formula, as torch's fused CPU kernel does not support bf16 states."""
    part = model()
    container = build(ours, part, group(weight_decay=0.1), **BF16_STATES)
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
    torch.testing.assert_close(
        [p.detach() for p in part.parameters()], weights, rtol=1e-3, atol=1e-4
    )
    saved = saved_by(container)
    names = [k for k in saved if k.endswith(("exp_avg", "exp_avg_sq"))]
    assert {saved[key].dtype for key in names} == {torch.bfloat16}
    resumed = build(ours, model(), **BF16_STATES)
    resumed.load_state_dict(saved)
    loaded = resumed.state_dict()
    assert_same([loaded[key] for key in names], [saved[key] for key in names])


@pytest.mark.parametrize("option", [{"master_weights": "fp32"}, {"stochastic_rounding": True}])
def test_an_option_is_judged_by_the_parameters_that_it_is_for(option):
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


def test_pipeline_stages_judge_options_together(monkeypatch):
    """A stage that raised alone would leave the others waiting in the collective."""
    sent = []

    def all_gather_json(value, *_):
        sent.append(value)
        return sent

    monkeypatch.setattr(ours, "all_gather_json", all_gather_json)
    for _ in range(2):
        with pytest.raises(ValueError, match="master_weights has no effect"):
            build(ours, model(), master_weights="fp32")
    assert len(sent) == 2
    build(ours, model(torch.bfloat16), master_weights="fp32")
    build(ours, model(), master_weights="fp32")  # the other stage has bfloat16


# ---- what is rejected ---------------------------------------------------------------------------

FOREACH, INT8_STATES = {"implementation": "foreach"}, {"state_dtype": "int8"}
CLIPPED = {FACTORY: {"AdamW": {"max_grad_norm": 1.0}}}
NOT_FUSED = r"optimizer_kwargs\['fused'\] is False .* "
REJECTED = [
    ("skip_nonfinite.* no effect", [], {"skip_nonfinite": True, **FOREACH}),
    ("state_dtype.* no effect", [group(".*", "Shampoo")], BF16_STATES),
    ("contradicts", [], BF16_STATES | {"state_dtype": "float32"}),
    ("'foreach' would have no effect", [group(".*", "FusedAdamW")], FOREACH),
    ("not clip", [], {"write_back_gradients": True}),
    ("rounding_seed", [], {"rounding_seed": 3}),
    ("AdamW: rounding_seed", [], {FACTORY: {"AdamW": {"rounding_seed": 3}}}),
    ("AdamW: fp32_moments .* no", [], {FACTORY: {"AdamW": {"fp32_moments": ["lm_head"]}}}),
    ("no effect", [], {"fp32_moments": ["lm_head"]}),
    ("no parameter has a name with 'tok'", [], {**INT8_STATES, "fp32_moments": ["tok"]}),
    ("master_weights has no effect", [], {"master_weights": "fp32"}),
    (r"\['Adam'\]", [], {FACTORY: {"Adam": {}}}),  # arguments of nobody
    ("'router'", [group("router"), group()], {}),
    (r"before them: \['bias'\]", [group(), group("bias")], {}),
    ("max_grad_norm", [group(max_grad_norm=1.0)], {}),
    ("always fused", [group(".*", "FusedAdamW", fused=False)], {}),
    ("always fused", [group(foreach=True)], {}),
    (f"{NOT_FUSED}'AdamW', but not in all .* 'FusedAdamW'", [group("1", fused=False), group()], {}),
    (f"{NOT_FUSED}needs a fused step", [group(fused=False)], BF16_STATES),
    ("one decision", [group("lm_head", "Adam"), group()], CLIPPED),
    ("max_grad_norm: -1", [], {"max_grad_norm": -1.0}),
    ("max_grad_norm is 1.0", [], {"deferred_clipping": True, "max_grad_norm": 1.0}),
    ("AdamW, whose step cannot clip", [], {"deferred_clipping": True, **FOREACH}),
]
OTHERS = [
    (NotImplementedError, "RMSprop", [group(".*", "RMSprop")], {}),
    (AssertionError, "'quick'", [], {"implementation": "quick"}),
    (AssertionError, "lm_head.weight", [group("layers")], {}),
    (AssertionError, "lm_head", None, {}),
    (TypeError, "speed", [], {FACTORY: {"AdamW": {"speed": 1}}}),
]


@pytest.mark.parametrize(
    ("error", "message", "groups", "fields"), [*((ValueError, *case) for case in REJECTED), *OTHERS]
)
def test_rejected(error, message, groups, fields):
    config = ours.OptimizersContainer.Config(
        param_groups=[] if groups is None else groups or [group()], **fields
    )
    with pytest.raises(error, match=message):
        config.build(model_parts=[model()])


def without_lm_head():
    part = model()
    del part.lm_head
    return part


CHECKPOINTS = {
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
def test_a_checkpoint_that_does_not_fit_changes_nothing(case, tmp_path):
    make, error, message = CHECKPOINTS[case]
    saved = {"optimizer": build(ours, make())} if make else {"model": nn.Linear(2, 2)}
    dcp.save(saved, checkpoint_id=tmp_path)
    if case == "without a file":
        (tmp_path / "__0_0.distcp").unlink()
    container, manager = stepped(ours, *SEVERAL), SimpleNamespace(states={})
    with unchanged(container), pytest.raises(error, match=message):
        CheckpointManager.dcp_load(manager, {"optimizer": container}, str(tmp_path), False, False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["fp32", "remainder"])
def test_masters_follow_weights_loaded_without_the_optimizer(tmp_path, kind):
    """As from a seed checkpoint, which a fault-tolerant job loads when it has made its masters."""

    def load(state_dict, folder):
        CheckpointManager.dcp_load(manager, state_dict, str(tmp_path / folder), False, False)

    seed = model(torch.bfloat16)
    with torch.no_grad():
        for param in seed.parameters():
            param.mul_(0.75)
    container = stepped(ours, dtype=torch.bfloat16, master_weights=kind)
    (part,) = container.model_parts
    loader = LambdaLR(torch.optim.SGD(part.parameters()), lambda step: 1.0)  # any Stateful
    dcp.save(ModelWrapper([seed]).state_dict(), checkpoint_id=tmp_path / "seed")
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "loader")
    wrapper = ModelWrapper([part])
    manager = SimpleNamespace(
        states={"model": wrapper, "optimizer": container, "dataloader": loader}
    )
    load(wrapper.state_dict(), "seed")
    for param, expected in zip(part.parameters(), seed.parameters(), strict=True):
        state = container.state[param]
        assert torch.equal(param, expected)
        master = state["master_weight"] if kind == "fp32" else expected + state["remainder"]
        assert torch.equal(master, expected)
        state[{"fp32": "master_weight"}.get(kind, kind)] += 1
    with unchanged(container):
        load({"dataloader": loader}, "loader")  # of a replica group alone


def test_parts_that_cannot_be_trained_are_rejected():
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


def test_a_frozen_pipeline_stage_takes_part(monkeypatch):
    """Otherwise the other stages would wait for this stage's share of the norm."""
    # Other stages have parameters.
    monkeypatch.setattr(ours, "_dtypes_everywhere", lambda *_: [{torch.float32}])
    container = build(ours, model().requires_grad_(False), *SEVERAL[:1], deferred_clipping=True)
    schedule = ours.LRSchedulersContainer.Config(warmup_steps=0)
    assert len(schedule.build(optimizers=container, training_steps=2)) == 1
    assert container.deferred_clipping.clip(1.0) == 0.0
    container.step()
    assert container.state_dict() == {}
