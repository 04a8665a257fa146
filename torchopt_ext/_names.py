"""The nearest names, for messages about unknown ones. Without torch, as the command line needs."""

import difflib
from collections.abc import Iterable, Mapping

ELSEWHERE = {
    name: ours
    for ours, names in {
        "max_grad_norm": "clip_grad_norm max_norm grad_clip clip_grad gradient_clipping clipping "
        "gradient_clip_val clip_value clip_threshold clip clipnorm clip_norm global_clipnorm "
        "max_gradient_norm max_norm_grad",
        "lr": "learning_rate",
        "weight_decay": "wd",
        "skip_nonfinite": "skip_nan skip_inf skip_overflow check_overflow check_for_nan_in_grad",
        "master_weights": "fp32_master_weights keep_master_weights master_dtype",
        "state_dtype": "optim_bits exp_avg_dtype momentum_dtype optim_states_dtype quantize",
        "ema_decay": "ema ema_weights use_ema",
        "stochastic_rounding": "bf16_stochastic_round use_stochastic_rounding",
    }.items()
    for name in names.split()
}
"""Arguments by what torch, apex, bitsandbytes, torchao, Megatron and trainers call them."""


def did_you_mean(name: str, valid: Iterable[str], elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """Returns a question for the end of a message about an unknown name, or "".

    Args:
        elsewhere: valid names by other names for the same.
    """
    known = {ours: ours for ours in valid}
    known |= {other: ours for other, ours in elsewhere.items() if ours in known}
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {known[near[0]]!r}?" if near else ""


def nearest(text: str, names: Iterable[str]) -> list[str]:
    """Returns the names that are most like a text in which none was found."""
    return difflib.get_close_matches(text, [*names], n=3, cutoff=0.0)
