"""The demonstration: one training job run twice, once in peace and once killed and resumed.

    python examples/run_demo.py --out out/demo

Both runs must end with the same bits. Writes demo.png, summary.json and each run's log into the
output folder, and exits with a sentence and a non-zero status if any stage fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint import is_complete, step_folder
from config import load_config
from plot import draw

EXAMPLES = Path(__file__).resolve().parent
JOB = EXAMPLES / "demo.toml"
RANKS = 2
TIME_LIMIT = 900.0  # seconds for one run: a hang is a failure

REPORT = """
model            {parameters:,} parameters, {ranks} ranks, {steps} steps
text             Python's standard library: {train_bytes:,} bytes, and {held_out_bytes:,} held out
validation loss  {bits_before:.3f} bits per byte before, {bits_after:.3f} after
optimizer step   {our_milliseconds:.2f} ms with clipping; torch's clip_grad_norm_ and fused AdamW \
{torch_milliseconds:.2f} ms: {speedup:.2f} times as fast
kill and resume  killed after step {killed_step}, resumed from the checkpoint at step {resume_step}
sha256 of weights and optimizer state after step {steps}:
  uninterrupted  {sha256}
  resumed        {resumed_sha256}  the same bits
wrote            {out}/demo.png, {out}/summary.json, {out}/*/log.jsonl
time             {seconds:.0f} s"""

TITLE = (
    "Byte-level transformer of {parameters:,} parameters on {ranks} ranks\n"
    "validation: {bits_before:.2f} bits per byte before, {bits_after:.2f} after"
)


class DemoError(Exception):
    """A stage failed; the message is the sentence to print."""


def read_log(out: Path) -> list[dict[str, Any]]:
    """The events in a run's log; a line that is still being written is left out."""
    log = out / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [event for event in events if event["event"] == kind]
    if not found:
        raise DemoError(f"The log has no '{kind}' event, so the run did not get that far.")
    return found[-1]


@contextmanager
def training(out: Path, label: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts train.py on two ranks; the progress bar goes to stdout, messages to stderr.txt."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}", str(EXAMPLES / "train.py")]
    command += [f"--job={JOB}", f"--out={out}", f"--label={label}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (out / "stderr.txt").open("ab") as stderr:
        process = subprocess.Popen(command, env=env, stderr=stderr)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its ranks
            process.wait(timeout=60)


def wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise DemoError(f"A training run took longer than {TIME_LIMIT:.0f} seconds.") from None


def failure(out: Path, sentence: str) -> DemoError:
    """With what the run itself had to say at its end."""
    messages = (out / "stderr.txt").read_text(errors="replace").splitlines()
    return DemoError("\n".join([sentence, f"The end of {out}/stderr.txt:", *messages[-40:]]))


def run_to_end(out: Path, label: str) -> None:
    with training(out, label) as process:
        status = wait(process)
    if status != 0:
        raise failure(out, f"Run {label.strip()} ended with exit status {status}.")


def run_and_kill(out: Path, label: str, checkpoint: Path, step: int) -> int:
    """SIGKILLs a rank soon after the checkpoint at `step`; returns the last step it finished."""
    with training(out, label) as process:
        deadline = time.monotonic() + TIME_LIMIT
        while not is_complete(checkpoint) or last(read_log(out), "train")["step"] < step + 3:
            if process.poll() is not None:
                raise failure(out, f"Run {label.strip()} ended before it could be killed.")
            if time.monotonic() > deadline:
                raise DemoError(f"Run {label.strip()} wrote no checkpoint at step {step} in time.")
            time.sleep(0.05)
        os.kill(int((out / f"rank-{RANKS - 1}.pid").read_text()), signal.SIGKILL)
        if wait(process) == 0:
            raise DemoError(f"Run {label.strip()} did not notice that one of its ranks was killed.")
    return int(last(read_log(out), "train")["step"])


def trajectory(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Training events by step. Steps that a resumed run repeats must repeat to the last bit."""
    steps: dict[int, dict[str, Any]] = {}
    for event in (event for event in events if event["event"] == "train"):
        if steps.setdefault(event["step"], event) != event:
            raise DemoError(f"Step {event['step']} went differently after resuming.")
    return steps


def check(
    peace: list[dict[str, Any]], killed: list[dict[str, Any]], resume_step: int, killed_step: int
) -> dict[str, Any]:
    """What the two logs say, after checking that the runs agree and that the model learned."""
    start, resumed = last(peace, "start"), last(killed, "start")
    if resumed["step"] != resume_step:
        raise DemoError(f"The second start went on from step {resumed['step']}, not {resume_step}.")
    if trajectory(peace) != trajectory(killed):
        raise DemoError("The losses, learning rates or gradient norms of the two runs differ.")
    sha256, resumed_sha256 = last(peace, "end")["sha256"], last(killed, "end")["sha256"]
    if sha256 != resumed_sha256:
        raise DemoError(f"The two runs ended with different bits: {sha256} and {resumed_sha256}.")
    validation = [event["bits_per_byte"] for event in peace if event["event"] == "validation"]
    if not validation[-1] < 0.5 * validation[0]:
        raise DemoError(f"The model hardly learned: {validation[0]} to {validation[-1]} bits/byte.")
    milliseconds = last(peace, "end")["step_milliseconds"]
    return {
        "parameters": start["parameters"],
        "train_bytes": start["train_bytes"],
        "held_out_bytes": start["held_out_bytes"],
        "steps": last(peace, "end")["step"],
        "killed_step": killed_step,
        "resume_step": resume_step,
        "bits_before": validation[0],
        "bits_after": validation[-1],
        "our_milliseconds": milliseconds["ours"],
        "torch_milliseconds": milliseconds["torch"],
        "speedup": milliseconds["torch"] / milliseconds["ours"],
        "sha256": sha256,
        "resumed_sha256": resumed_sha256,
    }


def demo(out: Path) -> None:
    """Both runs, the checks, the picture and the report."""
    started = time.monotonic()
    config = load_config(JOB)
    steps, interval = config.training.steps, config.checkpoint.interval
    resume_step = interval * (steps // interval // 2)
    if resume_step <= 0:
        raise DemoError(f"{JOB}: no checkpoint before half of the steps to resume from.")
    peace, killed = out / "uninterrupted", out / "killed"
    for folder in (peace, killed):
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("demo.png", "summary.json"):
        (out / name).unlink(missing_ok=True)

    run_to_end(peace, "1 of 3: uninterrupted")
    checkpoint = step_folder(killed / config.checkpoint.folder, resume_step)
    killed_step = run_and_kill(killed, "2 of 3: to be killed ", checkpoint, resume_step)
    print(f"rank {RANKS - 1} killed after step {killed_step}; starting again")
    run_to_end(killed, "3 of 3: resumed      ")

    summary = check(read_log(peace), read_log(killed), resume_step, killed_step)
    summary["seconds"] = round(time.monotonic() - started, 1)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = TITLE.format(**summary, ranks=RANKS)
    draw(read_log(peace), read_log(killed), config, killed_step, title, out / "demo.png")
    print(REPORT.format(**summary, ranks=RANKS, out=out))


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
