"""OptimizersInBackwardContainer: each parameter is stepped as soon as its gradient is complete."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchopt_ext.containers.optimizers import OptimizersContainer, T, trainable_parameters
from torchopt_ext.statedict.flat import ModelPart


class OptimizersInBackwardContainer(OptimizersContainer[T]):
    """One optimizer per trainable parameter, stepped inside backward.

    The parameters' hooks keep the optimizers alive, and Python's garbage collector does not see
    through hooks: model and state are freed when the process ends.

    A gradient lives only from its accumulation to the step that follows at once, so that all
    gradients never exist together. `step()` and `zero_grad()` do nothing, but step hooks fire in
    `step()`: after backward, when the parameters have already been updated. Every backward is a
    step, so gradients cannot be accumulated over several.

    Afterwards no gradient is left to measure: `torch.nn.utils.clip_grad_norm_` returns 0 and clips
    nothing, and `max_grad_norm` and `skip_nonfinite` are refused.

    Args: as OptimizersContainer.

    Raises:
        ValueError: as OptimizersContainer; also if clipping or skipping is asked for, or if no
            parameter is trainable.
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
        for param, optimizer in zip(all_params, self.optimizers, strict=True):
            hook = functools.partial(_step_now, optimizer)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Does nothing but fire the step hooks: backward has stepped."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: backward has cleared the gradients."""

    def _parts(self) -> list[ModelPart]:
        return list(zip(self.model_parts, self._by_part, strict=True))


def _step_now(optimizer: Optimizer, param: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()
