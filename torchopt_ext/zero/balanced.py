"""Balanced buckets: every communication bucket divided evenly among the ranks.

Parameters become views of buckets, in forward order. A bucket is cut only where the sum of squares
of its gradients may be split (docs/numerics.md section 3). The ranks' shares therefore differ by
two blocks at most, and any number of ranks computes the same bits.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext._torch import version
from torchopt_ext.optim.balanced_plan import SHORT_ROW, plan_buckets, reals_of, row_length
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of
from torchopt_ext.state.collective import collective, wait
from torchopt_ext.state.params import params_of
from torchopt_ext.state.pieces import Cut, matrix_sizes, pieces_of_run
from torchopt_ext.state.quantized import keep_float_moments
from torchopt_ext.zero.parameters import Parameters
from torchopt_ext.zero.part import Bucket, Part, view_in
from torchopt_ext.zero.ranks import RETURNING, Ranks
from torchopt_ext.zero.reducer import IN_FLIGHT, Reducer


class BalancedBuckets:
    """The balanced partition: who owns which elements, and how updates reach the other ranks."""

    gathers = False  # all-gather parameters on the CPU as well

    def __init__(
        self,
        ranks: Ranks,
        params: Parameters,
        bucket_elements: int | None,
        sharded_gradients: bool,
    ) -> None:
        self.ranks = ranks
        self.params = params
        self.bucket_elements = bucket_elements
        self.all_buckets: list[Bucket] = []
        self.mine: list[list[Tensor]] = []  # this rank's parts, group by group
        self.reducer = Reducer(ranks, params, self.all_buckets, hooks=sharded_gradients)
        self._part_of: dict[Tensor, Part] = {}
        self._whole: list[Tensor] = []  # the parts that are whole parameters
        self._whole_params: list[Tensor] = []  # these parameters
        self._cut: list[Part] = []  # the other parts
        # Sources of cut gradients, and their versions. To cut the same again could undo clipping.
        self._sources: dict[Part, tuple[Tensor, int]] = {}
        self._laid: list[Tensor] = []  # all parameters
        self._unsent: list[Tensor] = []  # those that were frozen at every step
        self._places = b""  # where all parameters lie
        self._marks = _C.WeightMarks()  # of all parameters after the last step
        # Collectives under way, and the windows they fill.
        self._updates_in_flight: dict[Bucket, tuple[list[Any], Tensor | None]] = {}
        self._lazy: dict[Tensor, None] = {}  # parameters whose modules wait for them
        self._handles = handles_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.wait_for_updates()
        self.reducer.settle()
        copied = type(self)(self.ranks, self.params, self.bucket_elements, sharded_gradients=False)
        for key, value in vars(self).items():
            if key not in ("_sources", "_marks", "_lazy", "_handles"):
                vars(copied)[key] = copy.deepcopy(value, memo)
        for bucket in copied.all_buckets:  # the copied parameters are not views of the buckets yet
            bucket.lay_anew()
        copied._places = _C.places(copied._laid)
        return copied

    @property
    def grows(self) -> list[Any]:
        """The objects that have more attributes, or more in them, after :meth:`add_group`."""
        return [self, self.reducer]

    @property
    def gradients_are_sharded(self) -> bool:
        return self.reducer.active

    @property
    def holds_gradients(self) -> bool:
        return bool(self.reducer.present)

    def part_of(self, tensor: Tensor) -> Part:
        return self._part_of[tensor]

    @torch.no_grad()
    def add_group(
        self,
        params: Sequence[Tensor],
        muon: Mapping[str, Any] | None = None,
        per_rank: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """Lays the parameters of one more group into separate buckets.

        Args:
            muon: the group's settings if its matrices are orthogonalized.
        """
        numbers = {param: number for number, param in enumerate(params_of(self.params))}
        for param in () if muon is None else params:
            if not param.is_contiguous():
                raise ValueError(
                    f"{self.params.called(param)} has strides {param.stride()}: Muon with "
                    f"partition='balanced' needs contiguous parameters"
                )
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for param in params:
            kinds.setdefault((param.device, param.dtype, param.requires_grad), []).append(param)
        parts: dict[Tensor, list[Tensor]] = {}
        for (device, dtype, _), alike in kinds.items():
            columns = []
            if muon is not None and muon.get("beta2"):
                columns = [matrix_sizes(muon, param.shape)[2] for param in alike]
            plan = plan_buckets(alike, self.ranks.size, self.bucket_elements, columns)
            laid = list(zip(alike, plan.buckets, plan.starts, strict=True))
            for number, cuts in enumerate(plan.cuts):  # one bucket at a time is in memory twice
                window = max(hi - lo for lo, hi in itertools.pairwise(cuts))
                flat = torch.zeros(max(cuts[:-1]) + window, dtype=dtype, device=device)
                bucket = Bucket(len(self.all_buckets), flat, cuts, window)
                self.all_buckets.append(bucket)
                for param, start in [(p, start) for p, n, start in laid if n == number]:
                    bucket.lay(param, start, like=param)
                    parts[param] = self._make_parts(bucket, param, start, muon is not None)
                    if muon is not None:
                        self._mark_cut(bucket, param, start, muon, numbers[param], parts[param])
                    self.reducer.bucket_of[param] = bucket
        self.mine.append([tensor for param in params for tensor in parts[param]])
        self._laid = list(self.reducer.bucket_of)
        self._places = b""  # unknown: the next step looks at all

    def _make_parts(
        self, bucket: Bucket, param: Tensor, start: int, is_shared: bool
    ) -> list[Tensor]:
        """Makes parts of this rank's elements. Rank 0 owns parameters without elements.

        Args:
            is_shared: each rank has a part, if need be without elements.
        """
        lo, hi = bucket.range_of(self.ranks.rank)
        layout = torch.empty_like(bucket.places[param], device="meta")
        runs = [*pieces(param, max(lo - start, 0), min(hi - start, param.numel()))]
        if not param.numel() and self.ranks.rank == 0:
            runs = [(0, 0, None)]
        elif is_shared and not runs:
            runs = [(0, 0, [0])]
        tensors = []
        for begin, end, shape in runs:
            if shape is None:
                tensor = view_in(bucket.flat, start, param)
            else:
                tensor = bucket.flat[start + begin : start + end].view(shape)
                if not param.is_contiguous():
                    keep_float_moments(tensor)
            tensor.requires_grad_(param.requires_grad)
            part = Part(param, begin, end, tensor, layout)
            tensors.append(tensor)
            bucket.parts.append(part)
            self._part_of[tensor] = part
            if part.is_whole:
                self._whole.append(tensor)
                self._whole_params.append(param)
            else:
                self._cut.append(part)
        return tensors

    def _mark_cut(
        self,
        bucket: Bucket,
        param: Tensor,
        start: int,
        muon: Mapping[str, Any],
        number: int,
        parts: Sequence[Tensor],
    ) -> None:
        """Notes in this rank's parts which elements of the matrices each rank has."""
        count, rows, cols = matrix_sizes(muon, param.shape)
        by_matrix: list[dict[int, Any]] = [{} for _ in range(count)]
        ranks = dist.get_process_group_ranks(self.ranks.group)
        for rank, (lo, hi) in zip(ranks, itertools.pairwise(bucket.cuts), strict=True):
            runs = pieces(param, max(lo - start, 0), min(hi - start, param.numel()))
            for tensor, (begin, end, _) in enumerate(runs):
                for matrix, piece in pieces_of_run(begin, end, rows * cols, cols, tensor):
                    by_matrix[matrix].setdefault(rank, []).append(piece)
        replicas, group = dict.fromkeys(ranks, 0), self.ranks.group
        for tensor, part in enumerate(parts):
            shape, flatten = tuple(param.shape), bool(muon.get("flatten"))
            Cut(number, tensor, shape, flatten, group, by_matrix, replicas).mark(part)

    def build_buckets(self) -> None:
        """Records which parameters are trainable, and hooks them. The buckets stay as they are."""
        for bucket in self.all_buckets:
            bucket.note_trainable()
            for part in bucket.parts:
                part.tensor.requires_grad_(part.param.requires_grad)
        self._unsent = [p for bucket in self.all_buckets if not bucket.sent for p in bucket.places]
        self.reducer.hook_trainable()

    def take_gradients(self) -> None:
        """Gives every part its gradient, cut out of the parameter's or reduced to this rank."""
        self.wait_for_updates()
        if self.reducer.active:
            self.reducer.finish()  # first: the code below may raise while other ranks wait
        if self.ranks.size > 1:
            self.params.check_frozen(self._unsent)
        self.follow_memory()
        if self.reducer.active:
            return
        _C.share_gradients(self._whole, self._whole_params)
        for part in self._cut:
            grad = part.param.grad
            if grad is None:
                part.tensor.grad = None
                continue
            former, at = self._sources.get(part, (None, -1))
            if former is not grad or at != version(grad):
                if grad.layout is not torch.strided:
                    what = f"the gradient of {self.params.called(part.param)}"
                    raise RuntimeError(f"{what} has layout {grad.layout}, expected a dense tensor")
                part.tensor.grad = part.cut(grad)
                self._sources[part] = grad, version(grad)

    def finish_step(self) -> None:
        """Drops references to parameters' gradients. Tells autograd that weights changed."""
        if self.reducer.active:
            self.reducer.stepped = True
        else:
            self._sources.clear()
            _C.clear_gradients(self._whole)
            for part in self._cut:
                part.tensor.grad = None
        _C.increment_versions(self._laid)
        self._marks.renew(self._laid, self._laid)

    def follow_memory(self) -> None:
        """Lays buckets anew if the memory of their parameters was replaced (``p.data = ...``)."""
        if _C.places(self._laid) != self._places:
            self.params.check_untied()
            called = self.params.called
            for bucket in [bucket for bucket in self.all_buckets if bucket.is_moved(called)]:
                bucket.lay_anew()
            self._places = _C.places(self._laid)

    def written(self) -> list[Tensor]:
        """Returns this rank's parts of parameters that were written to since the last step."""
        self.follow_memory()
        params = {self._laid[i] for i in self._marks.renew(self._laid, self._laid)}
        return [tensor for tensor, part in self._part_of.items() if part.param in params]

    def zero_grad(self, set_to_none: bool) -> None:
        self.reducer.zero_grad(set_to_none)
        self._sources.clear()
        if set_to_none:
            _C.clear_gradients(list(self._part_of))

    @torch.no_grad()
    def send_updates(self) -> None:
        """Sends every rank's updated elements to all other ranks."""
        if self.ranks.size == 1:
            return
        with collective(RETURNING):
            for bucket in self.all_buckets:
                if not bucket.sent:
                    continue
                if not self.gathers and bucket.flat.is_cpu:
                    # One broadcast per rank, in place. gloo's all-gather takes twice as long.
                    shares = [(bucket.share_of(rank), rank) for rank in range(self.ranks.size)]
                    works = [self.ranks.broadcast(t, rank) for t, rank in shares if t.numel()]
                    self._updates_in_flight[bucket] = works, None
                    continue
                # Each holds a second copy of its bucket.
                if len(self._updates_in_flight) >= IN_FLIGHT:
                    self.wait_for_updates(list(self._updates_in_flight)[:1])
                self._updates_in_flight[bucket] = self._gather(bucket)
        flying = list(self._updates_in_flight)
        self.wait_for_updates(b for b in flying if not b.places.keys() <= self._lazy.keys())

    @torch.no_grad()
    def send(self, param: Tensor) -> None:
        """Sends every rank's elements of one parameter to all other ranks."""
        if self.ranks.size == 1:
            return
        bucket = self.reducer.bucket_of[param]
        start, end = bucket.start(param), bucket.start(param) + param.numel()
        with collective(RETURNING, self.ranks.timeout):
            works = []
            for rank in range(self.ranks.size):
                lo, hi = bucket.range_of(rank)
                if max(lo, start) < min(hi, end):
                    held = bucket.flat[max(lo, start) : min(hi, end)]
                    works.append(self.ranks.broadcast(held, rank))
            for work in works:
                wait(work)

    def _gather(self, bucket: Bucket) -> tuple[list[Any], Tensor | None]:
        """Starts one all-gather of windows of equal size, later copied to their places."""
        first, group = bucket.cuts[self.ranks.rank], self.ranks.group
        gathered = bucket.flat.new_empty(self.ranks.size * bucket.window)
        target = gathered.view(torch.uint8)
        window = bucket.flat[first : first + bucket.window].view(torch.uint8)
        return [dist.all_gather_into_tensor(target, window, group=group, async_op=True)], gathered

    @torch.no_grad()
    def wait_for_updates(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Waits until the parameters of the given buckets, by default all, have arrived."""
        for bucket in list(self._updates_in_flight) if buckets is None else buckets:
            works, gathered = self._updates_in_flight.pop(bucket)
            with collective(RETURNING, self.ranks.timeout):
                for work in works:
                    wait(work)
            if gathered is not None:
                windows = gathered.view(self.ranks.size, bucket.window)
                others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
                # `data`: not counted as a change of this rank's parts
                targets = [bucket.share_of(rank).data for rank in others]
                sources = [windows[r][: t.numel()] for r, t in zip(others, targets, strict=True)]
                torch._foreach_copy_(targets, sources)

    def overlap_forward(self, modules: Sequence[torch.nn.Module]) -> None:
        """Lets ``step`` return before these modules' parameters arrive. Their forward waits."""
        wait_for = WeakHook(self, "_wait_for")
        for module in modules:
            self._lazy |= dict.fromkeys(module.parameters())
            self._handles.append(module.register_forward_pre_hook(wait_for))
            children: list[Any] = [*module.modules()]
            for child in children:
                self._handles.append(child.register_state_dict_pre_hook(wait_for))
                self._handles.append(child.register_load_state_dict_pre_hook(wait_for))

    def _wait_for(self, module: torch.nn.Module, *_: Any) -> None:
        if flying := list(self._updates_in_flight):
            params = set(module.parameters())
            self.wait_for_updates(b for b in flying if not params.isdisjoint(b.places))


def pieces(param: Tensor, begin: int, end: int) -> Iterator[tuple[int, int, list[int] | None]]:
    """Yields the elements [begin, end) of a parameter as runs (begin, end, shape).

    The sum of squares is taken by rows: whole rows stay rows, and a part of a long row becomes a
    row. A shape of None stands for the whole parameter.
    """
    if end <= begin:
        return
    row = row_length(param)
    if end - begin == param.numel():
        yield begin, end, None
    elif row * reals_of(param) < SHORT_ROW:
        yield begin, end, [end - begin]
    else:
        head = min(end, -(-begin // row) * row)
        tail = max(head, end // row * row)
        if begin < head:
            yield begin, head, [1, head - begin]
        if head < tail:
            yield head, tail, [(tail - head) // row, row]
        if tail < end:
            yield tail, end, [1, end - tail]
