"""A trial's attempts: repeated with back-off if the machines are at fault, and recorded when there is disk space."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import OK, Label, Status, Verdict, judge_death
from compile_sweep.schema.settings import CompileSettings
from orchestrator.guard import progress
from orchestrator.guard.progress import Progress
from orchestrator.guard.watchdog import ATTEMPT_MARKER, CrashReport
from orchestrator.run import ray_worker_context, sweep_folder, trial, tuning, worker, worker_group
from orchestrator.run.runner import unwritten_error
from orchestrator.run.train_errors import cause_of, death_of
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.tuning import gist
from orchestrator.run.worker import MeasurementFailed

WATCHED = ("log_crashes", "start_reaper", "set_deadline", "clear_deadline")
LOST = Verdict(status=Status.FAILED, label=Label.NODE_LOST, reason="the host of a worker left the cluster in phase steady")
FIGURES = {"samples_per_s": 5.0, "cpu_pressure": None, "graph_break_reasons": [], "recompile_reasons": []}
OUT_OF_MEMORY = Verdict(status=Status.INFEASIBLE, label=Label.OUT_OF_MEMORY, reason="out of memory")


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Board:
    """Records calls of the progress tracker, and knows earlier attempts."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.failed: list[str] = []

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        return list(self.failed) if method == "failures" else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trial, "time", clock)
    return clock


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    board = Board()
    monkeypatch.setattr(worker_group, "_ask", board)
    return board


def assignment_in(folder: Path, *, settings_key: str = "scope=eager", precompile: bool = False) -> Assignment:
    plan = TrialPlan(
        folder=str(folder),
        workload="toy",
        size="only",
        seed=0,
        num_workers=1,
        use_gpu=False,
        pipeline="resident",
        workers_at_once=1,
        claimed_cpus=0.5,
        compile_deadline_s=600.0,
        trial_deadline_s=900.0,
        precompile=precompile,
    )
    return Assignment(plan=plan, trial_id="7", settings=CompileSettings.parse(settings_key))


def ran(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, *verdicts: Verdict, waits_s: float = 0.0, **changed: Any
) -> Mapping[str, Any]:
    """Runs a trial whose attempts each wait for a host, take 10 s and end like this; returns the result for Tune."""
    coming = iter(verdicts)

    def attempt(assignment: Assignment) -> Any:
        clock.now += waits_s + 10
        told = {"phase": "done", "in_phase_s": 1.0, "elapsed_s": waits_s + 10, "neighbors": 0, "waited_s": waits_s}
        progress = Progress(trial_id="7", settings_key=assignment.settings.key, **told)
        verdict = next(coming)
        return SimpleNamespace(figures=FIGURES if verdict is OK else None, progress=progress, verdict=lambda assignment: verdict)

    monkeypatch.setattr(worker_group, "_attempt", attempt)
    return worker_group.run_trial(assignment_in(folder, **changed).to_dict())


@pytest.mark.usefixtures("board")
def test_what_worked_at_once_was_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    assert ran(tmp_path, monkeypatch, clock, OK) == {"status": "ok", "done": True}
    (record,) = records.read(tmp_path)
    assert (record.tries, record.retry_reasons, record.retried_s, clock.slept) == (1, [], 0.0, [])


def test_a_fault_of_the_machines_is_tried_again_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, board: Board
) -> None:
    ran(tmp_path, monkeypatch, clock, LOST, LOST, OK)
    (record,) = records.read(tmp_path)
    assert (record.status, record.tries, record.retry_reasons) == (Status.OK, 3, [LOST.reason, LOST.reason])
    assert clock.slept == [2.0, 4.0]
    assert (record.wall_s, record.retried_s) == (10.0, 26.0)
    assert [word[:3] for word in board.asked if word[0] == "record_failure"] == [
        ("record_failure", "7", 1),
        ("record_failure", "7", 2),
    ]


@pytest.mark.usefixtures("board")
def test_what_its_tries_waited_for_hosts_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    ran(tmp_path, monkeypatch, clock, LOST, LOST, OK, waits_s=100.0)
    (record,) = records.read(tmp_path)
    assert (record.waited_s, record.wall_s, record.retried_s) == (300.0, 10.0, 26.0)
    assert record.phases_s == {"starting": 0.0, "done": 10.0}


@pytest.mark.usefixtures("board")
def test_there_is_a_limit_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    most = Label.NODE_LOST.tries
    ran(tmp_path, monkeypatch, clock, *[LOST] * most)
    (record,) = records.read(tmp_path)
    assert (record.status, record.label, record.tries, len(record.retry_reasons)) == ("failed", "node-lost", most, most - 1)


@pytest.mark.usefixtures("board")
def test_a_fault_of_the_setting_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    ran(tmp_path, monkeypatch, clock, OUT_OF_MEMORY)
    (record,) = records.read(tmp_path)
    assert (record.label, record.tries) == ("out-of-memory", 1)


TRACED = Verdict(status=Status.FAILED, label=Label.EXCEPTION, reason="AssertionError: check_fn.guards_state must not be None")
FULL = "scope=full,mode=default,cudagraphs=off,dynamic=static,padding=max,optimizer=foreach"


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("last", [OK, TRACED, OUT_OF_MEMORY])
def test_what_fails_with_traced_functions_kept_is_tried_once_more_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, last: Verdict
) -> None:
    ran(tmp_path, monkeypatch, clock, TRACED, last, settings_key=FULL, precompile=True)
    (record,) = records.read(tmp_path)
    assert (record.status, record.label, record.precompile) == (last.status, last.label, False)
    assert (record.tries, record.retry_reasons, record.retried_s) == (2, [f"with --precompile: {TRACED.reason}"], 10.0)


@pytest.mark.usefixtures("board")
def test_an_attempt_lost_to_traced_functions_is_none_of_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    most = Label.NODE_LOST.tries
    ran(tmp_path, monkeypatch, clock, TRACED, *[LOST] * (most - 1), OK, settings_key=FULL, precompile=True)
    (record,) = records.read(tmp_path)
    assert (record.status, record.tries) == ("ok", most + 1)
    assert clock.slept == [0.0, 2.0, 4.0, 8.0]


def test_so_it_is_where_the_trials_process_died_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, board: Board
) -> None:
    board.failed = [f"with --precompile: {TRACED.reason}"]
    worker_died = Verdict(status=Status.FAILED, label=Label.WORKER_DIED, reason="without a word")
    ran(tmp_path, monkeypatch, clock, worker_died, TRACED, settings_key=FULL, precompile=True)
    (record,) = records.read(tmp_path)
    assert (record.label, record.tries, record.precompile) == ("exception", 3, False)


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize(
    ("verdict", "changed"),
    [
        (TRACED, {"settings_key": FULL}),  # nothing is kept
        (TRACED, {"precompile": True}),  # nothing is compiled
        (OUT_OF_MEMORY, {"settings_key": FULL, "precompile": True}),  # it did not fail because of that
    ],
)
def test_what_keeping_traced_functions_has_no_part_in_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, verdict: Verdict, changed: dict[str, Any]
) -> None:
    ran(tmp_path, monkeypatch, clock, verdict, **changed)
    (record,) = records.read(tmp_path)
    assert (record.label, record.tries, record.precompile) == (verdict.label, 1, changed.get("precompile", False))


def test_attempts_of_a_process_that_died_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, board: Board
) -> None:
    board.failed = ["the trial's own process failed"]
    ran(tmp_path, monkeypatch, clock, OK)
    (record,) = records.read(tmp_path)
    assert (record.tries, record.retry_reasons) == (2, ["the trial's own process failed"])


@pytest.mark.usefixtures("board")
def test_a_trial_that_is_recorded_already_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    ran(tmp_path, monkeypatch, clock, OK)
    assert ran(tmp_path, monkeypatch, clock)["status"] == "recorded"
    assert len(records.read(tmp_path)) == 1


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("full_for", [3, 10_000])
def test_a_record_waits_for_room_and_tune_is_told_if_there_never_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, full_for: int
) -> None:
    append, tries = records.append, iter(range(full_for))

    def full(folder: Path, record: records.TrialRecord | records.WarmStart) -> None:
        if next(tries, None) is not None:
            raise OSError(28, "No space left on device")
        append(folder, record)

    monkeypatch.setattr(records, "append", full)
    told = ran(tmp_path, monkeypatch, clock, OK)
    if full_for == 3:
        assert told == {"status": "ok", "done": True}
        assert len(records.read(tmp_path)) == 1
    else:
        assert told[worker_group.UNWRITTEN] == "No space left on device"
        assert clock.now < 10 + trial.RECORD_PATIENCE_S + 2


@pytest.mark.usefixtures("board")
def test_on_a_full_disk_a_record_takes_the_room_that_is_kept_and_no_other_trial_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    append, room = records.append, tmp_path / sweep_folder.ROOM_FILE

    def full(folder: Path, record: records.TrialRecord | records.WarmStart) -> None:
        if room.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        append(folder, record)

    monkeypatch.setattr(records, "append", full)
    room.touch()
    assert ran(tmp_path, monkeypatch, clock, OK) == {"status": "ok", "done": True, worker_group.UNWRITTEN: sweep_folder.ROOM_USED}
    assert len(records.read(tmp_path)) == 1
    assert clock.slept == [], "nothing was waited for"
    assert unwritten_error(tmp_path, sweep_folder.ROOM_USED).startswith(f"the disk with {tmp_path} is full")


def test_what_helps_depends_on_why_a_record_was_not_written(tmp_path: Path) -> None:
    assert "make room and go on" in unwritten_error(tmp_path, os.strerror(errno.ENOSPC))
    assert "put that right and go on" in unwritten_error(tmp_path, os.strerror(errno.EROFS))
    gone = unwritten_error(tmp_path / "gone", os.strerror(errno.ENOENT))
    assert "was removed or renamed" in gone
    assert "make room" not in gone


def test_the_log_of_a_trial_whose_own_process_died_is_cleared_of_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> NoReturn:
        raise ActorDiedError

    monkeypatch.setenv("HF_TOKEN", "hf_planted_token")
    monkeypatch.setattr(progress, "find_progress_actor", gone)
    assignment = assignment_in(tmp_path)
    assignment.log_folder.mkdir(parents=True)
    (assignment.log_folder / "worker-0.log").write_text("hf_planted_token\n")
    dead: Any = SimpleNamespace(config=assignment.to_dict(), get_error=lambda: RuntimeError("the actor died"))
    tuning.DeadTrials(tmp_path).on_trial_error(0, [], dead)
    assert [record.label for record in records.read(tmp_path)] == [Label.TRIAL_DIED]
    assert (assignment.log_folder / "worker-0.log").read_text() == "***\n"


def worker_that_measures_by(measure: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a train worker in this process."""
    monkeypatch.setattr(worker_group.ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
    monkeypatch.setattr(
        ray_worker_context.remote_logs, "log_file", lambda assignment, rank: nullcontext(tmp_path / "worker-0.log")
    )
    monkeypatch.setattr(worker, "watchdog", SimpleNamespace(**dict.fromkeys(WATCHED, lambda *arguments: None)))
    monkeypatch.setattr(ray_worker_context, "own_cores", lambda *shares: nullcontext((0,)))
    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setenv(ATTEMPT_MARKER, "001-a-f00")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")


def test_a_worker_whose_log_is_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(assignment: Assignment, parent: object, cpus: object, deadline: float, log: IO[str], scratch: Path) -> NoReturn:
        log.write("worker 0 of 1 is up\n")
        pytest.fail("it was written")

    worker_that_measures_by(measure, tmp_path, monkeypatch)
    monkeypatch.setattr(ray_worker_context.remote_logs, "log_file", lambda assignment, rank: nullcontext(Path("/dev/full")))
    with pytest.raises(MeasurementFailed, match=r"OSError: .*No space left on device"):
        worker_group.train_loop({"assignment": assignment_in(tmp_path).to_dict()})


def _raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*arguments: Any) -> NoReturn:
        raise error

    return fail


def test_a_host_whose_temporary_files_cannot_be_compiled_is_not_held_against_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_that_measures_by(lambda *arguments: pytest.fail("it was measured"), tmp_path, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    with pytest.raises(MeasurementFailed, match="set TMPDIR to another folder") as raised:
        worker_group.train_loop({"assignment": assignment_in(tmp_path).to_dict()})
    assert not raised.value.from_compiler


@pytest.mark.parametrize("error", [SystemExit("no data"), ValueError("no data"), KeyboardInterrupt("no data")])
def test_a_workload_that_exits_or_raises_is_told_of_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    worker_that_measures_by(_raising(error), tmp_path, monkeypatch)
    with pytest.raises(MeasurementFailed, match=f"builtins.{type(error).__name__}: no data"):
        worker_group.train_loop({"assignment": assignment_in(tmp_path).to_dict()})
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compile-sweep-001-a-f00" / "inductor")


class GroupFailed(Exception):
    """Resembles Ray Train's error."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__("Training failed due to worker errors:")
        self.worker_failures = dict(enumerate(failures))


LET_DOWN = MeasurementFailed("builtins.RuntimeError", "Connection closed by peer [127.0.0.1]:9", False, "log")
RAISED = MeasurementFailed("builtins.ValueError", "mine", False, "log")
DIED = RuntimeError("the actor died")
REFUSED = RayTaskError("execute()", "ray::RayTrainWorker.execute() (pid=1)\n  File x", ValueError("no interface eth7"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, None),
        (RuntimeError("no worker group"), None),
        (GroupFailed(RAISED), RAISED),
        (GroupFailed(LET_DOWN, RAISED), RAISED),
        (GroupFailed(LET_DOWN, DIED), None),
        (GroupFailed(RAISED, DIED), RAISED),
        (GroupFailed(LET_DOWN), LET_DOWN),
        (GroupFailed(DIED), None),
    ],
)
def test_of_several_workers_the_one_that_failed_by_itself_counts(
    error: Exception | None, cause: MeasurementFailed | None
) -> None:
    assert cause_of(error) is cause


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (AttributeError("no such thing"), Label.EXCEPTION),
        (OSError(28, "No space left on device"), Label.DISK_FULL),
        (ActorDiedError(), Label.ACTOR_LOST),
        (WorkerGroupError("worker 0 is gone", {0: DIED}), Label.WORKER_DIED),
        (WorkerGroupError("worker 0 raised", {0: RAISED}), Label.EXCEPTION),
        (ControllerError(RuntimeError("no room")), Label.WORKER_DIED),
    ],
)
def test_what_the_trial_itself_meets_is_told_from_what_ends_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, label: Label
) -> None:
    monkeypatch.setattr(ray, "nodes", list)
    death = death_of(assignment_in(tmp_path).plan, error, None, 10.0, CrashReport())
    assert judge_death(death).label == label


@pytest.mark.parametrize(
    "error", [REFUSED, REFUSED.as_instanceof_cause(), GroupFailed(REFUSED), ControllerError(REFUSED.as_instanceof_cause())]
)
def test_what_a_worker_raised_as_it_was_set_up_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray, "nodes", list)
    assert death_of(assignment_in(tmp_path).plan, error, None, 10.0, CrashReport()).error_text == "no interface eth7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: no such thing\n", "ValueError: no such thing"),
        ("\nCaught unexpected exception: 2 workers were killed\nand more", "Caught unexpected exception: 2 workers were killed"),
        ("", "RuntimeError"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_of_what_made_ray_give_up_the_line_is_told_that_says_most(text: str, said: str) -> None:
    assert gist(RuntimeError(text)) == said
