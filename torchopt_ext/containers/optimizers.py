"""OptimizersContainer: several optimizers with the interface of one optimizer."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from torchopt_ext._torch import GET_STATE, is_called_by, mark_step_for_schedulers
from torchopt_ext.containers.arguments import (
    own_fp32_moments,
    steps_matrices,
    trainable_parameters,
    with_fp32_moments,
)
from torchopt_ext.containers.weights import WeightsOfParts, fused_of
from torchopt_ext.optim import FusedOptimizer, fused_step
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.control import ControlView
from torchopt_ext.optim.embeddings import embeddings_among
from torchopt_ext.optim.fused_optimizer import with_arguments
from torchopt_ext.optim.groups import Choice, choices, in_groups
from torchopt_ext.optim.hooks import (
    HookedStep,
    evaluate,
    inner_step,
    is_patched,
    is_watched,
    run_hooks,
    with_own_hooks,
)
from torchopt_ext.optim.joint import has_own_step
from torchopt_ext.optim.muon_routing import keys_by_route
from torchopt_ext.optim.options import answers_other_names
from torchopt_ext.optim.owners import number_matrices
from torchopt_ext.optim.placed_states import placed_together
from torchopt_ext.state.entries import BY_NAME, unwrapped
from torchopt_ext.state.params import params_of, take_replaced
from torchopt_ext.statedict import dcp, flat
from torchopt_ext.statedict.loaded import expect_dict

T = TypeVar("T", bound=Optimizer)


class ClipsInStep(Protocol):
    """Clips gradients in a container's steps (:mod:`torchopt_ext.containers.deferred_clipping`)."""

    def clip(self, max_norm: float, process_group: Any = None) -> Tensor: ...
    def _for_step(self, context: StepContext, *, new_gradients: bool) -> StepContext: ...
    def _forget(self) -> None: ...


class OptimizersContainer(WeightsOfParts, HookedStep, Optimizer, Stateful, Generic[T]):
    """Holds one optimizer per model part, with the interface of one optimizer.

    Frozen parameters (`requires_grad` False) are left out. A part with nothing to train gets an
    optimizer without parameters, so that optimizers and parts correspond. `param_groups` and
    `state` are the inner optimizers' own. Step hooks registered here fire once per step.

    If the class is a fused one (FusedOptimizer), `optimizer_kwargs` may hold `max_grad_norm` and
    `skip_nonfinite`. Norm, clipping and skipping are then one decision over all parts. Patterns of
    `fp32_moments` are searched for in the names of all parts' parameters.

    Args:
        model_parts: the modules to train.
        optimizer_cls: the class of the inner optimizers.
        optimizer_kwargs: the class's arguments, the same for every part.
        no_decay, lr_multipliers: as for :func:`torchopt_ext.param_groups`, here without effect by
            default. Patterns are searched for in the names of all parts' parameters.
        muon, adamw, adamw_options: as for :func:`torchopt_ext.muon_groups`, if the class is
            FusedMuon or `optimizer_kwargs` has the algorithm "muon".
        partial: other ranks have other parts, in which patterns may be found, as with a
            `process_group`.
        compat: "torchtitan" makes `state_dict()` before the first step create the state as
            torchtitan does, by a step with lr 0 that counts. Bias corrections are then one step
            ahead.

    Raises:
        TypeError: `model_parts` is not a list of modules.
        ValueError: a trainable parameter is on the meta device or belongs to two parts; `compat` is
            unknown; or a pattern is found in no name, and no other ranks have other parts.
    """

    optimizers: list[T]
    model_parts: list[nn.Module]
    deferred_clipping: ClipsInStep | None = None  # set by defer_clipping()
    compat: str | None = None
    _sizes: Sequence[int] = ()  # optimizers per part; () if a subclass makes one for each part
    _built = False
    _first = 0  # the id of the first parameter

    @answers_other_names("the optimizers: put it into optimizer_kwargs")
    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
        *,
        no_decay: Sequence[str] = (),
        lr_multipliers: Mapping[str, float] | None = None,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        adamw_options: Mapping[str, Any] | None = None,
        partial: bool = False,
        compat: str | None = None,
    ) -> None:
        self.compat = check_compat(compat)
        self.model_parts = model_parts
        params = trainable_parameters(model_parts)
        shares = [self._shares(part) for part in params]
        self._sizes = [len(part) for part in shares]
        arguments, lr = optimizer_kwargs, optimizer_kwargs.get("lr")
        self.partial = partial = partial or arguments.get("process_group") is not None
        if isinstance(optimizer_cls, type) and issubclass(optimizer_cls, FusedOptimizer):
            arguments = with_fp32_moments(arguments, model_parts, partial=partial)
        chosen: Mapping[nn.Parameter, Choice] = {}
        if lr_multipliers and lr is None:
            raise ValueError("lr_multipliers needs lr, the learning rate that they multiply")
        if no_decay or lr_multipliers:
            chosen = choices(model_parts, no_decay, lr_multipliers, partial=partial)
        keys = None
        if steps_matrices(optimizer_cls, arguments):
            keys = keys_by_route(model_parts, muon, adamw, adamw_options or {}, partial=partial)
        elif muon or adamw or adamw_options:
            raise ValueError("muon, adamw and adamw_options have no effect without FusedMuon")
        modules = [module for part in model_parts for module in part.modules()]
        with embeddings_among(modules), placed_together():
            self.optimizers = [
                optimizer_cls(
                    in_groups(share, chosen, lr, keys), **own_fp32_moments(arguments, share)
                )
                for share in chain(*shares)
            ]
        self._validate_length(sum(self._sizes))
        self._post_init([*chain(*params)], optimizer_kwargs)
        self._first, self._built = self._first_param(), True

    def _shares(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Divides a model part's parameters among its optimizers."""
        return [params]

    def __iter__(self) -> Iterator[T]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps every inner optimizer with these arguments.

        Returns a closure's loss. With several optimizers, the closure runs once, before them.

        The container's step hooks fire first, then each inner optimizer's. Global step hooks fire
        once, with the container.
        """
        context, clipping = self._context, self.deferred_clipping
        if clipping is not None:
            context = clipping._for_step(context, new_gradients=bool(args or kwargs))
        result = self._step(context, *args, **kwargs)
        if clipping is not None:
            clipping._forget()
        return result

    def _step(self, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        if len(self.optimizers) == 1:
            return inner_step(self.optimizers[0], context, *args, **kwargs)
        fused = jointly_decided(self.optimizers, context)
        closure, args = kwargs.pop("closure", args[0] if args else None), args[1:]
        for optimizer in self.optimizers if closure or args or kwargs else ():
            inspect.signature(optimizer.step).bind(*args, **kwargs)  # raises as a call would
        loss = evaluate(closure)
        if not fused and not args and not kwargs:
            fused = _alike(self.optimizers)
        if fused:
            _step_jointly(fused, context)
        else:
            for optimizer in self.optimizers:
                inner_step(optimizer, context, *args, **kwargs)
        return loss

    def _unscales(self) -> bool:
        return all(getattr(opt, "_step_supports_amp_scaling", False) for opt in self.optimizers)

    @property
    def _checks_overflow_in_step(self) -> bool:
        """Whether torchopt_ext.GradScaler may leave the overflow check to step()."""
        return all(isinstance(opt, FusedOptimizer) for opt in self.optimizers)

    @property
    def control(self) -> ControlView:
        """The decision of the last step over all parts, such as ``control.grad_norm``.

        Raises:
            AttributeError: no inner optimizer is a fused one.
        """
        fused = self._fused()
        # All decisions are equal, except without parameters, where a step does nothing.
        first = min(fused, key=lambda optimizer: not optimizer.param_groups[0]["params"])
        others = [optimizer for optimizer in fused if optimizer is not first]
        return first.control._with_others(others) if others else first.control

    def _fused(self) -> list[FusedOptimizer]:
        if not (fused := fused_of(self.optimizers)):
            raise AttributeError(f"{type(self.optimizers[0]).__name__} has no control block")
        return fused

    @property
    def max_grad_norm(self) -> float | None:
        """The inner optimizers' threshold for the norm over all parts; None without clipping.

        Raises:
            AttributeError: as for :attr:`control`.
        """
        return self._fused()[0].max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._set_max_grad_norm(value)

    def _set_max_grad_norm(self, value: float | None) -> None:
        if value and self.deferred_clipping is not None:
            raise ValueError("deferred_clipping sets max_grad_norm for each step: leave it out")
        for optimizer in self._fused():
            optimizer.max_grad_norm = value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self.deferred_clipping is not None:
            self.deferred_clipping._forget()
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def __repr__(self) -> str:
        return with_arguments(super().__repr__(), self.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Returns all state as one flat dict: `state.{fqn}.*` and `param_groups.{fqn}.*`.

        The keys are complete before the first step, too: missing state is created with step 0.
        Gradients are not touched. As in torch, the tensors are the optimizers' own, except that the
        steps of fused optimizers are copies.

        Raises:
            ValueError: two parts have a trained parameter of the same name.
            NotImplementedError: a part is wrapped by FullyShardedDataParallel.
            TypeError: torch's get_optimizer_state_dict asks, which needs nested dicts.
        """
        if is_called_by(GET_STATE, within=3):
            raise TypeError(
                "get_optimizer_state_dict does not know a container's flat state dict: give it "
                "[*container.optimizers] (Accelerate's save_state cannot: save the container's "
                "state_dict())"
            )
        if self.compat == "torchtitan":
            flat.init_state_by_step(self._parts())
        run_hooks(self, "state_dict_pre")
        packed = flat.get_state_dict(self.optimizers, self._parameter_names())
        return run_hooks(self, "state_dict_post", packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a flat state dict into the optimizers, after checking all of it.

        Keys of other parameters are ignored. The dict is not changed, and none of its tensors is
        kept. docs/checkpoints.md says how frozen parameters and options are treated.

        Raises:
            KeyError: a key is missing.
            ValueError: a value has the wrong shape, kind or placement, or as in `state_dict`.
            NotImplementedError: as in `state_dict`.
        """
        self._prepare_load(state_dict)()

    def _prepare_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Checks a state dict, and returns the function that loads it."""
        expect_dict(state_dict)
        hooked = run_hooks(self, "load_state_dict_pre", dict(state_dict))
        load_checked = flat.prepare_load(self.optimizers, hooked, self._parameter_names())

        def load() -> None:
            load_checked()
            run_hooks(self, "load_state_dict_post")

        return load

    _checkpoint_layout = BY_NAME

    def _checkpoint_buffers(self, ids: list[str]) -> dcp.Buffers:
        """Returns the buffers that :func:`torchopt_ext.statedict.dcp.load` reads into."""
        names = self._parameter_names()
        return dcp.buffers_by_key({f"state.{fqn}": param for param, fqn in names.items()})

    def init_cache_state_dict(self) -> None:
        """Does nothing: only a fault-tolerant container caches its state dict."""

    @cached_property
    def _complete(self) -> flat.Completion:
        return flat.Completion()

    def _parameter_names(self) -> flat.Names:
        """Completes the optimizers' state, and returns their parameters' names in a state dict."""
        return self._complete(self._parts())

    def _parts(self) -> list[flat.ModelPart]:
        """Returns each model part with the optimizers of its parameters."""
        optimizers = iter(self.optimizers)
        sized = zip(self.model_parts, self._sizes or [1] * len(self.optimizers), strict=True)
        return [(part, [*islice(optimizers, size)]) for part, size in sized]

    def _validate_length(self, expected_length: int) -> None:
        if expected_length != len(self.optimizers):
            raise AssertionError(
                f"expected {expected_length} optimizers, got {len(self.optimizers)}: one for each "
                "model part, or in backward one for each parameter"
            )

    def _post_init(
        self, all_params: list[nn.Parameter], optimizer_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Makes this container an Optimizer itself, with its own hooks and defaults."""
        number = 0
        named = chain(*(part.named_parameters() for part in self.model_parts))
        names: dict[torch.Tensor, str] = {param: unwrapped(name) for name, param in named}
        for optimizer in self.optimizers:
            if isinstance(optimizer, FusedOptimizer):
                optimizer._first_parameter_number = number
                optimizer.parameter_names = [
                    [names.get(param, "") for param in group["params"]]
                    for group in optimizer.param_groups
                ]
            number += len(params_of(optimizer))
        number_matrices(self.optimizers)
        # Schedulers such as OneCycleLR look for betas among the defaults.
        of_first = self.optimizers[0].defaults if self.optimizers else {}
        defaults = {**of_first, **(optimizer_kwargs or {})}
        defaults.pop("fp32_moments", None)  # may hold parameters that a framework replaces
        Optimizer.__init__(self, [{"params": all_params}], defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizers' own param groups, part by part."""
        if self._built and (first := self._first_param()) != self._first:
            self._first = first
            self._release_replaced()
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignores the empty list of Optimizer.__init__: the groups are the inner optimizers'."""

    def _first_param(self) -> int:
        """Returns the id of the first parameter, which tells whether a framework replaced all."""
        groups = self.optimizers[0].param_groups if self.optimizers else []
        return next((id(param) for group in groups for param in group["params"]), 0)

    def _release_replaced(self) -> None:
        """Releases what is kept for parameters that a framework has replaced in the groups.

        Accelerate reads `param_groups` while it replaces parameters, after it has asked for a state
        dict, which creates state.
        """
        for optimizer in self.optimizers:
            optimizer.state.update(take_replaced(optimizer))

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizers' state by parameter, for reading only."""
        merged: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in self.optimizers:
            merged.update(optimizer.state)
        return merged

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        """Ignores the empty state of Optimizer.__init__."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise NotImplementedError(
                "a container cannot tell which model part a group belongs to: call "
                "add_param_group on one of container.optimizers"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or deep-copied, since it shares parameters "
            "with the model: build one for the copied model and load this one's state_dict()"
        )


def check_compat(compat: Any) -> str | None:
    """Returns ``compat``. Raises ValueError unless it is None or "torchtitan"."""
    if compat not in (None, "torchtitan"):
        raise ValueError(f"Invalid compat: {compat!r}, expected None or 'torchtitan'")
    return compat


def jointly_decided(optimizers: Sequence[Optimizer], context: StepContext) -> list[FusedOptimizer]:
    """Returns the optimizers if norm and skipping are one decision over all of them, else []."""
    fused = fused_of(optimizers)
    if len(fused) < len(optimizers) or not any(opt._wants_norm(context) for opt in fused):
        return []
    for opt in fused:
        if not has_own_step(opt) or is_patched(opt):
            raise TypeError(
                f"{type(opt).__name__} overrides or replaces step(), which one decision over "
                f"{len(fused)} optimizers cannot call: leave out max_grad_norm and skip_nonfinite"
            )
    return fused


def _alike(optimizers: Sequence[Optimizer]) -> list[FusedOptimizer]:
    """Returns the optimizers if one call can step all of them, else [].

    One call rejects a step before any optimizer has stepped. Hooks and profilers need single steps.
    """
    if any(map(is_watched, optimizers)):
        return []
    fused = [opt for opt in optimizers if has_own_step(opt) and not is_patched(opt)]
    groups = {id(opt.process_group) for opt in fused}
    return fused if len(fused) == len(optimizers) and len(groups) == 1 else []


def _step_jointly(optimizers: Sequence[FusedOptimizer], context: StepContext) -> None:
    """Calls fused_step inside every optimizer's step hooks, which it does not fire itself."""

    def step(*_: Any, **__: Any) -> None:
        fused_step(optimizers, context)

    for optimizer in optimizers:
        mark_step_for_schedulers(optimizer)
        if is_watched(optimizer):
            step = functools.partial(_between_hooks, optimizer, step)
    step()


def _between_hooks(optimizer: Optimizer, step: Callable[..., None], *_: Any, **__: Any) -> None:
    with_own_hooks(optimizer, step, (), {})
