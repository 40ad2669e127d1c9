"""What each field of the settings is worth, from matched pairs: settings that differ in that field only.

Changes are in samples per second, milliseconds per step and compile seconds. They exist only where a sweep has such pairs.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.choose.break_even import samples_per_step
from analysis.choose.pareto import expected_compile_s, floats, standing, usable
from analysis.choose.uncertainty import Z95, deviations, noise
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, Padding, Scope

_TOGETHER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mode": ("mode", "cudagraphs"),
        "dynamic": ("dynamic", "padding", "pad_multiple", "bucket_size", "buckets", "dynamic_min", "dynamic_max"),
    }
)
"""Fields that depend on one another and form one choice, under the name of the first."""

PARTS = "parts."  # prefix of a field of one part of the model
_MOST_LOGARITHM = 700.0  # largest logarithm whose exponential fits a float
USUAL = "—"  # value of a field that is not set


class Difference(NamedTuple):
    """A figure's change with its 95% interval."""

    value: float
    low: float
    high: float


class Effect(NamedTuple):
    """The effect of changing one field, everything else being equal."""

    name: str
    before: str
    after: str
    rate: Difference
    """Relative change of throughput: 0.1 is 10% more."""
    step_ms: Difference | None
    """Milliseconds per step; negative is faster. None if no trial says how many samples a step has."""
    compile_s: Difference | None
    """Seconds of cold compiling, estimated for a warm trial; None if no pair has both figures."""
    pairs: int

    @property
    def steps_to_pay(self) -> float | None:
        """Steps after which faster steps make up for longer compiling; None if they never do, or throughput did not grow."""
        if self.step_ms is None or self.compile_s is None or self.step_ms.value >= 0 or self.rate.value <= 0:
            return None
        return max(0.0, self.compile_s.value) / (-self.step_ms.value / 1e3)


def effects(df: pd.DataFrame, *, attempts: pd.DataFrame | None = None) -> list[Effect]:
    """Returns the effects of changing one field where all others are equal, the largest effect on throughput first.

    Several pairs of the same change are averaged; the interval includes each trial's uncertainty and the pairs' disagreement.
    """
    trials = usable(standing(df), "samples_per_s").reset_index(drop=True)
    if trials.empty:
        return []
    figures = _Figures(trials, attempts if attempts is not None else df)
    settings = [_choices(key) for key in trials["settings_key"]]
    peers = trials[["num_workers", "environment_key", "pipeline"]].astype("string").fillna("").agg(" ".join, axis=1)
    found = []
    for field in sorted({name for one in settings for name in one}):
        for (before, after), pairs in _pairs(settings, list(peers), field).items():
            eager = [pair for pair in pairs if all(settings[at]["scope"] == Scope.EAGER for at in pair)]
            compiled = [pair for pair in pairs if pair not in eager] if field == "dynamic" else pairs
            if compiled:
                found.append(figures.effect(field, before, after, compiled))
            if eager and field == "dynamic":  # for eager, lengths only matter through padding
                first, second = (words.partition(", ")[2] for words in (before, after))
                found.append(figures.effect("padding, eager", first, second, eager))
    return sorted(found, key=lambda effect: -abs(math.log1p(effect.rate.value)))


def region_prices(df: pd.DataFrame, *, attempts: pd.DataFrame | None = None) -> list[Effect]:
    """Returns what compiling a part of the model, or its optimizer, costs and gains, from modular records.

    A part is compiled or not (`parts.NAME.compile=off`), or in another mode than the rest. The optimizer is compiled or not.
    """
    modular = df[(df["scope"] == Scope.MODULAR).to_numpy(dtype=bool)]
    return [
        effect for effect in effects(modular, attempts=attempts) if effect.name.startswith(PARTS) or effect.name == "optimizer"
    ]


class _Figures:
    """The trials' figures and their uncertainties, for means over pairs."""

    def __init__(self, trials: pd.DataFrame, attempts: pd.DataFrame) -> None:
        self.rate = floats(trials["samples_per_s"])
        self.rate_off = deviations(trials, "samples_per_s", noise(attempts, "samples_per_s"))
        between = noise(attempts, "compile_s")
        self.compile_s = floats(expected_compile_s(trials))
        self.compile_off = np.hypot(between.floor, between.relative * self.compile_s)
        try:
            samples = samples_per_step(trials.assign(status=str(Status.OK))) * floats(trials["num_workers"])
        except ConfigError:
            samples = np.full(len(trials), np.nan)
        self.step_ms = 1e3 * samples / self.rate
        self.step_off = self.step_ms * self.rate_off

    def effect(self, field: str, before: str, after: str, pairs: Sequence[tuple[int, int]]) -> Effect:
        first, second = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
        logarithm = _mean(np.log(self.rate[second] / self.rate[first]), np.hypot(self.rate_off[first], self.rate_off[second]))
        assert logarithm is not None  # every trial has a rate
        return Effect(
            name=field,
            before=before,
            after=after,
            rate=Difference(*(math.expm1(min(end, _MOST_LOGARITHM)) for end in logarithm)),
            step_ms=_mean(self.step_ms[second] - self.step_ms[first], np.hypot(self.step_off[first], self.step_off[second])),
            compile_s=_mean(
                self.compile_s[second] - self.compile_s[first], np.hypot(self.compile_off[first], self.compile_off[second])
            ),
            pairs=len(pairs),
        )


def _mean(values: npt.NDArray[np.float64], off: npt.NDArray[np.float64]) -> Difference | None:
    """Returns the mean of the known values, with an interval from their own errors and, for several values, their scatter.

    The errors are assumed known. The scatter is estimated from few values, so its part of the interval uses Student's t.
    """
    known = np.isfinite(values)
    values, off = values[known], off[known]
    if not len(values):
        return None
    half = Z95 * float(np.sqrt((off**2).sum())) / len(values)
    if len(values) > 1:
        from scipy.special import stdtrit  # takes a fifth of a second, and is used only here

        half = max(half, float(stdtrit(len(values) - 1, 0.975)) * float(values.std(ddof=1)) / math.sqrt(len(values)))
    mean = float(values.mean())
    return Difference(mean, mean - half, mean + half)


def _choices(key: str) -> dict[str, str]:
    """Returns the setting's fields as text, with fields of one choice combined, and with parts and options separate.

    An eager setting is represented by the compiled setting nearest to it, so that the two differ only in scope.
    """
    settings = CompileSettings.parse(key)
    values = settings.to_dict()
    if settings.scope is Scope.EAGER:
        dynamic = Dynamic.STATIC if settings.padding is Padding.MAX else Dynamic.AUTO
        values |= {"mode": str(Mode.DEFAULT), "cudagraphs": False, "dynamic": str(dynamic)}
    found = {}
    for name in [name for name in values if not any(name in names[1:] for names in _TOGETHER.values())]:
        if name in _TOGETHER:
            found[name] = _together(name, values)
        elif isinstance(values[name], Mapping):
            found |= dict(_inner(name, values[name]))
        else:
            found[name] = USUAL if values[name] is None else str(values[name])
    return found


def _together(name: str, values: Mapping[str, object]) -> str:
    """Returns the text of a choice; leaves out CUDA graphs if the mode implies whether they are used."""
    if name == "mode":
        return USUAL if values["mode"] is None else str(values["mode"])
    said = [str(values["dynamic"]), "" if values["padding"] is None else f"pad to {values['padding']}"]
    lengths = ((inner.replace("_", " "), values[inner]) for inner in _TOGETHER[name][2:])
    said += [f"{words} {'/'.join(map(str, value)) if isinstance(value, list) else value}" for words, value in lengths if value]
    return ", ".join(filter(None, said))


def _inner(name: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for inner, value in values.items():
        if isinstance(value, Mapping):
            words = ", ".join(f"{field}={one}" for field, one in value.items() if field != "compile")
            yield f"{name}.{inner}", words or "eager"
        else:
            yield f"{name}.{inner}", str(value)


def _pairs(
    settings: Sequence[Mapping[str, str]], peers: Sequence[str], field: str
) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Returns, by (before, after), positions of pairs of trials that have these values of the field and are equal otherwise."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, one in enumerate(settings):
        others = frozenset((name, value) for name, value in one.items() if name != field and value != USUAL)
        alike[peers[at], others].append(at)
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for group in alike.values():
        by_value = {settings[at].get(field, USUAL): at for at in group}
        for before in by_value:
            for after in by_value:
                if _order(field, before) < _order(field, after):
                    found[before, after].append((by_value[before], by_value[after]))
    return found


_FROM_PLAIN = ("eager", "default", "foreach", USUAL)  # values that a change is relative to, the plainest first


def _order(field: str, value: str) -> tuple[int, str]:
    if field.startswith(PARTS) and value == USUAL:  # compiled like the rest: more than eager, less than a mode of its own
        return 1, value
    return (_FROM_PLAIN.index(value), value) if value in _FROM_PLAIN else (len(_FROM_PLAIN), value)
