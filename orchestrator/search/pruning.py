"""Decides when to stop a running trial early: when it can no longer keep a bound, or no longer add to the front. Pure.

While a trial compiles, the only certain fact is how long it has compiled, which only grows. Its steps' speed and its memory are
predicted from similar trials, by the model that searches use (`search/surrogate.py`), with its uncertainty: the trial continues
while the hypervolume that it may add to the front is worth it, chance included. After the first timed pass its figures are almost
known, and are compared with the front directly. And a trial that compiles several times longer than others of its family did is
abandoned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.choices import COMPILED_OPTIMIZERS
from compile_sweep.schema.objectives import Aims, Goal, Record, figure
from compile_sweep.schema.outcome import Label, Phase, Status
from compile_sweep.schema.pareto import Losses, front, reference_point
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search.candidates import Candidates, Codes
from orchestrator.search.hypervolume import Cells
from orchestrator.search.proposers import Searcher
from orchestrator.search.surrogate import WEIGHTS, Posterior, likeness

Floats = npt.NDArray[np.float64]

SPEEDS = ("samples_per_s", "tokens_per_s")
"""Figures that are best when high; all others that are bounded here, times and memory, are best when low."""

EARLY = (*SPEEDS, "step_ms_median", "compile_s", "warmup_s", "peak_memory_bytes", "peak_reserved_bytes")
"""Figures known after the first timed pass."""

_UNITS = {
    "samples_per_s": ("samples/s", 1),
    "tokens_per_s": ("tokens/s", 1),
    "step_ms_median": ("ms a step", 1),
    "compile_s": ("s of compiling", 1),
    "warmup_s": ("s of warm-up", 1),
    "wall_s": ("s in all", 1),
    "peak_memory_bytes": ("GiB of peak memory", 2**30),
    "peak_reserved_bytes": ("GiB reserved", 2**30),
}
"""Words after each figure that is bounded here, and the size of their unit."""

_MOST_KNOWN = 200  # number of latest results that predictions use. Bounds their time.

Prune = Callable[[Record, Sequence[Record]], Record | None]
"""Given a recorded row and the rows before it, returns the row as it would be had the trial been stopped; None if it would not
be.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How readily a trial is abandoned."""

    margin: float = 0.02
    """Fraction by which a figure must be better than one on the front to count as better: about what measurements differ by."""
    least_gain: float = 0.005
    """Fraction of the hypervolume reached that a trial must be expected to add to continue compiling."""
    known_compiled: int = 5
    """Number of trials that compiled and were measured before predictions count."""
    first_pass: float = 1.10
    """How many times faster than in the first timed pass the steps may turn out to be."""
    family_factor: float = 4.0
    """A trial is abandoned after this multiple of the longest warm-up per graph in its family."""
    family_size: int = 2
    """Number of trials in a family that must have warmed up before that."""
    least_deadline_s: float = 60.0
    """Minimum seconds before a trial is abandoned because of its family."""
    step_safety: float = 1.5
    """Steps do not count as compiling up to this multiple of the longest that any warm-up's own steps took."""


def patience_with(searcher: Searcher | None) -> Patience:
    """Returns how readily trials are abandoned in a searcher's order.

    `gain` begins with the most informative settings. In other orders the first trials may be similar, and predictions based on
    them are more confident than they should be. Abandoning trials as readily as with gain, recorded grids lost up to 8% of their
    front's hypervolume in list order and up to 5% in random order (docs/search.md).
    """
    return Patience() if searcher is Searcher.GAIN else Patience(least_gain=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The progress of a running trial."""

    setting: CompileSettings
    phase: str
    elapsed_s: float
    in_phase_s: float
    early: Mapping[str, float] = field(default_factory=dict)
    """Figures from its first timed pass, by name; empty before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A decision to stop a trial, and what is known of it."""

    label: Label
    reason: str
    bounds: Mapping[str, float]  # the best that its figures could have become: the lowest or, for speeds, the highest


class Pruning:
    """Decides whether a trial continues, from the records so far."""

    def __init__(self, candidates: Candidates, aims: Aims, facts: WorkloadFacts, *, patience: Patience | None = None) -> None:
        self._candidates = candidates
        self._aims = aims
        self._facts = facts
        self._patience = patience or Patience()
        self._front: list[Losses] = []
        self._name_of: dict[Losses, str] = {}
        self._measured: dict[str, tuple[Losses, Codes]] = {}
        self._num_compiled = 0
        self._warmed_up: dict[tuple[Any, ...], tuple[int, float]] = {}
        self._steps_s: float | None = None
        self._most_lengths = 1
        self._expected: tuple[CompileSettings, list[Floats]] | None = None

    def tell(self, record: Record) -> None:
        """Learns from a finished attempt; from one that was stopped after its first timed pass, learns that pass's figures."""
        setting = _setting(str(record["settings_key"]))
        losses = self._aims.losses(record)
        known = losses or self._aims.losses({**record, **(record.get("bounds") or {})})
        if known is not None:
            self._num_compiled += setting.scope is not Scope.EAGER and setting.key not in self._measured
            self._measured.pop(setting.key, None)  # so that the latest is last
            self._measured[setting.key] = known, self._candidates.encode(setting)
            if len(self._measured) > _MOST_KNOWN:
                del self._measured[next(iter(self._measured))]
            self._expected = None
        if losses is not None and self._aims.is_usable(record):
            self._front = front([*self._front, losses])
            self._name_of = {losses: setting.label} | self._name_of
            self._name_of = {losses: self._name_of[losses] for losses in self._front}
        warmup_s, compile_s = record.get("warmup_s"), record.get("compile_s")
        if warmup_s is None or compile_s is None:
            return
        self._steps_s = max(self._steps_s or 0.0, warmup_s - compile_s)
        self._most_lengths = max(self._most_lengths, self._lengths(setting))
        cold_s = record.get("cold_equivalent_s") if record.get("caches") == Caches.WARM else compile_s
        if setting.scope is not Scope.EAGER and cold_s is not None:
            num, longest_s = self._warmed_up.get(_family(setting), (0, 0.0))
            cold_warmup_s = warmup_s - compile_s + cold_s  # restored caches may lack what another setting needs
            self._warmed_up[_family(setting)] = (num + 1, max(longest_s, cold_warmup_s / self._graphs(setting)))

    def decide(self, sighting: Sighting) -> Stop | None:
        """Decides whether to stop a trial; None lets it continue. Eager ones always continue: others are compared with them."""
        if sighting.setting.scope is Scope.EAGER:
            return None
        if sighting.early:
            return self._after_first_pass(sighting)
        if sighting.phase == Phase.WARMING_UP and self._steps_s is not None:
            # A warm-up visits every length; with more lengths than seen so far, it takes proportionally more steps.
            steps_s = self._steps_s * max(1.0, self._lengths(sighting.setting) / self._most_lengths)
            return self._while_compiling(sighting, sighting.in_phase_s - self._patience.step_safety * steps_s)
        return None

    def compile_deadline_s(self, setting: CompileSettings) -> float | None:
        """Returns the warm-up seconds after which a trial of this setting is abandoned; None if its family is hardly known."""
        num, longest_s = self._warmed_up.get(_family(setting), (0, 0.0))
        if num < self._patience.family_size:
            return None
        return max(self._patience.least_deadline_s, self._patience.family_factor * longest_s * self._graphs(setting))

    def _graphs(self, setting: CompileSettings) -> int:
        return max(1, setting.num_graphs(self._facts.max_length, self._facts.min_length))

    def _lengths(self, setting: CompileSettings) -> int:
        return len(setting.shape_policy(self._facts.max_length, self._facts.min_length).lengths())

    def _while_compiling(self, sighting: Sighting, compiling_s: float) -> Stop | None:
        bounds = {"compile_s": max(0.0, compiling_s), "warmup_s": sighting.in_phase_s, "wall_s": sighting.elapsed_s}
        when = f"after {sighting.in_phase_s:.0f} s of compiling"
        if stop := self._breaking(bounds, when):
            return stop
        deadline_s = self.compile_deadline_s(sighting.setting)
        if deadline_s is not None and sighting.in_phase_s >= deadline_s:
            reason = (
                f"still compiling or warming up after {sighting.in_phase_s:.0f} s, {self._patience.family_factor:g} times what "
                "others of its scope, mode and dynamic strategy took for each graph; given up"
            )
            return Stop(label=Label.COMPILE_DEADLINE, reason=reason, bounds=bounds)
        share = self._gain_left(sighting.setting, bounds) if compiling_s > 0 else None
        if share is not None and share < self._patience.least_gain:
            reason = (
                f"stopped {when}: it could be expected to add {share:.1%} to the hypervolume of the front, and is dominated save "
                "for that"
            )
            return Stop(label=Label.DOMINATED, reason=reason, bounds=bounds)
        return None

    def _after_first_pass(self, sighting: Sighting) -> Stop | None:
        factor = self._patience.first_pass
        bounds = {name: value * factor if name in SPEEDS else value for name, value in sighting.early.items()}
        if "step_ms_median" in bounds:
            bounds["step_ms_median"] /= factor
        bounds["wall_s"] = sighting.elapsed_s
        when = "after the first timed pass"
        if stop := self._breaking(bounds, when):
            return stop
        best = [self._bound(objective.name, bounds, objective.goal is Goal.MIN) for objective in self._aims.objectives]
        losses = [o.sign * value for o, value in zip(self._aims.objectives, best, strict=True) if value is not None]
        if len(losses) < len(best):
            return None
        for better in self._front:
            if all(mine >= theirs - self._patience.margin * abs(theirs) for mine, theirs in zip(losses, better, strict=True)):
                words = ", ".join(_said(o.name, value) for o, value in zip(self._aims.objectives, best, strict=True))
                reason = f"stopped {when}: with {words} at best, it is dominated by “{self._name_of[better]}”"
                return Stop(label=Label.DOMINATED, reason=reason, bounds=bounds)
        return None

    def _breaking(self, bounds: Mapping[str, float], when: str) -> Stop | None:
        """Returns a stop if figures no better than these break a constraint."""
        for constraint in self._aims.constraints:
            value = self._bound(constraint.name, bounds, constraint.is_upper)
            if value is not None and constraint.excess(value) > 0:
                reason = f"stopped {when}: it cannot keep {constraint} any more, as it would have {value:.4g} at best"
                return Stop(label=Label.DOMINATED, reason=reason, bounds=bounds)
        return None

    @staticmethod
    def _bound(name: str, bounds: Mapping[str, float], wants_less: bool) -> float | None:
        """Returns the bound on a figure if it has the wanted direction: a minimum for times and memory, a maximum for speeds."""
        return bounds.get(name) if wants_less != (name in SPEEDS) else None

    def _gain_left(self, setting: CompileSettings, bounds: Mapping[str, float]) -> float | None:
        """Returns what a trial is expected to add, as a fraction of the hypervolume reached; None while too little is known."""
        if self._num_compiled < self._patience.known_compiled or not self._front:
            return None
        draws = []
        for objective, drawn in zip(self._aims.objectives, self._drawn(setting), strict=True):
            least = self._bound(objective.name, bounds, objective.goal is Goal.MIN)
            draws.append(drawn if least is None else np.maximum(drawn, least))
        middle = tuple(float(drawn[len(WEIGHTS) // 2]) for drawn in draws)
        measured = (losses for losses, _ in self._measured.values())
        cells = Cells(self._front, reference_point([*measured, *self._front, middle]))
        volume = cells.volume()
        return float(cells.expected_gains([drawn[None] for drawn in draws], WEIGHTS)[0]) / volume if volume else None

    def _drawn(self, setting: CompileSettings) -> list[Floats]:
        if self._expected is None or self._expected[0] != setting:
            known = np.stack([codes for _, codes in self._measured.values()])
            fields = self._candidates.likeness
            cross = likeness(known, self._candidates.encode(setting)[None], fields)
            posterior = Posterior(likeness(known, known, fields), cross, np.ones(len(known), dtype=bool))
            losses = np.array([losses for losses, _ in self._measured.values()])
            self._expected = setting, [posterior.drawn(figures)[0] for figures in losses.T]
        return self._expected[1]


def replayed(candidates: Candidates, aims: Aims, facts: WorkloadFacts, *, patience: Patience | None = None) -> Prune:
    """Returns the same decision for recorded tables: what a row would be had its trial been stopped.

    A row says how long its trial warmed up and how long it took in all, but not the order. So this assumes that building came
    first, and that after the first timed pass there remained the other timed steps and the eager reference's.
    """
    pruning, known = Pruning(candidates, aims, facts, patience=patience), 0
    last: Record | None = None

    def prune(row: Record, before: Sequence[Record]) -> Record | None:
        nonlocal pruning, known, last
        if len(before) < known or (known and before[known - 1] is not last):  # the rows belong to another sweep
            pruning, known = Pruning(candidates, aims, facts, patience=patience), 0
        for record in before[known:]:
            pruning.tell(record)
        known, last = len(before), before[-1] if before else None
        return _stopped(pruning, row)

    return prune


def _stopped(pruning: Pruning, row: Record) -> Record | None:
    setting, wall_s = _setting(str(row["settings_key"])), figure(row, "wall_s") or 0.0
    warmup_s = figure(row, "warmup_s")
    is_endless = warmup_s is None and row.get("label") in (Label.COMPILE_DEADLINE, Label.DOMINATED)
    warms_up_s = wall_s if is_endless else warmup_s
    if warms_up_s is None:
        return None  # it died for another reason, at an unknown time
    after_s = 0.0 if is_endless else _timed_s(row) + sum(row.get("eager_step_ms") or ()) / 1e3
    before_s = max(0.0, wall_s - after_s - warms_up_s)

    def compiling(in_phase_s: float) -> Stop | None:
        elapsed_s = before_s + in_phase_s
        return pruning.decide(Sighting(setting=setting, phase=Phase.WARMING_UP, elapsed_s=elapsed_s, in_phase_s=in_phase_s))

    if stop := compiling(warms_up_s):
        too_early_s, in_time_s = 0.0, warms_up_s
        while in_time_s - too_early_s > 0.5:  # interval between looks at a running trial
            middle_s = (too_early_s + in_time_s) / 2
            if found := compiling(middle_s):
                in_time_s, stop = middle_s, found
            else:
                too_early_s = middle_s
        return _as_stopped(row, stop, Phase.WARMING_UP, before_s + in_time_s)
    if is_endless:
        return None
    first_pass_s = _timed_s(row) / _LEAST_PASSES
    early = {name: value for name in EARLY if (value := figure(row, name)) is not None}
    elapsed_s = before_s + warms_up_s + first_pass_s
    found = pruning.decide(
        Sighting(setting=setting, phase=Phase.STEADY, elapsed_s=elapsed_s, in_phase_s=first_pass_s, early=early)
    )
    return _as_stopped(row, found, Phase.STEADY, elapsed_s) if found else None


_LEAST_PASSES = 3  # minimum number of passes in a measurement; the first is at most this part of its timed steps


def _timed_s(row: Record) -> float:
    steps, step_ms = figure(row, "steady_steps"), figure(row, "step_ms_median")
    return (steps or 0.0) * (step_ms or 0.0) / 1e3


def _as_stopped(row: Record, stop: Stop, phase: Phase, wall_s: float) -> Record:
    """Returns the record of a stopped trial: without measurements, but with bounds."""
    kept = ("trial_id", "settings", "settings_key", "workload", "size", "pipeline", "num_workers", "environment_key", "caches")
    return {
        **{name: row[name] for name in kept if name in row},
        "status": Status.STOPPED if stop.label is Label.DOMINATED else Status.INFEASIBLE,
        "label": stop.label,
        "reason": stop.reason,
        "phase": str(phase),
        "wall_s": wall_s,
        "bounds": dict(stop.bounds),
    }


def _said(name: str, value: float | None) -> str:
    unit, size = _UNITS.get(name, (name, 1))
    return f"{(value or 0.0) / size:.4g} {unit}"


@lru_cache(maxsize=4096)
def _setting(key: str) -> CompileSettings:
    return CompileSettings.parse(key)


def _family(setting: CompileSettings) -> tuple[Any, ...]:
    """Returns the fields that decide how long a graph compiles."""
    return setting.scope, setting.mode, setting.dynamic, setting.tunes, setting.backend, setting.optimizer in COMPILED_OPTIMIZERS
