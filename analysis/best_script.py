"""`best.py`: a setting as a training program, which is run in a fresh process before it is offered.

It contains the source that the trial executed. The functions that it shares with other settings, and the training loop, are
imported. Training needs torch, which this package does not import: the program runs in a process of its own, with empty compile
caches, like a trial.
"""

import contextlib
import inspect
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
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import pandas as pd

from analysis.formatting import duration, figure, interval, number, percent, text, upper_end
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.setting_text import PART_BREAK, defined_name, source_parts
from compile_sweep.schema.shapes import group_by_length
from compile_sweep.schema.visible_text import visible

BEST_FILE = "best.py"

_HARNESS = "compile_sweep.harness"

_OTHER_DEVICE = 3  # exit code of `compile_sweep.harness.training_script` for another device

_LAUNCHED_OTHER_DEVICE = re.compile(rf"exitcode\s*:\s*{_OTHER_DEVICE}\b")
"""Exit code for another device with several workers, whose launcher has exit codes of its own."""

_LONGEST_S = 1e6  # maximum seconds of any run: the system's timers end at 25 days

_ENDING_S = 40
"""Seconds that a launcher may take to end its workers; torchrun kills those that have not ended 30 s after it asked."""

_PROGRESS = "progress: "  # how a line on stderr begins with which `training_script` says how far it is
_LAST_LINES = 3  # number of stderr lines of a failed run that are quoted


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
    sentence: str  # the result as a sentence, with the figures
    came: dict[str, Any]  # what the program printed; empty if it printed nothing


def best_script(trial: pd.Series, *, seed: int, remarks: Sequence[str] = ()) -> str:
    """Returns the program for a trial's setting, with remarks below; raises ConfigError if the record has no source."""
    source = text(trial["source"])
    if not source:
        raise ConfigError(f"the record of “{trial['settings_label']}” holds no source to export; measure it again")
    run: dict[str, str | int] = {
        "workload": str(trial["workload"]), "size": str(trial["size"]), "seed": seed,
        "settings": str(trial["settings_key"]), "pipeline": text(trial["pipeline"]) or "resident",
    }  # fmt: skip
    measured = f"Measured {_rate(trial)} on {_devices(trial)}."
    workers = int(trial["num_workers"])
    how = "python best.py" if workers == 1 else f"python -m torch.distributed.run --nproc-per-node {workers} best.py"
    said = [f"# {line}" for sentence in (measured, *remarks) for line in textwrap.wrap(" ".join(sentence.split()), 126)]
    call = [f"            {name}={json.dumps(value, ensure_ascii=False)}," for name, value in run.items()]
    return "\n".join(
        [
            _with_imported_helpers(source.rstrip()),
            "",
            "",
            f"# Above: the settings, as they were measured. Below: the workload is trained with them, by {how}",
            *said,
            'if __name__ == "__main__":',
            f"    from {_HARNESS}.training_script import main",
            "",
            "    raise SystemExit(",
            "        main(",
            "            make_step,",
            *call,
            "        )",
            "    )",
            "",
        ]
    )


def rerun(
    trial: pd.Series, script: str, *, timeout_s: float | None = None, say: Callable[[str], None] = lambda line: None
) -> Rerun:
    """Runs the program in a fresh process with empty caches, and compares its throughput with the record's interval."""
    if find_spec("torch") is None:
        return Rerun(Outcome.NOT_RUN, "Not run again, because torch is not installed here.", {})
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


def _with_imported_helpers(source: str) -> str:
    """Returns the source with its helper functions imported from this package, unless one of them differs from the package's."""
    ours = _helpers()
    head, *pieces = source.split(PART_BREAK)
    own: list[str] = []
    names: dict[str, list[str]] = {}
    for piece in pieces:
        comment, code = re.fullmatch(r"((?:#[^\n]*\n)?)(.*)", piece, re.DOTALL).groups()  # type: ignore[union-attr]
        module, text_of_ours = ours.get(name := defined_name(code), ("", ""))
        if module and code != text_of_ours:
            return source
        if module:
            names.setdefault(module, []).append(name)
        own += [comment.rstrip() if module else piece] if comment or not module else []
    lines = head.split("\n")
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    if not names or not imports:
        return source
    rest = PART_BREAK.join([*(line for line in lines if line not in imports), *own])
    called = {module: [name for name in sorted(found) if re.search(rf"\b{name}\(", rest)] for module, found in names.items()}
    added = [f"from {module} import {', '.join(found)}" for module, found in sorted(called.items()) if found]
    last = len(lines) - lines[::-1].index(imports[-1])
    kept = [_needed(line, rest) if line in imports else line for line in lines[:last]]
    kept = [new for new, old in zip(kept, lines, strict=False) if new or not old]
    return PART_BREAK.join(["\n".join([*kept, "", *added, *lines[last:]]), *own])


def _helpers() -> dict[str, tuple[str, str]]:
    """Returns the module and the text of each function that a source may spell out, by name."""
    code = (files(_HARNESS) / "source_runtime.py").read_text(encoding="utf-8")
    found = {name: (f"{_HARNESS}.source_runtime", part) for name, part in source_parts(code).items()}
    return found | {group_by_length.__name__: (group_by_length.__module__, inspect.getsource(group_by_length).rstrip())}


def _needed(line: str, code: str) -> str:
    """Returns an import statement with only the names that the code uses; empty if there are none."""
    before, is_from, names = line.partition(" import ")
    if not is_from:
        return line if line == "import torch" or f"{line.removeprefix('import ')}." in code else ""
    used = [name for name in names.split(", ") if name == "annotations" or re.search(rf"\b{re.escape(name)}\b", code)]
    return f"{before} import {', '.join(used)}" if used else ""


def _finished(
    command: list[str], environment: dict[str, str], limit_s: float, say: Callable[[str], None]
) -> tuple[int | None, str, str]:
    """Returns exit code (None past the limit), stdout and stderr; ends everything that the command started."""
    err: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        reader = threading.Thread(target=_read, args=(process.stderr, err, say), daemon=True)
        reader.start()
        with _ended_as_a_group(process, reader):
            try:
                process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return None, "", ""
            reader.join(_ENDING_S)
            out.seek(0)
            return process.returncode, out.read().strip(), "".join(err).strip()


def _read(stream: IO[str], err: list[str], say: Callable[[str], None]) -> None:
    """Keeps what a process prints, and passes on at once what it says of how far it is."""
    with stream:
        for line in stream:
            if line.startswith(_PROGRESS):
                say(visible(line.removeprefix(_PROGRESS).strip()))
            else:
                err.append(line)


@contextlib.contextmanager
def _ended_as_a_group(process: subprocess.Popen[str], reader: threading.Thread) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()  # torchrun's workers are in groups of their own: it ends them itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including compile workers
        process.wait()
        reader.join(_ENDING_S)


def _printed(out: str) -> dict[str, Any] | None:
    """Parses the JSON object in the last line, printed by worker 0."""
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(came := json.loads(line), dict) and "samples_per_s" in came:
                return came
    return None


def _rate(trial: pd.Series) -> str:
    between = interval(trial["samples_per_s_low"], trial["samples_per_s_high"])
    return figure(trial["samples_per_s"], "samples/s", digits=4) + (f" (95%: {between})" if between else "")


def _devices(trial: pd.Series) -> str:
    workers = int(trial["num_workers"])
    return (f"{workers} × " if workers > 1 else "") + (text(trial["device"]) or "an unknown device")
