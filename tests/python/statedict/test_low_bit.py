"""Moments of torchao's and bitsandbytes' optimizers load as the numbers that they represent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import assert_same, contents, unchanged

KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "fp32": lambda m: FusedAdamW(m.parameters(), state_dtype=torch.float32),
    "bf16": lambda m: FusedAdamW(m.parameters(), state_dtype=torch.bfloat16),
    "int8": lambda m: FusedAdamW(m.parameters(), state_dtype="int8"),
    "sharded": lambda m: ZeroRedundancyOptimizer(m.parameters(), FusedAdamW),
}
SAVED = Path(__file__).with_name("bitsandbytes_0_50_2.pt")
"""AdamW8bit's state dict of Linear(65, 64) after 5 steps, with float32 moments for the bias, and
the SHA-256 of the weight's moments after dequantize_blockwise."""


def decoded(value: Tensor) -> Tensor:
    return value if type(value) is Tensor else value.dequantize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theirs", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@torch.compiler.set_stance("force_eager")
def test_torchao(one_rank: None, theirs: str, kind: str) -> None:
    """torchao's moments load dequantized; a container rejects them by name."""
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Linear(256, 64)
    optimizer = getattr(torchao, theirs)(model.parameters(), lr=0.02)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    ours = KINDS[kind](model)
    saved = optimizer.state_dict()
    ours.load_state_dict(saved)
    numbers = tree_map_only(Tensor, decoded, saved["state"])
    twin = KINDS[kind](model)
    twin.load_state_dict({**saved, "state": numbers})
    assert_same(contents(ours), contents(twin))
    held: Any = OptimizersContainer([model], FusedAdamW, {})
    flat = held.state_dict() | {"state.weight.exp_avg": optimizer.state[model.weight]["exp_avg"]}
    with pytest.raises(ValueError, match=r"is of type OptimState\w+, expected a plain tensor"):
        held.load_state_dict(flat)


@torch.compiler.set_stance("force_eager")
def test_torchao_with_fsdp(one_rank: None) -> None:
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Linear(256, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torchao.AdamW8bit(model.parameters(), lr=0.02)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    ours = FSDPadaptOptimizer(FusedAdamW(model.parameters()))
    ours.load_state_dict(ours.state_dict() | {"base_optim_states": optimizer.state_dict()})
    for name in ("exp_avg", "exp_avg_sq"):
        loaded, saved = (o.state[model.weight][name].to_local() for o in (ours.optim, optimizer))
        assert_same(loaded, saved.dequantize())


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "sharded"])
def test_bitsandbytes(one_rank: None, kind: str, wrapped: bool) -> None:
    saved = torch.load(SAVED, weights_only=True)
    given, sha256 = saved["optimizer"], saved["sha256"]
    if not wrapped:  # the layout of older versions
        for entry in given["state"].values():
            entry |= entry.pop("__bnb_optimizer_quant_state__")
    model = nn.Linear(65, 64)
    ours = KINDS[kind](model)
    ours.load_state_dict(given)
    state = state_of(ours)[model.weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 5
    for name, expected in sha256.items():
        assert hashlib.sha256(state[name].numpy().tobytes()).hexdigest() == expected
    assert state_of(ours)[model.bias]["exp_avg_sq"].gt(0).all()
    assert ours.param_groups[0]["lr"] == 1e-3
    model(torch.ones(65)).sum().backward()
    ours.step()


@pytest.mark.parametrize("key", ["state1", "absmax2", "qmap1"])
def test_what_is_not_of_bitsandbytes_shapes_is_missing(key: str) -> None:
    given = torch.load(SAVED, weights_only=True)["optimizer"]
    held = given["state"][0]["__bnb_optimizer_quant_state__"]
    held[key] = held[key][1:]
    model = nn.Linear(65, 64)
    optimizer = FusedAdamW(model.parameters())
    message = r"exp_avg\w* of parameter 0 (is missing|has shape)"
    with unchanged(optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(given)


def state_of(optimizer: Any) -> Any:
    return getattr(optimizer, "optim", optimizer).state
