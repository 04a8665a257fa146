"""ParallelDims: how the ranks are divided among the kinds of parallelism."""

import warnings
from dataclasses import dataclass, field
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchopt_ext import _torch
from torchopt_ext.trainer.config import ConfigError, Parallelism

_SETTINGS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
_TOGETHER = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass
class ParallelDims:
    """Degrees of parallelism, whose product is the number of ranks.

    Interface and names are those of torchtitan 0.1 (torchtitan/distributed/parallel_dims.py).

    Args:
        dp_replicate: copies of the model: DDP, or with dp_shard the outer dimension of HSDP.
        dp_shard: ranks that shard a copy by FSDP; -1: all ranks that the other degrees leave.
        cp, tp, pp: ranks that shard a sequence (context parallelism), that shard a layer (tensor
            parallelism), and that split the layers (pipeline parallelism).
        enable_loss_parallel: whether tensor-parallel ranks each compute a part of the loss.

    Raises:
        ConfigError: The product of the degrees is not the world size, or a degree is less than 1.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    world_size: int
    enable_loss_parallel: bool
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, config: Parallelism, world_size: int) -> "ParallelDims":
        """Returns the degrees that a job's settings give this number of ranks."""
        degrees = {name: getattr(config, setting) for name, setting in _SETTINGS.items()}
        loss_parallel = not config.disable_loss_parallel
        return cls(**degrees, world_size=world_size, enable_loss_parallel=loss_parallel)

    def __post_init__(self) -> None:
        for name, setting in _SETTINGS.items():
            degree = getattr(self, name)
            if degree < 1 and not (name == "dp_shard" and degree == -1):
                least = "1 or more, or -1" if name == "dp_shard" else "1 or more"
                raise ConfigError(f"parallelism.{setting} is {degree}, expected {least}")
        if self.dp_shard == -1:
            others = self.dp_replicate * self.cp * self.tp * self.pp
            # If the other degrees do not divide the world size, the check of the product fails.
            self.dp_shard = max(self.world_size // others, 1)
        degrees = self.degrees()
        if prod(degrees.values()) != self.world_size:
            product = " * ".join(f"{name} {degree}" for name, degree in degrees.items())
            raise ConfigError(
                f"{product} = {prod(degrees.values())} ranks, but the world size is "
                f"{self.world_size}; the degrees are parallelism.{', .'.join(_SETTINGS.values())}"
            )
        self.dp_replicate_enabled = self.dp_replicate > 1
        self.dp_shard_enabled = self.dp_shard > 1
        self.cp_enabled = self.cp > 1
        self.tp_enabled = self.tp > 1
        self.pp_enabled = self.pp > 1
        self.dp_enabled = self.dp_replicate_enabled or self.dp_shard_enabled
        self.dp_cp_enabled = self.dp_enabled or self.cp_enabled
        self.fsdp_enabled = self.dp_shard_enabled or self.cp_enabled
        self.loss_parallel_enabled = self.tp_enabled and self.enable_loss_parallel
        self.non_data_parallel_size = self.cp * self.tp * self.pp

    def degrees(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Builds the mesh of all ranks. Every rank calls it, after the default process group.

        The mesh has the dimensions "pp", "dp_replicate", "dp_shard", "cp" and "tp" with a degree of
        more than 1, in this order; on one rank "dp_shard" of size 1. `get_mesh` knows more names,
        for several dimensions together: "dp", over which the data set is divided, "dp_shard_cp",
        over which FSDP shards parameters, and "dp_cp", over which the loss is averaged.
        """
        if self.cp_enabled and device_type != "cuda":
            # torch/distributed/tensor/experimental/_context_parallel/_attention.py shards only
            # CUDA's attention kernels. The CPU's kernel would raise in the first forward pass.
            raise ConfigError(
                f"parallelism.context_parallel_degree is {self.cp}, but torch's context parallel "
                f"has no attention for {device_type!r}: use 1, or training.device = 'cuda'"
            )
        sizes = {name: d for name, d in self.degrees().items() if d > 1} or {"dp_shard": 1}
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._meshes = {name: mesh[name] for name in sizes}
        for name, dims in _TOGETHER.items():
            if present := tuple(dim for dim in dims if dim in sizes):
                self._meshes[name] = _torch.flatten_mesh(mesh[present], name)
        return mesh

    def get_mesh(self, name: str) -> DeviceMesh:
        """Returns one dimension of the built mesh, or several dimensions together.

        world_mesh[name] is the same, but torch warns if the name stands for several dimensions.
        """
        if name not in self._meshes:
            raise ValueError(f"the mesh has no {name!r}, expected one of {list(self._meshes)}")
        return self._meshes[name]

    @property
    def meshes(self) -> list[DeviceMesh]:
        return list(self._meshes.values())

    def fsdp_mesh(self, world_mesh: DeviceMesh) -> DeviceMesh:
        """Returns fully_shard's mesh: [dp_shard_cp], or for HSDP [dp_replicate, dp_shard_cp]."""
        if not self.dp_replicate_enabled:
            return self.get_mesh("dp_shard_cp")
        with warnings.catch_warnings():
            # For one name get_mesh avoids the warning. For two names there is no other way.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return world_mesh["dp_replicate", "dp_shard_cp"]
