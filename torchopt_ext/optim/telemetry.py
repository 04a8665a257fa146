"""Records of a tracked step about each parameter, from values that the step reads anyway."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchopt_ext._C import OptimizerPlan
from torchopt_ext.optim.local import moved

TRACKED = {"norms": 1, "lost_updates": 2, "digest": 4}
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
    rank's shard: squares of norms, counts and digests of all shards add up.
    """

    names: list[str]
    """The parameters' names, or their numbers if they have no names."""
    track: int
    """The bits of what was tracked; reading other values raises RuntimeError."""
    _norms: Tensor
    _counts: Tensor

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
        return self._tracked("lost_updates", self._counts[:, 0])

    @property
    def digests(self) -> Tensor:
        """int64: order-independent digests of weight and moments after the step, modulo 2**64.

        Weights are the fp32 masters if there are any. A parameter without a gradient has the digest
        of its last step; after ``load_state_dict`` it has 0 until its next step.
        """
        return self._tracked("digest", self._counts[:, 1])

    def _tracked(self, name: str, values: Tensor) -> Tensor:
        if not self.track & TRACKED[name]:
            raise RuntimeError(f"{name!r} was not tracked: name it in the optimizer's track=")
        return values

    def digest(self) -> int:
        """Returns all digests as one number below 2**64, equal on ranks with equal values."""
        return int(self.digests.sum().item()) % 2**64


def keep_digests(plan: OptimizerPlan, digests: Sequence[Tensor | None]) -> None:
    """Copies an old plan's digests to a new plan, in the order of the parameters with state."""
    for _, counts, positions in plan.traces():
        for row, position in enumerate(positions):
            if (known := digests[position]) is not None:
                counts[row, 1] = known


def telemetry_of(plan: OptimizerPlan, names: list[str], track: int) -> Telemetry:
    """Returns the plan's traces by parameter, in the order in which the plan was given them."""
    traces = plan.traces()
    device = traces[0][0].device if traces else torch.device("cpu")
    norms = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    counts = torch.zeros(len(names), 2, dtype=torch.int64, device=device)
    for part_norms, part_counts, positions in traces:
        rows = moved(torch.tensor(positions, dtype=torch.long, device="cpu"), device)
        norms[rows] = moved(part_norms, device)
        counts[rows] = moved(part_counts, device)
    return Telemetry(names, track, norms, counts)
