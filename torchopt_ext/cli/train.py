"""python -m torchopt_ext train: trains, as one process or as one of torchrun's ranks."""

import gc
import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

from torchopt_ext.trainer.checkpoint_files import steps
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.load_config import check_supported, load_config
from torchopt_ext.trainer.process import record
from torchopt_ext.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def main(args: list[str]) -> int:
    """Trains, and returns the exit code.

    The code is 0 if training is complete or out of data, 2 for a wrong configuration, and 143 after
    SIGTERM, as a shell reports it for a process that the signal ended.
    """
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(format=f"%(asctime)s [{rank}] %(levelname)s %(message)s")
    logging.getLogger("torchopt_ext").setLevel(logging.WARNING if rank else logging.INFO)
    try:
        return _train(args) or 0
    except ConfigError as error:
        print(f"torchopt_ext train: {error}", file=sys.stderr)
        return 2


def _check_checkpoint(job_config: JobConfig) -> None:
    """Rejects a job that cannot save or load what it should, before anything is built."""
    checkpoint = job_config.checkpoint
    world_size = os.environ.get("WORLD_SIZE", "1")
    if checkpoint.create_seed_checkpoint and world_size != "1":
        raise ConfigError(
            "checkpoint.create_seed_checkpoint writes the undivided model, which needs one "
            f"process: WORLD_SIZE is {world_size}"
        )
    folder = Path(job_config.job.dump_folder, checkpoint.folder)
    step, path = checkpoint.load_step, checkpoint.initial_load_path
    if step != -1:
        if not (saved := folder / f"step-{step}").is_dir():
            raise ConfigError(f"checkpoint.load_step is {step}, but there is no {saved}")
    elif path and not steps(folder):
        if not Path(path).is_dir():
            raise ConfigError(f"checkpoint.initial_load_path is {path}, which is not a folder")
        if saved_steps := steps(Path(path)):
            raise ConfigError(
                f"checkpoint.initial_load_path is {path}, a folder of checkpoints: name one of "
                f"them, such as {path}/step-{saved_steps[0]}"
            )


@record  # all of it, so that torchrun shows the message of a wrong setting, too
def _train(args: list[str]) -> int:
    job_config = load_config(args)
    check_supported(job_config)
    _check_checkpoint(job_config)
    trainer = Trainer(job_config)
    try:
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(0, force=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
    finally:
        trainer.close()
    status = 143 if trainer.stopped_by == "SIGTERM" else 0
    # Objects that hold a process group keep its threads, which cannot free collectives' tensors
    # after the interpreter has ended (pytorch#179291: SIGABRT).
    del trainer
    gc.collect()
    # Not after an error: other ranks may wait in a collective, and this call would also wait.
    dist.destroy_process_group()
    return status
