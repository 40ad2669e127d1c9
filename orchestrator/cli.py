"""`compile-sweep COMMAND …`: every command of the project by one name, wherever it is installed and whatever folder it is in."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, NoReturn

import tyro

import compile_sweep
from compile_sweep import command_help, command_line
from compile_sweep.command_line import UsageError
from compile_sweep.own_packages import find_own_packages
from orchestrator.config import Device

PROG = "compile-sweep"

COMMANDS = {
    "sweep": ("orchestrator.sweep", "Measure compile settings of a training script or a workload."),
    "check": ("orchestrator.check", "Look at a script or a workload before a sweep: what breaks, what a sweep would cost."),
    "explain": (None, "Measure one setting of a workload, and say what the compiler made of it and what helps."),
    "report": ("analysis.report", "Write a sweep's report, or serve it while the sweep runs."),
    "recommend": ("analysis.recommend", "Say which setting to train a job with, and what that saves."),
    "compare": ("analysis.compare", "Compare two sweeps of the same workload."),
    "export": ("analysis.export", "Write a sweep's best setting as a program, and its trials as tables."),
    "table": ("analysis.table", "Print a sweep's trials as a Markdown table."),
    "cache": ("orchestrator.cache", "Look at a store of compile caches, and clean it up."),
    "run": ("compile_sweep.run", "Train with a script and a sweep's winner applied to it."),
}
"""Module and description of each command; `explain` is an option of the sweep's command."""

NEEDS = dict.fromkeys(("sweep", "check", "explain", "cache"), ("torch", "ray", "rich", "pynvml")) | {"run": ("torch",)}
"""Modules of the extra `run` that a command needs; commands not named here only read sweeps, and need none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Measure one setting, say what the compiler made of it and what to do about it, and record nothing."""

    setting: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SETTING")]
    """Like scope=full,dynamic=auto; what is left out takes its usual value."""
    workload: str = "captioning"
    """captioning, another that `sweep --list` names, or package.module:Class or path/to/file.py:Class for your own."""
    size: str = "auto"
    """One of the workload's sizes; auto is the first one with a GPU and the last one without."""
    device: Device | None = None
    """cpu or cuda; by default cuda if this machine has a GPU."""
    seed: int = 0
    """Seed for weights and data."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(command_line.words_of(arguments))
    if not words or words[0] not in COMMANDS or words[0] == "explain" or _missing(words[0]):
        return command_line.run(lambda: _without_module(words))
    name, *rest = words
    module = str(COMMANDS[name][0])
    if module.startswith("analysis."):  # a script that `run` trains may have a package of that name
        find_own_packages("analysis")
    command: Callable[[Sequence[str], str], int] = import_module(module).main
    with _without_this_package() if name == "run" else nullcontext():
        return command(rest, f"{PROG} {name}")


@contextmanager
def _without_this_package() -> Iterator[None]:
    """Forgets that `orchestrator` was imported: a script that runs in this process may have a package of that name."""
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "orchestrator"}
    for name in own:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(own)


def _without_module(words: Sequence[str]) -> int:
    """Prints help or the version, explains a setting, or refuses the command."""
    if not words or words[0] in command_help.WORDS:
        says = {name: meaning for name, (_, meaning) in COMMANDS.items()}
        print(command_help.commands_text(PROG, says, also=f"; {PROG} --version"), end="")
        return 0 if words else command_line.USAGE_ERROR
    name, *rest = words
    if name in ("-V", "--version"):
        print(f"{PROG} {compile_sweep.__version__}")
        return 0
    if missing := _missing(name):
        _refuse_without(f"{PROG} {name}", missing)
    if name == "explain":
        return _explain(rest)
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    raise UsageError(f"no command is called {name!r}; {hint}")


def exit_without_extra(name: str) -> None:
    """Ends `python -m orchestrator.NAME` with one sentence if modules of the extra `run` are missing, before it imports them."""
    if missing := _missing(name):
        sys.exit(command_line.run(lambda: _refuse_without(f"python -m orchestrator.{name}", missing)))


def _missing(name: str) -> list[str]:
    """Modules that a command cannot do without and that are not installed."""
    return [module for module in NEEDS.get(name, ()) if find_spec(module) is None]


def _refuse_without(prog: str, missing: Sequence[str]) -> NoReturn:
    lacks = f"{', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
    raise UsageError(f"{prog} needs {lacks}; install the extra that measures: pip install 'compile-sweep[run]'")


def _explain(words: Sequence[str]) -> int:
    options = command_line.parse(ExplainOptions, f"{PROG} explain", words)
    from orchestrator import sweep

    device = [] if options.device is None else ["--device", options.device]
    words = ["--workload", options.workload, "--size", options.size, "--seed", str(options.seed), *device]
    return sweep.main([*words, f"--explain={options.setting}"], f"{PROG} explain")


if __name__ == "__main__":
    sys.exit(main())
