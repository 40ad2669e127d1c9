"""The columns of `analysis.load`: the one place that says what each is called, its unit and its dtype."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from orchestrator.records import Caches, Status
from workloads.settings import Dynamic, Mode, OptimizerKind, Padding, Scope


class Column(NamedTuple):
    """One column: how pandas holds it, and what it means."""

    dtype: str | ExtensionDtype
    meaning: str


def _choices(kind: type[StrEnum]) -> pd.CategoricalDtype:
    return pd.CategoricalDtype([str(member) for member in kind])


TIMESTAMP = pd.DatetimeTZDtype("us", "UTC")

COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "trial_id": Column("string", "unique in the sweep; also the folder's name under logs/"),
        "attempt": Column("Int64", "1 for the first record of this measurement, 2 for the next, …"),
        "settings_key": Column("string", "CompileSettings.key: the canonical text"),
        "settings_label": Column("string", "CompileSettings.label: the same without what is usual"),
        "scope": Column(_choices(Scope), "how much of the step is compiled"),
        "mode": Column(_choices(Mode), "torch.compile's mode; NA for eager"),
        "cudagraphs": Column("boolean", "kernels are replayed as CUDA graphs; NA for eager"),
        "dynamic": Column(_choices(Dynamic), "how changing lengths are met; NA for eager"),
        "padding": Column(_choices(Padding), "to which length a batch is padded"),
        "pad_multiple": Column("Int64", "tokens; NA unless padding is longest"),
        "bucket_size": Column("Int64", "tokens; NA unless dynamic is buckets"),
        "optimizer": Column(_choices(OptimizerKind), "how the optimizer's step runs"),
        "status": Column(_choices(Status), "ok, infeasible or failed"),
        "label": Column("string", "why it is not ok, as one word; NA if ok"),
        "reason": Column("string", "why it is not ok, as a sentence; NA if ok"),
        "phase": Column("string", "the last phase reached"),
        "caches": Column(_choices(Caches), "the compile caches the trial began with"),
        "workload": Column("string", "the workload's name"),
        "size": Column("string", "the workload's size"),
        "device": Column("string", "the accelerator's or processor's name"),
        "num_workers": Column("Int64", "processes that trained together"),
        "environment_key": Column("string", "digest of what makes figures comparable"),
        "started_at": Column(TIMESTAMP, "when the attempt began; NaT if it is not written"),
        "wall_s": Column("Float64", "seconds the attempt took, worker start included"),
        "compile_s": Column("Float64", "cold: warm-up seconds less as many median steps; NA for a warm trial"),
        "first_step_s": Column("Float64", "cold: seconds of the first step; NA for a warm trial"),
        "warmup_s": Column("Float64", "cold: seconds of the whole warm-up; NA for a warm trial"),
        "warm_compile_s": Column("Float64", "as compile_s, of a trial that began with restored caches; NA for a cold one"),
        "warm_first_step_s": Column("Float64", "as first_step_s, warm; NA for a cold trial"),
        "warm_warmup_s": Column("Float64", "as warmup_s, warm; NA for a cold trial"),
        "warmup_steps": Column("Int64", "steps of the warm-up"),
        "steady_steps": Column("Int64", "steps timed after it"),
        "step_ms_median": Column("Float64", "median steady step, milliseconds"),
        "step_ms_median_low": Column("Float64", "lower end of its 95 % interval, milliseconds"),
        "step_ms_median_high": Column("Float64", "upper end of its 95 % interval, milliseconds"),
        "samples_per_s": Column("Float64", "samples a second over all workers, steady"),
        "samples_per_s_low": Column("Float64", "lower end of its 95 % interval"),
        "samples_per_s_high": Column("Float64", "upper end of its 95 % interval"),
        "tokens_per_s": Column("Float64", "useful tokens a second over all workers, padding not counted"),
        "mean_length": Column("Float64", "mean padded length of the timed batches, tokens"),
        "peak_memory_bytes": Column("Int64", "most memory allocated on worker 0's device; on CPU the largest resident set"),
        "numerics_status": Column("string", "ok, nan, diverges, eager-unstable; NA if it was not checked"),
        "numerics": Column("object", "dict: the gaps and tolerances behind numerics_status"),
        "graphs": Column("Int64", "graphs compiled"),
        "graph_breaks": Column("Int64", "graph breaks"),
        "graph_break_reasons": Column("object", "list of str"),
        "recompiles": Column("Int64", "recompiles"),
        "recompile_reasons": Column("object", "list of str"),
        "step_ms": Column("object", "list of float: every timed step of worker 0, milliseconds"),
    }
)
"""Every column `load` returns, in order. Cold and warm times have columns of their own: no figure mixes them."""
