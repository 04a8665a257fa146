"""The parameters of optimizers, with their names."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchopt_ext.state.masters import has_low_bits
from torchopt_ext.state.storage import SIXTEEN_BIT


def params_of(*optimizers: Any) -> list[Any]:
    """Returns all parameters of optimizers, in the order of their groups."""
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


def named_group_params(optimizer: Any) -> Iterator[tuple[int, dict[str, Any], str, Tensor]]:
    """Yields (group index, group, name or "", parameter) of every parameter, in order."""
    by_group: Sequence[Sequence[str]] = getattr(optimizer, "parameter_names", ())
    for index, group in enumerate(optimizer.param_groups):
        count = len(group["params"])
        same = index < len(by_group) and len(by_group[index]) == count
        names = group.get("param_names") or (by_group[index] if same else [""] * count)
        for name, param in zip(names, group["params"], strict=True):
            yield index, group, name, param


def named_params(optimizer: Any) -> list[tuple[str, Tensor]]:
    """Returns the name or "" and the parameter of every parameter, in order."""
    return [(name, param) for _, _, name, param in named_group_params(optimizer)]


def find_param(
    optimizer: Any, param: Tensor | str, named: Iterable[tuple[str, Tensor]] | None = None
) -> tuple[str, Tensor]:
    """Returns the name or "" and the parameter that is ``param``, or has this name.

    Args:
        named: the parameters with their names, by default those that the groups have.

    Raises:
        TypeError: ``param`` is neither a parameter nor a name.
        ValueError: there is none.
    """
    for name, own in named_params(optimizer) if named is None else named:
        if own is param or (isinstance(param, str) and name == param):
            return name, own
    if not isinstance(param, Tensor | str):
        raise TypeError(f"param is {param!r:.200}, expected a parameter or its name")
    what = repr(param) if isinstance(param, str) else f"of shape {tuple(param.shape)}"
    raise ValueError(f"{type(optimizer).__name__} has no parameter {what}")


def take_replaced(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    """Removes state of step 0 of parameters that are in no group any more.

    Frameworks replace parameters in groups, as Accelerate does for FSDP2 (accelerate/utils/
    fsdp_utils.py, fsdp2_switch_optimizer_parameters). They know no state before the first step.

    Returns:
        The entries that are not made again, since masters hold more than their parameters.
    """
    ids = set(map(id, params_of(optimizer)))
    gone = [p for p in optimizer.state if id(p) not in ids and isinstance(p, Tensor)]
    gone = [p for p in gone if optimizer.state[p] and optimizer.state[p].get("step", 1) == 0]
    taken = {param: optimizer.state.pop(param) for param in gone}
    return {param: entry for param, entry in taken.items() if has_low_bits(param, entry)}


def drop_replaced(optimizer: Any) -> None:
    """Drops what :func:`take_replaced` removes.

    Raises:
        RuntimeError: masters would be lost, because the parameters have no other state.
    """
    if (lost := take_replaced(optimizer)) and any(
        p.requires_grad and p.dtype in SIXTEEN_BIT and not optimizer.state.get(p)
        for p in params_of(optimizer)
    ):
        optimizer.state.update(lost)
        raise RuntimeError(
            f"{len(lost)} parameters were replaced in the groups after refresh_masters(from_=...) "
            f"had set their masters, which would be lost: call it again for the parameters that "
            f"replace them, after the model was sharded or wrapped (Accelerate's prepare)"
        )
