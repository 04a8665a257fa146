"""Steps that end during the next forward: pass B of a module's parameters on a second stream."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import drop_compiled_code, run_eagerly
from torchopt_ext.optim.context import IDLE
from torchopt_ext.optim.forward_overlap import ForwardOverlap, check_modules
from torchopt_ext.optim.host_steps import HostSteps
from torchopt_ext.optim.param_states import Apart
from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.devices import is_captured
from torchopt_ext.state.host_memory import ACCELERATORS
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import params_of


class OverlappedStep(HostSteps):
    """A step whose pass B may overlap with the next forward.

    A plan has a part of its own for each module, so norm and decision are made before, for all.
    """

    _overlap: ForwardOverlap | None = None  # copies have none

    @run_eagerly
    def overlap_forward(self, *modules: torch.nn.Module) -> None:
        """Lets steps on a GPU update the parameters of modules during the next forward.

        The norm and the decisions to clip and to skip are made before, so weights and states have
        the same bits. After them a step updates the parameters of no module and the matrices of
        Muon, and then begins to update the modules' on a second stream, in the given order. The
        forward of a module waits for its parameters. The state dicts of modules, this optimizer's
        methods and the next step wait for all. Call :meth:`wait_for_params` before anything else
        reads or replaces weights or states, or writes to gradients.

        With ``state_fraction`` the states of the first modules stay on the GPU. Without a GPU steps
        are as before. A second call replaces the modules; none end the overlap.

        Args:
            modules: modules, such as layers, in the order of their forward, whose parameters only
                their own forward reads.

        Raises:
            TypeError: an argument is no module.
            ValueError: a module is given twice, has no forward, no parameter of this optimizer, or
                sharded parameters; or steps write gradients (``write_back_gradients``).
            RuntimeError: a step of this optimizer is under way, or a graph is captured.
        """
        if self._context is not IDLE or is_captured():  # type: ignore[attr-defined]
            raise RuntimeError(
                "a step of this optimizer is under way, or a graph is captured: call "
                "overlap_forward() before"
            )
        if modules and self._options.write_back_gradients:
            raise ValueError(
                "write_back_gradients=True: gradients would change during the next forward"
            )
        check_modules(modules, params_of(self))
        self._wait_for_states()
        self._forget_plan()
        if self._overlap is None:
            self._overlap = ForwardOverlap()
            # Memory of a dropped optimizer must not be used anew before.
            weakref.finalize(self, self._overlap.wait).atexit = False
        self._overlap.forget()
        self._overlap.set_modules(modules)
        drop_compiled_code()  # its guards do not see new hooks
        if self._storage.state_device is not None:
            self.move_state(self._storage.state_device)

    def wait_for_params(self) -> None:
        """Lets the current stream wait until all parameters are updated (`overlap_forward`)."""
        if self._overlap is not None:
            self._overlap.wait()
            self._overlap.forget()

    @property
    def overlaps(self) -> bool:
        """Whether steps on a GPU end during the next forward."""
        return bool(self._module_numbers())

    def _module_numbers(self) -> Mapping[int, int]:
        numbers = {} if self._overlap is None else self._overlap.numbers()
        if not numbers:
            return {}
        # The memory for directions of matrices exists once.
        return {
            id(param): numbers[id(param)]
            for group in self.param_groups
            if not algorithm_of(group).steps_matrices
            for param in group["params"]
            if id(param) in numbers and local_tensor(param).device.type in ACCELERATORS
        }

    def _parts_apart(self) -> Mapping[int, Apart]:
        modules = {param: Apart(False, n) for param, n in self._module_numbers().items()}
        return {**modules, **super()._parts_apart()}

    def collect(self) -> Any:
        built = super().collect()
        if any(not apart.on_host for apart in built.apart) and is_captured():
            built.plan.release()
            raise RuntimeError(
                "a graph cannot capture a step that ends during the next forward: call "
                "overlap_forward() without modules before the capture"
            )
        return built

    def update(self) -> None:
        built = self._built
        if built is None or not built.apart:
            super().update()
            return
        collected = built.plan.collected()
        begun = self._begin_on_host(collected)
        if self._overlap is not None:
            self._overlap.forget()
        # A scheduler might write to it before the modules' steps have read it.
        at_once = any(_is_on_device(group["lr"]) for group in self.param_groups)
        first = len(built.parts) - len(built.apart)
        for part, (device, _) in enumerate(built.parts):
            step = partial(built.plan.update_part, part, self._block(device)[0])
            if part < first or (at_once and part not in built.host_steps):
                step()
            elif part not in built.host_steps:
                assert self._overlap is not None
                self._overlap.begin(
                    built.apart[part - first].number, device, step, collected[part][-1]
                )
        self._end_on_host(begun)

    def _wait_for_modules(self) -> None:
        if self._overlap is not None:
            self._overlap.wait()

    def _wait_for_states(self) -> None:
        self._wait_for_modules()
        super()._wait_for_states()

    def _init_states(self, chooses: Callable[[Tensor], bool]) -> None:
        self._wait_for_modules()
        super()._init_states(chooses)

    @run_eagerly
    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._wait_for_modules()
        super().zero_grad(set_to_none)


def _is_on_device(lr: Any) -> bool:
    return isinstance(lr, Tensor) and lr.device.type in ACCELERATORS
