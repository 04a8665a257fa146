"""torch's private names: only one module uses them, and all exist in this version of torch."""

from __future__ import annotations

import re
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LambdaLR

import torchopt_ext
from torchopt_ext import FusedAdamW, _torch

PACKAGE = Path(torchopt_ext.__file__).parent
PRIVATE = re.compile(
    r"from torch(?:\.\w+)* import [^#\n]*\b_\w+|from torch\b[\w.]*\._\w+"
    r"|\btorch(?:\.\w+)*\._[a-zA-Z]\w*"
    r"|\._(?:global_optimizer|optimizer_(?:step|state|load)|opt_called|step_count|local_tensor|spec"
    r"|version|make_wrapper_subclass|execution_engine|get_backend|timeout)\b"
)


def test_no_other_module_uses_private_names() -> None:
    allowed = re.compile(r"torchopt_ext\._C|torchopt_ext import|torch\._foreach_\w+")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "_torch.py"
        for line in path.read_text().splitlines()
        if PRIVATE.search(allowed.sub("", line.partition("#")[0]))
    ]
    assert found == []


def a_step(optimizer: Any) -> None:
    optimizer.step()


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hook table is the table that torch's public functions fill."""
    for kind in ("pre", "post"):  # empty tables, without the hooks of other tests
        monkeypatch.setattr(optimizer_module, f"_global_optimizer_{kind}_hooks", OrderedDict())
    monkeypatch.setattr(_torch, "_after_others", set())
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    ours = FusedAdamW([nn.Parameter(torch.ones(1))])
    assert not _torch.has_step_hooks(optimizer)

    def hook(*_: Any) -> None:
        """Does nothing; the test only registers it."""

    for step in ("step", "state_dict", "load_state_dict"):
        for kind in (f"{step}_pre", f"{step}_post"):
            handle = getattr(optimizer, f"register_{kind}_hook")(hook)
            assert _torch.hooks(optimizer, kind) == [hook]
            assert _torch.has_step_hooks(optimizer, own_only=True) == (step == "step")
            handle.remove()
            assert _torch.hooks(optimizer, kind) == []
    for register in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        handle = getattr(optimizer_module, register)(hook)
        assert _torch.has_step_hooks(optimizer)
        assert not _torch.has_step_hooks(optimizer, own_only=True)
        assert _torch.has_step_hooks(ours)
        handle.remove()
    _torch.register_copy_invalidation_hook(hook)
    _torch.register_copy_invalidation_hook(hook)
    assert len(optimizer_module._global_optimizer_post_hooks) == 1
    assert _torch.has_step_hooks(optimizer)
    assert not _torch.has_step_hooks(ours)
    assert not _torch.any_step_hooks([ours])
    _torch.profiler_step_hook(optimizer)
    assert {key for key in vars(optimizer) if _torch.is_hook_table(key)} >= {
        "_optimizer_step_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    }
    inner = _torch.step_without_hooks(optimizer)
    assert type(optimizer).step is not inner
    assert inner.__code__ is not Optimizer.profile_hook_step(a_step).__code__


@pytest.mark.filterwarnings("error")
def test_schedulers() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    _torch.mark_step_for_schedulers(optimizer)
    scheduler.step()  # would warn if the optimizer were not marked as stepped
    _torch.set_step_count(scheduler, 7)
    assert scheduler.state_dict()["_step_count"] == 7


def test_tensors_and_autograd() -> None:
    tensor = torch.ones(3, requires_grad=True)
    seen: list[Any] = []

    def hook(_: Any) -> None:
        seen.append((_torch.graph_task() >= 0, _torch.current_node() is not None))
        _torch.call_at_end_of_backward(lambda: seen.append("ended"))

    tensor.register_hook(hook)
    tensor.sum().backward()
    assert seen == [(True, True), "ended"]
    assert (_torch.graph_task(), _torch.current_node()) == (-1, None)
    assert _torch.version(torch.zeros(2).add_(1)) == 1
    assert not _torch.allows_mutation()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert _torch.allows_mutation()
    parts = [torch.ones(2, 3), torch.zeros(4)]
    flat = _torch.flatten_dense(parts)
    assert [p.shape for p in _torch.unflatten_dense(flat, parts)] == [p.shape for p in parts]

    class Wrapper(torch.Tensor):
        """A wrapper without memory."""

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    made = _torch.make_wrapper_subclass(Wrapper, torch.Size([5]), dtype=torch.float32)
    assert (type(made), made.shape) == (Wrapper, (5,))


def test_names_of_distributed_checkpoints() -> None:
    assert callable(getattr(state_dict, _torch.GET_STATE))
    nested: dict[str, Any] = {}
    _torch.set_element(nested, ("a", 1), 5)
    assert nested == {"a": [None, 5]}
    assert type(_torch.file_system_of("folder")) is type(FileSystemReader("folder").fs)
    assert _torch.file_system_of("memory://folder").fs.protocol == "memory"


def test_names_of_dtensors() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        assert _torch.is_dtensor(tensor)
        assert not _torch.is_dtensor(torch.ones(1))
        assert _torch.layout_of(tensor).placements == tensor.placements
        assert _torch.local_shard(tensor) is _torch.local_shard(tensor)
        other = _torch.dtensor_of(torch.zeros(4, 3), tensor)
        assert (other.placements, other.full_tensor().sum()) == (tensor.placements, 0)
        assert _torch.local_shape_and_offset(tensor) == ((4, 3), (0, 0))
        (total,) = _torch.all_reduce_coalesced([torch.ones(2)], mesh.get_group(0))
        assert total.tolist() == [1, 1]
        assert _torch.fsdp_params(nn.Linear(2, 2)) == []
        sharded = fully_shard(nn.Linear(2, 2), mesh=mesh)
        records = _torch.fsdp_params(sharded)
        assert [record.sharded_param for record in records] == [*sharded.parameters()]
        assert sharded in _torch.fsdp_modules()
        _torch.set_local_shard(tensor, shard := torch.ones(4, 3))
        assert _torch.local_shard(tensor) is shard
        for name in ("mp_policy", "offload_to_cpu", "padded_sharded_param_size", "mesh_info",
                     "post_forward_mesh_info"):  # fmt: skip
            assert hasattr(records[0], name)
        _torch.add_gather_extension(records[0])
        info, assignment, status = _torch.overlap_classes()
        assert info(2).params_per_rank == [[], []]
        assert info(2).status != status.INITIALIZED
        assert assignment(0, [torch.ones(3)], 0).tensor is None
    finally:
        dist.destroy_process_group()


def test_names_for_the_trainer() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        flat = _torch.flatten_mesh(mesh["a", "b"], "ab")
        assert flat.mesh_dim_names == ("ab",)
        _torch.set_group_timeout(timedelta(seconds=9), flat.get_group())
        model = nn.Linear(2, 1, bias=False)
        replicated = _torch.replicate(model, device_mesh=mesh["a"])
        assert replicated is model
        assert [name for name, _ in model.named_parameters()] == ["weight"]
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        model.set_requires_gradient_sync(False)
    finally:
        dist.destroy_process_group()
    _torch.set_rotate_method("allgather")
    assert all(isinstance(op, torch._ops.OpOverload) for op in _torch.ops_worth_saving())
    from torch.distributed.tensor import _random

    assert callable(_random.manual_seed)
    with _torch.compiled_autograd():
        pass


def test_names_of_gradient_scalers() -> None:
    """The private names of torch's GradScaler that our GradScaler extends exist."""
    scaler = torch.amp.GradScaler("cpu")
    for name in ("_per_optimizer_states", "_scale", "_growth_tracker", "_init_scale", "_enabled",
                 "_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker",
                 "_init_growth_tracker", "_get_growth_tracker", "_growth_factor"):  # fmt: skip
        assert hasattr(scaler, name)
    assert _torch.fresh_optimizer_state()["stage"] is _torch.OptState.READY
