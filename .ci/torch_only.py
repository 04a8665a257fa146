"""Links torch and its requirements, and nothing else, into another environment's site-packages.

What that environment has, such as the setuptools of a new one, stays as it is.
"""

import sys
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

waiting, linked = [("torch", "")], set()
present = {found.name for found in distributions(path=[sys.argv[1]])}
while waiting:
    name, extra = waiting.pop()
    if (name, extra) in linked:
        continue
    linked.add((name, extra))
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        link = Path(sys.argv[1], top)
        if found.name not in present and not link.exists():
            link.symlink_to(found.locate_file(top))
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            waiting += [(requirement.name, extra) for extra in {"", *requirement.extras}]
