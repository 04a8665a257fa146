"""This rank's gradients of a step, and what autograd must know of the step's writes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import all_reduce_coalesced, is_dtensor, local_shard
from torchopt_ext.optim.norm import NormKey
from torchopt_ext.state.local import local_tensor, placed


def local_gradients(params: list[Any], *, written: bool = False) -> list[Tensor | None]:
    """Returns this rank's part of the gradients as plain tensors, placed as the parameters.

    A gradient may be placed differently: sequence parallel gives a replicated weight a Partial
    gradient, whose local part is not the gradient. All redistributions start before any is waited
    for. Redistributions that only sum over one mesh dimension share a collective.

    Args:
        params: parameters, which may include DTensors.
        written: whether the gradients will be written. A redistributed gradient is then rejected.

    Raises:
        RuntimeError: a gradient's kind or mesh is not its parameter's, or it cannot be written.
    """
    grads = [_checked_gradient(param) for param in params]
    summed: dict[NormKey, list[int]] = {}
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if is_dtensor(grad) and grad.placements != param.placements:
            if written:
                raise RuntimeError(
                    f"a gradient with placements {grad.placements} is redistributed for its "
                    f"parameter with {param.placements}, and cannot be written back"
                )
            dimension = _sum_over(grad.placements, param.placements)
            if dimension is None:
                grads[i] = grad.redistribute(placements=param.placements, async_op=True)
            else:
                key = grad.device_mesh, dimension, grad.dtype
                summed.setdefault(key, []).append(i)
    for (mesh, dimension, _), indices in summed.items():
        locals_ = [_complete(grads[i]) for i in indices]
        totals = all_reduce_coalesced(locals_, mesh.get_group(dimension))
        for i, total in zip(indices, totals, strict=True):
            grads[i] = total
    return [None if grad is None else _complete(grad) for grad in grads]


def _checked_gradient(param: Any) -> Any:
    grad = param.grad
    if grad is not None and is_dtensor(grad) != is_dtensor(param):
        raise RuntimeError(
            f"a {type(param).__name__} parameter has a {type(grad).__name__} gradient"
        )
    if is_dtensor(grad) and grad.device_mesh != param.device_mesh:
        raise RuntimeError(f"a gradient is {placed(grad)}, its parameter {placed(param)}")
    return grad


def _sum_over(placements: Any, expected: Any) -> int | None:
    """Returns the mesh dimension if its Partial sum is the only difference of the placements."""
    differing = [d for d, (a, b) in enumerate(zip(placements, expected, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    d = differing[0]
    return d if placements[d].is_partial("sum") and expected[d].is_replicate() else None


def _complete(grad: Any) -> Any:
    """Waits for a gradient's collective (AsyncCollectiveTensor); returns its local tensor."""
    local = local_shard(grad) if is_dtensor(grad) else grad
    if type(local) is not Tensor and hasattr(local, "wait"):
        return local.wait()
    return local_tensor(local)


@torch.no_grad()
def show_writes(params: Iterable[Tensor]) -> None:
    """Shows that parameters will be written, by an operator that changes nothing.

    torch.autograd.graph.allow_mutation_on_saved_tensors then copies what backward still needs. It
    sees operators only, and not the kernels of a step.
    """
    if written := [local_tensor(param) for param in params if param.grad is not None]:
        torch._foreach_copy_(written, written)
