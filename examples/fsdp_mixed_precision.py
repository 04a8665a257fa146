"""Trains one 16-bit model under FSDP2 in three ways, side by side:

    python examples/fsdp_mixed_precision.py                           # starts two ranks itself
    torchrun --nproc-per-node=4 examples/fsdp_mixed_precision.py --dtype float16

One of them moves the optimizer's state to the host and back between steps, as reinforcement
learning does to make room for generating samples, and is saved and resumed half-way: it ends with
the same bits as without. docs/mixed_precision.md explains the modes.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import fingerprint
from config import JobConfig, load_config
from data import TrainingData, load_text, training_data
from launch import gloo_ranks, start_ranks
from model import Transformer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR
from train import mean_over_ranks, next_byte_loss

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, load_fsdp_optimizer, offload_fsdp_optimizer
from torchopt_ext.mixed_precision import load_checkpoint, save_checkpoint

JOB = Path(__file__).with_name("demo.toml")
RANKS = 2  # when started without torchrun
WARM_UP = 3  # steps that are not timed: they create state

FUSED, OFFLOADED, TORCH = "FusedAdamW", "FusedAdamW, offloaded and resumed", "torch's AdamW"
WAYS = (FUSED, OFFLOADED, TORCH)

TITLE = """
{parameters:,} {dtype} parameters on {ranks} ranks, {steps} steps. Loss: bits per byte in the last
step. Times of the optimizer's step: medians of rank 0.

way                                     loss  skipped  loss scale  grad norm  optimizer ms\
"""
ROW = "{name:34}{loss:10.5f}{skipped:9}{scale:12g}{norm:11.3f}{step:14.1f}"


@dataclass
class Way:
    """A sharded model with an optimizer of its own, and what was measured of them."""

    name: str
    model: Transformer
    optimizer: FSDPadaptOptimizer
    warm_up: LinearLR
    data: TrainingData
    loss: float = math.nan
    step_ms: list[float] = field(default_factory=list)

    def step(self) -> None:
        loss = next_byte_loss(self.model, self.data.next_batch())
        self.optimizer.backward(loss)
        if self.name == OFFLOADED:
            load_fsdp_optimizer(self.optimizer)
        dist.barrier()  # so that no rank waits for one that is still in another way's step
        start = time.perf_counter()
        stepped = self.optimizer.step()
        self.step_ms.append(1e3 * (time.perf_counter() - start))
        if self.name == OFFLOADED:
            offload_fsdp_optimizer(self.optimizer)
        if stepped:  # asking would wait for a GPU
            self.warm_up.step()
        self.loss = mean_over_ranks(loss)

    def row(self) -> str:
        return ROW.format(
            name=self.name,
            loss=self.loss,
            skipped=int(self.optimizer.skipped_steps),
            scale=self.optimizer.loss_scale.item(),
            norm=self.optimizer.grad_norm.item(),
            step=statistics.median(self.step_ms[WARM_UP:] or self.step_ms),
        )

    def sha256(self) -> str:
        """Of the weights and of what they are rounded from, gathered from all ranks."""
        masters = self.optimizer.state_dict()["flat_fp32_weights"][0]
        weights = {name: whole(p) for name, p in self.model.named_parameters()}
        return fingerprint(weights, {str(i): whole(w) for i, w in enumerate(masters)})


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def build(name: str, config: JobConfig, text: Tensor, dtype: torch.dtype) -> Way:
    """One of WAYS before its first step."""
    job = config.training
    torch.manual_seed(job.seed)  # the ranks' weights are equal before they are sharded
    model = Transformer(**vars(config.model), max_seq_len=job.seq_len).to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    bases: dict[str, Callable[..., Any]] = {TORCH: torch.optim.AdamW}
    base = bases.get(name, FusedAdamW)(
        model.parameters(), lr=config.optimizer.lr, eps=config.optimizer.eps, fused=True
    )
    optimizer = FSDPadaptOptimizer(base, clip_grad_norm=config.optimizer.max_grad_norm)
    data = training_data(text, job)
    warm_up = LinearLR(optimizer, 0.1, total_iters=config.lr_scheduler.warmup_steps)
    return Way(name, model, optimizer, warm_up, data)


def resumed(way: Way, folder: str, config: JobConfig, text: Tensor, dtype: torch.dtype) -> Way:
    """A new model and optimizer that go on where ``way`` is; loading sets the weights, too."""
    save_checkpoint(way.optimizer, folder)
    other = build(way.name, config, text, dtype)
    load_checkpoint(other.optimizer, folder)
    other.warm_up.load_state_dict(way.warm_up.state_dict())
    other.data.load_state_dict(way.data.state_dict())
    return other


def check(ways: dict[str, Way]) -> str:
    """Says that moving and resuming changed nothing.

    Raises:
        RuntimeError: it did, or the bases' losses differ by more than rounding explains.
    """
    one, other = ways[FUSED].sha256(), ways[OFFLOADED].sha256()
    if one != other:
        raise RuntimeError(f"weights and masters are {other}, expected {one}")
    if not math.isclose(ways[FUSED].loss, ways[TORCH].loss, rel_tol=2e-2):
        raise RuntimeError(f"losses differ: {ways[FUSED].loss} and {ways[TORCH].loss}")
    return f"with and without moving its state and a resume half-way: the same sha256, {one[:16]}"


def train(steps: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # each rank has a core
    config = load_config(JOB)
    text, _ = load_text()
    ways = {name: build(name, config, text, dtype) for name in WAYS}
    shared = [TemporaryDirectory().name]
    dist.broadcast_object_list(shared)
    for step in range(steps):
        if step == steps // 2:
            folder = str(Path(shared[0]) / "checkpoint")
            ways[OFFLOADED] = resumed(ways[OFFLOADED], folder, config, text, dtype)
        for way in ways.values():
            way.step()
    lines = [way.row() for way in ways.values()]
    lines += ["", check(ways)]
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in ways[FUSED].model.parameters())
        title = TITLE.format(
            parameters=parameters,
            dtype=str(dtype).removeprefix("torch."),
            ranks=dist.get_world_size(),
            steps=steps,
        )
        print("\n".join([title, *lines]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # not under torchrun
        return start_ranks(RANKS)
    with gloo_ranks():
        train(args.steps, getattr(torch, args.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
