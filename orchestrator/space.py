"""The search space: every combination of the settings' values, less what cannot work and what this machine cannot run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from workloads.errors import SettingsError
from workloads.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope

Candidate = Mapping[str, str | int | bool]
"""Fields of `CompileSettings` as a person would write them, valid or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What settings must fit: the workload's lengths and the machine."""

    max_length: int
    """Tokens."""
    has_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """A candidate that will not be tried."""

    candidate: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Candidates sorted into what to try, in order and without repeats, and what not to."""

    settings: tuple[CompileSettings, ...]
    excluded: tuple[Excluded, ...]


def choose(candidates: Iterable[Candidate], target: Target) -> Choice:
    """Sorts candidates: eager baselines first, then as given; two spellings of one setting are tried once."""
    settings: dict[str, CompileSettings] = {}
    excluded: dict[str, Excluded] = {}
    for candidate in candidates:
        text = ",".join(f"{name}={value}" for name, value in candidate.items())
        try:
            setting = CompileSettings.from_dict(candidate)
            setting.validate_for(target.max_length)
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
    """Why this machine cannot run valid settings; None if it can."""
    if settings.cudagraphs and not target.has_gpu:
        return "CUDA graphs need a GPU, and none is visible"
    return None


def every_candidate(bucket_sizes: Iterable[int], pad_multiples: Iterable[int]) -> Iterator[Candidate]:
    """The full grid over all fields, conditional ones only where they act.

    Args:
        bucket_sizes: tokens, tried with dynamic=buckets.
        pad_multiples: tokens, tried with padding=longest.
    """
    bucket_sizes, pad_multiples = tuple(bucket_sizes), tuple(pad_multiples)
    for optimizer in OptimizerKind:
        yield {"scope": Scope.EAGER, "padding": Padding.MAX, "optimizer": optimizer}
        for multiple in pad_multiples:
            yield {"scope": Scope.EAGER, "padding": Padding.LONGEST, "pad_multiple": multiple, "optimizer": optimizer}
    compiled = [scope for scope in Scope if scope is not Scope.EAGER]
    for scope, dynamic, mode, optimizer in product(compiled, Dynamic, Mode, OptimizerKind):
        common: Candidate = {"scope": scope, "mode": mode, "dynamic": dynamic, "optimizer": optimizer}
        if dynamic is Dynamic.STATIC:
            yield common
        elif dynamic is Dynamic.BUCKETS:
            yield from ({**common, "bucket_size": size} for size in bucket_sizes)
        else:
            yield from ({**common, "pad_multiple": multiple} for multiple in pad_multiples)
