"""Chooses which parameters keep fp32 moments if others have 8-bit moments: ``fp32_moments``."""

import gc
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from torchopt_ext._names import nearest
from torchopt_ext.optim.embeddings import embeddings_of
from torchopt_ext.optim.groups import params_matching

EMBEDDINGS: tuple[str, ...] = ("embedding",)
"""The default. A row of an embedding has a gradient only in steps in which its token occurs."""


def check_chosen(chosen: Any) -> None:
    """Rejects what is no collection of tensors and regular expressions, as ``fp32_moments`` is."""
    if isinstance(chosen, str | Tensor) or not isinstance(chosen, Collection):
        raise TypeError(
            f"fp32_moments is {chosen!r:.200}, expected a sequence such as {EMBEDDINGS}, of "
            "'embedding', regular expressions and parameters"
        )
    for item in chosen:
        if not isinstance(item, str | Tensor):
            raise TypeError(
                f"fp32_moments has {item!r:.200}, expected 'embedding', a regular expression or a "
                "parameter"
            )
        if isinstance(item, str):
            params_matching(item, {})


def fp32_params(
    named: Iterable[tuple[str, Tensor]],
    chosen: Collection[str | Tensor],
    embeddings: Collection[Tensor] | None = None,
    *,
    partial: bool = False,
) -> frozenset[Tensor]:
    """Returns the given parameters that ``fp32_moments`` chooses.

    Args:
        named: pairs of name and parameter, "" for no name; a parameter may have several names.
        chosen: as FusedAdam's ``fp32_moments``.
        embeddings: the weights of embeddings. None searches all modules in this process, because a
            parameter does not know its module.
        partial: whether there are parameters elsewhere, to which an item without a match may refer.

    Raises:
        TypeError, ValueError: as :func:`check_chosen`.
        ValueError: a pattern matches no name, or a tensor is not among the given parameters.
    """
    check_chosen(chosen)
    names: dict[Tensor, list[str]] = {}
    for name, param in named:
        names.setdefault(param, []).append(name)
    fp32: set[Tensor] = set()
    for item in chosen:
        if isinstance(item, Tensor):
            matches = {item} & names.keys()
        elif item in EMBEDDINGS:
            if embeddings is None:
                embeddings = embeddings_of(gc.get_objects())
            fp32 |= names.keys() & set(embeddings)
            continue
        else:
            matches = params_matching(item, names)
        if not matches and not partial:
            raise ValueError(_not_found(item, names))
        fp32 |= matches
    return frozenset(fp32)


def is_8_bit(state_dtype: Any) -> bool:
    """Returns whether a value of FusedAdam's ``state_dtype`` means 8-bit moments."""
    return state_dtype in ("int8", torch.int8)


def _not_found(item: str | Tensor, names: dict[Tensor, list[str]]) -> str:
    if isinstance(item, Tensor):
        return (
            f"fp32_moments has a tensor of shape {tuple(item.shape)} that is none of the "
            f"parameters: choose them when the model is sharded and wrapped"
        )
    every = [name for its in names.values() for name in its if name]
    if not every:
        return (
            f"fp32_moments has the pattern {item!r}, but the parameters have no names: give "
            "model.named_parameters()"
        )
    near = nearest(item, every)
    return f"fp32_moments: no parameter has a name with {item!r}; the nearest names are {near}"
