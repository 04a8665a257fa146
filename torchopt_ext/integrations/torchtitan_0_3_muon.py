"""Muon in torchtitan 0.3's configurations: groups of its DistMuon, and the matrices of AdamW's."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchtitan.distributed.flex_shard import BlockShard

from torchopt_ext.optim import FusedAdam, FusedMuon, FusedOptimizer
from torchopt_ext.optim.groups import in_groups
from torchopt_ext.optim.muon_routing import keys_by_route
from torchopt_ext.optim.options import DECAY
from torchopt_ext.state.algorithms import SHARED, algorithm_of

DIST_MUON = "DistMuon"
_LAYOUTS = "compute_sharding_by_fqn"
_PLACES = (_LAYOUTS, "bucket_configs")
"""DistMuon's arguments that say where and when matrices are orthogonalized."""

Classes = Mapping[str, type[FusedOptimizer] | None]


def without_places(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the optimizers of a name that concern their results."""
    return {k: v for k, v in arguments.items() if name != DIST_MUON or k not in _PLACES}


def keys_by_matrix(
    config: Any,
    classes: Classes,
    model_parts: Sequence[nn.Module],
    matched: Sequence[Sequence[Mapping[str, nn.Parameter]]],
) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns the keys that groups of matrices have beside the configured ones.

    These are ``num_heads`` for DistMuon's blocks of rows, and ``algorithm`` for hidden matrices of
    AdamW's groups if ``config.muon`` moves them to Muon.

    Raises:
        ValueError: DistMuon has no layout for a parameter, or its blocks are not rows of a matrix;
            or no group has matrices that could move.
    """
    layouts = config.optimizer_factory_kwargs_by_name.get(DIST_MUON, {}).get(_LAYOUTS)
    moves = {name for name, cls in classes.items() if cls and issubclass(cls, FusedAdam)}
    moves = moves if config.muon is not None else set()
    if config.muon is not None and not moves:
        raise ValueError(
            f"muon would have no effect: the param_groups name {[*classes]}, none of which is "
            "stepped by FusedAdamW or FusedAdam"
        )
    routed = keys_by_route(model_parts, (), (), {}, partial=True) if moves else {}
    keys: dict[nn.Parameter, dict[str, Any]] = {}
    for part in matched:
        for asked, named in zip(config.param_groups, part, strict=True):
            for fqn, param in named.items():
                if asked.optimizer_name == DIST_MUON and layouts is not None:
                    keys[param] = _blocks(layouts, fqn, param)
                elif asked.optimizer_name in moves and "algorithm" not in routed[param]:
                    keys[param] = {"algorithm": "muon", **routed[param]}
    return keys


def divided(
    config: Any,
    asked: Any,
    cls: type[FusedOptimizer],
    named: Mapping[str, nn.Parameter],
    keys: Mapping[nn.Parameter, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Returns the param groups of one of our classes that a configured group becomes.

    Groups of Muon have None under "fused", which DistMuon requires not to be true in checkpoints.
    """
    names = {param: fqn for fqn, param in named.items()}
    groups = []
    for group in in_groups([*names], {}, None, keys):
        group["param_names"] = [names[param] for param in group["params"]]
        options = asked.optimizer_kwargs
        if "algorithm" in group:  # moved from AdamW
            kept = {k: v for k, v in options.items() if k in (*SHARED, *DECAY)}
            options = {"adjust_lr_fn": "match_rms_adamw", **kept, **config.muon}
        elif asked.optimizer_name == DIST_MUON and not options.get("fused"):
            options = {k: v for k, v in options.items() if k != "fused"}
        made = {"algorithm": "muon" if cls is FusedMuon else "adam", **group, **options}
        fused = None if algorithm_of(made).steps_matrices else True
        groups.append({**group, "fused": fused, "foreach": False, **options})
    return groups


def _blocks(layouts: Mapping[str, Any], fqn: str, param: nn.Parameter) -> dict[str, Any]:
    """Returns the key for the blocks of rows that a ComputeLayout declares. Its other shardings
    only place whole matrices."""
    if fqn not in layouts:
        raise ValueError(f"{_LAYOUTS} of {DIST_MUON} has no layout for {fqn!r}")
    shardings = layouts[fqn].shardings_by_mesh_axis.values()
    blocks = {sharding for sharding in shardings if isinstance(sharding, BlockShard)}
    if not blocks:
        return {}
    first, shape = min(blocks, key=repr), tuple(param.shape)
    fits = len(shape) == 2 and first.dim in (0, -2) and shape[0] % first.block_size == 0
    if len(blocks) > 1 or not fits:
        raise ValueError(
            f"{fqn!r} of shape {shape} has {sorted(blocks, key=repr)} in {_LAYOUTS}, expected a "
            "matrix, and blocks of one number of rows that divides its rows"
        )
    return {"num_heads": shape[0] // first.block_size}
