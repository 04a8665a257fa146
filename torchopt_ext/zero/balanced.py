"""Balanced buckets: every communication bucket divided evenly among the ranks.

Parameters become views of buckets, in forward order. A bucket is cut at places where the sum of
squares of its gradients may be cut without a trace (docs/numerics.md section 3), so that ranks'
shares differ by a block at most, and any number of ranks computes the same bits.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_ext import _C, ops
from torchopt_ext._torch import version
from torchopt_ext.optim.collective import collective, wait
from torchopt_ext.optim.storage import Place
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of
from torchopt_ext.zero.bucket import Bucket
from torchopt_ext.zero.part import Part, in_param_order, memory_order, view_in
from torchopt_ext.zero.ranks import Ranks
from torchopt_ext.zero.reducer import IN_FLIGHT, Reducer

SHORT_ROW = 64
"""Rows of fewer elements are summed element by element (csrc/kernels/block_rule.h)."""


class BalancedBuckets:
    """Who owns which elements, and how updated parameters reach the other ranks.

    Args:
        ranks: among whom.
        bucket_elements: of a bucket; None for the planner's choice.
        sharded_gradients: reduce gradients as backward makes them (reducer.py).
    """

    def __init__(self, ranks: Ranks, bucket_elements: int | None, sharded_gradients: bool) -> None:
        self.ranks = ranks
        self.bucket_elements = bucket_elements
        self.all_buckets: list[Bucket] = []
        self.params: list[list[list[Tensor]]] = []  # by group and rank; only this rank's is filled
        self.reducer = Reducer(ranks, hooks=sharded_gradients)
        self._part_of: dict[Tensor, Part] = {}
        self._whole: tuple[list[Tensor], list[Tensor]] = [], []  # whole parts, their parameters
        self._cut: list[Part] = []  # the other parts
        # What the gradients of cut parts were cut out of: clipping may have changed a copy since.
        self._sources: dict[Part, tuple[Tensor, int]] = {}
        self._laid: list[Tensor] = []  # all parameters
        self._places = b""  # and where they are
        self._returning: dict[int, tuple[list[Any], Tensor | None]] = {}  # by bucket
        self.gathers = False  # parameters on the CPU as well
        self._lazy: dict[Tensor, None] = {}  # parameters whose modules wait for them
        self._handles = handles_of(self)

    @property
    def hides_gradients(self) -> bool:
        """Whether parameters' own gradients are not those that steps take."""
        return self.reducer.active

    @property
    def mine(self) -> list[list[Tensor]]:
        """This rank's parts, group by group."""
        return [group[self.ranks.rank] for group in self.params]

    def part_of(self, tensor: Tensor) -> Part:
        return self._part_of[tensor]

    def origin(self, tensor: Tensor) -> Tensor:
        """The parameter that a tensor of the local optimizer is a part of."""
        return self._part_of[tensor].param

    def in_param_order(self, param: Tensor, value: Any) -> Any:
        shape = tuple(param.shape[d] for d in memory_order(param))
        return in_param_order(param, value) if getattr(value, "shape", None) == shape else value

    def places(self, index_of: Mapping[Tensor, int]) -> dict[Tensor, Place]:
        """Where in the model each part of this rank is."""
        return {t: (index_of[part.param], part.begin, 0, 0) for t, part in self._part_of.items()}

    # ---- layout -----------------------------------------------------------------------------

    @torch.no_grad()
    def add_group(
        self, params: Sequence[Tensor], per_rank: Sequence[Sequence[Tensor]] | None = None
    ) -> None:
        """Lays one more group's parameters into buckets of their own."""
        assert per_rank is None, "balanced buckets have no owners to choose"
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for param in params:
            kinds.setdefault((param.device, param.dtype, param.requires_grad), []).append(param)
        first = len(self.all_buckets)
        for (device, dtype, _), alike in kinds.items():
            plan = ops.partition_balanced(
                [param.numel() for param in alike],
                [row_length(param) for param in alike],
                self.ranks.size,
                self.bucket_elements,
            )
            for number, cuts in enumerate(plan.cuts):
                window = max(hi - lo for lo, hi in itertools.pairwise(cuts))
                length = max(cuts[:-1]) + window
                flat = torch.zeros(length, dtype=dtype, device=device)
                laid = [
                    (param, start)
                    for param, b, start in zip(alike, plan.buckets, plan.starts, strict=True)
                    if b == number
                ]
                for param, start in laid:
                    param.data = view_in(flat, start, param).copy_(param.detach())
                layouts = [(param.shape, param.stride()) for param, _ in laid]
                self.all_buckets.append(Bucket(flat, list(cuts), window, laid, layouts))
        parts: dict[Tensor, list[Part]] = {}
        for bucket in self.all_buckets[first:]:
            self._make_parts(bucket)
            for part in bucket.parts:
                parts.setdefault(part.param, []).append(part)
        own = [part.tensor for param in params for part in parts.get(param, [])]
        self.params.append([own if r == self.ranks.rank else [] for r in range(self.ranks.size)])
        self.reducer.watch(self.all_buckets[first:])
        self._note_trainable()

    def _make_parts(self, bucket: Bucket) -> None:
        """Parts for this rank's elements; a parameter without any is the first rank's."""
        laid = [param for param, _ in bucket.params]
        self._laid += laid
        self._places += _C.addresses(laid)
        lo, hi = bucket.cuts[self.ranks.rank], bucket.cuts[self.ranks.rank + 1]
        for param, start in bucket.params:
            begin, end = max(lo - start, 0), min(hi - start, param.numel())
            runs = pieces(param, begin, end)
            if not param.numel() and self.ranks.rank == 0:
                runs = iter([(0, 0, None)])
            for a, b, shape in runs:
                if shape is None:
                    tensor = view_in(bucket.flat, start, param)
                else:
                    tensor = bucket.flat[start + a : start + b].view(shape)
                part = Part(param, a, b, tensor.requires_grad_(param.requires_grad))
                bucket.parts.append(part)
                self._part_of[tensor] = part
                if part.is_whole:
                    self._whole[0].append(tensor)
                    self._whole[1].append(param)
                else:
                    self._cut.append(part)

    def ready(self) -> None:
        """The local optimizer took what add_group made: parameters may get hooks."""
        self.reducer.install()

    def build_buckets(self) -> None:
        """Notes which parameters are trainable now; the buckets stay as they are."""
        self._note_trainable()
        self.reducer.hook_trainable()

    def _note_trainable(self) -> None:
        for bucket in self.all_buckets:
            bucket.returned |= any(param.requires_grad for param, _ in bucket.params)
            for part in bucket.parts:
                part.tensor.requires_grad_(part.param.requires_grad)

    def copied(self, memo: dict[int, Any]) -> "BalancedBuckets":
        """The same for copied parameters (``memo`` is of copy.deepcopy)."""
        self.finish_returns()
        other = BalancedBuckets(self.ranks, self.bucket_elements, self.reducer.hooks)
        copies: dict[Tensor, Tensor] = {}
        for bucket in self.all_buckets:
            laid = [(copy.deepcopy(param, memo), start) for param, start in bucket.params]
            copies |= {old: new for (old, _), (new, _) in zip(bucket.params, laid, strict=True)}
            flat = bucket.flat.clone()
            for param, start in laid:
                param.data = view_in(flat, start, param)
            layouts = list(bucket.layouts)
            twin = Bucket(flat, bucket.cuts, bucket.window, laid, layouts, returned=bucket.returned)
            other._make_parts(twin)
            other.all_buckets.append(twin)
            for part, new in zip(bucket.parts, twin.parts, strict=True):
                memo[id(part.tensor)] = new.tensor
                memo[id(new.tensor)] = new.tensor
        other.params = [
            [[memo[id(t)] for t in own] for own in per_rank] for per_rank in self.params
        ]
        other.reducer.watch(other.all_buckets)
        other.reducer.copy_gradients_of(self.reducer, copies)
        other.ready()
        return other

    # ---- gradients --------------------------------------------------------------------------

    def take_gradients(self) -> None:
        """Gives every part its gradient: cut out of the parameter's, or reduced to here."""
        self.finish_returns()
        if self.reducer.active:
            self.reducer.finish()  # before what may raise on one rank: the others wait for it
        if _C.addresses(self._laid) != self._places:
            for bucket in self.all_buckets:
                adopt(bucket)
        if self.reducer.active:
            return
        _C.share_gradients(*self._whole)
        for part in self._cut:
            grad = part.param.grad
            if grad is None:
                part.tensor.grad = None
                continue
            source = (grad, version(grad))
            known = self._sources.get(part)
            if known is None or known[0] is not grad or known[1] != source[1]:
                part.tensor.grad = part.cut(grad)
                self._sources[part] = source

    def finish_step(self) -> None:
        """Lets go of gradients that are the parameters', and tells autograd of the new weights."""
        if self.reducer.active:
            self.reducer.mark_stepped()
        else:
            self._sources.clear()
            _C.clear_gradients(self._whole[0])
            for part in self._cut:
                part.tensor.grad = None
        _C.increment_versions(self._laid)

    def zero_grad(self, set_to_none: bool) -> None:
        self.reducer.zero_grad(set_to_none)
        self._sources.clear()
        if set_to_none:
            _C.clear_gradients(list(self._part_of))

    # ---- returning parameters ---------------------------------------------------------------

    @torch.no_grad()
    def return_params(self) -> None:
        """Every rank gets every parameter as its owners have it now."""
        if self.ranks.size == 1:
            return
        with collective("returning the updated parameters"):
            for number, bucket in enumerate(self.all_buckets):
                if not bucket.returned:
                    continue
                if not self.gathers and bucket.flat.is_cpu:
                    self._returning[number] = self._broadcast(bucket)
                    continue
                if len(self._returning) >= IN_FLIGHT:  # each holds a bucket's parameters twice
                    self.finish_returns(list(self._returning)[:1])
                self._returning[number] = self._gather(bucket)
        self.finish_returns(
            [
                number
                for number in self._returning
                if any(p not in self._lazy for p, _ in self.all_buckets[number].params)
            ]
        )

    def _gather(self, bucket: Bucket) -> tuple[list[Any], Tensor | None]:
        """One all-gather of windows of one size, which are copied to their places after it."""
        first = bucket.cuts[self.ranks.rank]
        gathered = bucket.flat.new_empty(self.ranks.size * bucket.window)
        work = dist.all_gather_into_tensor(
            gathered.view(torch.uint8),
            bucket.flat[first : first + bucket.window].view(torch.uint8),
            group=self.ranks.group,
            async_op=True,
        )
        return [work], gathered

    def _broadcast(self, bucket: Bucket) -> tuple[list[Any], Tensor | None]:
        """Every rank's elements from and to their places; gloo's all-gather takes twice as long."""
        works = []
        for rank, (lo, hi) in enumerate(itertools.pairwise(bucket.cuts)):
            if lo < hi:
                memory = bucket.flat[lo:hi].view(torch.uint8)
                source = self.ranks.global_rank(rank)
                works.append(dist.broadcast(memory, source, group=self.ranks.group, async_op=True))
        return works, None

    @torch.no_grad()
    def finish_returns(self, numbers: Sequence[int] | None = None) -> None:
        """Waits for parameters under way: those of some buckets, or all."""
        for number in list(self._returning) if numbers is None else numbers:
            if number not in self._returning:
                continue
            works, gathered = self._returning.pop(number)
            with collective("returning the updated parameters", self.ranks.timeout):
                for work in works:
                    wait(work)
            if gathered is None:
                continue
            bucket = self.all_buckets[number]
            others = [r for r in range(self.ranks.size) if r != self.ranks.rank]
            targets = [bucket.flat[bucket.cuts[r] : bucket.cuts[r + 1]] for r in others]
            sources = [
                gathered[r * bucket.window : r * bucket.window + target.numel()]
                for r, target in zip(others, targets, strict=True)
            ]
            torch._foreach_copy_(targets, sources)

    def overlap_forward(self, modules: Sequence[torch.nn.Module]) -> None:
        """Lets ``step`` return before the modules' parameters have arrived: they wait for them."""
        wait_for, wait = WeakHook(self, "_wait_for"), WeakHook(self, "_wait")
        for module in modules:
            self._lazy |= dict.fromkeys(module.parameters())
            self._handles.append(module.register_forward_pre_hook(wait_for))
            for child in module.modules():
                hooked: Any = child
                self._handles.append(hooked.register_state_dict_pre_hook(wait))
                self._handles.append(hooked.register_load_state_dict_pre_hook(wait))

    def _wait(self, *_: Any) -> None:
        self.finish_returns()

    def _wait_for(self, module: torch.nn.Module, *_: Any) -> None:
        if self._returning:
            own = set(module.parameters())
            self.finish_returns(
                [n for n in self._returning if any(p in own for p, _ in self.all_buckets[n].params)]
            )


def row_length(param: Tensor) -> int:
    """Elements of one index of the outermost dimension in memory; 1 for 1-D and scalars."""
    if param.dim() < 2 or not param.numel():
        return 1
    return param.numel() // param.shape[memory_order(param)[0]]


def pieces(param: Tensor, begin: int, end: int) -> Iterator[tuple[int, int, list[int] | None]]:
    """The elements [begin, end) of a parameter as runs (begin, end, shape).

    Whole rows stay rows and a part of a long row is one: the sum of squares goes by rows. A shape
    of None stands for the whole parameter.
    """
    if end <= begin:
        return
    row = row_length(param)
    if end - begin == param.numel():
        yield begin, end, None
    elif row < SHORT_ROW:
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


@torch.no_grad()
def adopt(bucket: Bucket) -> None:
    """Takes up weights whose memory was replaced (``p.data = ...``) into the bucket again.

    Raises:
        RuntimeError: a parameter has become another: shape, dtype or device differ.
    """
    base, size = bucket.flat.data_ptr(), bucket.flat.element_size()
    for (param, start), (shape, strides) in zip(bucket.params, bucket.layouts, strict=True):
        if param.shape != shape or param.dtype != bucket.flat.dtype:
            raise RuntimeError(
                f"a parameter of shape {tuple(shape)} and {bucket.flat.dtype} is now of shape "
                f"{tuple(param.shape)} and {param.dtype}: build the optimizer after changing the "
                f"model"
            )
        if param.device != bucket.flat.device:
            raise RuntimeError(
                f"a parameter of shape {tuple(shape)} is now on {param.device}, its optimizer's "
                f"bucket on {bucket.flat.device}: build the optimizer after moving the model"
            )
        if param.numel() and param.data_ptr() != base + start * size:
            place = bucket.flat.as_strided(shape, strides, start)
            param.data = place.copy_(param.detach())
