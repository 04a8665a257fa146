"""If rank 1 rejects a step, both ranks raise, rank 0 names it, and nothing changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import difference, gathered, run_cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import LBFGS, SGD, AdamW
from zero_faults_common import Result, clones, give_gradients, outcome, parameters

from torchopt_ext import FusedAdamW
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

SOON = 20  # seconds; the group waits for 60


def check(name: str, case: Callable[[], Result]) -> None:
    other, rejecting = both = gathered(case())
    assert all(found["went on"] and found["seconds"] < SOON for found in both)
    assert other["raised"] == "RuntimeError"
    assert "rank 1 rejected the step" in other["message"]
    assert rejecting["raised"]
    assert "rejected the step" not in rejecting["message"]
    # torch's AdamW finds sparse gradients in the middle of its step.
    assert name.startswith("AdamW, sparse") or not any(found["changed"] for found in both)


def failing() -> None:
    raise ZeroDivisionError("the closure or hook")


def with_warnings_as_errors(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


def content(optimizer: Any) -> Any:
    params = [local(param) for group in optimizer.param_groups for param in group["params"]]
    state = getattr(optimizer, "optim", optimizer).state.values()
    made = [entry for entry in state if entry and entry.get("step")]
    return clones([params, [{name: local(value) for name, value in e.items()} for e in made]])


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


def rejected(optimizer: Any, params: Any, fault: str, backward: Callable[[], Any]) -> Result:
    """Takes a step that rank 1 rejects, and a good step after it."""
    backward()
    before, memory = content(optimizer), params[0].data
    call = spoil(optimizer, params, fault) if dist.get_rank() == 1 else optimizer.step
    found = outcome(call if fault != "clip" else lambda: optimizer.clip_grad_norm_(1.0))
    if fault == "shape":
        params[0].data = memory
    vars(optimizer).pop("grad_scale", None)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    found["changed"] = difference(content(optimizer), before)
    optimizer.zero_grad()
    backward()
    optimizer.step()
    return found | {"went on": difference(content(optimizer), before) != ""}


def of_zero(kind: str, fault: str, options: dict[str, Any]) -> Result:
    cls, defaults = KINDS[kind]
    params = parameters()
    params[-1].requires_grad_(fault != "frozen")
    zero = ZeroRedundancyOptimizer(params, cls, lr=0.01, **defaults, **options)
    return rejected(zero, params, fault, partial(give_gradients, params, 0))


def of_reducer(fault: str) -> Result:
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

    return rejected(zero, list(model.parameters()), fault, backward)


def of_lbfgs() -> Result:
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

    found = outcome(lambda: zero.step(closure)) | {"changed": ""}  # other ranks' parts have changed
    ZeroRedundancyOptimizer(params, SGD, lr=0.1).step(closure)  # LBFGS cannot go on by itself
    return found | {"went on": difference(content(zero), before) != ""}


def fails_after_the_step(kind: str, partition: str) -> None:
    """A hook of rank 1's local optimizer fails after a step; both ranks have all parameters."""
    cls, defaults = KINDS[kind]
    params = parameters()
    zero = ZeroRedundancyOptimizer(params, cls, lr=0.01, partition=partition, **defaults)
    before = clones(params)
    if dist.get_rank() == 1:
        handle = zero.optim.register_step_post_hook(lambda *_: failing())
    give_gradients(params, 0)
    found = outcome(zero.step)
    assert found["seconds"] < SOON
    assert (found["raised"] == "ZeroDivisionError") == (dist.get_rank() == 1)
    if dist.get_rank() == 1:
        handle.remove()
    for step in (1, 2):
        assert difference(clones(params), before)
        first, second = gathered([param.tolist() for param in params])
        assert first == second
        before = clones(params)
        give_gradients(params, step)
        zero.step()


def of_ours(base: str, where: str, fault: str) -> Result:
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

    return rejected(optimizer, params, fault, backward)


def known_later() -> Result:
    """Steps as on a GPU, where rank 0 learns of the rejection only in its next step."""
    params = parameters()
    group = dist.new_group()
    optimizer = FusedAdamW(params, max_grad_norm=1.0, process_group=group)
    optimizer.set_loss_scale(8.0)
    before = content(optimizer)
    give_gradients(params, 0)
    answers = iter([False])  # not known at the end of the rejected step
    end = SimpleNamespace(query=lambda: next(answers, True))
    with (
        mock.patch.object(rejection.Verdict, "is_known", return_value=False),
        mock.patch.object(rejection, "sent_to_host", lambda flags: (flags.clone(), end)),
    ):
        if rejects := dist.get_rank() == 1:
            found = outcome(spoil(optimizer, params, "sparse"))
        else:
            optimizer.step()
        changed = difference(content(optimizer), before)
        give_gradients(params, 1)
        if rejects:
            optimizer.step()
        else:
            found = outcome(optimizer.step)  # makes the step, then raises
    control = optimizer.control
    counts = [float(c) for c in (control.steps, control.skipped_steps, control.loss_scale)]
    assert counts == [2.0, 1.0, 4.0]
    assert len(set(gathered(float(control.grad_norm)))) == 1
    return found | {"changed": changed, "went on": difference(content(optimizer), before) != ""}


def of_zero_on_a_gpu(kind: str, fault: str, options: dict[str, Any]) -> Result:
    """Steps ZeRO where the host has to wait for the flags, as on a GPU."""
    end = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    with (
        mock.patch.object(rejection.Verdict, "is_known", return_value=False),
        mock.patch.object(rejection, "sent_to_host", lambda flags: (flags.clone(), end)),
    ):
        return of_zero(kind, fault, options)


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], Result]] = {"later": known_later, "LBFGS": of_lbfgs}
    for fault in ("", "frozen", "hook", "setting"):
        found[f"reducer, {fault}"] = partial(of_reducer, fault)
    for options in ({"parameters_as_bucket_view": True}, {"partition": "balanced"}):
        found[f"AdamW, frozen, {options}"] = partial(of_zero, "AdamW", "frozen", options)
    for kind in KINDS:
        for fault, kinds in FAULTS.items():
            if kinds in kind:
                balanced = {"partition": "balanced"} if fault == "shape" else {}
                given = kind, fault, balanced
                found[f"{kind}, {fault}"] = partial(of_zero, *given)
                found[f"{kind}, {fault} on a GPU"] = partial(of_zero_on_a_gpu, *given)
    for fault in ("setting", "scaler", "sparse"):
        found[f"FusedAdamW over a group, {fault}"] = partial(of_ours, "FusedAdamW", "group", fault)
    for base, fault in (
        ("FusedAdamW", "setting"),
        ("FusedAdamW", "warning"),
        ("adapted FusedAdamW", "setting"),
        ("adapted FusedAdamW", "unscaled"),
        ("adapted AdamW", "unscaled"),
        ("adapted AdamW", "plain"),
    ):
        found[f"{base} over a mesh, {fault}"] = partial(of_ours, base, "mesh", fault)
    found["adapted AdamW over a group, sparse"] = partial(
        of_ours, "adapted AdamW", "group", "sparse"
    )
    checked = {name: partial(check, name, case) for name, case in found.items()}
    for kind, partition in product(("FusedAdamW", "AdamW"), ("greedy", "balanced")):
        checked[f"{kind}, {partition}, after"] = partial(fails_after_the_step, kind, partition)
    return checked


if __name__ == "__main__":
    run_cases(cases)
