"""Shared by this package's commands: counts and amounts as a person writes them, and lines as a terminal shows them."""

import math
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.visible_text import for_terminal

_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}


SweepFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


def is_number(word: str) -> bool:
    """Tells whether a word starts like a number, so that it may be one of several."""
    return word[:1].isdigit() or word[:1] == "."


def count(text: str) -> int:
    """Parses a whole number of 0 or more, also as `200k`, `1M` or `2e5`; raises ConfigError for anything else."""
    found = re.fullmatch(r"([\d_.,]+(?:e\d{1,2})?)([km]?)", text.strip().lower())
    try:
        value = float(found[1].replace(",", "").replace("_", "")) * _FACTORS[found[2]] if found else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value != int(value):
        raise ConfigError(f"{text!r} is not a count; write a whole number, such as 200000, 200k or 1M")
    return int(value)


def amount(text: str) -> float:
    """Parses a number of 0 or more; raises ConfigError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{text!r} is not an amount; write a number of 0 or more")
    return value


def say(*lines: str) -> None:
    """Prints lines; on a terminal, breaks them between words."""
    print(*(for_terminal(line, sys.stdout) for line in lines), sep="\n")
