"""FTOptimizersContainer: a container whose steps torchft's Manager decides on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchopt_ext import _C
from torchopt_ext.containers.optimizers import OptimizersContainer, T
from torchopt_ext.optim.hooks import hooked_step
from torchopt_ext.state.masters import refresh_stale_elements
from torchopt_ext.state.params import params_of
from torchopt_ext.statedict import flat

if TYPE_CHECKING:
    import torchft


class FaultTolerant(OptimizersContainer[T]):
    """Adds torchft to a container. Constructors must call :meth:`_init_fault_tolerance`.

    `zero_grad()` and `step()` go through `torchft.Optimizer`. `zero_grad()` starts a quorum.
    `step()` asks all replica groups whether to commit, lets a recovering group load its peer's
    state, and steps. Step hooks fire once per committed step, and not if the commit is refused.
    """

    committed = True
    """Whether the last step was made. False if the replica groups refused it."""
    _ft_optimizer: "torchft.Optimizer"
    _use_ft_optimizer: bool
    _call_from_ft = False
    """True during a call of torchft, which calls step() and zero_grad() in turn."""

    @staticmethod
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        """Does not wrap: torch's hooks would precede the decision. _committed_step fires them."""
        return step

    def _init_fault_tolerance(self, ft_manager: "torchft.Manager", use_ft_optimizer: bool) -> None:
        import torchft  # an optional package

        if self.compat == "torchtitan":
            flat.init_state_by_step(self._parts())
        self.init_cache_state_dict()
        self._ft_optimizer = torchft.Optimizer(ft_manager, self)
        self._use_ft_optimizer = use_ft_optimizer

    def init_cache_state_dict(self) -> None:
        """Completes the optimizers' state, with step 0, and finds the parameters' names.

        torchft asks for the state from another thread, while FSDP2 may have unsharded parameters in
        the model. Names could not be found at that time.
        """
        self._names = [*flat.complete(self._parts()).values()]

    def _parameter_names(self) -> flat.Names:
        """Returns the names that are known, without reading the model, in any thread."""
        params = params_of(*self.optimizers)
        if len(params) != len(self._names):
            raise ValueError(
                f"the optimizers have {len(params)} parameters, and {len(self._names)} names are "
                "known: call init_cache_state_dict() after adding parameters"
            )
        return dict(zip(params, self._names, strict=True))

    @property
    def cache_state_dict(self) -> dict[str, Any]:
        """The current state. torchtitan's containers return an older state from their cache."""
        return self.state_dict()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps if the replica groups commit, or always with ``use_ft_optimizer=False``.

        Raises:
            ValueError: a closure is given. Gradients must be averaged before the decision.
        """
        if not self._use_ft_optimizer:
            try:
                return self._committed_step(*args, **kwargs)
            finally:
                self._take_synchronized_weights()
        if self._call_from_ft:
            return self._committed_step(*args, **kwargs)
        if kwargs.get("closure", args[0] if args else None) is not None:
            raise ValueError(
                "a closure is not supported: replica groups average gradients, and decide "
                "whether to commit, before the step; compute loss and gradients first"
            )
        self.committed = False
        with self._calling_ft():
            self._ft_optimizer.step(*args, **kwargs)
        if self.deferred_clipping is not None:
            self.deferred_clipping._forget()  # a refused commit leaves no norm for the next step
        return None

    @hooked_step
    def _committed_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        self.committed = True
        return result

    @torch.no_grad()
    def _take_synchronized_weights(self) -> None:
        """Sets fp32 masters to the weights that LocalSGD or DiLoCo may have written in a hook.

        torchft writes them through ``param.data``, which no version counter shows.
        """
        for optimizer in self.optimizers:
            params = params_of(optimizer)
            for param in params:
                refresh_stale_elements(param, optimizer.state.get(param, {}))
            _C.increment_versions([param for param in params if param.dtype == torch.float32])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._call_from_ft or not self._use_ft_optimizer:
            super().zero_grad(*args, **kwargs)
            return
        with self._calling_ft():
            self._ft_optimizer.zero_grad(*args, **kwargs)

    @contextmanager
    def _calling_ft(self) -> Iterator[None]:
        self._call_from_ft = True
        try:
            yield
        finally:
            self._call_from_ft = False


class FTOptimizersContainer(FaultTolerant[T]):
    """OptimizersContainer for replica groups that may fail and come back, with torchft's Manager.

    Gradients must have been averaged over the groups when `step()` is called, by torchft's
    DistributedDataParallel, by FSDP2's all-reduce hook as torchtitan sets it, or by
    `Manager.allreduce`.

    The Manager needs the state: register `state_dict` and `load_state_dict` with
    `Manager.register_state_dict_fn`, as torchtitan's CheckpointManager does.

    Args:
        model_parts, optimizer_cls, optimizer_kwargs: as in OptimizersContainer.
        ft_manager: torchft.Manager.
        use_ft_optimizer: False for LocalSGD and DiLoCo, which start quorums and commit on their
            own. `step` and `zero_grad` then work as in OptimizersContainer. At the end of a step,
            fp32 masters and low-precision shards follow the weights that its hooks synchronized;
            for masters this takes several passes over both.
        **kwargs: as in OptimizersContainer. `compat="torchtitan"` creates the state in the
            constructor, by a step with lr 0 that counts, as torchtitan's container does. Bias
            corrections are then one step ahead.

    Raises:
        ModuleNotFoundError: torchft is not installed.
        ValueError: as in OptimizersContainer.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[T],
        optimizer_kwargs: dict[str, Any],
        ft_manager: "torchft.Manager",
        use_ft_optimizer: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_parts, optimizer_cls, optimizer_kwargs, **kwargs)
        self._init_fault_tolerance(ft_manager, use_ft_optimizer)
