"""Links torch and its requirements, and nothing else, into another environment's site-packages."""

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

waiting, linked = [("torch", "")], set()
while waiting:
    name, extra = waiting.pop()
    if (name, extra) in linked:
        continue
    linked.add((name, extra))
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        link = Path(sys.argv[1], top)
        if not link.exists():
            link.symlink_to(found.locate_file(top))
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            waiting += [(requirement.name, extra) for extra in {"", *requirement.extras}]
