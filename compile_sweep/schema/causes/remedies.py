"""Settings that the advice on a trial names and that are worth a trial of their own, as a key spells them."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from compile_sweep.schema.causes.breaks import BREAKS, advice_on_fallback, cause_of_break
from compile_sweep.schema.causes.errors import cause_of_error
from compile_sweep.schema.causes.guards import cause_of_limit
from compile_sweep.schema.part_settings import left_out_in

OF_THE_LOSS = "what runs eagerly is of the loss: leave compile_loss out, which compiles the model alone"
"""Said of a setting whose loss runs eagerly. Without it the model is compiled as well, so its other remedies come to nothing."""


def remedy_of(record: Mapping[str, Any], tried: Container[str] = ()) -> str | None:
    """Returns the settings to add, such as `inductor.pattern_matcher=off`; None if the advice names none that a trial can tell.

    Args:
        record: A trial's record, or the part of it that was measured.
        tried: Remedies that are not asked for.
    """
    named = (record.get("numerics") or {}).get("remedy")
    found = [str(named)] if named else _by_causes(record)
    said = "\n".join([record.get("reason") or "", *(record.get("findings") or ())])
    if record.get("label") == "silent-fallback" and OF_THE_LOSS in said:
        return None
    if record.get("label") == "silent-fallback":  # a trial that ended at once has its reason alone
        found += [cause.remedy for cause in BREAKS if cause.remedy and cause.remedy in said]
    if record.get("label") in ("compile-error", "silent-fallback") and (spared := left_out_in(said)):
        found.append(spared)
    return next((remedy for remedy in found if remedy not in tried), None)


def _by_causes(record: Mapping[str, Any]) -> list[str]:
    breaks = _breaks_that_matter(record)
    if record.get("label") == "compile-error":
        causes = [cause_of_error(record.get("reason") or "")]
    elif hits := record.get("recompile_limit_hits"):
        causes = [cause_of_limit(hits[0], record.get("recompile_reasons") or (), breaks)[0]]
    else:
        causes = [cause_of_break(one) for one in breaks]
    return [cause.remedy for cause in causes if cause and cause.remedy]


def _breaks_that_matter(record: Mapping[str, Any]) -> Sequence[str]:
    """Returns a record's graph breaks; if something runs eagerly, those at its place, because no others made it so."""
    breaks: Sequence[str] = record.get("graph_break_reasons") or ()
    fallbacks: Sequence[str] = record.get("fallbacks") or ()
    there = [one for one in breaks if any(advice_on_fallback(text, [one]) != advice_on_fallback(text, ()) for text in fallbacks)]
    return there if there and record.get("label") == "silent-fallback" else breaks
