"""Runs a job of the Trainer three times: undisturbed, with a rank killed, with torch's AdamW.

    python examples/run_demo.py --out out/demo

The first two runs must end with the same bits. The output folder gets demo.png, summary.json and a
folder for each run. If a stage fails, the script prints a sentence and its exit status is not 0.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import load_text
from plot import draw
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchopt_ext.statedict import dcp
from torchopt_ext.trainer.load_config import load_config

EXAMPLES = Path(__file__).resolve().parent
JOB = EXAMPLES / "demo.toml"
RANKS = 2
TIME_LIMIT = 900.0  # seconds for one run: a hang is a failure
WARM_UP = 10  # steps that are not timed: they create state, and DDP decides on its buckets
TORCH_STEPS = 60  # enough for a median
TORCH = (
    *("--experimental.custom_import", "examples.torch_adamw"),
    *("--model.name", "byte_llama_torch_adamw"),
    *("--checkpoint.no_enable_checkpoint", "--validation.no_enable"),
)

LOSS, VALIDATION = "loss_metrics/global_avg_loss", "validation_metrics/loss"
COMPARED = (LOSS, "loss_metrics/global_max_loss", "grad_norm", "lr", "skipped_steps", VALIDATION)
WHOLE, OPTIMIZER, DATA, REST = "whole step", "clip and AdamW", "data", "forward, backward, the rest"
TIMES = {
    WHOLE: "time_metrics/end_to_end(s)",
    OPTIMIZER: "time_metrics/optimizer(s)",
    DATA: "time_metrics/data_loading(s)",
}

REPORT = """
model            {parameters:,} parameters, {ranks} ranks, {steps} steps
text             Python's standard library: {train_bytes:,} bytes, and {held_out_bytes:,} held out
validation loss  {bits_before:.3f} bits per byte before, {bits_after:.3f} after
kill and resume  killed after step {killed_step}, resumed from the checkpoint at step {resume_step}
sha256 of weights and optimizer state after step {steps}:
  undisturbed    {sha256}
  resumed        {resumed_sha256}  the same bits

{table}

wrote            {out}/demo.png, {out}/summary.json, {out}/*/metrics.jsonl
time             {seconds:.0f} s"""

TITLE = (
    "Byte-level transformer of {parameters:,} parameters on {ranks} ranks\n"
    "validation: {bits_before:.2f} bits per byte before, {bits_after:.2f} after"
)

Metrics = list[dict[str, float]]
"""Lines of a metrics.jsonl."""


class DemoError(Exception):
    """A stage failed; the message is the sentence to print."""


def read_metrics(out: Path) -> Metrics:
    """Returns a run's metrics so far, without a line that is still being written."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    # null stands for a value that is not finite
    return [{key: math.nan if v is None else v for key, v in line.items()} for line in found]


def last_step(metrics: Metrics) -> int:
    return max((int(line["step"]) for line in metrics if LOSS in line), default=0)


# ---- running -------------------------------------------------------------------------------------


def start(out: Path, settings: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    """Starts the job under torchrun, which restarts it once if a rank fails."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", "-m", "torchopt_ext", "train"]
    command += ["--config", str(JOB), "--job.dump_folder", str(out.resolve()), *settings]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (out / "stdout.txt").open("wb") as stdout, (out / "stderr.txt").open("wb") as stderr:
        return subprocess.Popen(
            command,
            cwd=EXAMPLES.parent,  # examples is a package there
            env=env,
            stdout=None if sys.stdout.isatty() else stdout,  # a terminal gets the progress bar
            stderr=stderr,
        )


def run(
    label: str,
    out: Path,
    *settings: str,
    meanwhile: Callable[["subprocess.Popen[bytes]"], None] = lambda _: None,
) -> Metrics:
    """Runs the job to its end; returns its metrics."""
    print(label, flush=True)
    process = start(out, settings)
    try:
        meanwhile(process)
        status = process.wait(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise DemoError(f"Run {label} took longer than {TIME_LIMIT:.0f} seconds.") from None
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its ranks
            process.wait(timeout=60)
    if status != 0:
        # Show the end of the run's own messages.
        messages = (out / "stderr.txt").read_text(errors="replace").splitlines()
        sentence = f"Run {label} ended with exit status {status}."
        raise DemoError("\n".join([sentence, f"The end of {out}/stderr.txt:", *messages[-40:]]))
    return read_metrics(out)


def kill_after(
    process: "subprocess.Popen[bytes]", out: Path, checkpoint: Path, step: int
) -> int | None:
    """SIGKILLs a rank soon after the checkpoint at `step`; returns the last step it finished."""
    deadline = time.monotonic() + TIME_LIMIT
    while not checkpoint.exists() or last_step(read_metrics(out)) < step + 3:
        if process.poll() is not None:
            return None
        if time.monotonic() > deadline:
            raise DemoError(f"There was no {checkpoint} after {TIME_LIMIT:.0f} seconds.")
        time.sleep(0.05)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    time.sleep(0.5)  # the other rank cannot go on without it
    return last_step(read_metrics(out))


# ---- what the runs show --------------------------------------------------------------------------


def fingerprint(checkpoint: Path) -> tuple[str, int]:
    """Returns the sha256 of all weights and optimizer states, and the weights' element count."""
    saved = dcp.Reader(checkpoint).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(saved.items())
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    weights = (t.numel() for name, t in tensors.items() if not name.startswith("optimizer."))
    return sha.hexdigest(), sum(weights)


def split_at_restart(metrics: Metrics) -> tuple[Metrics, Metrics]:
    """Splits metrics into the lines before the ranks were restarted, and after."""
    for i in range(1, len(metrics)):
        if metrics[i]["step"] < metrics[i - 1]["step"]:
            return metrics[:i], metrics[i:]
    raise DemoError("No step of the killed run was repeated, so it did not resume.")


def trajectory(metrics: Metrics) -> dict[tuple[float, bool], dict[str, float]]:
    """Returns each step's results. Steps that are repeated must repeat to the last bit."""
    found: dict[tuple[float, bool], dict[str, float]] = {}
    for line in metrics:
        values = {key: line[key] for key in COMPARED if key in line}
        if found.setdefault((line["step"], VALIDATION in line), values) != values:
            raise DemoError(f"Step {line['step']} went differently after resuming.")
    return found


def check_learning(peace: Metrics, torchs: Metrics) -> dict[str, float]:
    """Checks that the model learned, and that torch's AdamW gives the same loss."""
    before, *_, after = [line[VALIDATION] / math.log(2) for line in peace if VALIDATION in line]
    if not after < 0.5 * before:
        raise DemoError(f"The model hardly learned: {before} to {after} bits per byte.")
    step, loss = max((line["step"], line[LOSS]) for line in torchs if LOSS in line)
    [ours] = [line[LOSS] for line in peace if LOSS in line and line["step"] == step]
    if not math.isclose(ours, loss, rel_tol=2e-2):  # they round differently
        raise DemoError(f"After step {step} the loss is {ours}, and {loss} with torch's AdamW.")
    return {"bits_before": before, "bits_after": after}


def check_resume(peace: Metrics, killed: Metrics, resume_step: int) -> None:
    """Checks that the killed run resumed from the step, and computed the same as the other run."""
    resumed = split_at_restart(killed)[1][0]["step"] - 1
    if resumed != resume_step:
        raise DemoError(f"The killed run went on from step {resumed:.0f}, not {resume_step}.")
    if trajectory(peace) != trajectory(killed):
        raise DemoError("The losses, learning rates or gradient norms of the two runs differ.")


def step_times(metrics: Metrics) -> dict[str, float]:
    """Returns the median milliseconds of a step and of its parts."""
    timed = [line for line in metrics if LOSS in line and line["step"] > WARM_UP]
    times = {
        name: 1e3 * statistics.median(line[key] for line in timed) for name, key in TIMES.items()
    }
    times[REST] = times[WHOLE] - times[OPTIMIZER] - times[DATA]
    return times


def table(ours: dict[str, float], torchs: dict[str, float]) -> str:
    """Formats both optimizers' step times side by side, with shares of the step."""
    lines = [f"{'step time (medians)':28}{'torchopt_ext':>20}{'torch':>20}"]
    for name in (REST, OPTIMIZER, DATA, WHOLE):
        cells = [
            f"{times[name]:10.2f} ms {100 * times[name] / times[WHOLE]:4.1f} %"
            for times in (ours, torchs)
        ]
        lines.append(f"{name:28}{cells[0]:>20}{cells[1]:>20}")
    faster = torchs[OPTIMIZER] / ours[OPTIMIZER]
    lines += [
        f"torch: clip_grad_norm_ and fused AdamW; ours is {faster:.2f} times as fast.",
        "The rest is the same work, done at another time.",
    ]
    return "\n".join(lines)


# ---- all together --------------------------------------------------------------------------------


def demo(out: Path) -> None:
    """Makes the runs, the checks, the picture and the report."""
    started = time.monotonic()
    job = load_config(["--config", str(JOB)])
    steps, interval = job.training.steps, job.checkpoint.interval
    resume_step = interval * (steps // interval // 2)
    if resume_step <= 0:
        raise DemoError(f"{JOB}: no checkpoint before half of the steps to resume from.")
    folders = [out / name for name in ("undisturbed", "killed", "torch")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("demo.png", "summary.json"):
        (out / name).unlink(missing_ok=True)
    checkpoints = [folder / job.checkpoint.folder for folder in folders]
    killed_step: int | None = None

    def kill(process: "subprocess.Popen[bytes]") -> None:
        nonlocal killed_step
        killed_step = kill_after(
            process, folders[1], checkpoints[1] / f"step-{resume_step}", resume_step
        )

    peace = run("1 of 3: undisturbed", folders[0])
    killed = run("2 of 3: with a rank killed half-way", folders[1], meanwhile=kill)
    # The schedule keeps its length, so that the steps are the same.
    schedule = ("--training.steps", str(TORCH_STEPS), "--lr_scheduler.total_steps", str(steps))
    torchs = run("3 of 3: with torch's AdamW", folders[2], *TORCH, *schedule)

    if killed_step is None:
        raise DemoError("The second run ended before a rank of it could be killed.")
    check_resume(peace, killed, resume_step)
    learned = check_learning(peace, torchs)
    sha256, parameters = fingerprint(checkpoints[0] / f"step-{steps}")
    resumed_sha256, _ = fingerprint(checkpoints[1] / f"step-{steps}")
    if sha256 != resumed_sha256:
        raise DemoError(f"The two runs ended with different bits: {sha256} and {resumed_sha256}.")

    times = {"torchopt_ext": step_times(peace), "torch": step_times(torchs)}
    train_text, held_out_text = load_text()
    summary: dict[str, Any] = {
        "parameters": parameters,
        "train_bytes": train_text.numel(),
        "held_out_bytes": held_out_text.numel(),
        "steps": steps,
        "killed_step": killed_step,
        "resume_step": resume_step,
        **learned,
        "step_milliseconds": times,
        "sha256": sha256,
        "resumed_sha256": resumed_sha256,
    }
    title = TITLE.format(**summary, ranks=RANKS)
    draw(peace, split_at_restart(killed), job, killed_step, title, out / "demo.png")
    summary["seconds"] = round(time.monotonic() - started, 1)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(REPORT.format(**summary, ranks=RANKS, table=table(*times.values()), out=out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    try:
        demo(parser.parse_args().out)
    except (DemoError, OSError, ValueError) as error:
        print(f"\nmake demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
