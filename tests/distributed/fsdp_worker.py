"""Cases of test_workers.py: training with and without low-precision copies of shards."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parent))

from tests.support.compare import difference
from tests.support.ranks import run_cases
from torchopt_ext import FusedAdamW, FusedLion, FusedSGD
from torchopt_ext.fsdp import keep_low_precision_shards

STEPS = 4
Change = Callable[[nn.Module, int], object]


def model_of(mesh_shape: tuple[int, ...], reshard: bool, dtype: torch.dtype) -> nn.Module:
    """Returns a model with uneven shards, a single row (none on rank 1) and a frozen layer."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(9, 6),
        nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 9)),
    )
    model[1][2].requires_grad_(False)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (model[1], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no AVG
    return model


def optimizers_of(
    model: nn.Module, several: bool = False, cls: Any = FusedAdamW, **options: Any
) -> list[Any]:
    named = list(model.named_parameters())
    lists = [named[::2], named[1::2]] if several else [named]
    return [cls(params, lr=0.05, **options) for params in lists]


def backward(model: nn.Module, step: int, batches: int) -> list[str]:
    """Runs backward for the batches of a step and returns their losses."""
    losses = []
    for batch in range(batches):
        if batches > 1 and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(batch + 1 == batches)
        generator = torch.Generator().manual_seed(100 * step + 10 * batch + dist.get_rank())
        tokens = torch.randint(9, (8,), generator=generator)
        loss = cross_entropy(model(tokens).float(), tokens.roll(1))
        (loss / batches).backward()
        losses.append(loss.item().hex())
    return losses


def shards(model: nn.Module) -> list[Tensor]:
    return [param._local_tensor for param in model.parameters()]


def wrong_copies(model: nn.Module) -> list[str]:
    """Returns the names of parameters whose copies differ from FSDP2's cast."""
    return [
        name
        for name, param in model.named_parameters()
        for shard in [param._local_tensor]
        if param.requires_grad
        and difference(shard.low_precision_copy, shard.detach().to(shard.low_precision_copy.dtype))
    ]


class Casts(TorchDispatchMode):
    """Counts shards that all-gathers cast."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            self.count += 1
        if func is torch.ops.aten._foreach_copy_.default:  # FSDP2's own casts
            self.count += len(args[0])
        return func(*args, **(kwargs or {}))


def train(
    keep_at: int | None,
    change: Change | None,
    *,
    mesh: tuple[int, ...] = (2,),
    reshard: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    batches: int = 1,
    several: bool = False,
    nan_at: int | None = None,
    torchs: dict[str, bool] | None = None,
    compiled: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Returns losses, weights and state after a few steps, and the number of casts in each step.

    Args:
        keep_at: the step before which copies are made. None makes no copies.
        change: called with the model and the step's number before every step.
    """
    model = model_of(mesh, reshard, dtype)
    optimizers: list[Any] = optimizers_of(model, several, **options)
    if torchs is not None:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, **torchs)]
    run: Any = model
    if compiled == "whole":
        run = torch.compile(model, backend="eager")
    for module in model if compiled == "layers" else ():
        module.forward = torch.compile(module.forward, backend="eager")
    losses, cast = [], []
    for step in range(STEPS):
        if step == keep_at:
            keep_low_precision_shards(model)
        if change is not None:
            change(model, step)
        with Casts() as casts:
            losses += backward(run, step, batches)
        cast.append(casts.count)
        if step == nan_at:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad._local_tensor.fill_(torch.nan)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if keep_at is not None and step >= keep_at and torchs is None:
            assert not wrong_copies(model), step
    weights = [shard.detach().clone() for shard in shards(model)]
    state = [dict(optimizer.state[p]) for optimizer in optimizers for p in optimizer.state]
    flat = [[getattr(v, "_local_tensor", v) for v in entry.values()] for entry in state]
    return {"losses": losses, "weights": weights, "state": flat, "cast": cast}


def compare(
    cast: list[int], change: Change | None = None, keep_at: int = 0, **settings: Any
) -> None:
    """Copies change no bit and stay right. All-gathers cast only after changes from outside."""
    plain = train(None, change, **settings)
    kept = train(keep_at, change, **settings)
    for key in ("losses", "weights", "state"):
        assert difference(kept[key], plain[key]) == "", key
    assert len(set(kept["losses"])) > 1
    assert kept["cast"] == cast


def at_step(change: Callable[[nn.Module], object], step: int) -> Change:
    """Returns a change that is made only before the given step."""
    return lambda model, now: change(model) if now == step else None


@torch.no_grad()
def multiply(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


@torch.no_grad()
def multiply_shards(model: nn.Module) -> None:
    torch._foreach_mul_(shards(model), 0.5)


@torch.no_grad()
def multiply_hidden(model: nn.Module) -> None:
    """Changes weights without changing their version counter, then makes the copies again."""
    for param in model.parameters():
        param.data.mul_(0.5)
    if hasattr(shards(model)[0], "low_precision_copy"):
        keep_low_precision_shards(model)


def halved(model: nn.Module) -> dict[str, Any]:
    return {name: value * 0.5 for name, value in model.state_dict().items()}


def load(model: nn.Module) -> None:
    model.load_state_dict(halved(model))


def set_state(model: nn.Module) -> None:
    set_model_state_dict(model, halved(model))


def load_dcp(model: nn.Module) -> None:
    """Loads in place into the tensors of the state dict, as trainers do."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(halved(model), checkpoint_id=folder[0])
    dcp.load(get_model_state_dict(model), checkpoint_id=folder[0])


def state_dicts() -> None:
    """State dicts with copies are those without, in types, dtypes and attributes."""
    found = []
    for keep in (False, True):
        model = model_of((2,), True, torch.bfloat16)
        (optimizer,) = optimizers_of(model)
        if keep:
            keep_low_precision_shards(model)
        backward(model, 0, 1)
        optimizer.step()
        weights = get_model_state_dict(model)
        locals_ = {name: value._local_tensor for name, value in weights.items()}
        kinds = sorted({(type(t).__name__, str(t.dtype), *vars(t)) for t in locals_.values()})
        state = get_optimizer_state_dict(model, optimizer)["state"]
        whole = {name: value.full_tensor() for name, value in model.named_parameters()}
        found.append((locals_, {key: list(value) for key, value in state.items()}, kinds, whole))
    plain, kept = found
    assert [difference(kept[i], plain[i]) for i in range(4)] == [""] * 4
    assert kept[2] == [("Tensor", "torch.float32")]


def cases() -> dict[str, Callable[[], None]]:
    frozen, every = 2 * 2, 11 * 2  # parameters that a step's two all-gathers cast
    never = [frozen] * 4
    changes = (multiply, multiply_shards, load, set_state, load_dcp)
    settings: dict[str, dict[str, Any]] = {
        "reshard": {},
        "no reshard": {"reshard": False, "cast": [2] * 4},
        # a shard is the whole parameter: another operator casts
        "replicas": {"mesh": (2, 1), "cast": [0] * 4},
        "hybrid": {"mesh": (1, 2)},
        "float16": {"dtype": torch.float16},
        "accumulation": {"batches": 3, "cast": [3 * frozen] * 4},
        "clipping": {"max_grad_norm": 0.1},
        "several optimizers": {"several": True},
        "amsgrad": {"amsgrad": True},
        "Lion": {"cls": FusedLion, "weight_decay": 0.1},
        "SGD": {"cls": FusedSGD, "momentum": 0.9},
        "rounded moments": {"state_dtype": torch.bfloat16, "stochastic_rounding": True},
        "written back": {"write_back_gradients": True, "max_grad_norm": 0.1},
        "compiled whole": {"compiled": "whole"},
        "compiled layers": {"compiled": "layers"},
        "skipped": {"skip_nonfinite": True, "nan_at": 1},
    }
    once = {"cast": [frozen, frozen, every, frozen]}
    settings |= {
        **{change.__name__: {"change": at_step(change, 2), **once} for change in changes},
        "multiply_hidden": {"change": at_step(multiply_hidden, 2)},
        "kept later": {"keep_at": 2, "cast": [every, every, frozen, frozen]},
        "changed, then skipped": {
            "change": at_step(multiply, 1), "skip_nonfinite": True, "nan_at": 1,
            "cast": [frozen, every, frozen, frozen],
        },
        **{
            f"torch's optimizer {name}": {
                "torchs": {name: True} if name else {}, "cast": [frozen, every, every, every]
            }
            for name in ("", "foreach", "fused")
        },
    }  # fmt: skip
    compared = {name: partial(compare, **{"cast": never, **s}) for name, s in settings.items()}
    return {**compared, "state dicts": state_dicts}


if __name__ == "__main__":
    run_cases(cases)
