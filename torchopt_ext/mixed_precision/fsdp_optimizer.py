"""FSDPadaptOptimizer: mixed precision around any optimizer, with LightRFT's interface."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from torchopt_ext import _C
from torchopt_ext._arguments import expect_numbers, inner_optimizer
from torchopt_ext._torch import tree_map_only
from torchopt_ext.mixed_precision.base_optimizer import BaseOptimizer
from torchopt_ext.mixed_precision.dynamic_grad_scaler import DynamicGradScaler
from torchopt_ext.mixed_precision.master_optimizer import MasterOptimizer
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.fused_optimizer import with_arguments
from torchopt_ext.optim.hooks import evaluate, forwarded, inner_step, run_hooks
from torchopt_ext.optim.options import ASK_FOR_NORM, answers_other_names
from torchopt_ext.optim.placed_states import move_states
from torchopt_ext.optim.rejection import StepProgress
from torchopt_ext.optim.step import reject
from torchopt_ext.state.devices import moved
from torchopt_ext.state.entries import MASTERS, WITH_BASE, tensor_problem
from torchopt_ext.state.masters import weight_of
from torchopt_ext.state.params import named_params, params_of
from torchopt_ext.state.storage import is_steppable
from torchopt_ext.statedict.loaded import expect_dict, raise_problems

logger = logging.getLogger(__name__)

# The wrapper of each base, to reject a second wrapper.
_wrappers: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


class FSDPadaptOptimizer(BaseOptimizer):
    """Adds a loss scale, overflow check, clipping and fp32 master weights to an optimizer.

    A step computes the norm of all gradients, over all groups and ranks. If a gradient is not
    finite, the step is skipped. Otherwise the optimizer gets the gradients divided by
    ``loss_scale * max(1, (norm + 1e-6) / clip_grad_norm)``. Then the step clears the gradients.

    Interface and state dict are LightRFT's. Like LightRFT's class, this class puts fp32 masters
    into the optimizer's groups (:class:`.master_optimizer.MasterOptimizer`). A
    :class:`~torchopt_ext.FusedOptimizer` instead makes the whole step in two passes over memory,
    steps the model's parameters, and keeps masters in ``state[p]["master_weight"]``. With
    ``state_device="cpu"`` it keeps moments and masters on the host, also during steps, so that the
    GPU has room for generation (docs/offload.md).

    Parameters may be plain tensors or DTensors of any meshes (FSDP2, HSDP, tensor parallel).
    Masters follow weights that user code writes between steps (docs/between_steps.md).

    Args:
        optimizer: the base. In its groups, masters replace bf16 and fp16 parameters. It steps fp32
            and fp64 parameters directly.
        grad_scal_cfg: arguments of :class:`DynamicGradScaler`, or InternEvo's form, which has some
            arguments under "fp16". None for a dynamic scale if a trainable parameter is fp16,
            otherwise for a constant scale of 1.
        clip_grad_norm: threshold for the 2-norm of all gradients; 0 or less for no clipping. None
            for the base's ``max_grad_norm`` if above 0, otherwise 1.0: LightRFT clips by default.
        process_group: ranks that share the norm and the skip decision, as in FusedAdamW. None:
            every DTensor is summed over its own mesh, and plain parameters count as replicas.

    Raises:
        TypeError: the base cannot be wrapped, or a parameter cannot be stepped; names it.
        ValueError: the base has a loss scale of its own.
    """

    # The stepper's groups hold the model's parameters. It also holds the last step's decision.
    _stepper: Any
    _scaled = False  # whether there are gradients that backward() has scaled
    _stepping = False
    _checkpoint_layout = WITH_BASE
    loss_scale = forwarded("grad_scaler", "scale")
    """The scale of the loss, float32, one element."""
    control = forwarded("_stepper", "control")
    process_group = forwarded("_stepper", "process_group")
    grad_norm = forwarded("_stepper.control", "grad_norm")
    """The last step's norm of all gradients, unscaled and before clipping; float64, 0-dim."""
    host_bytes = forwarded("optim", "host_bytes")
    """The bytes of a fused base's states that lie in page-locked memory of the host."""
    skipped_steps = forwarded("_stepper.control", "skipped_steps")
    """The number of skipped steps; float64, 0-dim."""

    @answers_other_names("the optimizer that this one wraps")
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        grad_scal_cfg: Mapping[str, Any] | None = None,
        clip_grad_norm: float | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(optimizer)
        _reject_base(optimizer)
        params = params_of(optimizer)
        device = next((param.device for param in params if not param.is_meta), "cpu")
        self.grad_scaler = DynamicGradScaler(**_scaler_config(grad_scal_cfg, params), device=device)
        if clip_grad_norm is None:
            clip_grad_norm = getattr(optimizer, "max_grad_norm", None) or 1.0
        self.clip_grad_norm(max_norm=clip_grad_norm)
        fused = isinstance(optimizer, FusedOptimizer)
        self._stepper = optimizer if fused else MasterOptimizer(optimizer)
        if process_group is not None:
            self._stepper.process_group = process_group
        self._stepper.skip_nonfinite = True
        self._stepper._keep_masters()
        _wrappers[optimizer] = weakref.ref(self)

    @property
    def params_by_group(self) -> list[list[Tensor]]:
        """The model's parameters, by group."""
        return [group["params"] for group in self._stepper.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and masters for its parameters."""
        self._stepper.add_param_group(param_group)

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Sets the masters from the parameters, or both from float32 weights.

        Masters follow weights that user code writes. Call this only after writes that torch does
        not count (docs/between_steps.md).

        Args:
            from_: float32 weights, as in :meth:`torchopt_ext.FusedAdamW.refresh_masters`.
        """
        if self._offloader is not None:
            self._offloader.bring_back()
        self._stepper.refresh_masters(from_)

    def move_state(self, device: torch.device | str | None) -> None:
        """Moves a fused base's states as :meth:`torchopt_ext.FusedAdamW.move_state` does.

        Raises:
            TypeError: the base is not a fused optimizer.
            ValueError, RuntimeError: as FusedAdamW's. Nothing has changed.
        """
        if self._stepper is not self.optim:
            raise TypeError(
                f"a {type(self.optim).__name__} steps states beside its parameters: "
                "offload_fsdp_optimizer moves them between steps"
            )
        move_states([self._stepper], device, self)

    def clip_grad_norm(self, model: Any = None, max_norm: float = 1.0) -> None:
        """Sets the threshold of clipping, which :meth:`step` does.

        Args:
            model: not used; all of the optimizer's gradients are clipped together.
            max_norm: the threshold for the norm of all gradients; 0 or less for no clipping.

        Raises:
            TypeError: ``model`` is a number, or ``max_norm`` is not a number.
            ValueError: ``max_norm`` is NaN.
        """
        if isinstance(model, Real):
            raise TypeError(
                f"model is {model!r}; the threshold is clip_grad_norm(max_norm={model!r})"
            )
        expect_numbers(max_norm=max_norm)
        if math.isnan(max_norm):
            raise ValueError("Invalid max_norm: nan; 0 or less leaves gradients alone")
        self._clip_grad_norm = float(max_norm)

    @property
    def max_grad_norm(self) -> float | None:
        """The threshold that :meth:`clip_grad_norm` sets; None without clipping."""
        return self._clip_grad_norm if self._clip_grad_norm > 0.0 else None

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self.clip_grad_norm(max_norm=value or 0.0)

    # ---- gradients and steps ---------------------------------------------------------------------

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Computes gradients of ``loss``, one element, times the loss scale. Calls add up."""
        scale = moved(self.loss_scale, loss.device).reshape(())
        super().backward(scale * loss.float(), retain_graph=retain_graph)
        self._scaled = True

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """Continues backward from ``grad``, the already scaled gradients of ``tensor``."""
        super().backward_by_grad(tensor, grad)
        self._scaled = True

    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in params_of(self._stepper))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters."""
        if set_to_none:
            _C.clear_gradients(params_of(self._stepper))
        else:
            self._stepper.zero_grad(set_to_none=False)
        self._scaled = False

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, wait: bool = True
    ) -> bool | None:
        """Makes one step with the current gradients, and clears them.

        Args:
            closure: clears gradients, evaluates the model and calls :meth:`backward`.
            wait: False: do not wait for a GPU to know whether the step was made. If a rank rejects
                such a step, end the job: the loss scales then differ between ranks.

        Returns:
            Whether the step was made. False: a gradient on some rank was not finite, and only the
            loss scale has changed. None: only a GPU knows, and ``wait`` is False. A skip then
            counts in :attr:`skipped_steps`.

        Raises:
            RuntimeError: gradients were not scaled, or a gradient or parameter does not fit; names
                it. Nothing is changed.
        """
        if self._stepping:
            raise RuntimeError("a step of this optimizer is under way")
        self._stepping = True
        stepper = self._stepper
        try:
            evaluate(closure)
            self._reject_unscaled()
            stepper.max_grad_norm = self.max_grad_norm
            skipped = inner_step(stepper, StepContext(self.loss_scale, check_overflow=True))
            if skipped is None:
                skipped = stepper.known("skip")
            if skipped is None and wait:
                skipped = stepper.control.skip.item()
                # Here: the rank that rejects keeps scale and gradients.
                stepper.rejected_steps.check()
        except BaseException:
            self._scaled &= self.has_gradients()
            raise
        finally:
            self._stepping = False
        self.grad_scaler.update(moved(stepper.control.found_inf, self.loss_scale.device))
        self.zero_grad()
        if skipped is None:
            stepper.rejected_steps.check()  # about earlier steps
            return None
        if skipped and os.environ.get("RANK", "0") == "0":
            logger.warning("a gradient was not finite: the step was skipped")
        return not skipped

    def _reject_unscaled(self) -> None:
        if not self._scaled and self.has_gradients() and not self.grad_scaler.is_one():
            reject([self._stepper], StepContext(check_overflow=True), StepProgress())
            raise RuntimeError(
                f"there are gradients that this optimizer's backward() did not scale, but the loss "
                f"scale is {self.loss_scale.item():g}, by which step() divides: call "
                f"optimizer.backward(loss) instead of loss.backward()"
            )

    # ---- state dicts -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        # The wrapper sets the base's threshold, and that it skips.
        text = with_arguments(super().__repr__(), [self.optim], without=ASK_FOR_NORM)
        return text.replace(" (", f" (\nclip_grad_norm: {self.max_grad_norm}", 1)

    def state_dict(self, *, snapshot: bool = False) -> dict[str, Any]:
        """Returns ``grad_scaler``, ``base_optim_states`` and ``flat_fp32_weights``.

        ``flat_fp32_weights`` maps group indices to the weights from which parameters are rounded.

        Args:
            snapshot: return copies on the CPU instead of the optimizer's own tensors.
        """
        run_hooks(self, "state_dict_pre")
        scale, base = self.grad_scaler.state_dict(), self.optim.state_dict()
        if self._stepper is self.optim:
            entries = {
                index: {name: value for name, value in entry.items() if name not in MASTERS}
                for index, entry in base["state"].items()
            }
            base["state"] = {index: entry for index, entry in entries.items() if entry}
        groups, state = enumerate(self.params_by_group), self._stepper.state
        weights = {i: [weight_of(p, state.get(p, {})) for p in params] for i, params in groups}
        states = {"grad_scaler": scale, "base_optim_states": base, "flat_fp32_weights": weights}
        states = run_hooks(self, "state_dict_post", states)
        if snapshot:
            states = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), states)
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Loads a state dict of this class or of LightRFT's, and sets the model's parameters.

        The dict is checked completely before anything changes. No reference to it is kept.

        Raises:
            AssertionError: a part is missing, or the number of groups or their tensors differs.
            ValueError: a tensor has another shape or placement; names the parameter.
        """
        self._prepare_load(states)()

    @torch.no_grad()
    def _prepare_load(self, states: dict[str, Any]) -> Callable[[], None]:
        """Checks a state dict, and returns the function that loads it."""
        expect_dict(states)
        states = run_hooks(self, "load_state_dict_pre", states.copy())
        for part in ("grad_scaler", "base_optim_states", "flat_fp32_weights"):
            assert part in states, f"Not found {part} state!"
        scale, base = states["grad_scaler"], states["base_optim_states"]
        self.grad_scaler._check_state_dict(scale)
        # DCP converts indices to strings.
        saved = {int(index): list(group) for index, group in states["flat_fp32_weights"].items()}
        groups, stepper = self.params_by_group, self._stepper
        assert set(saved) == set(range(len(groups))), (
            f"The groups of the saved weights are {sorted(saved)}, expected 0 to {len(groups) - 1}"
        )
        for index, params in enumerate(groups):
            assert len(saved[index]) == len(params), (
                f"The number of flat tensor is inconsistent, {len(params)} != {len(saved[index])}"
            )
        weights = list(chain(*(saved[index] for index in range(len(groups)))))
        raise_problems(
            f"the saved weight of parameter {name or number!r} {problem}"
            for number, ((name, param), weight) in enumerate(
                zip(named_params(stepper), weights, strict=True)
            )
            if is_steppable(param) and (problem := tensor_problem(weight, param))
        )
        if isinstance(stepper, MasterOptimizer):
            load_base = stepper.prepare_base(base, weights)
        else:
            load_base = stepper._prepare_load(dict(base))
        pairs = [*zip(params_of(stepper), weights, strict=True)]

        @torch.no_grad()
        def load() -> None:
            load_base()
            stepper._set_weights(pairs)
            self.grad_scaler.load_state_dict(scale)
            run_hooks(self, "load_state_dict_post")

        return load

    def _checkpoint_buffers(self, ids: list[str]) -> Any:
        """Returns the buffers that :func:`torchopt_ext.statedict.dcp.load` reads into."""
        from torchopt_ext.statedict.dcp import BASE, buffers_by_key

        keys = [f"{BASE}.state.{i}" for i in ids]
        params = dict(zip(keys, params_of(self._stepper), strict=False))
        for number, group in enumerate(self.params_by_group):
            params |= {f"flat_fp32_weights.{number}.{i}": param for i, param in enumerate(group)}
        return buffers_by_key(params)

    def __getstate__(self) -> dict[str, Any]:
        if self._offloader is not None:  # a copy has no offloader, so its state must be on device
            self._offloader.bring_back()
        return super().__getstate__() | {"_stepping": False, "_scaled": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _wrappers[self.optim] = weakref.ref(self)


def _reject_base(optimizer: Optimizer) -> None:
    """Raises TypeError for an optimizer that cannot be wrapped, ValueError for its settings."""
    name = type(optimizer).__name__
    wrapper = _wrappers.get(optimizer)
    if getattr(optimizer, "has_loss_scale", False):
        raise ValueError(
            f"the {name} keeps a loss scale of its own (set_loss_scale), which FSDPadaptOptimizer "
            "would not use: give it grad_scal_cfg"
        )
    if (inner := inner_optimizer(optimizer)) is not optimizer:
        raise TypeError(
            f"the {name} is a framework's wrapper: give FSDPadaptOptimizer the "
            f"{type(inner).__name__} in it"
        )
    if any(getattr(param, "is_master_weight", False) for param in params_of(optimizer)):
        raise TypeError(f"the {name} has the masters of another FSDPadaptOptimizer in its groups")
    if isinstance(optimizer, BaseOptimizer):
        raise TypeError(f"the optimizer is a {name} already: wrap the one in it")
    if wrapper is not None and wrapper() is not None:
        raise TypeError(f"the {name} is wrapped by another FSDPadaptOptimizer already")
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS evaluates the model within a step; its gradients cannot be scaled")
    if hasattr(optimizer, "consolidate_state_dict"):
        raise TypeError(
            f"a {name} shards parameters by itself: give it master weights "
            f"(optimizer_class=FusedAdamW, master_weights='fp32') and torchopt_ext.GradScaler"
        )


def _scaler_config(config: Mapping[str, Any] | None, params: list[Tensor]) -> dict[str, Any]:
    """Returns the arguments of DynamicGradScaler."""
    if config is None:
        if any(param.dtype == torch.float16 and param.requires_grad for param in params):
            return {"dtype": torch.float16}
        return {"initial_scale": 1.0, "growth_factor": 1.0, "backoff_factor": 1.0, "max_scale": 1.0}
    if not isinstance(config, Mapping):
        raise TypeError(f"grad_scal_cfg is {config!r:.200}, expected a mapping")
    flat = {key: value for key, value in config.items() if key != "fp16"}
    nested = config.get("fp16", {})
    return {"dtype": torch.float16 if nested else torch.bfloat16, **nested, **flat}
