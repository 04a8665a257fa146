"""Moving averages of weights: bits, what skips them, validation with them, checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, FusedSGD
from torchopt_ext.containers import (
    OptimizersContainer,
    OptimizersInBackwardContainer,
    build_optimizers,
)
from torchopt_ext.state import averages

from ...support import oracle
from ...support.compare import assert_same_bits, unchanged
from ...support.problems import (
    copy_params,
    make_params,
    set_gradients,
    small_model,
    through_file,
    train,
)
from ...support.ways import BF16, FP32, KINDS, WAYS, each_way, hybrid, is_possible

SHAPES = ((3, 4), (7,), (), (0, 2), (2, 1031), (1, 33_003))
EMA = "ema_weight"


def weight_of(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Returns the exact weight that parameter and state hold."""
    if "master_weight" in state:
        return state["master_weight"].clone()
    for kind in {"remainder", "remainder8"} & state.keys():
        return oracle.floats(oracle.join(param, state[kind])).view(param.shape)
    return param.detach().clone()


def averaged(average: Tensor, weight: Tensor, decay: float) -> Tensor:
    """Returns the average after an update, computed by numpy."""
    wide = torch.float64 if average.dtype == torch.float64 else torch.float32
    m, g = (x.to(wide).numpy() for x in (average, weight))
    w = 1 - decay
    t = m.dtype.type
    return torch.from_numpy(np.asarray(m + t(w) * (g - m) if w < 0.5 else g - t(1 - w) * (g - m)))


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(k, w) for k in ("AdamW", "Lion", "Muon", "SGD, momentum") for w in WAYS if is_possible(k, w)],
)
def test_an_average_has_the_bits_of_the_formula(kind: str, way: str, decay: float) -> None:
    """docs/numerics.md section 13, whatever holds the weight."""
    params, optimizer = WAYS[way].build(kind, shapes=SHAPES, lr=0.02, ema_decay=decay)
    expected = [p.detach().clone().to(torch.promote_types(p.dtype, FP32)) for p in params]
    optimizer.init_state()
    assert_same_bits([optimizer.state[p][EMA] for p in params], expected)
    for seed in range(3):
        train(optimizer, [seed])
        weights = [weight_of(p, optimizer.state[p]) for p in params]
        expected = [averaged(e, w, decay) for e, w in zip(expected, weights, strict=True)]
        assert_same_bits([optimizer.state[p][EMA] for p in params], expected)


@pytest.mark.parametrize("way", ["fp32", "bf16, remainder, int8", "fp32, int8"])
@pytest.mark.parametrize("options", [{}, {"track": True}, {"write_back_gradients": True}])
def test_averages_change_no_other_bit(way: str, options: dict[str, Any]) -> None:
    params, plain = WAYS[way].build(shapes=SHAPES, **options)
    copies = copy_params(params)
    _, with_average = WAYS[way].build(params=copies, ema_decay=0.9, **options)
    for optimizer in (plain, with_average):
        train(optimizer, range(3))
    assert_same_bits(copies, params)
    for p, q in zip(params, copies, strict=True):
        held = {k: v for k, v in with_average.state[q].items() if k != EMA}
        assert held.keys() == plain.state[p].keys()
        assert_same_bits(held.values(), plain.state[p].values())


def test_a_bf16_average_is_rounded_up_as_often_as_it_should_be() -> None:
    """To nearest it would stay where it is: a step of 0.001 is less than half a unit."""
    param = nn.Parameter(torch.ones(1 << 16))
    optimizer = FusedSGD([param], lr=0.0, ema_decay=0.999, ema_dtype="bf16", rounding_seed=3)
    optimizer.init_state()
    with torch.no_grad():
        param.fill_(2.0)
    average = optimizer.state[param][EMA]
    assert average.dtype == BF16
    for _ in range(500):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    expected = 2 - 0.999**500
    assert average.float().mean().item() == pytest.approx(expected, abs=2e-3)
    assert 0.01 < average.float().std().item() < 0.2  # draws differ by element


def test_bits_of_a_bf16_average() -> None:
    seed = 5
    params = make_params([(5, 7), (33,)])
    optimizer = FusedAdamW(params, lr=0.1, ema_decay=0.9, ema_dtype="bf16", rounding_seed=seed)
    for step in range(1, 4):
        before = {p: optimizer.state[p].get(EMA, p.detach().to(BF16)).clone() for p in params}
        train(optimizer, [step])
        for number, p in enumerate(params):
            exact = oracle.words(averaged(before[p], p.detach(), 0.9).view(-1))
            elements = np.arange(p.numel(), dtype=np.uint64)
            drawn = oracle.draws(seed ^ 0x6A09E667F3BCC908, step, number, elements, oracle.PARAM)
            rounded = oracle.round_stochastically(exact, drawn)
            assert optimizer.state[p][EMA].view(-1).view(torch.int16).tolist() == [
                int(word) - (1 << 16 if word >= 1 << 15 else 0) for word in rounded
            ]


def test_follows_torchs_averaged_model() -> None:
    """torch.optim.swa_utils.AveragedModel, updated after every step, in the same run."""
    model, theirs = small_model(), small_model()
    averaged_model = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    averaged_model.n_averaged += 1  # begins as the weights before the first step, as ours
    ours = FusedAdamW(model.parameters(), lr=0.01, ema_decay=0.95)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    x = torch.randn(8, 2)
    for _ in range(20):
        for net, optimizer in ((model, ours), (theirs, torchs)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        averaged_model.update_parameters(theirs)
    with ours.ema_weights():
        torch.testing.assert_close(model(x), averaged_model(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(model(x), theirs(x), atol=1e-6, rtol=0)


def test_a_skipped_step_leaves_the_averages() -> None:
    params, optimizer = WAYS["bf16, remainder"].build(ema_decay=0.5, skip_nonfinite=True)
    train(optimizer, [0])
    with unchanged(params, optimizer.state):
        set_gradients(params, seed=1)
        params[0].grad[0] = math.nan
        optimizer.step()
    assert optimizer.control.skip


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_a_parameter_without_gradient_is_averaged(kind: str) -> None:
    """AveragedModel averages all parameters at each step."""
    params, optimizer = WAYS["fp32"].build(kind, shapes=[(3, 4), (5, 2)], ema_decay=0.5)
    train(optimizer, [0])
    average = optimizer.state[params[0]][EMA].clone()
    set_gradients(params, seed=1)
    params[0].grad = None
    optimizer.step()
    expected = averaged(average, params[0].detach(), 0.5)
    assert_same_bits([optimizer.state[params[0]][EMA]], [expected])


def test_averages_follow_weights_that_a_program_writes() -> None:
    params, optimizer = WAYS["bf16, master"].build(ema_decay=0.5)
    train(optimizer, [0])
    average = optimizer.state[params[0]][EMA].clone()
    with torch.no_grad():
        params[0].fill_(3.0)
    train(optimizer, [1])
    expected = averaged(average, optimizer.state[params[0]]["master_weight"], 0.5)
    assert_same_bits([optimizer.state[params[0]][EMA]], [expected])


def test_warmup_is_that_of_diffusers() -> None:
    """EMAModel.get_decay: step 0 takes the weights, then (1 + t) / (10 + t), at most the decay."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = FusedSGD([param], lr=1.0, ema_decay=0.3, ema_warmup=True, skip_nonfinite=True)
    expected = 0.0
    for t in range(8):
        if t == 3:
            param.grad = torch.full_like(param, math.nan)  # does not count
            optimizer.step()
        param.grad = torch.full_like(param, -1.0)
        optimizer.step()
        decay = min(0.3, (1 + t) / (10 + t)) if t else 0.0
        expected = decay * expected + (1 - decay) * param[0].item()
        assert optimizer.state[param][EMA][0].item() == pytest.approx(expected, rel=1e-6)


def test_the_decay_may_follow_a_schedule() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedSGD([param], lr=1.0, ema_decay=0.0)
    expected = 0.0
    for step in range(5):
        optimizer.ema_decay = decay = 1 - 1 / (step + 2)
        assert optimizer.ema_decay == decay
        param.grad = torch.full_like(param, -1.0)
        optimizer.step()
        expected = decay * expected + (1 - decay) * (step + 1)
        assert optimizer.state[param][EMA][0].item() == pytest.approx(expected, rel=1e-6)


def test_averages_may_begin_and_end_between_steps() -> None:
    params, optimizer = WAYS["bf16, master"].build()
    train(optimizer, [0])
    assert optimizer.ema_decay is None
    optimizer.ema_decay = 0.9
    masters = [optimizer.state[p]["master_weight"].clone() for p in params]
    train(optimizer, [1])
    for p, before in zip(params, masters, strict=True):
        state = optimizer.state[p]
        assert_same_bits([state[EMA]], [averaged(before, state["master_weight"], 0.9)])
    optimizer.ema_decay = None
    train(optimizer, [2])
    assert all(EMA not in optimizer.state[p] for p in params)


@each_way
def test_ema_weights_gives_the_averages_and_takes_them_back(way: str) -> None:
    params, optimizer = WAYS[way].build(shapes=SHAPES, ema_decay=0.7)
    train(optimizer, range(3))
    averages = [optimizer.state[p][EMA].clone() for p in params]
    memory = [p.data_ptr() for p in params]
    with unchanged(params, optimizer.state):
        with optimizer.ema_weights():
            expected = [e.to(p.dtype) for e, p in zip(averages, params, strict=True)]
            assert_same_bits(params, expected)
            assert [p.data_ptr() for p in params] == memory
        with pytest.raises(KeyError), optimizer.ema_weights():
            raise KeyError
    copies = copy_params(params)
    _, other = WAYS[way].build(params=copies, ema_decay=0.7)
    other.load_state_dict(optimizer.state_dict())
    with optimizer.ema_weights():
        pass
    for each in (optimizer, other):
        train(each, [3])
    assert_same_bits(copies, params)


def test_fp32_weights_change_places_with_averages_without_a_copy() -> None:
    """No memory of the size of the model is taken, also where storage is not dense."""
    params = [nn.Parameter(torch.randn(3 << 20)), nn.Parameter(torch.randn(4, 6)[:, ::2])]
    optimizer = FusedAdamW(params, ema_decay=0.9)
    train(optimizer, [0])
    averages = [optimizer.state[p][EMA].clone() for p in params]
    with torch.profiler.profile(profile_memory=True) as profile, optimizer.ema_weights():
        assert_same_bits(params, averages)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 4 << 20


def test_rejections_within_the_block() -> None:
    params, optimizer = WAYS["fp32"].build(ema_decay=0.9)
    train(optimizer, [0])
    set_gradients(params)
    state = copy.deepcopy(optimizer.state_dict())
    with optimizer.ema_weights():
        for call in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state),
            lambda: copy.deepcopy(optimizer),
            lambda: pickle.dumps(optimizer),
            lambda: optimizer.move_state("cpu"),
            lambda: optimizer.scale_(params[0], torch.ones(1)),
            optimizer.refresh_masters,
            lambda: optimizer.refresh_masters({p: p.detach().float() for p in params}),
            lambda: optimizer.ema_weights().__enter__(),
            lambda: optimizer.load_ema({}),
        ):
            with pytest.raises(RuntimeError, match="leave the block of ema_weights"):
                call()
    optimizer.step()
    _, plain = WAYS["fp32"].build()
    with pytest.raises(RuntimeError, match="without ema_decay="), plain.ema_weights():
        pass


@pytest.mark.parametrize("wrong", [None, torch.zeros(5), torch.zeros(7, dtype=torch.int32), "room"])
def test_weights_stay_where_an_average_does_not_fit(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or memory ends. So do those that come before it."""
    params, optimizer = WAYS["fp32"].build(shapes=[(3, 4), (7,)], ema_decay=0.9)
    train(optimizer, [0])
    swap = averages._swap

    def ends(param: Tensor, average: Tensor) -> None:
        if param is params[1]:
            raise torch.OutOfMemoryError
        swap(param, average)

    if isinstance(wrong, str):
        monkeypatch.setattr(averages, "_swap", ends)
    else:
        optimizer.state[params[1]][EMA] = wrong
    with (
        unchanged(params, [optimizer.state[params[0]]]),
        pytest.raises((ValueError, torch.OutOfMemoryError), match=r"^$|the average of a weight"),
        optimizer.ema_weights(),
    ):
        pass


def test_a_block_with_tensors_of_inference_mode() -> None:
    params, optimizer = WAYS["fp32"].build(shapes=[(3, 4), (7,)], ema_decay=0.9)
    train(optimizer, [0])
    with torch.inference_mode():
        optimizer.state[params[1]][EMA] = optimizer.state[params[1]][EMA].clone()
    with unchanged(params, optimizer.state):
        with torch.inference_mode(), optimizer.ema_weights():
            pass
        with pytest.raises(RuntimeError, match="made in inference mode"), optimizer.ema_weights():
            pass


def test_weights_come_back_where_two_have_one_average() -> None:
    params, optimizer = WAYS["fp32"].build(shapes=[(7,), (7,)], ema_decay=0.9)
    train(optimizer, [0])
    optimizer.state[params[0]][EMA] = optimizer.state[params[1]][EMA]
    with unchanged(params, optimizer.state), optimizer.ema_weights():
        pass
    optimizer.state[params[1]][EMA] = torch.zeros(1).expand(7)
    with unchanged(params), pytest.raises(RuntimeError), optimizer.ema_weights():
        pass


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_gathers_what_a_block_changes() -> None:
    """After a forward without backward FSDP2 would use the root's gathered parameters again."""
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = FusedAdamW(model.named_parameters(), lr=0.1, ema_decay=0.5)
    x = torch.ones(4, 2)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = small_model()
    for p, q in zip(plain.parameters(), optimizer.param_groups[0]["params"], strict=True):
        p.data.copy_(optimizer.state[q][EMA].full_tensor())
    with torch.no_grad():
        before = model(x)
        with optimizer.ema_weights():
            assert_same_bits([model(x)], [plain(x)])
        assert_same_bits([model(x)], [before])


@pytest.mark.usefixtures("second_of_two_ranks")
def test_fsdp1_is_rejected() -> None:
    """Its root keeps gathered parameters, too, and no optimizer can find them."""
    param: Any = nn.Parameter(torch.ones(3))
    param._fsdp_flattened = True
    optimizer = FusedAdamW([param], ema_decay=0.9)
    with pytest.raises(ValueError, match="with fully_shard"), optimizer.ema_weights():
        pass


@each_way
def test_a_state_dict_continues_the_averages(way: str) -> None:
    """And the warmup of their decay."""
    params, optimizer = WAYS[way].build(ema_decay=0.8, ema_warmup=True)
    train(optimizer, range(3))
    saved = through_file(optimizer.state_dict())
    copies = copy_params(params)
    _, loaded = WAYS[way].build(params=copies, ema_decay=0.8, ema_warmup=True)
    loaded.load_state_dict(saved)
    for each in (optimizer, loaded, pickle.loads(pickle.dumps(optimizer))):
        train(each, [3])
    assert_same_bits(
        [loaded.state[q][EMA] for q in copies], [optimizer.state[p][EMA] for p in params]
    )


def test_state_dicts_with_and_without_averages() -> None:
    params, with_average = WAYS["bf16, master"].build(ema_decay=0.8)
    train(with_average, range(2))
    copies = copy_params(params)
    _, plain = WAYS["bf16, master"].build(params=copies)
    plain.load_state_dict(with_average.state_dict())
    train(plain, [2])
    assert all(EMA not in plain.state[q] for q in copies)
    others = copy_params(copies)
    _, again = WAYS["bf16, master"].build(params=others, ema_decay=0.8)
    again.load_state_dict(plain.state_dict())
    train(again, [3])
    for q, p in zip(others, copies, strict=True):
        before, after = plain.state[p]["master_weight"], again.state[q]["master_weight"]
        assert_same_bits([again.state[q][EMA]], [averaged(before, after, 0.8)])


def test_torchs_adamw_loads_the_state() -> None:
    """An entry that torch does not know stays in its state."""
    params, optimizer = WAYS["fp32"].build(ema_decay=0.8)
    train(optimizer, range(2))
    torchs = torch.optim.AdamW(copy_params(params))
    torchs.load_state_dict(optimizer.state_dict())
    train(torchs, [2])
    copies = copy_params(torchs.param_groups[0]["params"])
    _, back = WAYS["fp32"].build(params=copies, ema_decay=0.8)
    back.load_state_dict(torchs.state_dict())
    assert_same_bits(
        [back.state[q][EMA] for q in copies], [optimizer.state[p][EMA] for p in params]
    )


def _sources() -> dict[str, Any]:
    def averaged_model(model: nn.Module) -> Any:
        return AveragedModel(model).state_dict()

    def diffusers(model: nn.Module) -> Any:
        shadow = [p.detach().clone() for p in model.parameters()]
        return {"decay": 0.99, "optimization_step": 7, "shadow_params": shadow}

    return {"torch": averaged_model, "diffusers": diffusers, "names": lambda m: m.state_dict()}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("source", _sources())
def test_averages_of_others_are_loaded(source: str, named: bool) -> None:
    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = copy.deepcopy(other).to(BF16)
    params: Any = model.named_parameters() if named else model.parameters()
    optimizer = FusedAdamW(params, master_weights="remainder", ema_decay=0.9)
    given = {} if named else {"model": model}
    optimizer.load_ema(_sources()[source](other), **given)
    assert_same_bits([optimizer.state[p][EMA] for p in model.parameters()], other.parameters())


def test_averages_that_do_not_fit_are_listed() -> None:
    model = small_model()
    optimizer = FusedAdamW(model.named_parameters(), ema_decay=0.9)
    source = {"0.weight": torch.zeros(5, 2), "0.bias": torch.zeros(3), "2.bias": torch.zeros(1)}
    with (
        unchanged(optimizer.state),
        pytest.raises(
            ValueError, match=r"0.weight has shape \(5, 2\), expected \(3, 2\); 2.weight"
        ),
    ):
        optimizer.load_ema(source)
    with pytest.raises(ValueError, match="2 averages in 'shadow_params', expected 4"):
        optimizer.load_ema({"shadow_params": [torch.zeros(1)] * 2})
    with pytest.raises(TypeError, match="of type list, expected a state dict"):
        optimizer.load_ema([torch.zeros(1)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give load_ema"):
        FusedAdamW(model.parameters(), ema_decay=0.9).load_ema(model.state_dict())


def test_averages_of_frozen_parameters_may_be_missing() -> None:
    model = small_model()
    params = [*model.parameters()]
    optimizer = FusedAdamW(model.named_parameters(), ema_decay=0.9)
    train(optimizer, [0])
    kept = [optimizer.state[p][EMA].clone() for p in params[:2]]
    source = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for p in params[:2]:
        p.requires_grad_(requires_grad=False)
    del source["0.weight"]
    source["0.bias"] = torch.ones(1)
    optimizer.load_ema(source)
    expected = [*kept, *(torch.ones_like(p) for p in params[2:])]
    assert_same_bits([optimizer.state[p][EMA] for p in params], expected)


@pytest.mark.parametrize("value", [torch.zeros(1, device="meta"), torch.zeros(1).to(torch.cfloat)])
def test_averages_without_usable_values_are_listed(value: Tensor) -> None:
    model = small_model()
    optimizer = FusedAdamW(model.named_parameters(), ema_decay=0.9)
    with unchanged(optimizer.state), pytest.raises(ValueError, match=r"2.bias is torch"):
        optimizer.load_ema({**model.state_dict(), "2.bias": value})


def test_names_of_compiled_modules_fit() -> None:
    model = small_model()
    compiled = torch.compile(model, backend="eager")
    for one, other in ((model, compiled), (compiled, model)):
        optimizer = FusedAdamW(one.named_parameters(), ema_decay=0.9)
        optimizer.load_ema(other.state_dict())
        optimizer.load_ema(AveragedModel(other).state_dict())


def test_a_mixed_optimizer_averages_all_its_parameters() -> None:
    params, optimizer = hybrid(ema_decay=0.9)
    expected = [p.detach().clone() for p in params]
    for seed in range(2):
        train(optimizer, [seed])
        expected = [averaged(e, p.detach(), 0.9) for e, p in zip(expected, params, strict=True)]
    assert_same_bits([optimizer.state[p][EMA] for p in params], expected)


@pytest.mark.parametrize("container", [OptimizersContainer, OptimizersInBackwardContainer])
def test_containers_average_and_save_by_name(container: Any) -> None:
    def built() -> tuple[nn.Module, Any]:
        model = small_model()
        options = {"lr": 0.01, "ema_decay": 0.9}
        return model, container([model], FusedAdamW, options)

    x = torch.ones(4, 2)

    def step(model: nn.Module, optimizers: Any) -> None:
        model(x).square().sum().backward()
        optimizers.step()
        optimizers.zero_grad()

    model, optimizers = built()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        step(model, optimizers)
        for name, p in model.named_parameters():
            expected[name] = averaged(expected[name], p.detach(), 0.9)
    saved = through_file(optimizers.state_dict())
    held = {name: saved[f"state.{name}.{EMA}"] for name in expected}
    assert_same_bits(held.values(), expected.values())
    with optimizers.ema_weights():
        assert_same_bits(model.parameters(), expected.values())
    again, loaded = built()
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved)
    for pair in ((model, optimizers), (again, loaded)):
        step(*pair)
    one, other = optimizers.state_dict(), loaded.state_dict()
    assert_same_bits(
        [other[f"state.{n}.{EMA}"] for n in held], [one[f"state.{n}.{EMA}"] for n in held]
    )


def test_a_container_begins_missing_averages_as_the_loaded_weights() -> None:
    """Its state dict, which loaders take first, has made averages of the weights before."""
    model, other = small_model(), small_model()
    saved = OptimizersContainer([model], FusedAdamW, {"lr": 0.01})
    train(saved, [0])
    for p in other.parameters():
        p.data.fill_(9.0)
    loaded = OptimizersContainer([other], FusedAdamW, {"lr": 0.01, "ema_decay": 0.9})
    loaded.state_dict()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved.state_dict())
    train(loaded, [1])
    held = loaded.state_dict()
    for (name, before), p in zip(model.named_parameters(), other.parameters(), strict=True):
        expected = averaged(before.detach(), p.detach(), 0.9)
        assert_same_bits([held[f"state.{name}.{EMA}"]], [expected])


@pytest.mark.usefixtures("params_on_gpu")
def test_new_states_on_the_host_leave_averages() -> None:
    params = make_params([(3, 4), (7,)])
    optimizer = FusedAdamW(params[:1], ema_decay=0.9, state_device="cpu")
    train(optimizer, range(2))
    optimizer.add_param_group({"params": params[1:]})
    with unchanged(optimizer.state[params[0]]):
        optimizer.init_state()


@pytest.mark.parametrize("kind", [k for k in KINDS if "," not in k])
def test_estimate_counts_averages(kind: str) -> None:
    params, optimizer = WAYS["fp32"].build(kind, shapes=[(64, 32)], ema_decay=0.9, ema_dtype="bf16")
    optimizer.init_state()
    (rank,) = type(optimizer).estimate(
        params, algorithm=kind.lower(), ema_decay=0.9, ema_dtype=BF16
    )
    (plain,) = type(optimizer).estimate(params, algorithm=kind.lower())
    assert rank.averages == optimizer.state[params[0]][EMA].nbytes
    assert rank.held - plain.held == rank.averages
    assert rank.moved - plain.moved == 2 * rank.averages + params[0].nbytes


def test_a_decay_of_0_is_shown_and_not_lost() -> None:
    params = make_params([(3, 4)])
    optimizer = FusedAdamW(params, ema_decay=0.0)
    assert "\nema_decay: 0.0\n" in repr(optimizer)
    with pytest.raises(ValueError, match=r"those of a FusedAdamW with \{'ema_decay': 0.0\}"):
        FusedAdamW(optimizer.param_groups)
    wrapped = FSDPadaptOptimizer(optimizer, clip_grad_norm=0.5)
    assert (
        "FSDPadaptOptimizer (\nclip_grad_norm: 0.5\nmaster_weights: fp32\nema_decay: 0.0\nParam"
        in repr(wrapped)
    )


def test_containers_show_and_read_a_decay_of_0() -> None:
    options = {"ema_decay": 0.0, "max_grad_norm": 2.0}
    model = nn.Linear(3, 2)
    container = OptimizersContainer([model], FusedAdamW, options)
    shown = "(\nmax_grad_norm: 2.0\nema_decay: 0.0\nParameter Group 0"
    assert f"OptimizersContainer {shown}" in repr(container)
    config = SimpleNamespace(
        name="AdamW", implementation="fused", lr=0.1, eps=1e-8, early_step_in_backward=False,
        **options,
    )  # fmt: skip
    dims = SimpleNamespace(pp_enabled=False, ep_enabled=False)
    built = build_optimizers([model], config, dims)
    assert built.ema_decay == 0.0
