"""What ranks hold and move with a model, as plan's options say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor

from torchopt_ext.cli.tensors import DTYPES, Entry, Source, as_modules
from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.optim.estimate import RankBytes, estimate
from torchopt_ext.optim.fp32_moments import EMBEDDINGS, fp32_params, is_8_bit
from torchopt_ext.optim.muon_groups import muon_groups
from torchopt_ext.state.algorithms import ALGORITHMS, NAMES

Plans = dict[str, list[RankBytes]]
"""What each rank holds and moves, by sharding."""


def estimates(
    source: Source,
    options: Any,
    shardings: Iterable[str],
    done: Callable[[], None],
    **storage: Any,
) -> tuple[list[dict[str, Any]], Plans]:
    """Returns the model's param groups, and what ranks have with each sharding.

    Args:
        done: called after each sharding.
        storage: ``state_dtype`` and other arguments of :func:`estimate`.

    Raises:
        CommandError: the options do not go together, or not with the model.
    """
    plans = {}
    try:
        groups = groups_of(source, options)
        storage["fp32_moments"] = chosen_fp32(
            source.entries, options.fp32_moments, storage["state_dtype"]
        )
        for sharding in shardings:
            plans[sharding] = estimate(
                groups,
                sharding=sharding,
                world_size=options.world_size,
                grad_dtype=options.grad_dtype and DTYPES[options.grad_dtype],
                norm=not options.no_norm,
                ema_decay=options.ema_decay,
                ema_dtype=options.ema_dtype,
                **storage,
            )
            done()
    except (TypeError, ValueError) as error:
        raise CommandError(f"{source.name}: {error}") from error
    return groups, plans


def groups_of(source: Source, options: Any) -> list[dict[str, Any]]:
    """Returns param groups with all tensors: one, or for Muon those that muon_groups makes."""
    asked = {"amsgrad": options.amsgrad, "momentum": 0.9 * options.momentum}
    chosen = {key: value for key, value in asked.items() if value}
    if not ALGORITHMS[NAMES[options.algorithm]].steps_matrices:
        tensors = [entry.tensor for entry in source.entries]
        names = [entry.name for entry in source.entries]
        of_all = {"algorithm": options.algorithm, **chosen}
        return [{"params": tensors, "param_names": names, **of_all}]
    left = {entry.name: entry.tensor for entry in source.entries}
    if "" in left or len(left) < len(source.entries):
        raise CommandError(
            f"Muon's matrices are chosen by names and modules, which {source.name} does not have: "
            f"give --model, a file or --shapes gpt2"
        )
    if options.file is not None and source.model is None and options.not_muon is None:
        raise CommandError(
            f"{source.name} does not say which of its tensors are embeddings: name them, such as "
            f'--not-muon embed_tokens (or "" if there are none), or give its config.json'
        )
    made = muon_groups(
        source.model or as_modules(source.entries),
        adamw=options.not_muon or (),
        adamw_options={"algorithm": options.rest or "adamw", **chosen},
        quiet=True,
    )
    groups: list[dict[str, Any]] = []
    for group in made:
        names = [name for name, _ in group["params"]]
        group |= {"params": [*map(left.pop, names)], "param_names": names}
        if group["algorithm"] == "muon":
            group["algorithm"] = options.algorithm
        groups.append(group)
    return [*groups, {"params": [*left.values()], "param_names": [*left]}]  # the frozen ones


def chosen_fp32(
    entries: list[Entry], patterns: list[str] | None, state_dtype: Any
) -> Collection[Tensor]:
    """Returns the tensors that keep fp32 moments beside 8-bit moments."""
    if not is_8_bit(state_dtype):
        return ()
    named = [(entry.name, entry.tensor) for entry in entries]
    embeddings = [entry.tensor for entry in entries if entry.embedding]
    return fp32_params(named, EMBEDDINGS if patterns is None else patterns, embeddings)


def by_algorithm(groups: list[dict[str, Any]]) -> dict[str, list[Tensor]]:
    """Returns the trained tensors that each algorithm steps."""
    stepped: dict[str, list[Tensor]] = {}
    for group in groups:
        if trained := [p for p in group["params"] if p.requires_grad]:
            stepped.setdefault(group["algorithm"], []).extend(trained)
    return stepped


def fullest(ranks: list[RankBytes]) -> RankBytes:
    return max(ranks, key=lambda rank: rank.held)
