"""Options that vary a workload itself, `workload.NAME=value`, and settings that inference cannot use. Pure, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import DEFAULT_PAD_MULTIPLE, Scalar, format_value, parse_count, suggest
from compile_sweep.schema.settings import Autocast, CompileSettings, OptimizerKind, Padding, Scope, SdpaKernel

Option = Sequence[Scalar] | type[int]
"""Accepted values, the default first; or `int` for any integer of at least 1, with a default that the workload defines."""


def default_options(options: Mapping[str, Option]) -> dict[str, Scalar]:
    """Returns the default of each option that lists its values."""
    return {name: values[0] for name, values in options.items() if not isinstance(values, type)}


def check_options(workload: str, options: Mapping[str, Option], settings: CompileSettings) -> None:
    """Refuses options that the workload does not have, and values that they do not accept."""
    for name, value in settings.workload or ():
        if name not in options and name == "batch_size":
            raise SettingsError(
                f"the workload {workload} takes no batch size; give its batch function an argument batch_size, or its class "
                'options = {"batch_size": int}, or leave batch_size out'
            )
        if name not in options:
            hint = suggest(name, options) if options else "leave it out"
            raise SettingsError(f"the workload {workload} has no option {name!r} to vary; {hint}")
        values = options[name]
        if isinstance(values, type):
            parse_count(f"workload.{name}", value, "them")
        elif not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in values):
            able = ", ".join(map(format_value, values))
            raise SettingsError(f"workload.{name}={format_value(value)} is not a value that {workload} takes; use one of {able}")


def refused_kernel(kernel: SdpaKernel | None, device_type: str) -> str | None:
    """Says why a device, by torch's name of its type, has no such attention kernel; None if it may have it."""
    if device_type == "cuda" or kernel not in (SdpaKernel.CUDNN, SdpaKernel.EFFICIENT):
        return None
    return f"sdpa_kernel={kernel} is a kernel for GPUs, not for {device_type}; use flash or math"


def gpu_requirement(needs_gpu: Mapping[tuple[str, Scalar], str], chosen: Mapping[str, Scalar]) -> str | None:
    """Returns why the workload needs a GPU in this form; None if it runs without one."""
    for (name, value), why in needs_gpu.items():
        if chosen.get(name) == value:
            return f"workload.{name}={format_value(value)} needs a GPU: {why}"
    return None


def for_real_lengths(settings: CompileSettings, why: str) -> CompileSettings:
    """Returns the settings adapted to batches that are not padded; raises SettingsError if they need few lengths."""
    unpadded = f"batches of this workload are not padded ({why})"
    if settings.scope is not Scope.EAGER and settings.padding is not Padding.LONGEST:
        raise SettingsError(
            f"dynamic={settings.dynamic} needs batches of few lengths, and {unpadded}; use dynamic=auto, mark or true"
        )
    if settings.pad_multiple not in (None, 1, DEFAULT_PAD_MULTIPLE):
        raise SettingsError(f"pad_multiple={settings.pad_multiple} pads, and {unpadded}; leave it out")
    return replace(settings, padding=Padding.LONGEST, pad_multiple=1)


def check_own_step(workload: str, settings: CompileSettings) -> None:
    """Refuses settings that would compile a workload's own backward pass as a whole, or scale its loss from outside."""
    own = f"the workload {workload} has a step of its own, which calls backward()"
    if settings.compiles_whole:
        raise SettingsError(
            f"scope={settings.scope} compiles loss and model as one, and {own}; use scope=modular, the model alone"
        )
    if settings.accumulate:
        raise SettingsError(f"accumulate={settings.accumulate} runs backward for each part, and {own}; let that step accumulate")
    if settings.autocast is Autocast.FP16:
        raise SettingsError(f"autocast=fp16 needs a scaled loss, and {own} on an unscaled one; use autocast=bf16")


def check_accumulation(
    workload: str, settings: CompileSettings, *, batch_size: int, num_workers: int, unpadded_reason: str | None
) -> None:
    """Refuses settings that ask for parts into which the batches cannot be split."""
    parts = settings.accumulate
    if parts is None:
        return
    if batch_size % parts:
        raise SettingsError(f"accumulate={parts} does not split {batch_size} samples evenly; use a divisor of {batch_size}")
    if num_workers > 1:
        raise SettingsError(
            f"accumulate={parts} runs the backward pass {parts} times a step, and several workers would reduce gradients each "
            "time; use one worker per trial"
        )
    if unpadded_reason is not None:
        raise SettingsError(
            f"accumulate={parts} splits batches along their samples, and those of {workload} may not be split "
            f"({unpadded_reason}); leave it out"
        )


def check_inference(workload: str, settings: CompileSettings) -> None:
    """Refuses settings for an inference workload that concern an optimizer or gradients."""
    if settings.optimizer is not OptimizerKind.FOREACH:
        raise SettingsError(f"the workload {workload} only infers and has no optimizer; leave optimizer={settings.optimizer} out")
    if settings.static_gradients:
        raise SettingsError(f"the workload {workload} only infers and has no gradients; leave static_gradients out")
    if settings.accumulate:
        raise SettingsError(f"the workload {workload} only infers and has no gradients; leave accumulate out")
