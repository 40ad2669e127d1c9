"""Settings that the advice on a trial names and that are worth a trial of their own, as a key spells them."""

import re
from collections.abc import Mapping
from typing import Any

from compile_sweep.schema.causes.breaks import cause_of_break
from compile_sweep.schema.causes.errors import ERRORS
from compile_sweep.schema.causes.guards import cause_of_series
from compile_sweep.schema.causes.recompiles import Recompile, RecompileSeries, fold_recompiles


def remedy_of(record: Mapping[str, Any]) -> str | None:
    """Returns the settings to add, such as `inductor.pattern_matcher=off`; None if the advice names none that a trial can tell.

    Args:
        record: A trial's record, or the part of it that was measured.
    """
    if remedy := (record.get("numerics") or {}).get("remedy"):
        return str(remedy)
    reason = record.get("reason") or ""
    if record.get("label") == "compile-error":
        return next((cause.remedy or None for cause in ERRORS if re.search(cause.error, reason)), None)
    breaks = record.get("graph_break_reasons") or ()
    if hits := record.get("recompile_limit_hits"):
        where, _, rest = hits[0].partition(" hit ")
        last = Recompile.parse(f"{where}: {rest.partition(': ')[2]}")
        recompiles = record.get("recompile_reasons") or ()
        series = next((one for one in fold_recompiles(recompiles) if one.is_of(last)), RecompileSeries.of(last))
        cause = cause_of_series(series, breaks, recompiles)
        return (cause.remedy or None) if cause else None
    return next((cause.remedy for one in breaks if (cause := cause_of_break(one)) and cause.remedy), None)
