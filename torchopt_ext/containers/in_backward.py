"""OptimizersInBackwardContainer: each parameter is stepped as soon as its gradient is complete."""

import functools
import gc
import logging
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext._arguments import expect_counts
from torchopt_ext._torch import (
    call_at_end_of_backward,
    current_node,
    graph_task,
    mark_step_for_schedulers,
)
from torchopt_ext.containers.batches import make_batches
from torchopt_ext.containers.optimizers import OptimizersContainer, T, jointly_decided
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.context import ALONE, StepContext
from torchopt_ext.optim.hooks import evaluate, inner_step
from torchopt_ext.optim.options import ASK_FOR_NORM
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of, remove_all
from torchopt_ext.state.entries import MASTERS
from torchopt_ext.state.params import params_of

logger = logging.getLogger(__name__)


class OptimizersInBackwardContainer(OptimizersContainer[T]):
    """Steps inside backward. Keep the container: when it is deleted, state and hooks are gone, too.

    Without a norm there is one optimizer per trainable parameter. It steps as soon as a gradient
    has been accumulated, and then frees the gradient, so that all gradients never exist together.
    `torch.nn.utils.clip_grad_norm_` then sees no gradients and returns 0. Small parameters are
    stepped in batches, for which at most 2 MiB of gradients wait (:class:`.batches.Batches`).

    With `max_grad_norm` or `skip_nonfinite` there is one optimizer per part. All gradients are
    kept. The update follows when backward ends, clipped by the exact norm.

    Under DistributedDataParallel and torch.distributed's `replicate`, gradients are reduced after
    the hooks. The update therefore follows the last reduction, when backward ends. DDP's buckets
    hold all gradients until then anyway.

    `step()` fires step hooks, after the parameters have been updated. `zero_grad()` does nothing.
    If backward has left gradients, `step()` updates with them and `zero_grad()` drops them.

    Args:
        model_parts, optimizer_cls, optimizer_kwargs, **kwargs: as in OptimizersContainer.
        backwards_per_step: how many gradients of a parameter are accumulated before its update, for
            example of microbatches. A parameter that gets fewer gradients is updated in `step()`.
            None, only with a norm: `step()` updates with all gradients. Gradient
            scalers and a `process_group` of pipeline stages need None.

    Raises:
        ValueError: as in OptimizersContainer. Also: no parameter is trainable, `backwards_per_step`
            is below 1, None without a norm, or a number with a `process_group`; `offload_step` is
            "staged" or "host" without a norm.
    """

    measures_norm: bool  # max_grad_norm and skip_nonfinite need the norm
    _noted = False

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
        *,
        backwards_per_step: int | None = 1,
        **kwargs: Any,
    ) -> None:
        self.measures_norm = any(optimizer_kwargs.get(name) for name in ASK_FOR_NORM)
        self._backwards = backwards_per_step
        if backwards_per_step is not None:
            expect_counts(backwards_per_step=backwards_per_step)
            if backwards_per_step < 1:
                raise ValueError(f"backwards_per_step is {backwards_per_step}, expected 1 or more")
            if optimizer_kwargs.get("process_group") is not None:
                raise ValueError(
                    "ranks of a process_group, such as pipeline stages, end their backward at "
                    "different times, so they cannot agree on a norm there: pass "
                    "backwards_per_step=None, and step() does it"
                )
        elif not self.measures_norm:
            raise ValueError(
                "backwards_per_step=None keeps all gradients until step(), as "
                "OptimizersContainer does: it is for max_grad_norm and skip_nonfinite"
            )
        if not self.measures_norm and (path := optimizer_kwargs.get("offload_step")):
            if path in ("staged", "host"):
                raise ValueError(
                    f"offload_step={path!r} needs buffers and waits for each optimizer, here for "
                    "each parameter in backward: use 'mapped'"
                )
            if path == "auto":
                optimizer_kwargs = {**optimizer_kwargs, "offload_step": "mapped"}
        super().__init__(model_parts, optimizer_cls, optimizer_kwargs, **kwargs)
        if not self.optimizers:
            raise ValueError("no parameter of the model parts is trainable")
        self._task: int | None = None  # the graph task at whose end the update is made
        handles_of(self).append(
            register_module_module_registration_hook(WeakHook(self, "_watch_ddp"))
        )
        self._handles = handles_of(self)
        self._watch()
        for optimizer in self.optimizers:
            vars(optimizer)["add_param_group"] = functools.partial(_reject, _NO_GROUP)
            if not self.measures_norm and isinstance(optimizer, FusedOptimizer):
                vars(optimizer)["set_schedule"] = functools.partial(_reject, _NO_SCHEDULE)
                vars(optimizer)["set_loss_scale"] = functools.partial(_reject, _NO_LOSS_SCALE)

    def _watch(self) -> None:
        """Hooks the parameters that are in the groups now, and no others."""
        remove_all(self._handles)
        self._optimizer_of = {p: opt for opt in self.optimizers for p in params_of(opt)}
        every = [] if self.measures_norm else make_batches(self.optimizers)
        self._batches_of = {param: batches for batches in every for param in batches.places}
        self._joint_steps = [joint for batches in every for joint in batches.joint_steps]
        self._counts: dict[Tensor, int] = {}  # gradients since a parameter's last update
        self._reduced_by_ddp: bool | None = None  # None: not searched for yet
        hook = WeakHook(self, "_take_gradient")
        for param in self._optimizer_of:
            if param.requires_grad:  # unlike what Accelerate puts there for a time
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
        self._impls = {param: param._cdata for param in self._optimizer_of}  # the hooked tensors

    def _release_replaced(self) -> None:
        super()._release_replaced()
        self._watch()

    def _watch_swapped(self) -> None:
        """Hooks parameters that were replaced in the groups, or swapped for other tensors.

        torch.utils.swap_tensors, which conversions of modules may use, leaves the hooks with the
        former tensor. An update takes gradients that no hook has seen.
        """
        if not all(map(operator.is_, params_of(*self.optimizers), self._optimizer_of)):
            self._release_replaced()
        for param, impl in self._impls.items():
            if param._cdata != impl:
                self._impls[param] = param._cdata
                hooked: Any = param
                hooked._post_accumulate_grad_hooks = hooked._post_accumulate_grad_hooks

    def _watch_ddp(self, module: nn.Module, *_: Any) -> None:
        """Makes the next gradient search for DDP again if a DDP is built, even after a backward."""
        if isinstance(module, DistributedDataParallel):
            self._reduced_by_ddp = None

    def _shares(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        if self.measures_norm:
            return [params] if params else []
        return [[param] for param in params]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Fires the step hooks, and updates what backward has not updated (`backwards_per_step`).

        Runs a closure first, whose backward makes the update, and returns its loss.
        """
        closure = kwargs.get("closure", args[0] if args else None)
        loss = evaluate(closure if callable(closure) else None)
        self._watch_swapped()
        if (
            self._backwards is None  # other ranks may have gradients
            or self._counts
            or any(param.grad is not None for param in self._optimizer_of)  # hooks saw none of them
        ):
            self._update(self._context)
        if not self._noted:  # for schedulers: some parameters may never get a gradient
            self._noted = True
            for optimizer in self.optimizers:
                mark_step_for_schedulers(optimizer)
        return loss

    def _set_max_grad_norm(self, value: float | None) -> None:
        if value and not self.measures_norm:
            raise ValueError(
                "this container steps each parameter before the norm of all is known: pass "
                "max_grad_norm to its constructor"
            )
        super()._set_max_grad_norm(value)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drops gradients that no update has used. Backward clears all other gradients."""
        self._watch_swapped()
        if self.measures_norm:
            super().zero_grad()
            self._counts = {}
        else:
            self._clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            _reject(_NO_GROUP)

    @property
    def _steps_in_backward(self) -> bool:
        """Whether backward updates. A gradient scaler has not given its scale then."""
        return self._backwards is not None

    def _unscales(self) -> bool:
        return not self._steps_in_backward

    @property
    def _checks_overflow_in_step(self) -> bool:
        return not self._steps_in_backward

    def _prepare_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Checks a state dict of OptimizersContainer, or of torchtitan's container in backward.

        torchtitan's dict has only the first parameter's state (torchtitan/components/optimizer.py
        zips model parts with optimizers). A warning then says which state starts anew.
        """
        return super()._prepare_load(self._completed(state_dict))

    def _completed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        first, *others = self._parameter_names().values()

        def is_of(key: str, name: str) -> bool:
            return key.startswith((f"state.{name}.", f"param_groups.{name}."))

        keys = [key for key in state_dict if key.startswith(("state.", "param_groups."))]
        if not others or not keys or not all(is_of(key, first) for key in keys):
            return state_dict
        logger.warning(
            "The checkpoint has the optimizer state of '%s' only, as torchtitan's container in "
            "backward saves it: moments and step counts of %d other parameters start anew, from "
            "'%s' to '%s'.",
            *(first, len(others), others[0], others[-1]),
        )
        completed = dict(state_dict)
        for key, value in self.state_dict().items():
            kind, _, rest = key.partition(".")
            option = rest.rpartition(".")[2]
            if key in completed or option in MASTERS or not any(is_of(key, n) for n in others):
                continue
            saved = completed.get(f"param_groups.{first}.{option}", value)
            completed[key] = saved if kind == "param_groups" else torch.zeros_like(value)
        return completed

    def _take_gradient(self, param: nn.Parameter) -> None:
        if param not in self._optimizer_of:  # it has the hook of a tensor it was swapped with
            return
        if self._reduced_by_ddp is None:
            self._reduced_by_ddp = _is_reduced_by_ddp(self._optimizer_of)
        at_once = not (self.measures_norm or self._reduced_by_ddp)
        if not (at_once and self._backwards == 1):
            count = self._counts[param] = self._counts.get(param, 0) + 1
            if count != (self._backwards or 1):
                return
        if at_once:
            self._counts.pop(param, None)
            if (batches := self._batches_of.get(id(param))) is not None:
                batches.take(param)
            else:
                self._optimizer_of[param].step()
                param.grad = None
        elif self._backwards is not None:
            self._update_at_end()

    def _update_at_end(self, *_: Any) -> None:
        """Schedules the update for the end of the current graph task."""
        if (task := graph_task()) != self._task:
            self._task = task
            call_at_end_of_backward(WeakHook(self, "_end_task"))

    def _end_task(self) -> None:
        self._task = None
        node = current_node()
        if node is not None:  # reentrant activation checkpointing: the outer task continues
            node.register_hook(WeakHook(self, "_update_at_end"))
        else:
            # Callbacks queued after this callback bring gradients, too: DDP's reducer waits for
            # its reductions (torch/csrc/distributed/c10d/reducer.cpp, mark_variable_ready), and
            # each FSDP2 root reduces gradients that no hook of its backward has reduced
            # (_fsdp_state.py, _root_post_backward_final_callback).
            call_at_end_of_backward(WeakHook(self, "_update_complete"))

    def _update_complete(self) -> None:
        self._watch_swapped()
        # Otherwise another part's microbatches or step() must follow.
        if set(self._counts.values()) == {self._backwards or 1}:
            self._update(ALONE)

    def _update(self, context: StepContext) -> None:
        self._step(context)
        self._clear()

    def _step(self, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        norm = self.measures_norm or jointly_decided(self.optimizers, context)
        if norm or not context.is_default:  # otherwise each parameter has its own optimizer
            return super()._step(context, *args, **kwargs)
        for joint in self._joint_steps:
            joint.step_all(lambda optimizer: inner_step(optimizer, context))
        for param, optimizer in self._optimizer_of.items():
            if param.grad is not None and id(param) not in self._batches_of:
                inner_step(optimizer, context)
        return None

    def _clear(self) -> None:
        # The update also uses gradients that no hook has seen: DDP gives gradients to parameters
        # that only other ranks have used, and users may set gradients.
        for param in self._optimizer_of:
            param.grad = None
        self._counts = {}


_NO_GROUP = (
    "a container in backward takes the gradients of the parameters that it was built with: build "
    "one for the grown model and load this one's state_dict()"
)
_NO_SCHEDULE = (
    "a schedule counts the steps of its optimizer, and here each parameter has one, which steps "
    "only where it is used: take LRSchedulersContainer"
)
_NO_LOSS_SCALE = (
    "a loss scale needs one decision on all gradients, and here each parameter has an optimizer of "
    "its own: build the container with skip_nonfinite=True"
)


def _reject(message: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(message)


def _is_reduced_by_ddp(params: Iterable[Tensor]) -> bool:
    """Returns whether a DistributedDataParallel, also `replicate`'s, reduces these gradients.

    DDP leaves no mark on parameters or modules within it, so this searches all existing objects.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    ours = set(map(id, params))
    ddps = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return any(id(p) in ours for ddp in ddps for p in ddp.parameters())
