"""What the pages name is public: its module lists it in `__all__`."""

import ast
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def source_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    files = path / "__init__.py", path.with_suffix(".py")
    return next((file for file in files if file.is_file()), None)


def listed_in(module: str) -> list[str] | None:
    """Returns a module's `__all__`, without importing what the module needs."""
    file = source_of(module)
    assert file is not None, module
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found = ast.literal_eval(node.value)
            assert isinstance(found, list)
            return found
    return None


def named() -> Iterator[tuple[str, str]]:
    """Yields each module and name that a page imports or that the API reference shows."""
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs/api.md").read_text(), re.M):
        module, _, last = name.rpartition(".")
        yield (name, "") if source_of(name) else (module, last)
    for page in PAGES:
        imports = r"^\s*from (torchopt_ext[\w.]*) import ([\w, ]+)"
        for module, names in re.findall(imports, page.read_text(), re.M):
            for name in names.split(","):
                yield module, name.strip().split(" as ")[0]


@pytest.mark.parametrize(("module", "name"), sorted({*named()}))
def test_named_things_are_public(module: str, name: str) -> None:
    if source_of(f"{module}.{name}") and not listed_in(module):
        return  # a module of a package without names
    public = listed_in(module)
    assert public, f"{module} has no __all__"
    assert name in (*public, "")


@pytest.mark.parametrize("module", sorted({module for module, _ in named()}))
def test_what_is_listed_exists_and_is_not_private(module: str) -> None:
    public = listed_in(module) or []
    assert len({*public}) == len(public)
    assert not [name for name in public if name.startswith("_")]
    try:
        with warnings.catch_warnings(action="ignore"):  # another torchtitan is installed
            imported = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} needs another package: {error}")
    assert not [name for name in public if not hasattr(imported, name)]


def test_the_reference_shows_what_pages_call() -> None:
    """Members of a public class that pages name are in it, or among the inherited ones shown."""
    reference = (ROOT / "docs/api.md").read_text()
    shown = {*re.findall(r"^ +- (\w+)$", reference, re.M)}
    inherited: set[str] = set()
    for module, name in re.findall(r"^::: (torchopt_ext[\w.]*)\.([A-Z]\w+)$", reference, re.M):
        cls = getattr(importlib.import_module(module), name)
        shown.update(vars(cls))
        ours = [base for base in cls.__mro__ if base.__module__.startswith("torchopt_ext")]
        inherited.update(*(vars(base) for base in ours))
    named = {name for page in PAGES for name in re.findall(r"\.([a-z]\w+)", page.read_text())}
    assert {"ema_weights", "set_schedule"} <= named & inherited
    assert not sorted(named & inherited - shown)
