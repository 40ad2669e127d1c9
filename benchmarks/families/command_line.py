"""Runs commands of this project as a user's shell would, in processes that share the imports of this one.

Background: importing torch and transformers takes longer than checking a tiny model, and `check` and a sweep do it four times.
`shared_imports` makes the processes that they start with `python -m MODULE` forks of this process instead, which has to have
imported what they need, and must not have computed anything. All else is what the command does.
"""

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from orchestrator import check, sweep
from orchestrator.plan import describer
from orchestrator.run import fork_server, trial_spec, worker

BUDGET_S = 1200.0  # of a sweep; enough that no setting is left out
WINDOW_S = 1.0  # what one setting's steps are timed for: the table shows no times

_SHARED = ("transformers.modeling_utils", "transformers.generation", "transformers.modeling_outputs", "analysis.final_summary")


class ForkedModule:
    """A fork of this process that runs a module; used like the `subprocess.Popen` of `python -P -m MODULE ARGUMENTS`."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stderr: IO[bytes], **_: Any) -> None:
        _python, _alone, _module, module, *arguments = command
        asked, questions = os.pipe()
        answers, answered = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: they are OpenBLAS's, which expect a fork
            self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor, standard in ((asked, 0), (answered, 1), (stderr.fileno(), 2)):
                os.dup2(descriptor, standard)
            sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
            os.closerange(3, max(questions, answered) + 1)
            os.environ.update(env)
            _end_with(lambda: _run(module, arguments))
        os.close(asked)
        os.close(answered)
        self.stdin, self.stdout = os.fdopen(questions, "wb", buffering=0), os.fdopen(answers, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kills it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _run(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module has been imported by its name, too
        runpy.run_module(module, run_name="__main__")


def _end_with(work: Callable[[], object]) -> None:
    """Ends this process after the work, with the exit code of what it returns or raises."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_shared() -> None:
    """Imports what the forked processes need."""
    worker.import_harness()
    for name in _SHARED:
        importlib.import_module(name)


@contextlib.contextmanager
def shared_imports() -> Iterator[None]:
    """Makes describers and fork servers that start inside the block forks of this process."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedModule})
    with mock.patch.object(describer, "subprocess", forking), mock.patch.object(fork_server, "subprocess", forking):
        yield


def run(command: Callable[[Sequence[str]], int], words: Sequence[str], log: Path) -> tuple[int, str]:
    """Runs a command; returns its exit code and what it printed, which is in the log, too."""
    with log.open("w+", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            code = command(words)
        except SystemExit as ended:  # of tyro's, for words that it does not know
            code = ended.code if isinstance(ended.code, int) else 1
    return code, log.read_text(encoding="utf-8")


def checked(workload: str, log: Path, *, backend: str) -> tuple[int, str]:
    """Runs `compile-sweep check`; returns its exit code and what it printed."""
    return run(check.main, [workload, "--device", "cpu", "--backend", backend, "--scopes", "full"], log)


def swept(workload: str, settings: Sequence[str], folder: Path, log: Path) -> tuple[int, str]:
    """Runs `compile-sweep sweep` with these settings into the folder; returns its exit code and what it printed."""
    own = ["--workload", workload, "--settings", *settings, "--output", str(folder), "--runner", "local", "--device", "cpu"]
    with mock.patch.object(trial_spec, "_TIMED_SHARE", WINDOW_S / BUDGET_S):
        return run(sweep.main, [*own, "--cache-store", "none", "--time-budget-s", str(BUDGET_S)], log)
