"""Describes a setting as the levers that it pulls: fields with a value other than the default."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.causes.errors import GRAPHS_MEMORY, GRAPHS_POOL, VIEWED
from compile_sweep.schema.choices import COMPILED_OPTIMIZERS, MOST_CAPTURED_SHAPES
from compile_sweep.schema.outcome import Label
from compile_sweep.schema.setting_text import DEFAULT_PAD_MULTIPLE, flatten, format_value
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope

BASELINE: Mapping[str, str] = {
    "scope": Scope.EAGER,
    "dynamic": Dynamic.STATIC,
    "padding": Padding.MAX,
    "pad_multiple": str(DEFAULT_PAD_MULTIPLE),
    "optimizer": OptimizerKind.FOREACH,
}
"""Values that pull no lever. For fields not named here, leaving them out pulls none."""

LENGTHS = ("dynamic", "padding", "pad_multiple")
"""Levers on lengths, which have other names in eager settings than in compiled ones."""

_IMPLIED = ("mode", "as_written")
"""Fields that follow from other levers or from the sweep."""

_DESCENT = "options.coordinate_descent_tuning"  # a lever, unless mode=max-autotune implies it or it is switched off

_TUNED = (Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)

COMPILED_OPTIMIZER = "compiled_optimizer"
"""Lever of a compiled optimizer beside a fused one's, since both save the same: 0.99 to 1.02 × a fused one (docs/results.md)."""

CAPTURED = "captured_cudagraphs"
"""Lever of CUDA graphs in an eager setting, apart from those of compiled code: where one fails, the other may work."""

TOGETHER = {COMPILED_OPTIMIZER: "optimizer", "dynamic": "options.triton.mix_order_reduction"}
"""Names of levers, and of the one that may change with each of them."""

_UNNUMBERED = ("buckets", "bucket_size")  # fields whose values belong to one workload's lengths


class Lever(NamedTuple):
    """A field with a value other than its baseline."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def levers_of(setting: CompileSettings) -> dict[str, str]:
    """Returns the levers that a setting pulls, values by name; the baseline, `scope=eager` without options, pulls none."""
    found = {name: format_value(value) for name, value in flatten(setting.fields_that_apply()) if name not in _IMPLIED}
    if setting.scope is not Scope.EAGER:
        found.pop("padding", None)  # follows from `dynamic`
    if found.get("cudagraphs") == "off":
        del found["cudagraphs"]
    if setting.scope is Scope.EAGER and setting.cudagraphs:
        found[CAPTURED] = found.pop("cudagraphs")
    if setting.optimizer in COMPILED_OPTIMIZERS:
        found |= {"optimizer": OptimizerKind.FUSED, COMPILED_OPTIMIZER: setting.optimizer}
    if setting.mode in _TUNED or found.get(_DESCENT) == "off":
        found.pop(_DESCENT, None)
    if setting.mode in _TUNED:  # a mode is one or both of two levers, so that one mode's gain is expected of the other, too
        found["max_autotune"] = "on"
    if any(name in found for name in _UNNUMBERED):
        found["dynamic"] = f"buckets:{'/'.join(found.pop(name) for name in _UNNUMBERED if name in found)}"
    return {name: value for name, value in found.items() if BASELINE.get(name) != value}


def kind_of(lever: Lever) -> Lever:
    """Returns the lever without what belongs to one workload, the lengths of its buckets."""
    return Lever(lever.name, lever.value.partition(":")[0])


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Returns the names of the levers in which two settings differ.

    Compiling an eager setting counts as one change, even if it renames the levers on lengths, such as padding=longest to
    dynamic=auto. A compiled optimizer in the place of one that is not even fused is one change, too, and lengths that are marked
    without mix-order reductions, whose guard creates a second graph for them (docs/log.md).
    """
    ignored = LENGTHS if ("scope" in before) != ("scope" in after) else ()
    for name, goes_along in TOGETHER.items():
        if before.get(name) != after.get(name):
            ignored = (*ignored, goes_along)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name) and name not in ignored)


_TRACED = (
    "scope", "dynamic", "fullgraph", "backend", "stance", "dynamo", "parts", "activation_checkpointing", "use_cache",
    "autocast_experts", "pad_to_multiple_of", "workload",
)  # fmt: skip
"""Fields that decide which graphs Dynamo makes of a model; the others change what becomes of the graphs."""


_WHILE_TRACED = "when making fake tensor call"  # of an operator that refuses tensors without values, before there is a graph


def fails_alike(failed: CompileSettings, label: str | None, reason: str, classes: Collection[str] = ()) -> tuple[str, ...] | None:
    """Returns the fields whose values a setting must share with one that failed to fail for the same reason.

    Args:
        failed: The setting that failed.
        label: Its label.
        reason: The reason in its record.
        classes: Names of the classes of a script's modules, of which none is a loss.

    Returns:
        Names of fields; None if the reason does not tell.
    """
    if failed.memory_format is not None and re.search(VIEWED, reason):  # whatever the rest, with these tensors
        return ("memory_format",)
    if label == Label.OUT_OF_MEMORY and failed.as_written:  # so have others that compile nothing, which saves memory, too little
        return ("scope", "workload", "use_cache")
    if failed.optimizer in COMPILED_OPTIMIZERS or failed.float8:  # their own code may be at fault
        return None
    is_of_model = any(f": forward of {name} (" in reason for name in classes)
    traced = (*_TRACED, "compile_loss") if failed.compile_loss and not is_of_model else _TRACED  # the loss may be at fault
    if label == Label.SILENT_FALLBACK:  # code that Dynamo cannot trace, whatever the lengths, and even less with a cache of keys
        ignored = ("dynamic", "pad_to_multiple_of", *(["use_cache"] if failed.use_cache is False else []))
        return tuple(name for name in traced if name not in ignored)
    if label == Label.RECOMPILE_LIMIT or (label == Label.COMPILE_ERROR and _WHILE_TRACED in reason):
        return traced
    if label == Label.DIVERGES and failed.backend == "aot_eager":  # wrong before Inductor sees the graphs
        return tuple(name for name in traced if name != "backend")
    if label == Label.CUDAGRAPHS_SKIPPED or fails_in_graphs(label, reason):
        return (*(_TRACED if GRAPHS_POOL in reason else traced), "claims_cudagraphs")  # a loss replaces no weights
    return None


def fails_in_graphs(label: str | None, reason: str) -> bool:
    """Tells whether a setting failed because of what its CUDA graphs have in memory."""
    return label == Label.COMPILE_ERROR and (GRAPHS_MEMORY in reason or GRAPHS_POOL in reason)


def is_pointless(setting: CompileSettings, facts: WorkloadFacts) -> bool:
    """Tells whether a setting has a lever that a model with these facts has no use for."""
    if setting.scope is not Scope.EAGER and facts.can_compile is False:
        return True
    if setting.sdpa_kernel is not None and facts.has_attention is False:
        return True
    if setting.memory_format not in (None, facts.memory_format):
        return True
    if setting.optimizer is not OptimizerKind.FOREACH and facts.has_optimizer is False:
        return True
    if setting.optimizer is OptimizerKind.FUSED and facts.has_fused is False:
        return True
    if setting.optimizer in COMPILED_OPTIMIZERS and facts.can_compile_optimizer is False:
        return True
    if setting.optimizer is OptimizerKind.FOREACH and facts.is_fused:
        return True
    if setting.compile_loss and facts.has_loss_outside is False:
        return True
    if setting.activation_checkpointing is not None and facts.recomputes is False:
        return True
    if setting.use_cache is False and facts.makes_cache is False:
        return True
    if setting.autocast_experts and facts.float32_experts is False:
        return True
    if setting.pad_to_multiple_of is not None and facts.can_pad is False:
        return True
    if setting.matmul_precision is not None and facts.autocasts:
        return True
    if setting.dynamic is Dynamic.MARK and facts.batches_change is False:
        return True
    hardly_recur = facts.shapes_recur is False or (facts.num_shapes or 1) > MOST_CAPTURED_SHAPES
    if setting.claims_cudagraphs and setting.pad_to_multiple_of is None and hardly_recur:
        return True  # each shape would be recorded, and hardly come again while it is timed
    return setting.scope in (Scope.REGIONAL, Scope.NESTED) and facts.has_blocks is False
