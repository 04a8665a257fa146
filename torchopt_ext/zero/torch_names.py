"""What torch's class has under private names that hooks, tests and users read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchopt_ext import _C
from torchopt_ext.zero.balanced import BalancedBuckets
from torchopt_ext.zero.overlap import BucketAssignment
from torchopt_ext.zero.whole import WholeTensors


class TorchNames:
    """Attributes of torch.distributed.optim.ZeroRedundancyOptimizer that tell the partition."""

    param_groups: list[dict[str, Any]]
    parts: WholeTensors | BalancedBuckets
    world_size: int
    _all_params: list[Tensor]
    _overlap_with_ddp: bool
    _bucket_assignments_per_rank_cache: list[dict[int, BucketAssignment]]

    def _partition_parameters(
        self, params_per_rank: Sequence[Sequence[Tensor]] | None = None
    ) -> list[list[dict[str, Any]]]:
        """Param groups of every rank; with ``params_per_rank``, after assigning them so."""
        if params_per_rank is not None:
            self._assign_groups(params_per_rank)
        return [
            [
                {**group, "params": per_rank[rank]}
                for group, per_rank in zip(self.param_groups, self.parts.params, strict=True)
            ]
            for rank in range(self.world_size)
        ]

    def _assign_groups(self, params_per_rank: Sequence[Sequence[Tensor]] | None) -> None:
        if params_per_rank is None:
            for group in self.param_groups:
                self.parts.add_group(group["params"])
            return
        assert not self.parts.params, (
            "Specifying `params_per_rank` should only be done when the parameters have not been "
            "partitioned yet"
        )
        if len(self.param_groups) != 1:
            raise RuntimeError(
                "Specifying `params_per_rank` only supports a single parameter group"
            )
        if len(params_per_rank) != self.world_size:
            raise ValueError("`params_per_rank` must have length equal to the world size")
        known, seen = set(self._all_params), set()
        for params in params_per_rank:
            for param in params:
                if param not in known:
                    raise ValueError(
                        "Passing a new parameter in `params_per_rank` that was not passed into the "
                        "ZeroRedundancyOptimizer constructor"
                    )
                if param in seen:
                    raise ValueError("`params_per_rank` has a parameter twice")
                seen.add(param)
        self.parts.add_group(self.param_groups[0]["params"], params_per_rank)

    @property
    def _param_to_rank(self) -> dict[Tensor, int]:
        return self.parts.owner

    @property
    def _param_to_index(self) -> dict[Tensor, int]:
        return {param: index for index, param in enumerate(self._index_to_param)}

    @property
    def _index_to_param(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _device_to_params_per_rank(self) -> dict[Any, list[list[Tensor]]]:
        assert isinstance(self.parts, WholeTensors), "parameters have no single owner"
        found: dict[Any, list[list[Tensor]]] = {}
        for (device, _), per_rank in self.parts.kinds().items():
            known = found.setdefault(device, [[] for _ in per_rank])
            for own, more in zip(known, per_rank, strict=True):
                own += more
        return found

    def _sync_params(self) -> None:
        self.parts.return_params()

    @property
    def _buckets(self) -> list[list[Tensor]]:
        return self.parts.buckets

    @property
    def _bucket_assignments_per_rank(self) -> list[dict[int, BucketAssignment]]:
        assert self._overlap_with_ddp, "DDP's buckets are assigned if `overlap_with_ddp=True`"
        return self._bucket_assignments_per_rank_cache

    @staticmethod
    def _sync_param_groups(
        src_param_groups: list[dict[Any, Any]], dst_param_groups: list[dict[Any, Any]]
    ) -> None:
        """Copies what groups say besides their parameters from one list of groups to another."""
        for source, target in zip(src_param_groups, dst_param_groups, strict=True):
            for key, value in source.items():
                if key not in ("params", "param_names"):
                    target[key] = value

    def _get_is_trainable_mask(self) -> bytes:
        """One byte for each parameter."""
        return _C.requires_grad(self._all_params)
