"""Plotly's own script, for a page that does not need a network."""

import re

from plotly.offline import get_plotlyjs

_MODULE = re.compile(r"(/\*.*?\*/\s*)\(\s*function\(root, factory\)[^>]*=> \{\n(.*)\nreturn Plotly;\n\}\)\);\s*", re.DOTALL)
"""Plotly's license notice, and the body of its module's function without the return."""


def plotly_script() -> str:
    """Returns the source of the plotly.js version that these figures need.

    The function that makes it a module is removed: a browser would parse all of it to find the function's end, and again to call
    it.
    """
    source = str(get_plotlyjs())
    module = _MODULE.fullmatch(source)
    return module[1] + module[2] if module else source
