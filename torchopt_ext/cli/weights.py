"""The weights of an optimizer's parameters, found by name in checkpoints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from torchopt_ext.cli.checkpoints import WEIGHTS, Checkpoint, Entry
from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.optim.storage import MASTER, SIXTEEN_BIT, join_master, split_master
from torchopt_ext.statedict.entries import MASTERS, REMAINDERS, unwrapped


class Weights:
    """The weights of parameters, from master weights, remainders and a model's checkpoint.

    Args:
        source: the optimizer's checkpoint; a model in it will do.
        other: a model's checkpoint, which comes first.
    """

    def __init__(self, source: Checkpoint, other: Checkpoint | None) -> None:
        self.source = source
        self.given = other is not None
        self._names: dict[tuple[str, str], str] = {}
        for group, options in source.options().items():
            part = f".{group}".rpartition(".param_groups.")[0][1:]
            pairs = zip(options.get("params", ()), options.get("param_names", ()), strict=False)
            self._names |= {(part, str(index)): name for index, name in pairs}
        self._models = [
            (checkpoint, [e.key for e in map(checkpoint.entry, checkpoint.tensors)
                          if e.kind == WEIGHTS])
            for checkpoint in (other, source) if checkpoint is not None
        ]  # fmt: skip
        self.beside: list[str] = []  # keys of weights that are the source's own
        self._found: dict[str, list[tuple[Checkpoint, dict[str, list[str]]]]] = {}

    def name(self, entry: Entry) -> str:
        """The name of an entry's parameter.

        Raises:
            CommandError: the checkpoint does not say it.
        """
        known = self._names.get((entry.part, entry.owner))
        if known is None and entry.owner.isdigit():
            raise CommandError(
                "the optimizer's state has no param_names, by which weights would be found: save "
                "it from an optimizer that was given model.named_parameters()"
            )
        return known or entry.owner

    def _place(self, entry: Entry) -> tuple[Checkpoint, str]:
        name = self.name(entry)
        if entry.part not in self._found:
            every = {e.owner: e for e in map(self.source.entry, self.source.tensors)
                     if e.owner and e.part == entry.part}  # fmt: skip
            names = [self.name(e) for e in every.values()]
            self._found[entry.part] = [
                (checkpoint, keys_of(names, keys, entry.part)) for checkpoint, keys in self._models
            ]
        found = ((checkpoint, keys[name]) for checkpoint, keys in self._found[entry.part]
                 if name in keys)  # fmt: skip
        checkpoint, keys = next(found, (self.source, []))
        if len(keys) != 1:
            problem = f"{len(keys)} weights that end so" if keys else "no such weight"
            raise CommandError(f"there is {problem}: {name}; name the model's by --weights")
        return checkpoint, keys[0]

    def check(self, entry: Entry, wanted: str) -> None:
        """Raises CommandError if :meth:`as_kind` could not make what is wanted."""
        if entry.kind in (MASTER, wanted):
            return
        checkpoint, key = self._place(entry)
        if checkpoint is self.source:
            self.beside.append(key)
        weight, like = checkpoint.tensors[key], self.source.tensors[entry.key]
        expected = (torch.bfloat16,) if entry.kind in REMAINDERS else (torch.float32, *SIXTEEN_BIT)
        if weight.shape != like.shape or weight.dtype not in expected:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise CommandError(
                f"the weight {key} is {weight.dtype} {list(weight.shape)}, expected {names} "
                f"{list(like.shape)}"
            )

    def as_kind(self, entry: Entry, wanted: str) -> Tensor:
        """The master weight or remainder of the parameter that an entry belongs to.

        Args:
            entry: its master weight, its remainder, or another if it has neither.
        """
        if entry.kind == wanted:
            return self.source.tensor(entry.key)
        if entry.kind == MASTER:
            exact = self.source.tensor(entry.key)
        else:
            checkpoint, key = self._place(entry)
            exact = checkpoint.tensor(key)
            if entry.kind in REMAINDERS:
                exact = join_master(exact, self.source.tensor(entry.key))
        exact = exact.float()
        return exact if wanted == MASTER else split_master(exact, MASTERS[wanted])[1]


def keys_of(names: Collection[str], keys: Iterable[str], part: str) -> dict[str, list[str]]:
    """By parameter's name the keys that may be its weight's.

    A key ends in the name. What stands before it is the same for all weights of a model, so that
    the one with most names is right. Among such, none or the optimizer's own `part` is.
    """
    wanted = {unwrapped(name): name for name in names}
    under_ddp = all(name.startswith("module.") for name in wanted)
    wanted = {key.removeprefix("module." if under_ddp else ""): v for key, v in wanted.items()}
    below: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in keys:
        path = unwrapped(key).split(".")
        for depth in range(len(path)):
            if (name := wanted.get(".".join(path[depth:]))) is not None:
                below[name][".".join(path[:depth])].append(key)
    counts = Counter(before for found in below.values() for before in found)

    def rank(before: str) -> tuple[int, bool]:
        return counts[before], before in ("", part)

    return {
        name: [key for before, own in found.items() if rank(before) == max(map(rank, found))
               for key in own]
        for name, found in below.items()
    }  # fmt: skip
