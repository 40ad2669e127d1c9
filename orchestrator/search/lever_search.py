"""The searcher of recipe `auto`: first what won elsewhere, then the best setting so far with one more lever pulled.

The model of a setting's speed is the baseline's speed times the gain of each of its levers, in logarithms. Each lever's gain is
expected to be what it was elsewhere (`lever_prior.py`), with its spread between workloads, and combinations may differ a little
from the product. Measurements of this sweep correct the gains of the levers that were pulled. The next setting is the one with
the largest expected improvement over the best so far per second of its trial.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.causes.guards import HIGHER_LIMIT
from compile_sweep.schema.choices import MemoryFormat, OptimizerKind
from compile_sweep.schema.objectives import Aims, Goal, Record, figure
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import RECOMPILE_LIMIT, CompileSettings, Scope
from orchestrator.plan.estimates import (
    compile_pace,
    guessed_compile_s,
    later_wall_s,
    recording_s,
    rest_s,
    with_model,
    without_recording,
)
from orchestrator.search.candidates import Candidates, Untried
from orchestrator.search.lever_prior import WHERE_PADDED, Expectation, Prior, beliefs_about
from orchestrator.search.levers import (
    CAPTURED,
    LENGTHS,
    Lever,
    changed,
    fails_alike,
    fails_in_graphs,
    is_pointless,
    kind_of,
    levers_of,
)
from orchestrator.search.remedies import Remedies

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_LEVEL = 10.0  # standard deviation of the logarithm of the baseline's speed, about which nothing is known
_INTERPLAY = 0.12  # standard deviation of the part of a setting's log speed that its levers do not explain individually

_INTERPLAYS = (0.02, 0.03, 0.05, 0.08, _INTERPLAY)
"""Standard deviations that a forecast chooses from in place of `_INTERPLAY`, by what was measured. After 16 equally fast
settings of nanoGPT, the forecast of another hour was a gain of 19% by `_INTERPLAY`, and of 3% by the likeliest of these.
"""

_KEPT = 0.5
"""Share of a forecast's log gain that is promised once a compiled setting was measured. Levers that save the same time gain less
together; of the whole forecasts, a third came true in the median (`benchmarks.search.forecasts`).
"""

_ALIKE = 0.6
"""Correlation, in that part, between settings that differ in one lever; with two levers, its square, and so on, as in
`surrogate.py`.
"""

_CARRIED_OVER = 0.3
"""Correlation of what a lever gains over expectations in eager and in compiled training, where other kernels run. On a UNet,
`channels_last` gained less than expected in eager training, and 1.3 × compiled (docs/results.md).
"""

_PER_TOKEN = 0.4
"""Growth of log speed with the logarithm of tokens saved: less than 1, because part of a step does not depend on length."""

_PER_TOKEN_SPREAD = 0.25
"""Spread of that growth: it was 0.47 and 0.26 for padding to the longest row, without and with rows grouped by length, of the
captioning model in eager mode (docs/results/h200-side-by-side).
"""

_OF_LENGTHS = (*LENGTHS, "group_window")  # levers that decide how many tokens a batch is padded to
_NOISE = 0.01  # standard deviation of a measured log speed

_NORMAL = NormalDist()

LEAST_GAIN = 0.003
"""Expected improvement below which no setting is worth trying: less than repeated measurements differ by."""

_WORTH_A_RISK = 0.02
"""Least expected log gain of a lever in the first compiled settings, which pull many levers at once: any could fail them all."""

_AS_GOOD = 0.02
"""Difference in log speed up to which a setting is as good a base for one more lever as the best: it may take half as long to
compile, as SegFormer's with a fused optimizer does, of which a compiled one is 2% ahead.
"""

_UNKNOWN_PACE, _KNOWN_PACE = 0.7, 0.3
"""Spread of the logarithm of a trial's seconds over what is expected, before and after anything has compiled."""

_STRAY_FAILURES = 0.1  # fraction of settings that fail although each of their levers works
_MOST_PLANNED = 8  # maximum number of settings that are planned ahead: later ones depend on the results of these
_DRAWS = 256  # number of draws of possible results for a forecast


class Step(NamedTuple):
    """The next setting to try, and why."""

    setting: CompileSettings
    reason: str
    seconds: float


class _Took(NamedTuple):
    """Seconds of a trial."""

    compile_s: float | None
    wall_s: float
    phases_s: Mapping[str, float]


class LeverModel:
    """Models what settings are worth by the levers they pull."""

    def __init__(self, candidates: Candidates, prior: Prior, tokens: Callable[[CompileSettings], float]) -> None:
        every = [levers_of(setting) for setting in candidates.settings]
        usual = _usual(every)
        self.levers: tuple[Mapping[str, str], ...] = tuple(
            {name: value for name, value in levers.items() if (name, value) not in usual} for levers in every
        )
        """Levers of each candidate, without those that all compiled candidates pull."""
        self.known = sorted({Lever(*item) for levers in self.levers for item in levers.items()})
        self._place = {lever: place for place, lever in enumerate(self.known)}
        self._is_compiled = np.array(["scope" in levers for levers in every])
        padded = np.log([tokens(setting) for setting in candidates.settings])
        self._saved: Floats = padded.max() - padded
        self._pulls = np.zeros((len(every), len(self.known)), dtype=bool)
        for row, levers in enumerate(self.levers):
            self._pulls[row, [self._place[Lever(*item)] for item in levers.items()]] = True
        self.interplay = _INTERPLAY
        """Standard deviation of the part of a log speed that levers do not explain individually."""
        self.expect(prior)

    def expect(self, prior: Prior) -> None:
        """Takes what levers are expected to be worth from a prior."""
        self._expected = {
            (lever, compiled): _expected(prior, lever, compiled) for lever in self.known for compiled in (False, True)
        }
        gains = [sum(self.expected(Lever(*item), levers).log_gain for item in levers.items()) for levers in self.levers]
        self._means: Floats = np.array(gains) + _PER_TOKEN * self._saved
        self.is_promising = np.array([self._wins(levers) for levers in self.levers])
        """For each candidate, whether all of its levers are expected to gain enough; scope and lengths do not count."""
        self._spreads: Floats = np.array([self._expected[lever, True].spread for lever in self.known])

    def expected(self, lever: Lever, levers: Mapping[str, str]) -> Expectation:
        """Returns what a lever was worth elsewhere, among other levers that are pulled."""
        found = self._expected[lever, "scope" in levers and lever.name != "scope"]
        gain = WHERE_PADDED.get(str(lever)) if "pad_to_multiple_of" in levers else None
        return found if gain is None else found._replace(log_gain=gain, num_workloads=0)

    def covariance(self, one: Indices, other: Indices) -> Floats:
        """Returns the prior covariance of log speeds, of shape (setting of `one`, setting of `other`)."""
        mine, theirs = self._pulls[one] * self._spreads, self._pulls[other] * self._spreads
        differing = (self._pulls[one][:, None, :] ^ self._pulls[other][None, :, :]).sum(axis=2)
        # Another value of the same lever is one difference, although as levers they are two.
        likeness = _ALIKE ** np.ceil(differing / 2)
        of_tokens = _PER_TOKEN_SPREAD**2 * np.outer(self._saved[one], self._saved[other])
        carried = np.where(self._is_compiled[one][:, None] == self._is_compiled[other][None, :], 1.0, _CARRIED_OVER)
        return np.asarray(_LEVEL**2 + of_tokens + mine @ theirs.T * carried + self.interplay**2 * likeness, dtype=np.float64)

    def predict(self, known: Indices, speeds: Floats, asked: Indices) -> tuple[Floats, Floats]:
        """Returns the mean of each asked setting's log speed, and the covariance of them all."""
        cross = self.covariance(known, asked)
        inner = self.covariance(known, known) + _NOISE**2 * np.eye(len(known))
        weights = np.linalg.solve(inner, cross)
        mean = self._means[asked] + weights.T @ (speeds - self._means[known])
        return mean, self.covariance(asked, asked) - cross.T @ weights

    def deviations(self, known: Indices, asked: Indices) -> Floats:
        """Returns the standard deviation of each asked setting's log speed."""
        cross = self.covariance(known, asked)
        inner = self.covariance(known, known) + _NOISE**2 * np.eye(len(known))
        own = (
            _LEVEL**2 + (_PER_TOKEN_SPREAD * self._saved[asked]) ** 2 + self._pulls[asked] @ self._spreads**2 + self.interplay**2
        )
        variances: Floats = np.maximum(own - np.einsum("ka,ka->a", cross, np.linalg.solve(inner, cross)), 1e-8)
        return np.asarray(np.sqrt(variances), dtype=np.float64)

    def likeliest_interplay(self, known: Indices, speeds: Floats) -> float:
        """Returns the `interplay` under which the measured log speeds are likeliest."""
        usual, off = self.interplay, speeds - self._means[known]
        likelihoods = {}
        for self.interplay in _INTERPLAYS:
            inner = self.covariance(known, known) + _NOISE**2 * np.eye(len(known))
            likelihoods[self.interplay] = -off @ np.linalg.solve(inner, off) - np.linalg.slogdet(inner)[1]
        self.interplay = usual
        return max(likelihoods, key=lambda interplay: likelihoods[interplay])

    def works(self, results: Sequence[tuple[int, bool]]) -> Floats:
        """Returns the probability that each candidate works, which is that of its most doubtful lever."""
        worked = np.zeros(len(self.known))
        for place, is_usable in results:
            worked += self._pulls[place] * is_usable
        failed = np.zeros(len(self.known))
        for place, is_usable in results:
            if not is_usable:  # levers that worked elsewhere in this sweep are not at fault
                failed += self._pulls[place] & (worked == 0)
        before = np.array([self._expected[lever, True].works for lever in self.known])
        # By Bayes' rule: with a lever that cannot work, all settings fail; with others, few do, and one success settles it.
        sound = before * np.where(worked > 0, 1.0, _STRAY_FAILURES**failed)
        chances = np.where(worked > 0, 1 - _STRAY_FAILURES, sound / (sound + 1 - before))
        return np.asarray(np.where(self._pulls, chances, 1.0).min(axis=1, initial=1.0), dtype=np.float64)

    def _wins(self, levers: Mapping[str, str]) -> bool:
        chosen = (Lever(*item) for item in levers.items() if item[0] not in ("scope", *_OF_LENGTHS))
        return all(self.expected(lever, levers).log_gain >= _WORTH_A_RISK for lever in chosen)


class LeverSearch:
    """Proposes the baseline, then what the prior expects to gain most per second, then the best so far with one more lever.

    Args:
        aims: The first objective decides; all constraints must be met.
        tokens: Mean number of tokens that batches are padded to under a setting; None if every batch has one shape.
        fits: Tells whether a trial of a setting would end within the budget.
        left_s: Seconds that are left of the budget; infinite without one.
    """

    def __init__(
        self,
        candidates: Candidates,
        aims: Aims,
        facts: WorkloadFacts,
        *,
        prior: Prior | None = None,
        tokens: Callable[[CompileSettings], float] | None = None,
        fits: Callable[[CompileSettings], bool] | None = None,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._candidates, self._aims = candidates, aims
        self._untried = Untried(candidates)
        self._remedies = Remedies(candidates.settings)
        self._classes: list[str] = []  # of a script's modules
        self._struck: dict[str, list[int]] = {}  # by the key of a setting that failed: what would fail alike
        is_speed = aims.objectives[0].goal is Goal.MAX and "per_s" in aims.objectives[0].name
        self._prior = prior if prior is not None and is_speed else Prior()
        self.model = LeverModel(candidates, self._prior, tokens or (lambda setting: 1.0))
        self._fits, self._left_s = fits or (lambda setting: True), left_s
        self._facts = facts
        self._allow_kinds()
        self._guessed_s = self._guesses()
        self._speeds: dict[int, float] = {}
        self._tried: dict[int, bool] = {}
        self._took: dict[int, _Took] = {}

    def propose(self) -> CompileSettings | None:
        step = self.next_step()
        return None if step is None else step.setting

    def next_step(self) -> Step | None:
        """Returns the next setting to try, and marks it as tried; None if none fits or is worth trying."""
        if (retry := self._remedies.due) is not None:
            self._remedies.begin(retry)
            if self._fits(retry.amended):
                place = self.place_of(retry.tried.key)
                assert place is not None
                return Step(retry.amended, retry.reason, float(self._seconds()[place]))
        fitting = self._fitting()
        if not len(fitting):
            return None
        if not self._tried and (baseline := self._baseline(fitting)) is not None:
            return self._taken(baseline, "what runs today")
        for asked in (self._near_best(fitting), self._won_elsewhere(fitting), fitting):
            if len(asked):
                seconds = self._seconds()[asked]
                gains = self._gains(asked) * self._ends_in_time(seconds)
                bargain = int(np.argmax(gains / seconds))
                if gains[bargain] >= LEAST_GAIN:
                    return self._taken(int(asked[bargain]), self._reason(int(asked[bargain])))
        return None

    def tell(self, record: Record) -> None:
        key = str(record["settings_key"])
        if model := record.get("model_facts"):
            self._learn(model)
            if self._facts.is_fused and not record.get("graphs"):  # unless it compiles itself, that is the script as it is
                self._strike(lambda setting: levers_of(setting) == {"optimizer": OptimizerKind.FUSED})
        place = self.place_of(key)
        if place is None:
            return
        setting = self._candidates.settings[place]
        is_amended = key != setting.key
        self._untried.strike(setting.key)
        if not is_amended or fails_in_graphs(record.get("label"), record.get("reason") or ""):
            self._strike_alike(CompileSettings.parse(key), record)
        told = {**record, **(record.get("bounds") or {})}  # bounds are figures of an attempt that was stopped after it was timed
        loss = self._aims.objectives[0].loss(told)
        is_usable = self._aims.is_usable(record)
        if self._remedies.is_probe(key):  # its speed is not that of the setting
            self._strike_alike(CompileSettings.parse(key), record)
            self._remedies.tell(setting, record, is_usable=is_usable, helps=False)
            return
        if is_amended and is_usable:  # a remedy has helped
            for one in self._struck.pop(setting.key, ()):
                self._untried.put_back(one)
        speed = None if loss is None else self._log_speed(loss)
        if is_amended or not is_usable or self._is_best(loss) or record.get("graph_break_reasons"):
            helps = is_usable and (speed is None or speed >= self._speeds.get(place, -math.inf))
            self._remedies.tell(setting, record, is_usable=is_usable, helps=helps)
        works = is_usable or record["status"] == Status.STOPPED
        self._tried[place] = works or (is_amended and place in self._speeds)
        if works and speed is not None:
            self._speeds[place] = max(speed, self._speeds.get(place, -math.inf)) if is_amended else speed
        wall_s = max(later_wall_s(figure(record, "wall_s") or 0.0, record.get("phases_s") or {}), 1e-3)
        self._took[place] = _Took(figure(record, "compile_s"), wall_s, record.get("compile_phases_s") or {})

    def _strike_alike(self, tried: CompileSettings, record: Record) -> None:
        """No longer proposes what would fail like a setting that failed."""
        if fields := fails_alike(tried, record.get("label"), record.get("reason") or "", self._classes):
            self._struck[tried.key] = self._strike(
                lambda setting: all(getattr(setting, name) == getattr(tried, name) for name in fields)
            )

    def _strike(self, is_useless: Callable[[CompileSettings], bool]) -> list[int]:
        """No longer proposes some settings; returns the indices of those that it might have proposed."""
        struck = [int(place) for place in self._untried.indices() if is_useless(self._candidates.settings[place])]
        for place in struck:
            self._untried.take(place)
        return struck

    def _learn(self, model: Mapping[str, Any]) -> None:
        """Takes facts about a script, and no longer proposes settings with a lever that it has no use for."""
        layout, self._classes = model.get("memory_format"), model.get("classes", [])
        self._facts = replace(
            with_model(self._facts, model),
            memory_format=MemoryFormat(layout) if layout in list(MemoryFormat) else None,
            has_blocks=model.get("has_blocks") is not False,
            has_attention=model.get("has_attention") is not False,
            has_optimizer=model.get("has_optimizer") is not False,
            has_fused=model.get("has_fused") is not False,
            can_compile_optimizer=model.get("can_compile_optimizer") is not False,
            is_fused=model.get("is_fused") is True,
            loops_over_weights=model.get("loops_over_weights") is True,
            has_loss_outside=model.get("has_loss_outside") is not False,
            can_compile=model.get("can_compile") is not False,
            recomputes=model.get("recomputes") is not False,
            makes_cache=model.get("makes_cache") is not False,
            float32_experts=model.get("float32_experts") is not False,
            can_pad=model.get("can_pad") is not False,
            batches_change=model.get("batches_change") is not False,
            shapes_recur=model.get("shapes_recur") is not False,
            us_per_operator=figure(model, "us_per_operator") or self._facts.us_per_operator,
            num_shapes=int(figure(model, "num_shapes") or 1),
            autocasts=model.get("autocasts") is True,
        )
        self._allow_kinds()
        self._guessed_s = self._guesses()
        if beliefs := beliefs_about(self._facts):
            self.model.expect(self._prior.with_beliefs(beliefs))
        self._strike(lambda setting: is_pointless(setting, self._facts))

    def _allow_kinds(self) -> None:
        """Raises the limit of graphs where blocks of one class differ in more ways than it allows."""
        if (self._facts.kinds_of_blocks or 0) > RECOMPILE_LIMIT:
            self._remedies.give(HIGHER_LIMIT, {Scope.REGIONAL})

    def _guesses(self) -> Floats:
        """Returns each candidate's compile seconds as far as they are known before anything has compiled."""
        return np.array([guessed_compile_s(one, self._facts) for one in self._candidates.settings])

    def plan(self, seconds: float) -> list[Step]:
        """Returns the first settings that would be tried in so many seconds, and marks them as tried."""
        steps: list[Step] = []
        while (step := self.next_step()) is not None and (seconds := seconds - step.seconds) >= 0 and len(steps) < _MOST_PLANNED:
            steps.append(step)
            place = self.place_of(step.setting.key)
            assert place is not None
            expected = self._predicted(np.array([place], dtype=np.intp))[0] if self._speeds else [0.0]
            self._speeds[place] = float(expected[0])
            self._tried[place] = True
        return steps

    def place_of(self, key: str) -> int | None:
        """Returns the index of the candidate that a setting with this key stands for, with or without a remedy; else None."""
        place = self._candidates.index(key)
        return self._candidates.index(self._remedies.key_of_tried(key)) if place is None else place

    def best(self) -> int | None:
        """Returns the index of the best setting so far; None if there is none."""
        return max(self._speeds, key=lambda place: self._speeds[place], default=None)

    def forecast(self, seconds: float) -> float:
        """Returns by what fraction the best setting is expected to improve in `seconds` more; infinite if there is none.

        Draws possible results of all settings that would be tried by then jointly, because gains that depend on one lever do not
        add up.
        """
        best = self.best()
        if best is None:
            return math.inf
        usual = self.model.interplay
        self.model.interplay = self.model.likeliest_interplay(*self._measured())
        is_compiled = any(map(self._is_compiled, self._speeds))
        try:
            gain = self._forecast(self._untried.indices(), self._speeds[best], seconds)
            return float(np.expm1((_KEPT if is_compiled else 1.0) * np.log1p(gain)))
        finally:
            self.model.interplay = usual

    def _forecast(self, asked: Indices, best: float, seconds: float) -> float:
        if not len(asked):
            return 0.0
        needs = self._seconds()[asked]
        gains = self._gains(asked)
        order = np.argsort(-gains / needs)
        tried = asked[order[np.cumsum(needs[order]) <= seconds]][:_DRAWS]
        if not len(tried):
            return 0.0
        mean, covariance = self.model.predict(*self._measured(), tried)
        works = self.model.works(list(self._tried.items()))[tried]
        chance = np.random.default_rng(0)
        draws = chance.multivariate_normal(mean, covariance, size=_DRAWS, method="eigh")
        draws = np.where(chance.random(draws.shape) < works, draws, -np.inf)
        return float(np.median(np.expm1(np.maximum(draws.max(axis=1) - best, 0.0))))

    def _fitting(self) -> Indices:
        """Returns the indices of the untried candidates whose trials would end within the budget."""
        settings = self._candidates.settings
        return np.array([place for place in self._untried.indices() if self._fits(settings[place])], dtype=np.intp)

    def _near_best(self, fitting: Indices) -> Indices:
        """Returns the candidates within one lever of the best settings so far, or captured instead; empty unless they compile."""
        best = self.best()
        if best is None or not self._is_compiled(best):
            return fitting[:0]
        bases = self._bases(best)
        near = [
            place
            for place in fitting
            if min(self._distance(base, place) for base in bases) <= 1 or self._is_captured_like(place, best)
        ]
        return np.array(near, dtype=np.intp)

    def _is_captured_like(self, place: int, best: int) -> bool:
        levers = self.model.levers[place]
        return CAPTURED in levers and (levers.items() - {(CAPTURED, levers[CAPTURED])}) <= self.model.levers[best].items()

    def _won_elsewhere(self, fitting: Indices) -> Indices:
        """While the best is eager, returns the candidates whose levers should all gain: one unknown could fail them all."""
        best = self.best()
        if best is not None and self._is_compiled(best):
            return fitting[:0]
        return np.array([place for place in fitting if self.model.is_promising[place]], dtype=np.intp)

    def _bases(self, best: int) -> list[int]:
        """Returns the index of the best setting, then those of compiled ones that are as good and compiled faster."""
        compile_s = {one: took.compile_s or 0.0 for one, took in self._took.items()}
        as_good = [
            one
            for one, speed in self._speeds.items()
            if speed >= self._speeds[best] - _AS_GOOD
            and self._is_compiled(one)
            and compile_s.get(one, 0.0) < compile_s.get(best, 0.0)
        ]
        return [best, *as_good]

    def _is_compiled(self, place: int) -> bool:
        return self._candidates.settings[place].scope is not Scope.EAGER

    def _distance(self, one: int, other: int) -> int:
        return len(changed(self.model.levers[one], self.model.levers[other]))

    def _baseline(self, asked: Indices) -> int | None:
        """Returns the index of the setting without levers, or of the eager one with the fewest; None if none is eager."""
        eager = [int(place) for place in asked if not self._is_compiled(place)]
        return min(eager, key=lambda place: len(self.model.levers[place]), default=None)

    def _measured(self) -> tuple[Indices, Floats]:
        return np.array(list(self._speeds), dtype=np.intp), np.array(list(self._speeds.values()))

    def _gains(self, asked: Indices) -> Floats:
        """Returns the expected relative improvement over the best so far, accounting for the probability of failure."""
        known, speeds = self._measured()
        if not len(known):  # the baseline has failed, so the expected fastest setting is worth most
            return np.asarray(np.exp(self.model._means[asked]) * self.model.works(list(self._tried.items()))[asked])
        best = float(speeds.max())
        mean, deviation = self._predicted(asked)
        ahead = (mean - best) / deviation
        below, density = (np.array([*map(of, ahead)]) for of in (_NORMAL.cdf, _NORMAL.pdf))
        return np.asarray((deviation * (ahead * below + density)) * self.model.works(list(self._tried.items()))[asked])

    def _predicted(self, asked: Indices) -> tuple[Floats, Floats]:
        known, speeds = self._measured()
        mean = np.concatenate(
            [self.model.predict(known, speeds, part)[0] for part in np.array_split(asked, len(asked) // 64 + 1)]
        )
        return mean, self.model.deviations(known, asked)

    def _seconds(self) -> Floats:
        settings = self._candidates.settings
        compiled = {place: took for place, took in self._took.items() if self._is_compiled(place)}
        pace = compile_pace(
            (without_recording(took.compile_s, took.phases_s), self._guessed_s[place]) for place, took in compiled.items()
        )
        recorded = [(settings[place], took.phases_s) for place, took in compiled.items()]
        kinds = {(one.scope, one.claims_cudagraphs): one for one in settings}
        by_kind = {kind: recording_s(one, recorded) for kind, one in kinds.items()}
        recording = np.array([by_kind[one.scope, one.claims_cudagraphs] for one in settings])
        rest = rest_s((took.compile_s, took.wall_s) for took in self._took.values())
        return np.asarray(rest + pace * self._guessed_s + recording)

    def _ends_in_time(self, seconds: Floats) -> Floats:
        """Returns the probability that trials that are expected to take so long end within the budget."""
        has_compiled = any(map(self._is_compiled, self._took))
        spread = _KNOWN_PACE if has_compiled else _UNKNOWN_PACE
        return np.array([*map(_NORMAL.cdf, np.log(max(self._left_s(), 1e-3) / seconds) / spread)])

    def _is_best(self, loss: float | None) -> bool:
        """Tells whether a setting with this loss is at least as good as all others so far."""
        speed = None if loss is None else self._log_speed(loss)
        return speed is not None and speed >= max(self._speeds.values(), default=speed)

    def _log_speed(self, loss: float) -> float | None:
        """Returns a logarithm that is larger for better settings; None if there is none."""
        value = abs(loss)
        return None if not value > 0 else math.log(value) * (-1.0 if self._aims.objectives[0].goal is Goal.MIN else 1.0)

    def _taken(self, place: int, reason: str) -> Step:
        seconds = float(self._seconds()[place])
        return Step(self._remedies.amended(self._untried.take(place)), reason, seconds)

    def _reason(self, place: int) -> str:
        best = self.best()
        base = None if best is None else min(self._bases(best), key=lambda base: self._distance(base, place))
        mine = self.model.levers[place]
        before: Mapping[str, str] = {} if base is None else self.model.levers[base]
        names = changed(before, mine)
        added = [Lever(name, mine[name]) for name in names if name in mine]
        words = [self._worth(lever, mine) for lever in added] + [
            f"without {_shown(Lever(name, before[name]))}" for name in names if name not in mine
        ]
        if len(names) > 1:
            return f"several levers at once: {', '.join(words)}"
        anchor = "what runs today" if not before else "the best so far" if base == best else "a setting as good"
        return f"{anchor} {'and' if added else 'but'} {', '.join(words)}"

    def _worth(self, lever: Lever, levers: Mapping[str, str]) -> str:
        expected = self.model.expected(lever, levers)
        if not expected.num_workloads:
            return _shown(kind_of(lever))
        others = f"{expected.num_workloads} other{'' if expected.num_workloads == 1 else 's'}"
        return f"{_shown(kind_of(lever))} (×{math.exp(expected.log_gain):.2f} on {others})"


def _shown(lever: Lever) -> str:
    return "eager CUDA graphs" if lever.name == CAPTURED else str(lever).removeprefix("compiled_")  # as people write it


def _usual(every: Sequence[Mapping[str, str]]) -> set[tuple[str, str]]:
    """Returns the levers that compiled settings pull anyway: all of them, or, of levers on lengths, most of them."""
    pulled = Counter(chain.from_iterable(levers.items() for levers in every if "scope" in levers))
    compiled = sum("scope" in levers for levers in every)
    return {
        (name, value)
        for (name, value), number in pulled.items()
        if name != "scope" and (number == compiled or (name in LENGTHS and 2 * number > compiled))
    }


def _expected(prior: Prior, lever: Lever, compiled: bool) -> Expectation:
    """Returns what a lever is expected to be worth, taken from the other kind of settings if none of this kind had it."""
    found = prior.of(lever, compiled=compiled)
    found = found if found.num_workloads else prior.of(lever, compiled=not compiled)
    # These gain by their tokens instead.
    return found._replace(log_gain=0.0, num_workloads=0) if lever.name in _OF_LENGTHS else found
