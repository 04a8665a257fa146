"""Param groups of a model: which parameters decay, and by which factors learning rates differ."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchopt_ext._arguments import expect_numbers
from torchopt_ext._names import nearest
from torchopt_ext._torch import is_flat
from torchopt_ext.optim.embeddings import EMBEDDING_CLASSES
from torchopt_ext.state.entries import unwrapped

__all__ = ["param_groups"]

KINDS = ("norm", "bias", "vector", "embedding")
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_BIAS = re.compile("(^|_)bias(_|$)|bias$")
_NORM_IN_NAME = re.compile("(Norm|norm|NORM)(?![a-z])")
"""Class names of other packages' norms: LlamaRMSNorm, LayerNormFP32, Rmsnorm; not NormedBlock."""


def param_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Sequence[str] = ("norm", "bias", "vector"),
    lr: float | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Returns a model's named parameters in groups with and without decay, for any torch optimizer.

    Frozen parameters are left out, tied parameters appear once. Groups are in the order of the
    model's parameters; each has a ``"name"``, such as "decay" or "no_decay, lr * 0.1".

    Args:
        model: a module, also under DDP, FSDP2, tensor parallelism, torch.compile or peft.
        weight_decay: weight decay of the groups that decay; the others have 0.
        no_decay: what does not decay. "norm": parameters of torch's norms, of any shape, and the
            vectors of modules whose class name has the word "Norm" (LlamaRMSNorm). "bias":
            parameters whose own name has the word "bias" or ends in it (bias_ih_l0). "vector":
            parameters of fewer than two dimensions, such as gates and scales. "embedding": weights
            of Embedding and EmbeddingBag, also if they are tied to an output layer. Any other
            string is a regular expression, searched for in the names of parameters. The default
            makes the groups of nanoGPT and Megatron-LM; in transformers' Trainer, vectors that are
            neither norms nor biases decay.
        lr: the learning rate that multipliers multiply; without it groups use the optimizer's.
        lr_multipliers: factors of the learning rate by regular expression, searched for in the
            names of parameters; the first match decides.

    Raises:
        TypeError: ``no_decay`` is a string, ``model`` is not a module, or a number has a wrong
            type.
        ValueError: a pattern matches no parameter's name or is not a regular expression; there are
            multipliers without ``lr``; a number is negative or infinite; no parameter can be
            trained; or the first generation of FSDP has flattened the parameters.
    """
    chosen = choices_of_trained(model, weight_decay, no_decay, lr, lr_multipliers)
    groups = in_groups([*chosen], chosen, lr)
    for group in groups:
        _, spared, factor = chosen[group["params"][0]]
        name = "no_decay" if spared else "decay"
        group["name"] = name if factor == 1.0 else f"{name}, lr * {factor:g}"
        group["params"] = [(chosen[param].name, param) for param in group["params"]]
        group.setdefault("weight_decay", weight_decay)
        if lr is not None:
            group.setdefault("lr", lr)
    return groups


class Choice(NamedTuple):
    """What the arguments of :func:`param_groups` choose for a parameter."""

    name: str
    spared: bool  # by no_decay
    factor: float  # of the learning rate


_NOTHING_CHOSEN = Choice("", spared=False, factor=1.0)


def choices_of_trained(
    model: nn.Module,
    weight_decay: float,
    no_decay: Sequence[str],
    lr: float | None,
    lr_multipliers: Mapping[str, float] | None,
) -> dict[nn.Parameter, Choice]:
    """Checks the arguments of :func:`param_groups`, and returns what they choose for each parameter
    that is not frozen."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}, expected a torch.nn.Module")
    if lr_multipliers and lr is None:
        raise ValueError("lr_multipliers needs lr=, the learning rate that they multiply")
    _expect_finite(weight_decay=weight_decay, lr=lr or 0.0)
    chosen = choices([model], no_decay, lr_multipliers)
    trained = {param: choice for param, choice in chosen.items() if param.requires_grad}
    if not trained:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient")
    return trained


def choices(
    models: Sequence[nn.Module],
    no_decay: Sequence[str],
    lr_multipliers: Mapping[str, float] | None,
    *,
    partial: bool = False,
) -> dict[nn.Parameter, Choice]:
    """Returns what is chosen for each parameter of the modules, in their order.

    Args:
        models, no_decay, lr_multipliers: as for :func:`param_groups`; patterns are searched for in
            the names of all modules' parameters, with and without the parts that wrappers add,
            except DistributedDataParallel's "module.".
        partial: other ranks have other modules, in which a pattern may be found.
    """
    expect_several(no_decay=no_decay)
    no_decay, multipliers = tuple(no_decay), dict(lr_multipliers or {})
    _expect_finite(**{f"lr_multipliers[{k!r}]": factor for k, factor in multipliers.items()})
    names, kinds = _names_and_kinds(models)
    plain = [pattern for pattern in no_decay if pattern not in KINDS]
    matches = {pattern: params_matching(pattern, names) for pattern in (*plain, *multipliers)}
    if not partial:
        expect_found(
            [pattern for pattern in matches if not matches[pattern]], chain(*names.values())
        )
    chosen: dict[nn.Parameter, Choice] = {}
    for param, its in names.items():
        spared = bool(kinds[param] & set(no_decay)) or any(param in matches[p] for p in plain)
        factor = next((multipliers[p] for p in multipliers if param in matches[p]), 1.0)
        chosen[param] = Choice(its[0], spared, float(factor))
    return chosen


def in_groups(
    params: Sequence[nn.Parameter],
    chosen: Mapping[nn.Parameter, Choice],
    lr: Any,
    keys: Mapping[nn.Parameter, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Returns param groups with what differs from the optimizer's arguments, or one empty group.

    Args:
        keys: further keys of a parameter's group, with hashable values.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for param in params:
        _, spared, factor = chosen.get(param, _NOTHING_CHOSEN)
        further = {} if keys is None else keys.get(param, {})
        key = (spared, factor, *further.items())
        group = groups.setdefault(key, {"params": [], **further})
        group["params"].append(param)
        if spared:
            group["weight_decay"] = 0.0
        if factor != 1.0:
            group["lr"] = lr * factor
    return list(groups.values()) or [{"params": []}]


def expect_several(**strings: Any) -> None:
    """Raises TypeError if a value is one string instead of a sequence of strings."""
    for name, value in strings.items():
        if isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, expected a sequence such as ({value!r},)")


def expect_found(unfound: Sequence[str], names: Iterable[str]) -> None:
    """Raises ValueError if there are patterns that were found in no name."""
    if unfound:
        every = list(names)
        near = {pattern: nearest(pattern, every) for pattern in unfound}
        raise ValueError(
            f"no parameter has a name with {unfound}; the nearest names are {near} (only "
            f"no_decay also knows {list(KINDS)})"
        )


def _expect_finite(**numbers: Any) -> None:
    expect_numbers(**numbers)
    for name, value in numbers.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"Invalid {name}: {value}, expected a finite number of 0 or more")


def _names_and_kinds(
    models: Sequence[nn.Module],
) -> tuple[dict[nn.Parameter, list[str]], dict[nn.Parameter, set[str]]]:
    """Returns every parameter's names, beginning with named_parameters()'s, and its kinds."""
    names: dict[nn.Parameter, list[str]] = {}
    kinds: dict[nn.Parameter, set[str]] = {}
    for param, its in places(models).items():
        names[param] = [name for place in its for name in place.names]
        kinds[param] = {kind for place in its for kind in kinds_of(place, param)}
    return names, kinds


class Place(NamedTuple):
    """A module that has a parameter, and the parameter's name in it."""

    module: nn.Module
    own_name: str  # in the module
    names: tuple[str, ...]  # in the model: with, and if they differ without, the parts of wrappers


def places(models: Sequence[nn.Module]) -> dict[nn.Parameter, list[Place]]:
    """Returns where each parameter is, in the order of the modules; a tied one is in several.

    Raises:
        ValueError: FullyShardedDataParallel has flattened the parameters.
    """
    found: dict[nn.Parameter, list[Place]] = {}
    modules = chain(*(model.named_modules(remove_duplicate=False) for model in models))
    for prefix, module in modules:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            whole = f"{prefix}.{name}" if prefix else name
            if is_flat(param):
                raise ValueError(
                    f"{whole} is flattened by FullyShardedDataParallel, which hides what it is: "
                    f"shard the model with torch.distributed.fsdp.fully_shard instead"
                )
            names = tuple(dict.fromkeys([whole, unwrapped(whole)]))
            found.setdefault(param, []).append(Place(module, name, names))
    return found


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Returns a parameter's shape in the model, of which this rank may have a part.

    DeepSpeed's zero.Init leaves a tensor without elements, and the shape as ``ds_shape``.
    """
    return tuple(getattr(param, "ds_shape", param.shape))


def kinds_of(place: Place, param: Tensor) -> Iterator[str]:
    """Yields those of :data:`KINDS` that a parameter is in one of its modules."""
    module, name, shape = place.module, place.own_name, whole_shape(param)
    long = sum(length > 1 for length in shape)
    named_norm = _NORM_IN_NAME.search(type(module).__name__) and long <= 1
    if isinstance(module, _NORMS) or named_norm:
        yield "norm"
    if _BIAS.search(name):
        yield "bias"
    if len(shape) < 2:
        yield "vector"
    if isinstance(module, EMBEDDING_CLASSES):
        yield "embedding"


def params_matching(pattern: str, names: Mapping[Any, Sequence[str]]) -> set[Tensor]:
    """Returns the parameters with a name in which the pattern is found.

    Raises:
        ValueError: the pattern is not a regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return {param for param, its in names.items() if any(map(compiled.search, its))}
