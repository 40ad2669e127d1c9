"""Parts that need Ray, on one real local session."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import TESTS, is_running, wait_until

from compile_sweep.schema import record as records
from compile_sweep.schema.errors import SessionError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import CompileSettings
from orchestrator.run.trial_spec import Assignment, TrialPlan

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def test_the_session_listens_on_the_loopback_alone_and_asks_for_a_token() -> None:
    import ray

    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")


def test_a_progress_actor_tells_phases_of_running_trials_and_forgets_ended_ones() -> None:
    import ray

    from orchestrator.guard.progress import find_progress_actor, start_progress_actor, trial_progress

    with start_progress_actor() as progress_actor:
        ray.get(progress_actor.begin.remote("1", "scope=eager"))
        ray.get(progress_actor.enter_phase.remote("1", "building"))
        ray.get(progress_actor.enter_phase.remote("2", "building"))  # never began
        progress = trial_progress("1")
        assert progress is not None
        assert (progress.settings_key, progress.phase) == ("scope=eager", "building")
        assert 0 <= progress.in_phase_s <= progress.elapsed_s
        ray.get(find_progress_actor().end.remote("1"))
        assert ray.get(find_progress_actor().running.remote()) == []


def test_a_second_sweep_in_a_cluster_is_refused_in_a_sentence() -> None:
    from orchestrator.guard.progress import start_progress_actor

    with (
        start_progress_actor(),
        pytest.raises(SessionError, match="another sweep is running in this cluster"),
        start_progress_actor(),
    ):
        pytest.fail("two progress actors")


def test_a_progress_actor_knows_who_was_on_a_host_while_a_trial_warmed_up() -> None:
    import ray

    from orchestrator.guard.progress import start_progress_actor, trial_progress

    with start_progress_actor() as progress_actor:

        def tell(method: str, *words: str) -> None:
            ray.get(getattr(progress_actor, method).remote(*words))

        def neighbours(trial: str) -> int:
            progress = trial_progress(trial)
            assert progress is not None
            return progress.neighbors

        for trial, hosts in {"early": "a", "warming": "ab", "late": "b", "elsewhere": "c", "not up": ""}.items():
            tell("begin", trial, "scope=eager")
            for host in hosts if trial != "late" else "":
                tell("worker_started", trial, host)
        tell("worker_started", "nobody", "a")
        tell("end", "early")
        tell("enter_phase", "warming", "warming-up")
        assert neighbours("warming") == 0  # the early one was gone, the late one is not there yet
        tell("worker_started", "late", "b")
        tell("end", "late")
        tell("enter_phase", "warming", "steady")
        tell("begin", "later", "scope=eager")
        tell("worker_started", "later", "a")
        assert neighbours("warming") == 1
        assert neighbours("later") == 0
        tell("worker_started", "later", "a", "a:3")
        tell("worker_started", "later", "c", "c:0")
        told = trial_progress("later")
        assert told is not None
        assert told.gpus == ("a:3", "c:0")


def test_a_progress_actor_whose_process_was_killed_answers_again_and_learns_of_running_trials_anew() -> None:
    import ray

    from orchestrator.guard.progress import start_progress_actor, trial_progress

    with start_progress_actor() as progress_actor:

        def process_id() -> int:
            return int(ray.get(getattr(progress_actor, "__ray_call__").remote(lambda _: os.getpid()), timeout=60))  # noqa: B009

        ray.get(progress_actor.begin.remote("1", "scope=eager"))
        ray.get(progress_actor.record_failure.remote("1", 1, "it was lost"))
        ray.get(progress_actor.record_failure.remote("1", 1, "it was lost"))  # reported twice, as happens if the answer is lost
        assert ray.get(progress_actor.failures.remote("1")) == ["it was lost"]
        killed = process_id()
        ray.kill(progress_actor, no_restart=False)
        wait_until(lambda: process_id() != killed, 60)
        ray.get(progress_actor.enter_phase.remote("1", "steady", "scope=eager"), timeout=60)
        progress = trial_progress("1")
        assert progress is not None
        assert (progress.settings_key, progress.phase) == ("scope=eager", "steady")
        assert ray.get(progress_actor.failures.remote("1")) == []
        ray.get(progress_actor.end.remote("1"))
        ray.get(progress_actor.enter_phase.remote("1", "checking", "scope=eager"))  # late, and must not be brought back
        assert ray.get(progress_actor.running.remote()) == []


def test_a_placement_group_whose_creator_died_is_freed_and_others_are_not() -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from orchestrator.run.tuning import remove_orphaned_placement_groups

    @ray.remote(num_cpus=0)
    class Creator:
        def create(self) -> str:
            group = placement_group([{"CPU": 0.1}])
            ray.get(group.ready())
            return str(group.id.hex())

    mine = placement_group([{"CPU": 0.1}])
    ray.get(mine.ready())
    living, dying = Creator.remote(), Creator.remote()
    kept, orphaned = ray.get([living.create.remote(), dying.create.remote()])
    assert remove_orphaned_placement_groups() == 0
    ray.kill(dying)
    ends_at = time.monotonic() + 20
    while placement_group_table()[orphaned]["state"] != "REMOVED":
        remove_orphaned_placement_groups()
        assert time.monotonic() < ends_at
        time.sleep(0.1)
    states = {identifier: group["state"] for identifier, group in placement_group_table().items()}
    assert (states[kept], states[mine.id.hex()]) == ("CREATED", "CREATED")
    remove_placement_group(mine)
    ray.kill(living)


def assignment_in(folder: Path, **plan: Any) -> Assignment:
    """A trial of the sweep in this folder."""
    usual: dict[str, Any] = {
        "folder": str(folder),
        "workload": "toy",
        "size": "only",
        "seed": 0,
        "num_workers": 1,
        "use_gpu": False,
        "pipeline": "resident",
        "workers_at_once": 1,
        "claimed_cpus": 0.5,
        "compile_deadline_s": 1000.0,
        "trial_deadline_s": 1000.0,
    }
    return Assignment(plan=TrialPlan(**{**usual, **plan}), trial_id="7", settings=CompileSettings.parse("scope=eager"))


def died(folder: Path, assignment: Assignment) -> None:
    """Reports twice that the trial's own process died."""
    import ray

    from orchestrator.guard.progress import start_progress_actor
    from orchestrator.run.tuning import DeadTrials

    trial: Any = SimpleNamespace(config=assignment.to_dict(), get_error=lambda: RuntimeError("the actor died"))
    with start_progress_actor() as progress_actor:
        ray.get(progress_actor.begin.remote("7", "scope=eager"))
        cleanup = DeadTrials(folder)
        cleanup.on_trial_error(iteration=0, trials=[], trial=trial)
        cleanup.on_trial_error(iteration=0, trials=[], trial=trial)
        assert ray.get(progress_actor.running.remote()) == []


@pytest.mark.parametrize(("deadline_s", "label"), [(1000.0, "trial-died"), (0.0, "not-started")])
def test_a_trial_whose_process_died_gets_the_record_it_could_not_write(tmp_path: Path, deadline_s: float, label: str) -> None:
    died(tmp_path, assignment_in(tmp_path, compile_deadline_s=deadline_s, trial_deadline_s=deadline_s))
    (record,) = records.read(tmp_path)
    assert (record.trial_id, record.status, record.label) == ("7", Status.FAILED, label)
    assert records.read_warm_starts(tmp_path) == []


def test_a_trial_that_is_started_again_is_recorded_only_if_it_is_not_to_be(tmp_path: Path) -> None:
    import ray

    from orchestrator.guard.progress import start_progress_actor
    from orchestrator.run.tuning import DeadTrials

    def recovered(folder: Path, deadline_s: float) -> list[str]:
        assignment = assignment_in(folder, compile_deadline_s=deadline_s, trial_deadline_s=deadline_s)
        trial: Any = SimpleNamespace(config=assignment.to_dict(), get_error=lambda: RuntimeError("the actor died"))
        with start_progress_actor() as progress_actor:
            ray.get(progress_actor.begin.remote("7", "scope=eager"))
            ray.get(progress_actor.worker_started.remote("7", "a host"))
            DeadTrials(folder).on_trial_recover(iteration=0, trials=[], trial=trial)
            failed: list[str] = ray.get(progress_actor.failures.remote("7"))
            return failed

    again, enough = tmp_path / "again", tmp_path / "enough"
    again.mkdir()
    enough.mkdir()
    assert recovered(again, 1000.0) == ["the trial's own process failed: the actor died"]
    assert records.read(again) == []
    assert recovered(enough, 0.0) == []  # it ended itself at its deadline
    assert [record.label for record in records.read(enough)] == ["trial-deadline"]


def test_a_trial_whose_failure_cannot_be_noted_is_recorded_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.run import tuning

    answers = {"failures": [], "running": []}  # the progress actor is lost before it has noted the failure
    monkeypatch.setattr(tuning, "ask_progress_actor", lambda method, *arguments, **options: answers.get(method))
    monkeypatch.setattr(tuning, "trial_progress", lambda trial_id: None)
    trial: Any = SimpleNamespace(config=assignment_in(tmp_path).to_dict(), get_error=lambda: RuntimeError("the actor died"))
    tuning.DeadTrials(tmp_path).on_trial_recover(iteration=0, trials=[], trial=trial)
    assert [record.label for record in records.read(tmp_path)] == ["trial-died"]


def test_a_record_that_cannot_be_written_is_noted_and_ends_no_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.run.tuning import DeadTrials
    from orchestrator.run.worker_group import UNWRITTEN

    cleanup = DeadTrials(tmp_path)
    fine: Any = SimpleNamespace(last_result={"status": "ok"})
    full: Any = SimpleNamespace(last_result={"status": "ok", UNWRITTEN: "No space left on device"})
    for trial in (fine, full, fine):
        cleanup.on_trial_complete(iteration=0, trials=[], trial=trial)
    assert cleanup.unwritten == "No space left on device"


def test_a_sweep_ends_when_no_host_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.tune.error import TuneError

    from orchestrator.run.tuning import DeadTrials

    DeadTrials(tmp_path).on_step_begin(iteration=0, trials=[])
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": False}])
    with pytest.raises(TuneError, match="raylet"):
        DeadTrials(tmp_path).on_step_begin(iteration=0, trials=[])


def test_a_warm_start_whose_process_died_is_recorded_among_warm_starts(tmp_path: Path) -> None:
    died(tmp_path, assignment_in(tmp_path, cache="/cache", restores=True, warm_start=True))
    (start,) = records.read_warm_starts(tmp_path)
    assert (start.trial_id, start.status, start.label) == ("7", Status.FAILED, "trial-died")
    assert records.read(tmp_path) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray warns when a trainer is created in this process
def test_two_workers_of_a_standing_group_measure_together_in_fresh_processes_and_outlive_a_crash(tmp_path: Path) -> None:
    import psutil
    from ray.train.v2.api.exceptions import WorkerGroupError

    from orchestrator.run.standing_group import StandingGroup
    from orchestrator.run.train_errors import cause_of
    from orchestrator.run.worker_group import make_trainer

    protocol = {"compared_steps": 2, "min_passes": 2, "max_passes": 2, "min_window_s": 0.0, "cpu_window_s": 0.0}
    plan = TrialPlan(
        folder=str(tmp_path),
        workload="faulty_workloads:Faulty",
        size="only",
        seed=0,
        num_workers=2,
        use_gpu=False,
        pipeline="resident",
        compile_deadline_s=120.0,
        trial_deadline_s=120.0,
        python_path=str(TESTS),
        protocol=protocol,
        claimed_cpus=0.5,
    )

    def attempt(group: StandingGroup, number: int, multiple: int, further: str = "scope=eager") -> tuple[Any, list[int]]:
        """Returns the figures, and the IDs of the processes that measured them."""
        settings = CompileSettings.parse(f"{further},padding=longest,pad_multiple={multiple}")
        assignment = Assignment(plan=plan, trial_id=f"{number:03d}-a", settings=settings)
        figures = group.run(assignment, f"{assignment.trial_id}-{os.getpid()}")  # this marks what an attempt kills at its end
        logs = [assignment.log_file(rank).read_text() for rank in range(2)]
        return figures, [int(log.split("process ")[1].split()[0]) for log in logs]

    group = StandingGroup(plan, make_trainer, storage=str(tmp_path))
    try:
        first, its_processes = attempt(group, 1, 16, "scope=full,dynamic=auto,backend=aot_eager")
        with pytest.raises(WorkerGroupError) as died:
            attempt(group, 2, 4)
        assert {str(failure) for failure in died.value.worker_failures.values()} == {"it ended with signal SIGKILL"}
        with pytest.raises(WorkerGroupError) as raised:
            attempt(group, 3, 2)
        assert "does not like multiples of 2" in str(cause_of(raised.value))
        second, other_processes = attempt(group, 4, 16)
        assert first["graphs"] >= 1
        for figures in (first, second):
            assert figures["samples_per_s"] == 2 * figures["samples_per_s_per_worker"] > 0
            assert len(figures["compile_s_by_rank"]) == 2
        assert len({*its_processes, *other_processes}) == 4
        actors = {one.cmdline()[0].removeprefix("ray::").split(".")[0] for one in psutil.Process().children(recursive=True)}
        assert {"TrainController", "RayTrainWorker"} <= actors
        assert not actors & {"DatasetManager", "PlacementGroupCleaner", "_AutoscalingCoordinatorActor"}  # seconds each to start
        servers = [one for one in psutil.Process().children(recursive=True) if "orchestrator.run.fork_server" in one.cmdline()]
        assert len(servers) == 2
        assert group.is_alive
        servers[0].parent().kill()
        wait_until(lambda: not group.is_alive, 30)
        wait_until(lambda: not any(is_running(server.pid) for server in servers), 30)
    finally:
        group.close()
