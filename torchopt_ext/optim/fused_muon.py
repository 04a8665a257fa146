"""FusedMuon: torch.optim.Muon, beside other algorithms in one object."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from torchopt_ext._arguments import expect_group
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.optim.fused_optimizer import FusedOptimizer
from torchopt_ext.optim.options import StepArguments, with_options
from torchopt_ext.state.newton_schulz import JORDAN


class FusedMuon(FusedOptimizer):
    """torch.optim.Muon, fused with clipping and overflow check, for matrices and what is beside.

    The arguments up to ``adjust_lr_fn`` are torch's. Groups with another ``"algorithm"``, such as
    "adamw", are stepped by it, with one norm and one decision for all: ``max_grad_norm`` clips the
    gradients before they enter the momentum, never the orthogonalized update. Per-parameter state:
    ``step`` and torch's ``momentum_buffer``. ``control.orthogonalized`` counts the matrices of the
    last step.

    Tensors of three dimensions are batches of matrices. Groups may also have ``flatten`` (True: a
    convolution is a matrix of its first dimension by the others), ``num_heads`` (a matrix is that
    many blocks of rows, or with ``head_dim=1`` of columns) and ``split_sizes`` (a matrix is blocks
    of these rows, as fused projections are). :func:`torchopt_ext.muon_groups` makes groups. Ranks
    that share a DTensor's matrices exchange directions (docs/muon_ranks.md).

    Args:
        params: as in :class:`FusedOptimizer`; parameters of Muon are matrices.
        lr: multiplied by the factor of the matrix's shape that ``adjust_lr_fn`` says. With
            "match_rms_adamw" the learning rate of AdamW fits.
        ns_coefficients: of the Newton-Schulz iterations: a triple for all ``ns_steps``, a sequence
            with a triple for each step, or the name of a preset ("jordan", "polar_express",
            "quintic", "deepseek_v4", "cans"; of "polar_express" the first ``ns_steps``).
        beta2: if not 0, of NorMuon (arXiv:2510.05491): the rows of an orthogonalized matrix are
            divided by the root of a moving average of their mean squares, which is kept as
            ``second_momentum_buffer``, and the matrix gets its norm back, as in dion. A group of
            ``algorithm="normuon"`` has 0.95.
        orthogonalize_dtype: of the products; by default float32 on CPUs, bfloat16 elsewhere. It
            does not count for float64 parameters.
        orthogonalize: a function that takes the directions of matrices of one shape, [batch, rows,
            columns], and returns what replaces them, instead of the iterations. An error in it
            leaves some of the parameters stepped. State dicts have no functions: a load keeps the
            optimizer's own.
        orthogonalize_over: the process group of ranks with equal parameters and gradients, such as
            DDP's, which then divide the matrices among them. By default each orthogonalizes all.
            Parameters that are DTensors, or not contiguous, are left out.
        adjust_lr_fn: "original" (None), "match_rms_adamw", "spectral_unclamped", or a function that
            takes rows and columns and returns a factor.
        **options, and errors: as in :class:`FusedOptimizer`.
    """

    estimate = staticmethod(partial(estimate, algorithm="muon"))

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[Any] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | Callable[[int, int], float] | None = None,
        *,
        maximize: bool = False,
        beta2: float = 0.0,
        orthogonalize_dtype: torch.dtype | None = None,
        orthogonalize: Callable[[Tensor], Tensor] | None = None,
        orthogonalize_over: Any = None,
        **options: Unpack[StepArguments],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        more = {
            "maximize": maximize, "beta2": beta2, "orthogonalize_dtype": orthogonalize_dtype,
            "orthogonalize": orthogonalize,
        }  # fmt: skip
        defaults |= {key: value for key, value in more.items() if value}  # torch's groups lack them
        expect_group(orthogonalize_over, "orthogonalize_over")
        self.orthogonalize_over = orthogonalize_over
        self._build(params, {"algorithm": "muon", **defaults}, options)
