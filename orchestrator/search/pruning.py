"""When a running trial is stopped early: because a bound it cannot keep any more, or a front it cannot gain on any more. Pure.

While a trial compiles, all that is certain of it is how long it has compiled, which only grows. What its steps and its memory
will come to is expected from trials with like settings, by the model that searches use (`search/surrogate.py`), with all its
doubt: the trial goes on while the hypervolume that it may add to the front, chance included, is worth a mention. After the
first timed pass its figures are nearly known, and are compared with the front as they are. And a trial that compiles for
several times as long as others of its family did is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from compile_sweep.schema.choices import COMPILED_OPTIMIZERS
from compile_sweep.schema.objectives import Aims, Goal, Record, figure
from compile_sweep.schema.outcome import Label, Phase, Status
from compile_sweep.schema.pareto import Losses, front, reference_point
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search.candidates import Candidates, Codes
from orchestrator.search.hypervolume import Cells
from orchestrator.search.proposers import Searcher
from orchestrator.search.surrogate import Posterior, Scale, likeness

Floats = npt.NDArray[np.float64]

SPEEDS = ("samples_per_s", "tokens_per_s")
"""Figures of which more is the best case; of all others that are bounded here, times and memory, less is."""

EARLY = (*SPEEDS, "step_ms_median", "compile_s", "warmup_s", "peak_memory_bytes", "peak_reserved_bytes")
"""Figures that the first timed pass tells."""

_MOST_KNOWN = 200
"""Results that expectations rest on, the latest ones. Bounds their time."""

_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
_WEIGHTS: Floats = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()
"""Draws of a standard normal variable that stand for all of it (Gauss-Hermite quadrature)."""

Prune = Callable[[Record, Sequence[Record]], Record | None]
"""From a recorded row and the rows of what ran before it: the row as it would be had it been stopped, or None if it would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How easily a trial is given up."""

    margin: float = 0.02
    """Share by which a figure must be better than one on the front to count as better: about what measurements differ by."""
    least_gain: float = 0.005
    """Share of the hypervolume reached that a trial must be expected to add to go on compiling."""
    known_compiled: int = 5
    """Trials that compiled something, and were measured, before expectations count."""
    first_pass: float = 1.10
    """How many times as fast as in the first timed pass steps may turn out to be."""
    family_factor: float = 4.0
    """Times the longest warm-up a graph of its family, after which a trial is given up."""
    family_size: int = 2
    """Trials of a family that must have warmed up before that is done."""
    least_deadline_s: float = 60.0
    """No trial is given up for its family before this."""
    step_safety: float = 1.5
    """Times the longest that any warm-up's own steps took, which is not counted as compiling."""


def patience_with(searcher: Searcher | None) -> Patience:
    """How easily trials are given up in the order of a searcher.

    `gain` begins with settings that tell most. In other orders the first trials may be alike, and expectations that rest on them
    are surer than they should be: given up as in gain's, recorded grids lost up to 8 % of their front's hypervolume in the order
    of a list and up to 5 % in random ones (docs/search.md).
    """
    return Patience() if searcher is Searcher.GAIN else Patience(least_gain=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """How far a running trial is."""

    setting: CompileSettings
    phase: str
    elapsed_s: float
    """Since it began."""
    in_phase_s: float
    """Since its phase did."""
    early: Mapping[str, float] = field(default_factory=dict)
    """What its first timed pass says of its figures, by their names; empty before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """That a trial is to be stopped, and what is known of it."""

    label: Label
    reason: str
    """A sentence."""
    bounds: Mapping[str, float]
    """The best that its figures could have become: the least or, for speeds, the most."""


class Pruning:
    """Decides whether a trial goes on, from the records it was told of.

    Args:
        candidates: settings that may be run; they say which fields tell settings apart.
        aims: objectives and constraints.
        max_length: of the workload, in tokens, by which the number of graphs is told.
        min_length: of the workload, in tokens.
        patience: how easily a trial is given up.
    """

    def __init__(
        self, candidates: Candidates, aims: Aims, *, max_length: int, min_length: int = 1, patience: Patience | None = None
    ) -> None:
        self._candidates = candidates
        self._aims = aims
        self._max_length, self._min_length = max_length, min_length
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
        """Learns from a finished attempt; of one that was stopped after its first timed pass, from what that told."""
        setting = _setting(str(record["settings_key"]))
        losses = self._aims.losses(record)
        known = losses or self._aims.losses({**record, **(record.get("bounds") or {})})
        if known is not None:
            self._num_compiled += setting.scope is not Scope.EAGER and setting.key not in self._measured
            self._measured.pop(setting.key, None)  # so that the latest comes last
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
        """Whether to stop a trial; None lets it go on. Eager ones always go on: they are what others are compared with."""
        if sighting.setting.scope is Scope.EAGER:
            return None
        if sighting.early:
            return self._after_first_pass(sighting)
        if sighting.phase == Phase.WARMING_UP and self._steps_s is not None:
            # A warm-up visits every length: of more than were ever met it takes as many more steps.
            steps_s = self._steps_s * max(1.0, self._lengths(sighting.setting) / self._most_lengths)
            return self._while_compiling(sighting, sighting.in_phase_s - self._patience.step_safety * steps_s)
        return None

    def compile_deadline_s(self, setting: CompileSettings) -> float | None:
        """Seconds of warm-up after which a trial of this setting is given up; None if too little is known of its family."""
        num, longest_s = self._warmed_up.get(_family(setting), (0, 0.0))
        if num < self._patience.family_size:
            return None
        return max(self._patience.least_deadline_s, self._patience.family_factor * longest_s * self._graphs(setting))

    def _graphs(self, setting: CompileSettings) -> int:
        return max(1, setting.num_graphs(self._max_length, self._min_length))

    def _lengths(self, setting: CompileSettings) -> int:
        return len(setting.shape_policy(self._max_length, self._min_length).lengths())

    def _while_compiling(self, sighting: Sighting, compiling_s: float) -> Stop | None:
        """Args: compiling_s: what of the warm-up so far cannot have been steps."""
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
                words = ", ".join(f"{o.name} {value:.4g}" for o, value in zip(self._aims.objectives, best, strict=True))
                reason = f"stopped {when}: with {words} at best it is dominated by {self._name_of[better]}"
                return Stop(label=Label.DOMINATED, reason=reason, bounds=bounds)
        return None

    def _breaking(self, bounds: Mapping[str, float], when: str) -> Stop | None:
        """Whether figures no better than these break a constraint."""
        for constraint in self._aims.constraints:
            value = self._bound(constraint.name, bounds, constraint.is_upper)
            if value is not None and constraint.excess(value) > 0:
                reason = f"stopped {when}: it cannot keep {constraint} any more, as it would have {value:.4g} at best"
                return Stop(label=Label.DOMINATED, reason=reason, bounds=bounds)
        return None

    @staticmethod
    def _bound(name: str, bounds: Mapping[str, float], wants_less: bool) -> float | None:
        """The bound on a figure if it is one in the direction that is wanted: times and memory from below, speeds from above."""
        return bounds.get(name) if wants_less != (name in SPEEDS) else None

    def _gain_left(self, setting: CompileSettings, bounds: Mapping[str, float]) -> float | None:
        """What a trial is expected to add, as a share of the hypervolume reached; None while too little is known."""
        if self._num_compiled < self._patience.known_compiled or not self._front:
            return None
        draws = []
        for objective, drawn in zip(self._aims.objectives, self._drawn(setting), strict=True):
            least = self._bound(objective.name, bounds, objective.goal is Goal.MIN)
            draws.append(drawn if least is None else np.maximum(drawn, least))
        middle = tuple(float(drawn[len(_WEIGHTS) // 2]) for drawn in draws)
        measured = (losses for losses, _ in self._measured.values())
        cells = Cells(self._front, reference_point([*measured, *self._front, middle]))
        volume = cells.volume()
        return float(cells.expected_gains([drawn[None] for drawn in draws], _WEIGHTS)[0]) / volume if volume else None

    def _drawn(self, setting: CompileSettings) -> list[Floats]:
        """Losses that a setting may come to, for each objective."""
        if self._expected is None or self._expected[0] != setting:
            known = np.stack([codes for _, codes in self._measured.values()])
            cross = likeness(known, self._candidates.encode(setting)[None])
            posterior = Posterior(likeness(known, known), cross, np.ones(len(known), dtype=bool))
            draws = []
            for figures in np.array([losses for losses, _ in self._measured.values()]).T:
                scale = Scale.of(figures)
                mean = posterior.mean(scale.modelled(figures))
                draws.append(scale.figures(mean + posterior.deviation * _NODES))
            self._expected = setting, draws
        return self._expected[1]


def replayed(candidates: Candidates, aims: Aims, *, max_length: int, patience: Patience | None = None) -> Prune:
    """The same for recorded tables: says of a row what it would be had its trial been stopped.

    A row tells how long its trial warmed up and how long all of it took, but not what came when; so it is taken that building
    came first, and that after the first timed pass there were left the other timed steps and the eager reference's.

    Args:
        candidates: the table's settings.
        aims: objectives and constraints.
        max_length: of the workload, in tokens.
        patience: how easily a trial is given up.
    """
    pruning, known = Pruning(candidates, aims, max_length=max_length, patience=patience), 0
    last: Record | None = None

    def prune(row: Record, before: Sequence[Record]) -> Record | None:
        nonlocal pruning, known, last
        if len(before) < known or (known and before[known - 1] is not last):  # another sweep
            pruning, known = Pruning(candidates, aims, max_length=max_length, patience=patience), 0
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
        return None  # it died of something else, and when is not known
    after_s = 0.0 if is_endless else _after_warm_up_s(row)
    before_s = max(0.0, wall_s - after_s - warms_up_s)

    def compiling(in_phase_s: float) -> Stop | None:
        elapsed_s = before_s + in_phase_s
        return pruning.decide(Sighting(setting=setting, phase=Phase.WARMING_UP, elapsed_s=elapsed_s, in_phase_s=in_phase_s))

    if stop := compiling(warms_up_s):
        too_early_s, in_time_s = 0.0, warms_up_s
        while in_time_s - too_early_s > 0.5:  # how often a running trial is looked at
            middle_s = (too_early_s + in_time_s) / 2
            if found := compiling(middle_s):
                in_time_s, stop = middle_s, found
            else:
                too_early_s = middle_s
        return _as_stopped(row, stop, Phase.WARMING_UP, before_s + in_time_s)
    if is_endless:
        return None
    first_pass_s = _first_pass_s(row)
    early = {name: value for name in EARLY if (value := figure(row, name)) is not None}
    elapsed_s = before_s + warms_up_s + first_pass_s
    found = pruning.decide(
        Sighting(setting=setting, phase=Phase.STEADY, elapsed_s=elapsed_s, in_phase_s=first_pass_s, early=early)
    )
    return _as_stopped(row, found, Phase.STEADY, elapsed_s) if found else None


_LEAST_PASSES = 3
"""That a measurement takes; the first is at most this part of its timed steps."""


def _timed_s(row: Record) -> float:
    steps, step_ms = figure(row, "steady_steps"), figure(row, "step_ms_median")
    return (steps or 0.0) * (step_ms or 0.0) / 1e3


def _first_pass_s(row: Record) -> float:
    return _timed_s(row) / _LEAST_PASSES


def _after_warm_up_s(row: Record) -> float:
    return _timed_s(row) + sum(row.get("eager_step_ms") or ()) / 1e3


def _as_stopped(row: Record, stop: Stop, phase: Phase, wall_s: float) -> Record:
    """What the record would be: nothing measured, but bounds."""
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


@lru_cache(maxsize=4096)
def _setting(key: str) -> CompileSettings:
    return CompileSettings.parse(key)


def _family(setting: CompileSettings) -> tuple[Any, ...]:
    """What decides how long a graph compiles."""
    return setting.scope, setting.mode, setting.dynamic, setting.tunes, setting.backend, setting.optimizer in COMPILED_OPTIMIZERS
