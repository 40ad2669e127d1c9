"""What `--list` prints: workloads, recipes and settings by name, each with a one-line description."""

import inspect
from collections.abc import Iterator
from dataclasses import fields

from rich.console import Console

from compile_sweep.schema.figure import field_docs
from compile_sweep.schema.settings import CONFIG_MODULES, CompileSettings
from orchestrator.plan.describer import Describer
from orchestrator.plan.recipes import RECIPES
from orchestrator.view.printed import say

Line = tuple[str, str]  # a name and its description


def show(console: Console, describer: Describer) -> None:
    """Prints all three lists."""
    for title, lines in (("workloads", workloads(describer)), ("recipes", recipes()), ("settings", settings())):
        console.print(title, style="bold", markup=False, highlight=False)
        found = list(lines)
        width = max(len(name) for name, _ in found)
        for name, what in found:
            say(console, f"  {name:<{width}}  {what}", hanging=width + 2)


def workloads(describer: Describer) -> Iterator[Line]:
    """Yields built-in workloads and those of installed packages, with their sizes; one that does not load says why."""
    for name, says, *details in describer.ask("list"):
        if not details:
            yield name, says
            continue
        sizes, options = details
        able = f" Options: {', '.join(f'{option}={values}' for option, values in options.items())}." if options else ""
        yield name, f"{says} Sizes: {', '.join(sizes)}.{able}"


def recipes() -> Iterator[Line]:
    """Yields recipes, in the order in which they are documented."""
    yield from ((name, (inspect.getdoc(recipe) or "").partition("\n")[0]) for name, recipe in RECIPES.items())


def settings() -> Iterator[Line]:
    """Yields fields of `CompileSettings` with the strings below them; fields that contain others by the way they are written."""
    written = {name: f"{name}.NAME" for name in ("workload", "ddp", *CONFIG_MODULES)}
    written |= {"options": "inductor.NAME", "parts": "parts.NAME.FIELD"}
    said = field_docs(CompileSettings)
    yield from ((written.get(field.name, field.name), said.get(field.name, "")) for field in fields(CompileSettings))
