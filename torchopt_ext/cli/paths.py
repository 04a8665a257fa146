"""How long each way to step states on the host takes, by arithmetic (docs/offload_step.md)."""

from __future__ import annotations

import math
from collections.abc import Collection

from torchopt_ext.optim.bandwidths import Bandwidths, streamed
from torchopt_ext.optim.estimate import RankBytes

MAPPED, STAGED, HOST = "mapped", "staged", "host"
STREAMED = (MAPPED, STAGED)
"""These move the same bytes. Which is faster on a GPU is for bench --offload to say."""


def slowest(
    ranks: Collection[RankBytes], link: float, host_bandwidth: float | None
) -> dict[str, float]:
    """Returns the seconds of a step by path, on the rank that takes most.

    They are proportional to the part of the states that lies on the host. Without the bandwidth of
    its memory, that is no limit, and the step of the CPU is left out.
    """
    rates = Bandwidths(link, host_bandwidth or math.inf)
    each = {(rank.host, rank.host_step) for rank in ranks}
    found = dict.fromkeys(STREAMED, max(rates.seconds(streamed(host)) for host, _ in each))
    if host_bandwidth:
        found[HOST] = max(rates.seconds(step) for _, step in each)
    return found


def fastest(seconds: dict[str, float]) -> str:
    """Returns the path that takes the least time; of equal ones the first."""
    return min(seconds, key=seconds.__getitem__)
