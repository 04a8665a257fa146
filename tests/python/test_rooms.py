"""Imports of the package go one way, from its upper rooms to its lower ones, and in no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torchopt_ext"
# From the ground up. A room is a subpackage or a module; "" is the package's own __init__.py.
FLOORS = [
    {"_C", "_build_info", "_names"},
    {"_arguments", "_library", "_torch", "ops"},
    {"state"},
    {"statedict"},
    {"optim"},
    {"containers", "fsdp", "mixed_precision", "zero"},
    {"integrations", "trainer", ""},
    {"cli"},
    {"__main__"},
]


def test_imports_go_to_lower_rooms_and_in_no_circle() -> None:
    files = {p.relative_to(PACKAGE).with_suffix("").parts: p for p in PACKAGE.rglob("*.py")}
    modules = {".".join(p).removesuffix("__init__").strip("."): path for p, path in files.items()}
    imports: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for package, _, inner in (f"{source}{a.name}".partition(".") for a in node.names):
                known = inner in modules or inner in FLOORS[0]
                target = inner if known else inner.rpartition(".")[0]
                if package == PACKAGE.name and target != name:
                    imports[name].add(target)
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {(a.split(".")[0], b.split(".")[0]) for a, of_a in imports.items() for b in of_a}
    assert [pair for pair in rooms if pair[0] != pair[1] and floor[pair[0]] <= floor[pair[1]]] == []
    list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle
