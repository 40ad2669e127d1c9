"""Watches what processes a script starts, because only its own process is measured.

A script that launches its training (`torch.multiprocessing.spawn`, torchrun in a subprocess) is refused at once. Forked processes
inherit the hooks of the measurement; in them nothing is measured, and one that trains ends the trial unless the script itself had
trained before.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing

from compile_sweep.script.replace import replaced

ELSEWHERE = (
    "the script never trains in its own process; it starts others, in which nothing can be measured: write it for torchrun and "
    "give --workers-per-trial"
)

SPAWNS = (
    "the script starts its training processes itself, with torch.multiprocessing.spawn; write it for torchrun, which sets RANK "
    "and WORLD_SIZE, and give --workers-per-trial"
)

_PYTHON = re.compile(r"python[\d.]*$")

_LAUNCHERS = ("torchrun", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun")

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


class Processes:
    """Processes that a script started.

    Args:
        refuse: Called with the reason when the script starts what cannot be measured; does not return.
        has_trained: Tells whether the script has trained in its own process.
    """

    def __init__(self, *, refuse: Callable[[str], None], has_trained: Callable[[], bool]) -> None:
        self.number = 0
        """Number of processes that were started with `multiprocessing`."""
        self.scripts: list[str] = []
        """Python files that were run in other processes."""
        self.trained_before = False
        """Whether the script had trained when it last started a process with `multiprocessing`."""
        self._refuse, self._has_trained = refuse, has_trained
        self._process = os.getpid()

    @property
    def is_fork(self) -> bool:
        """Whether this process was forked by the script."""
        return os.getpid() != self._process

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what is started in the block."""
        spawning = sys.modules["torch.multiprocessing.spawn"]  # as an attribute, a function has its name
        with (
            replaced(BaseProcess, "start", self._noting_starts),
            replaced(torch.multiprocessing, "start_processes", self._refusing),
            replaced(spawning, "start_processes", self._refusing),
            replaced(subprocess.Popen, "__init__", self._noting_commands),
            replaced(os, "system", self._noting_shell_commands),
        ):
            yield

    def _noting_starts(self, start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
        def noted(process: BaseProcess) -> None:
            self.number += 1
            self.trained_before = self._has_trained()
            start(process)

        return noted

    def _refusing(self, start: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._refuse(SPAWNS)

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
                "that this runs, and give --workers-per-trial"
            )
        if words and _PYTHON.match(os.path.basename(words[0])) and words[1:2] and words[1].endswith(".py"):
            self.scripts.append(words[1])


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
