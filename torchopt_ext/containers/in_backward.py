"""OptimizersInBackwardContainer: each parameter is stepped as soon as its gradient is complete."""

from typing import Any

from torch import nn

from torchopt_ext.containers.optimizers import OptimizersContainer, T, trainable_parameters
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of
from torchopt_ext.statedict.flat import ModelPart


class OptimizersInBackwardContainer(OptimizersContainer[T]):
    """One optimizer per trainable parameter, stepped inside backward.

    The container keeps the optimizers: once it is gone, so are their state and the hooks.

    A gradient lives only from its accumulation to the step that follows at once, so that all
    gradients never exist together. `step()` and `zero_grad()` do nothing, but step hooks fire in
    `step()`: after backward, when the parameters have already been updated. Every backward is a
    step, so gradients cannot be accumulated over several.

    Afterwards no gradient is left to measure: `torch.nn.utils.clip_grad_norm_` returns 0 and clips
    nothing, and `max_grad_norm` and `skip_nonfinite` raise ValueError.

    Args and errors are those of OptimizersContainer; ValueError also if no parameter is trainable.
    """

    # Backward has stepped before a scaler could unscale or check a gradient: scalers then refuse.
    _step_supports_amp_scaling = False
    checks_overflow_in_step = False

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        for name in ("max_grad_norm", "skip_nonfinite"):
            if optimizer_kwargs.get(name):
                raise ValueError(
                    f"{name} needs every gradient before the first update, but in backward a "
                    "parameter is updated before the other gradients exist"
                )
        self.model_parts = model_parts
        params = trainable_parameters(model_parts)
        if not any(params):
            raise ValueError("no parameter of the model parts is trainable")
        self._by_part = [[optimizer_cls([p], **optimizer_kwargs) for p in part] for part in params]
        self.optimizers = [optimizer for part in self._by_part for optimizer in part]
        self._validate_length(sum(len(part) for part in params))
        all_params = [param for part in params for param in part]
        self._post_init(all_params, optimizer_kwargs)
        self._built = True
        self._optimizer_of = dict(zip(all_params, self.optimizers, strict=True))
        handles, step_now = handles_of(self), WeakHook(self, "_step_now")
        for param in all_params:
            hooked: Any = param
            handles.append(hooked.register_post_accumulate_grad_hook(step_now))

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Does nothing but fire the step hooks: backward has stepped."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: backward has cleared the gradients."""

    def _parts(self) -> list[ModelPart]:
        return list(zip(self.model_parts, self._by_part, strict=True))

    def _step_now(self, param: nn.Parameter) -> None:
        self._optimizer_of[param].step()
        self._optimizer_of[param].zero_grad()
