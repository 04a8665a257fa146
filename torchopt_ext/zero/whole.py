"""Whole tensors: every parameter belongs to one rank, which updates it for all the others."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import _C, ops
from torchopt_ext._torch import flatten_dense, unflatten_dense
from torchopt_ext.optim.collective import collective, wait
from torchopt_ext.optim.storage import Place
from torchopt_ext.zero.part import Part, view_in
from torchopt_ext.zero.ranks import Ranks, flat_memory

ALIGNMENT = 64
"""Bytes between starts of parameters in a bucket: vector loads never cross a cache line."""

SMALL = 1 << 20
"""Tensors of fewer bytes travel together."""

STAGING = 16 << 20
"""Bytes that small tensors are packed into at a time."""


class WholeTensors:
    """Who owns which parameter, and how updated parameters reach the other ranks.

    Parameters are assigned group by group, largest first, each to the rank that has least so far
    (torch.distributed.optim.ZeroRedundancyOptimizer); frozen ones weigh nothing, but are spread by
    the same rule among themselves, so that unfreezing one moves no state.

    Args:
        ranks: among whom.
        bucket_view: parameters of a rank become views of one tensor, which travels as a whole.
        count_frozen: frozen parameters weigh as much as others, as in torch.
    """

    def __init__(self, ranks: Ranks, *, bucket_view: bool, count_frozen: bool) -> None:
        self.ranks = ranks
        self.bucket_view = bucket_view
        self.count_frozen = count_frozen
        self.owner: dict[Tensor, int] = {}
        self.params: list[list[list[Tensor]]] = []  # by group and rank
        self.buckets: list[list[Tensor]] = []  # by kind (device and dtype) and rank
        self._loads = [0] * ranks.size
        self._frozen_loads = [0] * ranks.size
        # Parameters that were trainable at some step: a frozen one may still have a gradient that
        # its owner applies, so once returned, always returned.
        self._returned: dict[Tensor, None] = {}
        self._viewed: list[Tensor] = []  # the parameters that are views of buckets
        self._places = b""  # and where they are
        self._outgoing: list[tuple[list[Tensor], list[list[Tensor]]]] = []

    def add_group(
        self, params: Sequence[Tensor], per_rank: Sequence[Sequence[Tensor]] | None = None
    ) -> None:
        """Assigns the parameters of one more group; earlier groups stay where they are.

        Args:
            params: the group's parameters.
            per_rank: who is to own which, instead of the rule; some may be left out.
        """
        if per_rank is None:
            per_rank = self._assign(params)
        self.params.append([list(own) for own in per_rank])
        for rank, own in enumerate(self.params[-1]):
            self.owner |= dict.fromkeys(own, rank)
        self.build_buckets()

    def _assign(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        weighs = [self.count_frozen or param.requires_grad for param in params]
        owner: dict[Tensor, int] = {}
        for kind, loads, ties in (
            (True, self._loads, None),
            (False, self._frozen_loads, self._loads),
        ):
            chosen = [param for param, w in zip(params, weighs, strict=True) if w is kind]
            sizes = [param.numel() for param in chosen]
            found = ops.partition_greedy(sizes, self.ranks.size, loads, ties)
            for param, size, rank in zip(chosen, sizes, found, strict=True):
                owner[param] = rank
                loads[rank] += size
        per_rank: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for param in sorted(params, key=lambda p: -p.numel()):  # the order of torch's groups
            per_rank[owner[param]].append(param)
        return per_rank

    @property
    def mine(self) -> list[list[Tensor]]:
        """This rank's parameters, group by group."""
        return [group[self.ranks.rank] for group in self.params]

    # Gradients are the parameters' own.
    hides_gradients = False

    def ready(self) -> None:
        """There is nothing to do once there is a local optimizer."""

    def finish_step(self) -> None:
        """There is nothing to do after the local step."""

    def take_gradients(self) -> None:
        """Takes weights whose memory was replaced (``p.data = ...``) into their bucket again."""
        if _C.addresses(self._viewed) != self._places:
            self.build_buckets()

    def zero_grad(self, set_to_none: bool) -> None:
        """There are no gradients but the parameters'."""

    def part_of(self, param: Tensor) -> Part:
        return Part(param, 0, param.numel(), param, divided=False)

    def origin(self, param: Tensor) -> Tensor:
        return param

    def in_param_order(self, param: Tensor, value: Any) -> Any:
        return value

    def places(self, index_of: Mapping[Tensor, int]) -> dict[Tensor, Place]:
        """Where in the model each parameter of this rank is."""
        return {param: (index_of[param], 0, 0, 0) for own in self.mine for param in own}

    def copied(self, memo: dict[int, Any]) -> "WholeTensors":
        """The same for copied parameters (``memo`` is of copy.deepcopy)."""

        def copy_of(param: Tensor) -> Tensor:
            return copy.deepcopy(param, memo)

        other = WholeTensors(
            self.ranks, bucket_view=self.bucket_view, count_frozen=self.count_frozen
        )
        other._loads, other._frozen_loads = list(self._loads), list(self._frozen_loads)
        other.owner = {copy_of(param): rank for param, rank in self.owner.items()}
        other.params = [[[copy_of(p) for p in own] for own in group] for group in self.params]
        other._returned = {copy_of(param): None for param in self._returned}
        other.build_buckets()
        return other

    def kinds(self) -> dict[tuple[torch.device, torch.dtype], list[list[Tensor]]]:
        """Parameters by device and dtype, and then by rank: what may share a tensor."""
        found: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
        for group in self.params:
            for rank, own in enumerate(group):
                for param in own:
                    kind = (param.device, param.dtype)
                    found.setdefault(kind, [[] for _ in range(self.ranks.size)])[rank].append(param)
        return found

    # ---- buckets ----------------------------------------------------------------------------

    @torch.no_grad()
    def build_buckets(self) -> None:
        """Lets trainable parameters become views of one bucket for each kind and rank."""
        for group in self.params:
            for own in group:
                self._returned |= dict.fromkeys(p for p in own if p.requires_grad)
        if not self.bucket_view:
            self._plan_sends()
            return
        old = {bucket.untyped_storage().data_ptr() for kind in self.buckets for bucket in kind}
        self.buckets, self._viewed = [], []
        for (device, dtype), per_rank in self.kinds().items():
            self.buckets.append([])
            for own in per_rank:
                for param in own:
                    if param not in self._returned and param.untyped_storage().data_ptr() in old:
                        param.data = param.data.clone()
                viewed = [param for param in own if param in self._returned]
                self.buckets[-1].append(bucket_of(viewed, dtype, device))
                self._viewed += viewed
        self._places = _C.addresses(self._viewed)

    # ---- returning parameters ---------------------------------------------------------------

    @torch.no_grad()
    def return_params(self) -> None:
        """Every rank gets every parameter as its owner has it now."""
        if self.ranks.size == 1:
            return
        with collective("returning the updated parameters", self.ranks.timeout):
            works: list[Any] = []
            unpack: list[tuple[list[Tensor], list[Tensor]]] = []
            for rank in range(self.ranks.size):
                self.send_from(rank, works, unpack)
            for work in works:
                wait(work)
        for packed, params in unpack:
            torch._foreach_copy_(params, packed)

    def send_from(
        self, rank: int, works: list[Any], unpack: list[tuple[list[Tensor], list[Tensor]]]
    ) -> None:
        """Starts sending rank ``rank``'s parameters: appends what to wait for, then to copy."""
        source = self.ranks.global_rank(rank)

        def send(memory: Tensor) -> None:
            work = dist.broadcast(memory, source, group=self.ranks.group, async_op=True)
            works.append(work)

        if self.bucket_view:
            for kind in self.buckets:
                if kind[rank].numel():
                    send(kind[rank].view(torch.uint8))
            return
        large, small = self._outgoing[rank]
        for param in large:
            memory = flat_memory(param)
            assert memory is not None
            send(memory)
        for batch in small:
            flat = flatten_dense([p.detach() for p in batch])
            send(flat.view(torch.uint8))
            if rank != self.ranks.rank:
                unpack.append((unflatten_dense(flat, batch), batch))

    def _plan_sends(self) -> None:
        """For every rank, the parameters it sends as they are, and the batches it packs."""
        self._outgoing = []
        kinds = self.kinds()
        for rank in range(self.ranks.size):
            large: list[Tensor] = []
            small: list[list[Tensor]] = []
            for per_rank in kinds.values():
                sent = [p for p in per_rank[rank] if p in self._returned and p.numel()]
                as_it_is = [nbytes(p) >= SMALL and flat_memory(p) is not None for p in sent]
                large += [p for p, whole in zip(sent, as_it_is, strict=True) if whole]
                small += batches(p for p, whole in zip(sent, as_it_is, strict=True) if not whole)
            self._outgoing.append((large, small))


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def batches(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in runs of at most STAGING bytes, or of one."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if nbytes(tensor) > room or not found:
            found.append([])
            room = STAGING
        found[-1].append(tensor)
        room -= nbytes(tensor)
    return found


def bucket_of(params: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D tensor of which the parameters become views, in their own order of dimensions."""
    step = ALIGNMENT // dtype.itemsize
    starts = [0]
    for param in params:
        starts.append(-(-(starts[-1] + param.numel()) // step) * step)
    bucket = torch.zeros(starts[-1], dtype=dtype, device=device)
    for param, start in zip(params, starts, strict=False):
        param.data = view_in(bucket, start, param).copy_(param.detach())
    return bucket
