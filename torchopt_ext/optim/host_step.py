"""Steps on the host: gradients come over the link, the CPU back end steps, weights return."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_ext import _C
from torchopt_ext._C import OptimizerPlan
from torchopt_ext.ops import CONTROL_FIELDS
from torchopt_ext.optim.gradients import local_gradients
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.quantized import SCALES
from torchopt_ext.state.storage import EMA, MASTER

_SKIP = CONTROL_FIELDS.index("skip")


def _no_exchange(*_: Any) -> int:
    raise AssertionError("no matrix is stepped on the host")


class HostStep:
    """The parameters of one part of a plan, whose states lie on the host.

    Weights, gradients, step counts, scales of 8-bit moments and the decision have buffers there.
    The states are kept alive with the plan.

    Args:
        rows: rows of OptimizerPlan by their numbers there, with the names of their entries between
            parameter and step.
        param_groups, algorithms, options: as OptimizerPlan takes them.
        device: the parameters' device.
    """

    def __init__(
        self,
        rows: Mapping[int, tuple[Sequence[Any], Sequence[str | None]]],
        param_groups: Sequence[Mapping[str, Any]],
        algorithms: Sequence[Any],
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self._device = device
        # dense, as the states are
        like = [torch.empty_like(row[1][0], device="meta") for row, _ in rows.values()]
        self._weights = self._buffers(like)
        self._gradients = self._buffers(like)
        (self._steps,) = self._buffers([torch.empty(len(rows), device="meta")])
        block = torch.empty(len(CONTROL_FIELDS), dtype=torch.float64, device="meta")
        (self._control,) = self._buffers([block])
        self._places = {number: k for k, number in enumerate(rows)}
        self._positions = [row[4] for row, _ in rows.values()]  # in the optimizer
        self._groups: list[dict[str, Any]] = [{"params": []} for _ in param_groups]
        self._state: dict[Tensor, dict[str, Tensor]] = {}
        own_rows = []
        for k, (row, names) in enumerate(rows.values()):
            _, tensors, group, name, position, _, *more = row
            weight, step = self._weights[k], self._steps[k]
            held = {n: t for n, t in zip(names, tensors[1:-1], strict=True) if n is not None}
            held |= {n: self._buffers([held[n]])[0] for n in held.keys() & SCALES.keys()}
            own = [weight, *(None if n is None else held[n] for n in names), step]
            self._groups[group]["params"].append(weight)
            self._state[weight] = {**held, "step": step}
            own_rows.append((own, own, group, name, position, 0, *more))
        self._take_hyperparameters(param_groups)
        self._plan = OptimizerPlan(
            self._groups, self._state, own_rows, algorithms, [torch.device("cpu")], [],
            local_gradients, _no_exchange, **options,
        )  # fmt: skip
        self._sent: list[tuple[Tensor, Tensor]] = []  # memory of the device, and its buffer

    def _buffers(self, like: Sequence[Tensor]) -> list[Tensor]:
        return _C.carve(list(like), stepped_on=self._device)

    def _take_hyperparameters(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        for own, group in zip(self._groups, param_groups, strict=True):
            own.update((key, value) for key, value in group.items() if key != "params")
            if isinstance(lr := group["lr"], Tensor):
                own["lr"] = lr.cpu()

    def fetch(
        self,
        states: Sequence[tuple[Tensor, Mapping[str, Any]]],
        numbers: Sequence[int],
        gradients: Sequence[Tensor],
        control: Tensor,
    ) -> None:
        """Begins to copy what a step needs to the host.

        Args:
            states: the optimizer's parameters with their states, in their order.
            numbers: of the rows whose parameters have a gradient.
            control: the device's control block, which has the decision.
        """
        self._sent = []
        copies = [(self._control, control)]
        for weight in self._weights:
            weight.grad = None
        for number, gradient in zip(numbers, gradients, strict=True):
            k = self._places[number]
            weight, (param, state) = self._weights[k], states[self._positions[k]]
            if self._gradients[k].dtype != gradient.dtype:
                (self._gradients[k],) = self._buffers(
                    [torch.empty_like(weight, dtype=gradient.dtype, device="meta")]
                )
            weight.grad_dtype = gradient.dtype
            weight.grad = self._gradients[k]
            copies.append((weight.grad, gradient))
            self._sent.append((local_tensor(param), weight))
            if MASTER not in state:
                copies.append((weight, local_tensor(param)))
            own = self._state[weight]
            scales = [(state[name], own[name]) for name in SCALES if name in own]
            copies += [(buffer, local_tensor(scale)) for scale, buffer in scales]
            self._sent += [(local_tensor(scale), buffer) for scale, buffer in scales]
            copies.append((own["step"], state["step"]))
            self._sent.append((state["step"], own["step"]))
        for number in self._places.keys() - set(numbers):  # only their averages change
            k = self._places[number]
            weight, (param, state) = self._weights[k], states[self._positions[k]]
            if EMA in (own := self._state[weight]):
                copies.append((own["step"], state["step"]))
                if MASTER not in state:
                    copies.append((weight, local_tensor(param)))
        for buffer, source in copies:
            buffer.copy_(source, non_blocking=True)

    def step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Steps what has been fetched, if the decision is not to skip."""
        if self._control[_SKIP] != 0.0:
            self._sent = []
            return
        self._take_hyperparameters(param_groups)
        if not self._plan.collect(self._groups, self._state):
            raise RuntimeError("the states on the host were replaced while a step was under way")
        self._plan.update([self._control])

    def send(self) -> None:
        """Begins to copy weights, scales and step counts back."""
        for target, buffer in self._sent:
            target.copy_(buffer, non_blocking=True)
