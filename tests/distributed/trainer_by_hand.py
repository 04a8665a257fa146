"""Trains the job in the arguments on one process, by a loop without a Trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).parents[2]))  # examples/

from torchopt_ext import FusedAdamW
from torchopt_ext.ops import lr_factor
from torchopt_ext.trainer.data import build_dataloader
from torchopt_ext.trainer.load_config import load_config


def main() -> None:
    from examples.byte_llama import ByteLlama, ByteLlamaArgs

    torch.set_num_threads(1)
    config = load_config(sys.argv[1:])
    training, warmup = config.training, config.lr_scheduler.warmup_steps
    args = ByteLlamaArgs()
    args.update_from_config(config, None)
    model = ByteLlama.from_model_args(args)
    model.init_weights()
    optimizer = FusedAdamW(
        model.parameters(),
        lr=8e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        max_grad_norm=training.max_norm,
    )
    schedule = LambdaLR(
        optimizer,
        lambda step: lr_factor(
            step, warmup_steps=warmup, stable_steps=0, decay_steps=training.steps - warmup
        ),
    )
    data = build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=None, job_config=config)
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, (inputs, labels) in zip(range(1, training.steps + 1), data, strict=False):
            optimizer.zero_grad()
            logits = model(inputs["input"])
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))
            loss.backward()
            optimizer.step()
            schedule.step()
            line = {
                "step": step,
                "loss_metrics/global_avg_loss": loss.item(),
                "grad_norm": optimizer.control.grad_norm.item(),
            }
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
