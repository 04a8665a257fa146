"""The greedy partition: every parameter belongs to one rank, which updates it for all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C, ops
from torchopt_ext._torch import flatten_dense, unflatten_dense
from torchopt_ext.state.collective import collective, wait
from torchopt_ext.state.matrices import OPERATIONS, newton_schulz_flops
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.part import Part, view_in
from torchopt_ext.zero.ranks import RETURNING, Ranks, batches, flat_memory

ALIGNMENT = 64
"""Parameters start at multiples of this many bytes: no vector load crosses a cache line."""


class WholeTensors:
    """The greedy partition: who owns which parameter, and how updates reach the other ranks.

    Parameters are assigned group by group, largest first, each to the rank that has least so far
    (torch.distributed.optim.ZeroRedundancyOptimizer); Muon's count by what their steps cost. Frozen
    parameters weigh nothing. The same rule spreads them separately, so that unfreezing a parameter
    moves no state.

    With ``bucket_view`` a rank's parameters become views of one tensor, which is sent as a whole.
    """

    def __init__(self, ranks: Ranks, params: Parameters, bucket_view: bool) -> None:
        self.ranks = ranks
        self._params = params
        self.bucket_view = bucket_view
        self.owner: dict[Tensor, int] = {}
        self.params: list[list[list[Tensor]]] = []  # by group and rank
        # Costs by rank, of parameters that weigh (True) and of parameters that do not (False).
        self._loads = {True: [0] * ranks.size, False: [0] * ranks.size}
        # Parameters that were trainable at some step. A parameter frozen since may still have a
        # gradient that its owner applies, so it continues to be sent.
        self._sent: set[Tensor] = set()
        self._unsent: list[Tensor] = []  # the other parameters
        self._places = b""  # where all parameters lie
        self._outgoing: list[list[list[Tensor]]] = []  # by rank, the batches of parameters to send

    def add_group(
        self,
        params: Sequence[Tensor],
        muon: Mapping[str, Any] | None = None,
        per_rank: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """Assigns the parameters of one more group. Earlier groups stay where they are.

        Args:
            muon: the group's settings if its matrices are orthogonalized, which costs more.
            per_rank: each rank's parameters, instead of the greedy rule; it may leave some out.
        """
        if per_rank is None:
            per_rank = self._assign(params, muon)
        self.params.append([list(of_rank) for of_rank in per_rank])
        for rank, of_rank in enumerate(self.params[-1]):
            self.owner |= dict.fromkeys(of_rank, rank)

    def _assign(
        self, params: Sequence[Tensor], muon: Mapping[str, Any] | None
    ) -> list[list[Tensor]]:
        owner: dict[Tensor, int] = {}
        costs = {param: OPERATIONS * param.numel() for param in params}
        if muon is not None:
            for number, param in enumerate(params):
                costs[param] += newton_schulz_flops(muon, param, number)
        for weighs in (True, False):
            chosen = [p for p in params if p.requires_grad is weighs]
            sizes = [costs[param] for param in chosen]
            loads = [*self._loads[weighs]]
            ties = None if weighs else self._loads[True]
            owners = ops.partition_greedy(sizes, self.ranks.size, loads, ties)
            for param, size, rank in zip(chosen, sizes, owners, strict=True):
                owner[param] = rank
                loads[rank] += size
            self._loads[weighs] = loads
        per_rank: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for param in sorted(params, key=lambda p: -p.numel()):  # the order in torch's groups
            per_rank[owner[param]].append(param)
        return per_rank

    @property
    def grows(self) -> list[Any]:
        """The objects that have more in their attributes after :meth:`add_group`."""
        return [self]

    @property
    def mine(self) -> list[list[Tensor]]:
        """This rank's parameters, group by group."""
        return [group[self.ranks.rank] for group in self.params]

    # Steps take the parameters and their gradients: there is nothing to follow or to clean up.
    gradients_are_sharded = holds_gradients = False

    def finish_step(self) -> None: ...

    def follow_memory(self) -> None: ...

    def zero_grad(self, set_to_none: bool) -> None: ...

    def written(self) -> list[Tensor]:
        """Returns nothing: the local optimizer steps the parameters, and sees writes itself."""
        return []

    def take_gradients(self) -> None:
        """Builds the buckets anew if memory was replaced (``p.data = ...``)."""
        if self.ranks.size > 1:
            self._params.check_frozen(self._unsent)
        if _C.places(list(self.owner)) != self._places:
            self._params.check_untied()
            self.build_buckets()

    def part_of(self, param: Tensor) -> Part:
        return Part(param, 0, param.numel(), param, param)

    @torch.no_grad()
    def build_buckets(self) -> None:
        """Batches the parameters that were trainable at some step, for sending.

        With ``bucket_view`` they become views of one bucket per rank, device and dtype.
        """
        self._outgoing, self._unsent = [], []
        for rank in range(self.ranks.size):
            kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for group in self.params:
                self._sent.update(p for p in group[rank] if p.requires_grad)
                self._unsent += [p for p in group[rank] if p not in self._sent]
                for param in group[rank]:
                    if param in self._sent and param.numel():
                        kinds.setdefault((param.device, param.dtype), []).append(param)
            if self.bucket_view:
                self._outgoing.append([[bucket_of(alike)] for alike in kinds.values()])
            else:
                self._outgoing.append([b for alike in kinds.values() for b in batches(alike)])
        self._places = _C.places(list(self.owner))

    def send_updates(self) -> None:
        """Sends every parameter from its owner to all other ranks."""
        self._send(self._outgoing)

    def send(self, param: Tensor) -> None:
        """Sends one parameter from its owner to all other ranks. Raises ValueError without one."""
        if param not in self.owner:
            raise ValueError(f"{self._params.called(param)} is no rank's in params_per_rank")
        batch = [[param]] if param.numel() else []
        self._send([batch * (rank == self.owner[param]) for rank in range(self.ranks.size)])

    @torch.no_grad()
    def _send(self, outgoing: Sequence[Sequence[list[Tensor]]]) -> None:
        """Sends batches of parameters, by their owner, to all other ranks."""
        if self.ranks.size == 1:
            return
        with collective(RETURNING, self.ranks.timeout):
            works: list[Any] = []
            unpack: list[tuple[list[Tensor], list[Tensor]]] = []
            for rank in range(self.ranks.size):
                for batch in outgoing[rank]:
                    flat = flat_memory(batch[0]) if len(batch) == 1 else None
                    if flat is None:
                        flat = flatten_dense([p.data for p in batch])
                        if rank != self.ranks.rank:
                            unpack.append((unflatten_dense(flat, batch), batch))
                    works.append(self.ranks.broadcast(flat, rank))
            for work in works:
                wait(work)
        with torch.inference_mode():  # else it raises for parameters that were made in it
            for packed, params in unpack:
                torch._foreach_copy_(params, packed)


def bucket_of(params: Sequence[Tensor]) -> Tensor:
    """Makes the parameters views of one 1-D tensor, in their own order of dimensions."""
    dtype, device = params[0].dtype, params[0].device
    step = ALIGNMENT // dtype.itemsize
    starts = [0]
    for param in params:
        starts.append(-(-(starts[-1] + param.numel()) // step) * step)
    bucket = torch.zeros(starts[-1], dtype=dtype, device=device)
    for param, start in zip(params, starts, strict=False):
        param.data = view_in(bucket, start, param).copy_(param.detach())
    return bucket
