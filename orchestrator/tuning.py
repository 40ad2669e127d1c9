"""Hands the planned trials to Ray Tune."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune import TuneError
from ray.tune.execution.placement_groups import PlacementGroupFactory

from orchestrator import on_head, placing
from orchestrator.assignment import TrialPlan
from orchestrator.cleanup import Cleanup
from orchestrator.config import Device, SweepConfig
from orchestrator.deposit import deposit, nothing_propagated
from orchestrator.early_stopping import EarlyStopping
from orchestrator.environment import Environment
from orchestrator.errors import SessionError, SweepFolderError
from orchestrator.failures import Label
from orchestrator.pruning import Pruning
from orchestrator.records import TrialRecord
from orchestrator.retrying import MOST_ATTEMPTS
from orchestrator.search.candidates import Candidates
from orchestrator.search.plain import InOrder
from orchestrator.search.proposer import Proposer
from orchestrator.search.tune import ProposingSearcher
from orchestrator.tracking import Tracking
from orchestrator.tracking.callback import LogTrials
from orchestrator.trial import run_trial
from workloads.settings import CompileSettings

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
    """Runs the trials; returns when none is left or none may start. Ray must be initialised and the board be open.

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
    plan = TrialPlan(
        folder=str(output.resolve()),
        workload=config.workload,
        size=config.size,
        seed=config.seed,
        num_workers=config.workers_per_trial,
        use_gpu=config.device is Device.CUDA,
        pipeline=config.pipeline,
        workers_at_once=placing.workers_on_a_host(config),
        claimed_cpus=placing.claimed_cpus(config, environment.cores),
        compile_deadline_s=config.compile_deadline_s,
        trial_deadline_s=config.trial_deadline_s,
        cache=None if config.cache is None else deposit(config.cache),
        cache_in_cluster=placing.in_cluster(),  # on one host its folder is as near as the cluster's memory
        precompile=config.precompile,
        restores=restores or warm_start,
        prunes=pruning is not None,
        warm_start=warm_start,
        placement=config.placement,
        head=ray.get_runtime_context().get_node_id() if placing.in_cluster() else None,
        python_path=_python_path(),
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
        tune.with_resources(run_trial, PlacementGroupFactory([on_head.CLAIM])),
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
            failure_config=tune.FailureConfig(max_failures=MOST_ATTEMPTS[Label.TRIAL_DIED] - 1),  # of a trial's own process
        ),
    )
    try:
        with nothing_propagated():
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


def _python_path() -> str:
    """PYTHONPATH, absolute. Ray hands on the current folder and no more: its workers have the PYTHONPATH that it began with."""
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(map(os.path.abspath, folders))


def gist(error: Exception) -> str:
    """The line of an error that says most: of a traceback the last, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if lines[0].startswith("Traceback") else 0][:300]
