"""Writers of metrics: to the console, TensorBoard, a JSONL file, Weights & Biases."""

import json
import math
import os
import sys
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

from torchopt_ext.trainer.extras import import_extra


class MetricWriter:
    """Writes the metrics of one step at a time."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


_COLORS = ("31", "32", "38;2;180;60;0", "38;2;54;234;195", "34", "36", "35")
"""torchtitan's colors of a line's parts, as codes for a terminal."""


class Lines(MetricWriter):
    """Prints one line per step on standard output, on a terminal in colors."""

    def __init__(self, colored: bool) -> None:
        self._colored = colored

    def write(self, step: int, metrics: dict[str, float]) -> None:
        parts = parts_of(step, metrics)
        if self._colored:
            parts = [f"\033[{color}m{part}" for color, part in zip(cycle(_COLORS), parts)]
            parts[-1] += "\033[39m"
        print("  ".join(parts), flush=True)


class ProgressBar(MetricWriter):
    """A bar over all steps of the job, with the newest metrics. Log messages appear above it."""

    def __init__(self, steps: int) -> None:
        self._tqdm = import_extra("tqdm", "metrics.progress_bar").tqdm
        redirect = import_extra("tqdm.contrib.logging", "metrics.progress_bar")
        self._restore = ExitStack()
        self._restore.enter_context(redirect.logging_redirect_tqdm())
        self._steps = steps
        self._bar: Any = None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        shown = describe(metrics)
        if "loss" not in shown:
            self._tqdm.write("  ".join(parts_of(step, metrics)))
            return
        if self._bar is None:  # a resumed job starts in the middle
            self._bar = self._tqdm(
                total=self._steps, initial=step, unit="step", dynamic_ncols=True, file=sys.stdout
            )
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._restore.close()


def describe(metrics: dict[str, float]) -> dict[str, str]:
    """Returns the metrics that a console shows, formatted, by their short names."""
    formats = {
        "loss_metrics/global_avg_loss": ("loss", "{:.5f}"),
        "validation_metrics/loss": ("validation loss", "{:.5f}"),
        "grad_norm": ("grad_norm", "{:.4f}"),
        "skipped_steps": ("skipped", "{:.0f}"),
        "memory/max_reserved(GiB)": ("memory", "{:.2f}GiB"),
        "throughput(tps)": ("tps", "{:,.0f}"),
        "tflops": ("tflops", "{:,.3g}"),
        "mfu(%)": ("mfu", "{:.2f}%"),
    }
    return {
        name: pattern.format(metrics[key])
        for key, (name, pattern) in formats.items()
        if key in metrics and (key != "skipped_steps" or metrics[key])
    }


def parts_of(step: int, metrics: dict[str, float]) -> list[str]:
    """Returns a step's metrics that a console shows in a line, each as a text."""
    return [f"step: {step:2}", *map(": ".join, describe(metrics).items())]


class JsonLines(MetricWriter):
    """Appends one JSON object per step to a file. Values that are not finite become null.

    A resumed job also appends. Of two lines of a step with the same keys, the later line counts. An
    incomplete last line of a killed job is cut off.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_bytes()
            os.truncate(path, text.rfind(b"\n") + 1)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step} | values) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard(MetricWriter):
    """Writes scalars for TensorBoard into a folder."""

    def __init__(self, folder: Path) -> None:
        module = import_extra("torch.utils.tensorboard", "metrics.enable_tensorboard")
        self._writer = module.SummaryWriter(str(folder), max_queue=1000)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(MetricWriter):
    """Writes to a run of Weights & Biases, in the project WANDB_PROJECT or "torchopt_ext"."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        wandb = import_extra("wandb", "metrics.enable_wandb", package="wandb")
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "torchopt_ext")
        self._run = wandb.init(project=project, dir=str(folder), config=config)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
