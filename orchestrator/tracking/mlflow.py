"""Trials as MLflow runs: one for the sweep, with its report, and below it one for each trial.

The experiment is `compile-sweep/WORKLOAD-SIZE`, or what MLFLOW_EXPERIMENT_NAME says. A resumed sweep continues its run.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.tracking.base import LoggedTrial, SweepFacts, facts_of

SWEEP_TAG = "compile_sweep.sweep"

_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the default, 7, delays the end of a sweep by minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # s
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a sweep sends nothing but what --log-to asks for
}

_MOST_METRICS, _MOST_PARAMS = 1000, 100  # limits of one request to a server; tags count toward both
_LONGEST_TAG, _LONGEST_PARAM = 5000, 500  # lengths in characters that every server accepts

_NOT_IN_A_NAME = re.compile(r"[^\w.: -]")
"""Characters that MLflow refuses in names, and slashes, which it reads as folders; module names may contain them."""

_DATABASE, _ARTIFACTS = "mlflow.db", "artifacts"

Item = TypeVar("Item")


class MlflowRuns:
    """The runs of one sweep, at a tracking URI, or in a folder as an SQLite store with its artifacts beside it."""

    def __init__(self, where: str, output: Path) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        self._output = output
        self._artifacts: str | None = None
        if where.startswith("/"):
            Path(where).mkdir(parents=True, exist_ok=True)
            if not os.access(where, os.W_OK):  # mlflow would try for more than a minute
                raise PermissionError(f"{where} is not a folder that can be written to")
            self._artifacts = Path(where, _ARTIFACTS).as_uri()
            where = f"sqlite:///{Path(where, _DATABASE)}"
        self._client: Any = MlflowClient(tracking_uri=where)
        self._client.search_experiments(max_results=1)
        self._parent: Any = None

    def log(self, entry: LoggedTrial) -> None:
        """Logs a trial as a run nested in the sweep's."""
        began_ms = None if entry.began_at is None else int(entry.began_at.timestamp() * 1000)
        parent = self._sweep_run()
        run = self._client.create_run(
            parent.info.experiment_id,
            start_time=began_ms,
            run_name=entry.name,
            tags={"mlflow.parentRunId": parent.info.run_id} | _short(entry.tags, _LONGEST_TAG),
        )
        run_id, status = run.info.run_id, "FINISHED" if entry.is_ok else "FAILED"
        self._log_params(run_id, entry.params)
        self._log_metrics(run_id, entry, began_ms or int(run.info.start_time))
        if entry.source:
            self._client.log_text(run_id, entry.source, "setting.py")
        ended_ms = None if began_ms is None else began_ms + int(entry.wall_s * 1000)
        self._client.set_terminated(run_id, status=status, end_time=ended_ms)

    def close(self, report: Path | None) -> None:
        """Adds the report to the artifacts of the sweep's run and ends the run."""
        run_id = self._sweep_run().info.run_id
        if report is not None:
            self._client.log_artifact(run_id, str(report))
        self._client.set_terminated(run_id)

    def _sweep_run(self) -> Any:
        if self._parent is None:
            facts = facts_of(self._output)
            experiment_id = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or f"compile-sweep/{facts.what}")
            self._parent = self._resumed(experiment_id, facts) or self._begun(experiment_id, facts)
        return self._parent

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=self._artifacts))

    def _resumed(self, experiment_id: str, facts: SweepFacts) -> Any:
        quoted = facts.identity.replace("'", "\\'")
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`{SWEEP_TAG}` = '{quoted}'", max_results=1)
        if not runs:
            return None
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return runs[0]

    def _begun(self, experiment_id: str, facts: SweepFacts) -> Any:
        tags = {SWEEP_TAG: facts.identity, "kind": "sweep"} | facts.environment
        run = self._client.create_run(experiment_id, run_name=facts.name, tags=_short(tags, _LONGEST_TAG))
        self._log_params(run.info.run_id, facts.config)
        return run

    def _log_params(self, run_id: str, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in _short(values, _LONGEST_PARAM).items()]
        for some in _portions(params, _MOST_PARAMS):
            self._client.log_batch(run_id, params=some)

    def _log_metrics(self, run_id: str, entry: LoggedTrial, began_ms: int) -> None:
        from mlflow.entities import Metric

        found = [Metric(_named(name), value, began_ms, 0) for name, value in entry.metrics.items()]
        for name, values in entry.series.items():
            found += [Metric(f"series.{name}", value, began_ms, step) for step, value in enumerate(values)]
        for some in _portions(found, _MOST_METRICS):
            self._client.log_batch(run_id, metrics=some)


def _named(name: str) -> str:
    return _NOT_IN_A_NAME.sub("_", name)


def _short(values: dict[str, str], longest: int) -> dict[str, str]:
    return {_named(name): value if len(value) <= longest else f"{value[: longest - 1]}…" for name, value in values.items()}


def _portions(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
