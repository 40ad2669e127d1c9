"""Settings that the advice on a trial names and that are worth a trial of their own, as a key spells them."""

from collections.abc import Mapping
from typing import Any

from compile_sweep.schema.causes.breaks import cause_of_break
from compile_sweep.schema.causes.errors import cause_of_error
from compile_sweep.schema.causes.guards import cause_of_limit
from compile_sweep.schema.part_settings import left_out_in


def remedy_of(record: Mapping[str, Any]) -> str | None:
    """Returns the settings to add, such as `inductor.pattern_matcher=off`; None if the advice names none that a trial can tell.

    Args:
        record: A trial's record, or the part of it that was measured.
    """
    if remedy := (record.get("numerics") or {}).get("remedy"):
        return str(remedy)
    breaks, otherwise = record.get("graph_break_reasons") or (), None
    if record.get("label") == "compile-error":
        causes = [cause_of_error(record.get("reason") or "")]
        otherwise = left_out_in(record.get("reason") or "")
    elif hits := record.get("recompile_limit_hits"):
        causes = [cause_of_limit(hits[0], record.get("recompile_reasons") or (), breaks)[0]]
    else:
        causes = [cause_of_break(one) for one in breaks]
    return next((cause.remedy for cause in causes if cause and cause.remedy), otherwise)
