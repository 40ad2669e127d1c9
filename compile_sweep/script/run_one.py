"""Runs a script once in this process: `python -P -m compile_sweep.script.run_one ASSIGNMENT`, a file in the run's folder.

Next to that file, it leaves `outcome` (JSON: a measurement, or an error), `trajectory` (the first steps) and, throughout the run,
`progress` (JSON: the phase, and figures of the first pass).
"""

import io
import json
import os
import pty
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import dropwhile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch

from compile_sweep.child_process import die_with
from compile_sweep.contract.installed_torch import import_inductor
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory
from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.usage import CacheUsage, watch_caches
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.harness.diagnostics.unsynchronized import unsynchronized_kernels_of_this_process
from compile_sweep.harness.protocol import Protocol, together
from compile_sweep.harness.toolchain import compile_whole_files, start_compile_workers, warm_cpp_headers
from compile_sweep.schema.causes.places import is_harness, is_installed, place_of
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import numerics, session_results
from compile_sweep.script.job import SEE_OUTPUT, ScriptError, ScriptJob
from compile_sweep.script.main_module import run_as_main
from compile_sweep.script.processes import ELSEWHERE
from compile_sweep.script.sandbox import keeping_writes
from compile_sweep.script.session import FUNCTIONAL, NO_OPTIMIZER, Kind, Session, Stop, leave
from compile_sweep.script.trial import BUNDLE, MOST_RUNS_AT_ONCE, TRAINED_ELSEWHERE

LEAVING_S = 10.0  # seconds that the script's `finally` blocks may take once everything is measured


class Reporter:
    """Writes a run's progress and outcome."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._progress: dict[str, Any] = {"phase": str(Phase.STARTING)}
        self.use: CacheUsage | None = None
        """Filled while the run's caches are watched."""
        self.originals: Mapping[str, str] = {}
        """Paths of the user's own files by those of the copies that the script runs in."""

    def on_phase(self, phase: Phase) -> None:
        """Reports the beginning of a phase."""
        self._tell(phase=str(phase))

    def on_discovered(self, session: Session) -> None:
        """Reports what the script trains."""
        self._tell(findings=session_results.findings(session))

    def on_first_pass(self, session: Session) -> None:
        """Reports the first timed pass."""
        self._tell(
            early=session_results.early(session),
            data_wait_share=session_results.data_wait_share(session),
            not_finite=session_results.not_finite(session),
        )

    def on_over(self, session: Session) -> None:
        """Writes the outcome when everything is found, or there is an error."""
        waiting = threading.Timer(LEAVING_S, leave)
        waiting.daemon = True
        waiting.start()
        if session.error is not None:
            self.error(session.error)
            return
        if session.kind is Kind.MEASURED and (reason := session_results.other_batch_size(session)):
            self.error(ScriptError(reason))
            return
        found: dict[str, Any] = {
            "findings": session_results.findings(session),
            "facts": numerics.facts_of(session.found),
            "runs_at_once": _runs_at_once(session) if session.kind is Kind.MEASURED else 1,
            "has_blocks": any(target.blocks for target in session.found.compiled),
        }
        if session.trajectory is not None:
            numerics.save(session.trajectory, self._folder / "trajectory")
        if session.kind is Kind.MEASURED:
            stream = session.stream
            found["as_it_is"] = {} if stream is None else stream.to_keep()
            found["measurement"] = together(session_results.measurement(session)).to_dict()
            if self.use is not None:
                bundle = torch.compiler.save_cache_artifacts()
                (self._folder / BUNDLE).write_bytes(bundle[0] if bundle else b"")
                found["cache_use"] = self.use.to_dict()
            found["core_wait_share"] = 0.0 if stream is None else max(stream.core_wait_shares, default=0.0)
            found["losses"] = [float(loss) for loss in session.losses]
            found["unsynchronized_kernels"] = unsynchronized_kernels_of_this_process()
            found["changed_in_classes"] = session.changed_in_classes
            found["gradient_check"] = None if session.gradient_check is None else asdict(session.gradient_check)
        self._write("outcome", found)

    def error(self, error: BaseException, spares: str | None = None) -> None:
        """Writes the error of a run that ended without a result, and the setting that spares the module that raised it."""
        if not isinstance(error, ScriptError):
            print_from_script(error, self.originals)
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        is_compilers = is_compiler_error(error)
        outcome = {
            "error_type": name,
            "error_text": in_originals(str(error), self.originals),
            "error_is_compilers": is_compilers,
            "error_at": place_of(error),
        }
        self._write("outcome", {**outcome, "error_spares": spares})

    def _tell(self, **news: Any) -> None:
        self._progress |= news
        self._write("progress", self._progress)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        written = self._folder / f"{name}.new"
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(written, self._folder / name)


def _runs_at_once(session: Session) -> int:
    """Returns how many runs like this one fit the GPU with a tenth of its memory to spare, and half of the host's memory."""
    needed = session.peaks.reserved_bytes or session.peaks.tensors_bytes or 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or not needed:
        return 1
    on_gpu = 0.9 * memory.total_bytes(session.device) / needed
    on_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2 / (getrusage(RUSAGE_SELF).ru_maxrss * 2**10)
    return max(1, min(MOST_RUNS_AT_ONCE, int(on_gpu), int(on_host)))


def main(assignment: Path) -> None:
    """Runs the assignment in the file; the process ends here, or when the one that started it does."""
    die_with(os.getppid())
    told = json.loads(assignment.read_text(encoding="utf-8"))
    reporter = Reporter(assignment.parent)
    job, kind = ScriptJob.from_dict(told["job"]), Kind(told["kind"])
    if not job.in_place:
        reporter.originals = {os.getcwd(): job.folder, told["script"]: job.path}
    settings = CompileSettings.parse(told["settings"])
    session = Session(
        settings,
        kind=kind,
        protocol=Protocol(**told.get("protocol", {})),
        forward_seed=told.get("forward_seed", 0),
        report=assignment.parent / TRAINED_ELSEWHERE,
        on_phase=reporter.on_phase,
        on_discovered=reporter.on_discovered,
        on_first_pass=reporter.on_first_pass,
        on_over=reporter.on_over,
    )
    torch.set_num_threads(max(1, torch.get_num_threads() // told.get("side_by_side", 1)))  # threads that wait spin
    compile_whole_files()
    import_inductor()
    if kind is Kind.MEASURED and torch.cuda.is_available():
        start_compile_workers()
    elif kind is Kind.MEASURED:
        warm_cpp_headers()
    with ExitStack() as watch:
        if "restored" in told:
            given = (Artifact(kind=kind, key=key, content=b"", cost_s=cost_s) for kind, key, cost_s in told["restored"])
            reporter.use = watch.enter_context(watch_caches(given))
        error = run_script(session, told["script"], job, Path(told["base"]))
    if error is not None:
        reporter.error(error, session_results.spares_culprit(session, error))
    leave()


def in_originals(text: str, originals: Mapping[str, str]) -> str:
    """Returns a text with the user's own paths in place of those of copies, which are gone after the run."""
    for copy, original in originals.items():
        text = text.replace(copy, original)
    return text


def print_from_script(error: BaseException, originals: Mapping[str, str]) -> None:
    """Prints the traceback of an exception, beginning in the script and without our frames, with the user's own paths."""
    text = "".join(_of_the_users(traceback.TracebackException.from_exception(error)).format())
    print(in_originals(text, originals), end="", file=sys.stderr)


def _of_the_users(shown: traceback.TracebackException) -> traceback.TracebackException:
    """Leaves out our frames, but not if one that the script called raised it, and the marks below lines of packages."""
    frames = list(dropwhile(lambda frame: is_harness(frame.filename), shown.stack))
    if frames and not is_harness(frames[-1].filename):
        frames = [frame for frame in frames if not is_harness(frame.filename)]
    shown.stack = traceback.StackSummary.from_list(
        (frame.filename, frame.lineno or 0, frame.name, frame.line) if is_installed(frame.filename) else frame for frame in frames
    )
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if other is not None:
            _of_the_users(other)
    return shown


def run_script(session: Session, script: str, job: ScriptJob, base: Path) -> BaseException | None:
    """Runs the script until the session is over; returns why it is not, unless the session reported that itself."""
    seed_all(job.seed)
    sys.path[:] = [_in_copy(folder, job.folder) for folder in sys.path]
    with empty_standard_input() as read:
        try:
            with session.running(), keeping_writes(base):
                run_as_main(script, job.arguments, module=job.module)
        except Stop:
            return None
        except SystemExit as error:
            return None if session.finish_early() else ended_early(session, error.code, has_read=read())
        except BaseException as error:
            return None if session.is_over else asked(error, has_read=read()) or not_found(error, job) or error
        return None if session.finish_early() else ended_early(session, 0, has_read=read())


def _in_copy(folder: str, original: str) -> str:
    """Returns the same folder in the copy of the working directory that the script runs in, unless it is outside or installed."""
    if not Path(folder).is_relative_to(original) or Path(folder).is_relative_to(sys.prefix) or "-packages" in folder:
        return folder
    return os.path.normpath(Path.cwd() / Path(folder).relative_to(original))


class _Nothing(io.RawIOBase):
    """A file that is empty and knows whether somebody has read it."""

    was_read = False

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readinto(self, buffer: object) -> int:
        self.was_read = True
        return 0


@contextmanager
def empty_standard_input() -> Iterator[Callable[[], bool]]:
    """Makes standard input empty in the block; yields a function that tells whether it was read.

    Below Python, it is a terminal of the usual size at its end, because progress bars ask `stty size` how wide they may be.
    """
    kept, nothing, kept_below = sys.stdin, _Nothing(), os.dup(0)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(nothing))
    terminal, below = pty.openpty()
    termios.tcsetwinsize(below, (24, 80))
    os.write(terminal, b"\x04" * 1000)  # each ends one read
    os.dup2(below, 0)
    try:
        yield lambda: nothing.was_read
    finally:
        sys.stdin = kept
        os.dup2(kept_below, 0)
        for descriptor in (terminal, below, kept_below):
            os.close(descriptor)


READ_NOTHING = "it read standard input, which is empty in a trial; have it read a file that an argument names"


def asked(error: BaseException, *, has_read: bool) -> ScriptError | None:
    """Returns the error for a script that failed after reading standard input, which is empty in a trial; None for others."""
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return ScriptError(
            "the script asks on standard input (input()), and nobody answers in a trial; have it take the answer as an argument"
        )
    if has_read and isinstance(error, Exception) and not is_compiler_error(error):
        return ScriptError(f"the script raised {type(error).__name__}: {error}; {READ_NOTHING}")
    return None


def not_found(error: BaseException, job: ScriptJob) -> ScriptError | None:
    """Returns the error for a script that imports from its working directory, as only `python -m` does; None for others."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or job.module is not None:
        return None
    beside = Path(job.folder, error.name.partition(".")[0])
    file = Path(job.path)
    if not (beside.is_dir() or beside.with_suffix(".py").is_file()) or not file.is_relative_to(job.folder):
        return None
    name = ".".join(file.relative_to(job.folder).with_suffix("").parts)
    return ScriptError(
        f"the script found no module {error.name}, which Python finds in the working directory only with -m; name the script as "
        f"a module, {name} instead of {file.relative_to(job.folder)}"
    )


def ended_early(session: Session, code: Any, *, has_read: bool = False) -> ScriptError:
    """Returns why a script that has ended produced no figures, and what to do."""
    error = _ended_early(session, code)
    return ScriptError(f"{error}; {READ_NOTHING}") if has_read else error


def _ended_early(session: Session, code: Any) -> ScriptError:
    found = session.found
    steps = found.num_steps + len(session.sizes)
    if code not in (0, None):
        if not isinstance(code, int):
            return ScriptError(f"the script ended after {steps} steps with the message {str(code).strip()[:200]!r}")
        hint = "; it may not know one of its arguments, which stand behind --" if code == 2 else ""
        return ScriptError(f"the script ended with exit code {code} after {steps} steps{hint}; {SEE_OUTPUT}")
    if session.is_functional:
        return ScriptError(FUNCTIONAL)
    if session.other_steps:
        return ScriptError(
            f"the script trained one model for {steps} steps and then others for {session.other_steps}, as cross-validation "
            "does; a figure takes some 50 steps of the first, more if something compiles late: have it train that for longer"
        )
    if steps:
        return ScriptError(
            f"the script ended after {steps} steps, and a figure takes some 50, more if something compiles late; have it train "
            "for longer"
        )
    if session.num_losses or session.found.num_taken:
        return ScriptError(NO_OPTIMIZER)
    if session.processes.number:
        return ScriptError(ELSEWHERE)
    if session.processes.scripts:
        return ScriptError(
            f"the script ended without a training step, but ran {session.processes.scripts[-1]}; if that trains, name it instead "
            "with its own arguments behind --"
        )
    return ScriptError(
        "the script ended without a training step: no backward pass and no step of an optimizer of torch.optim; name the script "
        f"that trains, and the arguments that make it train behind --; if those are right, see whether {SEE_OUTPUT}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
