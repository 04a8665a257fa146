"""Checkpoints of containers load on another number of ranks and in another layout.

The loaded values, and the values after the next step, equal bitwise the values of one process that
took the same steps without distribution (resharding_worker.py).
"""

import functools
import json
from itertools import product

import pytest

LIMIT = 300  # seconds; a run takes up to 100 on an idle machine of two cores
pytestmark = pytest.mark.timeout(2 * LIMIT + 30)

LAYOUTS = {
    1: ["alone"],
    2: ["fsdp", "ddp", "tp", "pp"],
    3: ["fsdp", "ddp", "tp", "pp"],
    4: ["fsdp", "ddp", "tp", "pp", "hsdp", "fsdp, tp", "ep"],
}
"""The layouts by number of ranks."""
SAVES = [(0, "sync"), (3, "sync"), (3, "async")]
"""The steps before saving, and the way of saving."""
WAYS = ["fresh", "after steps", "in place"]
"""statedict.dcp.load into a new or an already stepped container, or dcp.load in place."""
KINDS = ["fp32", "masters", "remainder"]
FP32 = ["fp32", "in backward", "torch's fp32"]
BF16 = ["bf16", "masters", "remainder", "remainder8", "torch's bf16"]
CONVERTED = [(saved, kept) for kinds in (FP32, BF16) for saved, kept in product(kinds, kinds)]


def saving(ranks, layout, kind, steps, mode):
    name = f"{kind} on {ranks} {layout} after {steps} {mode}"
    return ["save", name, layout, kind, steps, mode]


def loading(saved, layout, kept, way):
    _, name, _, kind, steps, _ = saved
    return ["load", name, kind, steps, layout, kept, way]


def matrix(source, target, kinds=KINDS):
    """Yields all pairs of layouts for each kind. The ways of saving and loading take turns."""
    kinds, froms, tos = (list(enumerate(x)) for x in (kinds, LAYOUTS[source], LAYOUTS[target]))
    for (k, kind), (i, layout), (j, to) in product(kinds, froms, tos):
        saved = saving(source, layout, kind, *SAVES[(i + k) % 3])
        yield saved, loading(saved, to, kind, WAYS[(i + j + k) % 3])


def conversions(source, target, every=1):
    """Yields pairs of a saved kind and a kind that loads it, by default all."""
    for n, (kind, kept) in enumerate(CONVERTED[::every]):
        layout, to = (names[n % len(names)] for names in (LAYOUTS[source], LAYOUTS[target]))
        saved = saving(source, layout, kind, 3, "sync")
        yield saved, loading(saved, to, kept, WAYS[n % 2])


def some(source, target):
    """Yields the cases of the fast tier."""
    first = saving(source, "fsdp", "remainder", 3, "async")
    yield first, loading(first, "tp", "remainder", "fresh")
    yield first, loading(first, "pp", "masters", "after steps")
    yield first, loading(first, "fsdp", "remainder8", "fresh")
    second = saving(source, "pp", "fp32", 0, "sync")
    yield second, loading(second, "fsdp", "fp32", "fresh")
    yield second, loading(second, "ddp", "torch's fp32", "in place")
    for layout, to, way in (("fsdp", "fsdp", "in place"), ("fsdp", "tp", "fresh"),
                            ("tp", "pp", "after steps")):  # fmt: skip
        third = saving(source, layout, "Muon", 3, "sync")
        yield third, loading(third, to, "Muon", way)


@pytest.fixture(scope="module")
def run(start_ranks, tmp_path_factory):
    """A function that runs each case once, and returns the differences by case and rank."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    saved = []

    def run(ranks, cases):
        cases = [case for n, case in enumerate(cases) if case not in saved + cases[:n]]
        if not cases:
            return []
        saved.extend(case for case in cases if case[0] == "save")
        folder = tmp_path_factory.mktemp("resharding")
        arguments = (str(folder), str(checkpoints), json.dumps(cases))
        start_ranks("resharding_worker.py", ranks, *arguments, seconds=LIMIT)
        problems = []
        for rank in range(ranks):
            results = json.loads((folder / f"rank{rank}.json").read_text())
            assert len(results) == len(cases)
            for case, result in results.items():
                if problem := result.get("error") or result["difference"]:
                    problems.append(f"{case}, rank {rank}: {problem}")
        return problems

    return run


muon = functools.partial(matrix, kinds=["Muon"])
SLOW = pytest.mark.slow


def slow(*values):
    return pytest.param(*values, marks=SLOW)


@pytest.mark.parametrize(
    ("cases", "source", "target"),
    [
        slow(functools.partial(conversions, every=2), 1, 2),
        (matrix, 2, 1),
        pytest.param(some, 4, 3),
        *(slow(matrix, source, target) for source, target in [(4, 1), (4, 2), (4, 3)]),
        *(slow(muon, 4, target) for target in (1, 2, 3)),
        *(slow(matrix, source, 4) for source in (1, 2, 3)),
        *(slow(conversions, *pair) for pair in [(4, 2), (4, 3), (1, 4)]),
    ],
)
def test_loads_and_goes_on_bit_for_bit(run, cases, source, target):
    saves, loads = zip(*cases(source, target), strict=True)
    assert run(source, list(saves)) == []
    assert run(target, list(loads)) == []
