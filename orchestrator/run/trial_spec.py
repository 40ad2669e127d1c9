"""What a trial is asked to do, and the record it ends with. Crosses processes as plain values."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from compile_sweep.contract.workload_names import is_in_users_folder
from compile_sweep.schema.attempt_record import why_impossible
from compile_sweep.schema.outcome import Label, Verdict, verdict_of, was_lost_to_precompile
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.config import Device, SweepConfig
from orchestrator.guard import cores
from orchestrator.run.sweep_folder import LOGS

_TIMED_SHARE = 1 / 20  # fraction of a sweep's time budget that one trial may spend on timing steps after its first pass


def log_file_name(rank: int) -> str:
    """Returns the name of a worker's log."""
    return f"worker-{rank}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """What all trials of a sweep have in common."""

    folder: str
    workload: str
    size: str
    seed: int
    num_workers: int
    use_gpu: bool
    pipeline: str
    compile_deadline_s: float
    trial_deadline_s: float
    workers_at_once: int = 1
    """Number of workers, over all trials, that may run at once; a host's cores are divided by it."""
    claimed_cpus: float = 0.0
    """CPUs that a worker claims from Ray, so that no more trials start than there are cores for."""
    cache: str | None = None
    """Where artifacts are stored; None for nowhere."""
    cache_in_cluster: bool = False
    """Whether the cluster's memory caches the store."""
    precompile: bool = False
    """Whether Dynamo's traces are stored, too."""
    restores: bool = False
    prunes: bool = False
    warm_start: bool = False
    """Whether a trial only starts from its setting's own artifacts, instead of measuring it."""
    placement: str = "pack"
    head: str | None = None
    """Ray's name of the host with the sweep's folder, in a cluster; None on a single host."""
    python_path: str = ""
    """Absolute folders that workers import from first, where their hosts have them; separated as in PYTHONPATH."""
    script: Mapping[str, Any] | None = None
    """A person's script instead of a workload, as `ScriptJob.to_dict` writes it."""
    threads: Mapping[str, str] = field(default_factory=dict)
    """Variables with a number of threads that a script's sweep was started with; trials keep them."""
    budget_ends_at: float | None = None
    """When the time budget is used up, in seconds since 1970; None without one."""
    protocol: Mapping[str, float] = field(default_factory=dict)
    """Fields of the harness's `Protocol` that differ from its defaults."""
    largest_batch: bool = False
    """Whether a trial also looks for the largest batch that fits the device's memory."""
    bisects: bool = False
    """Whether an attempt looks for the module with wrong numbers, instead of measuring."""
    explains: bool = False
    """Whether the figures also contain what `--explain` needs besides: `targets`, the names of modules that are compiled one by
    one, and `graphs_without_code`. They do not contain torch's check of the CPU's vector instructions.
    """
    spares_repeats: bool = False
    """Whether graphs that repeat others get no code (`repeated_graphs.py`)."""

    @classmethod
    def of(cls, config: SweepConfig, folder: Path, **own: Any) -> Self:
        """Returns the plan of a sweep's trials."""
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
            largest_batch=config.largest_batch,
            placement=config.placement,
            script=config.script,
            threads={name: os.environ[name] for name in cores.THREADS if config.script and name in os.environ},
            budget_ends_at=time.time() + config.time_budget_s if config.time_budget_s else None,
            protocol={"max_window_s": config.time_budget_s * _TIMED_SHARE} if config.time_budget_s else {},
            **own,
        )


def users_python_path(workload: str) -> str:
    """Returns the user's folders that a workload is imported from, the current one first if it is there by that name."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = [os.getcwd()] if is_in_users_folder(workload) else []
    return os.pathsep.join(dict.fromkeys([*here, *map(os.path.abspath, filter(None, given))]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One trial: the plan, and what is specific to this trial."""

    plan: TrialPlan
    trial_id: str
    settings: CompileSettings

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores an assignment from the result of `to_dict`."""
        settings = CompileSettings.parse(values["settings_key"])
        return cls(plan=TrialPlan(**values["plan"]), trial_id=values["trial_id"], settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values, as Tune's and Train's configurations require."""
        return {"plan": asdict(self.plan), "trial_id": self.trial_id, "settings_key": self.settings.key}

    def after(self, failed: Sequence[str]) -> Self:
        """Returns the assignment for the next attempt, without Dynamo's traces if those ended one of the failed attempts."""
        lost = self.plan.precompile and was_lost_to_precompile(failed)
        return replace(self, plan=replace(self.plan, precompile=False)) if lost else self

    @property
    def compiles(self) -> bool:
        """Tells whether there is anything a cache could hold."""
        return self.settings.scope is not Scope.EAGER

    @property
    def restores(self) -> bool:
        """Tells whether the trial starts with artifacts."""
        return self.plan.restores and self.plan.cache is not None and self.compiles

    @property
    def log_folder(self) -> Path:
        """Returns the folder of the trial's own output."""
        return Path(self.plan.folder) / LOGS / self.trial_id

    def log_file(self, rank: int) -> Path:
        """Returns the path of one worker's log."""
        return self.log_folder / log_file_name(rank)

    def record(
        self, verdict: Verdict, *, phase: str | None, started_at: str, wall_s: float, figures: Mapping[str, Any] | None = None
    ) -> TrialRecord | WarmStart:
        """Returns the record of an attempt; of figures that cannot be true, it has none and says why."""
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
            # A trial that died may or may not have restored artifacts, so it is not called cold.
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
