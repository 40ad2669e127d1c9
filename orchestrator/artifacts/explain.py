"""Explains why one trial's artifacts do not serve another: the components that differ, the decisive one first. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.artifacts.manifest import Facts, Manifest, differences

ABSENT = "(none)"

OF_A_TRIAL = ("settings.", "device", "threads", "cpu_threads")
"""Prefixes of components that the trial decides, not the host or torch's configuration; an environment alone has none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: an environment, or a trial, which is an environment and more."""

    name: str
    facts: Facts
    manifest: Manifest | None = None  # of the trial; None for an environment alone

    @classmethod
    def of(cls, manifest: Manifest, name: str) -> Self:
        """Returns the trial that a manifest describes."""
        return cls(name=name, facts=manifest.facts, manifest=manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A component that differs."""

    component: str
    a: str
    b: str
    may_share: bool = False  # whether artifacts may serve the other side in spite of the difference


def explain(a: Side, b: Side) -> list[Difference]:
    """Lists everything that keeps one side's artifacts from serving the other, the most decisive first; empty if nothing does.

    The environment, the workload and its size come first, since artifacts are never shared across them. Settings follow, whose
    graphs may or may not be the same. If all of these are equal, the entries that only one side has are compared.
    """
    found, one, other = _facts(a, b), a.manifest, b.manifest
    if one is None or other is None:
        return found
    found += [
        Difference(component=name, a=mine, b=theirs)
        for name in ("workload", "size")
        if (mine := getattr(one, name)) != (theirs := getattr(other, name))
    ]
    known = {difference.component for difference in found}  # some settings are also facts
    found += [setting for setting in _settings(one.settings_key, other.settings_key) if setting.component not in known]
    return found or _entries(one, other)


def sentences(a: Side, b: Side, found: Sequence[Difference]) -> list[str]:
    """Formats the comparison for display: a verdict, then a line per component."""
    if not found:
        return [f"{a.name} and {b.name} do not differ: what one compiles serves the other."]
    decisive = found[0].component
    if decisive.startswith("entries"):
        verdict = (
            "are alike in environment, workload and settings, yet compiled different graphs: "
            "the code of the model, of its loss or data, or its shapes differ"
        )
    elif all(one.may_share for one in found):
        verdict = f"share artifacts as far as {_words(found)} leaves graphs alike"
    else:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        verdict = f"share nothing, because {decisive.removeprefix('settings.')} differs{more}"
    return [f"{a.name} and {b.name} {verdict}.", *(f"  {one.component}: {one.a} | {one.b}" for one in found)]


def nearest(to: Manifest, others: Sequence[Manifest]) -> Manifest | None:
    """Returns the manifest that differs least from `to`, the newest among equals; None if there is no other."""
    side = Side.of(to, "")
    rest = [other for other in reversed(others) if other.id != to.id]
    return min(rest, key=lambda other: len(explain(side, Side.of(other, ""))), default=None)


def _facts(a: Side, b: Side) -> list[Difference]:
    is_environment = a.manifest is None or b.manifest is None
    return [
        Difference(component=name, a=a.facts.get(name, ABSENT), b=b.facts.get(name, ABSENT))
        for name in differences(a.facts, b.facts)
        if not (is_environment and name.startswith(OF_A_TRIAL))
    ]


def _settings(a: str, b: str) -> list[Difference]:
    if a == b:
        return []
    try:
        mine, theirs = _spelled(a), _spelled(b)
    except SettingsError:  # written by another version of this project
        return [Difference(component="settings.key", a=a, b=b, may_share=True)]
    return [
        Difference(component=f"settings.{name}", a=mine.get(name, ABSENT), b=theirs.get(name, ABSENT), may_share=True)
        for name in dict.fromkeys((*mine, *theirs))
        if mine.get(name) != theirs.get(name)
    ]


def _spelled(key: str) -> Mapping[str, str]:
    return {name: str(value) for name, value in CompileSettings.parse(key).fields_that_apply().items()}


def _entries(a: Manifest, b: Manifest) -> list[Difference]:
    found = []
    names = [{(entry.kind, entry.key) for entry in side.entries} for side in (a, b)]
    for kind in sorted({kind for kind, _ in names[0] ^ names[1]}):
        mine, theirs = ({key for of, key in side if of == kind} for side in names)
        found.append(
            Difference(
                component=f"entries.{kind}",
                a=f"{len(mine - theirs)} of {len(mine)} only here",
                b=f"{len(theirs - mine)} of {len(theirs)} only here",
            )
        )
    return found


def _words(found: Sequence[Difference]) -> str:
    names = [one.component.removeprefix("settings.") for one in found]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
