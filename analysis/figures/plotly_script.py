"""Plotly's own script, for a page that needs no network."""

from __future__ import annotations

import re

from plotly.offline import get_plotlyjs

_MODULE = re.compile(r"(/\*.*?\*/\s*)\(\s*function\(root, factory\)[^>]*=> \{\n(.*)\nreturn Plotly;\n\}\)\);\s*", re.DOTALL)
"""Plotly's notice, and what its module's function does but for returning it."""


def plotly_script() -> str:
    """The source of plotly.js that goes with the figures of this room.

    It stands outside the function that makes it a module, which a page has no use for: a browser would read all of it to find
    that function's end, and again to call it.
    """
    source = str(get_plotlyjs())
    module = _MODULE.fullmatch(source)
    return module[1] + module[2] if module else source
