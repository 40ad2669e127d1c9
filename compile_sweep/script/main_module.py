"""Runs a file as `python FILE ARGUMENTS` would: its own `__main__`, `sys.argv` and first entry of `sys.path`.

Unlike `runpy.run_path`, the module stays `__main__` after an exception, because what the script registered to run at exit, and
processes that it started, look for their names there.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType


def run_as_main(path: str, arguments: Sequence[str], *, shown_as: str | None = None) -> None:
    """Executes the file; whatever it raises, `SystemExit` included, comes out.

    Args:
        path: of the file.
        arguments: `sys.argv[1:]`.
        shown_as: `sys.argv[0]`; the path by default.
    """
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    vars(module).update(
        __file__=path, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", path), __cached__=None, __package__=None
    )
    sys.modules["__main__"] = module
    sys.argv[:] = [shown_as or path, *arguments]
    sys.path.insert(0, path.rpartition("/")[0] or ".")
    exec(code, vars(module))
