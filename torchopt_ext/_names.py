"""The nearest names, for messages about unknown ones. Without torch, as the command line needs."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

SAME = [
    names.split()
    for names in (
        "max_grad_norm clip_grad_norm max_norm grad_clip clip_grad gradient_clipping clipping "
        "gradient_clip_val clip_value clip_threshold clip clipnorm clip_norm global_clipnorm "
        "max_gradient_norm max_norm_grad",
        "lr learning_rate",
        "weight_decay wd",
        "skip_nonfinite skip_nan skip_inf skip_overflow check_overflow check_for_nan_in_grad",
        "master_weights fp32_master_weights keep_master_weights master_dtype",
        "state_dtype optim_bits exp_avg_dtype momentum_dtype optim_states_dtype quantize",
        "ema_decay ema ema_weights use_ema",
        "stochastic_rounding bf16_stochastic_round use_stochastic_rounding",
        "process_group group pg",
        "init_scale initial_scale initial_scale_power loss_scale grad_scal_cfg",
        "growth_interval scale_window loss_scale_window scale_growth_interval",
        "growth_factor scale_factor",
        "min_scale min_loss_scale",
        "max_scale max_loss_scale",
        "grad_scal_cfg grad_scaler scaler",
    )
]
"""Names of the same argument here and in torch, apex, bitsandbytes, Megatron and trainers."""


def did_you_mean(name: str, *names: Any) -> str:
    """Returns a question with the name that was :func:`meant`, for the end of a message, or ""."""
    ours = meant(name, *names)
    return ours and f"; did you mean {ours!r}?"


def meant(name: str, valid: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Returns the valid name that an unknown one most likely means, or "".

    Args:
        elsewhere: valid names by other names for the same; None for those of arguments.
    """
    known = {ours: ours for ours in valid}
    if elsewhere is None:
        found = [(next((n for n in names if n in known), None), names) for names in SAME]
        elsewhere = {other: ours for ours, names in reversed(found) for other in names if ours}
    known = {other: ours for other, ours in elsewhere.items() if ours in known} | known
    near = difflib.get_close_matches(name, known, n=1)
    return known[near[0]] if near else ""


def nearest(text: str, names: Iterable[str]) -> list[str]:
    """Returns the names that are most like a text in which none was found."""
    return difflib.get_close_matches(text, [*names], n=3, cutoff=0.0)
