"""If rank 1 rejects a step, both ranks raise, rank 0 names it, and nothing changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import LBFGS, SGD, AdamW
from zero_common import parameters

from tests.support.compare import contents, difference
from tests.support.problems import params_of, set_gradients
from tests.support.ranks import gathered, run_cases
from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.mixed_precision import FSDPadaptOptimizer
from torchopt_ext.optim import rejection
from torchopt_ext.zero import ZeroRedundancyOptimizer

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedAdamW": (FusedAdamW, {}),
    "clipping FusedAdamW": (FusedAdamW, {"max_grad_norm": 1.0}),
    "AdamW": (AdamW, {}),
    "SGD": (SGD, {}),
}
FAULTS = {  # by fault: a part of its kinds' names, "" for all kinds
    "argument": "",
    "closure": "",
    "hook": "",
    "shape": "",
    "sparse": "Adam",
    "setting": "Fused",
    "scaler": "Fused",
    "clip": "Fused",
    "frozen": "",
}


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Returns the name and message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def check(error: tuple[str, str]) -> None:
    """Asserts that rank 1 has raised its error, and rank 0 one that names rank 1."""
    (kind, message), rejecting = gathered(error)
    assert kind == "RuntimeError" and "rank 1 rejected the step" in message, (kind, message)
    assert rejecting[0] and "rejected the step" not in rejecting[1], rejecting


def failing() -> None:
    raise ZeroDivisionError("the closure or hook")


def with_warnings_as_errors(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


def content(optimizer: Any) -> Any:
    state = getattr(optimizer, "optim", optimizer).state.values()
    return contents([params_of(optimizer), [e for e in state if e and e.get("step")]])


def local(tensor: Any) -> Any:
    """Returns this rank's shard of a DTensor, and any other value unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spoil(optimizer: Any, params: Any, fault: str) -> Callable[[], Any]:
    """Prepares a fault and returns the call that rank 1 makes instead of a good step."""
    if fault == "hook":
        handle = optimizer.register_step_pre_hook(lambda *_: handle.remove() or failing())
    elif fault == "setting":
        optimizer.param_groups[0]["lr"] = torch.ones(2)
    elif fault == "scaler":
        optimizer.grad_scale = torch.ones(2)
    elif fault == "shape":
        params[0].data = torch.ones(1)
    elif fault in ("sparse", "clip"):
        for param in params:
            param.grad = param.detach().to_sparse()
    elif fault == "plain":
        for param in params:
            param.grad = torch.ones(param.shape)
    elif fault == "frozen":  # trainable in backward
        params[-1].grad = torch.ones_like(params[-1])
    if fault == "argument":
        return lambda: optimizer.step(nonsense=True)
    if fault == "warning":
        return partial(with_warnings_as_errors, optimizer.step)
    return partial(optimizer.step, failing) if fault == "closure" else optimizer.step


def rejected(
    optimizer: Any, params: Any, fault: str, backward: Callable[[], Any], changes: bool = False
) -> None:
    """Takes a step that rank 1 rejects, and a good step after it.

    ``changes``: the other rank may have made its part of the step.
    """
    backward()
    before, memory = content(optimizer), params[0].data
    call = spoil(optimizer, params, fault) if dist.get_rank() == 1 else optimizer.step
    check(outcome(call if fault != "clip" else lambda: optimizer.clip_grad_norm_(1.0)))
    if fault == "shape":
        params[0].data = memory
    vars(optimizer).pop("grad_scale", None)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    assert changes or difference(content(optimizer), before) == ""
    optimizer.zero_grad()
    backward()
    optimizer.step()
    assert difference(content(optimizer), before)


def of_zero(kind: str, fault: str, options: dict[str, Any]) -> None:
    cls, defaults = KINDS[kind]
    params = parameters()
    params[-1].requires_grad_(fault != "frozen")
    zero = ZeroRedundancyOptimizer(params, cls, lr=0.01, **defaults, **options)
    backward = partial(set_gradients, [p for p in params if p.requires_grad])
    # torch's AdamW finds sparse gradients in the middle of its step.
    rejected(zero, params, fault, backward, changes=(kind, fault) == ("AdamW", "sparse"))


def of_reducer(fault: str) -> None:
    """Steps with a reducer. By default, backward on rank 1 hands it a sparse gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    model[1].bias.requires_grad_(fault != "frozen")
    zero = ZeroRedundancyOptimizer(
        model.parameters(), FusedAdamW, partition="balanced", sharded_gradients=True
    )
    embedding: Any = model[0]

    def backward() -> None:
        embedding.sparse = not fault and dist.get_rank() == 1 and not embedding.sparse
        model(torch.tensor([1, 2])).sum().backward()

    rejected(zero, list(model.parameters()), fault, backward)


def of_lbfgs() -> None:
    """Steps by LBFGS while rank 1's closure fails in its second call, after ranks have agreed."""
    params = parameters([(4,), (4,)])
    zero = ZeroRedundancyOptimizer(params, LBFGS, max_iter=4)
    before, calls = content(zero), 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == 2:
            failing()
        zero.zero_grad()
        loss = torch.stack([(param - 1).square().square().sum() for param in params]).sum()
        torch.autograd.backward(loss)
        return loss

    check(outcome(lambda: zero.step(closure)))
    ZeroRedundancyOptimizer(params, SGD, lr=0.1).step(closure)  # LBFGS cannot go on by itself
    assert difference(content(zero), before)


def fails_after_the_step(kind: str, partition: str) -> None:
    """A hook of rank 1's local optimizer fails after a step; both ranks have all parameters."""
    cls, defaults = KINDS[kind]
    params = parameters()
    zero = ZeroRedundancyOptimizer(params, cls, lr=0.01, partition=partition, **defaults)
    before = contents(params)
    if dist.get_rank() == 1:
        handle = zero.optim.register_step_post_hook(lambda *_: failing())
    set_gradients(params)
    with pytest.raises(ZeroDivisionError) if dist.get_rank() == 1 else suppress(RuntimeError):
        zero.step()
    if dist.get_rank() == 1:
        handle.remove()
    for seed in (1, 2):
        assert difference([p.detach() for p in params], [p.detach() for p in before])
        first, second = gathered([param.tolist() for param in params])
        assert first == second
        before = contents(params)
        set_gradients(params, seed=seed)
        zero.step()


def of_ours(base: str, where: str, fault: str) -> None:
    """Steps FusedAdamW, or FSDPadaptOptimizer over it or AdamW, with a group or a mesh."""
    params = parameters()
    options: dict[str, Any] = {}
    if where == "group":
        options["process_group"] = dist.group.WORLD
    else:
        mesh = init_device_mesh("cpu", (2,))
        meshes = [mesh] * len(params)
        if fault == "warning":  # the norm is another on each rank, of which a step warns
            alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
            meshes = [mesh, init_device_mesh("cpu", (2,), mesh_dim_names=("c",)), alone["b"]]
        params = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            for p, mesh in zip(params, meshes, strict=False)
        ]
    if base == "FusedAdamW":
        optimizer: Any = FusedAdamW(params, lr=0.01, max_grad_norm=1.0, **options)
    else:
        inner: Any = {"adapted FusedAdamW": FusedAdamW, "adapted AdamW": AdamW}[base]
        scale = {"initial_scale": 2.0}
        optimizer = FSDPadaptOptimizer(inner(params, lr=0.01), grad_scal_cfg=scale, **options)
    first = True

    def backward() -> None:
        nonlocal first
        loss = torch.stack([local(param).square().sum() for param in params]).sum()
        if base == "FusedAdamW" or (fault == "unscaled" and first and dist.get_rank() == 1):
            loss.backward()
        else:
            optimizer.backward(loss)
        first = False

    rejected(optimizer, params, fault, backward)


@contextmanager
def as_on_a_gpu(query: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Lets the host not know the flags of a step at its end, until ``query`` says so."""
    end = SimpleNamespace(query=query, synchronize=lambda: None)
    with (
        mock.patch.object(rejection.RejectedSteps, "is_known", return_value=False),
        mock.patch.object(rejection, "sent_to_host", lambda flags: (flags.clone(), end)),
    ):
        yield


def known_later() -> None:
    """Rank 0 learns of the rejection only in its next step, which it makes before it raises."""
    params, rejects = parameters(), dist.get_rank() == 1
    optimizer = FusedAdamW(params, max_grad_norm=1.0, process_group=dist.new_group())
    optimizer.set_loss_scale(8.0)
    before = content(optimizer)
    set_gradients(params)
    answers = iter([False])  # not known at the end of the rejected step
    with as_on_a_gpu(lambda: next(answers, True)):
        first = outcome(spoil(optimizer, params, "sparse") if rejects else optimizer.step)
        changed = difference(content(optimizer), before)
        set_gradients(params, seed=1)
        second = outcome(optimizer.step)
    check(first if rejects else second)
    assert not changed and not (second if rejects else first)[0]
    control = optimizer.control
    counts = [float(c) for c in (control.steps, control.skipped_steps, control.loss_scale)]
    assert counts == [2.0, 1.0, 4.0]
    assert len(set(gathered(float(control.grad_norm)))) == 1


def scales_differ_later() -> None:
    """A gradient scaler on the rejecting rank learns nothing of the step that the other skips."""
    params, rejects = parameters(), dist.get_rank() == 1
    optimizer = FusedAdamW(params, max_grad_norm=1.0, process_group=dist.new_group())
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    set_gradients(params)
    if rejects:
        spoil(optimizer, params, "sparse")
    with as_on_a_gpu():
        error, _ = outcome(lambda: scaler.step(optimizer))
        assert bool(error) == rejects
        outcome(scaler.update)
    assert gathered(scaler.get_scale()) == [4.0, 8.0]


def adapted_scales_differ_later() -> None:
    """The same without a scaler object: a rank that does not wait goes on with half the scale."""
    params, rejects = parameters(), dist.get_rank() == 1
    inner = FusedAdamW(params, lr=0.01)
    scale = {"initial_scale": 8.0, "hysteresis": 1}
    optimizer = FSDPadaptOptimizer(inner, grad_scal_cfg=scale, process_group=dist.group.WORLD)
    optimizer.backward(torch.stack([param.square().sum() for param in params]).sum())
    if rejects:
        spoil(optimizer, params, "sparse")
    with as_on_a_gpu():
        error, _ = outcome(lambda: optimizer.step(wait=False))
    assert bool(error) == rejects
    assert gathered(float(optimizer.loss_scale)) == [4.0, 8.0]


def of_zero_on_a_gpu(kind: str, fault: str, options: dict[str, Any]) -> None:
    with as_on_a_gpu():
        of_zero(kind, fault, options)


OURS = [
    *(("FusedAdamW", "group", fault) for fault in ("setting", "scaler", "sparse")),
    ("adapted AdamW", "group", "sparse"),
    *(("FusedAdamW", "mesh", fault) for fault in ("setting", "warning")),
    *(("adapted FusedAdamW", "mesh", fault) for fault in ("setting", "unscaled")),
    *(("adapted AdamW", "mesh", fault) for fault in ("unscaled", "plain")),
]


def cases() -> dict[str, Callable[[], None]]:
    table: dict[str, Callable[[], None]] = {
        "later": known_later,
        "scaler later": scales_differ_later,
        "adapted later": adapted_scales_differ_later,
        "LBFGS": of_lbfgs,
    }
    for fault in ("", "frozen", "hook", "setting"):
        table[f"reducer, {fault}"] = partial(of_reducer, fault)
    for options in ({"parameters_as_bucket_view": True}, {"partition": "balanced"}):
        table[f"AdamW, frozen, {options}"] = partial(of_zero, "AdamW", "frozen", options)
    for kind, (fault, kinds) in product(KINDS, FAULTS.items()):
        if kinds in kind:
            given = kind, fault, {"partition": "balanced"} if fault == "shape" else {}
            table[f"{kind}, {fault}"] = partial(of_zero, *given)
            table[f"{kind}, {fault} on a GPU"] = partial(of_zero_on_a_gpu, *given)
    table |= {f"{', '.join(each)}": partial(of_ours, *each) for each in OURS}
    for kind, partition in product(("FusedAdamW", "AdamW"), ("greedy", "balanced")):
        table[f"{kind}, {partition}, after"] = partial(fails_after_the_step, kind, partition)
    return table


if __name__ == "__main__":
    run_cases(cases)
