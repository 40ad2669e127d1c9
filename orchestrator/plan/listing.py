"""What `--list` prints: workloads, recipes and settings by name, each with the line that says what it is."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

from rich.console import Console

from compile_sweep.contract.base import Workload, load_workload, named_workloads
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.setting_text import format_value
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.recipes import RECIPES

Line = tuple[str, str]
"""A name and what it is."""


def show(console: Console) -> None:
    """Prints all three lists."""
    for title, lines in (("workloads", workloads()), ("recipes", recipes()), ("settings", settings())):
        console.print(title, style="bold", markup=False, highlight=False)
        found = list(lines)
        width = max(len(name) for name, _ in found)
        for name, what in found:
            console.print(f"  {name:<{width}}  {what}", markup=False, highlight=False, soft_wrap=True)


def workloads() -> Iterator[Line]:
    """Built-in workloads and those of installed packages, with their sizes; one that does not load says why."""
    for name in sorted(named_workloads()):
        try:
            kind = load_workload(name)
        except WorkloadError as error:
            yield name, str(error)
        else:
            yield name, f"{_first_line(kind)} Sizes: {', '.join(kind.sizes)}.{_options(kind)}"


def _options(kind: type[Workload]) -> str:
    """What may vary in the workload, for `workload.NAME=value`."""
    values = {name: "N" if isinstance(able, type) else "|".join(map(format_value, able)) for name, able in kind.options.items()}
    return f" Options: {', '.join(f'{name}={able}' for name, able in values.items())}." if values else ""


def recipes() -> Iterator[Line]:
    """Recipes, in the order in which they are documented."""
    yield from ((name, _first_line(recipe)) for name, recipe in RECIPES.items())


def settings() -> Iterator[Line]:
    """Fields of `CompileSettings`, as the strings under them say; those that hold others by their spelling."""
    written = {"options": "inductor.NAME", "workload": "workload.NAME", "ddp": "ddp.NAME", "parts": "parts.NAME.FIELD"}
    said = dict(_documented(CompileSettings))
    yield from ((written.get(field.name, field.name), said.get(field.name, "")) for field in fields(CompileSettings))


def _documented(kind: type) -> Iterator[Line]:
    """Each field of a class with the string below it, in one line."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield field.target.id, " ".join(text.split())


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
