"""Runs a file like `python FILE ARGUMENTS`: with its own `__main__`, `sys.argv` and first entry of `sys.path`.

A module is run like `python -m package.module ARGUMENTS`, and so is a file with relative imports, which Python itself would only
run that way.

Unlike with `runpy.run_path`, the module stays `__main__` after an exception, because functions that the script registered for
exit, and processes that it started, look up their names there.
"""

import io
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def run_as_main(path: str, arguments: Sequence[str], *, module: str | None = None, shown_as: str | None = None) -> None:
    """Executes the file; any exception, including `SystemExit`, propagates."""
    with io.open_code(path) as file:
        text = file.read()
    code = compile(text, path, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    root: str
    package: str | None
    if module is not None:
        root, package = os.getcwd(), module if Path(path).name == "__main__.py" else module.rpartition(".")[0]
    else:
        root, package = _place(Path(path), has_relative_imports=_RELATIVE_IMPORT.search(text) is not None)
    vars(main).update(
        __file__=path,
        __builtins__=__builtins__,
        __loader__=SourceFileLoader("__main__", path),
        __cached__=None,
        __package__=package,
    )
    sys.modules["__main__"] = main
    sys.argv[:] = [shown_as or path, *arguments]
    sys.path.insert(0, root)
    exec(code, vars(main))


_RELATIVE_IMPORT = re.compile(rb"^\s*from\s+\.", re.MULTILINE)


def _place(path: Path, *, has_relative_imports: bool) -> tuple[str, str | None]:
    """Returns the folder that imports start in, and the file's package; None if it runs as a file of its own."""
    folder = path.parent
    if not has_relative_imports or not folder.name:
        return str(folder), None
    names = [folder.name]
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
        names.insert(0, folder.name)
    return str(folder.parent), ".".join(names)
