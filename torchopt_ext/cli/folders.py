"""The files that trainers write into the folder of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from torchopt_ext.cli.model_files import only_file
from torchopt_ext.cli.terminal import CommandError

METADATA = ".metadata"
"""The file of a folder of torch.distributed.checkpoint."""
_STATES = (".pt", ".bin", ".safetensors")
_WEIGHTS = (
    *("*.safetensors.index.json", "*.safetensors", "pytorch_model*.bin", "pytorch_model_fsdp*"),
)


def optimizer_in(folder: Path) -> Path:
    """Returns what holds the optimizer in a folder: the folder itself if it is DCP's, or a file.

    Without an optimizer it returns the model's weights.
    """
    if (folder / METADATA).exists():
        return folder
    if found := only_file(folder, ["optimizer*"], "optimizers", _is_state):
        return found
    if (folder / "zero_to_fp32.py").exists() or any(folder.glob("global_step*")):
        raise CommandError(
            f"{folder} is a checkpoint of DeepSpeed, whose shards are not read: its "
            f"zero_to_fp32.py writes the weights"
        )
    if inside := _checkpoints_in(folder):
        newest = max(inside, key=os.path.getmtime)
        raise CommandError(
            f"{folder} is a folder of checkpoints: name one of them, such as {newest}"
        )
    return weights_in(folder)


def weights_in(folder: Path) -> Path:
    """Returns what holds the model's weights in a folder; the folder itself if it is DCP's."""
    if (folder / METADATA).exists():
        return folder
    found = only_file(
        folder, _WEIGHTS, "files of weights", lambda file: not file.name.startswith("optimizer")
    )
    if found is None:
        raise CommandError(
            f"{folder} has no checkpoint: it lacks {METADATA}, optimizer.pt, optimizer.bin and "
            f"*.safetensors"
        )
    return found


def _is_state(file: Path) -> bool:
    return file.suffix in _STATES if file.is_file() else (file / METADATA).exists()


def _checkpoints_in(folder: Path) -> list[Path]:
    inside = [file.parent for file in folder.glob(f"*/{METADATA}")]
    inside += [file.parent for file in folder.glob("*/optimizer*") if _is_state(file)]
    return [*inside, *folder.glob("*.ckpt")]


def made_by(file: Path) -> str | None:
    """Returns which library wrote the folder that a file lies in, by the other files there."""
    beside = file.parent
    if (beside / "trainer_state.json").exists():
        return "Hugging Face's Trainer"
    if any(beside.glob("random_states_*.pkl")):
        return "Accelerate"
    return None


def beside(file: Path) -> list[str]:
    """Returns the names of the other files of a trainer's folder."""
    return sorted(other.name for other in file.parent.iterdir() if other.name != file.name)
