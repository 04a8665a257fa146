"""State dicts of FSDPadaptOptimizer: LightRFT's format, live tensors, snapshots, resuming."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ...support.compare import assert_same_bits, bits
from ...support.problems import through_file
from .training import (
    ALL,
    BF16,
    DYNAMIC,
    FP16,
    FP32,
    KINDS,
    content,
    every_base,
    ours_of,
    parameters,
    train,
    trained,
    weights_of,
)


@every_base
def test_the_format_is_lightrfts(kind: str) -> None:
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
    assert {i: [tuple(w.shape) for w in own] for i, own in weights.items()} == {
        0: [(3, 4)], 1: [(7,), (2, 70)]
    }  # fmt: skip
    assert all(w.dtype == FP32 for group in weights.values() for w in group)
    assert_same_bits(params, [w.to(BF16) for group in weights.values() for w in group])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, BF16) for kind in ALL] + [(kind, dtype) for kind in KINDS for dtype in (FP16, FP32)],
)
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_saved_optimizer_goes_on(
    kind: str, dtype: torch.dtype, steps: int, snapshot: bool
) -> None:
    """Fresh and used optimizers load a file, or a dict, of which they keep no memory."""
    params, ours = trained(kind, steps, dtype)
    saved = ours.state_dict(snapshot=snapshot)
    text = repr(saved)
    fresh, used = pairs = [trained(kind, count, dtype, seed=6) for count in (0, 3)]
    fresh[1].load_state_dict(saved)
    used[1].load_state_dict(through_file(saved))
    for others, other in pairs:
        assert content(other, others) == content(ours, params)
        train(other, others, range(50, 53))
    assert repr(saved) == text
    train(ours, params, range(50, 53))
    assert repr(saved) == text or not snapshot
    for others, other in pairs:
        assert content(other, others) == content(ours, params)


@every_base
def test_snapshots_and_live_tensors(kind: str) -> None:
    """A snapshot does not change with training; other state dicts hold the live tensors."""
    _, ours = pair = trained(kind)
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
    train(ours, pair[0], [7])
    assert [bits(t) for t in tensors(kept)] == before
    assert all(bits(now) != old for now, old in zip(tensors(live), before, strict=True))


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
@pytest.mark.parametrize("mapping", [dict, MappingProxyType, type("Own", (dict,), {})])
def test_loading_takes_other_dtypes_and_mappings(kind: str, mapping: Any) -> None:
    """The model follows the loaded masters at once, also masters saved in double."""
    params, ours = trained(kind)
    saved = ours.state_dict(snapshot=True)
    base, weights = saved["base_optim_states"], saved["flat_fp32_weights"]
    before = copy.deepcopy(base["state"])
    base["state"] = mapping({i: mapping(entry) for i, entry in base["state"].items()})
    saved["flat_fp32_weights"] = mapping({i: [w.double() for w in weights[i]] for i in weights})
    others, other = trained(kind, 1, seed=9)
    other.load_state_dict(saved)
    assert content(other, others) == content(ours, params)
    assert all(w.dtype == FP32 for w in weights_of(other))
    train(other, others, [9])
    assert repr(before) == repr({i: dict(entry) for i, entry in base["state"].items()})


@every_base
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen again"])
def test_parameters_unfrozen_late_resume_to_the_bit(kind: str, frozen: bool) -> None:
    """The resumed job may train the parameters from the start or still have them frozen."""

    def begun() -> tuple[Any, Any]:
        params = parameters()
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
    for optimizer, each in ((ours, params), (other, others)):
        train(optimizer, each, range(5, 8))
    assert content(other, others) == content(ours, params)
