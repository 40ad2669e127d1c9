"""The columns of `analysis.load`: the one place that says what each is called, its unit and its dtype."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import CompileSettings


class Column(NamedTuple):
    """One column: how pandas holds it, and what it means."""

    dtype: str | ExtensionDtype
    meaning: str


class CompilePhase(NamedTuple):
    """A part of the compile time."""

    column: str
    title: str
    meaning: str


COMPILE_PHASES: Mapping[str, CompilePhase] = MappingProxyType(
    {
        "dynamo": CompilePhase("compile_dynamo_s", "Dynamo", "tracing bytecode, building and checking guards"),
        "aot_autograd": CompilePhase("compile_aot_autograd_s", "AOTAutograd", "tracing forward and backward, splitting them"),
        "inductor": CompilePhase("compile_inductor_s", "Inductor", "graph passes, lowering, scheduling, writing code"),
        "autotuning": CompilePhase("compile_autotuning_s", "autotuning", "running candidate kernels to choose among them"),
        "kernel_compilation": CompilePhase("compile_kernels_s", "kernel compilation", "compiling kernels, or waiting for it"),
        "cudagraph_capture": CompilePhase("compile_cudagraphs_s", "CUDA-graph capture", "warming up and capturing graphs"),
        "other": CompilePhase("compile_other_s", "other", "what torch times as none of these, such as loading libraries"),
    }
)
"""Phase, as a record's `compile_phases_s` names it → what it is here; in the order in which they first happen."""

TIMESTAMP = pd.DatetimeTZDtype("us", "UTC")

_DTYPES = {bool: "boolean", int: "Int64", float: "Float64", str: "string"}


def _choices(kind: type[StrEnum]) -> pd.CategoricalDtype:
    return pd.CategoricalDtype([str(member) for member in kind])


def _dtype(kind: Any) -> str | ExtensionDtype:
    """How pandas holds values of this type or None; a list or a mapping is held as it is."""
    kinds = [one for one in (get_args(kind) if isinstance(kind, UnionType) else (kind,)) if one is not NoneType]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], StrEnum):
        return _choices(kinds[0])
    return _DTYPES.get(kinds[0], "object") if len(kinds) == 1 else "object"


def _settings_columns() -> dict[str, Column]:
    """A column for each field of `CompileSettings`, whose type and docstring say all there is to say of it."""
    kinds = get_type_hints(CompileSettings)
    body = ast.parse(textwrap.dedent(inspect.getsource(CompileSettings))).body[0]
    meanings = {
        field.target.id: " ".join(str(words.value.value).split())
        for field, words in pairwise(ast.iter_child_nodes(body))
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(words, ast.Expr)
        and isinstance(words.value, ast.Constant)
    }
    return {settings_column(f.name): Column(_dtype(kinds[f.name]), meanings.get(f.name, "")) for f in fields(CompileSettings)}


def settings_column(name: str) -> str:
    """The column of a field of `CompileSettings`: its name, unless a record has a field of that name."""
    return "workload_options" if name == "workload" else name


def _phase_columns() -> dict[str, Column]:
    return {
        phase.column: Column("Float64", f"cold: seconds of compile_s spent on {phase.meaning}; NA for a warm trial")
        for phase in COMPILE_PHASES.values()
    }


WARM_START = ("warm_start_s", "restore_s", "load_s", "first_step_s", "warmup_s")
"""Figures of a setting's latest warm start that stand in its row."""


def warm_start_column(name: str) -> str:
    """The column of a field of `WarmStart`."""
    return name if name.startswith("warm_start_") else f"warm_start_{name}"


def _warm_start_columns() -> dict[str, Column]:
    meanings = {
        "warm_start_s": "seconds from importing torch to compiling no more, in a fresh process with the setting's own artifacts",
        "restore_s": "of that, fetching the artifacts and putting them in place",
        "load_s": "of that, building the model and its optimizer and applying the settings",
        "first_step_s": "of that, the first step",
        "warmup_s": "of that, the whole warm-up, the first step included",
    }
    return {warm_start_column(name): Column("Float64", f"{meanings[name]}; NA if none was made") for name in WARM_START}


COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "trial_id": Column("string", "unique in the sweep; also the folder's name under logs/"),
        "attempt": Column("Int64", "1 for the first record of this measurement, 2 for the next, …"),
        "settings_key": Column("string", "CompileSettings.key: the canonical text"),
        "settings_label": Column("string", "CompileSettings.label: the same without what is usual"),
        **_settings_columns(),
        "source": Column("string", "the settings as Python to paste, as executed; empty if it was not built"),
        "status": Column(_choices(Status), "ok, infeasible, failed or stopped"),
        "label": Column("string", "why it is not ok, as one word; NA if ok"),
        "reason": Column("string", "why it is not ok, as a sentence; NA if ok"),
        "phase": Column("string", "the last phase reached"),
        "bounds": Column("object", "dict: of a trial that was stopped early, the best its figures could have become"),
        "caches": Column(_choices(Caches), "the compile caches the trial began with"),
        "precompile": Column("boolean", "what Dynamo traced was kept, or restored, too: it checks fewer guards then"),
        "workload": Column("string", "the workload's name"),
        "size": Column("string", "the workload's size"),
        "device": Column("string", "the accelerator's or processor's name"),
        "num_workers": Column("Int64", "processes that trained together"),
        "environment_key": Column("string", "digest of what makes figures comparable"),
        "started_at": Column(TIMESTAMP, "when the attempt began; NaT if it is not written"),
        "wall_s": Column("Float64", "seconds the attempt took, worker start included"),
        "phases_s": Column("object", "dict: seconds of wall_s in each phase reached; empty in older records"),
        "waited_s": Column("Float64", "seconds it waited for a host of the cluster"),
        "tries": Column("Int64", "this attempt and those before it that faults of the machines, or --precompile, may have ended"),
        "retry_reasons": Column("object", "list of str: why each of those before ended"),
        "retried_s": Column("Float64", "seconds those before took, and the pauses between"),
        "compile_s": Column("Float64", "cold: warm-up seconds less what its steps take once warm; NA for a warm trial"),
        **_phase_columns(),
        "first_step_s": Column("Float64", "cold: seconds of the first step; NA for a warm trial"),
        "warmup_s": Column("Float64", "cold: seconds of the whole warm-up; NA for a warm trial"),
        "warm_compile_s": Column("Float64", "as compile_s, of a trial that began with restored caches; NA for a cold one"),
        "warm_first_step_s": Column("Float64", "as first_step_s, warm; NA for a cold trial"),
        "warm_warmup_s": Column("Float64", "as warmup_s, warm; NA for a cold trial"),
        "cold_equivalent_s": Column("Float64", "warm: estimate of compile_s: warm_compile_s and cache_saved_s; NA if cold"),
        "cache_saved_s": Column("Float64", "warm: what the artifacts hit took to compile, less loading them; NA if cold"),
        "restore_s": Column("Float64", "seconds to fetch artifacts and put them in place; NA if there was no try"),
        "cache_restored": Column("Int64", "artifacts put in place; NA if there was no try"),
        "cache_restored_bytes": Column("Int64", "their size"),
        "cache_refused": Column("Int64", "artifacts and manifests that were not what they should be, and were not used"),
        "cache_faults": Column("object", "list of str: why nothing could be restored or published"),
        "cache_hits": Column("Int64", "look-ups of the compiler in its caches that found something; NA for eager"),
        "cache_misses": Column("Int64", "those that did not; NA for eager"),
        "publish_s": Column("Float64", "seconds to gather and publish artifacts; NA if none were"),
        "cache_made": Column("Int64", "artifacts published; NA if nothing was"),
        "cache_made_bytes": Column("Int64", "their size"),
        "cache_new_bytes": Column("Int64", "of these, what the store did not hold already"),
        **_warm_start_columns(),
        "compile_s_by_rank": Column("object", "list of float: compile time of each worker, cold or warm"),
        "warmup_steps": Column("Int64", "steps of the warm-up"),
        "cores": Column("Int64", "processor cores worker 0 was bound to"),
        "gpus": Column("object", "list of str: GPUs its workers were on, each as host:index"),
        "cpu_pressure": Column("Float64", "share of the warm-up in which runnable threads waited for a core; 0 is never"),
        "contended": Column("boolean", "other trials held up the warm-up: compile times are too long"),
        "gpu_neighbours": Column("object", "list of str: processes of others on its GPU"),
        "steady_steps": Column("Int64", "steps timed after the warm-up"),
        "stable": Column("boolean", "step_ms_median's interval became narrow enough, 1 % on a GPU and 10 % on a CPU"),
        "outliers": Column("Int64", "timed steps over 1.5 times their batch's median; kept in every figure"),
        "step_ms_median": Column("Float64", "mean over the pool's batches of the median step of their length, milliseconds"),
        "step_ms_median_low": Column("Float64", "lower end of its 95 % interval, milliseconds"),
        "step_ms_median_high": Column("Float64", "upper end of its 95 % interval, milliseconds"),
        "samples_per_s": Column("Float64", "samples a second over all workers, steady"),
        "samples_per_s_per_worker": Column("Float64", "the same of one worker; NA in older records"),
        "samples_per_s_low": Column("Float64", "lower end of its 95 % interval"),
        "samples_per_s_high": Column("Float64", "upper end of its 95 % interval"),
        "speedup_eager": Column(
            "Float64",
            "eager's over this setting's step time on the same padded batches, in blocks taken in turn: clock drift cancels, and "
            "any padding has an eager peer, explicit buckets included; NA where memory or settings allowed no eager reference",
        ),
        "speedup_eager_low": Column("Float64", "lower end of its 95 % interval"),
        "speedup_eager_high": Column("Float64", "upper end of its 95 % interval"),
        "clock_drift": Column("Float64", "slowest over fastest block of that eager reference, less 1; NA without one"),
        "tokens_per_s": Column("Float64", "useful tokens a second over all workers, padding not counted"),
        "mean_length": Column("Float64", "mean padded length of the timed batches, tokens"),
        "pipeline": Column(
            "string", "what throughput was timed with; resident: batches ready on the device; real: the workload's loader"
        ),
        "data_wait_share": Column("Float64", "share of a pass spent waiting for data, 0 to 1; NA if resident"),
        "peak_memory_bytes": Column(
            "Int64", "most memory allocated on a worker's device, the worst of them; on CPU the largest resident set"
        ),
        "peak_memory_bytes_by_rank": Column("object", "list of int: the same of each worker"),
        "peak_reserved_bytes": Column("Int64", "most memory torch's allocator held there; NA on CPU"),
        "compile_peak_memory_bytes": Column("Int64", "most memory allocated during the warm-up; NA on CPU"),
        "cudagraph_pool_bytes": Column("Int64", "memory held by the pool of CUDA graphs; NA on CPU"),
        "numerics_status": Column("string", "ok, nan, diverges, eager_unstable; NA if it was not checked"),
        "numerics_worst": Column("string", "which gap comes nearest to its tolerance, or exceeds it most, in words"),
        "numerics_worst_ratio": Column("Float64", "that gap over its tolerance: above 1 is out; NA if a gap is not finite"),
        "numerics": Column("object", "dict: the gaps and tolerances behind these"),
        "graphs": Column("Int64", "graphs compiled"),
        "graph_breaks": Column("Int64", "graph breaks"),
        "graph_break_reasons": Column("object", "list of str"),
        "recompiles": Column("Int64", "recompiles"),
        "recompile_reasons": Column("object", "list of str"),
        "recompile_limit_hits": Column("object", "list of str: functions that run eagerly since"),
        "fallbacks": Column("object", "list of str: what silently ran eagerly"),
        "cudagraph_skips": Column("Int64", "graphs for which CUDA graphs were asked for and not used"),
        "cudagraph_skip_reasons": Column("object", "list of str"),
        "findings": Column("object", "list of str: what was found in a script, what limits it first"),
        "perf_hints": Column("object", "list of str: what torch says could be faster"),
        "step_ms": Column("object", "list of float: every timed step of worker 0, milliseconds"),
        "eager_step_ms": Column("object", "list of float: the eager reference's steps between them, milliseconds"),
    }
)
"""Every column `load` returns, in order. Cold and warm times have columns of their own: no figure mixes them.

Settings mean what `CompileSettings` says of them, where None is NA here. Columns of dtype object hold lists and mappings as
they are.
"""
