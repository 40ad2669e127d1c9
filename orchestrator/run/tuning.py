"""Runs trials on Ray Tune: a thin searcher around proposals, and three callbacks.

`DeadTrials` keeps one trial's death from costing the sweep: it writes the record and frees the resources.

`StopTrials` stops trials early: it asks the progress actor how far trials are and makes it tell the workers, which poll. Tune's
own schedulers see a trial only when it reports, rank one metric, and end a trial by killing its process, which leaks its worker
group's resources (ray 2.60) and leaves no record. Here a trial's worker ends itself, and the trial records why.

`LogTrials` passes finished trials to the trackers. Tune's own callbacks for MLflow, W&B and TensorBoard log a trial's
configuration and its reports. Here a configuration only says how to run the trial and a report only that it ended; the
measurements are in its record, which is durable before Tune learns of it.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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

from compile_sweep.schema import redact
from compile_sweep.schema.errors import SessionError, SweepFolderError
from compile_sweep.schema.outcome import Label, Verdict, backoff_s, judge_trial_death
from orchestrator.cluster import head_actors, placement
from orchestrator.cluster.head_actors import no_propagated_credentials, store_credentials
from orchestrator.config import SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.log_bounds import bound_logs
from orchestrator.guard.progress import Progress, ask_progress_actor, trial_progress
from orchestrator.run import sweep_folder
from orchestrator.run.runner import Batch, EarlyStopping, Proposals, plan_fields, unwritten_error
from orchestrator.run.train_errors import startup_error, waited_s
from orchestrator.run.trial import append_record, is_recorded
from orchestrator.run.trial_spec import Assignment, TrialPlan, users_python_path
from orchestrator.run.worker_group import UNWRITTEN, run_trial
from orchestrator.tracking import Tracking


class _NotPickled:
    """Has no state when pickled, as Tune pickles searchers and callbacks in order to resume them, which is not used here."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class ProposingSearcher(_NotPickled, Searcher):
    """A Tune searcher that suggests what batch after batch proposes.

    Args:
        plan: What the trials of all batches have in common.
        is_over: Returns whether no further trial may start.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        plan: TrialPlan,
        new_trial_id: Callable[[], str],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._batches, self._plan, self._new_trial_id, self._is_over = iter(batches), plan, new_trial_id, is_over
        self._proposals: Proposals | None = None
        self.early_stopping: EarlyStopping | None = None
        """Decides which trials of the current batch to stop; None if none."""

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Returns the next trial's assignment, or `FINISHED` if there is none."""
        while self._proposals is None or (setting := self._proposals.next()) is None:
            if self._is_over() or (batch := next(self._batches, None)) is None:
                return cast("dict[str, Any]", Searcher.FINISHED)  # a string, which Tune's types do not allow for
            self._plan = replace(self._plan, **plan_fields(batch))
            self._proposals = Proposals(batch, self._is_over)
            self.early_stopping = EarlyStopping(Path(self._plan.folder), batch) if batch.may_stop_trials else None
        return Assignment(plan=self._plan, trial_id=self._new_trial_id(), settings=setting).to_dict()

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Does nothing: the trial's record is read before the next proposal."""

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: there is nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: there is nothing to restore."""


_SWEEP_EVERY_S = 2.0


class DeadTrials(Callback):
    """Records trials whose own process died, and frees placement groups that nothing else frees."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        self.unwritten: str | None = None
        """Why no further trial should start, as `trial.append_record` says; None if one may."""

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Frees what dead trials left behind. Raises TuneError if no host is left, for which Tune would wait forever."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SWEEP_EVERY_S
            if not any(node["Alive"] for node in ray.nodes()):
                raise TuneError("its process on this host, the raylet, has ended")
            remove_orphaned_placement_groups()

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Notes why no further trial should start."""
        self.unwritten = self.unwritten or (trial.last_result or {}).get(UNWRITTEN)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Runs before Tune restarts a trial; if it should not run again, writes a record, which keeps it from measuring."""
        assignment = Assignment.from_dict(trial.config)
        verdict, progress = self._judge(assignment, trial)
        failed: list[str] | None = ask_progress_actor("failures", assignment.trial_id)
        if failed is not None and backoff_s(verdict.label, failed) is not None:
            reason = verdict.reason or str(verdict.label)
            if ask_progress_actor("record_failure", assignment.trial_id, len(failed) + 1, reason):
                return
        self._write(assignment, verdict, progress)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Writes the record that the trial could not write itself."""
        assignment = Assignment.from_dict(trial.config)
        self._write(assignment, *self._judge(assignment, trial))

    def _judge(self, assignment: Assignment, trial: Trial) -> tuple[Verdict, Progress | None]:
        progress = trial_progress(assignment.trial_id)
        ask_progress_actor("end", assignment.trial_id)
        elapsed_s = progress.elapsed_s - waited_s(assignment.plan, progress) if progress else 0.0
        text = str(trial.get_error() or "no message")
        never_started = startup_error(progress, elapsed_s)
        has_started = progress is None or progress.is_up
        deadline_s = assignment.plan.trial_deadline_s
        return judge_trial_death(elapsed_s, deadline_s, text, never_started, has_started=has_started), progress

    def _write(self, assignment: Assignment, verdict: Verdict, progress: Progress | None) -> None:
        if is_recorded(self._folder, assignment.trial_id):
            return
        failed: list[str] = ask_progress_actor("failures", assignment.trial_id) or []
        wall_s = progress.worked_s if progress else 0.0
        record = assignment.after(failed).record(
            verdict,
            phase=progress.phase if progress else None,
            started_at=sweep_folder.now(wall_s),
            wall_s=wall_s,
            figures={"waited_s": progress.waited_s if progress else 0.0, "tries": len(failed) + 1, "retry_reasons": failed},
        )
        bound_logs(assignment.log_folder)
        redact.redact_logs(assignment.log_folder)
        self.unwritten = append_record(self._folder, record) or self.unwritten


def remove_orphaned_placement_groups() -> int:
    """Removes placement groups whose creator, an actor, is dead; returns how many.

    Ray frees the placement group of a Train worker group only where its dashboard runs, and not even there if a worker dies
    before its function starts. The next trial would wait for the resources forever (ray 2.60).
    """
    removed = 0
    for raw in state._connect_and_get_accessor().get_placement_group_table():
        table = PlacementGroupTableData.FromString(raw)
        alive = table.state != PlacementGroupTableData.REMOVED
        # A driver's own placement groups count as "actor dead" from the start.
        by_actor = not ray.ActorID(table.creator_actor_id).is_nil()
        if alive and by_actor and table.creator_actor_dead and not table.is_detached:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(table.placement_group_id)))
            removed += 1
    return removed


class StopTrials(_NotPickled, Callback):
    """Requests that trials stop when continuing is not worth it; a trial's worker polls for the request."""

    def __init__(self, searcher: ProposingSearcher) -> None:
        self._searcher = searcher

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Decides about the running trials."""
        decisions = self._searcher.early_stopping
        if decisions is None or not decisions.is_due():
            return
        running: list[Progress] = ask_progress_actor("running", timeout_s=10) or []  # the next decision is soon
        for stopped, request in decisions.requests(running).items():
            ask_progress_actor("request_stop", stopped, request)


class LogTrials(_NotPickled, Callback):
    """Logs every trial once it has ended, for whatever reason. Must come after the callback that records dead trials."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Logs the records since the last call."""
        self._tracking.catch_up()

    on_trial_error = on_trial_complete  # of a trial whose own process died


_TUNE_GAVE_UP = "Caught unexpected exception"
"""Start of Tune's complaint about an actor that ended in an unknown way (ray 2.60)."""


def run_trials(
    config: SweepConfig,
    batches: Iterable[Batch],
    *,
    environment: Environment,
    output: Path,
    scratch: Path,
    new_trial_id: Callable[[], str],
    tracking: Tracking,
    max_concurrent: int,
) -> None:
    """Runs batch after batch; returns when no trial remains or none may start. Needs an initialized Ray and a progress actor."""
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # records report failures already
    plan = TrialPlan.of(
        config,
        output,
        workers_at_once=placement.workers_per_host(config),
        claimed_cpus=placement.cpus_per_worker(config, environment.cores),
        cache=None if config.cache is None else store_credentials(config.cache),
        cache_in_cluster=placement.in_cluster(),  # on one host, the store's folder is as close as the cluster's memory
        head=ray.get_runtime_context().get_node_id() if placement.in_cluster() else None,
        python_path=users_python_path(config.workload),
    )
    dead_trials = DeadTrials(output)
    searcher = ProposingSearcher(batches, plan, new_trial_id, is_over=lambda: dead_trials.unwritten is not None)
    tuner = tune.Tuner(
        # The trial's process only waits for its workers, which could never start if it held a core that they need.
        tune.with_resources(run_trial, PlacementGroupFactory([head_actors.HEAD_CLAIM])),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1,  # until the searcher has finished
            max_concurrent_trials=max_concurrent,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=uuid.uuid4().hex,  # the folder may hold several experiments
            storage_path=str(scratch),
            verbose=0,
            callbacks=[dead_trials, StopTrials(searcher), LogTrials(tracking)],
            failure_config=tune.FailureConfig(max_failures=Label.TRIAL_DIED.tries - 1),  # restarts of a trial's own process
        ),
    )
    try:
        with no_propagated_credentials():
            tuner.fit()
    except (TuneError, RuntimeError, RayError) as error:
        if type(error) is RuntimeError and not str(error).startswith(_TUNE_GAVE_UP):
            raise
        raise SessionError(f"Ray gave the sweep up ({gist(error)}); what is recorded is intact: go on with --resume") from None
    if dead_trials.unwritten is not None:
        raise SweepFolderError(unwritten_error(output, dead_trials.unwritten))


def gist(error: Exception) -> str:
    """Returns the most informative line of an error: the last of a traceback, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if lines[0].startswith("Traceback") else 0][:300]
