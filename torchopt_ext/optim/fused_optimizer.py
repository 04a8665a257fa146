"""FusedOptimizer: a training step's update in two passes over memory, by any algorithm."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchopt_ext._arguments import expect_params, having_defaults, restored_if_raised
from torchopt_ext._torch import run_eagerly
from torchopt_ext.optim.casts import fp32_places, warn_of_casts
from torchopt_ext.optim.embeddings import reject_embeddings, searched_once
from torchopt_ext.optim.estimate import estimate
from torchopt_ext.optim.hooks import HookedStep, evaluate
from torchopt_ext.optim.options import ASK_FOR_NORM, DECAY, DEFAULTS, StepOptions
from torchopt_ext.optim.saved_states import SavedStates
from torchopt_ext.optim.step import fused_step
from torchopt_ext.state.algorithms import (
    algorithm_of,
    check_values,
    defaults_of,
    defaults_of_new,
    keys_of,
    name_algorithm,
    reject_unknown,
    without_codes,
)
from torchopt_ext.state.masters import refresh_master, row_factors, scale_weight, set_weight
from torchopt_ext.state.matrices import fix_settings, matrices_of
from torchopt_ext.state.params import find_param, named_params, params_of
from torchopt_ext.state.pieces import marked_cut
from torchopt_ext.statedict.weights import read_weights


class FusedOptimizer(HookedStep, SavedStates):
    """An optimizer of param groups that may have different algorithms, with one norm and decision.

    A group's ``"algorithm"`` is one of "adamw", "adam", "lion", "sgd", "muon" and "normuon".
    FusedAdamW, FusedAdam, FusedLion, FusedSGD and FusedMuon are this class with other defaults.
    Groups of the optimizer's own algorithm have its hyperparameters by default. Other groups have
    the defaults of their algorithm, and the optimizer's ``lr``, ``weight_decay`` and ``maximize``.

    Args:
        params: parameters, named parameters or param groups; docs/step.md says of which kinds. The
            step updates the local shards of DTensors. Frozen parameters may be anything.
        algorithm: of the groups that name none.
        cautious_weight_decay: decays a weight only where the step's direction does not have the
            opposite sign (arXiv:2510.12402). Needs ``decoupled_weight_decay``. Groups may differ,
            and have the key only where it is set, as the next.
        decay_follows_lr: the learning rate at which the weight decay is whole. At another, the
            decay is multiplied by the ratio of the two (AdamC, arXiv:2506.02285). True: the group's
            learning rate when the group is added. Needs ``decoupled_weight_decay``.
        arguments: hyperparameters of the algorithm; and, for all groups alike, the options of
            :class:`torchopt_ext.optim.options.StepOptions`.

    Raises:
        TypeError: a parameter cannot be updated (see the message), the algorithm has no such
            hyperparameter, or an argument has a wrong type.
        ValueError: an argument is out of range. With 8-bit moments: ``fp32_moments`` has a pattern
            without a match or a tensor that is no parameter, and there is no ``process_group``.
    """

    # torchopt_ext.GradScaler then leaves the overflow check to the step.
    _checks_overflow_in_step = True
    _writes_copies = True  # steps write the 16-bit copies of weights (torchopt_ext.fsdp)

    estimate = staticmethod(estimate)

    _were_fp32: Sequence[Sequence[bool]] = ()  # parameters as the groups were added, likewise

    def __init__(
        self, params: Iterable[Any], *, algorithm: str = "adamw", **arguments: Any
    ) -> None:
        options = {name: arguments.pop(name) for name in DEFAULTS.keys() & arguments.keys()}
        names = [*keys_of(algorithm), *DEFAULTS]
        reject_unknown(arguments, names, f"{type(self).__name__} with algorithm {algorithm!r}")
        self._build(params, defaults_of(algorithm) | arguments, options)

    def _build(
        self, params: Iterable[Any], defaults: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Builds the optimizer from the default of each key of a group, and other options."""
        defaults = {**defaults, **{key: options[key] for key in DECAY.keys() & options.keys()}}
        check_values(defaults)
        defaults = {key: value for key, value in defaults.items() if value or key not in DECAY}
        chosen = StepOptions.of(type(self), {k: v for k, v in options.items() if k not in DECAY})
        self._storage = chosen.storage
        names = tuple(i if isinstance(i, str) else "a parameter" for i in chosen.fp32_moments)
        # The group and the tensors are not the options' to keep alive.
        self._options = replace(chosen, fp32_moments=names, process_group=None)
        self.process_group = chosen.process_group
        self._init_control()
        self.max_grad_norm, self.skip_nonfinite = chosen.max_grad_norm, chosen.skip_nonfinite
        if chosen.ema_decay is not None:
            self._set_control(ema_decay=chosen.ema_decay, ema_warmup=float(chosen.ema_warmup))
        expect_params(params)
        params = params if isinstance(params, Tensor | set) else list(params)
        self._reject_groups_of_another(params)
        with restored_if_raised(params), searched_once():
            super().__init__(params, dict(defaults))
            self._fp32_moments = tuple(chosen.fp32_moments)
            self._select_fp32_moments(partial=chosen.process_group is not None)
            self._reserve_host_memory()

    def _reject_groups_of_another(self, groups: Any) -> None:
        """Raises ValueError if groups are another optimizer's, whose settings they do not hold.

        Horovod's wrapper and others rebuild an optimizer by ``type(optimizer)(optimizer.
        param_groups)`` (horovod/torch/optimizer.py).
        """
        arguments = self._beside_groups()
        for group in groups if isinstance(groups, list) else ():
            params = group.get("params") if isinstance(group, dict) else None
            other = _holders.get(id(params))
            if other is None or not any(params is group["params"] for group in other.param_groups):
                continue
            known = other._beside_groups()
            if missing := {name: known[name] for name in known if name not in arguments}:
                calls = [name for name in missing if name.startswith("set_")]
                way = f", and call {' and '.join(calls)} again" if calls else ""
                raise ValueError(
                    f"the param groups are those of a {type(other).__name__} with {missing}, which "
                    f"groups do not hold and this optimizer would not have: give it the same "
                    f"arguments {'and' if calls else 'or'} lists of parameters of its own{way}"
                )

    def _init_states(self, chooses: Callable[[Tensor], bool]) -> None:
        warn_of_casts(self)
        self._select_fp32_moments()
        super()._init_states(chooses)

    def _unscales(self) -> bool:
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one optimization step; ``closure`` evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: as :func:`torchopt_ext.optim.fused_step`.
        """
        loss = None if closure is None else evaluate(closure)
        fused_step([self], self._context)
        return loss

    @run_eagerly  # as are torch's methods
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # torch rejects others
            expect_params(param_group.get("params", ()))
        with restored_if_raised([param_group], self):
            name_algorithm(param_group)
            with having_defaults(self, self._defaults_of_new(param_group)):
                super().add_param_group(param_group)
            group = self.param_groups[-1]
            if group.get("decay_follows_lr") is True:
                group["decay_follows_lr"] = float(group["lr"])
                if group["decay_follows_lr"] == 0.0:
                    raise ValueError("decay_follows_lr is True, but lr is 0: name the largest lr")
            self._check_group(group)
            self._were_fp32 = [*self._were_fp32, *fp32_places([group])]
            self._select_fp32_moments()
            if self._fp32_moments is not None:  # the constructor has all groups
                self._reserve_host_memory()
        _holders[id(self.param_groups[-1]["params"])] = self

    def _defaults_of_new(self, group: Any) -> dict[str, Any]:
        """Returns the default of each key that a new group gets.

        Raises:
            TypeError: the group has a hyperparameter that its algorithm lacks.
        """
        # torch rejects what is no group
        return defaults_of_new(self.defaults, group) if isinstance(group, dict) else self.defaults

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises TypeError or ValueError unless steps can update the last group."""
        names = group.get("param_names") or [""] * len(group["params"])
        named = list(zip(names, group["params"], strict=True))
        fix_settings(group)
        check_values(group)
        if misplaced := sorted(DEFAULTS.keys() & group.keys()):
            raise ValueError(
                f"{', '.join(misplaced)}: arguments of {type(self).__name__} for all its "
                "groups, which one group cannot have (a wrapper that copies arguments into "
                "groups, such as torch's ZeroRedundancyOptimizer, cannot pass them)"
            )
        if (wide := without_codes(group)) and self._storage.state_dtype == torch.int8:
            raise ValueError(f"{wide} is not supported with 8-bit moments: state_dtype='int8'")
        asked = {k: group[k] for k in ("foreach", "fused", "differentiable") if k in group}
        if asked.get("foreach") or asked.get("fused") is False or asked.get("differentiable"):
            raise ValueError(
                f"{type(self).__name__} is always fused and not differentiable; got {asked}. "
                f"Use torch.optim for the other implementations."
            )
        if algorithm_of(group).steps_matrices:
            reject_embeddings(group)
        first = sum(len(before["params"]) for before in self.param_groups[:-1])
        for number, (name, param) in enumerate(named, first):
            if param.requires_grad:  # a frozen parameter is checked with its first gradient
                self._check_param(param, name or number)
                if algorithm_of(group).steps_matrices:
                    matrices_of(group, param, name or number)
        if warning := self._passed_over(group["params"]):
            warnings.warn(warning, stacklevel=2)

    def _passed_over(self, params: Iterable[Tensor]) -> str | None:
        return self._storage.passed_over(params, self._options.stochastic_rounding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _holders.setdefault(id(group["params"]), self)

    @torch.no_grad()
    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Sets the master weights to the parameters' values, or sets both from float32 weights.

        Steps let fp32 masters follow weights that were written to. Call this after writes that
        torch does not count, and to set remainders to 0 (docs/between_steps.md). Such writes are
        those through ``.data``, numpy and storages, by foreach functions on DTensors, by
        collectives, to local tensors of detached DTensors, and of CUDA graphs.

        Args:
            from_: float32 weights by parameter, or by name if the optimizer was given names, such
                as an fp32 model's state dict. Masters and remainders get every bit that they can
                hold, and 16-bit parameters get the rounded weights.

        Raises:
            TypeError: ``from_`` is not a mapping.
            ValueError: a weight is missing or does not fit (all are listed). Nothing is changed.
        """
        named = named_params(self)
        self._wait_for_states()
        if from_ is not None:
            self._set_weights_and_state(read_weights(from_, named, self._keeps_master))
            return
        for _, param in named:
            refresh_master(param, self.state.get(param, {}))
        self._mark_weights(param for _, param in named)

    @torch.no_grad()
    def scale_(self, param: Tensor | str, factors: Tensor) -> None:
        """Multiplies equal blocks of rows of a weight, such as heads, by a factor each.

        The master weight or remainder keeps every bit of the product. For QK-clip (MuonClip,
        arXiv:2507.20534).

        Args:
            param: a parameter of this optimizer or, if it was given names, a name.
            factors: shape [n], where n divides the parameter's first dimension.

        Raises:
            TypeError: ``param`` is neither, or ``factors`` is no dense tensor of real numbers.
            ValueError: there is no such parameter, ZeRO has divided it between ranks, or n does not
                divide its rows.
        """
        name, own = find_param(self, param)
        if marked_cut(own) is not None:
            raise ValueError(
                f"parameter {name!r} is a part of a weight: call ZeroRedundancyOptimizer.scale_"
            )
        self._wait_for_states()
        self._scale_rows(own, row_factors(own, factors))

    @torch.no_grad()
    def _scale_rows(self, param: Tensor, factors: Tensor) -> None:
        """Multiplies each row, or each element, of a weight by a factor."""
        scale_weight(param, self.state.get(param, {}), factors, self._storage)
        self._mark_weights([param])

    def _keeps_master(self, param: Tensor) -> bool:
        """Returns whether a parameter has a master weight or a remainder."""
        return self._storage.master_of(param) is not None

    @torch.no_grad()
    def _set_weights_and_state(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets weights. If this makes masters, makes all state, which is saved as a whole."""
        self._set_weights(pairs)
        if any("step" not in self.state.get(param, ("step",)) for param in params_of(self)):
            self._init_states(lambda param: param.requires_grad)

    @torch.no_grad()
    def _set_weights(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets parameters and their masters to float32 weights that fit them."""
        self._reject_exchanged()
        self._reserve_host_memory()
        for param, weight in pairs:
            state = self.state.get(param, {})
            set_weight(param, state, weight, self._storage)
            if state and param.requires_grad:  # a frozen parameter gets a master when trained
                self.state[param] = state
                self._mark_weights([param])

    @property
    def options(self) -> StepOptions:
        """The options that the next step has. Of ``fp32_moments``, tensors are left out."""
        live = ASK_FOR_NORM | {"process_group", "ema_decay"}
        return replace(
            self._options,
            master_weights=self._storage.master_weights,
            state_device=self._storage.state_device,
            **{name: getattr(self, name) for name in live},
        )

    def _beside_groups(self) -> dict[str, Any]:
        """Returns the arguments for all groups that are set, and their values."""
        known = vars(self.options).items()
        found = {name: value for name, value in known if value != DEFAULTS[name]}
        if found.get("max_grad_norm") == 0:  # as None
            del found["max_grad_norm"]
        if self._storage.state_dtype != torch.int8:
            found.pop("fp32_moments", None)
        called = {"set_schedule": self.has_schedule, "set_loss_scale": self.has_loss_scale}
        return found | {name: True for name, is_called in called.items() if is_called}

    def __repr__(self) -> str:
        """Returns torch's text and the arguments for all groups that are set."""
        text = with_arguments(super().__repr__(), [self])
        if warning := self._passed_over(params_of(self)):
            text = text.replace("\nParameter Group", f"\n{warning}\nParameter Group", 1)
        return text

    def _keep_masters(self) -> None:
        """Gives 16-bit parameters fp32 masters from the next step on.

        Does nothing if the arguments chose masters, remainders or stochastic rounding.
        """
        if self._storage.master_weights is None and not self._options.stochastic_rounding:
            self._storage = replace(self._storage, master_weights="fp32")
            self._forget_plan()
            self._reserve_host_memory()


def with_arguments(text: str, optimizers: Iterable[Any], without: Collection[str] = ()) -> str:
    """Adds the arguments for all groups that fused optimizers have to torch's text of a wrapper."""
    fused = [optimizer for optimizer in optimizers if isinstance(optimizer, FusedOptimizer)]
    found = {name: value for one in fused for name, value in one._beside_groups().items()}
    lines = (f"\n{name}: {value}" for name, value in found.items() if name not in without)
    return text.replace(" (", f" ({''.join(lines)}", 1)


_holders: WeakValueDictionary[int, FusedOptimizer] = (
    WeakValueDictionary()
)  # by ids of lists of params
