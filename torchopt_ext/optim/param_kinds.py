"""Which parameters a step can update."""

import torch
from torch import Tensor

from torchopt_ext.optim.local import inner_tensors, local_tensor
from torchopt_ext.optim.storage import SIXTEEN_BIT

STEPPED = (*SIXTEEN_BIT, torch.float32, torch.float64, torch.complex64, torch.complex128)


def refuse_param(param: Tensor, what: str) -> None:
    """Raises TypeError for a parameter that no step could update.

    Only parameters that require a gradient or have one are to be checked: a frozen one, such as a
    quantized weight, may be anything.
    """
    if problem := _problem_of(param):
        raise TypeError(f"{what} {problem}")


def is_steppable(param: Tensor) -> bool:
    """Whether a step could update the parameter if it had a gradient."""
    return _problem_of(param) is None


def _problem_of(param: Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(param):
        return None  # its first forward gives it a shape
    local = local_tensor(param)
    if inner := inner_tensors(local):
        held = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in inner.items())
        return (
            f"is a {type(local).__name__} of {held}; expected one inner tensor of its shape "
            f"{tuple(local.shape)} and dtype {local.dtype}, which a step could update"
        )
    if local.layout is not torch.strided:
        return f"has layout {local.layout}, expected a dense tensor"
    if local.dtype not in STEPPED:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in STEPPED)
        return f"has dtype {param.dtype}, expected one of {expected}"
    if local.is_meta:
        return "is on the meta device; materialise it before building optimizers"
    return None
