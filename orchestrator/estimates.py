"""How long a trial will probably take, for plans and budgets; never used as a result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from orchestrator.records import Status, TrialRecord
from workloads.settings import CompileSettings, Mode, Scope

_OVERHEAD_S = 20.0
"""Worker start, model, steady state and check."""

_PER_GRAPH_S = {Scope.EAGER: 0.0, Scope.REGIONAL: 20.0, Scope.MODULAR: 60.0, Scope.FULL: 60.0}
"""Cold compile of one graph of the captioning model, `base` on an H200 (docs/results.md); `tiny` on two CPU cores is near."""

_AUTOTUNE_FACTOR = 6.0
"""max-autotune without coordinate descent against default: 53.2 s against 8.8 s for a regional compile (docs/log.md)."""


_WARM_SHARE = 0.2
"""Of a cold compile that a start from artifacts takes, at the most: first steps of 66.0 s became 8.6 s (docs/log.md)."""


def expected_s(settings: CompileSettings, max_length: int, done: Sequence[TrialRecord]) -> float:
    """Expected seconds of a trial: the median of like trials in this folder if there are any, otherwise a prior.

    Args:
        settings: what will be measured.
        max_length: of the workload, in tokens.
        done: records of the same sweep.
    """
    graphs = settings.num_graphs(max_length)
    like = [
        record.wall_s
        for record in done
        if record.status is Status.OK
        and (other := CompileSettings.from_dict(record.settings)).scope is settings.scope
        and other.mode is settings.mode
        and other.num_graphs(max_length) == graphs
    ]
    if like:
        return statistics.median(like)
    tuning = settings.mode in (Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)
    return _OVERHEAD_S + graphs * _PER_GRAPH_S[settings.scope] * (_AUTOTUNE_FACTOR if tuning else 1.0)


def expected_warm_start_s(settings: CompileSettings, done: Sequence[TrialRecord]) -> float:
    """Expected seconds of a start from artifacts.

    Args:
        settings: what will be started.
        done: records of the same sweep, this setting's among them.
    """
    compiling = [record.compile_s for record in done if record.settings_key == settings.key and record.compile_s is not None]
    return _OVERHEAD_S + _WARM_SHARE * max(compiling, default=_PER_GRAPH_S[settings.scope])
