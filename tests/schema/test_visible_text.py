"""Characters that a terminal would interpret or a reader would not see are escaped; visible text is unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_sweep.schema.visible_text import LONGEST, ratio_text, spoken_number, spreadsheet_cell, visible, visible_values

TITLE = "\x1b]0;owned\x07"
FORMULA = "=cmd|' /C calc'!A0"
OBEYED = set("\x00\x07\x1b\x9b\u202e\u2066\u2028\ufeff")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, 30 µs × 2\u00a0GiB – 漢字 é", "plain words, 30 µs × 2\u00a0GiB – 漢字 é"),
        (TITLE, "\\x1b]0;owned\\x07"),
        ("a\x00b\u202ec\nd\te", "a\\x00b\\u202ec\\nd\\te"),
        ("\ud800", "\\ud800"),
        ("x" * (LONGEST + 1), "x" * LONGEST + "…"),
    ],
)
def test_what_is_obeyed_or_not_seen_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    kept = visible(text, keep="\n")
    assert visible_values({"a": [text, 1.5, {text: None}]}) == {"a": [kept, 1.5, {kept: None}]}


@given(st.text())
def test_no_text_keeps_a_control_character_and_what_is_visible_stays(text: str) -> None:
    seen = visible(text)
    assert not OBEYED.intersection(seen)
    assert visible(seen) == seen
    assert not text.isprintable() or seen == text


@pytest.mark.parametrize("text", [FORMULA, "+1", "-1+1", "@SUM(A1)", "\t=1", "\n=1", " =1", "＝1", "＠x"])
def test_a_formula_is_text_in_a_spreadsheet(text: str) -> None:
    assert spreadsheet_cell(text) == f"'{text}"
    assert spreadsheet_cell(f"a{text}") == f"a{text}"


@pytest.mark.parametrize(
    ("number", "text"), [(2_890, "2,890"), (999_999, "999,999"), (28_300_000, "28.3 million"), (1_500_000_000, "1.5 billion")]
)
def test_a_number_is_formatted_as_people_say_it(number: int, text: str) -> None:
    assert spoken_number(number) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(12.3, "12.30"), (1.274, "1.27"), (0.1, "0.10"), (0.0412, "0.041"), (0.004149, "0.0041"), (0.0, "0.00")]
)
def test_a_ratio_that_is_not_zero_is_not_shown_as_zero(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text
