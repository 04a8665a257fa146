"""Trains torchtitan 0.2's llama3 debug model with torchopt_ext: on GPUs, or on CPUs without any.

    python examples/torchtitan_0_2/run.py --ranks 2 --steps 20 [torchtitan's options ...]

The script first makes a tokenizer and a text of random words in the output folder. Then it runs
torchtitan's own command line on all ranks, with job.toml. It passes options that it does not know
to torchtitan, such as `--parallelism.tensor_parallel_degree=2`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent
CPU = EXAMPLE.parents[1] / "tests/distributed/torchtitan_cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/torchtitan_0_2"))
    arguments, options = parser.parse_known_args()
    out = arguments.out.resolve()
    if not (out / "data").exists():
        subprocess.run([sys.executable, CPU / "assets.py", out], check=True)
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
        *["--local-addr=127.0.0.1", f"--nproc-per-node={arguments.ranks}"],
        *["--local-ranks-filter=0", "--role=rank", "--tee=3"],  # all ranks log the same
        *[str(EXAMPLE / "train.py"), f"--job.config_file={EXAMPLE / 'job.toml'}"],
        *[f"--job.dump_folder={out}", f"--model.hf_assets_path={out / 'tokenizer'}"],
        *[f"--training.dataset_path={out / 'data'}", f"--training.steps={arguments.steps}"],
        *options,
    ]
    path = os.pathsep.join([str(CPU), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
