"""FSDPadaptOptimizer: mixed precision around any optimizer, with LightRFT's interface."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext._arguments import expect_numbers
from torchopt_ext._torch import tree_map_only
from torchopt_ext.mixed_precision.dynamic_grad_scaler import DynamicGradScaler
from torchopt_ext.mixed_precision.master_weights import MasterWeights
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.hooks import evaluate, forwarded, run_hooks
from torchopt_ext.optim.rejection import Agreement
from torchopt_ext.optim.step import reject
from torchopt_ext.state.devices import moved
from torchopt_ext.state.entries import WITH_BASE
from torchopt_ext.state.params import params_of

logger = logging.getLogger(__name__)


class FSDPadaptOptimizer(MasterWeights):
    """Adds a loss scale, overflow check, clipping and fp32 master weights to an optimizer.

    A step computes the norm of all gradients, over all groups and ranks. If a gradient is not
    finite, the step is skipped. Otherwise the optimizer gets the gradients divided by
    ``loss_scale * max(1, (norm + 1e-6) / clip_grad_norm)``. Then the step clears the gradients.

    Interface and state dict are LightRFT's. Like LightRFT's class, this class puts fp32 masters
    into the optimizer's groups. A
    :class:`~torchopt_ext.FusedOptimizer` instead makes the whole step in two passes over memory,
    steps the model's parameters, and keeps masters in ``state[p]["master_weight"]``.

    Parameters may be plain tensors or DTensors of any meshes (FSDP2, HSDP, tensor parallel).
    Masters follow weights that user code writes between steps (docs/step.md).

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
    """

    _scaled = False  # whether there are gradients that backward() has scaled
    _stepping = False
    checkpoint_layout = WITH_BASE
    loss_scale = forwarded("grad_scaler", "scale")
    """The scale of the loss, float32, one element."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        grad_scal_cfg: Mapping[str, Any] | None = None,
        clip_grad_norm: float | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(optimizer)
        params = params_of(optimizer)
        device = next((param.device for param in params if not param.is_meta), "cpu")
        self.grad_scaler = DynamicGradScaler(**_scaler_config(grad_scal_cfg, params), device=device)
        if clip_grad_norm is None:
            clip_grad_norm = getattr(optimizer, "max_grad_norm", None) or 1.0
        self.clip_grad_norm(max_norm=clip_grad_norm)
        self._make_masters(process_group)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Computes gradients of ``loss``, one element, times the loss scale. Calls add up."""
        scale = moved(self.loss_scale, loss.device).reshape(())
        super().backward(scale * loss.float(), retain_graph=retain_graph)
        self._scaled = True

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """Continues backward from ``grad``, the already scaled gradients of ``tensor``."""
        super().backward_by_grad(tensor, grad)
        self._scaled = True

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
        try:
            evaluate(closure)
            self._reject_unscaled()
            self._stepper.max_grad_norm = self.max_grad_norm
            context = StepContext(grad_scale=self.loss_scale, check_overflow=True)
            skipped = self._step_in(context, wait)
        except BaseException:
            self._scaled &= self.has_gradients()
            raise
        finally:
            self._stepping = False
        self.grad_scaler.update(moved(self._stepper.control.found_inf, self.loss_scale.device))
        self.zero_grad()
        if skipped is None:
            self._stepper.verdict.check()  # about earlier steps
            return None
        if skipped and os.environ.get("RANK", "0") == "0":
            logger.warning("a gradient was not finite: the step was skipped")
        return not skipped

    def _reject_unscaled(self) -> None:
        if not self._scaled and self.has_gradients() and not self.grad_scaler.is_one():
            reject([self._stepper], StepContext(check_overflow=True), Agreement())
            raise RuntimeError(
                f"there are gradients that this optimizer's backward() did not scale, but the loss "
                f"scale is {self.loss_scale.item():g}, by which step() divides: call "
                f"optimizer.backward(loss) instead of loss.backward()"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters."""
        super().zero_grad(set_to_none)
        self._scaled = False

    def state_dict(self, *, snapshot: bool = False) -> dict[str, Any]:
        """Returns ``grad_scaler``, ``base_optim_states`` and ``flat_fp32_weights``.

        ``flat_fp32_weights`` maps group indices to the weights from which parameters are rounded.

        Args:
            snapshot: return copies on the CPU instead of the optimizer's own tensors.
        """
        run_hooks(self, "state_dict_pre")
        states = {
            "grad_scaler": self.grad_scaler.state_dict(),
            "base_optim_states": self.base_state(),
            "flat_fp32_weights": self.weights(),
        }
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
        self.prepare_load(states)()

    @torch.no_grad()
    def prepare_load(self, states: dict[str, Any]) -> Callable[[], None]:
        """Checks a state dict, and returns the function that loads it."""
        states = run_hooks(self, "load_state_dict_pre", states.copy())
        for part in ("grad_scaler", "base_optim_states", "flat_fp32_weights"):
            assert part in states, f"Not found {part} state!"
        scale = states["grad_scaler"]
        self.grad_scaler.check_state_dict(scale)
        # DCP converts indices to strings.
        saved = {int(index): list(own) for index, own in states["flat_fp32_weights"].items()}
        load_weights = self.prepare_weights(states["base_optim_states"], saved)

        @torch.no_grad()
        def load() -> None:
            load_weights()
            self.grad_scaler.load_state_dict(scale)
            run_hooks(self, "load_state_dict_post")

        return load

    def checkpoint_buffers(self, ids: list[str]) -> Any:
        """Returns the buffers that :func:`torchopt_ext.statedict.dcp.load` reads into."""
        from torchopt_ext.statedict.dcp import BASE, buffers_by_key

        params = dict(
            zip((f"{BASE}.state.{i}" for i in ids), params_of(self._stepper), strict=False)
        )
        for group, own in enumerate(self.params_by_group):
            params |= {f"flat_fp32_weights.{group}.{i}": param for i, param in enumerate(own)}
        return buffers_by_key(params)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_stepping": False, "_scaled": False}


def _scaler_config(given: Mapping[str, Any] | None, params: list[Tensor]) -> dict[str, Any]:
    """Returns the arguments of DynamicGradScaler."""
    if given is not None:
        if not isinstance(given, Mapping):
            raise TypeError(f"grad_scal_cfg is {given!r:.200}, expected a mapping")
        config = dict(given)
        nested = config.pop("fp16", {})
        return {"dtype": torch.float16 if nested else torch.bfloat16, **nested, **config}
    if any(param.dtype == torch.float16 and param.requires_grad for param in params):
        return {"dtype": torch.float16}
    return {"initial_scale": 1.0, "growth_factor": 1.0, "backoff_factor": 1.0, "max_scale": 1.0}
