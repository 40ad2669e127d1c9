"""What a trial is told to do, and the record it ends with. It crosses processes as plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from compile_sweep.contract.names import is_in_users_folder
from compile_sweep.schema.outcome import Label, Verdict, verdict_of, was_lost_to_precompile
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart, why_impossible
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.config import Device, SweepConfig
from orchestrator.run.sweep_folder import LOGS

_TIMED_SHARE = 1 / 20
"""Of a sweep's time budget, that one trial may go on timing steps after its first pass."""


def log_file_name(rank: int) -> str:
    """Name of a worker's log."""
    return f"worker-{rank}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """What all trials of a sweep have in common."""

    folder: str
    """The sweep's, absolute."""
    workload: str
    size: str
    seed: int
    num_workers: int
    use_gpu: bool
    pipeline: str
    """resident or real."""
    compile_deadline_s: float
    trial_deadline_s: float
    workers_at_once: int = 1
    """Workers of all trials that may run at the same time, into which a host's cores are divided."""
    claimed_cpus: float = 0.0
    """What a worker claims of Ray's CPUs, so that no more trials start than there are cores for."""
    cache: str | None = None
    """Where artifacts are kept; None for nowhere."""
    cache_in_cluster: bool = False
    """Whether the cluster's memory stands before it."""
    precompile: bool = False
    """Whether what Dynamo traced is kept too."""
    restores: bool = False
    """Whether a trial begins with what others left there."""
    prunes: bool = False
    """Whether a trial may be told to stop early."""
    warm_start: bool = False
    """Whether a trial only starts from its setting's own artifacts, instead of measuring it."""
    placement: str = "pack"
    """pack or spread."""
    head: str | None = None
    """Ray's name of the host that has the folder, where there may be others; None where there is one host."""
    python_path: str = ""
    """Folders that workers import from before others, where their hosts have them; written like PYTHONPATH, absolute."""
    script: Mapping[str, Any] | None = None
    """A person's script in place of a workload, as `ScriptJob.to_dict` writes it."""
    protocol: Mapping[str, float] = field(default_factory=dict)
    """Fields of the harness's `Protocol` that differ from its defaults."""
    bisects: bool = False
    """Whether an attempt looks for the module that is wrong, instead of measuring."""
    names_targets: bool = False
    """Whether the figures also name, as `targets`, the modules that are compiled one by one."""

    @classmethod
    def of(cls, config: SweepConfig, folder: Path, **own: Any) -> TrialPlan:
        """The plan of a sweep's trials.

        Args:
            config: the sweep's.
            folder: the sweep's.
            own: what the runner and the stage decide.
        """
        return cls(
            folder=str(folder.resolve()),
            workload=config.workload,
            size=config.size,
            seed=config.seed,
            num_workers=config.workers_per_trial,
            use_gpu=config.device is Device.CUDA,
            pipeline="script" if config.script else config.pipeline,
            compile_deadline_s=config.compile_deadline_s,
            trial_deadline_s=config.whole_trial_s,
            precompile=config.precompile,
            placement=config.placement,
            script=config.script,
            protocol={"max_window_s": config.time_budget_s * _TIMED_SHARE} if config.time_budget_s else {},
            **own,
        )


def users_python_path(workload: str) -> str:
    """Folders of the user's that a workload is imported from, as `TrialPlan.python_path` holds them.

    Args:
        workload: its name. One that is named as it would be imported from the current folder is imported from there first.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = [os.getcwd()] if is_in_users_folder(workload) else []
    return os.pathsep.join(dict.fromkeys([*here, *map(os.path.abspath, filter(None, given))]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One trial: the plan and what is its own."""

    plan: TrialPlan
    trial_id: str
    settings: CompileSettings

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Assignment:
        """The assignment that `to_dict` made these values of."""
        settings = CompileSettings.parse(values["settings_key"])
        return cls(plan=TrialPlan(**values["plan"]), trial_id=values["trial_id"], settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as Tune's and Train's configurations are."""
        return {"plan": asdict(self.plan), "trial_id": self.trial_id, "settings_key": self.settings.key}

    def after(self, failed: Sequence[str]) -> Assignment:
        """What is tried after attempts that failed for these reasons: no traced functions are kept if that ended one."""
        lost = self.plan.precompile and was_lost_to_precompile(failed)
        return replace(self, plan=replace(self.plan, precompile=False)) if lost else self

    @property
    def compiles(self) -> bool:
        """Whether there is anything a cache could hold."""
        return self.settings.scope is not Scope.EAGER

    @property
    def restores(self) -> bool:
        """Whether it begins with artifacts."""
        return self.plan.restores and self.plan.cache is not None and self.compiles

    @property
    def log_folder(self) -> Path:
        """Where the trial's own output goes."""
        return Path(self.plan.folder) / LOGS / self.trial_id

    def log_file(self, rank: int) -> Path:
        """The part of it that one worker writes."""
        return self.log_folder / log_file_name(rank)

    def record(
        self, verdict: Verdict, *, phase: str | None, started_at: str, wall_s: float, figures: Mapping[str, Any] | None = None
    ) -> TrialRecord | WarmStart:
        """The record of an attempt at this assignment.

        Args:
            verdict: what became of it.
            phase: the last one reached, if any was.
            started_at: ISO 8601.
            wall_s: seconds it took.
            figures: what a worker measured, if it did; what the record has no field for is left out. If they cannot be true, the
                record has none of them and says why.
        """
        kind = WarmStart if self.plan.warm_start else TrialRecord
        values: dict[str, Any] = {
            "trial_id": self.trial_id,
            "settings": self.settings.to_dict(),
            "settings_key": self.settings.key,
            "status": verdict.status,
            "label": verdict.label,
            "reason": verdict.reason,
            "phase": phase,
            "workload": self.plan.workload,
            "size": self.plan.size,
            "num_workers": self.plan.num_workers,
            "started_at": started_at,
            "wall_s": wall_s,
            "pipeline": self.plan.pipeline,
            "precompile": self.plan.precompile,
            # Of one that died it is not known whether there was anything to restore, so it is not called cold.
            "caches": Caches.WARM if self.restores else Caches.COLD,
            **(figures or {}),
        }
        values["caches"] = Caches(values["caches"])
        known = {field.name for field in fields(kind)}
        record = kind(**{name: value for name, value in values.items() if name in known})
        if figures and (why := why_impossible(record)):
            impossible = verdict_of(Label.EXCEPTION, f"its figures cannot be true, so they are left out: {why}")
            return self.record(impossible, phase=phase, started_at=started_at, wall_s=wall_s)
        return record
