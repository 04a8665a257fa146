"""Trains one model with its optimizer sharded in four ways, side by side:

    python examples/zero_ddp.py                           # starts two ranks itself
    torchrun --nproc-per-node=4 examples/zero_ddp.py --steps 40

The ways take turns, step by step, so that all meet the same noise. docs/zero.md explains them.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from config import JobConfig, load_config
from data import TrainingData, load_text, training_data
from launch import gloo_ranks, start_ranks
from model import Transformer
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from train import mean_over_ranks, next_byte_loss

from torchopt_ext import FusedAdamW
from torchopt_ext.statedict.dcp import load
from torchopt_ext.zero import ZeroRedundancyOptimizer, reduce_scatter_hook

JOB = Path(__file__).with_name("demo.toml")
RANKS = 2  # when started without torchrun
WARM_UP = 3  # steps that are not timed: they create state, and DDP decides on its buckets

TORCH = "DDP, torch's class"
GREEDY = "DDP, greedy"
HOOK = "DDP, balanced, reduce_scatter_hook"
SHARDED = "balanced, sharded_gradients"
WAYS = (TORCH, GREEDY, HOOK, SHARDED)

# What a rank sends in a step, in units of (ranks - 1) / ranks of the parameters' bytes: an
# all-reduce is two, a reduce-scatter one, and so is the return of the updated parameters.
UNITS_SENT = {TORCH: 3, GREEDY: 3, HOOK: 2, SHARDED: 2}

TITLE = """
{parameters:,} parameters on {ranks} ranks, {steps} steps. Loss: bits per byte in the last step.
Times: medians of rank 0. State, and gradients kept after the step: the most of any rank.
Sent: computed, what one rank sends in a step.

way                                      loss   step ms  clip+step ms  state MB  grads MB  sent MB\
"""
ROW = "{name:36}{loss:9.5f}{step:10.1f}{clip_step:14.1f}{state:10.3f}{grads:10.3f}{sent:9.3f}"


@dataclass
class Way:
    """A model with an optimizer of its own, and what was measured of them.

    Attributes:
        forward: the model, or DDP around it.
        clip: what comes before the optimizer's step.
    """

    name: str
    model: nn.Module
    forward: nn.Module
    zero: Any
    clip: Callable[[], object]
    data: TrainingData
    loss: float = math.nan
    step_ms: list[float] = field(default_factory=list)
    clip_step_ms: list[float] = field(default_factory=list)

    def step(self) -> None:
        tokens = self.data.next_batch()
        dist.barrier()  # so that no rank waits for one that is still in another way's step
        start = time.perf_counter()
        self.zero.zero_grad()
        loss = next_byte_loss(self.forward, tokens)
        loss.backward()
        backward_done = time.perf_counter()
        self.clip()
        self.zero.step()
        end = time.perf_counter()
        self.step_ms.append(1e3 * (end - start))
        self.clip_step_ms.append(1e3 * (end - backward_done))
        self.loss = mean_over_ranks(loss)

    def row(self) -> str:
        params = list(self.model.parameters())
        # A balanced optimizer steps tensors of its own: this rank's parts of the parameters.
        stepped = [p for group in self.zero.optim.param_groups for p in group["params"]]
        state = [v for entry in self.zero.optim.state.values() for v in entry.values()]
        grads = [p.grad for p in {*params, *stepped} if p.grad is not None]
        most = torch.tensor([sum(t.nbytes for t in state), sum(t.nbytes for t in grads)])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        ranks = dist.get_world_size()
        sent = UNITS_SENT[self.name] * (ranks - 1) / ranks * sum(p.nbytes for p in params)
        return ROW.format(
            name=self.name,
            loss=self.loss,
            step=statistics.median(self.step_ms[WARM_UP:] or self.step_ms),
            clip_step=statistics.median(self.clip_step_ms[WARM_UP:] or self.clip_step_ms),
            state=most[0].item() / 1e6,
            grads=most[1].item() / 1e6,
            sent=sent / 1e6,
        )


def build(name: str, config: JobConfig, text: Tensor) -> Way:
    """One of WAYS before its first step."""
    job, max_norm = config.training, config.optimizer.max_grad_norm
    torch.manual_seed(job.seed)  # without DDP nothing else makes the ranks' weights equal
    model = Transformer(**vars(config.model), max_seq_len=job.seq_len)
    data = training_data(text, job)
    forward: nn.Module = model
    if name != SHARDED:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    adamw: dict[str, Any] = {"lr": config.optimizer.lr, "eps": config.optimizer.eps}
    if name == TORCH:
        zero: Any = TorchZero(model.parameters(), torch.optim.AdamW, **adamw, fused=True)
        clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), max_norm)
        return Way(name, model, forward, zero, clip, data)
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        FusedAdamW,
        partition="greedy" if name == GREEDY else "balanced",
        sharded_gradients=name == SHARDED,
        **adamw,
        max_grad_norm=max_norm,
    )
    if isinstance(forward, DistributedDataParallel) and name == HOOK:
        forward.register_comm_hook(None, reduce_scatter_hook(zero))
    return Way(name, model, forward, zero, lambda: None, data)


def check_losses(ways: list[Way]) -> None:
    """The ways differ in where they compute, and torch's also in how it rounds.

    Raises:
        RuntimeError: losses differ by more than rounding explains.
    """
    torchs, *ours = [way.loss for way in ways]
    for loss in ours:
        # Two ranks' gradients have one sum; those of more may be added in another order.
        if not math.isclose(loss, ours[0], rel_tol=1e-4):
            raise RuntimeError(f"the losses of our ways differ: {ours}")
        if not math.isclose(loss, torchs, rel_tol=1e-2):
            raise RuntimeError(f"our loss is {loss}, torch's {torchs}")


def save_and_resume(sharded: Way, folder: Path, config: JobConfig, text: Tensor) -> str:
    """Saves one way and resumes from it with another partition; both then train on alike."""
    saved = {"model": sharded.model.state_dict(), "optimizer": sharded.zero}
    dcp.save(saved, checkpoint_id=folder)
    resumed = build(GREEDY, config, text)
    loaded = {"model": resumed.model.state_dict(), "optimizer": resumed.zero}
    load(loaded, checkpoint_id=folder)
    resumed.data.load_state_dict(sharded.data.state_dict())
    for _ in range(2):  # the second step's loss depends on the optimizer's state
        for way in (sharded, resumed):
            way.step()
    if not math.isclose(resumed.loss, sharded.loss, rel_tol=1e-4):
        raise RuntimeError(f"the resumed loss is {resumed.loss}, expected {sharded.loss}")
    return (
        f"'{sharded.name}' saved to {folder} and resumed as '{resumed.name}': two steps later the\n"
        f"loss is {resumed.loss:.5f}, and {sharded.loss:.5f} without the interruption"
    )


def train(steps: int, checkpoint: Path | None) -> None:
    torch.set_num_threads(1)  # each rank has a core
    config = load_config(JOB)
    text, _ = load_text()
    ways = [build(name, config, text) for name in WAYS]
    for _ in range(steps):
        for way in ways:
            way.step()
    lines = [way.row() for way in ways]  # on every rank: a row asks all of them
    check_losses(ways)
    if checkpoint is not None:
        lines += ["", save_and_resume(ways[WAYS.index(SHARDED)], checkpoint, config, text)]
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in ways[0].model.parameters())
        title = TITLE.format(parameters=parameters, ranks=dist.get_world_size(), steps=steps)
        print("\n".join([title, *lines]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and resume from")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # not under torchrun
        return start_ranks(RANKS)
    with gloo_ranks():
        train(args.steps, args.checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
