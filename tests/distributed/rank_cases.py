"""Runs named cases on every rank of a gloo group and writes their results."""

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


def difference(found: Any, expected: Any, where: str = "") -> str:
    """Describes the first difference in types, key order, dtypes, shapes or bits, or returns ""."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"{where}: {type(found).__name__}, expected a tensor"
        kinds = [(t.dtype, tuple(t.shape), t.device) for t in (found, expected)]
        if kinds[0] != kinds[1]:
            return f"{where}: {kinds[0]}, expected {kinds[1]}"
        flat = [t.detach().contiguous().flatten().view(torch.uint8) for t in (found, expected)]
        return "" if torch.equal(*flat) else f"{where}: other values"
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or list(found) != list(expected):
            keys = list(found) if isinstance(found, Mapping) else type(found).__name__
            return f"{where}: {keys}, expected {list(expected)}"
        pairs = [(key, found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if type(found) is not type(expected) or len(found) != len(expected):
            return f"{where}: {found!r}, expected {expected!r}"
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        alike = type(found) is type(expected) and repr(found) == repr(expected)
        return "" if alike else f"{where}: {found!r}, expected {expected!r}"
    return next(filter(None, (difference(a, b, f"{where}[{k!r}]") for k, a, b in pairs)), "")


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
    """Returns a hash of the bits of plain tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Returns the values of all ranks."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


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
                results[name] = {} if (found := case()) is None else found
            except Exception:
                results[name] = {"error": traceback.format_exc()}
        dist.barrier()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
