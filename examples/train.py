"""Trains a byte-level transformer with this project's optimizer and schedule, under torchrun:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/train.py \
        --job examples/demo.toml --out out/run

Goes on from the newest complete checkpoint in the output folder, where there is one, and then ends
with the same bits as a run that was never interrupted.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpoint import fingerprint, newest_checkpoint, step_folder
from config import JobConfig, load_config
from data import load_text, training_data, windows
from launch import gloo_ranks
from model import Transformer
from step_time import compare_step_times
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from torchopt_ext.containers import build_lr_schedulers, build_optimizers


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy in bits per byte over every next byte of tokens [batch, seq_len + 1]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / math.log(2)


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def validation_batches(text: Tensor, config: JobConfig) -> list[Tensor]:
    """This rank's share of windows spread evenly over the held-out text, always the same ones."""
    held_out = windows(text, config.training.seq_len)
    batch_size, world_size = config.training.batch_size, dist.get_world_size()
    count = config.validation.batches * batch_size * world_size
    picks = torch.linspace(0, len(held_out) - 1, count).long()[dist.get_rank() :: world_size]
    return list(held_out[picks].long().split(batch_size))


def progress_bar(label: str, position: int, steps: int) -> "tqdm[Any]":
    """Rank 0's bar on stdout, drawn often on a terminal and seldom into a file."""
    return tqdm(
        desc=label,
        initial=position,
        total=steps,
        unit="step",
        file=sys.stdout,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stdout.isatty() else 10,
        disable=dist.get_rank() != 0,
    )


def train(config: JobConfig, out: Path, label: str) -> None:
    torch.manual_seed(config.training.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # each rank has a core

    # Model, optimizer, schedule and data: the parts of the job that a checkpoint holds.
    rank = dist.get_rank()
    train_text, held_out_text = load_text()
    data = training_data(train_text, config.training)
    validation = validation_batches(held_out_text, config)
    model = Transformer(**vars(config.model), max_seq_len=config.training.seq_len)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizers = build_optimizers([model], config)
    lr_schedulers = build_lr_schedulers(optimizers, config)
    [optimizer] = optimizers  # one, because the model is in one part

    job = {"model": model, "optimizer": optimizers, "lr_scheduler": lr_schedulers, "data": data}
    checkpoints = out / config.checkpoint.folder
    if newest := newest_checkpoint(checkpoints):
        dcp.load(job, checkpoint_id=newest)

    log = (out / "log.jsonl").open("a", buffering=1)  # line by line: a kill loses no finished line

    def record(event: str, **values: Any) -> None:
        if rank == 0:
            log.write(json.dumps({"event": event, "step": data.position, **values}) + "\n")

    @torch.no_grad()
    def validate() -> None:
        losses = torch.stack([next_byte_loss(model, tokens) for tokens in validation])
        record("validation", bits_per_byte=mean_over_ranks(losses.mean()))

    (out / f"rank-{rank}.pid").write_text(str(os.getpid()))
    record(
        "start",
        parameters=sum(p.numel() for p in model.parameters()),
        train_bytes=train_text.numel(),
        held_out_bytes=held_out_text.numel(),
    )

    if data.position == 0:
        validate()
    steps = config.training.steps
    bar = progress_bar(label, data.position, steps)
    while data.position < steps:
        optimizers.zero_grad()
        loss = next_byte_loss(ddp, data.next_batch())
        loss.backward()  # DDP averages the gradients over the ranks
        optimizers.step()  # norm, clipping and AdamW in two passes over the gradients
        [lr] = lr_schedulers.schedulers[0].get_last_lr()
        lr_schedulers.step()

        bits, grad_norm = mean_over_ranks(loss), optimizer.control.grad_norm.item()
        record("train", bits_per_byte=bits, lr=lr, grad_norm=grad_norm)
        bar.set_postfix_str(f"{bits:.2f} bits/byte", refresh=False)
        bar.update()
        if data.position % config.validation.freq == 0 or data.position == steps:
            validate()
        if data.position % config.checkpoint.interval == 0 or data.position == steps:
            dcp.save(job, checkpoint_id=step_folder(checkpoints, data.position))
    bar.close()
    sha256 = fingerprint(model.state_dict(), optimizers.state_dict())

    # The last batch's gradients are still there to measure with.
    options = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    times = compare_step_times(model, options, config.optimizer.max_grad_norm)
    record("end", sha256=sha256, step_milliseconds=times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="job file (TOML)")
    parser.add_argument("--out", type=Path, required=True, help="folder for log and checkpoints")
    parser.add_argument("--label", default="training", help="text before the progress bar")
    args = parser.parse_args()
    config = load_config(args.job)
    args.out.mkdir(parents=True, exist_ok=True)
    with gloo_ranks():
        train(config, args.out, args.label)


if __name__ == "__main__":
    main()
