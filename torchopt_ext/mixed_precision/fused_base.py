"""FusedAdam and FusedAdamW under FSDPadaptOptimizer: masters in their state, two passes a step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from torchopt_ext.optim import FusedAdam
from torchopt_ext.optim.context import StepContext
from torchopt_ext.optim.control import Controlled
from torchopt_ext.optim.hooks import inner_step
from torchopt_ext.statedict.entries import MASTERS
from torchopt_ext.statedict.masters import weight_of


class FusedBase:
    """Lets a fused optimizer unscale, check, clip, step and keep masters by itself.

    Args:
        optim: told to keep fp32 masters unless it was built to keep weights otherwise.
        process_group: ranks that agree on norm and overflow; None for the optimizer's own.
    """

    def __init__(self, optim: FusedAdam, process_group: Any) -> None:
        self.optim = optim
        if process_group is not None:
            optim.process_group = process_group
        optim.skip_nonfinite = True
        optim.keep_masters()

    @property
    def controlled(self) -> Controlled:
        """Whose control block has the last step's decision."""
        return self.optim

    @property
    def process_group(self) -> Any:
        return self.optim.process_group

    @property
    def params(self) -> list[list[Tensor]]:
        """The model's parameters, by group."""
        return [group["params"] for group in self.optim.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, scale: Tensor) -> float | None:
        """One step with gradients that are ``scale``, one float32 element, times too large.

        Returns:
            Nonzero if the step was skipped; None if only the device knows.
        """
        inner_step(self.optim, StepContext(grad_scale=scale, check_overflow=True))
        return self.optim.known("skip")

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None) -> None:
        self.optim.refresh_masters(from_)

    # ---- state --------------------------------------------------------------------------------

    def weights(self) -> list[list[Tensor]]:
        """What parameters are rounded from, by group."""
        state = self.optim.state
        return [[weight_of(p, state.get(p, {})) for p in own] for own in self.params]

    def base_state(self) -> dict[str, Any]:
        """The optimizer's state dict without masters, which :meth:`weights` has."""
        packed = self.optim.state_dict()
        state = {
            index: {name: v for name, v in entry.items() if name not in MASTERS}
            for index, entry in packed["state"].items()
        }
        packed["state"] = {index: entry for index, entry in state.items() if entry}
        return packed

    def load(self, states: dict[str, Any], weights: list[list[Tensor]]) -> None:
        """Takes state and weights that were checked."""
        self.optim.load_state_dict(states)
        self.optim.set_weights(zip(chain(*self.params), chain(*weights), strict=True))
