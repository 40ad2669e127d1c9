"""The help of every command: every option once, the common ones first, and no names that only Python uses."""

from __future__ import annotations

from collections import Counter

import pytest

from compile_sweep import command_line
from compile_sweep.command_help import help_text
from orchestrator.check import Options as CheckOptions
from orchestrator.config import SweepCommand


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def flags_in(text: str) -> Counter[str]:
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    return Counter(line.split()[0].rstrip(",") for line in lines)


def test_the_short_help_fits_a_screen_and_names_the_way_to_the_rest() -> None:
    text = help_text(SweepCommand, "x", all_options=False)
    assert len(flags_in(text)) == len(SweepCommand.HELP_GROUPS["common options"]) <= 12
    assert text.count("\n") <= 40
    assert text.endswith(" more options: x --help-all\n")


def test_the_whole_help_has_every_option_once() -> None:
    assert flags_in(help_text(SweepCommand, "x", all_options=True)) == Counter(command_line.flags(SweepCommand).values())


@pytest.mark.parametrize("options", [SweepCommand, CheckOptions])
@pytest.mark.parametrize("all_options", [True, False])
def test_nothing_is_called_none_or_false(options: type, all_options: bool) -> None:
    text = help_text(options, "x", all_options=all_options)
    assert "None" not in text
    assert "False" not in text
    assert max(map(len, text.splitlines())) <= 102
