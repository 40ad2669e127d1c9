"""Asks a fresh process for facts about a workload and the installed torch for a plan, so that the driver imports neither."""

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, Self

from compile_sweep.child_process import kill_session
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.own_packages import import_path
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.outcome import exit_text
from compile_sweep.schema.redact import last_line
from orchestrator.guard.watchdog import kill_marked

DEADLINE_S = 900.0  # seconds that a question may take by default, as long as a trial may
_MARKER = "COMPILE_SWEEP_DESCRIBER"  # environment variable that identifies what a describer's process started
PATIENCE_S = 20.0  # seconds without an answer after which a person is told what it waits for
_STILL = (
    "after {seconds:g} s, {about} is still being imported, or its model and batches made; it has {deadline:g} s (a file that "
    "trains when it is imported is a script: name it with --script)"
)
_UNBOUNDED = frozenset({"largest_batch"})  # questions that compile, one size after the other, and so have no deadline


class Describer:
    """A process that answers the questions of `compile_sweep.describe`, each only once; the first question starts it.

    It also implements `InstalledTorch`, the names that the installed torch knows.
    """

    def __init__(self, *, with_current_folder: bool = False, deadline_s: float = DEADLINE_S) -> None:
        self.with_current_folder, self.deadline_s = with_current_folder, deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._answers: dict[str, Any] = {}
        self._marker = uuid.uuid4().hex

    def start(self) -> None:
        """Starts the process early, because its imports take seconds."""
        path = import_path(with_current_folder=self.with_current_folder)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "compile_sweep.describe"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), _MARKER: self._marker},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            start_new_session=True,  # so that what the user's code starts ends with it
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the process and all that the user's code started in it, also in sessions of their own."""
        atexit.unregister(self.close)
        if self._process is not None:
            kill_session(self._process.pid)
            self._process.wait()
            kill_marked(self._marker, _MARKER)
            for stream in (self._process.stdin, self._process.stdout, self._output):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            self._process, self._unread = None, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, what: str, **about: Any) -> Any:
        """Returns the answer of `compile_sweep.describe.answer`; raises its errors, or WorkloadError after the deadline."""
        question = json.dumps({"ask": what, **about})
        if question not in self._answers:
            answered = self._answered(question)
            if "error" in answered:
                raise (SettingsError if answered["kind"] == "settings" else WorkloadError)(answered["error"])
            self._answers[question] = answered["answer"]
        return self._answers[question]

    def _answered(self, question: str) -> Mapping[str, Any]:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        asked = json.loads(question)
        about = asked.get("workload", "torch")
        with suppress(BrokenPipeError):  # the process has ended; the code below says why
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
        ends_at = None if asked["ask"] in _UNBOUNDED else time.monotonic() + self.deadline_s
        line = None
        if ends_at is not None and self.deadline_s > PATIENCE_S and "workload" in asked:
            line = self._line(process.stdout.fileno(), time.monotonic() + PATIENCE_S)
            if line is None:
                print(_STILL.format(about=about, seconds=PATIENCE_S, deadline=self.deadline_s), file=sys.stderr, flush=True)
        if line is None:
            line = self._line(process.stdout.fileno(), ends_at)
        if not line:
            ended = "" if line is None else exit_text(process.wait())
            said = last_line(self._output) or "; it printed nothing"
            self.close()  # the next question starts another process
            if ended:
                raise WorkloadError(f"the process that looks at {about} ended with {ended} before it had an answer{said}")
            raise WorkloadError(
                f"the process that looks at {about} had no answer after {self.deadline_s:g} s; importing it, building its model "
                f"or making its batches takes too long or waits for something{said}"
            )
        answered: Mapping[str, Any] = json.loads(line)
        return answered

    def _line(self, answers: int, ends_at: float | None) -> bytes | None:
        """Reads a line of the process's answers; empty if the process has ended, None if there is none by `ends_at`."""
        while b"\n" not in self._unread:
            if not select.select([answers], [], [], None if ends_at is None else max(0.0, ends_at - time.monotonic()))[0]:
                return None
            if not (read := os.read(answers, 1 << 16)):
                return b""
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def facts(self, workload: str, size: str | None, seed: int, *, has_gpu: bool) -> WorkloadFacts:
        """Returns facts about a workload, by default of its first size with a GPU and its last without; raises as `ask`."""
        return WorkloadFacts.from_dict(self.ask("facts", workload=workload, size=size, seed=seed, has_gpu=has_gpu))

    def inductor_options(self) -> Mapping[str, str]:
        options: Mapping[str, str] = self.ask("inductor_options")
        return options

    def config_options(self, module: str) -> Mapping[str, str]:
        options: Mapping[str, str] = self.ask("config_options", module=module)
        return options

    def backends(self) -> Sequence[str]:
        backends: Sequence[str] = self.ask("backends")
        return backends

    def ddp_arguments(self) -> Sequence[str]:
        arguments: Sequence[str] = self.ask("ddp_arguments")
        return arguments


@cache
def installed_torch() -> Describer:
    """Returns what the installed torch knows by name, from a process that starts only if the plan needs it."""
    return Describer()
