"""The search space: every combination of the settings' values, without those that cannot work or that this machine cannot run."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, Self

from compile_sweep.contract.installed_torch import InstalledTorch, refuse_unknown_names
from compile_sweep.contract.options import (
    check_accumulation,
    check_inference,
    check_options,
    check_own_step,
    for_real_lengths,
    gpu_requirement,
    refused_kernel,
)
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.ddp_settings import check_ddp_workers
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import BATCH_SIZE, format_value, parse_count
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope
from compile_sweep.schema.shapes import group_by_length, optimal_buckets
from compile_sweep.script.job import refuse_outside_scripts
from orchestrator.config import Excluded
from orchestrator.plan.describer import installed_torch

Candidate = Mapping[str, Any]
"""Fields of `CompileSettings` as a person would write them, valid or not, and `num_buckets`, which becomes `buckets`."""

GRID_OPTIMIZERS = (OptimizerKind.FOREACH, OptimizerKind.FUSED, OptimizerKind.COMPILED)
"""Optimizers that the grid tries; `foreach_map` is a torch prototype and takes long to compile."""


@dataclass(frozen=True, kw_only=True)
class Target(WorkloadFacts):
    """What settings must fit: the workload and the machine."""

    has_gpu: bool
    num_workers: int = 1
    """Number of a trial's workers, which train together."""
    foreach_map_refusal: Callable[[], str | None] = lambda: None
    """Says why optimizer=foreach_map would train differently from the workload's own optimizer; None if it would not."""
    torch: InstalledTorch = field(default_factory=installed_torch)
    """Names that the installed torch knows."""

    @classmethod
    def of(cls, facts: WorkloadFacts, *, has_gpu: bool, num_workers: int = 1, **asked: Any) -> Self:
        """Returns what settings must fit to run this workload; `asked` may be `foreach_map_refusal` and `torch`."""
        known = {field.name: getattr(facts, field.name) for field in fields(WorkloadFacts)}
        return cls(**known, has_gpu=has_gpu, num_workers=num_workers, **asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Candidates split into those to try, in order and without duplicates, and those to leave out."""

    settings: tuple[CompileSettings, ...]
    excluded: tuple[Excluded, ...]


def candidate_text(candidate: Candidate) -> str:
    """Returns the candidate as a person would write it."""
    return ",".join(f"{name}={value}" for name, value in candidate.items())


def choose(candidates: Iterable[Candidate], target: Target) -> Choice:
    """Splits candidates: eager baselines first, then in the given order; two spellings of one setting are tried once."""
    settings: dict[str, CompileSettings] = {}
    excluded: dict[str, Excluded] = {}
    for candidate in candidates:
        text = candidate_text(candidate)
        try:
            refuse_outside_scripts(candidate, is_script=target.is_script, has_batch_argument="batch_size" in target.options)
            setting = _without_usual_batch_size(CompileSettings.from_dict(_with_buckets(candidate, target)), target)
            if target.has_own_step and setting.scope is Scope.FULL:
                setting = replace(setting, scope=Scope.MODULAR)
            if target.unpadded_reason is not None:
                setting = for_real_lengths(setting, target.unpadded_reason)
            else:
                if target.min_length < target.max_length:
                    setting = setting.for_lengths_below_the_multiple(target.max_length)
                setting.validate_for(target.max_length, target.min_length)
            if target.has_one_shape and target.unpadded_reason is None:
                setting = setting.for_one_shape()
            check_options(target.workload, target.options, setting)
            if target.has_own_step:
                check_own_step(target.workload, setting)
            check_accumulation(
                target.workload,
                setting,
                batch_size=setting.batch_size or target.batch_size,
                num_workers=target.num_workers,
                unpadded_reason=target.unpadded_reason,
            )
            if target.has_blocks is False and setting.needs_blocks and not target.is_script:  # of a script it is a guess
                raise SettingsError(setting.without_blocks(f"the model of {target.workload}"))
            if not target.trains:
                check_inference(target.workload, setting)
            check_ddp_workers(
                setting.ddp, target.num_workers, workload=target.workload, trains=target.trains, has_gpu=target.has_gpu
            )
            refuse_unknown_names(setting, target.torch)
            if setting.optimizer is OptimizerKind.FOREACH_MAP and (reason := target.foreach_map_refusal()):
                raise SettingsError(reason)
        except SettingsError as error:
            excluded[text] = Excluded(candidate=text, reason=str(error))
            continue
        if reason := unsupported(setting, target):
            excluded[text] = Excluded(candidate=text, reason=reason)
        else:
            settings.setdefault(setting.key, setting)
    ordered = sorted(settings.values(), key=lambda setting: setting.scope is not Scope.EAGER)
    return Choice(settings=tuple(ordered), excluded=tuple(excluded.values()))


def unsupported(settings: CompileSettings, target: Target) -> str | None:
    """Says why this machine cannot run valid settings; None if it can."""
    if settings.claims_cudagraphs and not target.has_gpu:
        return "CUDA graphs need a GPU, and none is visible"
    if not target.has_gpu and settings.float8 is not None:
        return f"float8={settings.float8} needs a GPU, and none is visible; leave it out"
    if not target.has_gpu and (reason := refused_kernel(settings.sdpa_kernel, "cpu")):
        return reason
    if not target.has_gpu and (reason := gpu_requirement(target.needs_gpu, dict(settings.workload or ()))):
        return reason
    if settings.attention is not None and settings.attention not in target.attentions:
        able = ", ".join(target.attentions) or "its own only, so leave attention out"
        return f"the workload cannot run attention={settings.attention}; it can run {able}"
    for name, _ in settings.parts or ():
        if target.parts is not None and name.rpartition(".")[2] not in target.parts:
            return f"the workload has no part {name!r}; use one of {', '.join(target.parts)}"
    return None


def refuse_several_jobs(settings: Iterable[CompileSettings], job_options: Iterable[str]) -> None:
    """Refuses settings that differ in what a sample is, because the fastest would be the one with the least work."""
    every = [dict(setting.workload or ()) for setting in settings]
    for name in sorted(job_options):
        values = {format_value(chosen[name]) if name in chosen else "its usual value" for chosen in every}
        if len(values) > 1:
            raise SettingsError(
                f"workload.{name} changes what a sample is, so settings with {' and '.join(sorted(values))} cannot be compared; "
                "give each value a sweep and an --output of its own"
            )


def padded_length(setting: CompileSettings, facts: WorkloadFacts) -> float:
    """Returns the mean length that batches are padded to, in tokens; the longest if lengths are not known."""
    if facts.has_one_shape or facts.is_script:
        return 1.0
    policy = setting.shape_policy(facts.max_length, facts.min_length)  # without padding, use that of pad_multiple=1
    longest = _longest_rows(facts.row_lengths, facts.batch_size, setting.group_window or 1) or facts.batch_lengths
    if not longest:
        return policy.padded(facts.max_length)
    return sum(policy.padded(length) * count for length, count in _counted(longest).items()) / len(longest)


@lru_cache(maxsize=8)
def _counted(lengths: tuple[int, ...]) -> Counter[int]:
    """Returns how often each length occurs: thousands of batches have some tens of lengths."""
    return Counter(lengths)


@lru_cache(maxsize=8)
def _longest_rows(row_lengths: tuple[int, ...], batch_size: int, window: int) -> tuple[int, ...]:
    """Returns the length of each batch's longest row, in tokens."""
    return tuple(max(row_lengths[row] for row in rows) for rows in group_by_length(row_lengths, batch_size, window))


@lru_cache(maxsize=32)
def _best_buckets(row_lengths: tuple[int, ...], batch_size: int, window: int, count: int, max_length: int) -> tuple[int, ...]:
    return optimal_buckets(Counter(_longest_rows(row_lengths, batch_size, window)), count, max_length)


def _without_usual_batch_size(settings: CompileSettings, target: Target) -> CompileSettings:
    """Returns the settings without a batch size equal to the workload's own, so that one setting has one key."""
    if target.is_script or settings.batch_size != target.batch_size or "batch_size" not in target.options:
        return settings
    return settings.with_batch_size(None)


def _with_buckets(candidate: Candidate, target: Target) -> Candidate:
    """Replaces the candidate's number of buckets by the best buckets of that number for the workload's lengths."""
    if "num_buckets" not in candidate:
        return candidate
    values = {name: value for name, value in candidate.items() if name != "num_buckets"}
    count = parse_count("num_buckets", candidate["num_buckets"], "buckets")
    for name in ("buckets", "bucket_size"):
        if values.get(name) is not None:
            raise SettingsError(f"num_buckets and {name} both say which buckets there are; leave one out")
    if not target.row_lengths:
        raise SettingsError("num_buckets needs a workload that says how long its rows are (row_lengths); give buckets=32/64/256")
    window = parse_count("group_window", values.get("group_window") or 1, "batches")
    batch_size = parse_count("batch_size", values.get("batch_size") or values.get(BATCH_SIZE) or target.batch_size, "samples")
    buckets = _best_buckets(target.row_lengths, batch_size, window, count, target.max_length)
    return {"dynamic": Dynamic.BUCKETS, **values, "buckets": buckets}


def varied(candidates: Iterable[Candidate], axes: Mapping[str, Sequence[Any]]) -> Iterator[Candidate]:
    """Yields each candidate with every combination of the axes' values in place of its own."""
    for candidate in candidates:
        for values in product(*axes.values()):
            yield {**candidate, **dict(zip(axes, values, strict=True))}


def every_candidate(bucket_sizes: Iterable[int], pad_multiples: Iterable[int]) -> Iterator[Candidate]:
    """The grid over scope, mode, dynamic strategy, padding and optimizer, conditional ones only where they act.

    The other fields keep torch's and the workload's own choice; `varied` adds any of them as an axis.

    Args:
        bucket_sizes: Sizes in tokens, tried with dynamic=buckets.
        pad_multiples: Multiples in tokens, tried with padding=longest.
    """
    bucket_sizes, pad_multiples = tuple(bucket_sizes), tuple(pad_multiples)
    for optimizer in GRID_OPTIMIZERS:
        yield {"scope": Scope.EAGER, "padding": Padding.MAX, "optimizer": optimizer}
        for multiple in pad_multiples:
            yield {"scope": Scope.EAGER, "padding": Padding.LONGEST, "pad_multiple": multiple, "optimizer": optimizer}
    compiled = [scope for scope in Scope if scope not in (Scope.EAGER, Scope.NESTED)]
    modes = [mode for mode in Mode if mode is not Mode.LITE]
    for scope, dynamic, mode, optimizer in product(compiled, Dynamic, modes, GRID_OPTIMIZERS):
        common: Candidate = {"scope": scope, "mode": mode, "dynamic": dynamic, "optimizer": optimizer}
        if dynamic is Dynamic.STATIC:
            yield common
        elif dynamic is Dynamic.BUCKETS:
            yield from ({**common, "bucket_size": size} for size in bucket_sizes)
        else:
            yield from ({**common, "pad_multiple": multiple} for multiple in pad_multiples)
