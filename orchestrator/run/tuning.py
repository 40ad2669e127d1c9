"""Hands the planned trials to Ray Tune.

The thin Tune searcher around a proposer: the only part of the search that knows Ray.

A Tune callback that keeps one trial's death from costing the sweep: its record, and the resources it held.

A Tune callback that stops trials early: it asks the progress actor how far trials are, decides by `pruning.py`, and has the
progress actor tell the workers, which poll it.

Tune's own schedulers see a trial only when it reports, rank one metric, and end a trial by killing its process, which leaks
its worker group's resources (ray 2.60) and leaves no record. Here a trial's worker ends itself, and the trial records why.

The Tune callback through which finished trials reach the trackers.

Tune's own callbacks for MLflow, W&B and TensorBoard log a trial's configuration and what it reported. Here the one says how to
run it and the other only that it ended; what was measured is in its record, which is durable before Tune hears of it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import ray
from ray import tune
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # generated at build time
from ray.exceptions import RayError
from ray.tune import Callback, TuneError
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.search import Searcher
from ray.util.placement_group import PlacementGroup, remove_placement_group

from compile_sweep.schema import record as records
from compile_sweep.schema import redact
from compile_sweep.schema.errors import SessionError, SweepFolderError
from compile_sweep.schema.outcome import Label, Verdict, backoff_s, judge_trial_death
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.cluster import head_actors, placement
from orchestrator.cluster.head_actors import no_propagated_credentials, store_credentials
from orchestrator.config import SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.progress import Progress, StopRequest, find_progress_actor, trial_progress
from orchestrator.run import sweep_folder
from orchestrator.run.death import waited_s
from orchestrator.run.trial import is_recorded
from orchestrator.run.trial_spec import Assignment, TrialPlan, users_python_path
from orchestrator.run.worker_group import UNWRITTEN, run_trial
from orchestrator.search.candidates import Candidates
from orchestrator.search.proposers import InOrder, Proposer
from orchestrator.search.pruning import Pruning, Sighting
from orchestrator.tracking import Tracking


class ProposingSearcher(Searcher):
    """Has a proposer say what Tune tries next.

    Before each proposal the proposer is told of every record that is new. Records are the only state that counts: they are
    written before Tune hears of a trial, by whoever outlives it, so there is nothing to hear from Tune, to save or to restore,
    and a resumed sweep tells the proposer of what is there already.

    Args:
        proposer: at its beginning.
        plan: what all trials have in common.
        new_trial_id: makes an identifier no other attempt of the folder has.
        may_start: asked of each proposal; one that may not start is passed over.
        new_records: those appended to the folder since it was last called; a proposer that learns nothing needs none.
        enough: asked before each proposal whether the search has ended; the proposer knows all new records then.
    """

    def __init__(
        self,
        proposer: Proposer,
        plan: TrialPlan,
        new_trial_id: Callable[[], str],
        may_start: Callable[[CompileSettings], bool],
        new_records: Callable[[], Iterable[TrialRecord]] = lambda: (),
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._proposer = proposer
        self._plan = plan
        self._new_trial_id = new_trial_id
        self._may_start = may_start
        self._new_records = new_records
        self._enough = enough

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The proposer's next setting that may start, or that there is none."""
        for record in self._new_records():
            self._proposer.tell(asdict(record))
        while not self._enough() and (setting := self._proposer.propose()) is not None:
            if self._may_start(setting):
                return Assignment(plan=self._plan, trial_id=self._new_trial_id(), settings=setting).to_dict()
        return cast("dict[str, Any]", Searcher.FINISHED)  # a string, which Tune tells apart; its types do not

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Its record is read before the next proposal."""

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles a searcher to resume with it, which nobody does here; what it holds need not pickle."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


_SWEEP_EVERY_S = 2.0
_PROGRESS_TIMEOUT_S = 30.0


class Cleanup(Callback):
    """Records trials whose own process died, and frees placement groups nobody will free.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        self.unwritten: str | None = None
        """Why a record could not be written, if one could not; no further trial is of use then."""

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Frees what dead trials left."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SWEEP_EVERY_S
            remove_orphaned_placement_groups()

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Notes that a trial could not write its record."""
        self.unwritten = self.unwritten or (trial.last_result or {}).get(UNWRITTEN)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Tune starts the trial again. If it is not to be, a record keeps it from measuring anything."""
        assignment = Assignment.from_dict(trial.config)
        verdict, progress = self._judge(assignment, trial)
        with suppress(ray.exceptions.RayError):
            failed: list[str] = ray.get(find_progress_actor().failures.remote(assignment.trial_id), timeout=_PROGRESS_TIMEOUT_S)
            if backoff_s(verdict.label, failed) is not None:
                reason = verdict.reason or str(verdict.label)
                ray.get(
                    find_progress_actor().record_failure.remote(assignment.trial_id, len(failed) + 1, reason),
                    timeout=_PROGRESS_TIMEOUT_S,
                )
                return
        self._write(assignment, verdict, progress)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Writes the record the trial could not write itself."""
        assignment = Assignment.from_dict(trial.config)
        self._write(assignment, *self._judge(assignment, trial))

    def _judge(self, assignment: Assignment, trial: Trial) -> tuple[Verdict, Progress | None]:
        progress: Progress | None = None
        with suppress(ray.exceptions.RayError):
            progress = trial_progress(assignment.trial_id, _PROGRESS_TIMEOUT_S)
            ray.get(find_progress_actor().end.remote(assignment.trial_id), timeout=_PROGRESS_TIMEOUT_S)
        elapsed_s = progress.elapsed_s - waited_s(assignment.plan, progress) if progress else 0.0
        text = str(trial.get_error() or "no message")
        return judge_trial_death(elapsed_s, assignment.plan.trial_deadline_s, text), progress

    def _write(self, assignment: Assignment, verdict: Verdict, progress: Progress | None) -> None:
        if is_recorded(self._folder, assignment.trial_id):
            return
        failed: list[str] = []
        with suppress(ray.exceptions.RayError):
            failed = ray.get(find_progress_actor().failures.remote(assignment.trial_id), timeout=_PROGRESS_TIMEOUT_S)
        wall_s = progress.worked_s if progress else 0.0
        record = assignment.after(failed).record(
            verdict,
            phase=progress.phase if progress else None,
            started_at=sweep_folder.now(wall_s),
            wall_s=wall_s,
            figures={"waited_s": progress.waited_s if progress else 0.0, "tries": len(failed) + 1, "retry_reasons": failed},
        )
        redact.redact_logs(assignment.log_folder)
        try:
            records.append(self._folder, record)
        except OSError as error:
            self.unwritten = error.strerror or str(error)


def remove_orphaned_placement_groups() -> int:
    """Removes placement groups whose creator, an actor, is dead; returns how many.

    Ray frees a Train worker group's placement group only where its dashboard runs, and not even there when a worker dies
    before its function starts; the next trial would wait for the resources for ever (ray 2.60).
    """
    removed = 0
    for table in _placement_groups():
        alive = table.state != PlacementGroupTableData.REMOVED
        by_actor = not ray.ActorID(table.creator_actor_id).is_nil()  # a driver's own count as "actor dead" from the start
        if alive and by_actor and table.creator_actor_dead and not table.is_detached:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(table.placement_group_id)))
            removed += 1
    return removed


def _placement_groups() -> Sequence[Any]:
    accessor = state._connect_and_get_accessor()
    return [PlacementGroupTableData.FromString(raw) for raw in accessor.get_placement_group_table()]


LOOK_EVERY_S = 0.5


class EarlyStopping(Callback):
    """Stops trials that are not worth going on with.

    Args:
        folder: the sweep's.
        pruning: decides; it is told of every record of the folder, once.
    """

    def __init__(self, folder: Path, pruning: Pruning) -> None:
        self._fresh = records.follow(folder).fresh
        self._pruning = pruning
        self._next = 0.0
        self._told: set[str] = set()

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Looks at the trials under way."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_EVERY_S
        for record in self._fresh():
            self._pruning.tell(asdict(record))
        progress_actor = find_progress_actor()
        running: list[Progress] = []
        with suppress(ray.exceptions.GetTimeoutError):  # a busy head; the next look is soon
            running = ray.get(progress_actor.running.remote(), timeout=10)
        for progress in running:
            if progress.trial_id not in self._told and (stop := self._pruning.decide(_sighting(progress))) is not None:
                self._told.add(progress.trial_id)
                ending = StopRequest(label=str(stop.label), reason=stop.reason, bounds=dict(stop.bounds))
                ray.get(progress_actor.request_stop.remote(progress.trial_id, ending))

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles callbacks to resume with them, which nobody does here."""
        return {}


def _sighting(progress: Progress) -> Sighting:
    return Sighting(
        setting=CompileSettings.parse(progress.settings_key),
        phase=progress.phase,
        elapsed_s=progress.worked_s,
        in_phase_s=progress.in_phase_s,
        early=progress.early_figures,
    )


class LogTrials(Callback):
    """Has every trial logged once it has ended, however it did. Stands after what records trials that died.

    Args:
        tracking: where to.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Logs what was recorded since."""
        self._tracking.catch_up()

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Likewise, where the trial's own process died."""
        self._tracking.catch_up()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles callbacks to resume with them, which nobody does here."""
        return {}


_TUNE_GAVE_UP = "Caught unexpected exception"
"""How Tune's complaint begins about an actor that ended in a way it does not know (ray 2.60)."""


class Asked(Protocol):
    """What proposes settings, in the place of a list; `searching.Search` is one."""

    proposer: Proposer

    def new_records(self) -> Iterable[TrialRecord]:
        """Records the proposer has not been told of."""
        ...

    def why_enough(self) -> str | None:
        """Why no further trial should start; None if one may."""
        ...


def run_trials(
    config: SweepConfig,
    settings: Sequence[CompileSettings],
    environment: Environment,
    output: Path,
    scratch: Path,
    new_trial_id: Callable[[], str],
    may_start: Callable[[CompileSettings], bool],
    *,
    alone: bool = False,
    restores: bool = False,
    warm_start: bool = False,
    search: Asked | None = None,
    pruning: Pruning | None = None,
    tracking: Tracking | None = None,
) -> None:
    """Runs the trials; returns when none is left or none may start. Needs an initialized Ray and a progress actor.

    Args:
        config: the sweep's.
        settings: what is left to try, in order, or to choose from.
        environment: of the head.
        output: the sweep's folder, to which trials append their records.
        scratch: for Tune's own state, which nobody needs afterwards.
        new_trial_id: makes an identifier no other attempt of the folder has.
        may_start: asked before each trial.
        alone: one trial at a time, each with the share of the cores it would have had beside others, so that its compile time
            can be compared with theirs.
        restores: trials begin with artifacts of trials before them.
        warm_start: trials only start, from their own settings' artifacts.
        search: chooses among the settings; without one they are tried in order.
        pruning: decides which trials are stopped early; without one, none is.
        tracking: what trials are logged to besides.

    Raises:
        SweepFolderError: a record could not be written.
        SessionError: Ray or Tune failed.
    """
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are told by records, once
    plan = TrialPlan.of(
        config,
        output,
        workers_at_once=placement.workers_per_host(config),
        claimed_cpus=placement.cpus_per_worker(config, environment.cores),
        cache=None if config.cache is None else store_credentials(config.cache),
        cache_in_cluster=placement.in_cluster(),  # on one host its folder is as near as the cluster's memory
        restores=restores or warm_start,
        prunes=pruning is not None,
        warm_start=warm_start,
        head=ray.get_runtime_context().get_node_id() if placement.in_cluster() else None,
        python_path=users_python_path(config.workload),
    )
    cleanup = Cleanup(output)

    def may_start_now(setting: CompileSettings) -> bool:
        return cleanup.unwritten is None and may_start(setting)

    if search is None:
        searcher = ProposingSearcher(InOrder(Candidates(settings)), plan, new_trial_id, may_start_now)
    else:
        enough = search.why_enough
        searcher = ProposingSearcher(
            search.proposer,
            plan,
            new_trial_id,
            may_start_now,
            search.new_records,
            enough=lambda: cleanup.unwritten is not None or enough() is not None,
        )
    tuner = tune.Tuner(
        # A trial only waits for its workers, which could not start for ever if it held a core that they need.
        tune.with_resources(run_trial, PlacementGroupFactory([head_actors.HEAD_CLAIM])),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=len(settings),
            max_concurrent_trials=1 if alone else config.max_concurrent,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=uuid.uuid4().hex,  # of several in one folder
            storage_path=str(scratch),
            verbose=0,
            callbacks=[
                cleanup,
                *([EarlyStopping(output, pruning)] if pruning else []),
                *([LogTrials(tracking)] if tracking else []),
            ],
            failure_config=tune.FailureConfig(max_failures=Label.TRIAL_DIED.tries - 1),  # of a trial's own process
        ),
    )
    try:
        with no_propagated_credentials():
            tuner.fit()
    except (TuneError, RuntimeError, RayError) as error:
        if type(error) is RuntimeError and not str(error).startswith(_TUNE_GAVE_UP):
            raise
        raise SessionError(f"Ray gave the sweep up ({gist(error)}); what is recorded is intact: go on with --resume") from None
    if cleanup.unwritten is not None:
        raise SweepFolderError(
            f"a record could not be written to {output} ({cleanup.unwritten}), so the sweep has ended; what is recorded is "
            "intact: make room and go on with --resume"
        )


def gist(error: Exception) -> str:
    """The line of an error that says most: of a traceback the last, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if lines[0].startswith("Traceback") else 0][:300]
