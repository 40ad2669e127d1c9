"""Trials as W&B runs of one group: one run for the sweep, with its report, and one per trial.

W&B keeps its files in `wandb/` of the working directory, or where WANDB_DIR says; WANDB_MODE=offline sends nothing.
"""

import os
from pathlib import Path
from typing import Any

from orchestrator.tracking.base import LoggedTrial, facts_of


class WandbRuns:
    """The runs of one sweep, in PROJECT or ENTITY/PROJECT."""

    def __init__(self, where: str, output: Path) -> None:
        import wandb

        self._wandb: Any = wandb
        self._entity, _, self._project = where.rpartition("/")
        self._output = output
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(timeout=20):
            raise PermissionError("nobody is logged in; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")

    def log(self, entry: LoggedTrial) -> None:
        """Logs a trial as a run with the setting as its configuration."""
        run = self._begun(entry.name, "warm-start" if entry.is_warm_start else "trial", {**entry.params, **entry.tags})
        for step in range(max(map(len, entry.series.values()), default=0)):
            run.log({f"series/{name}": values[step] for name, values in entry.series.items() if step < len(values)}, step=step)
        run.summary.update(entry.metrics)
        run.finish(exit_code=0 if entry.is_ok else 1)

    def close(self, report: Path | None) -> None:
        """Logs the report as a run of its own."""
        facts = facts_of(self._output)
        run = self._begun(facts.name, "sweep", {**facts.config, **facts.environment})
        if report is not None:
            run.log({"report": self._wandb.Html(report.read_text(encoding="utf-8"), inject=False)})
        run.finish()

    def _begun(self, name: str, kind: str, config: dict[str, str]) -> Any:
        return self._wandb.init(
            project=self._project,
            entity=self._entity or None,
            group=self._output.absolute().name,
            job_type=kind,
            name=name,
            config=config,
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
