"""muon_groups: param groups of a model for Muon and, for the rest, AdamW."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from torchopt_ext._names import meant
from torchopt_ext.optim.groups import (
    Choice,
    choices_of_trained,
    expect_found,
    params_matching,
    whole_shape,
)
from torchopt_ext.optim.muon_routing import Route, matrices, routes
from torchopt_ext.state.algorithms import HYPERS, SHARED
from torchopt_ext.state.entries import unwrapped

__all__ = ["MuonGroups", "muon_groups"]


class MuonGroups(list[dict[str, Any]]):
    """Param groups, and as :attr:`report` a table of what went where and why."""

    report: str = ""


def muon_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    muon: Sequence[str] = (),
    adamw: Sequence[str] = (),
    no_decay: Sequence[str] = ("norm", "bias", "vector"),
    lr: float | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    muon_options: Mapping[str, Mapping[str, Any]] | None = None,
    adamw_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> MuonGroups:
    """Returns a model's named parameters in groups for Muon and AdamW, and prints which and why.

    Muon gets the weights of hidden layers: matrices, stacks of matrices such as experts
    ``[E, m, n]``, and the kernels of convolutions, whose groups have ``"flatten": True``.

    AdamW gets the rest:

    - vectors, also of shape (C, 1, 1) or (1, n), norms and biases of any shape;
    - embeddings, tied heads, and tables such as ``pos_embed``;
    - output layers. These are layers in a module called head, classifier, logits or unembed, also
      with a prefix (lm_head); and, outside numbered blocks such as ``layers.0``, layers in a module
      called heads or output, and matrices with as many rows as an embedding. If there is neither
      one of these nor a tied head, it is the last matrix, unless it is in a numbered block;
    - ``lora_A`` of adapters, whose ``lora_B`` goes to Muon; depthwise and complex weights; and
      logarithms such as Mamba's ``A_log``, whose layers take them element by element.

    Frozen parameters are left out, tied parameters appear once. A rank's shard decides nothing.

    Args:
        model: a module, also under DDP, FSDP2, tensor parallelism, torch.compile, peft or
            DeepSpeed's zero.Init.
        weight_decay: weight decay of the groups that decay; the others have 0.
        muon, adamw: regular expressions, searched for in the names of parameters, that decide
            otherwise: for Muon, where they match matrices, or for AdamW, which takes precedence.
        no_decay, lr, lr_multipliers: as for :func:`torchopt_ext.param_groups`, for all groups.
        muon_options: keys of Muon's groups by regular expression, such as
            ``{"wq": {"num_heads": 32}}``. The last match decides. What is the same for all of them
            can be an argument of the optimizer instead.
        adamw_options: keys of AdamW's groups, such as ``{"lr": 3e-4, "betas": (0.9, 0.95)}``.
        quiet: does not print the table, which rank 0 prints otherwise.

    Returns:
        A list of groups with "algorithm", "name" and "weight_decay", Muon's first. Its ``report``
        is the table.

    Raises:
        TypeError, ValueError: as :func:`torchopt_ext.param_groups`. TypeError also if a key of
            ``muon_options`` or ``adamw_options`` is misspelled. ValueError also if a pattern of
            ``muon`` matches an embedding or no matrix, or one of ``muon_options`` none of Muon's
            parameters.
    """
    chosen = choices_of_trained(model, weight_decay, no_decay, lr, lr_multipliers)
    routed = routes([model], muon, adamw)
    names = {param: [choice.name, unwrapped(choice.name)] for param, choice in chosen.items()}
    muon_options = dict(muon_options or {})
    matches = {pattern: params_matching(pattern, names) for pattern in muon_options}
    expect_found([p for p in matches if not matches[p]], chain(*names.values()))
    orthogonalized = {param: None for param in chosen if routed[param].algorithm == "muon"}
    for pattern in muon_options:
        if not matches[pattern] & orthogonalized.keys():
            left = {chosen[p].name: routed[p].why for p in chosen if p in matches[pattern]}
            raise ValueError(f"muon_options: {pattern!r} matches only parameters of AdamW: {left}")

    common = {"weight_decay": weight_decay} | ({} if lr is None else {"lr": lr})
    groups: dict[Any, dict[str, Any]] = {}
    for param in (*orthogonalized, *(param for param in chosen if param not in orthogonalized)):
        route, (name, spared, factor) = routed[param], chosen[param]
        key: tuple[Any, ...] = (route.algorithm, route.flatten, spared, factor)
        if param in orthogonalized:
            patterns = tuple(p for p in muon_options if param in matches[p])
            options = {k: v for p in patterns for k, v in muon_options[p].items()}
        else:
            patterns, options = (), dict(adamw_options or {})
        if (group := groups.get(key + patterns)) is None:
            options = {"algorithm": route.algorithm, **common, **options}
            _reject_misspelled(options, f"{route.algorithm}_options")
            group = _group(options, route, chosen[param], patterns)
            groups[key + patterns] = group
        group["params"].append((name, param))
    made = MuonGroups(groups.values())
    made.report = _report(model, made, routed)
    if not quiet and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        print(made.report)
    return made


def _reject_misspelled(options: Mapping[str, Any], argument: str) -> None:
    """Rejects keys that would have no effect: a group may have keys of the caller's own."""
    known = {*HYPERS, *SHARED, "name"}
    for key in options.keys() - known:
        if near := meant(key, known):
            raise TypeError(f"{argument} has the key {key!r}; did you mean {near!r}?")


def _group(
    options: dict[str, Any], route: Route, choice: Choice, patterns: Sequence[str]
) -> dict[str, Any]:
    words = [options["algorithm"]]
    if route.flatten and options.setdefault("flatten", True):
        words.append("flatten")
    if choice.spared:
        options["weight_decay"] = 0.0
    if choice.spared or route.algorithm == "adamw":
        words.append("no_decay" if choice.spared else "decay")
    parts = [" ".join(words), *patterns]
    if choice.factor != 1.0:
        options["lr"] = options["lr"] * choice.factor
        parts.append(f"lr * {choice.factor:g}")
    return {"params": [], **options, "name": ", ".join(parts)}


def _report(
    model: nn.Module, groups: Sequence[dict[str, Any]], routed: Mapping[nn.Parameter, Route]
) -> str:
    """Returns a table with a line for all parameters whose names differ in numbers only, and a line
    for all vectors of a kind."""
    lines: dict[Any, dict[str, list[nn.Parameter]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for name, param in group["params"]:
            alike, why = re.sub(r"(?<![^.])\d+(?![^.])", "*", name), routed[param].why
            key = (group["name"], why, "" if why in ("norm", "bias", "vector") else alike)
            lines[key][alike].append(param)
    rows = []
    for (group, why, _), by_name in lines.items():
        first, *more = by_name
        shapes = [whole_shape(param) for params in by_name.values() for param in params]
        shape = str(shapes[0]) if len(set(shapes)) == 1 else f"{len(set(shapes))} shapes"
        names = f"{first} and {len(more)} more" if more else first
        rows.append((group, f"{len(shapes)} x {shape}", names, why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    trained = {param: routed[param] for group in groups for _, param in group["params"]}
    orthogonalized = {p: route for p, route in trained.items() if route.algorithm == "muon"}
    rest = trained.keys() - orthogonalized.keys()
    count = sum(matrices(param, route) for param, route in orthogonalized.items())
    head = (
        f"muon_groups({type(model).__name__}): {count:,} matrices with {_elements(orthogonalized)} "
        f"elements go to Muon, {len(rest):,} parameters with {_elements(rest)} to AdamW"
    )
    if frozen := len(routed) - len(trained):
        head += f", {frozen:,} are frozen"
    cells = ([*map(str.ljust, row, widths)] for row in rows)
    return "\n".join([head, *("  ".join(row).rstrip() for row in cells)])


def _elements(params: Iterable[nn.Parameter]) -> str:
    return f"{sum(math.prod(whole_shape(param)) for param in params):,}"
