"""16-bit shards that FSDP2 gathers as they are: steps write them beside the fp32 weights."""

import inspect
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from torchopt_ext._C import renew_copy
from torchopt_ext._torch import (
    add_gather_extension,
    after_steps_of_others,
    fsdp_params,
    is_dtensor,
    local_shard,
    optimizer_writes_copies,
    set_local_shard,
    version,
)
from torchopt_ext.optim.storage import SIXTEEN_BIT

__all__ = ["keep_low_precision_shards"]


@torch.no_grad()
def keep_low_precision_shards(model: nn.Module) -> None:
    """Keeps a 16-bit copy of every trainable fp32 shard that FSDP2 would cast for its all-gathers.

    With ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` or float16 FSDP2 reads 4 and writes 2
    bytes of each element of a shard before it gathers the parameter, in forward and, with
    ``reshard_after_forward``, in backward. Here steps of FusedAdam and FusedAdamW write the copy,
    2 bytes, and all-gathers take it. Losses, weights, state and state dicts stay the same to the
    bit. A copy is 2 bytes an element more of memory.

    All-gathers cast as FSDP2 does from when a shard may have been changed otherwise until the next
    step: by another optimizer, through the parameter (loading, averages), through its local tensor,
    or through a state dict, which shares its memory, taken after the last step. Not noticed, as by
    autograd, are writes through ``.data``, foreach functions on DTensors outside optimizers,
    collectives into local tensors, and writes into an older state dict: call this function again
    after those.

    Call it when the parameters have their memory (after ``to_empty``, ``to`` and
    ``load_state_dict(assign=True)``, which replace parameters), before or after building the
    optimizer.

    Args:
        model: a module to which, or to modules in which, ``fully_shard`` was applied. Frozen
            parameters, those of other dtypes, and those whose tensor subclass has an extension of
            its own (torchao's float8) are left as they are.

    Raises:
        ValueError: FSDP2 casts no trainable parameter of the model; or one is on the meta device,
            is offloaded to the CPU (``CPUOffloadPolicy``) or is resharded to a smaller mesh (a
            number as ``reshard_after_forward``). Nothing is changed.
    """
    cast = {module: list(filter(_is_cast, fsdp_params(module))) for module in model.modules()}
    params = [param for own in cast.values() for param in own]
    if not params:
        raise ValueError(
            "found no trainable float32 parameter that FSDP2 gathers in 16 bits, expected "
            "fully_shard with mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) or float16"
        )
    names = {param: name for name, param in model.named_parameters()}
    for param in params:
        if problem := _problem(param):
            name = names.get(param.sharded_param, tuple(param.sharded_param.shape))
            raise ValueError(f"parameter {name!r} {problem}")
    for module, own in cast.items():
        made = [_Copy(param) for param in own if _copy_of(param) is None]
        if made:
            hook = _notice_aliases(made)
            module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    for param in params:
        renew_copy(_copy_of(param), local_shard(param.sharded_param))
    after_steps_of_others(_count_step)


def _count_step(optimizer: Any, *_: Any) -> None:
    """Counts an optimizer's changes of shards: foreach and fused kernels on DTensors do not."""
    if not optimizer_writes_copies(optimizer):
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            if is_dtensor(param) and hasattr(shard := local_shard(param), "low_precision_copy"):
                increment_version(shard)


def _copy_of(param: Any) -> Any:
    return getattr(local_shard(param.sharded_param), "low_precision_copy", None)


def _is_cast(param: Any) -> bool:
    """Whether FSDP2 casts a parameter, of which this is its record, before it gathers it."""
    shard = local_shard(param.sharded_param)
    extended = hasattr(shard, "fsdp_pre_all_gather") and _copy_of(param) is None
    wanted = param.mp_policy.param_dtype in SIXTEEN_BIT and shard.dtype == torch.float32
    return wanted and not extended and bool(param.sharded_param.requires_grad)


def _problem(param: Any) -> str | None:
    """Why all-gathers of a parameter cannot take a copy, to follow its name in a message."""
    if local_shard(param.sharded_param).is_meta:
        return "is on the meta device; materialise it before its low-precision shard"
    if param.offload_to_cpu:
        return "is offloaded by CPUOffloadPolicy, with which there are no low-precision shards"
    smaller = param.post_forward_mesh_info
    if smaller is not None and smaller != param.mesh_info:
        return (
            "is resharded to a smaller mesh after forward, which FSDP2 cannot do with extended "
            "tensors; expected reshard_after_forward=True or False"
        )
    return None


def _notice_aliases(copies: Sequence["_Copy"]) -> Any:
    """A hook on a module's ``state_dict``, through which shards may be written unnoticed."""

    def hook(*_: Any) -> None:
        for copy in copies:
            increment_version(copy.shard)

    return hook


class _Copy:
    """The 16-bit copy of a shard, and the extension by which FSDP2 gathers it.

    FSDP2 takes what a shard's ``fsdp_pre_all_gather`` returns instead of casting the shard
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). The methods are attributes of one tensor
    object here, so that views of it, and with them state dicts, are plain tensors. Gathered weights
    are laid out as without the extension.

    The copy is right while it has the version of the shard (csrc/plan/weight_copy.h) and the
    parameter has the one it had: operators on a DTensor count its own changes only.
    """

    def __init__(self, param: Any) -> None:
        """``param``: FSDP2's record."""
        self.param = weakref.ref(param)  # its shard refers to this
        # Another object, for which optimizers make another plan.
        shard = self.shard.detach()
        padded = shard.new_zeros(param.padded_sharded_param_size, dtype=param.mp_policy.param_dtype)
        self.padded, self.copy = padded, padded[tuple(map(slice, shard.shape))]
        self.version = version(param.sharded_param)
        renew_copy(self.copy, shard)
        extended: Any = shard
        before: Any = partial(self.fsdp_pre_all_gather)
        before.__signature__ = _SIGNATURE
        extended.fsdp_pre_all_gather = before
        extended.fsdp_post_all_gather = self.fsdp_post_all_gather
        extended.low_precision_copy = self.copy
        extended.__getstate__ = dict  # pickles have none of these
        set_local_shard(param.sharded_param, shard)
        add_gather_extension(param)

    @property
    def shard(self) -> Tensor:
        param: Any = self.param()
        return local_shard(param.sharded_param)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What this rank sends: the copy, with the padding that makes all ranks' equally long."""
        param: Any = self.param()
        shard = self.shard
        if version(param.sharded_param) != self.version:
            self.version = version(param.sharded_param)
            increment_version(shard)
        if version(shard) != version(self.copy):
            self.copy.data.copy_(shard)  # not counted: the next may be other values
        return (self.padded,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """The parameter is what was gathered; ``out`` lies in the same memory already."""
        return None if out is not None else (gathered[0], ())


_SIGNATURE = inspect.signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)
"""FSDP2 asks for it in every all-gather, and finding it takes ten times as long as all the rest."""
