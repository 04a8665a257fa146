"""Finds the weights of embeddings: a parameter does not know its module."""

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

EMBEDDING_CLASSES = (nn.Embedding, nn.EmbeddingBag)


def embeddings_of(objects: Iterable[Any]) -> set[Tensor]:
    """Returns the weights of the embeddings among modules or any objects."""
    modules = (module for module in objects if issubclass(type(module), EMBEDDING_CLASSES))
    weights = (vars(module).get("_parameters", {}).get("weight") for module in modules)
    return {weight for weight in weights if weight is not None}


_search: ContextVar[Callable[[], Collection[Tensor]]] = ContextVar(
    "search", default=lambda: embeddings_of(gc.get_objects())
)


@contextmanager
def _searching(search: Callable[[], Collection[Tensor]]) -> Iterator[None]:
    token = _search.set(search)
    try:
        yield
    finally:
        _search.reset(token)


def embeddings_among(modules: Iterable[Any]) -> AbstractContextManager[None]:
    """Lets :func:`reject_embeddings` look at these modules only, instead of at all objects."""
    found = embeddings_of(modules)
    return _searching(lambda: found)


def searched_once() -> AbstractContextManager[None]:
    """Lets :func:`reject_embeddings` search once for several groups: 0.1 s for 300,000 objects."""
    return _searching(functools.cache(_search.get()))


def reject_embeddings(
    group: Mapping[str, Any], embeddings: Collection[Tensor] | None = None
) -> None:
    """Raises an error if a param group of Muon has the weight of an embedding.

    Muon would mix the rows of all tokens without complaint, although each row is a vector of its
    own, which moves only in steps in which its token occurs.

    Args:
        group: a param group of an optimizer: ``"params"``, and ``"param_names"`` if it has names.
        embeddings: the weights of embeddings. None searches all modules in this process, as
            ``fp32_moments`` does.

    Raises:
        ValueError: the group has such a weight; the message names it.
    """
    params = group["params"]
    known = set(_search.get()() if embeddings is None else embeddings)
    names = group.get("param_names") or [""] * len(params)
    for index, (name, param) in enumerate(zip(names, params, strict=True)):
        if param in known:
            raise ValueError(
                f"{repr(name) if name else f'parameter {index}'} of shape {tuple(param.shape)} is "
                f"the weight of an embedding, in a param group of Muon, which is for the matrices "
                f"of hidden layers: torchopt_ext.muon_groups(model) leaves embeddings and output "
                f"layers to AdamW"
            )
