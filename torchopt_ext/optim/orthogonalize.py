"""Newton-Schulz iterations on matrices (docs/numerics.md section 12)."""

from collections.abc import Sequence

import torch
from torch import Tensor

import torchopt_ext._C  # noqa: F401  registers the operator
from torchopt_ext.state.newton_schulz import Triple, step_coefficients

__all__ = ["orthogonalize", "step_coefficients"]


def orthogonalize(
    matrices: Tensor,
    coefficients: str | Triple | Sequence[Triple] = "jordan",
    *,
    steps: int | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """Returns each matrix with its singular values moved towards 1: Muon's orthogonalization.

    ``X`` starts as ``X / max(norm(X), eps)``, with the Frobenius norm. Each step then computes
    ``a*X + b*(X @ X.T) @ X + c*(X @ X.T)**2 @ X``. Singular values end in a band around 1 that
    depends on the coefficients, unless they were too small at the start. A zero matrix stays zero.
    A matrix with a NaN or infinity becomes NaN.

    float32 matrices on the CPU are multiplied by this library: the result has the same bits with
    every instruction set and number of threads, alone or in a batch. bfloat16 matrices, too, on
    CPUs with AMX or AVX-512 BF16, but their bits depend on which of these. Other matrices are
    multiplied by torch, in their dtype, without this promise.

    Args:
        matrices: shape [..., m, n], of float32, bfloat16, float16 or float64, on any device.
        coefficients: "jordan" (torch.optim.Muon's), "quintic", "polar_express", "deepseek_v4" or
            "cans"; or a triple (a, b, c), or a list with a triple for each step.
        steps: the number of steps, 0 to 99; see :func:`step_coefficients`.
        eps: the least norm by which a matrix is divided, 0 or more.

    Returns:
        A contiguous tensor like ``matrices``.

    Raises:
        TypeError: coefficients or steps are of a wrong type.
        ValueError: coefficients, steps or eps are out of range.
        RuntimeError: ``matrices`` has another dtype or layout, or less than two dimensions.
    """
    numbers = [x for triple in step_coefficients(coefficients, steps) for x in triple]
    result: Tensor = torch.ops.torchopt_ext.orthogonalize.default(matrices, numbers, eps)
    return result
