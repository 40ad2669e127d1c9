"""How long a trial will probably take, for plans and budgets; never used as a result."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from compile_sweep.schema.choices import COMPILED_OPTIMIZERS
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord
from compile_sweep.schema.settings import CompileSettings, Dynamic, Scope

_OVERHEAD_S = 20.0
"""Worker start, model, steady state and check, before any trial has shown what they take."""

_PER_GRAPH_S = defaultdict(lambda: 60.0, {Scope.EAGER: 0.0})
"""Cold compile of one graph of the captioning model, `base` on an H200 (docs/results.md); `tiny` on two CPU cores is near."""

_USUAL_REGIONAL_SHARE = 1 / 3
"""Of a full graph's compile that scope=regional takes, where the model does not tell (`WorkloadFacts.regional_share`)."""

_AUTOTUNE_FACTOR = 4.0
"""max-autotune against default: 53.2 s against 8.8 s for a regional compile (docs/log.md), less on the whole of a model."""

_ALL_SYMBOLIC_FACTOR = 2.0
"""dynamic=true against one length: 160 s against 73 s for the whole of captioning's model (docs/results/h200-captioning)."""

_OPTIMIZER_S = 40.0
"""A compiled optimizer, one graph over all parameters: on an H200 64 s more than a fused one (docs/results/h200-captioning)."""

_LEAST_COMPILE_S = 1.0
"""Of anything, eager too: libraries load and choose kernels at a length's first steps."""

_LEAST_PACE = 0.1
"""What one trial may tell of a machine's pace at most: ten times as fast as guessed, or ten times as slow."""

_WARM_SHARE = 0.2
"""Of a cold compile that a start from artifacts takes: 8 % for a full graph, 18 % for regions (docs/results.md)."""


def expected_s(
    settings: CompileSettings,
    max_length: int,
    done: Sequence[TrialRecord],
    *,
    min_length: int = 1,
    regional_share: float | None = None,
    cold: bool = False,
) -> float:
    """Expected seconds of a trial: the median of like trials in this folder if there are any, otherwise a prior.

    Args:
        settings: what will be measured.
        max_length: of the workload, in tokens.
        done: records of the same sweep.
        min_length: of the workload, in tokens.
        regional_share: of the model, as in `WorkloadFacts`; None if that is not known.
        cold: it will begin with empty caches, so that what like trials restored takes its time to compile.
    """
    graphs = settings.num_graphs(max_length, min_length)
    like = [
        record.wall_s + (_not_compiled_s(record) if cold else 0.0)
        for record in done
        if record.status is Status.OK
        and (other := _parsed(record.settings_key)).scope is settings.scope
        and (other.mode, other.tunes) == (settings.mode, settings.tunes)
        and other.num_graphs(max_length, min_length) == graphs
        and (other.optimizer in COMPILED_OPTIMIZERS) == (settings.optimizer in COMPILED_OPTIMIZERS)
    ]
    if like:
        return statistics.median(like)
    size = (max_length, min_length, regional_share)
    compiling = guessed_compile_s(settings, *size)
    return rest_s((record.compile_s, record.wall_s) for record in done) + compiling * _pace(done, *size)


_parsed = lru_cache(maxsize=4096)(CompileSettings.parse)
"""Settings by their keys; a search asks for hundreds of settings what each of a sweep's records says."""


def _pace(done: Sequence[TrialRecord], max_length: int, min_length: int, regional_share: float | None) -> float:
    """By how much compiling took longer here than guessed."""
    compiled = [(_parsed(record.settings_key), record) for record in done if record.caches is Caches.COLD]
    return compile_pace(
        (record.compile_s, guessed_compile_s(setting, max_length, min_length, regional_share))
        for setting, record in compiled
        if setting.scope is not Scope.EAGER and record.status is Status.OK
    )


def compile_pace(done: Iterable[tuple[float | None, float]]) -> float:
    """Returns how many times as long as guessed compiling takes on this machine and model; 1 before anything was compiled.

    Args:
        done: of each trial that compiled, the seconds it took and those that were guessed.
    """
    ratios = [compile_s / guessed_s for compile_s, guessed_s in done if compile_s is not None and compile_s > 0]
    return min(max(statistics.median(ratios), _LEAST_PACE), 1 / _LEAST_PACE) if ratios else 1.0


def _not_compiled_s(record: TrialRecord) -> float:
    """Seconds of compiling that a warm trial was spared; 0 for a cold one."""
    return max(0.0, (record.cold_equivalent_s or 0.0) - (record.compile_s or 0.0)) if record.caches is Caches.WARM else 0.0


def guessed_compile_s(
    settings: CompileSettings, max_length: int, min_length: int = 1, regional_share: float | None = None
) -> float:
    """Seconds that compiling takes, before any trial has shown it; good to a factor of two or three.

    Args:
        settings: what will be compiled.
        max_length: of the workload, in tokens.
        min_length: of the workload, in tokens.
        regional_share: of the model, as in `WorkloadFacts`; None if that is not known.
    """
    of_one = _PER_GRAPH_S[settings.scope] * (_AUTOTUNE_FACTOR if settings.tunes else 1.0)
    if settings.scope is Scope.REGIONAL:
        of_one *= _USUAL_REGIONAL_SHARE if regional_share is None else regional_share
    of_one *= _ALL_SYMBOLIC_FACTOR if settings.dynamic is Dynamic.TRUE else 1.0
    of_optimizer = _OPTIMIZER_S if settings.optimizer in COMPILED_OPTIMIZERS else 0.0
    # Graphs of one code share kernels, and what the compiler knows by then: three buckets took 24.0 s where one length took
    # 11.5 (docs/results.md).
    return _LEAST_COMPILE_S + of_one * math.sqrt(settings.num_graphs(max_length, min_length)) + of_optimizer


def rest_s(done: Iterable[tuple[float | None, float]]) -> float:
    """Seconds of a trial in which nothing compiles: the median of those that compiled to the end, or what is usual.

    Args:
        done: compile and wall seconds of trials.
    """
    rests = [wall_s - compile_s for compile_s, wall_s in done if compile_s is not None and wall_s > compile_s]
    return statistics.median(rests) if rests else _OVERHEAD_S


def expected_warm_start_s(settings: CompileSettings, done: Sequence[TrialRecord]) -> float:
    """Expected seconds of a start from artifacts.

    Args:
        settings: what will be started.
        done: records of the same sweep, this setting's among them.
    """
    compiling = [record.compile_s for record in done if record.settings_key == settings.key and record.compile_s is not None]
    return _OVERHEAD_S + _WARM_SHARE * max(compiling, default=guessed_compile_s(settings, 1))
