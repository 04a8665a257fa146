"""Runs named cases on every rank of a gloo group and writes down what each gave."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_cases(cases: Callable[[], Mapping[str, Callable[[], Any]]]) -> None:
    """A worker script's main program; its argument is the folder for ``rank<n>.json``.

    ``cases`` is called when there is a process group. What a case raises is its result.
    """
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = {}
    for name, case in cases().items():
        try:
            results[name] = case()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.barrier()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
