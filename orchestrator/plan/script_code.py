"""Reads the code that a script is made of, without running it: its own modules, and which packages it imports from elsewhere."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from compile_sweep.schema.journal import read_regular
from compile_sweep.script.job import ScriptError, ScriptJob

MOST_MODULES = 60
"""How many of a script's own modules are read, those that it imports itself first."""

_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+([^#\n]+)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^#\n]+)", re.MULTILINE)


class ScriptCode(NamedTuple):
    """What a script is made of."""

    text: str
    """The text of the script and of its own modules, in lower case."""
    packages: frozenset[str]
    """Packages that it imports from elsewhere, by the first part of their names."""


def read_code(job: ScriptJob) -> ScriptCode:
    """Reads a script and the modules that it imports, directly or through others, from its folder or its working directory.

    Raises:
        ScriptError: The script cannot be read.
    """
    script = Path(job.path)
    try:
        texts = {script: _text(script)}
    except OSError as error:
        raise ScriptError(f"--script {script} cannot be read ({error.strerror}); name a Python file that can") from None
    roots, packages, to_read = (script.parent, Path(job.folder)), set(), [script]
    for file in to_read:  # grows in the loop
        for dots, name in _imported(texts[file]):
            folders = file.parents[len(dots) - 1 : len(dots)] if dots else roots
            if not dots and not any(_is_in(folder, name.partition(".")[0]) for folder in folders):
                packages.add(name.partition(".")[0])
            for path in (path for folder in folders for path in _files_of(folder, name)):
                if path not in texts and len(texts) < MOST_MODULES:
                    texts[path] = _text(path)
                    to_read.append(path)
    return ScriptCode("\n".join(texts.values()).lower(), frozenset(packages))


def _text(path: Path) -> str:
    return read_regular(path).decode("utf-8", "replace")


def _imported(text: str) -> Iterator[tuple[str, str]]:
    """Yields the leading dots and the dotted name of each module that may be imported, and of what is imported from it."""
    for dots, module, names in _FROM.findall(text):
        if module:
            yield dots, module
        yield from ((dots, f"{module}.{name}".lstrip(".")) for name in _first_words(names.strip("( \t").split(",")))
    for modules in _IMPORT.findall(text):
        yield from (("", name) for name in _first_words(modules.split(",")))


def _first_words(parts: Iterable[str]) -> Iterator[str]:
    """Yields what stands before `as` in parts such as ` numpy as np`."""
    yield from (words[0] for part in parts if (words := re.findall(r"[\w.]+", part)))


def _is_in(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """Yields the files that importing a dotted name runs, if it is in this folder."""
    at = folder
    for part in name.split("."):
        at /= part
        yield from (path for path in (at / "__init__.py", at.with_name(f"{part}.py")) if path.is_file())
