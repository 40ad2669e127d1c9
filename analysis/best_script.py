"""`best.py`: a setting as a training program, which is run in a fresh process before it is offered.

It contains the exact source that the trial executed, and a training loop around it. Training needs torch, which this
package does not import: the program runs in a process of its own, with empty compile caches, like a trial.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

import pandas as pd

from analysis.formatting import duration, figure, interval, number, percent, text, upper_end
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.visible_text import visible

BEST_FILE = "best.py"

_OTHER_DEVICE = 3
"""Exit code of `compile_sweep.harness.training_script` for another device."""

_LAUNCHED_OTHER_DEVICE = re.compile(rf"exitcode\s*:\s*{_OTHER_DEVICE}\b")
"""Exit code for another device with several workers, whose launcher has exit codes of its own."""

_LONGEST_S = 1e6
"""Maximum seconds of any run: the system's timers end at 25 days."""

_ENDING_S = 40
"""Seconds that a launcher may take to end its workers; torchrun kills those that have not ended 30 s after it asked."""

_PROGRESS = "progress: "
"""How a line on stderr begins with which `training_script` says how far it is."""

_LAST_LINES = 3
"""Number of stderr lines of a failed run that are quoted."""


class Outcome(StrEnum):
    """The result of running the program again."""

    INSIDE = "inside"
    """As fast as recorded: inside the record's interval."""

    OUTSIDE = "outside"
    """It ran, but its speed is outside the record's interval."""

    OTHER_DEVICE = "other-device"
    """This host lacks the device that was measured, so nothing was run."""

    FAILED = "failed"
    """The program did not run, or a loss is not finite."""

    NOT_RUN = "not-run"


class Rerun(NamedTuple):
    """A run of the program in a fresh process."""

    outcome: Outcome
    sentence: str
    """The result as a sentence, with the figures."""
    came: dict[str, Any]
    """What the program printed; empty if it printed nothing."""


def best_script(trial: pd.Series, *, seed: int, remarks: Sequence[str] = ()) -> str:
    """Returns the program for a trial's setting.

    Args:
        trial: The trial's row, as `load` returns it.
        seed: Seed of the sweep.
        remarks: Sentences above the training loop, such as why this setting was chosen, and the result of a run.

    Raises:
        ConfigError: The record has no source.
    """
    source = text(trial["source"])
    if not source:
        raise ConfigError(f"the record of “{trial['settings_label']}” holds no source to export; measure it again")
    run: dict[str, str | int] = {
        "workload": str(trial["workload"]), "size": str(trial["size"]), "seed": seed,
        "settings": str(trial["settings_key"]), "pipeline": text(trial["pipeline"]) or "resident",
    }  # fmt: skip
    imports, loop = _training_loop(source)
    measured = f"Measured {_rate(trial)} on {_devices(trial)}."
    workers = int(trial["num_workers"])
    how = "python best.py" if workers == 1 else f"python -m torch.distributed.run --nproc-per-node {workers} best.py"
    said = [f"# {line}" for sentence in (measured, *remarks) for line in textwrap.wrap(" ".join(sentence.split()), 126)]
    call = "\n".join(f"            {name}={_quoted(value)}," for name, value in run.items())
    return "\n".join(
        [
            source.rstrip(),
            "",
            "",
            "# Above: the settings, as they were measured. Below: a training loop around them, for the workload they were",
            f"# measured with; it needs the package compile-sweep. Run it with: {how}",
            *said,
            "",
            imports,
            "",
            loop,
            "",
            "",
            'if __name__ == "__main__":',
            "    sys.exit(",
            "        main(",
            "            make_step,",
            call,
            "        )",
            "    )",
            "",
        ]
    )


def rerun(
    trial: pd.Series, script: str, *, timeout_s: float | None = None, say: Callable[[str], None] = lambda line: None
) -> Rerun:
    """Runs the program in a fresh process with empty compile caches and compares its throughput with the record's interval.

    Args:
        trial: The row that the program was made from.
        script: Result of `best_script`.
        timeout_s: Seconds until the run is abandoned; None for four times what the trial took, plus ten minutes.
        say: Called with each line of progress.
    """
    limit_s = min(timeout_s if timeout_s is not None else 4 * (number(trial["wall_s"]) or 0.0) + 600, _LONGEST_S)
    with tempfile.TemporaryDirectory(prefix="best-") as scratch:
        path = Path(scratch) / BEST_FILE
        path.write_text(script, encoding="utf-8")
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}
        workers = int(trial["num_workers"])
        launcher: list[str] = []
        if workers > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
        device = text(trial["device"]) or "cpu"
        command = [sys.executable, *launcher, str(path), "--device", "cpu" if device == "cpu" else "cuda"]
        took = number(trial["wall_s"])
        say(f"{'its trial took ' + duration(took) + ', and ' if took else ''}the run is abandoned after {duration(limit_s)}")
        code, out, err = _finished([*command, "--expect-device", device], environment, limit_s, say)
    if code == _OTHER_DEVICE or (workers > 1 and code and _LAUNCHED_OTHER_DEVICE.search(err)):
        return Rerun(Outcome.OTHER_DEVICE, f"Not run again: this host is not {_devices(trial)}, where it was measured.", {})
    came = _printed(out)
    if code is None:
        return Rerun(Outcome.FAILED, f"Run again in a fresh process, it did not finish within {figure(limit_s, 's')}.", {})
    if code != 0 or came is None:
        is_sound = came is None or came["finite"]
        last = " ".join(" ".join(err.split("\n")[-_LAST_LINES:]).split())
        why = f"exit code {code}{': ' if last else ''}{last}" if is_sound else "a loss is not finite"
        return Rerun(Outcome.FAILED, f"Run again in a fresh process, it failed: {why}", came or {})
    return _judged(trial, came)


def _judged(trial: pd.Series, came: dict[str, Any]) -> Rerun:
    rate = float(came["samples_per_s"])
    low, recorded = (number(trial[name]) for name in ("samples_per_s_low", "samples_per_s"))
    high = upper_end(trial["samples_per_s_high"])
    found = f"Run again in a fresh process on {came['device']} it reached {figure(rate, 'samples/s', digits=4)}"
    if low is None or high is None or recorded is None:
        return Rerun(Outcome.OUTSIDE, f"{found}; the record has no interval to compare it with.", came)
    between = interval(low, high)
    if low <= rate <= high:
        return Rerun(Outcome.INSIDE, f"{found}, inside the recorded {between}.", came)
    edge = high if rate > high else low
    beyond = f"{percent(abs(rate / edge - 1))} {'above' if rate > high else 'below'}"
    return Rerun(Outcome.OUTSIDE, f"{found}, {beyond} the recorded {between}.", came)


def _training_loop(source: str) -> tuple[str, str]:
    """Returns the imports of harness/training_script.py that the source lacks, and what follows them, without torch."""
    code = (files("compile_sweep.harness") / "training_script.py").read_text(encoding="utf-8")
    there = {(module, name) for module, name, _ in _imports(source)}
    imports = _imports(code)
    whole = [f"import {name}" for module, name, _ in imports if module is None and (module, name) not in there]
    parts: dict[str, list[str]] = {}
    for module, name, _ in imports:
        if module is not None and (module, name) not in there:
            parts.setdefault(module, []).append(name)
    named = [f"from {module} import {', '.join(names)}" for module, names in parts.items()]
    last = max(line for _, _, line in imports)
    return "\n".join([*whole, "", *named]), "\n".join(code.splitlines()[last:]).strip()


def _imports(code: str) -> list[tuple[str | None, str, int]]:
    """Returns each name imported at top level: its module, or None for a module itself, and the statement's last line."""
    found: list[tuple[str | None, str, int]] = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            found += [(module, alias.name, node.end_lineno or node.lineno) for alias in node.names]
    return found


def _finished(
    command: list[str], environment: dict[str, str], limit_s: float, say: Callable[[str], None]
) -> tuple[int | None, str, str]:
    """Returns exit code (None past the limit), stdout and stderr; ends everything that the command started."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    out: list[str] = []
    err: list[str] = []
    with _ended_as_a_group(process, _reading(process.stdout, out.append), _reading(process.stderr, err.append, say)) as readers:
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, "", ""
        for reader in readers:
            reader.join(_ENDING_S)
        return process.returncode, "".join(out).strip(), "".join(err).strip()


def _reading(stream: IO[str] | None, keep: Callable[[str], None], say: Callable[[str], None] | None = None) -> threading.Thread:
    """A thread that keeps what a process prints, and passes on at once what it says of how far it is."""

    def read() -> None:
        assert stream is not None
        with stream:
            for line in stream:
                if say is not None and line.startswith(_PROGRESS):
                    say(visible(line.removeprefix(_PROGRESS).strip()))
                else:
                    keep(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _ended_as_a_group(process: subprocess.Popen[str], *readers: threading.Thread) -> Iterator[Sequence[threading.Thread]]:
    try:
        yield readers
    finally:
        process.terminate()  # torchrun's workers are in groups of their own: it ends them itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including compile workers
        process.wait()
        for reader in readers:
            reader.join(_ENDING_S)


def _printed(out: str) -> dict[str, Any] | None:
    """Parses the JSON object in the last line, printed by worker 0."""
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(came := json.loads(line), dict) and "samples_per_s" in came:
                return came
    return None


def _quoted(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _rate(trial: pd.Series) -> str:
    between = interval(trial["samples_per_s_low"], trial["samples_per_s_high"])
    return figure(trial["samples_per_s"], "samples/s", digits=4) + (f" (95 %: {between})" if between else "")


def _devices(trial: pd.Series) -> str:
    workers = int(trial["num_workers"])
    return (f"{workers} × " if workers > 1 else "") + (text(trial["device"]) or "an unknown device")
