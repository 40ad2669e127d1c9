"""Small tables like recorded ones: grids whose figures resemble measurements of the captioning model on an H200.

Eager to regional to full, padded to longest, seconds per graph, tuning's factor, memory and a worker's start are
about as in `docs/results.md`; the seed varies each of them, so that tables differ and no search can be fitted to one.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope
from orchestrator.plan.recipes import grid
from orchestrator.plan.space import Target, choose

MAX_LENGTH = 256
TARGET = Target(max_length=MAX_LENGTH, has_gpu=True)
DEADLINE_S = 480.0

_SPEED = {Scope.EAGER: 1.0, Scope.REGIONAL: 1.65, Scope.FULL: 1.35, Scope.MODULAR: 1.3}
_GRAPH_S = {Scope.EAGER: 0.0, Scope.REGIONAL: 9.0, Scope.FULL: 60.0, Scope.MODULAR: 65.0}
_MEMORY = {Scope.EAGER: 22.4, Scope.REGIONAL: 14.4, Scope.FULL: 18.0, Scope.MODULAR: 18.0}
_PADDING = {Padding.MAX: 1.0, Padding.LONGEST: 1.35, Padding.BUCKETS: 1.32}
_MODE = {None: 1.0, Mode.DEFAULT: 1.0, Mode.REDUCE_OVERHEAD: 1.04, Mode.MAX_AUTOTUNE: 1.06, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS: 1.03}


def settings_of_a_grid(count: int, seed: int = 0) -> list[CompileSettings]:
    """Returns part of the grid for a GPU: eager settings with one optimizer, and others up to the number."""
    everything = choose(grid(TARGET), TARGET).settings
    eager = [s for s in everything if s.scope is Scope.EAGER and s.optimizer is OptimizerKind.FOREACH]
    others = [s for s in everything if s.scope is not Scope.EAGER]
    return [*eager, *random.Random(seed).sample(others, count - len(eager))]


def recorded(settings: list[CompileSettings], seed: int = 0, **origin: Any) -> list[TrialRecord]:
    """Returns a record of each setting."""
    chance = random.Random(f"table {seed}")
    effects: dict[tuple[Any, ...], float] = {}

    def effect(*names: Any, spread: float) -> float:
        return effects.setdefault(names, math.exp(chance.gauss(0, spread)))

    return [_record(number, setting, effect, chance, origin) for number, setting in enumerate(settings, start=1)]


def write_sweep(folder: Path, done: list[TrialRecord]) -> Path:
    """Writes a folder with these records, as a sweep would."""
    folder.mkdir(parents=True)
    for record in done:
        records.append(folder, record)
    return folder


def rows_of(done: list[TrialRecord]) -> dict[str, dict[str, Any]]:
    """Returns records as mappings, by settings key."""
    return {record.settings_key: asdict(record) for record in done}


def _record(number: int, setting: CompileSettings, effect: Any, chance: random.Random, origin: dict[str, Any]) -> TrialRecord:
    scope, mode, dynamic = setting.scope, setting.mode, setting.dynamic
    graphs = setting.num_graphs(MAX_LENGTH)
    rate = 600 * _SPEED[scope] * _PADDING[setting.padding or Padding.MAX] * _MODE[mode]
    rate *= effect(scope, spread=0.1) * effect(dynamic, spread=0.1) * effect(scope, dynamic, spread=0.04)
    rate *= effect(mode, spread=0.04) * effect(setting.optimizer, spread=0.02) * effect(setting.bucket_size, spread=0.02)
    compile_s = (
        _GRAPH_S[scope] * (1 + 0.6 * (graphs - 1)) * (5.0 if setting.tunes else 1.0) * effect("s", scope, dynamic, spread=0.2)
    )
    compile_s += 20.0 * (setting.optimizer is OptimizerKind.COMPILED) + chance.uniform(0.5, 2.0)
    memory = _MEMORY[scope] * effect("gib", scope, mode, spread=0.02) * (1.3 if setting.claims_cudagraphs and graphs > 1 else 1.0)
    wall_s = 60.0 + 1.2 * compile_s
    common: dict[str, Any] = {
        "trial_id": f"{number:03d}",
        "settings": setting.to_dict(),
        "settings_key": setting.key,
        "workload": "captioning",
        "size": "small",
        **origin,
    }
    if compile_s > DEADLINE_S:
        return TrialRecord(**common, status=Status.INFEASIBLE, label="compile-deadline", reason="still compiling", wall_s=510.0)
    if scope is Scope.MODULAR and dynamic is Dynamic.AUTO and setting.claims_cudagraphs:
        return TrialRecord(**common, status=Status.INFEASIBLE, label="out-of-memory", reason="out of memory", wall_s=wall_s)
    return TrialRecord(
        **{"environment_key": "0123456789abcdef", **common},
        status=Status.OK,
        wall_s=wall_s,
        compile_s=compile_s,
        samples_per_s=rate * math.exp(chance.gauss(0, 0.005)),
        peak_memory_bytes=int(memory * 2**30),
        mean_length=float(MAX_LENGTH) if setting.padding is Padding.MAX else 101.3,
    )
