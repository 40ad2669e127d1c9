"""Watches what processes a script starts, because only the main thread of its own process is measured.

A script that launches its training by a command such as torchrun is refused at once, and what it runs by
`torch.multiprocessing.spawn` runs in its own process instead. Other processes that it starts with `multiprocessing` before it has
trained itself report their first backward pass or step in a file, which ends the trial. Forked processes inherit the hooks of the
measurement; in them nothing is measured.
"""

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from compile_sweep.contract.installed_torch import private
from compile_sweep.schema.journal import written_whole
from compile_sweep.schema.visible_text import counted
from compile_sweep.script.monkeypatch import replaced
from compile_sweep.script.spawn import SpawnInPlace

_worker_loop = private("torch.utils.data._utils.worker", "_worker_loop")  # what the processes of a DataLoader run

ELSEWHERE = (
    "the script never trains in its own process; it starts others, in which nothing can be measured: write it for torchrun and "
    "sweep with --workers-per-trial"
)

_NO_MODULE = (
    "no module with trained parameters is called with gradients on, so there is nothing to compile; call the model itself, "
    "model(x), not its forward or functions of its parameters"
)

_IN_A_THREAD = (
    "the script trains in a thread that it starts, and only what its main thread runs can be measured; call what the thread runs "
    "directly, train() in place of threading.Thread(target=train).start()"
)

_PYTHON = re.compile(r"python[\d.]*$")

_LAUNCHERS = ("torchrun", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun")

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


class Processes:
    """Processes that a script started; `refuse` is called, and does not return, for what cannot be measured."""

    def __init__(self, *, refuse: Callable[[str], None], has_trained: Callable[[], bool], report: Path | None = None) -> None:
        self.number = 0
        """Number of processes that were started with `multiprocessing`."""
        self.scripts: list[str] = []
        """Python files that were run in other processes."""
        self.trained_before = False
        """Whether the script had trained when it last started a process with `multiprocessing`."""
        self._refuse, self._has_trained, self._report = refuse, has_trained, report
        self._process = os.getpid()
        self._spawn = SpawnInPlace(lambda *found: refuse(_of_another_number(*found)))

    @property
    def is_fork(self) -> bool:
        """Whether this process was forked by the script."""
        return os.getpid() != self._process

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what is started in the block."""
        with (
            replaced(BaseProcess, "start", self._noting_starts),
            self._spawn.applied(),
            replaced(subprocess.Popen, "__init__", self._noting_commands),
            replaced(os, "system", self._noting_shell_commands),
        ):
            yield

    def _noting_starts(self, start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
        def noted(process: BaseProcess) -> None:
            self.number += 1
            self.trained_before = self._has_trained()
            if self._report is not None and not self.trained_before and getattr(process, "_target", None) is not _worker_loop:
                process.run = Reporting(process, self._report)  # type: ignore[method-assign]
            start(process)

        return noted

    def _noting_commands(self, start: Callable[..., None]) -> Callable[..., None]:
        def noted(process: Any, args: Any, *rest: Any, **named: Any) -> None:
            self._note(args)
            start(process, args, *rest, **named)

        return noted

    def _noting_shell_commands(self, run: Callable[[Any], int]) -> Callable[[Any], int]:
        def noted(command: Any) -> int:
            self._note(command)
            return run(command)

        return noted

    def _note(self, command: Any) -> None:
        words = words_of(command)
        if launcher := launcher_in(words):
            self._refuse(
                f"the script starts its training with {launcher}, in processes in which nothing can be measured; name the script "
                "that this runs, and sweep with --workers-per-trial"
            )
        if words and _PYTHON.match(os.path.basename(words[0])) and words[1:2] and words[1].endswith(".py"):
            self.scripts.append(words[1])


def why_no_module() -> str:
    """Says why a script that steps has no module to compile; call it where it steps."""
    return _NO_MODULE if threading.current_thread() is threading.main_thread() else _IN_A_THREAD


def _of_another_number(said: str, number: int, workers: int) -> str:
    has = f"a trial has {counted(workers, 'worker')}"
    return f"{said}, and {has}; sweep with --workers-per-trial {number}, or have the script start {workers}"


class Reporting:
    """Runs what a process is to run, and reports its first backward pass or step; goes to the process with it."""

    def __init__(self, process: BaseProcess, report: Path) -> None:
        self._process, self._report = process, report

    def __call__(self) -> None:
        """Runs it, in the new process."""
        has_reported = False

        def report() -> None:
            nonlocal has_reported
            if not has_reported:
                has_reported = True
                with written_whole(self._report) as unfinished:
                    unfinished.write_text(_elsewhere(self._process), encoding="utf-8")

        def reporting(backward: Callable[..., None]) -> Callable[..., None]:
            def reported(*args: Any, **kwargs: Any) -> None:
                report()
                backward(*args, **kwargs)

            return reported

        hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: report())
        try:
            with replaced(torch.autograd, "backward", reporting):
                type(self._process).run(self._process)
        finally:
            hook.remove()


def _elsewhere(process: BaseProcess) -> str:
    """Says that a process trains, and what to do."""
    target = getattr(process, "_target", None)
    is_pools = getattr(target, "__module__", "") in ("multiprocessing.pool", "concurrent.futures.process")
    runs = "a worker of a pool" if is_pools else f"which runs {getattr(target, '__name__', type(process).__name__)}"
    return (
        f"the script trains in a process that it starts itself with multiprocessing, {runs}, where nothing can be measured; "
        "write it for torchrun, which sets RANK and WORLD_SIZE, and sweep with --workers-per-trial, or have it train in its own "
        "process"
    )


def words_of(command: Any) -> list[str]:
    """Returns the words of a command, given as text or as a sequence; none if they cannot be told."""
    try:
        return shlex.split(command) if isinstance(command, str) else [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        return []


def launcher_in(words: Sequence[str]) -> str | None:
    """Returns the launcher of training processes that a command begins with; None if it begins with none."""
    name = os.path.basename(words[0]) if words else ""
    if name in _LAUNCHERS and words[1:]:
        return name
    if name == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate launch"
    module = words[2] if _PYTHON.match(name) and words[1:2] == ["-m"] and words[2:] else ""
    return f"python -m {module}" if module in _LAUNCHER_MODULES else None
