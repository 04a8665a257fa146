"""ZeroRedundancyOptimizer with the interface of OptimizersContainer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.containers.optimizers import with_fp32_moments
from torchopt_ext.optim import FusedAdam
from torchopt_ext.statedict import dcp
from torchopt_ext.zero import ZeroRedundancyOptimizer
from torchopt_ext.zero.state import buffers


class ZeroOptimizersContainer(OptimizersContainer[ZeroRedundancyOptimizer]):
    """A container of one model part whose optimizer state is sharded over all ranks.

    The state dict has the keys of :class:`OptimizersContainer`'s, with this rank's shards of
    tensors. Distributed checkpoints can therefore move between ZeRO and every other layout.

    Args:
        model_parts: one module, the same on all ranks; DistributedDataParallel averages gradients.
        optimizer_cls: FusedAdam or FusedAdamW.
        optimizer_kwargs: arguments of `optimizer_cls`.
        partition: "greedy" or "balanced", as in ZeroRedundancyOptimizer.

    Raises:
        ValueError: There is more than one part, or ZeroRedundancyOptimizer raises it.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[FusedAdam],
        optimizer_kwargs: dict[str, Any],
        *,
        partition: str,
    ) -> None:
        if len(model_parts) != 1:
            raise ValueError(f"ZeRO divides one model part, found {len(model_parts)}")
        sharded = {"optimizer_class": optimizer_cls, "partition": partition}
        arguments = with_fp32_moments(optimizer_kwargs, model_parts)
        super().__init__(model_parts, ZeroRedundancyOptimizer, arguments | sharded)

    @property
    def _zero(self) -> ZeroRedundancyOptimizer:
        return self.optimizers[0]

    @property
    def _names(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        name_of = {param: name for name, param in self.model_parts[0].named_parameters()}
        params = (param for group in self.param_groups for param in group["params"])
        return [name_of[param] for param in params]

    def _fused(self) -> list[FusedAdam]:
        return [self._zero.optim]

    def refresh_masters(self, from_: Mapping[Any, Tensor] | None = None) -> None:
        """Refreshes masters, by the model's names if `from_` has names. Call it on all ranks."""
        if from_ is not None:
            named = dict(self.model_parts[0].named_parameters())
            from_ = {named.get(key, key): weight for key, weight in from_.items()}
        self._zero.refresh_masters(from_)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of an OptimizersContainer, with this rank's shards of tensors."""
        self._zero.optim.init_state()
        indexed = self._zero.state_dict()
        names = self._names
        flat: dict[str, Any] = {}
        for index, entry in indexed["state"].items():
            flat |= {f"state.{names[index]}.{name}": value for name, value in entry.items()}
        for group in indexed["param_groups"]:
            for index in group["params"]:
                settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                flat |= {f"param_groups.{names[index]}.{k}": v for k, v in settings.items()}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads whole tensors or this rank's shards. Everything is checked before it is used."""
        groups = self._zero.state_dict()["param_groups"]
        names = self._names
        index_of = {f"state.{name}": index for index, name in enumerate(names)}
        state: dict[int, dict[str, Any]] = {}
        for key, value in state_dict.items():
            owner, _, name = key.rpartition(".")
            if owner in index_of:
                state.setdefault(index_of[owner], {})[name] = value
        for group in groups:
            first = f"param_groups.{names[group['params'][0]]}."
            for key in [key for key in group if key != "params"]:
                group[key] = state_dict.get(first + key, group[key])
        self._zero.load_state_dict({"state": state, "param_groups": groups})

    def checkpoint_buffers(self, ids: list[str]) -> dcp.Buffers:
        """Returns the buffers of this rank's shards for :func:`torchopt_ext.statedict.dcp.load`."""
        index_of = {name: str(index) for index, name in enumerate(self._names)}
        indexed = buffers(self._zero, list(index_of.values()))

        def buffer(path: dcp.Path, like: Tensor) -> Tensor | None:
            kind, _, rest = ".".join(map(str, path)).partition(".")
            fqn, _, name = rest.rpartition(".")
            if kind != "state" or fqn not in index_of:
                return None
            return indexed(("state", index_of[fqn], name), like)

        return buffer
