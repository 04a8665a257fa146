"""Every private name of torch that this package uses, and why no public name does.

Other modules read private names only where a comment there says so, and in the classes that extend
torch's: GradScaler (torch/amp/grad_scaler.py), and ZeroRedundancyOptimizer for the names that
torch's hooks read.
tests/python/test_torch_names.py enforces this and touches each name.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from operator import attrgetter, methodcaller
from traceback import walk_stack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame as _eval_frame
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["OptState", "tree_leaves", "tree_map_only"]

fresh_optimizer_state = _refresh_per_optimizer_state
"""Makes torch.amp.GradScaler's record of an optimizer, which a subclass resets in update()."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def drop_compiled_code() -> None:
    """Drops the code that torch.compile has made, without importing the compiler."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _runs_eagerly(function: Any) -> str:
    return (
        f"an optimizer runs eagerly: call {function.__name__}() outside of the compiled function, "
        "or compile without fullgraph=True"
    )


def run_eagerly(function: _Function) -> _Function:
    """Excludes ``function``, and what it calls, from the graphs of torch.compile.

    torch.compiler.disable imports torch._dynamo at once, which takes more than a second, and wraps
    the function, which slows eager calls. Here the attributes make a traced call a graph break, and
    the mark on the code object makes the interpreter skip the frames.
    """
    marked: Any = function
    _eval_frame.set_code_exec_strategy(marked.__code__, _SKIP)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _runs_eagerly(function)
    return function


def explain_whole_graph(function: Any) -> None:
    """Says what to do in the error of torch.compile(function, fullgraph=True).

    torch lists there why it skipped frames, but does not look at those that are marked to be.
    torch 2.11 has neither the error nor the list.
    """
    if (frames := sys.modules.get("torch._dynamo.eval_frame")) is None:
        return
    reasons = getattr(frames.dynamo_tls, "skip_reasons", None)
    if reasons is not None and (reason := _runs_eagerly(function)) not in reasons:
        reasons.append(reason)


# ---- torch.optim.Optimizer: hooks can be registered by public functions, but not fired -----------

_WRAPPER = Optimizer.profile_hook_step(lambda _: None).__code__


def has_step_hooks(optimizer: Any, *, own_only: bool = False) -> bool:
    """Returns whether an optimizer has step hooks; global hooks count unless ``own_only``."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own) if own or own_only else _global_hooks_on(optimizer)


def any_step_hooks(optimizers: Sequence[Any]) -> bool:
    """Returns whether any of several optimizers of one class has step hooks, its own or global."""
    return _global_hooks_on(optimizers[0]) or any(
        opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks for opt in optimizers
    )


def _global_hooks_on(optimizer: Any) -> bool:
    hooks = _optimizer._global_optimizer_post_hooks
    if hooks and optimizer_writes_copies(optimizer):
        others = any(hook not in _after_others for hook in hooks.values())
        return others or bool(_optimizer._global_optimizer_pre_hooks)
    return bool(hooks or _optimizer._global_optimizer_pre_hooks)


_after_others: set[Callable[..., None]] = set()


def register_copy_invalidation_hook(hook: Callable[..., None]) -> None:
    """Registers a global step hook for optimizers that do not write copies of the weights.

    For optimizers that do, :func:`has_step_hooks` ignores the hook: their steps are not wrapped.
    """
    if hook not in _after_others:
        _optimizer.register_optimizer_step_post_hook(hook)
        _after_others.add(hook)


def optimizer_writes_copies(optimizer: Any) -> bool:
    """Returns whether an optimizer's step also writes copies of the weights (torchopt_ext.fsdp)."""
    inner = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optim", optimizer)]
    return all(getattr(type(one), "_writes_copies", False) for one in inner)


def hooks(optimizer: Any, kind: str) -> list[Callable[..., Any]]:
    """Returns an optimizer's own hooks of a kind, such as ``step_pre`` or ``state_dict_post``."""
    return list(getattr(optimizer, f"_optimizer_{kind}_hooks").values())


profiler_step_hook = methodcaller("_optimizer_step_code")
"""Called after a step: torch.profiler watches this call to see the optimizer's parameters."""


def step_without_hooks(optimizer: Any) -> Callable[..., Any]:
    """Returns the ``step`` of an optimizer's class without torch's wrappers around it."""
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) is _WRAPPER:
        step = step.__wrapped__
    return step


def mark_step_for_schedulers(optimizer: Any) -> None:
    """Records a step that bypasses learning-rate schedulers' patch of ``step``; else they warn."""
    optimizer._opt_called = True


def _callers(count: int) -> list[Any]:
    """Returns the frames of the callers of the function that calls a function of this module."""
    return [frame for frame, _ in islice(walk_stack(sys._getframe(3)), count)]


def is_called_by(name: str, within: int) -> bool:
    """Returns whether a function's nearest callers include one of this name."""
    return any(frame.f_code.co_name == name for frame in _callers(within))


def is_asked(optimizer: Any) -> bool:
    """Returns whether a property's caller has ``optimizer``, not a wrapper that hands it on.

    torch.amp.GradScaler tells, and the names of what Python calls for attributes that are missing.
    """
    for frame in _callers(2):
        if frame.f_code.co_name in ("__getattr__", "__getattribute__"):
            return False
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return frame.f_locals["optimizer"] is optimizer
    return True


GET_STATE = "_get_optim_state_dict"
"""The part of torch's get_optimizer_state_dict that asks optimizers for their state dicts."""


def is_to_be_filled() -> bool:
    """Returns whether set_optimizer_state_dict calls state_dict(), to fill what it returns.

    It fills only entries that it finds there (torch/distributed/checkpoint/state_dict.py,
    _load_optim_state_dict).
    """
    names = [frame.f_code.co_name for frame in _callers(6)]
    return GET_STATE in names[:3] and "_load_optim_state_dict" in names


def is_gathered() -> bool:
    """Returns whether get_optimizer_state_dict(full_state_dict=True) calls state_dict()."""
    asking = [frame.f_locals for frame in _callers(3) if frame.f_code.co_name == GET_STATE]
    return any(known["info"].full_state_dict for known in asking)


def is_hook_table(attribute: str) -> bool:
    """Returns whether an optimizer's attribute is a table of hooks, which copies leave out."""
    return attribute.startswith("_optimizer_")


def set_step_count(scheduler: Any, count: int) -> None:
    """Sets how often a scheduler was stepped, by which it checks the order of calls."""
    scheduler._step_count = count


def step_together(schedulers: Sequence[Any]) -> None:
    """Steps schedulers. Optimizers of one group with the first one's lambda share its factor.

    This sets what LambdaLR.step() sets, in a tenth of its time: a container that steps in backward
    has an optimizer for each parameter.
    """
    first, *others = schedulers
    first.step()
    step, factor, factor_of = first.last_epoch, None, getattr(first, "lr_lambdas", [None])[0]
    for scheduler in others:
        own = vars(scheduler)
        # LambdaLR checks the order of calls in its second step, and fills rates that are tensors.
        if (
            type(scheduler) is LambdaLR
            and own["last_epoch"] == step - 1 > 0
            and len(own["lr_lambdas"]) == 1
            and own["lr_lambdas"][0] is factor_of
            and not isinstance((group := scheduler.optimizer.param_groups[0])["lr"], Tensor)
        ):
            if factor is None:
                factor = factor_of(step)
            group["lr"] = lr = own["base_lrs"][0] * factor
            own.update(last_epoch=step, _step_count=own["_step_count"] + 1, _last_lr=[lr])
        else:
            scheduler.step()


def allows_mutation() -> bool:
    """Whether torch.autograd.graph.allow_mutation_on_saved_tensors is in effect."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


# ---- tensors -------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    """Returns whether ``tensor`` is a DTensor; does not import torch.distributed."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


local_shard = attrgetter("_local_tensor")
"""Returns the tensor object in a DTensor, whose memory offloading replaces.

``to_local()`` makes a Parameter from it (pytorch issue 166156), and a view under autograd."""


def set_local_shard(dtensor: Any, local: Tensor) -> None:
    """Replaces the tensor object that holds a DTensor's shard, as FSDP2 does."""
    dtensor._local_tensor = local


def dtensor_of(local: Tensor, like: Any) -> Any:
    """Returns a DTensor with the layout of ``like`` and the shard ``local``, on any device.

    ``from_local`` would move a shard in host memory to the mesh's devices.
    """
    return type(like)(local, like._spec, requires_grad=False)


layout_of = attrgetter("_spec")
"""A DTensor's mesh, placements, shape and strides; ``from_local`` cannot build a subclass."""

version = attrgetter("_version")
"""Returns how often a tensor was changed in place; torch documents only this private name."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""Makes a tensor of a wrapper subclass, which has no memory of its own."""

flatten_dense = torch._C._nn.flatten_dense_tensors
"""Flattens many tensors into one; a reshape and a cat in Python take ten times as long."""


def unflatten_dense(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Returns views of :func:`flatten_dense`'s result with the shapes of ``like``."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


# ---- autograd ------------------------------------------------------------------------------------

graph_task = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs, -1 outside of backward."""

current_node = torch._C._current_autograd_node
"""Returns the autograd node that this thread evaluates, or None."""

_engine: Any = torch.autograd.Variable._execution_engine


def call_at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Registers a callback for the end of this thread's backward pass, as FSDP2 does."""
    _engine.queue_callback(run_eagerly(lambda: callback()))


# ---- torch.distributed, imported when used -------------------------------------------------------


def default_store() -> Any:
    """Returns the store that the ranks of the default process group share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def local_shape_and_offset(
    dtensor: Any, shape: torch.Size | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of a DTensor's shard, and the shard's offset in the whole tensor.

    With ``shape``, of a tensor of that shape with the same placements.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        dtensor.shape if shape is None else shape, dtensor.device_mesh, dtensor.placements
    )


def all_reduce_coalesced(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Sums many tensors over ranks in one collective; the first read of a sum waits for it."""
    from torch.distributed._functional_collectives import all_reduce_coalesced as reduce

    return reduce(tensors, "sum", group)


def fsdp_params(module: Any) -> list[Any]:
    """Returns FSDP2's records (FSDPParam) of the parameters that it gathers with a module."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has at most one group
        groups = filter(None, [state._fsdp_param_group])
    return [param for group in groups for param in group.fsdp_params]


def fsdp_modules() -> list[Any]:
    """Returns all modules to which FSDP2 or another composable API was applied: torch lists them
    for itself only, and an optimizer knows no module."""
    from torch.distributed import _composable_state

    return [*_composable_state._module_state_mapping]


def is_flat(param: Any) -> bool:
    """Returns whether FullyShardedDataParallel (FSDP1) has flattened a parameter."""
    return bool(getattr(param, "_fsdp_flattened", False))


add_gather_extension = methodcaller("_init_extensions")
"""Lets FSDP2 detect an all-gather extension that was set on a shard after ``fully_shard``."""


def overlap_classes() -> tuple[Any, Any, Any]:
    """Returns the classes that torch's hooks read if they step inside DDP's backward."""
    from torch.distributed.optim import zero_redundancy_optimizer as zero

    return zero._OverlapInfo, zero._DDPBucketAssignment, zero._OverlapStatus


def set_element(nested: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Sets the entry at a DCP path in a nested state dict; creates the levels in between."""
    from torch.distributed.checkpoint._traverse import set_element as set_at

    set_at(nested, path, value)


def file_system_of(folder: Any) -> Any:
    """Returns the object by which DCP reads a folder. That of a URL has fsspec's as ``fs``.

    The module of torch's FsspecReader has another name from version to version.
    """
    from torch.distributed.checkpoint._storage_utils import _storage_setup
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    remote = "://" in str(folder)
    reader: Any = _storage_setup(None, folder, reader=True) if remote else FileSystemReader(folder)
    return reader.fs


def flatten_state_dict(
    nested: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Returns a nested state dict's values by DCP's keys, and the path of each key."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    return flatten(nested)


# ---- CUDA's allocator ----------------------------------------------------------------------------

record_memory_history: Callable[..., None] = torch.cuda.memory._record_memory_history
"""Starts or ends recording allocations; torch documents only this private name."""

dump_memory_snapshot: Callable[..., None] = torch.cuda.memory._dump_snapshot
"""Writes the recorded allocations to a file, for pytorch.org/memory_viz."""


# ---- for the Trainer: torch.distributed and torch.compile, imported when used --------------------


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Flattens a mesh to one dimension, with a group of its ranks; the root mesh knows it."""
    return mesh._flatten(name)


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Sets the timeout of a process group's later operations; public since torch 2.15."""
    from torch.distributed import distributed_c10d as c10d

    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    set_timeout(timeout, group)


def replicate(module: Any, **options: Any) -> Any:
    """Applies DistributedDataParallel but keeps the module and its parameters' names.

    The public class wraps the module, so its parameters' names begin with "module."."""
    from torch.distributed._composable.replicate import replicate

    return replicate(module, **options)


def seed_dtensors(seed: int, mesh: Any) -> None:
    """Seeds DTensors' draws; else the first draw sends rank 0's seed to every pipeline stage."""
    from torch.distributed.tensor._random import manual_seed

    manual_seed(seed, mesh)


def set_rotate_method(method: str) -> None:
    """Sets how context parallel exchanges keys and values: "allgather" or "alltoall"."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)


def prepare_stages_again(schedule: Any) -> None:
    """Lets a pipeline schedule's next call prepare its stages' buffers.

    torch before 2.15 keeps those of the first call, also between eval() and step() (pytorch issue
    162822).
    """
    for name in ("stage_forward", "stage_backward", "stages_forward", "stages_backward"):
        if hasattr(schedule, f"_{name}_initialized"):
            setattr(schedule, f"_{name}_initialized", False)


def compiled_autograd() -> Any:
    """Returns a context in which backward passes are compiled (compiled autograd), not hooks."""
    from torch._dynamo.utils import maybe_enable_compiled_autograd

    return maybe_enable_compiled_autograd(True, fullgraph=False)


def ops_worth_saving() -> frozenset[Any]:
    """Returns the ops that selective activation checkpointing saves: slow, given their memory."""
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    return frozenset(
        {
            aten.mm.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            collectives.reduce_scatter_tensor.default,
            aten.max.default,  # scales for low precision
        }
    )
