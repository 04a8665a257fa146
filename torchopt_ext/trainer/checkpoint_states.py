"""The states of model, data position and random numbers, as checkpoints hold them."""

import json
import random
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext.state.algorithms import HYPERS
from torchopt_ext.state.entries import plain, unwrapped
from torchopt_ext.trainer.config import ConfigError, Parallelism
from torchopt_ext.trainer.parallel_dims import ParallelDims
from torchopt_ext.trainer.saved_values import (
    entries_to_load,
    one_entry,
    packed,
    restored,
    unpacked,
    without_entries,
)


def model_state(model_parts: list[nn.Module]) -> dict[str, Any]:
    """Returns the live parameters and buffers of all parts, by their names in the whole model."""
    merged: dict[str, Any] = {}
    for part in model_parts:
        # As get_model_state_dict, which takes 60 us for each key and would delay a training step.
        inner = part.module if isinstance(part, DistributedDataParallel) else part
        state = {unwrapped(name): value for name, value in inner.state_dict().items()}
        if both := sorted(merged.keys() & state.keys()):
            raise ValueError(f"more than one model part has {both}")
        merged |= state
    return merged


def set_model_state(model_parts: list[nn.Module], state: dict[str, Any]) -> None:
    """Loads each part's entries from `state`, live or in the form in which they were saved."""
    for part in model_parts:
        entries = {name: restored(state[name]) for name in get_model_state_dict(part)}
        set_model_state_dict(part, entries, options=StateDictOptions(strict=False))


def model_to_load(live: dict[str, Any], metadata: Metadata, where: Any) -> dict[str, Any]:
    """Returns a model's state for DCP to load into, with non-tensor values as they were saved.

    Raises ConfigError, naming entries that the checkpoint lacks or has in another shape.
    """
    others = {name for name, value in live.items() if not torch.is_tensor(value)}
    entries = entries_to_load(others, {}, metadata)
    missing = live.keys() - metadata.state_dict_metadata.keys() - entries.keys()
    missing -= without_entries(live).keys()
    problems = [f"it lacks {some(sorted(missing))}"] if missing else []
    for name, stored in model_tensors(metadata).items():
        if torch.is_tensor(value := live.get(name)) and value.shape != stored.size:
            shapes = f"is {list(stored.size)}, the job's is {list(value.shape)}"
            problems.append(f"its {name} {shapes}")
    if problems:
        raise ConfigError(f"{where} is of another model: {some(problems)}")
    return live | entries


def states_to_load(
    keys: Set[str], live: Mapping[str, Any], metadata: Metadata, where: Any
) -> dict[str, Any]:
    """Returns the states at some keys for DCP to load into, as they were saved.

    Raises ConfigError, naming items of a live state that the checkpoint lacks.
    """
    states: dict[str, Any] = {key: {} for key in keys - live.keys()} | without_entries(live)
    states |= entries_to_load(keys, live, metadata)
    missing = []
    for key, state in live.items():
        if not isinstance(state, Mapping):
            missing += [] if key in states else [key]
        elif isinstance(states.setdefault(key, {}), Mapping):  # not saved as one entry
            states[key] = without_entries(state) | states[key]
            missing += [f"{key}.{name}" for name in state if name not in states[key]]
    if missing:
        raise ConfigError(f"{where} lacks {some(missing)}")
    return states


def model_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Returns the saved model's tensors by name. Other objects' tensors have longer paths."""
    tensors = {}
    for name, path in (metadata.planner_data or {}).items():
        stored = metadata.state_dict_metadata[name]
        if len(path) == 1 and isinstance(stored, TensorStorageMetadata):
            tensors[name] = stored
    return tensors


def some(texts: Sequence[str]) -> str:
    """Returns a few of the texts, and the number of the others."""
    more = [f"{len(texts) - 4:,} more"] if len(texts) > 4 else []
    return ", ".join([*texts[:4], *more])


def layout(parallelism: Parallelism, ranks: int) -> str:
    """Returns the parallel degrees as text. Equal texts mean an equal division of work."""
    return json.dumps(ParallelDims.of(parallelism, ranks).degrees())


def settings(states: Mapping[str, Any]) -> list[str]:
    """Describes the settings of each parameter group that a checkpoint replaces."""
    schedulers = getattr(states["lr_scheduler"], "schedulers", ())
    texts = [f"lr {plain(lr)}" for scheduler in schedulers for lr in scheduler.base_lrs]
    for group in getattr(states["optimizer"], "param_groups", ()):
        texts += [f"{name} {plain(group.get(name))}" for name in sorted(HYPERS - {"lr"})]
    return texts


class DataPosition:
    """The position of a data loader, packed, one entry for each key of its state dict.

    A key that several ranks have is saved once. Others, such as ``dp_rank_0``, are of one rank.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def state_dict(self) -> dict[str, bytes]:
        state = self._dataloader.state_dict()
        return {str(k): packed(one_entry(value, f"dataloader.{k}")) for k, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = {key: unpacked(data, f"dataloader.{key}") for key, data in state.items()}
        self._dataloader.load_state_dict(values)


class PeerState:
    """The state that a replica group sends to a group that recovers."""

    def __init__(self, model_parts: list[nn.Module], owners: dict[str, Any]) -> None:
        self._parts, self._owners = model_parts, owners

    def state_dict(self) -> dict[str, Any]:
        rest = {key: owner.state_dict() for key, owner in self._owners.items()}
        return rest | {"model": model_state(self._parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_model_state(self._parts, state["model"])
        for key, owner in self._owners.items():
            owner.load_state_dict(state[key])


class RandomState:
    """This rank's generators: torch's of CPU and current device, Python's, numpy's if imported.

    States of another :func:`layout` are not loaded: its ranks do other parts of the work.
    """

    def __init__(self, rank: int, layout: str) -> None:
        self._key, self._layout = f"rank_{rank}", layout
        self.names = "layout", self._key  # the entries to load, without other ranks'

    def state_dict(self) -> dict[str, Any]:
        return {"layout": self._layout, self._key: packed(generator_states())}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Sets the generators. Returns False, and sets none, if the states do not fit this rank."""
        if state.get("layout") != self._layout or self._key not in state:
            return False
        set_generator_states(unpacked(state[self._key], f"rng.{self._key}"))
        return True


def generator_states() -> dict[str, Any]:
    """Returns the states of this process's generators."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Sets the generators of :func:`generator_states` that this process has."""
    torch.set_rng_state(states["cpu"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(states["numpy"]))
