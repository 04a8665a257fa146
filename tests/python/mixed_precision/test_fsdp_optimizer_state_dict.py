"""State dicts of FSDPadaptOptimizer: the replaced class's format, live tensors and snapshots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ..optim.subject import assert_same_bits, bits
from .training import (
    BASES,
    BF16,
    DYNAMIC,
    FP16,
    FP32,
    SHORT,
    content,
    ours_of,
    parameters,
    train,
    trained,
    weights_of,
)

every_base = pytest.mark.parametrize("kind", BASES)


@every_base
def test_state_dict_has_the_format_of_the_replaced_class(kind: str) -> None:
    """The keys are the scaler, the base's own state dict, and the masters by group."""
    params, ours = trained(kind)
    saved = ours.state_dict()
    assert list(saved) == ["grad_scaler", "base_optim_states", "flat_fp32_weights"]
    assert saved["grad_scaler"] == ours.grad_scaler.state_dict()
    assert saved["grad_scaler"].keys() == {"_scale", "_growth_step", "_hysteresis_step"}
    base = saved["base_optim_states"]
    assert base.keys() >= {"state", "param_groups"}
    assert [group["params"] for group in base["param_groups"]] == [[0], [1, 2]]
    assert all("master_weight" not in entry for entry in base["state"].values())
    weights = saved["flat_fp32_weights"]
    assert list(weights) == [0, 1]
    assert [[tuple(w.shape) for w in weights[i]] for i in (0, 1)] == [[(3, 4)], [(7,), (2, 70)]]
    assert all(w.dtype == FP32 for group in weights.values() for w in group)
    assert_same_bits(params, [w.to(BF16) for group in weights.values() for w in group])


@every_base
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("steps", "snapshot"), [(4, False), (4, True), (0, False)])
def test_a_saved_optimizer_goes_on(
    kind: str, dtype: torch.dtype, steps: int, snapshot: bool, tmp_path: Any
) -> None:
    """A file read with weights_only loads into fresh and used optimizers."""
    params, ours = trained(kind, steps, dtype)
    torch.save(ours.state_dict(snapshot=snapshot), tmp_path / "saved")
    loaded = torch.load(tmp_path / "saved", weights_only=True)
    pairs = [trained(kind, used, dtype, seed=6) for used in (0, 3)]
    for others, other in pairs:
        other.load_state_dict(loaded)
        skipped = float(other.skipped_steps) - float(ours.skipped_steps)
        assert_same_bits(others, params)
        assert_same_bits(weights_of(other), weights_of(ours))
        for p in others:
            assert p.grad is None
        train(other, others, range(50, 53))
        assert float(other.skipped_steps) - skipped == float(ours.skipped_steps)
    train(ours, params, range(50, 53))
    for others, other in pairs:
        assert_same_bits(others, params)
        for part in ("weights", "state", "groups", "scaler"):
            assert content(other, others)[part] == content(ours, params)[part], part


@every_base
def test_snapshots_and_live_tensors(kind: str) -> None:
    """A snapshot does not change with training; other state dicts hold the live tensors."""
    params, ours = trained(kind)
    live, kept = ours.state_dict(), ours.state_dict(snapshot=True)

    def tensors(saved: dict[str, Any]) -> list[Tensor]:
        entries = saved["base_optim_states"]["state"].values()
        moments = [v for e in entries for v in e.values() if isinstance(v, Tensor) and v.dim()]
        return [*[w for group in saved["flat_fp32_weights"].values() for w in group], *moments]

    before = [bits(t) for t in tensors(live)]
    assert [bits(t) for t in tensors(kept)] == before
    assert len(before) >= 6
    addresses = {t.untyped_storage().data_ptr() for t in tensors(live)}
    for t in tensors(kept):
        assert t.device.type == "cpu" and not t.requires_grad
        assert t.untyped_storage().data_ptr() not in addresses
    entry_steps = [
        e["step"].clone() for e in kept["base_optim_states"]["state"].values() if "step" in e
    ]
    train(ours, params, [7])
    assert [bits(t) for t in tensors(kept)] == before
    assert all(bits(now) != old for now, old in zip(tensors(live), before, strict=True))
    assert entry_steps == [
        e["step"] for e in kept["base_optim_states"]["state"].values() if "step" in e
    ]
    ours.load_state_dict(kept)
    assert_same_bits(weights_of(ours), tensors(kept)[:3])
    train(ours, params, [8])
    assert [bits(t) for t in tensors(kept)] == before  # loading copied them


@every_base
@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_loads_its_own_tensors_of_a_single_row(kind: str) -> None:
    """The state dict's view of a shard may have another stride where the size is 1."""
    shard = torch.ones(1, 9)[:, :5]
    placed = distribute_tensor(shard, init_device_mesh("cpu", (1,)), [Shard(1)])
    param = torch.nn.Parameter(placed)
    ours = ours_of(kind, [param])
    param.grad = torch.ones_like(param)
    ours.step()
    before = bits(param.to_local())
    ours.load_state_dict(ours.state_dict())
    assert bits(param.to_local()) == before


@every_base
def test_loading_takes_other_dtypes_of_the_same_values(kind: str) -> None:
    """The model follows the loaded masters at once, also masters saved in double."""
    params, ours = trained(kind)
    saved = ours.state_dict(snapshot=True)
    saved["flat_fp32_weights"] = {
        index: [w.double() for w in group] for index, group in saved["flat_fp32_weights"].items()
    }
    others, other = trained(kind, 1, seed=9)
    other.load_state_dict(saved)
    assert_same_bits(others, params)
    assert_same_bits(weights_of(other), weights_of(ours))
    assert all(w.dtype == FP32 for w in weights_of(other))


@every_base
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen again"])
def test_parameters_unfrozen_late_resume_to_the_bit(kind: str, frozen: bool) -> None:
    """The resumed job may train the parameters from the start or still have them frozen."""

    def begun() -> tuple[Any, Any]:
        params = parameters(BF16, SHORT)
        params[0].requires_grad_(False)
        return params, ours_of(kind, params, grad_scal_cfg=DYNAMIC)

    params, ours = begun()
    train(ours, params[1:], range(2))
    params[0].requires_grad_(True)
    train(ours, params, range(2, 5))
    saved = ours.state_dict(snapshot=True)
    others, other = begun()
    others[0].requires_grad_(not frozen)
    other.load_state_dict(saved)
    others[0].requires_grad_(True)
    for optimizer, mine in ((ours, params), (other, others)):
        train(optimizer, mine, range(5, 8))
    assert_same_bits(others, params)
    assert_same_bits(weights_of(other), weights_of(ours))


def test_a_state_dict_of_another_base_moves_over() -> None:
    """torch's AdamW and FusedAdamW hold the same state, so a run can switch between them."""
    params, ours = trained("AdamW-fused", 4)
    others, other = trained("FusedAdamW", 1, seed=5)
    other.load_state_dict(ours.state_dict())
    back_params, back = trained("AdamW-foreach", 1, seed=6)
    back.load_state_dict(other.state_dict())
    assert_same_bits(others, params)
    assert_same_bits(back_params, params)
    for mine in (others, back_params):
        optimizer = other if mine is others else back
        assert_same_bits(weights_of(optimizer), weights_of(ours))
        train(optimizer, mine, range(20, 24))
    train(ours, params, range(20, 24))
    for optimizer in (other, back):
        for w, v in zip(weights_of(optimizer), weights_of(ours), strict=True):
            torch.testing.assert_close(w, v, rtol=2e-6, atol=2e-7)
