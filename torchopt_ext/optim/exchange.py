"""Exchange of directions between the ranks that hold parts of matrices and the matrices' owners.

Storage stays where it is. Each rank sends its piece of a direction to the owner, which has the
whole matrix for the duration of the exchange, orthogonalizes it, and returns the pieces:

    average   rank 0: rows 0, 1 | rank 1: rows 2, 3      momentum, on the shards
    all-to-all          \\          /
    owner           rows 0, 1, 2, 3                       Newton-Schulz iterations
    all-to-all          /          \\
    apply     rank 0: rows 0, 1 | rank 1: rows 2, 3      weights, on the shards

NorMuon's averages of rows travel with the directions.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext.optim.owners import (
    Exchange,
    SharedMatrix,
    SharedParam,
    digest_of,
    plan_exchanges,
)
from torchopt_ext.state.collective import collective, comm_device, run, wait
from torchopt_ext.state.devices import moved
from torchopt_ext.state.pieces import Piece

_WHAT = "exchanging directions of matrices"
_connected: "WeakKeyDictionary[Any, set[torch.device]]" = WeakKeyDictionary()

Direction = tuple[Tensor, Tensor | None, float]
"""A tensor's direction, averages of rows and beta2, as csrc/plan/orthogonal_update.h has them."""


class ExchangeError(RuntimeError):
    """An exchange has ended a step that had begun.

    Attributes:
        part: of the plan.
        stepped: what messages call the parameters whose exchanges had ended.
        begun: those with a new momentum and old weights.
    """

    part = 0

    def __init__(self, stepped: Sequence[str], begun: Sequence[str], cause: Any) -> None:
        self.stepped, self.begun, self.cause = stepped, begun, cause
        super().__init__(
            f"the step ended while {_WHAT}: {cause}. These parameters were stepped: "
            f"[{', '.join(stepped)}]. These have a new momentum and old weights: "
            f"[{', '.join(begun)}]. Load a checkpoint"
        )

    def after(self, others: Sequence[str]) -> "ExchangeError":
        """Returns the error of a step that had stepped these parameters before."""
        return ExchangeError([*others, *self.stepped], self.begun, self.cause)


class Exchangers:
    """The exchanges of a plan.

    Args:
        params: those whose matrices are cut.
        groups: the process groups of such parameters, by their tensors' positions.
        devices: the device of each part of the plan.
        planned: the positions of the tensors in the plan; others have no state yet.
        first: as :func:`torchopt_ext.optim.owners.plan_exchanges` takes it.

    Attributes:
        present: numbers of the parameters that have a gradient in this step, on all ranks.
        digests: a number for each group, which differs where ranks have other exchanges.
    """

    def __init__(
        self,
        params: Sequence[SharedParam],
        groups: Mapping[int, Any],
        devices: Sequence[torch.device],
        planned: Collection[int],
        first: int = 0,
    ) -> None:
        self.present: Collection[int] = ()
        self.groups, self.digests = groups, {}
        self._parts: dict[int, Exchanger] = {}
        for group in dict.fromkeys(groups[param.positions[0]] for param in params):
            own = [param for param in params if groups[param.positions[0]] is group]
            by_part = plan_exchanges(own, dist.get_process_group_ranks(group), first)
            self.digests[group] = digest_of(by_part)
            for part, exchanges in by_part.items():
                assert part not in self._parts, "parameters of a part have equal meshes"
                self._parts[part] = Exchanger(exchanges, group, devices[part], planned)

    @property
    def numbers(self) -> dict[int, int]:
        """The number of each tensor's exchange, by position."""
        return {
            position: number
            for part in self._parts.values()
            for number, exchange in enumerate(part.exchanges)
            for param, _ in exchange
            for position in param.positions
        }

    def connect(self) -> None:
        """Opens the connections between ranks, which a backend may only make when they are used.

        All ranks come, before anything changes. Later calls do nothing.
        """
        for part in self._parts.values():
            device = comm_device(part.group, part.device)
            if device in _connected.setdefault(part.group, set()):
                continue
            one = torch.zeros(len(part.ranks), dtype=torch.uint8, device=device)
            with collective("connecting the ranks that share matrices"):
                run(dist.all_to_all_single, torch.empty_like(one), one, group=part.group)
            _connected[part.group].add(device)

    def __call__(self, part: int, average: Any, apply: Any) -> int:
        try:
            return self._parts[part].run(self.present, average, apply)
        except ExchangeError as error:
            error.part = part
            raise


class Exchanger:
    """Runs the exchanges of one part of a plan.

    Args:
        exchanges: as :func:`torchopt_ext.optim.owners.plan_exchanges` returns them.
        group: the ranks that share the matrices.
        device: of the parameters.
        planned: the positions of the tensors in the plan.
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
        average: Callable[[int], list[Direction | None]],
        apply: Callable[[int], None],
    ) -> int:
        """Runs all exchanges, up to three at a time: the products of one hide the next transfer.

        Args:
            present: numbers of the parameters that have a gradient, the same on all ranks.
            average, apply: as csrc/plan/orthogonal_update.h has them.

        Returns:
            The number of matrices that were orthogonalized, by all ranks.

        Raises:
            ExchangeError: a rank died or is late.
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
                 for param, _ in exchange if param.number in present]
                for first, last in ((0, applied), (applied, averaged))
            )  # fmt: skip
            raise ExchangeError(done, begun, error) from error
        return sum(stage.orthogonalized for stage in stages)

    def _is_planned(self, number: int) -> bool:
        return bool(self._planned_positions(self.exchanges[number]))

    def _planned_positions(self, exchange: Exchange) -> list[int]:
        return [at for param, _ in exchange for at in param.positions if at in self.planned]

    def _begun(self, number: int, average: Any, present: Collection[int]) -> "_Stages":
        exchange = self.exchanges[number]
        planned = self._planned_positions(exchange)
        found = dict(zip(planned, average(number) if planned else (), strict=True))
        its = [[found.get(at) for at in param.positions] for param, _ in exchange]
        return _Stages(self, exchange, its, present)


class _Held(NamedTuple):
    """What ranks have pieces of: a matrix's direction, or NorMuon's averages of its rows.

    Attributes:
        local: this rank's flat tensors, by number.
        whole: the owner's flat tensor.
    """

    matrix: SharedMatrix
    pieces: Mapping[int, Sequence[Piece]]
    local: Sequence[Tensor]
    whole: Tensor | None


class _Owned(NamedTuple):
    """The matrices of a parameter that this rank owns: their blocks in ``whole``, and averages."""

    param: SharedParam
    blocks: list[Any]
    averages: Tensor
    beta2: float


class _Stages:
    """One exchange of one step.

    Attributes:
        held: what travels to the owners and back, in the order of the plan.
        owned: parameters of whose matrices this rank owns some.
        whole: the directions of these matrices.
        orthogonalized: how many matrices all ranks orthogonalize.
    """

    def __init__(
        self,
        of: Exchanger,
        exchange: Exchange,
        found: Sequence[Sequence[Direction | None]],
        present: Collection[int],
    ) -> None:
        self.of, rank, device = of, of.rank, of.device
        dtype = exchange[0][0].dtype
        # Directions and the averages, which are float32, travel in one tensor.
        self.words = torch.int16 if dtype.itemsize == 2 else torch.int32
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        self.held: list[_Held] = []
        self.owned: list[_Owned] = []
        stepped = [
            (param, matrices, [one or (nothing, None, 0.0) for one in its])
            for (param, matrices), its in zip(exchange, found, strict=True)
            if param.number in present
        ]
        own = [m for _, matrices, _ in stepped for m in matrices if m.owner == rank]
        self.orthogonalized = sum(len(p.blocks) * len(matrices) for p, matrices, _ in stepped)
        self.whole = torch.empty(sum(m.numel for m in own), dtype=dtype, device=device)
        averages = torch.empty(sum(m.averaged for m in own), dtype=torch.float32, device=device)
        first = row = 0
        for param, matrices, its in stepped:
            directions = [direction for direction, _, _ in its]
            of_rows = [nothing if averaged is None else averaged for _, averaged, _ in its]
            blocks, begin = [], row
            for matrix in matrices:
                whole = rows = None
                if matrix.owner == rank:
                    whole = self.whole[first : first + matrix.numel]
                    rows = averages[row : row + matrix.averaged]
                    blocks += [(start + first, *block) for start, *block in param.blocks]
                    first, row = first + matrix.numel, row + matrix.averaged
                self.held.append(_Held(matrix, matrix.pieces, directions, whole))
                self.held.append(_Held(matrix, matrix.averages, of_rows, rows))
            if blocks:
                self.owned.append(_Owned(param, blocks, averages[begin:row], its[0][2]))
        self._begin(
            (
                (held.matrix.owner, piece.of_local(held.local[piece.tensor]))
                for held in self.held
                if rank in held.matrix.senders
                for piece in held.pieces.get(rank, ())
            ),
            (
                (source, piece.of_whole(held.whole))
                for held in self.held
                if held.whole is not None
                for source in held.matrix.senders
                for piece in held.pieces.get(source, ())
            ),
        )

    def orthogonalize(self) -> None:
        """Has the owner orthogonalize what arrives, and sends it back."""
        self._end()
        by_settings: dict[tuple[Any, ...], list[Any]] = {}
        for owned in self.owned:
            by_settings.setdefault(owned.param.settings, []).extend(owned.blocks)
        for settings, blocks in by_settings.items():
            _C.orthogonalize_(self.whole, blocks, *settings)
        for _, blocks, averages, beta2 in self.owned:
            if averages.numel():
                _C.normalize_rows_(self.whole, blocks, averages, beta2)
        rank = self.of.rank
        self._begin(
            (
                (other, piece.of_whole(held.whole))
                for held in self.held
                if held.whole is not None
                for other, pieces in held.pieces.items()
                for piece in pieces
            ),
            (
                (held.matrix.owner, piece.of_local(held.local[piece.tensor]))
                for held in self.held
                for piece in held.pieces.get(rank, ())
            ),
        )
        self.held = []
        del self.whole, self.owned

    def take_back(self) -> None:
        """Waits for this rank's pieces, which replace its directions."""
        self._end()

    def _begin(
        self, sent: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Begins an all-to-all of pieces, each with the rank to which or from which it goes.

        Sender and receiver list the pieces between them in the order of the plan.
        """
        if not self.orthogonalized:
            return
        of = self.of
        out, into = self._by_rank(sent), self._by_rank(received)
        device, width = comm_device(of.group, of.device), self.words.itemsize
        # Kept until the transfer has ended. Bytes: gloo does not send every dtype.
        nothing = torch.empty(0, dtype=self.words, device=of.device)
        self._sent = moved(
            torch.cat([nothing, *(piece.reshape(-1) for own in out for piece in own)]), device
        )
        self._targets = [piece for own in into for piece in own]
        sizes = [width * sum(piece.numel() for piece in own) for own in into]
        self._received = torch.empty(sum(sizes) // width, dtype=self.words, device=device)
        with collective(_WHAT):
            self._work = dist.all_to_all_single(
                self._received.view(torch.uint8),
                self._sent.view(torch.uint8),
                sizes,
                [width * sum(piece.numel() for piece in own) for own in out],
                group=of.group,
                async_op=True,
            )

    def _by_rank(self, pieces: Iterable[tuple[int, Tensor]]) -> list[list[Tensor]]:
        by_rank: list[list[Tensor]] = [[] for _ in self.of.ranks]
        for rank, piece in pieces:
            by_rank[rank].append(piece.view(self.words))
        return by_rank

    def _end(self) -> None:
        """Waits for the all-to-all under way, and copies what arrived to its places."""
        if not self.orthogonalized:
            return
        with collective(_WHAT):
            wait(self._work)
        if targets := self._targets:
            sizes = [piece.numel() for piece in targets]
            arrived = moved(self._received, self.of.device).split_with_sizes(sizes)
            views = [a.view(piece.shape) for a, piece in zip(arrived, targets, strict=True)]
            torch._foreach_copy_(targets, views)
        del self._sent, self._received, self._targets, self._work
