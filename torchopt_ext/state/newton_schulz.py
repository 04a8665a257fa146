"""Coefficients of Newton-Schulz iterations."""

import math
from collections.abc import Sequence

from torchopt_ext._arguments import expect_counts

Triple = tuple[float, float, float]

JORDAN = (3.4445, -4.7750, 2.0315)
"""torch.optim.Muon's coefficients, from https://kellerjordan.github.io/posts/muon/."""

PRESETS: dict[str, tuple[Triple, ...]] = {
    "jordan": (JORDAN,) * 5,
    # https://leloykun.github.io/ponder/muon-opt-coeffs/
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # arXiv:2505.16932, with its safety factor 1.01, as Emerging-Optimizers has them. Each step is
    # the best for the interval that the steps before leave, so any number of them can be taken.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # DeepSeek-V4's report: eight fast steps, then two that converge.
    "deepseek_v4": (JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # arXiv:2506.10935, as Emerging-Optimizers has them, but with a safety factor of 1.03: those
    # take a singular value 0.1 % above their interval to infinity, and rounding to bf16 moves it by
    # more than 1 %.
    "cans": (
        (8.2236, -22.9775, 16.0698),
        (4.1016, -2.9311, 0.5264),
        (3.8850, -2.7853, 0.5104),
        (3.2228, -2.3239, 0.4600),
        (2.2295, -1.5507, 0.3773),
    ),
}
"""The coefficients of each step, by the name of the preset."""

_DEFAULT_STEPS = 5


def step_coefficients(
    coefficients: str | Triple | Sequence[Triple] = "jordan", steps: int | None = None
) -> list[Triple]:
    """Returns the coefficients (a, b, c) of each step.

    Args:
        coefficients: the name of one of :data:`PRESETS`, one triple for all steps, or a list with a
            triple for each step.
        steps: the number of steps, 0 to 99. With more than the list has, its last triple is
            repeated; with fewer, its first are taken. By default 5 for one triple and for
            "polar_express", and otherwise as many as the list or preset has.

    Raises:
        TypeError: the coefficients are neither a name nor a sequence, or ``steps`` is no integer.
        ValueError: there is no such preset, a triple has not three finite numbers, or ``steps`` is
            out of range.
    """
    if not isinstance(coefficients, Sequence):
        raise TypeError(
            f"coefficients is {coefficients!r:.200}, expected the name of a preset or numbers"
        )
    if steps is not None:
        expect_counts(steps=steps)
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            names = ", ".join(map(repr, PRESETS))
            raise ValueError(
                f"coefficients is {coefficients!r}, expected one of {names} or numbers"
            )
        if coefficients == "polar_express" and steps is None:
            steps = _DEFAULT_STEPS
        triples = list(PRESETS[coefficients])
    elif coefficients and not isinstance(coefficients[0], Sequence):
        triples = [_triple(coefficients)]
        steps = _DEFAULT_STEPS if steps is None else steps
    else:
        triples = [_triple(x) for x in coefficients]
    if steps is None:
        steps = len(triples)
    if not 0 <= steps < 100:
        raise ValueError(f"steps is {steps}, expected 0 to 99")
    if steps and not triples:
        raise ValueError(f"coefficients has no triple for {steps} steps")
    if not all(math.isfinite(value) for triple in triples for value in triple):
        raise ValueError(f"coefficients is {coefficients!r:.200}, expected finite numbers")
    return (triples + triples[-1:] * steps)[:steps]


def _triple(values: object) -> Triple:
    if isinstance(values, Sequence) and len(values) == 3:
        a, b, c = (float(x) for x in values)
        return a, b, c
    raise ValueError(f"coefficients has {values!r}, expected three numbers (a, b, c)")
