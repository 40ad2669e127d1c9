"""`python -m compile_sweep.run --settings X train.py …`: runs a training script with a sweep's winner applied, unchanged.

Under torchrun: `torchrun --nproc-per-node 2 -m compile_sweep.run --settings X train.py …`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro

from compile_sweep import command_line
from compile_sweep.child_process import importing
from compile_sweep.command_line import USAGE_ERROR, UsageError
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.main_module import run_as_main

if TYPE_CHECKING:
    from compile_sweep.script.winner import Applier

PROG = "python -m compile_sweep.run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train a script with compile settings applied, without a change to it."""

    settings: str
    """A sweep's folder, for its best setting; DIR:A7, for another one; a JSON file; or text such as
    scope=full,dynamic=auto."""
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT.py …")]
    """The script, or a module as for python -m, followed by its own arguments."""


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, unless the script ends the process with its own."""
    words = list(command_line.words_of(arguments))
    prepared: list[tuple[ScriptJob, Applier, str]] = []

    def prepare() -> int:
        own, script_arguments = _split(words)
        options = command_line.parse(Options, prog, own)
        job = ScriptJob.of(options.script, script_arguments, option=None)
        with importing():
            from compile_sweep.script.winner import Applier  # loads torch, which a mistake in the words need not wait for
        prepared.append((job, Applier(options.settings), options.script))
        return 0

    if code := command_line.run(prepare):
        return code
    ((job, applier, shown_as),) = prepared
    if (size := applier.settings.batch_size) is not None:
        print(f"the setting was measured with batch_size={size}, which is yours to pass to the script", file=sys.stderr)
    from compile_sweep.script.spawn import SpawnInPlace

    del sys.path[0]  # the folder of `-m` or of the installed command, which the script's own replaces
    with applier.own_compile.answered(plainly=not applier.settings.as_written), SpawnInPlace(_start_all).applied():
        applier.begin()
        try:
            run_as_main(job.path, job.arguments, module=job.module, shown_as=job.path if job.module else shown_as)
        finally:
            applier.end()
    return 0


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the words into the command's own, which end with the script, and the script's."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] == "--settings" else 1
    rest = list(words[at + 1 :])
    if at < len(words) and not _has_settings(words[:at]) and _has_settings(rest):
        raise UsageError(f"--settings stands after {words[at]}, whose own arguments follow it; put --settings before it")
    own = [word for word in words[: at + 1] if word != "-m"]  # as before a module's name behind `python` and `torchrun`
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _start_all(said: str, number: int, workers: int) -> NoReturn:
    """Ends a script that spawns another number of processes than were started, which alone apply the settings."""
    command = f"torchrun --nproc-per-node {number} -m compile_sweep.run --settings …"
    print(f"error: {said}; start this command once for each: {command}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _has_settings(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--settings" for word in words)


if __name__ == "__main__":
    sys.exit(main())
