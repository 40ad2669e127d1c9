"""The columns of `analysis.load`: names, dtypes and meanings, derived from what `TrialRecord` declares for each figure."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from compile_sweep.schema.attempt_record import figures
from compile_sweep.schema.figure import Figure, field_docs
from compile_sweep.schema.record import TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings


class Column(NamedTuple):
    """A column's dtype in pandas, and its meaning."""

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
"""By the name in a record's `compile_phases_s`, the phase and its description, in the order in which phases first occur."""

TIMESTAMP = pd.DatetimeTZDtype("us", "UTC")

_DTYPES = {bool: "boolean", int: "Int64", float: "Float64", str: "string"}


def _choices(kind: type[StrEnum]) -> pd.CategoricalDtype:
    return pd.CategoricalDtype([str(member) for member in kind])


def _dtype(kind: Any) -> str | ExtensionDtype:
    """Returns the pandas dtype for values of this type or None; lists and mappings are stored as objects."""
    kinds = [one for one in (get_args(kind) if isinstance(kind, UnionType) else (kind,)) if one is not NoneType]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], StrEnum):
        return _choices(kinds[0])
    return _DTYPES.get(kinds[0], "object") if len(kinds) == 1 else "object"


def _settings_columns() -> dict[str, Column]:
    """Returns a column for each field of `CompileSettings`, from its type and docstring."""
    kinds, meanings = get_type_hints(CompileSettings), field_docs(CompileSettings)
    return {settings_column(f.name): Column(_dtype(kinds[f.name]), meanings.get(f.name, "")) for f in fields(CompileSettings)}


def settings_column(name: str) -> str:
    """Returns the column of a field of `CompileSettings`: its name, unless a record has a field of that name."""
    return "workload_options" if name == "workload" else name


WARM_START = ("warm_start_s", "restore_s", "load_s", "first_step_s", "warmup_s")
"""Figures of a setting's latest warm start that are added to its row."""

COLD_OR_WARM = ("compile_s", "first_step_s", "warmup_s")
"""Figures of the warm-up, which have separate columns for cold and for warm trials."""


def warm_start_column(name: str) -> str:
    """Returns the column of a field of `WarmStart`."""
    return name if name.startswith("warm_start_") else f"warm_start_{name}"


def _columns() -> Iterator[tuple[str, Column]]:
    kinds = get_type_hints(TrialRecord)
    for name, about in figures(TrialRecord).items():
        if name == "settings":
            yield "attempt", Column("Int64", "1 for the first record of this measurement, 2 for the next, …")
            yield "settings_label", Column("string", "`CompileSettings.label`: the key without what is usual")
            yield "setting_id", Column("string", "A1, A2, … in the order in which the sweep's settings were first recorded")
            yield "setting_name", Column("string", "its id, and in a few words how it differs from what is run today")
            yield from _settings_columns().items()
        elif name in COLD_OR_WARM:
            yield name, Column("Float64", f"of a cold trial: {told(about)}; NA for a warm one")
            yield f"warm_{name}", Column("Float64", f"as {name}, of a trial that began with restored caches; NA for a cold one")
        elif name == "compile_phases_s":
            for phase in COMPILE_PHASES.values():
                yield phase.column, Column("Float64", f"of a cold trial: seconds of compile_s spent on {phase.meaning}")
        elif name.endswith("_ci95"):
            figure = name.removesuffix("_ci95")
            yield f"{_INSIDE.get(figure, figure)}_low", Column("Float64", f"lower end: {told(about)}")
            yield f"{_INSIDE.get(figure, figure)}_high", Column("Float64", f"upper end: {told(about)}")
        else:
            yield name, Column(TIMESTAMP if name == "started_at" else _dtype(kinds[name]), told(about))
        if name == "numerics":
            yield "numerics_status", Column("string", "ok, nan, diverges, eager_unstable; NA if it was not checked")
            yield "numerics_worst", Column("string", "which gap comes nearest to its tolerance, or exceeds it most, in words")
            yield "numerics_worst_ratio", Column("Float64", "that gap over its tolerance: above 1 is out; NA if it is not finite")
    for name in WARM_START:
        about = figures(WarmStart)[name]
        yield warm_start_column(name), Column("Float64", f"of the setting's latest warm start: {told(about)}; NA without one")


def told(about: Figure) -> str:
    """Returns a figure's meaning with its unit and when it is missing."""
    unit = f", in {about.unit}" if about.unit else ""
    return f"{about.meaning}{unit}" + ("" if about.missing.startswith("never") else f"; NA or empty when {about.missing}")


_INSIDE = {"step_ms": "step_ms_median"}  # figures whose intervals are not named after them in full

COLUMNS: Mapping[str, Column] = MappingProxyType(dict(_columns()))
"""Every column that `load` returns, in order. Cold and warm times have separate columns, so that no figure mixes them.

Settings mean what `CompileSettings` says about them; None there is NA here. Columns of dtype object contain lists and mappings.
"""
