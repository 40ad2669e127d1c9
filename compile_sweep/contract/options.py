"""What settings may vary of a workload itself, `workload.NAME=value`, and what inference cannot take. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import Scalar, format_value, parse_count, suggest
from compile_sweep.schema.settings import CompileSettings, OptimizerKind

Option = Sequence[Scalar] | type[int]
"""The values it takes, the usual one first; `int` for any whole number of 1 or more, with a usual one of the workload's own."""


def default_options(options: Mapping[str, Option]) -> dict[str, Scalar]:
    """The usual value of each option that names its values."""
    return {name: values[0] for name, values in options.items() if not isinstance(values, type)}


def check_options(workload: str, options: Mapping[str, Option], settings: CompileSettings) -> None:
    """Refuses options the workload does not have.

    Args:
        workload: its name, for the message.
        options: those it has.
        settings: those under test.

    Raises:
        SettingsError: an unknown option, or a value it does not take.
    """
    for name, value in settings.workload or ():
        if name not in options:
            hint = suggest(name, options) if options else "leave it out"
            raise SettingsError(f"the workload {workload} has no option {name!r} to vary; {hint}")
        values = options[name]
        if isinstance(values, type):
            parse_count(f"workload.{name}", value, "them")
        elif not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in values):
            able = ", ".join(map(format_value, values))
            raise SettingsError(f"workload.{name}={format_value(value)} is none of what {workload} takes; use one of {able}")


def gpu_requirement(needs_gpu: Mapping[tuple[str, Scalar], str], chosen: Mapping[str, Scalar]) -> str | None:
    """Why a machine without a GPU cannot run a workload in this form; None if it can.

    Args:
        needs_gpu: options with the values of theirs that need one, and why.
        chosen: the option values in force, or those that settings name.
    """
    for (name, value), why in needs_gpu.items():
        if chosen.get(name) == value:
            return f"workload.{name}={format_value(value)} needs a GPU: {why}"
    return None


def check_inference(workload: str, settings: CompileSettings) -> None:
    """Refuses settings of a training step for a workload that has none.

    Raises:
        SettingsError: the settings concern an optimizer, gradients or the scaling of a loss.
    """
    if settings.optimizer is not OptimizerKind.FOREACH:
        raise SettingsError(f"the workload {workload} only infers and has no optimizer; leave optimizer={settings.optimizer} out")
    if settings.static_gradients:
        raise SettingsError(f"the workload {workload} only infers and has no gradients; leave static_gradients out")
