"""Converts a page to comparable text: its words, and a summary of its charts' data."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pandas as pd

MOST = 6
"""Maximum number of list items that are written out."""

STYLES = ("template", "font", "margin", "hoverlabel", "paper_bgcolor", "plot_bgcolor")
"""Style settings of charts, the same for all."""


class _Words(HTMLParser):
    """Collects a page's text, one line per block, with tooltips in brackets."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.packed: dict[str, str] = {}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag in ("script", "style"):
            self._inside = names.get("id") or tag
        elif re.fullmatch(r"h[1-6]", tag):
            self.text.append(f"\n{'#' * int(tag[1])} ")
        elif tag in ("td", "th"):
            self.text.append(" | ")
        elif tag in ("p", "li", "tr", "dt", "dd", "div", "section", "summary", "title", "fieldset", "label"):
            self.text.append("\n")
        if said := names.get("title") or names.get("aria-label"):
            self.text.append(f"[{said}] ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text.append(re.sub(r"\s+", " ", data))
        else:
            self.packed[self._inside] = data


def words_of(page: str) -> str:
    """Returns the page's text."""
    return re.sub(r" *\n\s*", "\n", "".join(_read(page).text)).strip() + "\n"


def data_of(page: str) -> str:
    """Returns the data of the page's charts and table, as JSON with long lists shortened."""
    data = json.loads(gzip.decompress(base64.b64decode(_read(page).packed["data"])))
    return json.dumps(shortened(data), indent=1, ensure_ascii=False) + "\n"


def _read(page: str) -> _Words:
    reader = _Words()
    reader.feed(page)
    return reader


def shortened(value: Any) -> Any:
    """Removes plotly's styles, rounds numbers to four digits, and shortens long lists to their ends and a sum."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {name: shortened(one) for name, one in value.items() if name not in STYLES}
        case list() if len(value) > MOST:
            numbers, letters = _amount(value)
            ends = {"first": shortened(value[0]), "last": shortened(value[-1])}
            return {"length": len(value), **ends, "sum of numbers": shortened(numbers), "letters": letters}
        case list():
            return [shortened(one) for one in value]
    return value


def _amount(value: Any) -> tuple[float, int]:
    """Returns the sum of all numbers in lists and mappings, and the total length of their texts."""
    match value:
        case str():
            return 0.0, len(value)
        case int() | float():
            return float(value), 0
        case list() | dict():
            within = value.values() if isinstance(value, dict) else value
            amounts = [_amount(one) for one in within]
            return sum(numbers for numbers, _ in amounts), sum(letters for _, letters in amounts)
    return 0.0, 0


def columns_of(frame: pd.DataFrame) -> str:
    """Returns a line for each column of a table: its name and dtype, the number of filled cells, and the first of them."""
    lines = []
    for name, column in frame.items():
        filled = column.dropna()
        first = f", {filled.iloc[0]!s:.40}" if len(filled) else ""
        lines.append(f"{name}: {column.dtype}, {len(filled)} of {len(column)}{first}\n")
    return "".join(lines)
