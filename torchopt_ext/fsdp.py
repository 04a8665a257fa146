"""16-bit copies of fp32 shards: steps write the copies, and FSDP2 gathers them without a cast."""

import inspect
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from torchopt_ext._C import renew_copy
from torchopt_ext._torch import (
    add_gather_extension,
    fsdp_params,
    local_shard,
    set_local_shard,
    version,
)
from torchopt_ext.optim.shards import watch_weights
from torchopt_ext.state.storage import SIXTEEN_BIT

__all__ = ["keep_low_precision_shards"]


@torch.no_grad()
def keep_low_precision_shards(model: nn.Module) -> None:
    """Keeps a 16-bit copy of every trainable fp32 shard that FSDP2 would cast for its all-gathers.

    With ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` or float16, FSDP2 casts a shard before
    it gathers the parameter, in forward and, with ``reshard_after_forward``, in backward. The cast
    reads 4 and writes 2 bytes of each element. With copies, steps of fused optimizers write the
    copy, 2 bytes, and all-gathers send it. Losses, weights, state and state dicts stay the same
    to the bit. A copy takes 2 more bytes of memory per element.

    If anything but these steps may have changed a shard, all-gathers cast as FSDP2 does until the
    next step. Such changes are made by another optimizer, or through the parameter (loading,
    averages), its local tensor, or a state dict taken after the last step, which shares the shard's
    memory. Some changes are not noticed, as by autograd: writes through ``.data``, foreach
    functions on DTensors outside optimizers, collectives into local tensors, and writes into an
    older state dict. Call this function again after such a change.

    Call it when the parameters have their memory (after ``to_empty``, ``to`` and
    ``load_state_dict(assign=True)``, which replace parameters), before or after building the
    optimizer.

    Args:
        model: a module with ``fully_shard`` applied to it or to modules in it. Frozen parameters,
            parameters of other dtypes, and parameters whose tensor subclass has its own extension
            (torchao's float8) stay unchanged.

    Raises:
        ValueError: FSDP2 casts no trainable parameter of the model; or a parameter is on the meta
            device, is offloaded to the CPU (``CPUOffloadPolicy``) or is resharded to a smaller mesh
            (a number as ``reshard_after_forward``). Nothing is changed.
    """
    params = [p for module in model.modules() for p in filter(_is_cast, fsdp_params(module))]
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
    for param in params:
        if _copy_of(param) is None:
            _Copy(param)
        renew_copy(_copy_of(param), local_shard(param.sharded_param))
    watch_weights(param.sharded_param for param in params)


def _copy_of(param: Any) -> Any:
    return getattr(local_shard(param.sharded_param), "low_precision_copy", None)


def _is_cast(param: Any) -> bool:
    """Returns whether FSDP2 casts a parameter before all-gathers; ``param`` is FSDP2's record."""
    shard = local_shard(param.sharded_param)
    extended = hasattr(shard, "fsdp_pre_all_gather") and _copy_of(param) is None
    wanted = param.mp_policy.param_dtype in SIXTEEN_BIT and shard.dtype == torch.float32
    return wanted and not extended and bool(param.sharded_param.requires_grad)


def _problem(param: Any) -> str | None:
    """Returns why a parameter cannot have a copy, to follow its name in a message, or None."""
    if local_shard(param.sharded_param).is_meta:
        return "is on the meta device; materialize it before its low-precision shard"
    if param.offload_to_cpu:
        return "is offloaded by CPUOffloadPolicy, with which there are no low-precision shards"
    smaller = param.post_forward_mesh_info
    if smaller is not None and smaller != param.mesh_info:
        return (
            "is resharded to a smaller mesh after forward, which FSDP2 cannot do with extended "
            "tensors; expected reshard_after_forward=True or False"
        )
    return None


class _Copy:
    """The 16-bit copy of a shard, and the extension with which FSDP2 gathers the copy.

    FSDP2 sends what a shard's ``fsdp_pre_all_gather`` returns instead of casting the shard
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Here the methods are attributes of one
    tensor object, so its views, and therefore state dicts, are plain tensors. Gathered weights have
    the same layout as without the extension.

    The copy is valid while its version is the shard's (csrc/plan/weight_copy.h) and the parameter's
    version is unchanged: operators on a DTensor count changes of the DTensor only.
    """

    def __init__(self, param: Any) -> None:
        """Makes the copy and the extension for ``param``, FSDP2's record of a parameter."""
        self.param = weakref.ref(param)  # weak: the record's shard refers to this object
        # A different tensor object, for which optimizers make another plan.
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
        extended.__getstate__ = dict  # pickles leave these attributes out
        set_local_shard(param.sharded_param, shard)
        add_gather_extension(param)

    @property
    def shard(self) -> Tensor:
        param: Any = self.param()
        return local_shard(param.sharded_param)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Returns what this rank sends: the copy, padded to the same length on all ranks."""
        param: Any = self.param()
        shard = self.shard
        if version(param.sharded_param) != self.version:
            self.version = version(param.sharded_param)
            increment_version(shard)
        if version(shard) != version(self.copy):
            self.copy.data.copy_(shard)  # keeps the old version: the shard may change again
        return (self.padded,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Returns what was gathered as the parameter; None if ``out`` already has its memory."""
        return None if out is not None else (gathered[0], ())


_SIGNATURE = inspect.signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)
"""FSDP2 asks for it in every all-gather; computing it there takes ten times as long as all else."""
