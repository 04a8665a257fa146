"""Modules whose parameters are stepped on a second stream, and for which their forward waits."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._torch import is_dtensor, is_flat
from torchopt_ext.optim.weak_hooks import WeakHook, handles_of, remove_all
from torchopt_ext.state.devices import is_captured


class SideStream:
    """A stream of a GPU beside the current one. Tests put a simulation in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None], reads: Sequence[Tensor]) -> Any:
        """Runs ``work`` after what the current stream has to do; returns the event of its end.

        The memory of ``reads`` may be freed, but is not used anew before the event.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        for tensor in reads:
            tensor.record_stream(self._stream)
        return self._stream.record_event()

    def synchronize(self, event: Any) -> None:
        """Lets the host wait for an event."""
        event.synchronize()

    def wait(self, event: Any) -> None:
        """Lets the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class ForwardOverlap:
    """The modules of an optimizer's ``overlap_forward``, and the steps that they wait for.

    Keeps no module alive. A parameter of several modules is stepped with the first.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._sides: dict[torch.device, SideStream] = {}
        self._ends: list[tuple[int, SideStream, Any]] = []  # module, stream and event of its end
        self._handles = handles_of(self)

    def set_modules(self, modules: Sequence[torch.nn.Module]) -> None:
        """Replaces the modules."""
        remove_all(self._handles)
        self._modules = [weakref.ref(module) for module in modules]
        for module in modules:
            hook = WeakHook(self, "wait_before_forward")
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            children: list[Any] = [*module.modules()]
            for child in children:
                wait = WeakHook(self, "wait")
                self._handles.append(child.register_state_dict_pre_hook(wait))
                self._handles.append(child.register_load_state_dict_pre_hook(wait))

    def numbers(self) -> Mapping[int, int]:
        """Returns the number of the module with which a parameter is stepped, by its id."""
        numbers: dict[int, int] = {}
        for number, ref in enumerate(self._modules):
            if (module := ref()) is not None:
                for param in module.parameters():
                    if not is_gathered_for_forward(param):
                        numbers.setdefault(id(param), number)
        return numbers

    def begin(
        self,
        number: int,
        device: torch.device,
        work: Callable[[], None],
        reads: Sequence[Tensor],
    ) -> None:
        """Begins a module's step, ``work``, which reads gradients, on a device's side stream."""
        if self._modules[number]() is None or not reads:  # other modules may have its parameters
            work()
            return
        if device not in self._sides:
            self._sides[device] = SideStream(device)
        side = self._sides[device]
        self._ends.append((number, side, side.run(work, reads)))

    def wait(self, *_: Any) -> None:
        """Lets the current streams wait for all modules' steps."""
        last = {side: event for _, side, event in self._ends}  # a stream is done in order
        self._wait_for(last.items())

    def wait_before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        """Lets the current streams wait for the step of a module's parameters.

        Modules before it are waited for too, as streams are done in order.
        """
        if not self._ends:
            return
        number = next(n for n, ref in enumerate(self._modules) if ref() is module)
        self._wait_for({s: event for n, s, event in self._ends if n <= number}.items())

    def _wait_for(self, ends: Any) -> None:
        if ends and is_captured():
            raise RuntimeError(
                "a graph is captured while a step of overlap_forward() is under way: call "
                "optimizer.wait_for_params() before the capture"
            )
        for side, event in ends:
            side.wait(event)

    def forget(self) -> None:
        """Drops the events, for which no stream waits any more."""
        self._ends = []


def is_gathered_for_forward(param: Any) -> bool:
    """Returns whether FSDP may gather a parameter on a stream of its own, before a forward."""
    return is_dtensor(param) or is_flat(param)


def check_modules(modules: Sequence[Any], params: Sequence[Tensor]) -> None:
    """Raises TypeError or ValueError unless forward of all modules can wait for the parameters."""
    owned = {id(param) for param in params}
    for number, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module {number} is {module!r:.200}, expected a torch.nn.Module")
        what = f"module {number} (a {type(module).__name__})"
        earlier = next(n for n, other in enumerate(modules) if other is module)
        if earlier < number:
            raise ValueError(f"{what} is module {earlier}, too: give each module once")
        if getattr(module.forward, "__func__", None) is torch.nn.Module.forward:
            raise ValueError(f"{what} has no forward that could wait: give the modules in it")
        its = [*module.parameters()]
        if owned.isdisjoint(map(id, its)):
            raise ValueError(f"{what} has no parameter of this optimizer, which has {len(owned)}")
        if any(map(is_gathered_for_forward, its)):
            raise ValueError(
                f"{what} has sharded parameters, which FSDP gathers before the module's forward "
                f"begins: overlap_forward supports plain parameters"
            )
