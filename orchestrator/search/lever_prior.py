"""What each lever gained in recorded sweeps: the prior that a search begins with.

`python -m benchmarks.levers.lever_prior` writes `prior.json` from the committed sweeps. Each entry says what one lever was worth
on one workload: the median, over pairs of settings that differ in nothing else, of the logarithm of the ratio of their speeds.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import NamedTuple, Self

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.errors import ConfigError
from orchestrator.search.levers import Lever, kind_of

PRIOR_FILE = "prior.json"
SCHEMA_VERSION = 1

_USUAL_SPREAD = 0.12
"""Standard deviation of the logarithm of a lever's gain, if no sweep has shown it: two in three gain or lose less than 12%."""

_OPTION_SPREAD = 0.4
"""Standard deviation for a workload's own options, which may change anything, such as the batch size."""

BELIEFS: Mapping[str, tuple[float, float]] = {
    "scope=full": (0.2, 0.3),
    "scope=regional": (0.1, 0.3),
    "scope=modular": (0.1, 0.3),
    "cudagraphs=on": (0.1, 0.4),
    "captured_cudagraphs=on": (0.2, 0.35),  # five scripts trained 0.63 to 1.97 times as fast on H200s (docs/results.md)
    "memory_format=channels_last": (0.15, 0.2),
    "memory_format=channels_last_3d": (0.15, 0.2),
    "matmul_precision=high": (0.05, 0.2),
    "compile_loss=on": (0.1, 0.1),
    "optimizer=fused": (0.03, 0.05),
    "compiled_optimizer=compiled": (0.0, 0.05),
    "activation_checkpointing=off": (0.2, 0.1),  # a forward less of three or four passes as long as one
    "use_cache=off": (0.2, 0.2),  # proposed where a cache is made: copies for each layer, and code that Dynamo cannot trace
    "autocast_experts=on": (0.4, 0.2),  # a Mixtral trained 1.54 times as fast eagerly on an H200 (docs/log.md)
    "pad_to_multiple_of=64": (0.4, 0.25),  # sweeps of a BERT and a T5 ended 1.4 and 4.2 times as fast with it (docs/results.md)
    "attention=unmasked": (0.05, 0.15),
    "sdpa_kernel=efficient": (-0.05, 0.08),
    "max_autotune=on": (0.0, 0.06),
}
"""Expert estimates of levers' gains, as `log_gain` and `spread`. They are written by hand and count as one more workload, so that
they decide only where no sweep has shown the lever. Other levers are expected to gain nothing.
"""

WHERE_SHAPES_CHANGE: Mapping[str, tuple[float, float]] = {"sdpa_kernel=efficient": (0.3, 0.3), "sdpa_kernel=cudnn": (-0.3, 0.3)}
"""The same where a script's batches change in shape and its model has attention; recorded sweeps, whose shapes are few, do not
count. cuDNN plans its kernels anew for each shape: without it, steps took 0.10 instead of 0.24 s on average on a B200
(https://github.com/modelscope/FunASR/issues/3704).
"""

WHERE_OPTIMIZER_LOOPS: Mapping[str, tuple[float, float]] = {"compiled_optimizer=compiled": (0.25, 0.15)}
"""The same where one of a script's optimizers updates weight after weight: with Muon's step compiled, a GPT trained 1.32 times as
fast on an H200 (docs/results.md).
"""

WHERE_LAUNCHES_LIMIT: Mapping[str, tuple[float, float]] = {"captured_cudagraphs=on": (0.5, 0.4)}
"""The same where a script's step spends less than `LAUNCH_US` on each operator, which is hardly more than launching its kernels
takes. On H200s a CycleGAN, a MoCo, a DETR and a GRU in a loop, at 80 to 190 µs, trained 1.5, 1.7, 2.4 and 3.8 times as fast.
"""

LAUNCH_US = 200.0
"""Microseconds of a step for each operator of the forward, with its backward pass and all else that a step does."""

WHERE_PADDED: Mapping[str, float] = {"sdpa_kernel=efficient": -0.1, "sdpa_kernel=cudnn": 0.0, "dynamic=mark": -0.05}
"""`log_gain` where a script's texts are padded to multiples of 64, so that few shapes remain: kernels are planned once for each,
and code that `dynamic=auto` compiles for the first shape fits most batches. On an H200 a BERT trained 1,416 samples/s, 1,274 with
`sdpa_kernel=efficient` and with `dynamic=mark` beside it 1,180 (docs/results.md).
"""


def beliefs_about(facts: WorkloadFacts) -> dict[str, tuple[float, float]]:
    """Returns what levers are expected to be worth to a script with these facts, as `log_gain` and `spread`."""
    shapes_change = facts.batches_change and facts.has_attention
    launches_limit = (facts.us_per_operator or math.inf) < LAUNCH_US
    return {
        **(WHERE_SHAPES_CHANGE if shapes_change else {}),
        **(WHERE_OPTIMIZER_LOOPS if facts.loops_over_weights else {}),
        **(WHERE_LAUNCHES_LIMIT if launches_limit else {}),
    }


_WORTH_ELSEWHERE = 0.5  # weight of a workload on another kind of device
_FAILS = 0.1  # fraction of settings that fail, before any results


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverGain:
    """What one lever was worth on one workload in one size."""

    lever: str
    compiled: bool
    """Whether the compared settings were compiled before the lever was pulled."""
    workload: str
    size: str
    device: str
    """Device type: cuda or cpu."""
    log_gain: float
    """Median over the pairs of the logarithm of speed with the lever over speed without; 0.1 is 10.5% more samples per second.
    """
    pairs: int
    """Number of measured pairs; 0 if the lever always failed, in which case `log_gain` is 0."""
    failed: int
    """Number of pairs in which only the setting with the lever failed."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if type(getattr(self, one.name)) is not one.type:
                raise TypeError(f"{one.name} is {getattr(self, one.name)!r}")
        if not math.isfinite(self.log_gain) or self.pairs < 0 or self.failed < 0 or self.pairs + self.failed == 0:
            raise ValueError(f"{self.lever} of {self.workload} holds no gain")
        if not all(self.lever.partition("=")) or self.device not in ("cuda", "cpu"):
            raise ValueError(f"{self.lever} on {self.device} is no lever")


class Expectation(NamedTuple):
    """What a lever is expected to be worth before it is tried."""

    log_gain: float
    spread: float  # standard deviation of `log_gain` from one workload to another
    works: float  # probability that a setting with the lever works
    num_workloads: int  # number of workloads that it was tried on


class Prior:
    """What levers gained on some workloads."""

    def __init__(
        self,
        gains: Iterable[LeverGain] = (),
        device: str | None = None,
        beliefs: Mapping[str, tuple[float, float]] = BELIEFS,
    ) -> None:
        self._device, self._beliefs = device, beliefs
        self._gains: dict[tuple[str, bool], list[LeverGain]] = defaultdict(list)
        for gain in gains:
            self._gains[gain.lever, gain.compiled].append(gain)

    def elsewhere(self, workload: str, *, has_gpu: bool) -> Self:
        """Returns the entries of workloads in other families."""
        every = [gain for gains in self._gains.values() for gain in gains if family(gain.workload) != family(workload)]
        return type(self)(every, "cuda" if has_gpu else "cpu", self._beliefs)

    def with_beliefs(self, beliefs: Mapping[str, tuple[float, float]]) -> Self:
        """Returns a prior in which levers are expected to be worth this in place of what they were elsewhere."""
        every = [gain for gains in self._gains.values() for gain in gains if gain.lever not in beliefs]
        return type(self)(every, self._device, {**self._beliefs, **beliefs})

    def of(self, lever: Lever, *, compiled: bool) -> Expectation:
        """Returns what a lever is expected to be worth."""
        name = str(kind_of(lever))
        found = self._gains.get((name, compiled)) or []
        tried = sum(gain.pairs + gain.failed for gain in found)
        works = 1 - (sum(gain.failed for gain in found) + 5 * _FAILS) / (tried + 5)
        groups = _by_family([gain for gain in found if gain.pairs])
        weights = [1.0 if self._device in (None, gains[0].device) else _WORTH_ELSEWHERE for gains in groups]
        unknown = _OPTION_SPREAD if lever.name.startswith("workload.") else _USUAL_SPREAD
        believed, spread = self._beliefs.get(name, (0.0, unknown))
        total = 1 + sum(weights)
        middles = [statistics.fmean(gain.log_gain for gain in gains) for gains in groups]
        mean = (believed + _product(weights, middles)) / total
        squares = [statistics.fmean((gain.log_gain - mean) ** 2 for gain in gains) for gains in groups]
        variance = (spread**2 + (believed - mean) ** 2 + _product(weights, squares)) / total
        return Expectation(mean, math.sqrt(variance), works, len({gains[0].workload for gains in groups}))


def family(workload: str) -> str:
    """Returns the name that workloads of one model share: `gpt2` and `gpt2-inference` are of one family."""
    return workload.removesuffix("-inference")


def _by_family(gains: Sequence[LeverGain]) -> list[list[LeverGain]]:
    """Groups gains by model and kind of device; each group counts the same, however many sizes it has."""
    found: dict[tuple[str, str], list[LeverGain]] = defaultdict(list)
    for gain in gains:
        found[family(gain.workload), gain.device].append(gain)
    return list(found.values())


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@cache
def shipped_prior() -> Prior:
    """Returns the prior that comes with the package."""
    return parse_prior(files("orchestrator.search").joinpath(PRIOR_FILE).read_text(encoding="utf-8"))


def parse_prior(text: str) -> Prior:
    """Returns the prior that `benchmarks.levers.lever_prior` wrote as JSON; raises ConfigError for other text."""
    try:
        told = json.loads(text)
        if told["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {told['schema_version']!r} instead of {SCHEMA_VERSION}")
        return Prior([LeverGain(**gain) for gain in told["gains"]])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{PRIOR_FILE} holds no gains of levers ({error}); install compile-sweep again") from None
