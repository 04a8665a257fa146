"""Which parameters of a model Muon updates, which ones AdamW, and why: :func:`routes`."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from torchopt_ext.optim.embeddings import EMBEDDING_CLASSES
from torchopt_ext.optim.groups import (
    Place,
    expect_found,
    expect_several,
    kinds_of,
    params_matching,
    places,
    whole_shape,
)

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_LORA = re.compile(r"\.(lora_(?:a|down|embedding_[ab]))\.", re.IGNORECASE)
"""Of peft (lora_A), torchtitan (lora_a) and kohya (lora_down)."""
_EMBEDDING_CLASS = re.compile("Embeddings?[A-Z0-9]*$")
"""Class names of other packages' embeddings: VocabParallelEmbedding; not EmbeddingsProjector."""
_TABLE = re.compile("(^|_)(emb(ed(ding)?)?s?|pos(ition(al)?)?|tokens?)(_|$)")
"""Names of tables that are no module's "weight": pos_embed, positional_embedding, query_tokens."""
_ELEMENTS = re.compile("(^|_)logs?(_|$)")
"""Names of logarithms that layers take element by element: A_log of Mamba, A_logs of VMamba."""
_HEAD = re.compile("(?!multi)(.*_)?(head|classifier|logits|unembed(ding)?)")
_OUTPUT = re.compile("(.*_)?(heads|outputs?|output_(layer|proj(ection)?))")
"""Also names of hidden layers in blocks, such as BERT's ``layer.0.output``."""


class Route(NamedTuple):
    """Which algorithm updates a parameter, and why."""

    algorithm: str  # "muon" or "adamw"
    why: str
    flatten: bool = False  # the matrix is (shape[0], the product of the others)


def routes(
    models: Sequence[nn.Module],
    muon: Sequence[str] = (),
    adamw: Sequence[str] = (),
    *,
    partial: bool = False,
) -> dict[nn.Parameter, Route]:
    """Returns the route of each parameter of a model or its parts, also of frozen ones.

    Routes depend on names, modules and whole shapes: never on how weights are sharded, nor on the
    model's other layers, but for an output layer with neither a known name nor as many rows as an
    embedding.

    Args:
        models, muon, adamw: as for :func:`torchopt_ext.muon_groups`.
        partial: other ranks have other parts of the model, in which a pattern may be found.

    Raises:
        TypeError: ``muon`` or ``adamw`` is a string.
        ValueError: a pattern is no regular expression or matches no parameter's name; or one of
            ``muon`` matches an embedding, or no matrix.
    """
    expect_several(muon=muon, adamw=adamw)
    muon, adamw = tuple(muon), tuple(adamw)
    found = places(models)
    names = {param: [name for place in its for name in place.names] for param, its in found.items()}
    matches = {pattern: params_matching(pattern, names) for pattern in (*adamw, *muon)}
    if not partial:
        unfound = [pattern for pattern in matches if not matches[pattern]]
        expect_found(unfound, chain(*names.values()))
    routed = {param: _route(param, its) for param, its in found.items()}
    routed |= {param: Route("adamw", why) for param, why in _output_layers(found, routed).items()}
    by_pattern: dict[nn.Parameter, Route] = {}
    for pattern in adamw:
        route = Route("adamw", f"adamw={pattern!r}")
        by_pattern |= {param: route for param in found if param in matches[pattern]}
    for pattern in muon:
        its = {p: found[p] for p in found if p in matches[pattern] and p not in by_pattern}
        by_pattern |= _forced(pattern, its)
    return routed | by_pattern


def keys_by_route(
    models: Sequence[nn.Module],
    muon: Sequence[str],
    adamw: Sequence[str],
    adamw_options: Mapping[str, Any],
    *,
    partial: bool = False,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns what a group of each parameter has besides the arguments of an optimizer of Muon."""
    keys: dict[nn.Parameter, dict[str, Any]] = {}
    for param, route in routes(models, muon, adamw, partial=partial).items():
        if route.algorithm == "adamw":
            keys[param] = {"algorithm": "adamw", **adamw_options}
        else:
            keys[param] = {"flatten": True} if route.flatten else {}
    return keys


def matrices(param: nn.Parameter, route: Route) -> int:
    """Returns how many matrices of a parameter Muon orthogonalizes, if none is split."""
    return 1 if route.flatten else math.prod(whole_shape(param)[:-2])


def _route(param: nn.Parameter, its: Sequence[Place]) -> Route:
    flatten = _is_flattened(param, its)
    if why := next(_no_matrix(param, its, flatten), None) or next(_unsuited(param, its), None):
        return Route("adamw", why)
    if flatten:
        return Route("muon", "convolution", flatten)
    return Route("muon", "hidden matrix" if len(whole_shape(param)) == 2 else "stack of matrices")


def _forced(pattern: str, its: Mapping[nn.Parameter, Sequence[Place]]) -> dict[nn.Parameter, Route]:
    """Returns the routes of parameters that match a pattern of ``muon``."""
    forced: dict[nn.Parameter, Route] = {}
    left = {}
    for param, where in its.items():
        name, flatten = where[0].names[0], _is_flattened(param, where)
        if not param.requires_grad:
            left[name] = "frozen"
        elif _is_embedding(where):
            raise ValueError(
                f"muon={pattern!r} matches {name!r}, the weight of an embedding: Muon is for the "
                f"matrices of hidden layers"
            )
        elif why := next(_no_matrix(param, where, flatten), None):
            left[name] = why
        else:
            forced[param] = Route("muon", f"muon={pattern!r}", flatten)
    if left and not forced:
        raise ValueError(f"muon={pattern!r} matches no matrix that is trained, only {left}")
    return forced


def _is_embedding(its: Sequence[Place]) -> bool:
    return any(isinstance(place.module, EMBEDDING_CLASSES) for place in its)


def _tied_to(its: Sequence[Place]) -> str | None:
    """Returns an embedding's other name, which is an output layer's."""
    others = (place for place in its if not isinstance(place.module, EMBEDDING_CLASSES))
    return next((place.names[-1] for place in others), None)


def _is_flattened(param: nn.Parameter, its: Sequence[Place]) -> bool:
    """Returns whether a parameter is a kernel: one of torch's, or of a convolution unknown here."""
    dims = len(whole_shape(param))
    return dims > 2 and (dims > 3 or any(isinstance(place.module, _CONVOLUTIONS) for place in its))


def _no_matrix(param: nn.Parameter, its: Sequence[Place], flatten: bool) -> Iterator[str]:
    """Yields why Muon cannot update a parameter."""
    shape = whole_shape(param)
    if param.is_complex():
        yield "complex"
    sides = (shape[0], math.prod(shape[1:])) if flatten else shape[-2:]
    if len(shape) < 2 or min(sides) <= 1:
        kinds = {kind for place in its for kind in kinds_of(place, param)}
        yield next((kind for kind in ("norm", "bias") if kind in kinds), "vector")


def _unsuited(param: nn.Parameter, its: Sequence[Place]) -> Iterator[str]:
    """Yields why Muon should not update a parameter that has the shape of a matrix."""
    shape = whole_shape(param)
    kinds = {kind for place in its for kind in kinds_of(place, param)}
    if _is_embedding(its):
        tied_to = _tied_to(its)
        yield f"embedding, also {tied_to}" if tied_to else "embedding"
    yield from (kind for kind in ("norm", "bias") if kind in kinds)  # experts' biases: (E, n)
    for module, own_name, names in its:
        if _EMBEDDING_CLASS.search(type(module).__name__):
            yield f"embedding: in a {type(module).__name__}"
        if lora := _LORA.search(f".{names[-1]}."):
            # B is orthogonalized: Nerogar/OneTrainer PR #1314, after arXiv:2508.17901.
            yield lora[1]
        if _TABLE.search(own_name):
            yield "embedding by its name"
        if _ELEMENTS.search(own_name):
            yield "logarithms by their name"
        if isinstance(module, _CONVOLUTIONS) and module.groups > 1 and shape[1] == 1:
            yield "depthwise convolution"  # a filter a channel is no matrix between channels
    if len(shape) == 3 and shape[0] == 1:
        yield "embedding: one for the whole batch"  # such as (1, patches, width)


def _output_layers(
    found: Mapping[nn.Parameter, Sequence[Place]], routed: Mapping[nn.Parameter, Route]
) -> dict[nn.Parameter, str]:
    """Returns why matrices are those of output layers."""
    embeddings = [param for param, its in found.items() if _is_embedding(its)]
    tables = {whole_shape(param)[0]: found[param][0].names[-1] for param in embeddings}
    hidden = [param for param in found if routed[param].algorithm == "muon"]
    reasons = (
        (param, next(_output_reasons(param, found[param], tables), None)) for param in hidden
    )
    outputs = {param: why for param, why in reasons if why is not None}
    has_head = bool(outputs) or any(_tied_to(found[param]) for param in embeddings)
    if hidden and not has_head and not _in_block(found[hidden[-1]][0]):
        outputs[hidden[-1]] = "output layer: the model's last matrix"
    return outputs


def _output_reasons(
    param: nn.Parameter, its: Sequence[Place], tables: Mapping[int, str]
) -> Iterator[str]:
    shape = whole_shape(param)
    for place in its:
        modules, in_block = place.names[-1].split(".")[:-1], _in_block(place)
        near = modules if len(shape) == 2 else modules[-1:]  # heads may have hidden convolutions
        for module in near:
            if _HEAD.fullmatch(module) or (_OUTPUT.fullmatch(module) and not in_block):
                yield f"output layer: in {module!r}"
        if len(shape) == 2 and shape[0] in tables and not in_block:
            yield f"output layer: as many rows as {tables[shape[0]]}"


def _in_block(place: Place) -> bool:
    """Returns whether a module is in a numbered one, as hidden layers are: layers.0.mlp.up."""
    return any(part.isdigit() for part in place.names[-1].split(".")[:-2])
