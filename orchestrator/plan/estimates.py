"""Estimates how long a trial will take, for plans and budgets; never used as a result."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.choices import COMPILED_OPTIMIZERS
from compile_sweep.schema.objectives import figure
from compile_sweep.schema.outcome import Phase, Status
from compile_sweep.schema.record import Caches, TrialRecord
from compile_sweep.schema.settings import CompileSettings, Dynamic, Scope

_OVERHEAD_S = 20.0
"""Seconds for worker start, model, steady state and check, before any trial has shown how long they take."""

_GRAPH_S = 40.0
"""Seconds of a cold compile of a whole model for one shape: median of 13 models on H200s and H100s, from 23 (GPT-2) to 82 (a
U-Net), of the sweeps in docs/results.
"""

_GRAPH_BY_WEIGHTS_S = (4.0, 0.8)
"""Seconds of a graph of a model with hardly any weights, and of each parameter tensor, on two CPU cores: 12 and 13 s of
11 and 12 tensors, 19 of 18 and 22 of 21.
"""

_OPERATOR_S = 0.05
"""Seconds of each operator of a graph, where there are so many that they decide: on H200s 0.03 of a Llama and 0.09 of a U-Net. A
loop over the words of a text, as in a plain Mamba, has thousands.
"""

_USUAL_REGIONAL_SHARE = 1 / 3
"""Fraction of a full graph's compile time that scope=regional takes, if the model does not say (`WorkloadFacts.regional_share`).
"""

_AUTOTUNE_FACTOR = 4.0
"""max-autotune relative to default: 53.2 s to 8.8 s for a regional compile (docs/log.md), less for a whole model."""

_SYMBOLIC_FACTOR = 2.0
"""dynamic=true relative to one length: 160 s to 73 s for the whole captioning model (docs/results/h200-captioning). So is
dynamic=mark for a script, all of whose changing dimensions are marked: a whole T5-base took 155 s.
"""

_OPTIMIZER_S = 30.0
"""Seconds of a compiled optimizer, one graph over all parameters: median of eight models there, from 9 to 72 more than a fused
one.
"""

_OPTIMIZER_BY_WEIGHTS_S = (3.0, 0.2)
"""The same as for a graph: 6 s of 21 tensors on two CPU cores."""

_LATER_START_S = 5.0
"""Longest start of a trial that is not a sweep's first: it is forked from a process with torch, in 3 s on an H200."""

_LEAST_COMPILE_S = 1.0
"""Minimum compile time, also of eager: libraries load and choose kernels at a length's first steps."""

_LEAST_PACE = 0.1
"""Limit on what one trial says about a machine's pace: at most ten times faster or slower than estimated."""

_RECORDING = "cudagraph_capture"  # key of `compile_phases_s`

_WARM_SHARE = 0.2
"""Fraction of a cold compile that a start from artifacts takes: 8% for a full graph, 18% for regions (docs/results.md)."""


def expected_s(settings: CompileSettings, facts: WorkloadFacts, done: Sequence[TrialRecord], *, cold: bool = False) -> float:
    """Estimates a trial's seconds: the median of this setting's trials in this folder, or of similar ones, otherwise a prior.

    Args:
        cold: Whether the trial starts with empty caches, so that what similar trials restored has to be compiled.
    """
    measured = [record for record in done if record.status is Status.OK]
    same = [record for record in measured if record.settings_key == settings.key]
    graphs = settings.num_graphs(facts.max_length, facts.min_length)
    like = same or [
        record
        for record in measured
        if (other := _parsed(record.settings_key)).scope is settings.scope
        and (other.mode, other.tunes) == (settings.mode, settings.tunes)
        and other.num_graphs(facts.max_length, facts.min_length) == graphs
        and (other.optimizer in COMPILED_OPTIMIZERS) == (settings.optimizer in COMPILED_OPTIMIZERS)
    ]
    if like:
        return statistics.median(
            later_wall_s(record.wall_s, record.phases_s) + (_not_compiled_s(record) if cold else 0.0) for record in like
        )
    facts = with_model(facts, next((record.model_facts for record in done if record.model_facts), {}))
    compiling = guessed_compile_s(settings, facts) * _pace(done, facts)
    recording = recording_s(settings, ((_parsed(record.settings_key), record.compile_phases_s) for record in done))
    rest = rest_s((record.compile_s, later_wall_s(record.wall_s, record.phases_s)) for record in done)
    return rest + compiling + recording


_parsed = lru_cache(maxsize=4096)(CompileSettings.parse)
"""Settings by key, cached: a search asks for hundreds of settings what each record of a sweep says."""


def _pace(done: Sequence[TrialRecord], facts: WorkloadFacts) -> float:
    """Returns how many times longer than estimated compiling took in this sweep."""
    compiled = [(_parsed(record.settings_key), record) for record in done if record.caches is Caches.COLD]
    return compile_pace(
        (
            without_recording(record.compile_s, record.compile_phases_s),
            guessed_compile_s(setting, facts),
        )
        for setting, record in compiled
        if setting.scope is not Scope.EAGER and record.status is Status.OK
    )


def compile_pace(done: Iterable[tuple[float | None, float]]) -> float:
    """Returns how many times longer compiling takes than estimated, from both seconds of each trial; 1 before any compiled."""
    ratios = [compile_s / guessed_s for compile_s, guessed_s in done if compile_s is not None and compile_s > 0]
    return min(max(statistics.median(ratios), _LEAST_PACE), 1 / _LEAST_PACE) if ratios else 1.0


def without_recording(compile_s: float | None, phases_s: Mapping[str, float]) -> float | None:
    """Returns the part of `compile_s` that did not record CUDA graphs; None if `compile_s` is not known."""
    return None if compile_s is None else compile_s - phases_s.get(_RECORDING, 0.0)


def recording_s(settings: CompileSettings, done: Iterable[tuple[CompileSettings, Mapping[str, float]]]) -> float:
    """Estimates the seconds of recording CUDA graphs: what it took under this scope, or under any if this one was not tried.

    Recording takes time for each length and each region, so it hardly depends on how long the code takes to compile: on an
    H200, 47 to 67 of 71 to 97 s of the captioning model's regions (docs/results.md). Of a whole model it takes less.
    """
    if not settings.claims_cudagraphs:
        return 0.0
    seen = [(other.scope, phases_s[_RECORDING]) for other, phases_s in done if phases_s.get(_RECORDING)]
    alike = [seconds for scope, seconds in seen if scope is settings.scope]
    return statistics.median(alike or [seconds for _, seconds in seen] or [0.0])


def _not_compiled_s(record: TrialRecord) -> float:
    """Returns the compile seconds that a warm trial was spared; 0 for a cold one."""
    return max(0.0, (record.cold_equivalent_s or 0.0) - (record.compile_s or 0.0)) if record.caches is Caches.WARM else 0.0


def guessed_compile_s(settings: CompileSettings, facts: WorkloadFacts) -> float:
    """Estimates compile seconds before any trial has shown them; accurate to a factor of two or three."""
    of_one = max(_by_weights(_GRAPH_S, *_GRAPH_BY_WEIGHTS_S, facts.num_weights), _OPERATOR_S * (facts.num_operators or 0))
    of_one *= settings.scope is not Scope.EAGER
    of_one *= _AUTOTUNE_FACTOR if settings.tunes else 1.0
    if settings.scope is Scope.REGIONAL:
        of_one *= _USUAL_REGIONAL_SHARE if facts.regional_share is None else facts.regional_share
    of_optimizer = 0.0
    if settings.optimizer in COMPILED_OPTIMIZERS:
        of_optimizer = _by_weights(_OPTIMIZER_S, *_OPTIMIZER_BY_WEIGHTS_S, facts.num_weights)
    return _LEAST_COMPILE_S + of_one * _cost_of_graphs(settings, facts) + of_optimizer


def _cost_of_graphs(settings: CompileSettings, facts: WorkloadFacts) -> float:
    """Returns how many times as long as one graph all graphs of a setting take to compile."""
    if settings.dynamic is Dynamic.AUTO and facts.batches_change is False:
        return 1.0
    if facts.batches_change:
        if settings.dynamic is Dynamic.AUTO and settings.pad_to_multiple_of is not None:
            return 1.0  # the first graph, for one shape, fits most batches
        return _SYMBOLIC_FACTOR + (settings.dynamic is Dynamic.AUTO)
    graphs = settings.num_graphs(facts.max_length, facts.min_length)
    symbolic = _SYMBOLIC_FACTOR if settings.dynamic is Dynamic.TRUE else 1.0
    # Graphs of the same code share kernels and the compiler's analysis: three buckets took 24.0 s where one length took 11.5.
    # One for all lengths shares no kernels with that of the first length: the whole captioning model took 458 s with
    # dynamic=auto and 156 s with mark, its regions 21 and 15 s (docs/results.md).
    return symbolic * (graphs if settings.dynamic is Dynamic.AUTO else math.sqrt(graphs))


def _by_weights(most_s: float, few_s: float, each_s: float, num_weights: int | None) -> float:
    return most_s if num_weights is None else min(most_s, few_s + each_s * num_weights)


def with_model(facts: WorkloadFacts, model: Mapping[str, Any]) -> WorkloadFacts:
    """Returns facts with those about compile time that a record's `model_facts` hold, which for a script are not known before."""
    weights, share, changes = figure(model, "num_weights"), figure(model, "regional_share"), model.get("batches_change")
    kinds, operators = figure(model, "kinds_of_blocks"), figure(model, "num_operators")
    return replace(
        facts,
        batches_change=changes if isinstance(changes, bool) else facts.batches_change,
        num_weights=facts.num_weights if weights is None else int(weights),
        num_operators=facts.num_operators if operators is None else int(operators),
        kinds_of_blocks=facts.kinds_of_blocks if kinds is None else int(kinds),
        regional_share=facts.regional_share if share is None else share,
    )


def rest_s(done: Iterable[tuple[float | None, float]]) -> float:
    """Returns the seconds of a trial without compiling: the median of trials that compiled to the end, or a typical value."""
    rests = [wall_s - compile_s for compile_s, wall_s in done if compile_s is not None and wall_s > compile_s]
    return statistics.median(rests) if rests else _OVERHEAD_S


def later_wall_s(wall_s: float, phases_s: Mapping[str, float]) -> float:
    """Returns the part of a trial's seconds that a like one takes later in its sweep, without imports and eager runs."""
    imports_s = max(0.0, phases_s.get(Phase.STARTING, 0.0) - _LATER_START_S)
    return wall_s - imports_s - phases_s.get(Phase.EAGER_RUNS, 0.0)


def expected_warm_start_s(settings: CompileSettings, done: Sequence[TrialRecord]) -> float:
    """Estimates the seconds of a start from artifacts."""
    compiling = [record.compile_s for record in done if record.settings_key == settings.key and record.compile_s is not None]
    return _OVERHEAD_S + _WARM_SHARE * max(compiling, default=guessed_compile_s(settings, WorkloadFacts(max_length=1)))
