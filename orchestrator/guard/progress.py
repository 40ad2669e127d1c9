"""How far each running trial is, which the live view, pruning and the classification of crashes read.

On Ray the tracker is a small actor on the head. The local runner keeps a plain object in its own process and never loads Ray.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compile_sweep.schema.errors import SessionError
from compile_sweep.schema.outcome import Phase

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PROGRESS_ACTOR = "compile-sweep-progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Asks a trial to stop. Plain values, because it crosses processes."""

    label: str
    reason: str
    bounds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one running trial is, by the head's clock."""

    trial_id: str
    settings_key: str
    phase: str
    in_phase_s: float
    elapsed_s: float
    neighbors: int
    """Number of other trials with a worker on one of its hosts at any time during its warm-up."""
    is_up: bool = False
    """Whether any of its workers has started."""
    waited_s: float = 0.0
    """Seconds of `elapsed_s` spent waiting for a free host. Known only once the first worker has started."""
    early_figures: Mapping[str, float] = field(default_factory=dict)
    """Figures after the first timed pass, by name; empty before that."""
    stop_request: StopRequest | None = None
    hosts: tuple[str, ...] = ()
    """Ray's IDs of the nodes its workers run on."""
    gpus: tuple[str, ...] = ()
    """The GPUs of its workers, each as host:index."""
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def worked_s(self) -> float:
        """Seconds of `elapsed_s` without the wait for a host."""
        return self.elapsed_s - self.waited_s


@dataclass(slots=True)
class _RunningTrial:
    settings_key: str
    phase: str
    since: float
    began: float
    waited_s: float | None = None  # None until the first worker has started
    hosts: set[str] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    neighbors: set[str] = field(default_factory=set)
    early_figures: Mapping[str, float] = field(default_factory=dict)
    stop_request: StopRequest | None = None
    phases_s: dict[str, float] = field(default_factory=dict)


class ProgressTracker:
    """Keeps the phases of running trials.

    `start_progress_actor` starts one as an actor; if its process dies, Ray restarts it empty.
    """

    def __init__(self) -> None:
        self._running: dict[str, _RunningTrial] = {}
        self._ended: set[str] = set()
        self._failed: dict[str, dict[int, str]] = {}
        self._is_successor = _is_restarted()

    def begin(self, trial_id: str, settings_key: str) -> None:
        """Records that a trial starts, or starts again."""
        now = time.monotonic()
        self._ended.discard(trial_id)
        self._running[trial_id] = _RunningTrial(settings_key, Phase.STARTING, now, now)

    def worker_started(self, trial_id: str, host: str, gpu: str | None = None, waited_s: float = 0.0) -> None:
        """Records that a worker runs on a host, and on a GPU if it has one, after the trial waited `waited_s` for its hosts."""
        if trial_id in self._running:
            trial = self._running[trial_id]
            trial.waited_s = waited_s
            trial.hosts.add(host)
            trial.gpus |= {gpu} if gpu else set()
            self._note_neighbors()

    def enter_phase(self, trial_id: str, phase: str, settings_key: str = "") -> None:
        """Records that worker 0 of a trial enters a phase. Trials that have ended are not brought back.

        If this actor replaced one that died, a trial it does not know yet is added, with the given settings key.
        """
        if self._is_successor and settings_key and trial_id not in self._running and trial_id not in self._ended:
            self.begin(trial_id, settings_key)
        if trial_id in self._running:
            trial = self._running[trial_id]
            now = time.monotonic()
            trial.phases_s[trial.phase] = trial.phases_s.get(trial.phase, 0.0) + now - trial.since
            trial.phase, trial.since = phase, now
            trial.waited_s = trial.waited_s or 0.0
            self._note_neighbors()

    def report_early_figures(self, trial_id: str, early: Mapping[str, float]) -> None:
        """Records the figures of worker 0's first timed pass."""
        if trial_id in self._running:
            self._running[trial_id].early_figures = dict(early)

    def request_stop(self, trial_id: str, ending: StopRequest) -> None:
        """Asks a trial to stop; its worker 0 polls for this. The first request stands."""
        if trial_id in self._running and self._running[trial_id].stop_request is None:
            self._running[trial_id].stop_request = ending

    def stop_request(self, trial_id: str) -> StopRequest | None:
        """Returns the request to stop a trial; None if there is none."""
        return self._running[trial_id].stop_request if trial_id in self._running else None

    def end(self, trial_id: str) -> None:
        """Records that a trial, or an attempt at it, has ended."""
        self._running.pop(trial_id, None)
        self._ended.add(trial_id)

    def record_failure(self, trial_id: str, attempt: int, reason: str) -> bool:
        """Records why an attempt failed and is retried; the first attempt is number 1. Returns True, unlike a lost call."""
        self._failed.setdefault(trial_id, {})[attempt] = reason
        return True

    def failures(self, trial_id: str) -> list[str]:
        """Returns why each earlier attempt at a trial failed, in order."""
        return [reason for _, reason in sorted(self._failed.get(trial_id, {}).items())]

    def running(self) -> list[Progress]:
        """Returns the progress of every trial that has begun and not ended."""
        now = time.monotonic()
        return [
            Progress(
                trial_id=trial_id,
                settings_key=trial.settings_key,
                phase=trial.phase,
                in_phase_s=now - trial.since,
                elapsed_s=now - trial.began,
                is_up=trial.waited_s is not None,
                waited_s=trial.waited_s or 0.0,
                neighbors=len(trial.neighbors),
                early_figures=trial.early_figures,
                stop_request=trial.stop_request,
                hosts=tuple(sorted(trial.hosts)),
                gpus=tuple(sorted(trial.gpus)),
                phases_s={**trial.phases_s, trial.phase: trial.phases_s.get(trial.phase, 0.0) + now - trial.since},
            )
            for trial_id, trial in self._running.items()
        ]

    def _note_neighbors(self) -> None:
        """Records which trials share a host with a trial that is warming up."""
        for trial_id, trial in self._running.items():
            if trial.phase == Phase.WARMING_UP:
                trial.neighbors |= {
                    other_id for other_id, other in self._running.items() if other_id != trial_id and other.hosts & trial.hosts
                }


def _is_restarted() -> bool:
    """Tells whether this process is an actor that replaced one that died."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


@contextmanager
def start_progress_actor() -> Iterator[ActorHandle[ProgressTracker]]:
    """Runs the sweep's progress actor while the block lasts; raises SessionError if the cluster already has one."""
    from ray.exceptions import ActorAlreadyExistsError

    from orchestrator.cluster import head_actors

    with ExitStack() as stack:
        try:
            actor = stack.enter_context(head_actors.start_actor(ProgressTracker, PROGRESS_ACTOR))
        except ActorAlreadyExistsError:
            raise SessionError("another sweep is running in this cluster; wait until it ends, or use another cluster") from None
        yield actor


def find_progress_actor() -> ActorHandle[ProgressTracker]:
    """Returns the sweep's progress actor, from any process in the cluster."""
    from orchestrator.cluster import head_actors

    return head_actors.find_actor(ProgressTracker, PROGRESS_ACTOR)


def ask_progress_actor(method: str, *arguments: Any, timeout_s: float = 30.0) -> Any:
    """Calls a method of the sweep's progress actor; returns None if there is no actor, or no answer in time."""
    import ray

    try:
        return ray.get(getattr(find_progress_actor(), method).remote(*arguments), timeout=timeout_s)
    except (ray.exceptions.RayError, ValueError):  # ValueError: there is no actor with that name
        return None


def trial_progress(trial_id: str) -> Progress | None:
    """Returns the progress of one trial; None if it is not running, or the actor does not answer."""
    running: list[Progress] = ask_progress_actor("running") or []
    return next((progress for progress in running if progress.trial_id == trial_id), None)
