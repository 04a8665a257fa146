"""The weights of an optimizer's parameters, found in checkpoints by name, or else by order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchopt_ext.cli.by_order import Unnamed, order_of, paired
from torchopt_ext.cli.checkpoints import WEIGHTS, Checkpoint, Entry
from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.state.entries import MASTERS, REMAINDERS, unwrapped
from torchopt_ext.state.quantized import OTHER_FORM
from torchopt_ext.state.storage import MASTER, SIXTEEN_BIT, join_master, split_master


class Weights:
    """The weights of parameters, from master weights, remainders and a model's checkpoint.

    Args:
        source: the optimizer's checkpoint, which may also hold the model.
        other: the model's checkpoint, if it is separate; used instead of a model in `source`.
    """

    def __init__(self, source: Checkpoint, other: Checkpoint | None) -> None:
        self.source = source
        self.are_separate = other is not None
        self._names: dict[tuple[str, str], str] = {}
        for part, groups in source.options().items():
            for group in groups.values():
                pairs = zip(group.get("params", ()), group.get("param_names", ()), strict=False)
                self._names |= {(part, str(index)): name for index, name in pairs}
        self._model = other or source
        entries = map(self._model.entry, self._model.tensors)
        self._keys = [entry.key for entry in entries if entry.kind == WEIGHTS]
        self._key_of: dict[Entry, str] = {}
        self.by_order: dict[str, str] = {}
        """Names that order and shape tell, by the parameters' numbers."""

    def name(self, entry: Entry) -> str:
        """Returns the name of an entry's parameter."""
        if entry.owner.isdigit() and (entry.part, entry.owner) not in self._names:
            self._pair(entry.part)
        return self._names.get((entry.part, entry.owner)) or entry.owner

    def _pair(self, part: str) -> None:
        """Names the parameters of an optimizer without names as the weights of the same shapes."""
        if not self._keys:
            raise CommandError(
                "the optimizer's state has no param_names, by which weights would be found: give "
                "the model's by --weights, which are then found by order and shape"
            )
        shapes = {}
        for entry in map(self.source.entry, self.source.tensors):
            if entry.part == part and entry.kind in (*MASTERS, *OTHER_FORM):
                shapes[entry.owner] = tuple(self.source.tensors[entry.key].shape)
        params = [
            Unnamed(str(index), number, shapes[str(index)])
            for number, group in self.source.options().get(part, {}).items()
            for index in group.get("params", ())
            if str(index) in shapes
        ]
        order, keys = order_of(self._model), {*self._keys}
        like = self._model.tensors
        weights = [
            (key, tuple(like[key].shape))
            for key in (self._keys if order is None else order)
            if key in keys and like[key].is_floating_point()
        ]
        self.by_order = paired(params, weights, ordered=order is not None)
        for index, key in self.by_order.items():
            path = self._model.paths[key]
            name = ".".join(map(str, path[1:] if path[1:] else path))
            self._names[part, index] = self.by_order[index] = name

    def find(self, entries: Iterable[Entry], kind: str) -> None:
        """Finds the weights from which :meth:`as_kind` makes a kind of master weights.

        Args:
            entries: one entry per parameter: its master weight, its remainder, or any other entry
                if it has neither.
        """
        parts: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.kind not in (MASTER, kind):
                parts[entry.part].append(entry)
        for part, needed in parts.items():
            keys = keys_of([self.name(entry) for entry in needed], self._keys, part)
            for entry, key in zip(needed, keys, strict=True):
                self._check(self._model.tensors[key], key, entry)
                self._key_of[entry] = key

    @property
    def beside(self) -> list[str]:
        """Keys of the weights that were found in the optimizer's own checkpoint."""
        return [] if self.are_separate else [*self._key_of.values()]

    def _check(self, weight: Tensor, key: str, entry: Entry) -> None:
        like = self.source.tensors[entry.key]
        expected = (torch.bfloat16,) if entry.kind in REMAINDERS else (torch.float32, *SIXTEEN_BIT)
        if weight.shape != like.shape or weight.dtype not in expected:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise CommandError(
                f"the weight {key} is {weight.dtype} {list(weight.shape)}, expected {names} "
                f"{list(like.shape)}"
            )

    def as_kind(self, entry: Entry, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a parameter's master weight or remainder, from an entry as in :meth:`find`."""
        if entry.kind == kind:
            return self.source.tensor(entry.key).to(dtype)
        if entry.kind == MASTER:
            exact = self.source.tensor(entry.key)
        else:
            exact = self._model.tensor(self._key_of[entry])
            if entry.kind in REMAINDERS:
                exact = join_master(exact, self.source.tensor(entry.key))
        exact = exact.float()
        return exact if kind == MASTER else split_master(exact, MASTERS[kind])[1].to(dtype)


def keys_of(names: Sequence[str], keys: Iterable[str], part: str) -> list[str]:
    """Returns the keys of a model's weights, by the names of an optimizer's parameters.

    A key is a prefix and the name. The prefix is the same for all keys of a model. If other weights
    have the same names, such as averages, only the model without a prefix is accepted, or the model
    whose prefix is the optimizer's `part`.
    """
    plain = [unwrapped(name) for name in names]
    if all(name.startswith("module.") for name in plain):  # DistributedDataParallel's prefix
        plain = [name.removeprefix("module.") for name in plain]
    expected = {*plain}
    key_of = {unwrapped(key): key for key in keys}
    by_prefix: defaultdict[str, set[str]] = defaultdict(set)  # names by such as "model."
    for key in key_of:
        for start in [0, *(n + 1 for n, letter in enumerate(key) if letter == ".")]:
            if key[start:] in expected:
                by_prefix[key[:start]].add(key[start:])
    whole = [prefix for prefix, names_there in by_prefix.items() if names_there == expected]
    if not whole:
        most = max(by_prefix.values(), key=len, default=set())
        name = next(name for name in plain if name not in most)
        raise CommandError(f"there is no such weight: {name}; name the model's by --weights")
    # Weights deeper in a model end like other weights: layers.0.norm.weight and norm.weight.
    model = min(whole, key=lambda prefix: (prefix not in ("", f"{part}."), len(prefix)))
    if model not in ("", f"{part}.") and any(not prefix.startswith(model) for prefix in by_prefix):
        raise CommandError(
            f"several weights end in {names[0]} or another name; name the model's by --weights"
        )
    return [key_of[f"{model}{name}"] for name in plain]
