r"""Text of somebody else, made safe to show: what a terminal would obey or a reader would not see is spelled out.

Background: the reason of a failure, a device's name or a record copied from elsewhere may hold ESC sequences, which change
a terminal's title, colors or contents, NUL, and the marks by which Unicode changes the direction of text ("Trojan Source",
CVE-2021-42574).
"""

import shutil
import textwrap
import unicodedata
from collections.abc import Mapping
from typing import Any, TextIO

LONGEST = 4000  # characters that are shown of one text

_NO_BREAK = "\u00a0"

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def visible(text: str, *, keep: str = "") -> str:
    r"""Returns the text with control, format and unassigned characters written as `\x1b` or `\u202e`, cut to `LONGEST`.

    Args:
        keep: Characters that stay as they are, such as a line break.
    """
    if not text.isprintable():
        text = "".join(one if one.isprintable() or one in keep or _is_space(one) else ascii(one)[1:-1] for one in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def visible_values(value: Any) -> Any:
    """Returns a JSON value with all its text as `visible` shows it, but for line breaks, which stay."""
    if isinstance(value, str):
        return visible(value, keep="\n")
    if isinstance(value, Mapping):
        return {visible_values(name): visible_values(member) for name, member in value.items()}
    if isinstance(value, list | tuple) and not set(map(type, value)) <= {bool, float, int}:
        return [visible_values(member) for member in value]
    return value


def spreadsheet_cell(text: str) -> str:
    """Returns the text so that a spreadsheet takes it for text: with an apostrophe before it if it would be a formula."""
    return f"'{text}" if text[:1] in ("\t", "\r", "\n") or text.lstrip().startswith(_FORMULA) else text


def _is_space(one: str) -> bool:
    return unicodedata.category(one) == "Zs"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 trial, 2 trials."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ratio_text(ratio: float) -> str:
    """Formats a ratio of speeds with two decimals or, below 0.1, two significant digits: 12.30, 1.27, 0.0041."""
    return f"{ratio:.2f}" if ratio == 0 or abs(ratio) >= 0.1 else f"{ratio:.2g}"


def spoken_number(number: int) -> str:
    """Formats a number as people say it: 9,490 or 124 million."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def for_terminal(text: str, stream: TextIO | None) -> str:
    """Returns the text broken between words if the stream is a terminal, otherwise as it is."""
    if stream is None or not stream.isatty():
        return text
    return "\n".join(wrapped(text, shutil.get_terminal_size().columns))


def wrapped(text: str, width: int, hanging: int = 0) -> list[str]:
    """Returns the text in lines of this width, broken between words; a longer word, such as a path, stays whole.

    Args:
        hanging: How much further in a line goes on.
    """
    lines = []
    for line in text.replace(" %", f"{_NO_BREAK}%").splitlines() or [""]:
        indent = line[: len(line) - len(line.lstrip())] + " " * hanging
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [line]
    return [line.replace(_NO_BREAK, " ") for line in lines]
