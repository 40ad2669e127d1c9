"""A cluster of several raylets on this machine: placement of trials, waiting for hosts, and logs of other hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from samples import REPOSITORY, TESTS, wait_until

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device, Placement, SweepConfig
from orchestrator.run.trial_spec import Assignment, TrialPlan

EAGER = CompileSettings.parse("scope=eager")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.nightly("starts a cluster of several raylets; test_placement.py and test_packing.py cover where trials go"),
]


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders for the two hosts' temporary files."""
    return [tmp_path_factory.mktemp("host") for _ in range(2)]


@pytest.fixture(scope="module")
def cluster(temporary: list[Path]) -> Iterator[Any]:
    """A head without a core, and two hosts with a core and two simulated GPUs each, all on 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # otherwise Ray takes this machine's outside address
        # This user's own token; Ray would keep what this process read of both before.
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"], check=True, capture_output=True
        )
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "240")  # on a busy machine
        import ray
        from ray._private import ray_constants
        from ray._private.authentication_test_utils import reset_auth_token_state
        from ray.cluster_utils import Cluster

        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # as read on import
        reset_auth_token_state()
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100_000_000})
        for folder in temporary:
            made.add_node(
                num_cpus=1, num_gpus=2, resources={"host": 1}, object_store_memory=100_000_000, env_vars={"TMPDIR": str(folder)}
            )
        patch.setenv("RAY_ADDRESS", made.address)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()
    reset_auth_token_state()


def swept(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the sweep's command in the cluster."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.sweep", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, TESTS)))},
        cwd=REPOSITORY,  # Ray passes it on, unlike PYTHONPATH
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def config(**fields: Any) -> SweepConfig:
    settings = (EAGER,)
    usual: dict[str, Any] = {"recipe": "given", "workload": "captioning", "size": "tiny", "settings": settings}
    return SweepConfig(**{**usual, "device": Device.CUDA, "max_concurrent": 1, "cache": None, **fields})


def planned(folder: Path, *, head: str) -> TrialPlan:
    """Returns what trials of a sweep in this folder on this head have in common."""
    return TrialPlan(
        folder=str(folder), workload="toy", size="only", seed=0, num_workers=1, use_gpu=False, pipeline="resident",
        workers_at_once=1, claimed_cpus=0.5, compile_deadline_s=60, trial_deadline_s=60, head=head,
    )  # fmt: skip


def placed(placement: Placement, num_trials: int, num_workers: int = 1, *, expected: int | None = None) -> list[set[str]]:
    """Returns the hosts of each of several concurrent trials, with placement groups created as Ray Train does.

    Once the expected number have hosts, Ray tries the others twice more, which takes it a second or two: it may learn of freed
    resources only then.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from orchestrator.cluster import placement as packing
    from orchestrator.cluster.placement import placement_strategy, worker_resources

    bundle = worker_resources(placement, num_workers, use_gpu=True, cpus=0.2)
    groups = []
    try:
        with packing.start_placement_actor():
            for number in range(num_trials):
                packs = placement is Placement.PACK
                label = packing.host_label(str(number), bundle, num_workers) if packs else None
                labels = [label] * num_workers if label else None
                groups.append(
                    placement_group([bundle] * num_workers, strategy=placement_strategy(placement), bundle_label_selector=labels)
                )

            def tables() -> list[dict[str, Any]]:
                return list(map(placement_group_table, groups))

            wait_until(lambda: sum(table["state"] == "CREATED" for table in tables()) >= (expected or num_trials), 60)
            tries = 2 + max(table["stats"]["scheduling_attempt"] for table in tables())
            wait_until(lambda: all(_is_settled(table, tries) for table in tables()), 60)
        return [set(table["bundles_to_node_id"].values()) for table in tables() if table["state"] == "CREATED"]
    finally:
        for group in groups:
            remove_placement_group(group)


def _is_settled(table: dict[str, Any], tries: int) -> bool:
    """Tells whether a placement group has its hosts, or this many tries found none."""
    stats = table["stats"]
    return table["state"] == "CREATED" or (stats["scheduling_state"] == "NO_RESOURCES" and stats["scheduling_attempt"] >= tries)


@pytest.mark.usefixtures("cluster")
def test_packed_trials_fill_a_host_before_the_next_and_spread_ones_do_not_meet() -> None:
    first, second, third = placed(Placement.PACK, 3)
    assert first == second
    assert first.isdisjoint(third)
    first, second = placed(Placement.SPREAD, 2)
    assert first.isdisjoint(second)


@pytest.mark.usefixtures("cluster")
def test_a_third_spread_trial_waits_for_a_host_though_there_are_gpus() -> None:
    assert len(placed(Placement.SPREAD, 3, expected=2)) == 2


@pytest.mark.usefixtures("cluster")
def test_workers_of_a_spread_trial_stay_together_and_those_of_a_packed_one_may_span_hosts() -> None:
    ((one,), (other,)) = placed(Placement.SPREAD, 2, num_workers=2)
    assert one != other
    (spanning,) = placed(Placement.PACK, 1, num_workers=3)
    assert len(spanning) == 2


@pytest.mark.usefixtures("cluster")
def test_nothing_is_waited_for_where_there_is_room_and_what_never_comes_is_said() -> None:
    from orchestrator.cluster.placement import wait_for_host

    said: list[str] = []
    wait_for_host(config(max_concurrent=4), 64, said.append, threading.Event(), wait_s=60)
    assert said == []
    with pytest.raises(
        ConfigError,
        match=r"waited 1 s in vain for a host .*: 8 × \(0.5 CPU, 1 GPU, 0.125 host\); `ray status` shows what its hosts have",
    ):
        wait_for_host(config(workers_per_trial=8, placement=Placement.SPREAD), 64, said.append, threading.Event(), wait_s=1)
    asked = threading.Event()
    asked.set()
    wait_for_host(config(workers_per_trial=8), 64, said.append, asked, wait_s=1)


def test_a_host_that_comes_later_is_taken(cluster: Any) -> None:
    from orchestrator.cluster.placement import wait_for_host

    said: list[str] = []
    needs_three = config(workers_per_trial=3, placement=Placement.SPREAD)
    waiting = threading.Thread(target=wait_for_host, args=(needs_three, 64, said.append, threading.Event(), 120))
    waiting.start()
    wait_until(lambda: bool(said), 60)
    assert said == ["waiting for a host in the cluster that can take a trial: 3 × (0.5 CPU, 1 GPU, 0.3333 host)"]
    late = cluster.add_node(num_cpus=2, num_gpus=3, resources={"host": 1}, object_store_memory=100_000_000)
    waiting.join(60)
    assert not waiting.is_alive()
    cluster.remove_node(late)


@pytest.mark.usefixtures("cluster")
def test_a_second_sweep_is_refused_before_it_waits_for_hosts(tmp_path: Path) -> None:
    from orchestrator.guard.progress import start_progress_actor

    words = ["--workload", "toy_workloads:Brief", "--device", "cpu", "--settings", "scope=eager", "--workers-per-trial", "50"]
    with start_progress_actor():
        done = swept(*words, "--output", str(tmp_path / "sweep"))
    assert done.returncode == 2
    assert "another sweep is running in this cluster" in done.stderr
    assert "waiting for a host" not in done.stdout


@pytest.mark.usefixtures("cluster")
def test_logs_of_another_host_reach_the_folder_also_when_their_writer_dies(tmp_path: Path) -> None:
    import ray

    from orchestrator.cluster import remote_logs

    plan = planned(tmp_path, head=ray.get_runtime_context().get_node_id())
    finished, killed = (Assignment(plan=plan, trial_id=name, settings=EAGER) for name in ("001-a", "002-b"))

    @ray.remote(resources={"host": 0.1}, max_retries=0)
    def work(assignment: Assignment, dies: bool) -> str:
        with remote_logs.log_file(assignment, 0) as path:
            path.write_text("up\n")
            if dies:
                for _ in range(100):  # until the actor knows the log
                    if ray.get(remote_logs._find_log_actor().unfinished.remote(assignment.trial_id)):
                        break
                    threading.Event().wait(0.1)
                with path.open("a") as log:
                    log.write("stacks\n")
                os._exit(1)
        return str(path)

    with remote_logs.start_log_actor(tmp_path):
        path = ray.get(work.remote(finished, False))
        assert (tmp_path / "logs" / "001-a" / "worker-0.log").read_text() == "up\n"
        assert not Path(path).exists()
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(work.remote(killed, True))
        remote_logs.collect_logs(finished)
        remote_logs.collect_logs(killed)
        assert (tmp_path / "logs" / "002-b" / "worker-0.log").read_text() == "up\nstacks\n"
        remote_logs.collect_logs(killed)
        assert (tmp_path / "logs" / "002-b" / "worker-0.log").read_text() == "up\nstacks\n"


@pytest.mark.usefixtures("cluster")
def test_logs_of_another_host_are_whole_though_the_log_book_was_killed(tmp_path: Path) -> None:
    import ray

    from orchestrator.cluster import remote_logs

    plan = planned(tmp_path, head=ray.get_runtime_context().get_node_id())
    finished, killed = (Assignment(plan=plan, trial_id=name, settings=EAGER) for name in ("004-d", "005-e"))

    @ray.remote(resources={"host": 0.1}, max_retries=0)
    def work(assignment: Assignment, dies: bool) -> None:
        there = assignment.log_folder / "worker-0.log"  # on this machine all hosts are the same
        book: Any = remote_logs._find_log_actor()
        with remote_logs.log_file(assignment, 0) as path, path.open("a") as log:
            print("up", file=log, flush=True)
            for _ in range(600):
                if there.read_text().endswith("earlier\nup\n"):
                    break
                threading.Event().wait(0.1)
            os.kill(ray.get(book.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
            if dies:
                for _ in range(600):  # until the actor knows the log again, though nothing is new
                    if ray.get(book.unfinished.remote(assignment.trial_id)):
                        break
                    threading.Event().wait(0.1)
                print("stacks", file=log, flush=True)
                os._exit(1)
            print("building", file=log, flush=True)

    for assignment in (finished, killed):
        assignment.log_folder.mkdir(parents=True)
        (assignment.log_folder / "worker-0.log").write_text("an attempt earlier\n")
    with remote_logs.start_log_actor(tmp_path):
        ray.get(work.remote(finished, False))
        remote_logs.collect_logs(finished)
        assert (finished.log_folder / "worker-0.log").read_text() == "an attempt earlier\nup\nbuilding\n"
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(work.remote(killed, True))
        remote_logs.collect_logs(killed)
        assert (killed.log_folder / "worker-0.log").read_text() == "an attempt earlier\nup\nstacks\n"


@pytest.mark.usefixtures("cluster")
def test_the_log_of_a_host_that_is_gone_says_so(tmp_path: Path) -> None:
    import ray

    from orchestrator.cluster import remote_logs

    with remote_logs.start_log_actor(tmp_path):
        book = remote_logs._find_log_actor()
        ray.get(book.begin.remote("003-c", 0, "ab" * 28, "/nowhere/worker-0.log"))
        ray.get(book.write.remote("003-c", 0, 0, b"up\n"))
        ray.get(book.write.remote("003-c", 0, 1, b"p\nbuilding\n"))  # as after a message whose answer was lost
        remote_logs.collect_logs(Assignment(plan=planned(tmp_path, head="here"), trial_id="003-c", settings=EAGER))
    first, second, _, last = (tmp_path / "logs" / "003-c" / "worker-0.log").read_text().splitlines()
    assert (first, second) == ("up", "building")
    assert last.startswith("the rest of this log stayed on its host, which cannot be reached (")


@pytest.mark.nightly(
    "a sweep of trials with three workers; test_sweeps.py trains two together, and test_mirror.py copies to storage"
)
@pytest.mark.usefixtures("cluster")
def test_the_workers_of_one_trial_train_together_across_hosts_and_results_reach_the_storage(
    tmp_path: Path, temporary: list[Path]
) -> None:
    """Three workers claim half a core each, and no host has more than one core. PYTHONPATH alone locates their workload."""
    words = [
        "--workload",
        "faulty_workloads:Leaky",
        "--device",
        "cpu",
        "--settings",
        "scope=eager,padding=max",
        "scope=eager,padding=longest",
    ]
    words += ["--cache-store", "none", "--workers-per-trial", "3", "--max-concurrent", "2", "--no-confirm", "--no-warm-start"]
    done = swept(*words, "--output", str(tmp_path / "sweep"), "--storage", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (tmp_path / "kept" / "trials.jsonl").read_text().splitlines())
    for record in (first, second):
        assert record["num_workers"] == 3
        assert record["status"] == "ok", record
    # Only one of the two has cores, so one waits for the other, which is not counted as its time.
    assert 2 < second["waited_s"] > 2 * first["waited_s"]
    began, later = (datetime.fromisoformat(record["started_at"]) for record in (first, second))
    assert (later - began).total_seconds() > second["waited_s"] / 2  # and not at once, as it was requested
    caches = set()
    for rank in range(3):
        log = (tmp_path / "kept" / "logs" / first["trial_id"] / f"worker-{rank}.log").read_text()
        assert f"worker {rank} of 3 is up" in log
        assert "done" in log
        (folder,) = re.findall(r"'TORCHINDUCTOR_CACHE_DIR': '(.+?)/compile-sweep-", log)
        caches.add(Path(folder))
    assert caches == set(temporary)
    wait_until(lambda: not [left for folder in temporary for left in folder.glob("compile-sweep-[0-9l]*")], 60)
    assert (tmp_path / "kept" / "report.html").stat().st_size > 1_000_000
