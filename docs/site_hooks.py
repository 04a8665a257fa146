"""Shows the roles in docstrings, such as :class:`FusedAdam`, as plain code."""

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|attr|meth|mod|data):(?=<code>)")
TILDE = re.compile(r"(<code>)~[\w.]*\.")


def on_page_content(html: str, **_: Any) -> str:
    return TILDE.sub(r"\1", ROLE.sub("", html))
