"""Pairs the parameters of an optimizer that has no names with weights, by order and shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchopt_ext.cli.checkpoints import FILE, SAFETENSORS, Checkpoint
from torchopt_ext.cli.model_files import CONFIG, from_config
from torchopt_ext.cli.terminal import CommandError

Shape = tuple[int, ...]


class Unnamed(NamedTuple):
    """A parameter of a state dict: its number, its param group, and its shape."""

    number: str
    group: str
    shape: Shape


def paired(
    params: Sequence[Unnamed], weights: Iterable[tuple[str, Shape]], ordered: bool
) -> dict[str, str]:
    """Returns the key of each parameter's weight, by number.

    A shape that one parameter and one weight have is clear. Several of a shape are paired in order
    if there are as many weights, in the model's order, and one param group has all of them: groups
    keep the model's order, but a shape's parameters in two groups may come in any.

    Args:
        params: in the order of the groups.
        weights: keys and shapes.
        ordered: whether the weights are in the model's order.

    Raises:
        CommandError: some parameters have no weight that is clear.
    """
    keys: defaultdict[Shape, list[str]] = defaultdict(list)
    for key, shape in weights:
        keys[shape].append(key)
    alike: defaultdict[Shape, list[Unnamed]] = defaultdict(list)
    for param in params:
        alike[param.shape].append(param)
    found: dict[str, str] = {}
    unclear = []
    for shape, its in alike.items():
        there = keys[shape]
        one_order = ordered and len({param.group for param in its}) == 1
        if len(there) == len(its) and (len(its) == 1 or one_order):
            found |= {param.number: key for param, key in zip(its, there, strict=True)}
        else:
            unclear.append((its, there))
    if unclear:
        raise CommandError(_why(unclear, len(params), ordered))
    return found


def _why(unclear: list[tuple[list[Unnamed], list[str]]], count: int, ordered: bool) -> str:
    """Says which parameters have no weight that is clear."""
    texts = []
    for its, there in unclear[:3]:
        indices = ", ".join(param.number for param in its[:4]) + ", ..." * (len(its) > 4)
        names = ", ".join(there[:2]) + ", ..." * (len(there) > 2)
        has = f"{len(there)} weights have ({names})" if there else "no weight has"
        texts.append(f"{indices} of shape {[*its[0].shape]}, which {has}")
    total = sum(len(its) for its, _ in unclear)
    order = "" if ordered else f", and no file tells the model's order, as {CONFIG} would"
    return (
        f"the optimizer has no param_names, and by order and shape the weights of {total} of "
        f"{count} parameters are not clear: parameters {'; '.join(texts)}{order}. Load it into an "
        f"optimizer that was given model.named_parameters(), and save that"
    )


def order_of(model: Checkpoint) -> list[str] | None:
    """Returns a model's weights in the order of its parameters, or None if that is not known.

    Files of torch.save keep the order, safetensors do not: there a configuration beside them tells
    it, from which transformers builds the model.
    """
    if model.format == FILE:
        each = {(like.data_ptr(), like.shape): key for key, like in reversed(model.tensors.items())}
        return [*reversed(each.values())]  # tied weights once, by their first name
    config = model.path.parent / CONFIG
    if model.format != SAFETENSORS or not config.exists():
        return None
    try:
        _, entries = from_config(config)
    except CommandError:
        return None
    names = [entry.name for entry in entries]
    return names if {*names} <= {*model.tensors} else None  # beside buffers
