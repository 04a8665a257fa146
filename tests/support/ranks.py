"""Cases that run on every rank of a process group, and their results."""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .compare import bits

Results = list[dict[str, dict[str, Any]]]  # by rank and case


def full_tensor(value: Any) -> Any:
    """Returns the whole tensor of a DTensor, and another value as it is, both without gradients."""
    if isinstance(value, DTensor):
        as_int = value.dtype == torch.int16  # gloo does not send int16
        value = value.int().full_tensor().short() if as_int else value.full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def counted_calls(operator: Any) -> Iterator[list[str]]:
    """Records the calls of an operator; its overload, such as torch.ops.aten.where.self."""
    calls: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is operator:
                calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Count():
        yield calls


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a hash of the bits of tensors."""
    return hashlib.sha256(b"".join(map(bits, tensors))).hexdigest()


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Returns the values of all ranks."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_cases(
    cases: Callable[[], Mapping[str, Callable[[], Any]]],
    each_within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Runs a worker script. Its first argument is the folder for ``rank<n>.json``.

    ``cases`` is called after the process group exists. If a case raises, its result is the error.
    A case returns what tests compare between ranks, or asserts and returns None.
    """
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = {}
    for name, case in cases().items():
        with each_within():
            try:
                result = case()
                results[name] = {} if result is None else result
            except Exception:
                results[name] = {"error": traceback.format_exc()}
        dist.barrier()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def assert_passed(results: Results) -> None:
    """Fails with the errors of all cases, or if not every rank ran the same cases."""
    errors = [
        f"{name} on rank {rank}: {result['error']}"
        for rank, cases in enumerate(results)
        for name, result in cases.items()
        if "error" in result
    ]
    assert not errors, "\n".join(errors)
    names = [list(rank) for rank in results]
    assert names[0] and names == [names[0]] * len(results), names


def agreed(results: Results, name: str) -> list[dict[str, Any]]:
    """Returns every rank's result. Fails for errors, or other differences than in "local"."""
    assert_passed([{name: rank[name]} for rank in results])
    of_ranks = [rank[name] for rank in results]
    common = [{k: v for k, v in rank.items() if k != "local"} for rank in of_ranks]
    assert all(other == common[0] for other in common), common
    return of_ranks


def case(results: Results, name: str) -> dict[str, Any]:
    """Returns rank 0's result. Fails as :func:`agreed`."""
    return agreed(results, name)[0]
