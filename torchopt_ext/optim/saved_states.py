"""State dicts of fused optimizers, their copies and their pickles."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from torchopt_ext._torch import (
    GET_STATE,
    is_called_by,
    is_dtensor,
    is_gathered,
    is_to_be_filled,
    run_eagerly,
)
from torchopt_ext.optim.chosen_moments import ChosenMoments
from torchopt_ext.optim.hooks import run_hooks
from torchopt_ext.state.algorithms import algorithm_of, defaults_beside
from torchopt_ext.state.by_row import BY_ROW
from torchopt_ext.state.collective import fail_together_in
from torchopt_ext.state.entries import ABSENT, CONTROL_KEY, control_entry, converted, forms_of
from torchopt_ext.state.host_memory import HostMemory, is_on_host
from torchopt_ext.state.local import local_tensor, mesh_groups
from torchopt_ext.state.matrices import fix_settings, without_functions
from torchopt_ext.state.params import drop_replaced, named_group_params, params_of
from torchopt_ext.state.quantized import SCALES, fit_moments
from torchopt_ext.state.storage import REMAINDER, with_own_steps
from torchopt_ext.statedict.loaded import (
    Loaded,
    Slot,
    expect_dict,
    largest_step,
    names_params,
    raise_problems,
    read_indexed,
    undone_if_raised,
)
from torchopt_ext.statedict.low_bit import dequantized, with_step


class SavedStates(ChosenMoments):
    """An optimizer whose state is saved, loaded, copied and pickled as torch's are."""

    def _defaults_for(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the default of each key of a group, by the group's algorithm."""
        return defaults_beside(self.defaults, group)

    @run_eagerly
    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict, in torch's layout.

        With a schedule or loss scale, the first parameter's state also has
        ``torchopt_ext.control``. Tensors are the optimizer's own, except the steps, which are
        copies, and int16 remainders in whole dicts (``full_state_dict=True``), which are int32.
        Functions under ``orthogonalize`` and ``adjust_lr_fn`` are left out.
        """
        drop_replaced(self)
        self._wait_for_states()
        self._mark_control(follow=True)
        packed = super().state_dict()
        if not (isinstance(packed, dict) and "state" in packed):
            return packed  # a hook has replaced the dict; the tensors are the optimizer's own
        packed["state"] = with_own_steps(packed["state"])
        if "param_groups" in packed:
            keep_keys = is_called_by(GET_STATE, 3)  # the setter looks for the keys that groups have
            saved = [without_functions(group, keep_keys) for group in packed["param_groups"]]
            packed["param_groups"] = saved
        filled: dict[Any, tuple[Tensor, Sequence[str]]] = {}
        if is_to_be_filled():
            named = named_group_params(self)
            held = ((p, forms_of(algorithm_of(group).states)) for _, group, _, p in named)
            filled = dict(enumerate(held))
        for key, entry in packed["state"].items():
            if not isinstance(entry, dict):
                continue
            if CONTROL_KEY in entry:
                entry[CONTROL_KEY] = control_entry(self._saved_control())
            if key in filled:
                param, forms = filled[key]
                absent = param if is_dtensor(param) else ABSENT
                missing = [name for name in forms if name not in entry]
                # torch takes tensors on one device only; values pass over the parameter's.
                hosted = [k for k, value in entry.items() if is_on_host(value)]
                entry.update(dict.fromkeys(hosted, param))
                unlike = SCALES.keys() | BY_ROW  # the parameter does not say how to cut them
                entry.update({name: ABSENT if name in unlike else absent for name in missing})
            if sharded := {name: value for name, value in entry.items() if is_dtensor(value)}:
                from torchopt_ext.optim.gathered import Handed  # needs torch.distributed.tensor

                entry.update({name: Handed.of(value) for name, value in sharded.items()})
            elif REMAINDER in entry and is_gathered():  # neither gloo nor NCCL sends int16
                entry[REMAINDER] = entry[REMAINDER].to(torch.int32)
        return packed

    @run_eagerly
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of torch's; checks all of it before any change.

        State dicts of torchao's and bitsandbytes' Adam and AdamW, in 4 and 8 bits, are decoded.
        Nothing of the given dict is kept. Moments are converted to this optimizer's dtype. A master
        weight or remainder is converted to the kind that this optimizer keeps, or made if it is
        missing, from the parameter's values when the next step begins. Missing counts of a schedule
        are derived from the parameters' steps.

        A whole tensor for a sharded parameter is cut to this rank's shard. If the dict names its
        parameters, as torch's set_optimizer_state_dict does, ranks that share sharded parameters
        load together or not at all.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: groups or entries do not fit this optimizer; the message lists the problems.
        """
        expect_dict(state_dict)
        groups = mesh_groups(params_of(self)) if names_params(state_dict) else []
        with fail_together_in(groups):
            load = self._prepare_load(state_dict)
        with undone_if_raised(self), fail_together_in(groups):
            load()

    @torch.no_grad()
    def _read(self, state_dict: dict[str, Any]) -> Loaded:
        self._select_fp32_moments()
        hooked = run_hooks(self, "load_state_dict_pre", state_dict.copy())
        loaded = read_indexed(hooked, self.param_groups)
        loaded.slots = [with_step(dequantized(slot)) for slot in loaded.slots]
        if names_params(state_dict):
            loaded.slots = [*map(self._without_fillers, loaded.slots)]
        return loaded

    def _prepare_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Checks a state dict, and returns the function that loads it."""
        loaded = self._read(state_dict)
        raise_problems(loaded.problems(self))
        largest_before = largest_step(self.state.values())
        control = self._control_to_load(loaded.control, loaded.counted, largest_before)

        @torch.no_grad()
        def load() -> None:
            with undone_if_raised(self):
                self._take_loaded(loaded, control)
                run_hooks(self, "load_state_dict_post")

        return load

    def _take_loaded(self, loaded: Loaded, control: Mapping[str, float]) -> None:
        """Continues with a state dict that was read and checked.

        Args:
            control: the result of :meth:`_control_to_load`.
        """
        self._wait_for_states()
        state = dict(loaded.foreign)
        for slot in loaded.slots:
            if slot.entry:
                held = self.state.get(slot.param, {})
                state[slot.param] = {
                    name: converted(name, value, slot.param, self._storage, held.get(name))
                    for name, value in self._kept(slot).items()
                }
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": loaded.groups})
        self._load_control(control)
        self._marks = {}  # the next step compares loaded masters with the weights

    def _without_fillers(self, slot: Slot) -> Slot:
        """Drops this optimizer's own entries if there are others.

        torch's set_optimizer_state_dict passes in own entries that a whole state dict lacks. All
        entries are own if a checkpoint was read into them.
        """
        kept = {k: value for k, value in slot.entry.items() if not self._is_own(slot, k)}
        return replace(slot, entry=kept) if kept.keys() - {"step"} else slot

    def _is_own(self, slot: Slot, name: str) -> bool:
        """Returns whether an entry is this optimizer's own tensor, or a view of it."""
        value, held = slot.entry.get(name), self.state.get(slot.param, {}).get(name)
        local = getattr(value, "source", local_tensor(value))  # optim/gathered.py
        return isinstance(value, Tensor) and local is local_tensor(held)

    def _kept(self, slot: Slot) -> Mapping[str, Any]:
        return fit_moments(slot.entry, slot.param, self._storage.quantizes(slot.param))

    def __copy__(self) -> Self:
        """Returns an optimizer with the same groups and state, as torch's copies have."""
        copied = type(self).__new__(type(self))
        copied.__setstate__(self._portable_state() | {"state": self.state})
        copied._join_ranks_of(self)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._portable_state(), memo))
        copied._join_ranks_of(self)
        return copied

    def _join_ranks_of(self, other: Self) -> None:
        self.process_group = other.process_group
        self.orthogonalize_over = other.orthogonalize_over

    def __getstate__(self) -> dict[str, Any]:
        for name in ("process_group", "orthogonalize_over"):
            if getattr(self, name) is not None:
                raise TypeError(
                    f"a {type(self).__name__} with {name} cannot be pickled: its ranks exist in "
                    f"this run only; save its state_dict()"
                )
        portable = self._portable_state()
        # A process that torch.multiprocessing starts opens shared memory later: keep the copies.
        entries = [entry for entry in portable["state"].values() if isinstance(entry, dict)]
        self._pickled_copies = [entry.get("step") for entry in entries]
        return portable

    def _portable_state(self) -> dict[str, Any]:
        self._wait_for_states()
        of_container = ("_first_parameter_number", "_first_matrix_number", "parameter_names")
        kept = {name: value for name, value in vars(self).items() if name in of_container}
        portable = super().__getstate__() | kept
        return portable | {
            "state": defaultdict(dict, with_own_steps(portable["state"])),
            # A copy looks again for embeddings, and its first step takes memory on the host.
            "_storage": replace(self._storage, fp32_moments=frozenset(), host=HostMemory()),
            "_fp32_moments": self._fp32_moments,
            "_fp32_places": self._fp32_places,
            "_options": self._options,
            "_settings": self._settings,
            "_blocks": self._blocks,
            "_device_without_params": self._device_without_params,
            "_norm_measured": self._norm_measured,
            "rejected_steps": self.rejected_steps,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = dict(state.get("defaults") or self.defaults)
        super().__setstate__(state)
        self.defaults = defaults  # torch adds "differentiable", which only Adam's groups have
        for group in self.param_groups:  # state dicts of older torch versions lack some keys
            for key, default in self._defaults_for(group).items():
                group.setdefault(key, default)
            fix_settings(group)
        self._forget_plan()
        self._mark_control()
