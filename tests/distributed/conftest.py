"""Runs a worker script on a few gloo ranks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ..support.ranks import Results

HERE = Path(__file__).parent
RUN_TIMEOUT = 120  # seconds; a run takes about 10 on an idle machine


@contextmanager
def serve(*preloaded: str) -> Iterator[Callable[..., str]]:
    """Yields a function that runs a script of this folder on a number of ranks and returns its
    output. The ranks are forked after the preloaded scripts have run."""
    with subprocess.Popen(
        [sys.executable, *(str(HERE / script) for script in ("rank_server.py", *preloaded))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as server:
        assert server.stdin and server.stdout
        requests, answers = server.stdin, server.stdout
        numbers = itertools.count()

        def start(worker: str, ranks: int, *arguments: str, seconds: float = RUN_TIMEOUT) -> str:
            number = next(numbers)
            job = [number, str(HERE / worker), arguments, ranks, seconds]
            print(json.dumps(job), file=requests, flush=True)
            of_number = -1
            while of_number != number:  # a test that timed out did not read its answer
                answer = answers.readline() or f'[{number}, "the rank server ended", ""]'
                of_number, problem, output = json.loads(answer)
            assert not problem, f"{worker} on {ranks} ranks: {problem}\n{output}"
            return output

        yield start
        requests.close()


@pytest.fixture(scope="session")
def rank_server() -> Callable[..., AbstractContextManager[Callable[..., str]]]:
    return serve


@pytest.fixture(scope="session")
def start_ranks() -> Iterator[Callable[..., str]]:
    """A function that runs a script of this folder on a number of ranks."""
    with serve() as start:
        yield start


@pytest.fixture(scope="session")
def run_ranks(
    start_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Results]:
    """A function that runs all cases of a worker script and returns every rank's results."""

    def run(worker: str, ranks: int, *arguments: str) -> Results:
        folder = tmp_path_factory.mktemp(Path(worker).stem)
        start_ranks(worker, ranks, str(folder), *arguments)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return run
