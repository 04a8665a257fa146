"""Every private name of torch that this package uses, with the reason why no public one serves.

Nothing else in the package imports or reads one, but for the classes that extend torch's own:
GradScaler (torch/amp/grad_scaler.py) and ZeroRedundancyOptimizer's names that torch's hooks read.
tests/python/test_torch_names.py holds the package to it and touches each name.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame as _eval_frame
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["OptState", "tree_leaves", "tree_map_only"]

fresh_optimizer_state = _refresh_per_optimizer_state
"""What torch.amp.GradScaler keeps of an optimizer between updates; a subclass has to renew it."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def run_eagerly(function: _Function) -> _Function:
    """Lets compiled code call ``function``, and what it calls, outside of its graphs.

    torch.compiler.disable imports torch._dynamo at once, which takes more than a second, and wraps
    the function, which eager calls pay for. Here a traced call becomes a graph break by the
    attributes, and the interpreter passes over the frames by the mark on the code object.
    """
    marked: Any = function
    _eval_frame.set_code_exec_strategy(marked.__code__, _SKIP)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "an optimizer's step runs eagerly"
    return function


# ---- torch.optim.Optimizer: hooks can be registered by public functions, but not fired -----------

_WRAPPER = Optimizer.profile_hook_step(lambda _: None).__code__


def has_step_hooks(optimizer: Any, *, own_only: bool = False) -> bool:
    """Whether hooks on an optimizer's steps are registered: its own, or those on all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own) if own or own_only else _global_hooks_on(optimizer)


def any_step_hooks(optimizers: Sequence[Any]) -> bool:
    """Whether there are hooks on the steps of any of several optimizers of one class."""
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


def after_steps_of_others(hook: Callable[..., None]) -> None:
    """Fires a hook after the steps of optimizers that do not write weights' copies by themselves.

    Those that do are not slowed down: nothing is wrapped around their steps.
    """
    if hook not in _after_others:
        _optimizer.register_optimizer_step_post_hook(hook)
        _after_others.add(hook)


def optimizer_writes_copies(optimizer: Any) -> bool:
    """Whether an optimizer's step writes copies of the weights (torchopt_ext.fsdp) as well."""
    inner = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optim", optimizer)]
    return all(getattr(type(one), "writes_copies", False) for one in inner)


def hooks(optimizer: Any, kind: str) -> list[Callable[..., Any]]:
    """An optimizer's own hooks: ``step``, ``state_dict`` or ``load_state_dict``, _pre or _post."""
    return list(getattr(optimizer, f"_optimizer_{kind}_hooks").values())


tell_profiler = methodcaller("_optimizer_step_code")
"""Tells torch.profiler of an optimizer's step, for its parameters."""


def step_without_hooks(optimizer: Any) -> Callable[..., Any]:
    """The ``step`` of an optimizer's class inside what torch has wrapped around it."""
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) is _WRAPPER:
        step = step.__wrapped__
    return step


def note_step(optimizer: Any) -> None:
    """Notes a step that learning-rate schedulers' patch of ``step`` does not see: they warn."""
    optimizer._opt_called = True


def is_hook_table(attribute: str) -> bool:
    """Whether an optimizer's attribute holds hooks, which copies do not take along."""
    return attribute.startswith("_optimizer_")


def set_step_count(scheduler: Any, count: int) -> None:
    """Says how often a scheduler was stepped, by which it judges the order of calls."""
    scheduler._step_count = count


# ---- tensors -------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor, without importing torch.distributed for plain tensors."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


local_shard = attrgetter("_local_tensor")
"""The tensor object in a DTensor, whose memory offloading replaces.

``to_local()`` makes a Parameter of it (pytorch issue 166156), and a view under autograd."""


def set_local_shard(dtensor: Any, local: Tensor) -> None:
    """Gives a DTensor another tensor object with its shard, as FSDP2 does."""
    dtensor._local_tensor = local


def dtensor_of(local: Tensor, like: Any) -> Any:
    """A DTensor laid out as ``like`` whose shard is ``local``, wherever that is.

    ``from_local`` would move a shard in host memory to the mesh's devices.
    """
    return type(like)(local, like._spec, requires_grad=False)


layout_of = attrgetter("_spec")
"""Mesh, placements, shape and strides of a DTensor; ``from_local`` makes no subclass of it."""

version = attrgetter("_version")
"""How often a tensor was changed in place; torch documents it, under this name only."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor of a subclass without memory of its own, as torch's wrapper subclasses are made."""

flatten_dense = torch._C._nn.flatten_dense_tensors
"""The elements of many tensors in one; a reshape and a cat in Python take ten times as long."""


def unflatten_dense(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of :func:`flatten_dense`'s result, shaped as ``like``."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


# ---- autograd ------------------------------------------------------------------------------------

graph_task = torch._C._current_graph_task_id
"""The number of the backward pass that this thread runs, -1 outside of one."""

current_node = torch._C._current_autograd_node
"""The autograd node that this thread evaluates, or None."""

_engine: Any = torch.autograd.Variable._execution_engine
call_at_end_of_backward = _engine.queue_callback
"""Calls back when the backward pass that this thread runs has ended (FSDP2 does it so)."""


# ---- torch.distributed, imported when used -------------------------------------------------------


def default_store() -> Any:
    """The store that the ranks of the default process group share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def local_shape_and_offset(dtensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a DTensor's shard, and where in the whole it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        dtensor.shape, dtensor.device_mesh, dtensor.placements
    )


def all_reduce_coalesced(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Sums of many tensors in one collective that the next read waits for."""
    from torch.distributed._functional_collectives import all_reduce_coalesced as reduce

    return reduce(tensors, "sum", group)


def fsdp_params(module: Any) -> list[Any]:
    """FSDP2's records (FSDPParam) of the parameters that it gathers with a module."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one or none
        groups = filter(None, [state._fsdp_param_group])
    return [param for group in groups for param in group.fsdp_params]


add_gather_extension = methodcaller("_init_extensions")
"""Lets FSDP2 see the all-gather extension that a shard has got since ``fully_shard``."""

has_final_buckets = attrgetter("_has_rebuilt_buckets")
"""Whether a DistributedDataParallel has chosen its buckets after the first backward passes."""


def overlap_classes() -> tuple[Any, Any, Any]:
    """What torch's hooks that step inside DDP's backward read: info, bucket assignment, status."""
    from torch.distributed.optim import zero_redundancy_optimizer as zero

    return zero._OverlapInfo, zero._DDPBucketAssignment, zero._OverlapStatus


def set_element(nested: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Sets the entry that a path of DCP leads to in a nested state dict; makes what is between."""
    from torch.distributed.checkpoint._traverse import set_element as set_at

    set_at(nested, path, value)


def flatten_state_dict(
    nested: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """A nested state dict's values by DCP's key, and the path of each."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    return flatten(nested)


# ---- CUDA's allocator ----------------------------------------------------------------------------

record_memory_history: Callable[..., None] = torch.cuda.memory._record_memory_history
"""Starts or ends recording allocations; torch documents it, under this name only."""

dump_memory_snapshot: Callable[..., None] = torch.cuda.memory._dump_snapshot
"""Writes what was recorded to a file, for pytorch.org/memory_viz."""


# ---- for the Trainer: torch.distributed and torch.compile, imported when used --------------------


def flatten_mesh(mesh: Any, name: str) -> Any:
    """All ranks of a mesh's slice in one dimension, with a group, which the root mesh knows."""
    return mesh._flatten(name)


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Sets the timeout of a process group's later operations; public since torch 2.15."""
    from torch.distributed import distributed_c10d as c10d

    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    set_timeout(timeout, group)


def replicate(module: Any, **options: Any) -> Any:
    """DistributedDataParallel that keeps the module and its parameters' names.

    The public class wraps the module, whose parameters' names then begin with "module."."""
    from torch.distributed._composable.replicate import replicate

    return replicate(module, **options)


def seed_dtensors(seed: int, mesh: Any) -> None:
    """Seeds what DTensors draw; else the first draw sends rank 0's seed to every pipeline stage."""
    from torch.distributed.tensor._random import manual_seed

    manual_seed(seed, mesh)


def set_rotate_method(method: str) -> None:
    """How context parallel passes keys and values on: "allgather" or "alltoall"."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)


def compiled_autograd() -> Any:
    """A context in which backward passes are compiled, as torch.compile's."""
    from torch._dynamo.utils import maybe_enable_compiled_autograd

    return maybe_enable_compiled_autograd(True)


def ops_worth_saving() -> frozenset[Any]:
    """What selective activation checkpointing keeps: what is slow for the memory that it takes."""
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
