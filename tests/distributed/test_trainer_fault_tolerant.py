"""Replica groups of the Trainer under torchft."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .replica_groups import lighthouse
from .test_trainer import JOB, STEPS

pytest.importorskip("torchft")

pytestmark = [pytest.mark.slow, pytest.mark.newest_torch, pytest.mark.timeout(150)]


def test_replica_groups_read_other_data_and_end_with_the_same_bits(tmp_path):
    shared = (*JOB, "--training.batch_size", "4")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += [str(Path(__file__).with_name("trainer_worker.py")), *shared]
    command += ["--fault_tolerance.enable", "--fault_tolerance.group_size", "2"]
    command += ["--fault_tolerance.min_replica_size", "2"]
    with lighthouse(min_replicas=2) as address:
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"TORCHFT_LIGHTHOUSE": address}
        groups = []
        for replica in range(2):
            own = ["--fault_tolerance.replica_id", str(replica)]
            own += ["--job.dump_folder", str(tmp_path / str(replica))]
            (tmp_path / str(replica)).mkdir()
            with open(tmp_path / f"{replica}.log", "w") as log:
                groups.append(
                    subprocess.Popen(
                        [*command, *own], env=env, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        try:
            codes = [group.wait(timeout=100) for group in groups]
        finally:
            for group in groups:
                group.kill()
    assert codes == [0, 0], "\n".join((tmp_path / f"{r}.log").read_text()[-3000:] for r in range(2))
    ended = [json.loads((tmp_path / f"{r}/rank0.json").read_text()) for r in range(2)]
    assert ended[0] == ended[1]
    assert ended[0]["step"] == STEPS
    folders = [tmp_path / f"{r}/replica_{r}/metrics.jsonl" for r in range(2)]
    first = [json.loads(folder.read_text().splitlines()[0]) for folder in folders]
    assert first[0]["loss_metrics/global_avg_loss"] != first[1]["loss_metrics/global_avg_loss"]
