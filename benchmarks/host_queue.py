"""Runs a list of benchmarks side by side on the GPUs of this host, each on GPUs and cores of its own.

Background: the figures in docs/results.md take hours of one GPU, and hosts are available for less. So the list is a file, a
host's GPUs share it, and a further call with the same folder continues it: a job that succeeded is not repeated, and an
interrupted sweep is resumed.

A job is a line, `NAME GPUS: COMMAND`, where GPUS is a number or `all`. In the command, `{out}` is the folder, and `{sweep}` the
options that make a sweep write to, or resume in, the job's own folder below it; `python` is this interpreter. A job's output
is in `NAME.log`. Output: a line for each start and end, and `queue.json`, with the result of each job.

    python -m benchmarks.host_queue benchmarks/gpu.jobs --output results/gpu --for-s 1500
    python -m benchmarks.host_queue benchmarks/gpu.jobs --output results/gpu --only fidelity layers
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import tyro

from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.record import SWEEP_FILE
from orchestrator.environment import fingerprint
from orchestrator.guard import cores
from orchestrator.run.sweep_folder import write_json

PROG = "python -m benchmarks.host_queue"
ENDED = "queue.json"
_ALL = "all"
_GRACE_S = 30.0  # seconds that a job may take to stop; a sweep kills its trials and writes its report
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Run a list of benchmarks on this host's GPUs."""

    jobs: Annotated[Path, tyro.conf.Positional]
    """The file that lists the benchmarks."""
    output: Path
    """The folder that jobs write to. A later call finds there which jobs are done."""
    only: tuple[str, ...] = ()
    """Run only these jobs, in this order. A job that needs more GPUs than are free is overtaken by those behind it."""
    for_s: float | None = None
    """Stop running jobs after this many seconds; the next call continues."""
    places: int | None = None
    """Number of parts to divide the host into; by default one per GPU, or one without a GPU."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the list."""

    name: str
    gpus: int | None
    """None for all."""
    command: str


@dataclass(slots=True)
class _Running:
    job: Job
    places: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 if a job failed or was stopped, or 2 for input it cannot work with."""
    return command_line.run(lambda: _run(command_line.parse(Options, PROG, words)))


def read_jobs(path: Path) -> list[Job]:
    """Reads the jobs of a list, in order, skipping empty lines and lines that begin with #.

    Raises:
        ConfigError: The file cannot be read, a line is not a job, or a name occurs twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a list of jobs") from None
    jobs: dict[str, Job] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"(?P<name>[\w.-]+)\s+(?P<gpus>[1-9]\d*|all)\s*:\s*(?P<command>\S.*)", line.strip())
        if found is None:
            raise ConfigError(f"line {number} of {path} is not a job; write NAME GPUS: COMMAND, GPUS being a number or all")
        if found["name"] in jobs:
            raise ConfigError(f"line {number} of {path} calls a second job {found['name']}; names must differ")
        try:
            shlex.split(found["command"])
        except ValueError as error:
            raise ConfigError(f"line {number} of {path} is not a command ({error}); fix it") from None
        jobs[found["name"]] = Job(found["name"], None if found["gpus"] == _ALL else int(found["gpus"]), found["command"])
    return list(jobs.values())


def words_of(job: Job, output: Path) -> list[str]:
    """Returns the command of a job for this run."""
    folder = output / job.name
    sweep = ["--output", str(folder), *(["--resume"] if (folder / SWEEP_FILE).exists() else [])]
    words: list[str] = []
    for word in shlex.split(job.command):
        words += sweep if word == "{sweep}" else [word.replace("{out}", str(output))]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def _run(options: Options) -> int:
    jobs = read_jobs(options.jobs)
    by_name = {job.name: job for job in jobs}
    if unknown := [name for name in options.only if name not in by_name]:
        raise ConfigError(f"--only {unknown[0]} is not a job of {options.jobs}; use {', '.join(by_name)}")
    num_gpus = fingerprint().num_gpus
    places = (num_gpus or 1) if options.places is None else options.places
    if places < 1 or (num_gpus and places > num_gpus):
        most = f"1 to {num_gpus}" if num_gpus else "1 or more"
        raise ConfigError(f"--places {places} is not a number of places here; use {most}")
    make_room(options.output / ENDED)
    ended: dict[str, Any] = _ended(options.output)
    waiting = []
    for job in [by_name[name] for name in dict.fromkeys(options.only)] or jobs:
        if ended.get(job.name, {}).get("exit_code") == 0:
            print(f"{job.name}: done before", flush=True)
        elif (job.gpus or 1) > places:
            print(f"{job.name}: needs {job.gpus} GPUs, and here are {places}; left out", flush=True)
        else:
            waiting.append(job)
    return _Host(options, places, ended).run(waiting)


class _Host:
    """This host's slots, and the jobs that run on them."""

    def __init__(self, options: Options, places: int, ended: dict[str, Any]) -> None:
        self._options = options
        self._num_places = places
        self._ended = ended
        self._began = time.monotonic()
        self._running: list[_Running] = []
        self._all_well = True

    def run(self, waiting: list[Job]) -> int:
        """Runs the jobs, each as soon as there is room; returns the exit code."""
        try:
            while waiting or self._running:
                if self._options.for_s is not None and time.monotonic() - self._began >= self._options.for_s:
                    self._say(f"time is up; {len(waiting)} did not begin")
                    self._all_well = False
                    break
                for job in list(waiting):
                    if (places := self._room(job)) is not None:
                        waiting.remove(job)
                        self._begin(job, places)
                for one in [one for one in self._running if one.process.poll() is not None]:
                    self._end(one)
                time.sleep(_POLL_S)
        finally:
            self._stop()
        return 0 if self._all_well else 1

    def _room(self, job: Job) -> tuple[int, ...] | None:
        taken = {place for one in self._running for place in one.places}
        free = [place for place in range(self._num_places) if place not in taken]
        count = job.gpus or self._num_places
        return tuple(free[:count]) if count <= len(free) else None

    def _begin(self, job: Job, places: tuple[int, ...]) -> None:
        words = words_of(job, self._options.output)
        cpus = {cpu for place in places for cpu in cores.cpu_share(place, self._num_places)}
        log = (self._options.output / f"{job.name}.log").open("ab")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **only_gpus(places)}
        try:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: _begin_child(cpus),
            )  # fmt: skip
        except OSError as error:
            log.close()
            raise ConfigError(f"{job.name}: {words[0]} cannot be run ({error.strerror}); fix its command") from None
        self._running.append(_Running(job, places, process, log, time.monotonic()))
        self._say(f"{job.name}: begins on {', '.join(map(str, places))}")

    def _end(self, one: _Running) -> None:
        self._running.remove(one)
        one.log.close()
        code, seconds = one.process.wait(), time.monotonic() - one.began
        self._all_well &= code == 0
        self._ended[one.job.name] = {"exit_code": code, "seconds": round(seconds, 1), "places": list(one.places)}
        write_json(self._options.output / ENDED, self._ended)
        came = "done" if code == 0 else f"ended with exit code {code}, see {one.job.name}.log"
        self._say(f"{one.job.name}: {came}, {seconds:.0f} s")

    def _stop(self) -> None:
        """Ends running jobs in a way that a later call can continue."""
        for one in self._running:
            one.process.send_signal(signal.SIGINT)
        ends_at = time.monotonic() + _GRACE_S
        for one in list(self._running):
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.1, ends_at - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
            one.log.close()
            self._say(f"{one.job.name}: stopped after {time.monotonic() - one.began:.0f} s")

    def _say(self, words: str) -> None:
        print(f"[{time.monotonic() - self._began:7.1f} s] {words}", flush=True)


def _begin_child(cpus: set[int]) -> None:
    """Binds to these cores, and handles SIGINT even if a shell started the queue in the background, where it is ignored."""
    os.sched_setaffinity(0, cpus)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def only_gpus(places: Sequence[int]) -> dict[str, str]:
    """Returns the variable that makes only these GPUs visible to a job; empty on a host without GPUs."""
    if not fingerprint().num_gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(fingerprint().num_gpus)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[place] for place in places)}


def _ended(output: Path) -> dict[str, Any]:
    path = output / ENDED
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it to begin anew") from None
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
