"""Logs what steps decided, to TensorBoard or to a function that takes a dict, without waiting."""

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchopt_ext import ops
from torchopt_ext._arguments import expect_counts, inner_optimizer
from torchopt_ext.optim.digest import digest
from torchopt_ext.optim.norm import squares_of
from torchopt_ext.optim.planned import PlannedStep
from torchopt_ext.state.devices import is_captured, moved, sent_to_host
from torchopt_ext.state.local import local_tensor

__all__ = ["ScalarWriter", "StepLog", "log_to"]

_EXACT = 2**53 - 1  # the integers that a float64 holds; a flipped bit changes one of these bits


class ScalarWriter(Protocol):
    """torch.utils.tensorboard.SummaryWriter, or any object with its ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


class StepLog:
    """Writes the values that :func:`log_to` describes, until :meth:`remove`."""

    def __init__(
        self,
        writer: ScalarWriter | Callable[[dict[str, float]], Any],
        optimizer: Optimizer,
        every: int,
        first_step: int,
        prefix: str,
        digest_every: int | None,
    ) -> None:
        self._writer, self._every, self._prefix = writer, every, prefix
        self._first_step, self._digest_every = first_step, digest_every
        self._optimizer = weakref.ref(optimizer)
        self._step, self._since = first_step, 0
        # Since the last values: clipped steps, and steps that a graph has replayed.
        self._counts = torch.zeros(2, dtype=torch.int64, device=optimizer.control.steps.device)  # type: ignore[attr-defined]
        self._is_captured = False
        self._under_way: tuple[int, list[str], Tensor, Any] | None = None
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def flush(self) -> None:
        """Writes the values that are still on their way from a GPU; waits for them.

        Replays of a CUDA graph run no hooks: afterwards this writes the values of the last replay.
        """
        self._write_sent()
        if self._is_captured and (optimizer := self._optimizer()) is not None:
            self._send(optimizer)
            self._write_sent()

    def remove(self) -> None:
        """Writes what :meth:`flush` does, and stops the log."""
        self.flush()
        self._handle.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        control = optimizer.control
        clipped = (control.clip_factor < 1.0) & (control.skip == 0.0)
        self._counts = moved(self._counts, clipped.device)
        self._counts[0].add_(clipped)
        if is_captured():
            self._counts[1].add_(1)
            self._is_captured = True
            return
        self._step, self._since = self._step + 1, self._since + 1
        if self._since >= self._every:
            self._write_sent()  # was copied an interval ago, so there is nothing to wait for
            self._send(optimizer)

    @torch.no_grad()
    def _send(self, optimizer: Any) -> None:
        if self._is_captured:
            replayed = int(self._counts[1])
            self._step, self._since = self._step + replayed, self._since + replayed
        if self._since == 0:
            return
        values = _values(optimizer) | {"clipped_share": self._counts[0] / self._since}
        done = self._step - self._first_step
        if self._digest_every is not None and done % self._digest_every < self._since:
            values["digest"] = digest(optimizer).sum() & _EXACT
        self._counts.zero_()
        self._since = 0
        names = list(values)
        device = optimizer.control.steps.device
        joined = torch.stack(
            [moved(v.detach(), device).double().reshape(()) for v in values.values()]
        )
        if not joined.is_cuda:
            self._write(self._step, names, joined)
            return
        if (sent := sent_to_host(joined)) is not None:
            self._under_way = self._step, names, *sent

    def _write_sent(self) -> None:
        if self._under_way is not None:
            step, names, values, copied = self._under_way
            self._under_way = None
            copied.synchronize()
            self._write(step, names, values)

    def _write(self, step: int, names: list[str], values: Tensor) -> None:
        pairs = zip(names, values.tolist(), strict=True)
        scalars = {self._prefix + name: value for name, value in pairs if not math.isnan(value)}
        if callable(self._writer):
            self._writer({f"{self._prefix}step": step} | scalars)
            return
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


def log_to(
    writer: ScalarWriter | Callable[[dict[str, float]], Any],
    optimizer: Optimizer,
    *,
    every: int = 10,
    first_step: int = 0,
    prefix: str = "optimizer/",
    digest_every: int | None = None,
) -> StepLog:
    """Logs what every n-th step decided to TensorBoard or to a function such as ``wandb.log``.

    - ``grad_norm``: the norm before clipping, unscaled; left out if no step measured it.
    - ``clip_factor``: the factor by which clipping multiplied this step's gradients.
    - ``clipped_share``: the share of clipped steps among the steps since the last values.
    - ``skipped_steps``: the number of skipped steps so far.
    - ``loss_scale``: the scale of this step's gradients.
    - ``lr``: the learning rate, with the factor of a schedule on the device. Several groups are
      ``lr/<name>``, or ``lr/<number>`` if names are missing or equal.
    - ``update_to_weight``: 2-norm of the update divided by the 2-norm of the weights, over this
      rank's shards, from a fused optimizer with ``track="norms"``; left out if this step
      was skipped. Steps that log it read the weights once more.
    - ``digest``: the sum of :func:`torchopt_ext.digest` over this rank's parameters, modulo 2**53,
      every ``digest_every`` steps. Replicas that log other numbers have other bits.
      TensorBoard keeps its upper 24 bits.

    No step waits for a GPU: values are copied to pinned memory and written an interval later, the
    last values by ``flush()``. Values that are NaN are left out. Call ``flush()`` also after
    replays of a captured CUDA graph, which run no hooks.

    Args:
        writer: an object with ``add_scalar(tag, value, step)``, or a function of a dict, in which
            ``step`` is an entry. Use it on one rank only; nothing is communicated.
        optimizer: a fused optimizer, FSDPadaptOptimizer, a ZeroRedundancyOptimizer or container
            with such optimizers, or a wrapper of Accelerate or Lightning around any of them.
        every: number of steps between values, skipped steps included.
        first_step: steps that were made before, for example by the run that this run continues.
        prefix: prefix of all names.
        digest_every: number of steps between digests, a multiple of ``every``; None for no digests.

    Returns:
        A log with ``flush()`` and ``remove()``.

    Raises:
        TypeError: the optimizer has no ``control``, the writer is neither an object with
            ``add_scalar`` nor a function, a count is not an integer, or the prefix not a string.
        ValueError: ``every`` is not positive, or does not divide ``digest_every``.
    """
    optimizer = inner_optimizer(optimizer)
    if not hasattr(optimizer, "control"):
        raise TypeError(f"no control to log in an optimizer of type {type(optimizer).__name__}")
    if not (callable(writer) or hasattr(writer, "add_scalar")):
        raise TypeError(
            f"a writer of type {type(writer).__name__} neither has add_scalar nor can be called "
            "with a dict"
        )
    expect_counts(every=every, first_step=first_step)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r:.200}, expected a string")
    if every < 1:
        raise ValueError(f"Invalid every: {every}, expected 1 or more steps")
    if digest_every is not None:
        expect_counts(digest_every=digest_every)
        if digest_every < 1 or digest_every % every:
            raise ValueError(
                f"Invalid digest_every: {digest_every}, expected a multiple of every={every}"
            )
    return StepLog(writer, optimizer, every, first_step, prefix, digest_every)


def _values(optimizer: Any) -> dict[str, Tensor]:
    control = optimizer.control
    values: dict[str, Tensor] = {
        "grad_norm": control.grad_norm,
        "clip_factor": control.clip_factor,
        "skipped_steps": control.skipped_steps,
        "loss_scale": control.grad_scale,
    }
    groups, factor = optimizer.param_groups, control.lr_factor
    labels = [str(group.get("name", "")) for group in groups]
    if "" in labels or len(set(labels)) < len(labels):
        labels = [str(i) for i in range(len(groups))]
    for label, group in zip(labels, groups, strict=True):
        name = "lr" if len(groups) == 1 else f"lr/{label}"
        lr = group["lr"]
        values[name] = factor * (moved(lr, factor.device) if isinstance(lr, Tensor) else float(lr))
    if isinstance(optimizer, PlannedStep) and "norms" in optimizer._options.track:
        values["update_to_weight"] = _update_to_weight(optimizer)
    return values


def _update_to_weight(optimizer: PlannedStep) -> Tensor:
    updates = optimizer.telemetry.update_norms
    params = filter(torch.is_tensor, optimizer.state)  # state may have other keys, too
    total = ops.accumulator_total(squares_of(map(local_tensor, params), updates.device))
    was_made = (optimizer.control.skip == 0.0).to(updates.device)
    return torch.where(was_made, updates.square().sum().sqrt() / total.sqrt(), math.nan)
