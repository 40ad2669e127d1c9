"""Formats figures for people: three significant digits, a unit, and a dash if there is no figure."""

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from compile_sweep.schema.visible_text import ratio_text

MISSING = "—"


def number(value: Any) -> float | None:
    """Returns the value as a finite float; None if it is missing or not a number."""
    if value is None or value is pd.NA or isinstance(value, str | dict | list):
        return None
    converted = float(value)
    return converted if math.isfinite(converted) else None


def text(value: Any) -> str | None:
    """Returns the value as text; None if it is missing."""
    return None if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)) else str(value)


def figure(value: Any, unit: str = "", *, digits: int = 3) -> str:
    """`1234.5 → "1,234"` and `0.12345 → "0.123"`, followed by the unit; a dash if the figure is missing."""
    converted = number(value)
    if converted is None:
        return MISSING
    magnitude = math.floor(math.log10(abs(converted))) if converted else 0
    written = f"{converted:,.{min(max(digits - 1 - magnitude, 0), digits)}f}"
    return f"{written} {unit}".rstrip()


def or_estimate(measured: Any, estimate: Any, write: Callable[[Any], str]) -> str:
    """Formats the measured value with `write` or, if it is missing, the estimate after a ≈; a dash without either."""
    return f"≈ {write(estimate)}" if number(measured) is None and number(estimate) is not None else write(measured)


def whole(value: Any) -> str:
    """Formats a count without decimals; a dash if missing."""
    converted = number(value)
    return MISSING if converted is None else f"{converted:,.0f}"


def gib(num_bytes: Any) -> str:
    """Formats bytes in GiB (2³⁰ bytes), with the unit; a dash if missing."""
    converted = number(num_bytes)
    return MISSING if converted is None else f"{converted / 2**30:.1f} GiB"


def times(ratio: Any) -> str:
    """Formats a speedup as `1.50×`; a dash if missing."""
    converted = number(ratio)
    return MISSING if converted is None else f"{ratio_text(converted)}×"


def duration(seconds: Any) -> str:
    """Formats an approximate duration with two digits: seconds under two minutes, then minutes, then hours; a dash if missing."""
    return durations(seconds)[0]


def durations(*seconds: Any) -> list[str]:
    """Formats durations that are read together, such as the ends of an interval, in the unit of the largest; any may be < 0."""
    converted = [number(one) for one in seconds]
    largest = max((abs(one) for one in converted if one is not None), default=0.0)
    unit_s, unit = (1, "s") if largest < 120 else (60, "min") if largest < 7200 else (3600, "h")
    return [figure(None if one is None else one / unit_s + 0.0, unit, digits=2).replace("-", "−") for one in converted]


def percent(share: Any) -> str:
    """Formats a fraction as `3.1%`; a dash if missing."""
    converted = number(share)
    return MISSING if converted is None else f"{100 * converted:z.1f}%"


def instant(iso: str) -> str:
    """Formats an ISO 8601 time to the minute in UTC: `2026-11-21 09:11 UTC`; returns other text unchanged."""
    try:
        when = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if when.tzinfo else iso


def upper_end(high: Any) -> float | None:
    """Returns the upper end of an interval, infinite if unbounded; None if it is missing."""
    return math.inf if isinstance(high, float) and high == math.inf else number(high)


def interval(low: Any, high: Any) -> str:
    """Formats `a–b`, with as many digits as needed to show the interval's width; empty if an end is missing.

    An interval without an upper bound is `a or more`.
    """
    start, end = number(low), upper_end(high)
    if start is None or end is None:
        return ""
    if math.isinf(end):
        return f"{figure(start)} or more"
    width, largest = max(end - start, 1e-4), max(abs(start), abs(end), 1e-4)
    decimals = max(0, 2 - math.floor(math.log10(largest)), -math.floor(math.log10(width)))
    return f"{start:,.{decimals}f}–{end:,.{decimals}f}"


def span(low: Any, high: Any, unit: str) -> str:
    """Formats an interval for a sentence: `a to b unit`."""
    if upper_end(high) == math.inf:
        return f"{figure(low, unit)} or more"
    return f"{figure(low)} to {figure(high, unit)}"


def cell(words: str) -> str:
    """Makes text safe for a cell of a Markdown table: on one line, and without markup."""
    return re.sub(r"([\\|`*<[])", r"\\\1", " ".join(words.split()))
