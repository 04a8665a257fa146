"""Exchange of directions between the ranks that hold parts of matrices and the matrices' owners.

Storage stays where it is. Each rank sends its piece of a direction to the owner, which has the
whole matrix for the duration of the exchange, orthogonalizes it, and returns the pieces:

    average   rank 0: rows 0, 1 | rank 1: rows 2, 3      momentum, on the shards
    all-to-all          \\          /
    owner           rows 0, 1, 2, 3                       Newton-Schulz iterations
    all-to-all          /          \\
    apply     rank 0: rows 0, 1 | rank 1: rows 2, 3      weights, on the shards
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext.optim.owners import Exchange, SharedParam, digest_of, plan_exchanges
from torchopt_ext.state.collective import collective, comm_device, wait
from torchopt_ext.state.devices import moved

_WHAT = "exchanging directions of matrices"


class Exchangers:
    """The exchanges of a plan.

    Args:
        params: those whose matrices are cut.
        groups: the process groups of such parameters, by position.
        devices: the device of each part of the plan.
        planned: the positions of the parameters in the plan; others have no state yet.

    Attributes:
        present: positions of the parameters that have a gradient in this step, on all ranks.
        digests: a number for each group, which differs where ranks have other exchanges.
    """

    def __init__(
        self,
        params: Sequence[SharedParam],
        groups: Mapping[int, Any],
        devices: Sequence[torch.device],
        planned: Collection[int],
    ) -> None:
        self.present: Collection[int] = ()
        self.groups, self.digests = groups, {}
        self._parts: dict[int, Exchanger] = {}
        for group in dict.fromkeys(groups[param.position] for param in params):
            own = [param for param in params if groups[param.position] is group]
            by_part = plan_exchanges(own, dist.get_process_group_ranks(group))
            self.digests[group] = digest_of(by_part)
            for part, exchanges in by_part.items():
                assert part not in self._parts, "parameters of a part have equal meshes"
                self._parts[part] = Exchanger(exchanges, group, devices[part], planned)

    @property
    def numbers(self) -> dict[int, int]:
        """The number of each parameter's exchange, by position."""
        return {
            param.position: number
            for part in self._parts.values()
            for number, exchange in enumerate(part.exchanges)
            for param, _ in exchange
        }

    def __call__(self, part: int, average: Any, apply: Any) -> int:
        return self._parts[part].run(self.present, average, apply)


class Exchanger:
    """Runs the exchanges of one part of a plan.

    Args:
        exchanges: as :func:`torchopt_ext.optim.owners.plan_exchanges` returns them.
        group: the ranks that share the matrices.
        device: of the parameters.
        planned: the positions of the parameters in the plan.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        group: Any,
        device: torch.device,
        planned: Collection[int],
    ) -> None:
        self.exchanges, self.group, self.device, self.planned = exchanges, group, device, planned
        self.rank, self.ranks = dist.get_rank(group), range(dist.get_world_size(group))

    def run(
        self,
        present: Collection[int],
        average: Callable[[int], list[Tensor | None]],
        apply: Callable[[int], None],
    ) -> int:
        """Runs all exchanges, up to three at a time: the products of one hide the next transfer.

        Args:
            present: positions of the parameters that have a gradient, the same on all ranks.
            average, apply: as csrc/plan/orthogonal_update.h has them.

        Returns:
            The number of matrices that were orthogonalized, by all ranks.

        Raises:
            RuntimeError: a rank died or is late; the message says which parameters were stepped.
        """
        stages: list[_Stages] = []
        averaged = applied = 0
        try:
            for k in range(len(self.exchanges) + 2):
                if k < len(self.exchanges):
                    averaged = k + 1
                    stages.append(self._begun(k, average, present))
                if 0 < k <= len(self.exchanges):
                    stages[k - 1].orthogonalize()
                if k > 1:
                    stages[k - 2].take_back()
                    if self._is_planned(k - 2):
                        apply(k - 2)
                    applied = k - 1
        except Exception as error:
            done, begun = (
                [param.called for exchange in self.exchanges[first:last]
                 for param, _ in exchange if param.position in present]
                for first, last in ((0, applied), (applied, averaged))
            )  # fmt: skip
            raise RuntimeError(
                f"the step ended while {_WHAT}: {error}. These parameters were stepped: "
                f"[{', '.join(done)}]. These have a new momentum and old weights: "
                f"[{', '.join(begun)}]. Load a checkpoint"
            ) from error
        return sum(len(param.blocks) for stage in stages for param, _, _ in stage.held)

    def _is_planned(self, number: int) -> bool:
        return any(param.position in self.planned for param, _ in self.exchanges[number])

    def _begun(self, number: int, average: Any, present: Collection[int]) -> "_Stages":
        exchange = self.exchanges[number]
        planned = [param.position for param, _ in exchange if param.position in self.planned]
        found = dict(zip(planned, average(number) if planned else (), strict=True))
        return _Stages(self, exchange, [found.get(p.position) for p, _ in exchange], present)


class _Stages:
    """One exchange of one step.

    Attributes:
        held: parameters with a gradient, one of their matrices, and the direction of the shard.
    """

    def __init__(
        self,
        of: Exchanger,
        exchange: Exchange,
        directions: Sequence[Tensor | None],
        present: Collection[int],
    ) -> None:
        self.of = of
        self.like = torch.empty(0, dtype=exchange[0][0].dtype, device=of.device)
        self.held = [
            (param, matrix, self.like if direction is None else direction)
            for (param, matrices), direction in zip(exchange, directions, strict=True)
            if param.position in present
            for matrix in matrices
        ]
        self.owned = [(param, matrix) for param, matrix, _ in self.held if matrix.owner == of.rank]
        self._begin(
            lambda rank: [
                matrix.pieces[of.rank].of_local(direction)
                for _, matrix, direction in self.held
                if matrix.owner == rank and of.rank in matrix.senders
            ],
            lambda rank: [m.pieces[rank].numel for _, m in self.owned if rank in m.senders],
        )

    def orthogonalize(self) -> None:
        """Has the owner orthogonalize what arrives, and sends it back."""
        offsets = [0]
        for _, matrix in self.owned:
            offsets.append(offsets[-1] + matrix.numel)
        whole = self.like.new_empty(offsets.pop())
        owned = [(*pair, offset) for pair, offset in zip(self.owned, offsets, strict=True)]
        self._end(
            [
                matrix.pieces[rank].of_whole(whole, offset)
                for rank in self.of.ranks
                for _, matrix, offset in owned
                if rank in matrix.senders
            ]
        )
        by_settings: dict[tuple[Any, ...], list[Any]] = {}
        for param, _, offset in owned:
            blocks = by_settings.setdefault(param.settings, [])
            blocks += [(first + offset, *block) for first, *block in param.blocks]
        for settings, blocks in by_settings.items():
            _C.orthogonalize_(whole, blocks, *settings)
        self._begin(
            lambda rank: [
                matrix.pieces[rank].of_whole(whole, offset)
                for _, matrix, offset in owned
                if rank in matrix.pieces
            ],
            lambda rank: [
                matrix.pieces[self.of.rank].numel
                for _, matrix, _ in self.held
                if matrix.owner == rank and self.of.rank in matrix.pieces
            ],
        )

    def take_back(self) -> None:
        """Waits for this rank's pieces, which replace its directions."""
        rank = self.of.rank
        self._end(
            [
                matrix.pieces[rank].of_local(direction)
                for owner in self.of.ranks
                for _, matrix, direction in self.held
                if matrix.owner == owner and rank in matrix.pieces
            ]
        )

    def _begin(
        self, sent_to: Callable[[int], list[Tensor]], received_from: Callable[[int], list[int]]
    ) -> None:
        """Begins an all-to-all of pieces: of what is sent to a rank, and of these sizes from it."""
        if not self.held:
            return
        of = self.of
        sent = [sent_to(rank) for rank in of.ranks]
        device = comm_device(of.group, of.device)
        # Kept until the transfer has ended. Bytes: gloo does not send every dtype.
        pieces = [self.like, *(piece.reshape(-1) for own in sent for piece in own)]
        self._sent = moved(torch.cat(pieces), device)
        self._sizes = [size for rank in of.ranks for size in received_from(rank)]
        self._received = torch.empty(sum(self._sizes), dtype=self.like.dtype, device=device)
        width = self.like.itemsize
        with collective(_WHAT):
            self._work = dist.all_to_all_single(
                self._received.view(torch.uint8),
                self._sent.view(torch.uint8),
                [width * sum(received_from(rank)) for rank in of.ranks],
                [width * sum(piece.numel() for piece in own) for own in sent],
                group=of.group,
                async_op=True,
            )

    def _end(self, pieces: list[Tensor]) -> None:
        """Waits for the all-to-all, and copies what arrived to pieces, in the order of ranks."""
        if not self.held:
            return
        with collective(_WHAT):
            wait(self._work)
        arrived = moved(self._received, self.of.device).split_with_sizes(self._sizes)
        if pieces:
            views = [a.view(p.shape) for a, p in zip(arrived, pieces, strict=True)]
            torch._foreach_copy_(pieces, views)
        del self._sent, self._received, self._work
