"""Which of an optimizer's parameters the CPU back end steps, and the order of their copies."""

import functools
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from torchopt_ext.optim.bandwidths import bandwidths
from torchopt_ext.optim.context import IDLE
from torchopt_ext.optim.forward_overlap import SideStream
from torchopt_ext.optim.options import OffloadStep
from torchopt_ext.optim.param_states import Apart
from torchopt_ext.optim.placed_states import PlacedStates
from torchopt_ext.state.algorithms import algorithm_of
from torchopt_ext.state.devices import is_captured
from torchopt_ext.state.host_memory import Need
from torchopt_ext.state.local import local_tensor
from torchopt_ext.state.params import params_of
from torchopt_ext.state.storage import MASTER

logger = logging.getLogger(__name__)

_BUCKET = 64 << 20  # bytes of weights: one bucket is copied while another is stepped


def _bytes_of(needs: Iterable[Need]) -> int:
    return sum(local_tensor(need.param).numel() * need.dtype.itemsize for need in needs)


class HostSteps(PlacedStates):
    """A step that the CPU back end may make for parameters whose states lie on the host."""

    _chosen: str | None = None  # by "auto"
    _copies: Mapping[torch.device, tuple[SideStream, SideStream]] = {}  # down and up

    def _reserve_host_memory(self) -> None:
        super()._reserve_host_memory()
        self._chosen = None  # a new group or masters may favor the other path

    @property
    def offload_step(self) -> OffloadStep:
        """The option of this name; it may be set between any two steps, with the same bits."""
        return self._options.offload_step

    @offload_step.setter
    def offload_step(self, value: OffloadStep) -> None:
        if self._context is not IDLE:  # type: ignore[attr-defined]
            raise RuntimeError("a step of this optimizer is under way: set offload_step afterwards")
        self._options = replace(self._options, offload_step=value)
        self._wait_for_states()
        self._forget_plan()

    @property
    def offload_path(self) -> str | None:
        """How the next step updates parameters whose states lie on the host.

        "mapped", "staged" or "host".

        None if there are none. With ``offload_step="auto"`` the first call, or step, measures, and
        chooses; after :meth:`add_param_group` it chooses anew.
        """
        if self._storage.state_device is None:
            return None
        if not (needs := self._needs_on_host()):
            return None
        if self.offload_step != "auto":
            return self.offload_step
        if self._chosen is None:
            if is_captured():
                return "mapped"
            self._chosen = self._choose(needs)
        return self._chosen

    def _choose(self, needs: Any) -> str:
        elements = {id(need.param): local_tensor(need.param) for need in needs}.values()
        count = sum(local.numel() for local in elements) or 1
        weight = sum(local.nbytes for local in elements) / count
        states = _bytes_of(needs) / count
        try:
            measured = bandwidths(local_tensor(needs[0].param).device)
        except RuntimeError as error:  # "host" would need further memory, too
            logger.warning("offload_step='auto' chose 'mapped', as it cannot measure: %s", error)
            return "mapped"
        faster = measured.step_on_host(
            states, weight, weight, read=all(need.name != MASTER for need in needs)
        )
        path = "host" if faster and not self._options.needs_device else "mapped"
        logger.info(
            "offload_step='auto' chose %r: the link moves %.1f GB/s, the host's memory %.1f GB/s, "
            "and states have %.2f bytes a parameter there", path, *measured, states,
        )  # fmt: skip
        return path

    def _parts_apart(self) -> Mapping[int, Apart]:
        """Returns buckets of the parameters that are stepped on the host."""
        if self.offload_path != "host":
            return {}
        matrices = {
            id(param)
            for group in self.param_groups
            if algorithm_of(group).steps_matrices
            for param in group["params"]
        }
        buckets: dict[int, Apart] = {}
        number, filled = 0, 0
        for need in self._needs_on_host():
            local = local_tensor(need.param)
            if id(need.param) in buckets or id(need.param) in matrices:
                continue
            if hasattr(local, "low_precision_copy"):  # torchopt_ext/fsdp.py
                continue
            if filled and filled + local.nbytes > _BUCKET:
                number, filled = number + 1, 0
            filled += local.nbytes
            buckets[id(need.param)] = Apart(True, number)
        if buckets and torch.get_num_threads() == 1 < (cores := len(os.sched_getaffinity(0))):
            _warn_of_one_thread(cores)
        return buckets

    def _staging_bytes(self) -> int:
        """Returns the bytes of a slot in which the step stages states; 0 if it stages none."""
        if self.offload_path != "staged":
            return 0
        states = _bytes_of(self._needs_on_host())
        return max(1, min(_BUCKET, states // 4))  # so that three slots are less than the states

    def _expect_steppable(self) -> None:
        if self._storage.state_device is None or not is_captured():
            return
        if (path := self.offload_path) in ("host", "staged"):
            raise RuntimeError(
                f"a graph cannot capture a step by the path {path!r}: set "
                f"optimizer.offload_step = 'mapped' before the capture"
            )

    def _begin_on_host(self, collected: Any) -> list[tuple[int, SideStream, SideStream, Any]]:
        """Begins the copies to the host of all parts that are stepped there."""
        built = self._built
        assert built is not None
        begun = []
        states = [(param, self.state.get(param, {})) for param in params_of(self)]
        for part, host in built.host_steps.items():
            device, _ = built.parts[part]
            if device not in self._copies:
                self._copies = {**self._copies, device: (SideStream(device), SideStream(device))}
            down, up = self._copies[device]
            numbers, _, _, gradients = collected[part]
            block, _ = self._block(device)

            def fetch(host: Any = host, args: Any = (numbers, gradients, block)) -> None:
                host.fetch(states, *args)

            # The host waits for it, so the gradients' memory is not reused before.
            begun.append((part, down, up, down.run(fetch, [])))
        return begun

    def _end_on_host(self, begun: list[tuple[int, SideStream, SideStream, Any]]) -> None:
        """Steps each part when its copies have arrived, and lets the current stream wait for it."""
        built = self._built
        assert built is not None
        ends = []
        for part, down, up, arrived in begun:
            host = built.host_steps[part]
            down.synchronize(arrived)
            host.step(self.param_groups)
            ends.append((up, up.run(host.send, [])))
        for up, end in ends:
            up.wait(end)
        if begun:
            built.plan.renew_marks()


@functools.cache  # says it once
def _warn_of_one_thread(cores: int) -> None:
    warnings.warn(
        f"one of {cores} cores steps the states on the host: set OMP_NUM_THREADS, which torchrun "
        f"sets to 1, or call torch.set_num_threads, or choose offload_step='mapped'",
        stacklevel=2,
    )
