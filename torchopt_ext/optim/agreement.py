"""Agreement of ranks that share matrices: on a step, and on which matrices have a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchopt_ext.optim.owners import number_of
from torchopt_ext.state.collective import all_gather, all_gather_json, comm_device, compared
from torchopt_ext.state.params import named_group_params, params_of

_WHAT = "agreeing on the step of matrices that ranks share"


def agree_on_matrices(
    optimizers: Sequence[Any], *, rejects: bool = False, waits: bool = True
) -> None:
    """Makes the ranks that share matrices agree that all make the step, before its norm.

    One small collective for each group of ranks; another if they differ. On a GPU it waits for the
    device. The first agreement also connects the ranks.

    Args:
        optimizers: :class:`torchopt_ext.optim.planned.PlannedStep`, with this step's gradients.
        rejects: this rank rejects the step, and the others are to raise.
        waits: for the other ranks, which may never come if this rank's closure has raised.

    Raises:
        RuntimeError: a rank rejects the step, gradients are missing on some ranks, or ranks have
            other matrices or settings. All ranks of the group raise.
    """
    groups = dict.fromkeys(group for o in optimizers for group in o._exchange_groups.values())
    if not waits:
        for group in groups:
            tensor = torch.tensor([int(rejects), 0, len(groups)]).to(comm_device(group))
            gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, tensor, group=group, async_op=True)
        return
    problems, crossed = [], []
    for group in groups:
        number = 0 if rejects else _digest(optimizers, group)
        rejecting, numbers, crossing = _gathered(group, int(rejects), number, len(groups))
        if max(crossing) > 1:
            crossed.append(group)
        if any(rejecting):
            problems.append(_rejected(group, rejecting))
        elif len(set(numbers)) > 1:
            problems.append(_difference(optimizers, group))
    for group in crossed:  # ranks of another group raise, which others of this one do not know
        (rejecting,) = _gathered(group, int(rejects or bool(problems)))
        if any(rejecting):
            problems.append(_rejected(group, rejecting))
    if problems and not rejects:
        raise RuntimeError(problems[0])
    for optimizer in () if rejects else optimizers:
        has = _has_gradient(optimizer, *groups)
        optimizer._exchangers.present = {number for number, it_has in has.items() if it_has}
        optimizer._exchangers.connect()


def _gathered(group: Any, *numbers: int) -> list[list[int]]:
    """Returns the numbers of all ranks: a list of the first, of the second, and so on."""
    by_rank = all_gather(torch.tensor(numbers), group, _WHAT)
    return [list(map(int, column)) for column in torch.stack(by_rank, 1)]


def _rejected(group: Any, rejecting: list[int]) -> str:
    rank = dist.get_process_group_ranks(group)[rejecting.index(1)]
    return f"rank {rank} rejected the step: the error there says why"


def _has_gradient(optimizer: Any, *groups: Any) -> dict[int, bool]:
    """Returns whether parameters that ranks of the groups share have a gradient, by number."""
    params, shared = params_of(optimizer), optimizer._exchange_groups
    has = [
        (number_of(params[at], at), params[at].grad is not None)
        for at, group in shared.items()
        if group in groups
    ]
    return {number: (number, True) in has for number, _ in has}


def _digest(optimizers: Sequence[Any], group: Any) -> int:
    held = [[o._exchangers.digests.get(group), _has_gradient(o, group)] for o in optimizers]
    return compared(held)


def _difference(optimizers: Sequence[Any], group: Any) -> str:
    """Returns how the ranks of a group differ; all of them call this."""
    has = {}
    for number, optimizer in enumerate(optimizers):
        named = enumerate(named_group_params(optimizer))
        names = {number_of(param, at): name for at, (_, _, name, param) in named}
        for position, it_has in _has_gradient(optimizer, group).items():
            numbered = f"{position} of optimizer {number}" if number else f"{position}"
            has[names[position] or numbered] = it_has
    by_rank = all_gather_json(has, group, _WHAT)
    for name in has:
        having = [rank for rank, its in enumerate(by_rank) if its.get(name)]
        if 0 < len(having) < len(by_rank):
            ranks = [dist.get_process_group_ranks(group)[rank] for rank in having]
            return (
                f"parameter {name!r} has a gradient on ranks {ranks} only, of {len(by_rank)} that "
                "share its matrices: expected all or none"
            )
    return (
        f"the {len(by_rank)} ranks that share matrices have other parameters, groups or settings "
        "of Muon: expected the same on all"
    )
