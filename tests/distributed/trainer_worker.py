"""Runs a job with the arguments of the command line.

The words "kill", a rank, a step and seconds may precede the arguments: the rank is killed when this
time has passed since the beginning of the step.

At the end every rank writes rank<n>.json in the job's folder: digests of its weights and optimizer
state, the step, and why training stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # examples/

from tests.support.ranks import digest
from torchopt_ext.trainer.load_config import load_config
from torchopt_ext.trainer.trainer import Trainer


def digest_of(values: dict[str, Any]) -> str:
    """Returns a digest of this rank's parts of all tensors, by name."""
    parts = [part for _, v in sorted(values.items()) for part in getattr(v, "shards", [v])]
    return digest(part for part in parts if isinstance(part, torch.Tensor))


def kill(trainer: Trainer, rank: int, step: int, seconds: float) -> None:
    next_batch = trainer.next_batch

    def begin(*args: Any) -> Any:
        if trainer.step == step and dist.get_rank() == rank:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return next_batch(*args)

    trainer.next_batch = begin  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    args = sys.argv[1:]
    killed = [args.pop(0) for _ in range(4)][1:] if args[0] == "kill" else []
    config = load_config(args)
    trainer = Trainer(config)
    if killed:
        kill(trainer, int(killed[0]), int(killed[1]), float(killed[2]))
    try:
        trainer.train()
    finally:
        trainer.close()
    weights = {k: v for part in trainer.model_parts for k, v in part.state_dict().items()}
    ended = {
        "step": trainer.step,
        "stopped_by": trainer.stopped_by,
        "weights": digest_of(weights),
        "optimizer": digest_of(trainer.optimizers.state_dict()),
    }
    folder = Path(config.job.dump_folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
