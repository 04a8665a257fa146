"""A moving average of the weights (EMA), which each step updates."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext.optim.context import IDLE
from torchopt_ext.optim.norm import is_flattened
from torchopt_ext.optim.options import check_decay
from torchopt_ext.optim.overlapped import OverlappedStep
from torchopt_ext.optim.shards import reshard
from torchopt_ext.state.averages import exchanged
from torchopt_ext.state.entries import as_held, unwrapped
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import named_params, params_of
from torchopt_ext.state.storage import EMA, is_steppable

_DIFFUSERS = "shadow_params"  # EMAModel.state_dict() in diffusers/training_utils.py
_AVERAGED = "n_averaged"  # torch.optim.swa_utils.AveragedModel.state_dict()


class AveragedWeights(OverlappedStep):
    """A step that also updates an average of each weight, if ``ema_decay`` is set."""

    _exchanged = False  # within ema_weights()

    @property
    def ema_decay(self) -> float | None:
        """The decay of the averages; None: there are none.

        A program may set it between steps, as a schedule does. None drops the averages at the next
        step. A number where there were none begins them as copies of the weights.
        """
        return self._settings.get("ema_decay") if self._storage.ema_dtype is not None else None

    @ema_decay.setter
    def ema_decay(self, value: float | None) -> None:
        check_decay(value)
        if self.ema_decay == value:
            return
        kept = None if value is None else self._storage.ema_dtype or self._options.average_dtype
        if kept != self._storage.ema_dtype:
            self._storage = replace(self._storage, ema_dtype=kept)
            self._forget_plan()
        if value is not None:
            warmup = float(self._options.ema_warmup)
            self._set_control(ema_decay=float(value), ema_warmup=warmup)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Sets the parameters to their averages inside a ``with`` block, and back at its end.

        Parameters that have no average yet keep their weights. Weights and averages of one dtype
        change places, without a copy. Other weights are copied. Inside the block the optimizer
        takes no step and gives no state dict.

        Raises:
            RuntimeError: ``ema_decay`` is None, or a block of this optimizer is under way.
            ValueError: FSDP1 shards the parameters.
        """
        self._expect_averages()
        if any(map(is_flattened, params_of(self))):
            raise ValueError(
                "parameters are flattened by FullyShardedDataParallel, whose forward may use those "
                "that it gathered before: shard the model with fully_shard"
            )
        if self._context is not IDLE:  # type: ignore[attr-defined]
            raise RuntimeError("a step of this optimizer is under way")
        self._wait_for_states()
        self._follow_weights()
        params = params_of(self)
        states = {p: self.state[p] for p in params if p in self.state}
        reshard(params)
        with exchanged(states):
            self._exchanged = True
            try:
                yield
            finally:
                self._exchanged = False
                reshard(params)
        self._mark_weights(states)

    def _follow_weights(self) -> None:
        """Lets masters follow weights that user code has written to: they are about to move."""
        self._take_written_weights()
        self._forget_plan()

    def _expect_averages(self) -> None:
        if self.ema_decay is None:
            raise RuntimeError("there are no averages of the weights without ema_decay=")
        self._reject_exchanged()

    def _reject_exchanged(self) -> None:
        if self._exchanged:
            raise RuntimeError(
                "the parameters are their averages now: leave the block of ema_weights() first"
            )

    def _wait_for_states(self) -> None:
        self._reject_exchanged()  # averages are among the weights: copy, read and move neither
        super()._wait_for_states()

    def _init_states(self, chooses: Any) -> None:
        self._reject_exchanged()
        super()._init_states(chooses)

    def _expect_steppable(self) -> None:
        self._reject_exchanged()
        super()._expect_steppable()

    def load_ema(self, source: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Continues with the averages of another implementation.

        Args:
            source: the state dict of torch's AveragedModel, of diffusers' EMAModel, or averages by
                the parameter's name (timm's ModelEma, a checkpoint of ``ema_weights()``). Names of
                other tensors, such as buffers, are left out.
            model: the module of the parameters, if the optimizer was given no names.

        Raises:
            ValueError: an average is missing or does not fit (all are listed). Nothing has changed.
            RuntimeError: ``ema_decay`` is None.
        """
        self._expect_averages()
        found = averages_in(source, self._names(model), list(params_of(self)))
        self._take_averages(fitting(found))

    @torch.no_grad()
    def _take_averages(self, averages: Mapping[Tensor, Tensor]) -> None:
        self._expect_averages()
        self._wait_for_states()
        self._init_states(lambda param: param.requires_grad)
        for param in params_of(self):
            if EMA in (state := self.state.get(param, {})) and param in averages:
                average = as_held(EMA, averages[param], param)
                local_tensor(state[EMA]).copy_(local_tensor(average))

    def _names(self, model: nn.Module | None) -> dict[Tensor, str]:
        pairs = named_params(self) if model is None else model.named_parameters()
        return {param: name for name, param in pairs if isinstance(name, str)}


def averages_in(
    source: Mapping[str, Any], names: Mapping[Tensor, str], params: list[Tensor]
) -> dict[Tensor, tuple[str, Any]]:
    """Returns name and average of each parameter; an average is None if there is none.

    Raises:
        TypeError: ``source`` is no mapping.
        ValueError: the averages have no names, and their number is another.
    """
    if not isinstance(source, Mapping):
        kind = type(source).__name__
        raise TypeError(f"the averages are of type {kind}, expected a state dict")
    if isinstance(listed := source.get(_DIFFUSERS), list | tuple):
        trained = [param for param in params if param.requires_grad]
        order = params if len(listed) == len(params) else trained
        if len(listed) != len(order):
            raise ValueError(
                f"there are {len(listed)} averages in {_DIFFUSERS!r}, expected {len(params)}, one "
                "for each parameter, in the order of the groups"
            )
        found = dict(zip(order, listed, strict=True))
        return {param: (names.get(param, ""), found.get(param)) for param in params}
    prefix = "module." if _AVERAGED in source else ""
    source = {unwrapped(name): value for name, value in source.items() if isinstance(name, str)}
    if not any(names.get(param) for param in params):
        raise ValueError(
            "the averages have names and this optimizer's parameters have none: give load_ema() "
            "the model, or build the optimizer from model.named_parameters()"
        )
    named = {param: names.get(param, "") for param in params}
    return {param: (name, source.get(prefix + unwrapped(name))) for param, name in named.items()}


def fitting(found: Mapping[Tensor, tuple[str, Any]]) -> dict[Tensor, Tensor]:
    """Returns the averages: of all trained parameters, and of frozen ones that have one.

    Raises:
        ValueError: averages are missing or do not fit; lists them.
    """
    problems = []
    for number, (param, (name, value)) in enumerate(found.items()):
        if not (param.requires_grad and is_steppable(param)):
            continue
        what = name or f"parameter {number}"
        if not isinstance(value, Tensor):
            problems.append(f"{what} is missing")
        elif value.shape != param.shape:
            expected = tuple(param.shape)
            problems.append(f"{what} has shape {tuple(value.shape)}, expected {expected}")
        elif not _fits(value, param):
            problems.append(f"{what} is {value.dtype} on {value.device}")
    if problems:
        raise ValueError("these averages do not fit: " + "; ".join(problems))
    return {param: value for param, (_, value) in found.items() if _fits(value, param)}


def _fits(value: Any, param: Tensor) -> bool:
    """Returns whether a value can be a parameter's average."""
    if not isinstance(value, Tensor) or value.is_meta or value.shape != param.shape:
        return False
    return value.is_complex() == param.is_complex()
