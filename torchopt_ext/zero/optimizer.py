"""ZeroRedundancyOptimizer: optimizer state divided among the ranks of a process group."""

import copy
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import is_
from typing import Any, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchopt_ext import _C
from torchopt_ext._arguments import expect_params, having_defaults, restored_if_raised
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.fused_optimizer import with_arguments
from torchopt_ext.optim.hooks import HookedStep, forwarded, is_left_out, run_hooks
from torchopt_ext.optim.rejection import StepProgress
from torchopt_ext.state.collective import fail_together, use_device, waits_at_most
from torchopt_ext.state.entries import BY_INDEX
from torchopt_ext.state.params import params_of
from torchopt_ext.statedict import dcp
from torchopt_ext.statedict.loaded import expect_dict, undone_if_raised
from torchopt_ext.zero import state as zero_state
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.exchange import check_same
from torchopt_ext.zero.join import SteppingHook, share
from torchopt_ext.zero.local_optimizer import (
    LocalOptimizer,
    plain_class,
    reject_misplaced,
    settings_in_backward,
    unwrap_partial,
)
from torchopt_ext.zero.overlap import (
    OverlapInfo,
    OverlapStatus,
    assign_buckets,
    lay,
    of_whole_steps,
)
from torchopt_ext.zero.parameters import (
    Parameters,
    check_choices,
    check_elementwise,
    check_owners,
    describe_arguments,
)
from torchopt_ext.zero.ranks import Ranks, bounded
from torchopt_ext.zero.rollback import regrown_if_raised
from torchopt_ext.zero.weights import WeightsOfRanks
from torchopt_ext.zero.whole import WholeTensors

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(WeightsOfRanks, HookedStep, Optimizer, Joinable):
    """Divides an optimizer's state, and the work of its step, among the ranks of a group.

    It replaces torch.distributed.optim.ZeroRedundancyOptimizer (ZeRO stage 1, arXiv:1910.02054).
    Every rank steps its part of the parameters and then receives the other ranks' parts.

    Args:
        params: (named) parameters or param groups, the same on all ranks, which is checked.
        optimizer_class: any torch.optim.Optimizer class; with ``overlap_with_ddp`` a fused one, or
            one that has a functional counterpart in torch, or this counterpart.
        process_group: the ranks; by default all ranks.
        parameters_as_bucket_view: a rank's parameters become views of one tensor and keep strides.
        overlap_with_ddp: step inside DDP's backward, by a hook of :mod:`torchopt_ext.zero`.
        partition: "greedy" assigns whole parameters to ranks as torch does; "balanced" divides
            communication buckets evenly, and may divide parameters (docs/zero_details.md).
        params_per_rank: each rank's parameters, instead of the greedy rule; one param group only.
        allow_mixed_dtypes: shard the parameters of each dtype separately.
        sharded_gradients: with "balanced", reduce gradients while backward runs and keep only this
            rank's part of them (ZeRO stage 2). Do not use DDP then.
        elementwise: with "balanced", promises that an ``optimizer_class`` unknown to this package
            treats every element separately.
        bucket_elements: with "balanced", the elements of a communication bucket; by default
            :func:`torchopt_ext.ops.partition_balanced` chooses.
        timeout: the longest wait for another rank in a collective, if shorter than the group's
            timeout. On NCCL such a wait blocks the host.
        defaults: arguments of ``optimizer_class``. With fused optimizers, ``max_grad_norm``
            and ``skip_nonfinite`` decide over the gradients of all ranks' parts.

    Raises:
        TypeError: ``params`` is neither an iterable of parameters nor of param groups.
        ValueError: there are no parameters, parameters are sparse, dtypes differ, arguments exclude
            each other, or parameters or arguments differ between ranks; says which.
    """

    local: LocalOptimizer
    parameter_names = forwarded("params", "parameter_names")  # containers set them
    _join_hook: ReferenceType[SteppingHook] | None = None  # gone if an error ends a Join context
    _out_of_data = False  # this rank has run out of data

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: str = "greedy",
        params_per_rank: Sequence[Sequence[Tensor]] | None = None,
        allow_mixed_dtypes: bool = False,
        sharded_gradients: bool = False,
        elementwise: bool = False,
        bucket_elements: int | None = None,
        timeout: timedelta | None = None,
        **defaults: Any,
    ) -> None:
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(f"Invalid timeout: {timeout}, expected more than 0")
        self.ranks = Ranks.of(process_group, timeout)
        self.process_group = self.ranks.group
        self.rank, self.world_size = self.ranks.rank, self.ranks.size
        self.global_rank = torch.distributed.get_rank()
        self.initialized = False
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._allow_mixed_dtypes = allow_mixed_dtypes
        optimizer_class, defaults = unwrap_partial(optimizer_class, defaults)
        # A hook of DDP steps, before a gradient scaler can unscale gradients.
        self._steps_in_backward = self._overlap_with_ddp = overlap_with_ddp
        self._overlap_info = OverlapInfo(self.world_size)
        self._bucket_assignments_per_rank: list[dict[int, Any]] = []
        self._steps_by_group_rank = False
        # The state consolidated since the last step; empty if another rank holds it.
        self._consolidated: tuple[Any, ...] | None = None
        self._has_state = False  # some rank may have state
        arguments: dict[str, Any] = {
            "partition": partition, "params_per_rank": params_per_rank,
            "overlap_with_ddp": overlap_with_ddp, "sharded_gradients": sharded_gradients,
            "bucket_elements": bucket_elements,
        }  # fmt: skip
        with waits_at_most(timeout):
            with fail_together(self.process_group):
                settings = {}
                constructor, defaults = plain_class(optimizer_class, defaults, overlap_with_ddp)
                reject_misplaced(constructor, defaults, type(self))
                if overlap_with_ddp:  # the local optimizer is built in backward
                    settings = settings_in_backward(constructor, defaults)
                expect_params(params)
                # The local optimizer adds its defaults to the groups, in its arguments' order.
                Optimizer.__init__(self, params, settings)
                Joinable.__init__(self)
                self.params = Parameters(self.param_groups)
                self._all_params = params_of(self)
                if not self._all_params:
                    raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
                use_device(self.process_group, self.join_device)
                self.params.check_dense(allow_mixed_dtypes)
                check_choices(self.param_groups, elementwise=elementwise, **arguments)
                if params_per_rank is not None:
                    check_owners(params_per_rank, self._all_params, self.world_size)
                if partition == "balanced" and not elementwise:
                    check_elementwise(optimizer_class)
            arguments["parameters_as_bucket_view"] = parameters_as_bucket_view
            described = self.params.describe() + describe_arguments(
                self.param_groups, defaults, optimizer_class, **arguments
            )
            check_same(described, "parameters and arguments", self.process_group)
            self._is_trainable_mask = _C.requires_grad(self._all_params)
            self.partition: WholeTensors | BalancedBuckets = (
                BalancedBuckets(self.ranks, self.params, bucket_elements, sharded_gradients)
                if partition == "balanced"
                else WholeTensors(self.ranks, self.params, parameters_as_bucket_view)
            )
            self.local = LocalOptimizer(
                self.params, self.partition, self.ranks, constructor, defaults
            )
            if not overlap_with_ddp:
                with fail_together(self.process_group):
                    self.local.build(params_per_rank)
                    self.defaults = dict(self.optim.defaults)
                self.partition.build_buckets()
            elif parameters_as_bucket_view:
                logger.warning("overlap_with_ddp=True ignores parameters_as_bucket_view")
        self.initialized = True

    @property
    def optim(self) -> Any:
        """The local optimizer. None before DDP's buckets are known (``overlap_with_ddp``)."""
        return self.local.optimizer

    @property
    def state(self) -> Any:
        """The local optimizer's state, of this rank's parts of the parameters.

        If only other ranks have state, it has an empty entry: torch.distributed.checkpoint makes a
        step where state and gradients are empty (state_dict.py, _init_optim_state).
        """
        if "local" not in vars(self) or self.optim is None:
            return defaultdict(dict)
        if not self.optim.state and (self._has_state or self.partition.holds_gradients):
            self.optim.state[self._all_params[0]] = {}
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        """Ignores the empty state that torch.optim.Optimizer's constructor sets."""

    @bounded
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group. Call it on all ranks. Other groups' parameters keep their owners.

        Raises:
            RuntimeError: the optimizer has ``overlap_with_ddp``.
            ValueError: a dtype or group differs, or a parameter is in a group. Nothing is changed.
        """
        if not self.initialized:
            super().add_param_group({**param_group})
            return
        if self._overlap_with_ddp:
            raise RuntimeError("overlap_with_ddp=True supports one param group only")
        with (
            restored_if_raised([param_group], self),
            restored_if_raised([], self.optim),
            undone_if_raised(self),
            undone_if_raised(self.optim),
            regrown_if_raised(*self.partition.grows),
        ):
            with fail_together(self.process_group):
                fused = self.local.fused if self.local.is_fused else None
                defaults = fused._defaults_of_new(param_group) if fused else self.defaults
                with having_defaults(self, defaults):
                    super().add_param_group({**param_group})
                self.params.check_dense(self._allow_mixed_dtypes)
                settled = self.local.with_defaults(self.param_groups[-1])
            check_same(self.params.describe(), "parameters", self.process_group)
            self._all_params = params_of(self)
            self._is_trainable_mask = _C.requires_grad(self._all_params)
            with fail_together(self.process_group):
                self.local.add_group(settled)
            self._consolidated = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch.optim.Optimizer does, including this rank's parts of them."""
        super().zero_grad(set_to_none)
        self.partition.zero_grad(set_to_none)

    @bounded
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps this rank's parts of the parameters, and sends them to all ranks.

        Arguments and result are those of the local optimizer's ``step``. With ``overlap_with_ddp``
        it does nothing.

        Raises:
            RuntimeError: a rank died, is late or rejects the step. All ranks raise and name it.
                Nothing is changed, unless an optimizer that is not fused raises in mid-step.
        """
        if self._overlap_with_ddp:
            logger.warning("overlap_with_ddp=True steps in backward: do not call step()")
            return None
        if not self._out_of_data:
            Join.notify_join_context(self)  # raises on all ranks, if the context is to end early
        if closure is not None:
            kwargs["closure"] = closure
        progress = StepProgress()
        try:
            self._consolidated = None
            self._rebuild_if_frozen_changed()
            result = self.local.step(progress, self._context, self._take_gradients, kwargs)
        except Exception:
            self.local.reject(progress)
            raise
        self.local.send_updates(progress)
        self._has_state = True
        return result

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook as torch does. If it raises, this rank rejects the step."""

        @functools.wraps(hook)
        def rejecting(zero: ZeroRedundancyOptimizer, args: Any, kwargs: Any) -> Any:
            try:
                return hook(zero, args, kwargs)
            except Exception:
                if not zero._overlap_with_ddp:  # with overlap, step() does nothing
                    in_closure = len(args) > 1 or "closure" in kwargs
                    zero.local.reject(StepProgress(in_closure=in_closure))
                raise

        return super().register_step_pre_hook(rejecting)

    def _local_step(self, gradients: Sequence[Tensor | None]) -> Any:
        """Steps this rank's part by a bucket's gradients, for hooks of DDP, also torch's."""
        self._consolidated = None
        self._rebuild_if_frozen_changed()
        return self.local.step_bucket(gradients)

    def _rebuild_if_frozen_changed(self) -> None:
        params = params_of(self)
        if len(params) != len(self._all_params) or not all(map(is_, params, self._all_params)):
            raise RuntimeError(
                "parameters were replaced in the groups, as Accelerate does for FSDP2, but this "
                "rank's part is of the former ones: build FusedAdamW instead, which follows them"
            )
        trainable = _C.requires_grad(self._all_params)
        if trainable != self._is_trainable_mask:
            if self._overlap_with_ddp:
                raise RuntimeError("overlap_with_ddp=True: requires_grad must not change")
            self.partition.build_buckets()
            self._is_trainable_mask = trainable

    @bounded
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects every rank's state on rank ``to`` of the group, in CPU memory.

        Call it on all ranks. Tensors are sent to that rank only. The next step drops the copy.

        Raises:
            RuntimeError: DDP's buckets are not known yet (``overlap_with_ddp``), or a rank has
                state that is neither tensors nor plain values; all ranks raise and name the state.
            ValueError: the group has no rank ``to``, or ranks give another; all ranks raise.
        """
        check_same([f"to={to}"], "arguments", self.process_group)
        if not 0 <= to < self.world_size:
            raise ValueError(f"Invalid rank: to={to}, expected 0 to {self.world_size - 1}")
        self._consolidated = zero_state.consolidated(self.local, to)

    def __repr__(self) -> str:
        return with_arguments(super().__repr__(), [self.optim])

    def state_dict(self) -> dict[str, Any]:
        """Returns the consolidated state dict: the unsharded optimizer's keys, order and values.

        Without consolidation to this rank since the last step, it returns this rank's part, for
        ``dcp.save({"optimizer": zero})``. Its tensors are StateShards, which torch.save rejects.

        Raises:
            RuntimeError: DDP's buckets are not known yet (``overlap_with_ddp``).
            TypeError: DCP would not restore an entry unchanged; names the entry.
        """
        run_hooks(self, "state_dict_pre")
        if self._consolidated:
            result = zero_state.packed(self.param_groups, *self._consolidated)
        else:
            result = zero_state.sharded(self.local, consolidated=self._consolidated is not None)
        return run_hooks(self, "state_dict_post", result)

    _checkpoint_layout = BY_INDEX

    def _checkpoint_buffers(self, ids: list[str]) -> dcp.Buffers:
        """Returns the buffers that :func:`torchopt_ext.statedict.dcp.load` reads into."""
        return zero_state.buffers(self.local, ids)

    @bounded
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of an unsharded state dict. Call it on all ranks.

        The dict may come from :meth:`state_dict`, from torch's class or from the unsharded
        optimizer. It stays unchanged. A dict with only this rank's part loads, too, if every rank
        owns what it owned before. If a rank or a hook there fails, all raise, and nothing changes.

        Raises:
            RuntimeError: DDP's buckets are not known yet (``overlap_with_ddp``).
            ValueError: groups or shapes do not fit; names the parameter.
        """
        with fail_together(self.process_group):
            expect_dict(state_dict)
            hooked = run_hooks(self, "load_state_dict_pre", state_dict.copy())
            loaded = zero_state.read(self.local, hooked)
        with undone_if_raised(self), undone_if_raised(self.optim):  # also if another rank raises
            self._has_state = zero_state.commit(self.local, loaded)
            self._consolidated = None
            with fail_together(self.process_group):  # only now: a hook may communicate
                run_hooks(self, "load_state_dict_post")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._overlap_with_ddp:
            raise TypeError("an optimizer that overlaps with a DDP instance cannot be copied")
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo |= {id(kept): kept for kept in (self.process_group, self.local.constructor)}
        for key, value in vars(self).items():
            if key == "_join_config":
                vars(copied)[key] = value
            elif not is_left_out(self, key):  # hooks belong to the original, as with torch's
                vars(copied)[key] = copy.deepcopy(value, memo)
        copied._consolidated = None
        Optimizer.__setstate__(copied, {})
        copied.local.take_settings()
        copied.local.sync()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled: its ranks exist in this run only; "
            "consolidate and save its state_dict()"
        )

    def _unscales(self) -> bool:
        """Whether the local step unscales. torch.amp.GradScaler asks, then reads all gradients."""
        if self._overlap_with_ddp:
            raise RuntimeError(
                "overlap_with_ddp=True steps in backward, before a gradient scaler can unscale "
                "gradients: use no scaler"
            )
        if self.partition.gradients_are_sharded:
            raise RuntimeError(
                "gradients are reduced to the ranks that own them, so a gradient scaler has none "
                "to check: use torchopt_ext.GradScaler with a fused optimizer"
            )
        return bool(getattr(self.optim, "_step_supports_amp_scaling", False))

    @property
    def _checks_overflow_in_step(self) -> bool:
        """Whether torchopt_ext.GradScaler may leave the overflow check to the local step."""
        return bool(getattr(self.optim, "_checks_overflow_in_step", False))

    _gradients_are_sharded = forwarded("partition", "gradients_are_sharded")
    """Whether gradients are reduced to their owners, so that a scaler cannot unscale them."""
    control = of_whole_steps("control")
    """The control block of the local FusedOptimizer. Its decision is the same on all ranks."""
    max_grad_norm = of_whole_steps("max_grad_norm")
    """The norm that the local FusedOptimizer clips to. Set it on all ranks."""
    skip_nonfinite = of_whole_steps("skip_nonfinite")
    """Whether the local FusedOptimizer skips non-finite steps. Set it on all ranks."""

    @bounded
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips this rank's parts of the gradients by the norm over all ranks' parts.

        Returns the norm before clipping: float64, 0-dim.

        Raises:
            RuntimeError: backward has stepped already (``overlap_with_ddp``), or a rank rejects its
                gradients; all ranks raise and name the rank.
        """
        if self._overlap_with_ddp:
            raise RuntimeError("overlap_with_ddp=True steps in backward, before clipping")
        if self._in_join:
            raise RuntimeError(
                "in a Join context, ranks without data only call step(): clip inside the step, "
                "with max_grad_norm of a fused optimizer"
            )
        return self.local.clip(max_norm, self._rebuild_if_frozen_changed)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for ``Join([ddp, optimizer])``: ranks out of data step their part."""
        if isinstance(self.partition, BalancedBuckets) and self.partition.reducer.hooks:
            raise RuntimeError(
                "Join does not support sharded_gradients=True: use DDP, with reduce_scatter_hook "
                "if traffic is to stay low"
            )
        hook = SteppingHook(self)
        self._join_hook = ref(hook)
        return hook

    @property
    def _in_join(self) -> bool:
        hook = None if self._join_hook is None else self._join_hook()
        return hook is not None and not hook.ended and self._join_config.enable

    @property
    def join_device(self) -> torch.device:
        return self._all_params[0].device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _take_gradients(self, context: StepContext) -> StepContext:
        """Gives the parts their gradients; returns the context with their scale and flags.

        If this rank is out of data, they are those of a rank with data.
        """
        if self._in_join:
            shared = [] if self.partition.gradients_are_sharded else self._all_params
            context = share(shared, self.ranks, self._out_of_data, context)
        self.partition.take_gradients()
        return context

    def _init_zero_for_overlap(self) -> None:
        """Builds the local optimizer once a hook has seen all of DDP's final buckets."""
        if self.rank != self.global_rank and not self._steps_by_group_rank:
            raise RuntimeError(
                "torch's hook takes global ranks: use torchopt_ext.zero's in a subgroup"
            )
        info = self._overlap_info
        info.status = OverlapStatus.INITIALIZED
        assigned = self._bucket_assignments_per_rank = assign_buckets(info, self.ranks)
        lay([each for of_rank in assigned for each in of_rank.values()], self.params)
        self.local.build(info.params_per_rank)
