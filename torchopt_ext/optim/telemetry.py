"""Records of a tracked step about each parameter, from values that the step reads anyway."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from torchopt_ext._C import OptimizerPlan
from torchopt_ext.state.devices import moved

__all__ = ["Telemetry"]

TRACKED = {"norms": 1, "lost_updates": 2}
"""The names of records, with their bits in Track of csrc/kernels/trace.h."""


def track_bits(track: bool | str | Collection[str]) -> int:
    """Returns the bits of what to track: a name or names of :data:`TRACKED`, or True for all."""
    if not isinstance(track, bool | Collection):
        raise TypeError(f"track is {track!r:.200}, expected a bool or some of {list(TRACKED)}")
    names = {track} if isinstance(track, str) else set(TRACKED if track is True else track or ())
    if not names <= TRACKED.keys():
        raise ValueError(f"Invalid track: {track!r}, expected some of {list(TRACKED)}")
    return sum(TRACKED[name] for name in names)


@dataclass(frozen=True)
class Telemetry:
    """The record of the last step that was not skipped, for every parameter with state.

    Tensors have one element per parameter, in the order of the param groups, on the first
    parameter's device. Only reading a value synchronizes. For a DTensor the values are of this
    rank's shard: squares of norms and counts of all shards add up.
    """

    names: list[str]
    """The parameters' names, or their numbers if they have no names."""
    track: int
    """The bits of what was tracked; reading other values raises RuntimeError."""
    _norms: Tensor
    _lost: Tensor

    @property
    def grad_norms(self) -> Tensor:
        """float64: 2-norms of the unscaled, unclipped gradients; 0 without a gradient."""
        return self._tracked("norms", self._norms[:, 0])

    @property
    def update_norms(self) -> Tensor:
        """float64: 2-norms of the changes of the weights as they are stored."""
        return self._tracked("norms", self._norms[:, 1])

    @property
    def lost_updates(self) -> Tensor:
        """int64: numbers of elements whose update was not zero but rounded to nothing."""
        return self._tracked("lost_updates", self._lost)

    def _tracked(self, name: str, values: Tensor) -> Tensor:
        if not self.track & TRACKED[name]:
            raise RuntimeError(f"{name!r} was not tracked: name it in the optimizer's track=")
        return values


def telemetry_of(plan: OptimizerPlan, names: list[str], track: int) -> Telemetry:
    """Returns the plan's traces by parameter, in the order in which the plan was given them."""
    traces = plan.traces()
    device = traces[0][0].device if traces else torch.device("cpu")
    norms = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    lost = torch.zeros(len(names), dtype=torch.int64, device=device)
    for part_norms, part_lost, positions in traces:
        rows = moved(torch.tensor(positions, dtype=torch.long, device="cpu"), device)
        norms[rows] = moved(part_norms, device)
        lost[rows] = moved(part_lost, device)
    return Telemetry(names, track, norms, lost)
