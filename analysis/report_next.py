"""What a reader does next: the report links `best.py` and `compare.html` where they lie beside it, else says how to make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from analysis.best_script import BEST_FILE
from analysis.formatting import text

RERUN_FILE, COMPARISON_FILE = "best.json", "compare.html"

LINKED = {BEST_FILE: "text/plain", RERUN_FILE: "application/json", COMPARISON_FILE: "text/html"}
"""Files of a sweep's folder that its page may link, and what they are."""


class Best(NamedTuple):
    """What `best.json` says of `best.py`. Text is as it stands there, not escaped."""

    settings_label: str
    sentence: str
    """How it went when it was run again."""
    is_offered: bool


class Next(NamedTuple):
    """What lies beside the report."""

    best: Best | None
    """None if nobody exported it yet."""
    has_comparison: bool


def what_next(folder: Path) -> Next:
    """What the folder holds besides its records; a file that cannot be read counts as none."""
    return Next(best=_best(folder), has_comparison=(folder / COMPARISON_FILE).is_file())


def _best(folder: Path) -> Best | None:
    try:
        told = json.loads((folder / RERUN_FILE).read_text(encoding="utf-8"))
        return Best(
            settings_label=text(told["settings_label"]) or "",
            sentence=text(told["sentence"]) or "",
            is_offered=(folder / BEST_FILE).is_file(),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
