"""ZeroRedundancyOptimizer with the interface of OptimizersContainer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.arguments import with_fp32_moments
from torchopt_ext.optim import FusedOptimizer
from torchopt_ext.state.collective import fail_together
from torchopt_ext.state.entries import CONTROL_KEY
from torchopt_ext.state.params import params_of
from torchopt_ext.statedict import dcp, flat
from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.state import buffers


class ZeroOptimizersContainer(OptimizersContainer[ZeroRedundancyOptimizer]):
    """A container of one model part whose optimizer state is sharded over all ranks.

    The state dict has the keys of :class:`OptimizersContainer`'s, with this rank's shards of
    tensors. Distributed checkpoints can therefore move between ZeRO and every other layout.
    DistributedDataParallel averages gradients. ``partition`` is as in ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[FusedOptimizer],
        optimizer_kwargs: dict[str, Any],
        *,
        partition: str,
        **kwargs: Any,
    ) -> None:
        if len(model_parts) != 1:
            raise ValueError(f"ZeRO divides one model part, found {len(model_parts)}")
        sharded = {"optimizer_class": optimizer_cls, "partition": partition}
        arguments = with_fp32_moments(optimizer_kwargs, model_parts)
        super().__init__(model_parts, ZeroRedundancyOptimizer, arguments | sharded, **kwargs)

    @property
    def _zero(self) -> ZeroRedundancyOptimizer:
        return self.optimizers[0]

    @property
    def _names(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        name_of = {param: name for name, param in self.model_parts[0].named_parameters()}
        return [name_of[param] for param in params_of(self)]

    def _fused(self) -> list[FusedOptimizer]:
        return [self._zero.optim]

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Sets the parameters to their averages in a ``with`` block. Call it on all ranks."""
        with self._zero.ema_weights():
            yield

    def load_ema(self, source: Mapping[str, Any]) -> None:
        raise NotImplementedError("ZeRO's averages are loaded with its state dict")

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Refreshes masters, by the model's names if `from_` has names. Call it on all ranks."""
        if from_ is not None:
            named = dict(self.model_parts[0].named_parameters())
            from_ = {named.get(key, key): weight for key, weight in from_.items()}
        self._zero.refresh_masters(from_)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of an OptimizersContainer, with this rank's shards of tensors."""
        self._zero.optim.init_state()
        names = dict(zip(params_of(self), self._names, strict=True))
        control = self._zero.optim._saved_control()
        state = flat.get_state_dict([self._zero], names)
        return state | {f"{CONTROL_KEY}.{name}": value for name, value in control.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads whole tensors or this rank's shards. Everything is checked before it is used.

        Raises KeyError or ValueError on all ranks, as :class:`OptimizersContainer`'s.
        """
        groups = self._zero.state_dict()["param_groups"]
        names, params = self._names, params_of(self)
        index_of = {f"state.{name}": index for index, name in enumerate(names)}
        state: dict[int, dict[str, Any]] = {}
        for key, value in state_dict.items():
            owner, _, name = key.rpartition(".")
            if owner in index_of:
                state.setdefault(index_of[owner], {})[name] = value
        with fail_together(self._zero.process_group):
            kept = {part.param for part in self._zero.local.parts}
            missing = [
                f"state.{name}.step"
                for index, (name, param) in enumerate(zip(names, params, strict=True))
                if param in kept and param.requires_grad and index not in state
            ]
            problems: list[str] = []
            options = []
            for group in groups:
                fqns = [names[index] for index in group["params"]]
                options.append(flat.read_options(group, fqns, state_dict, missing, problems))
            flat.raise_missing(missing, problems)
        for group, values in zip(groups, options, strict=True):
            for name, value in values.items():
                live = group.get(name)
                group[name] = torch.full_like(live, value) if isinstance(live, Tensor) else value
        if (control := flat.read_control(state_dict)) and state:
            state[min(state)][CONTROL_KEY] = control
        self._zero.load_state_dict({"state": state, "param_groups": groups})

    def _checkpoint_buffers(self, ids: list[str]) -> dcp.Buffers:
        """Returns the buffers of this rank's shards for :func:`torchopt_ext.statedict.dcp.load`."""
        index_of = {name: str(index) for index, name in enumerate(self._names)}
        indexed = buffers(self._zero.local, list(index_of.values()))

        def buffer(path: dcp.Path, like: Tensor) -> Tensor | None:
            kind, _, rest = ".".join(map(str, path)).partition(".")
            fqn, _, name = rest.rpartition(".")
            if kind != "state" or fqn not in index_of:
                return None
            return indexed(("state", index_of[fqn], name), like)

        return buffer
