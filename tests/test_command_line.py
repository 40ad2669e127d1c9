"""Command lines: valid ones are parsed, and every mistake gives one sentence."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from compile_sweep.command_line import UsageError, flags, optional_output, parse, parse_known, run
from compile_sweep.schema.errors import CompileSweepError, ConfigError, SettingsError

PROG = "python -m orchestrator.sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Of another matter."""

    how_often: Annotated[tuple[str, ...], tyro.conf.arg(name="often")] = ()
    """Times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Find it."""

    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """What to do."""
    num_trials: int | None = None
    """At most this many."""
    time_budget_s: float | None = None
    """Seconds."""
    output: Path | None = None
    """Where."""
    resume: bool = False
    """Go on."""
    named: tuple[str, ...] = ()
    """Which."""
    inner: Inner = Inner()


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as refusal:
        parse(Options, PROG, words)
    sentence = str(refusal.value)
    assert len(sentence.splitlines()) == 1
    assert not set(sentence) & set("╭╮╰╯│─")
    return sentence


def test_no_words_give_the_defaults() -> None:
    assert parse(Options, PROG, []) == Options()


def test_words_that_fit_are_read() -> None:
    words = ["captioning", "--num-trials", "3", "--time-budget-s", "60", "--output", "a/b", "--resume"]
    expected = Options(recipe="captioning", num_trials=3, time_budget_s=60.0, output=Path("a/b"), resume=True)
    assert parse(Options, PROG, words) == expected


def test_an_option_of_several_values_may_be_given_more_than_once() -> None:
    words = ["--named", "a", "b", "--num-trials", "3", "--often=1", "--named=c", "--often", "2", "4"]
    expected = Options(num_trials=3, named=("a", "b", "c"), inner=Inner(how_often=("1", "2", "4")))
    assert parse(Options, PROG, words) == expected


@pytest.mark.parametrize("words", [("--named",), ("--often", "--resume"), ("--resume", "--named")])
def test_an_option_of_several_values_needs_one(words: tuple[str, ...]) -> None:
    assert "has no value; give one or more, or leave it out" in refused(*words)


def test_what_is_not_given_is_as_in_the_default() -> None:
    default = Options(num_trials=7, named=("a",), inner=Inner(how_often=("1",)))
    assert parse(Options, PROG, ["--often", "2"], default=default) == Options(
        num_trials=7, named=("a",), inner=Inner(how_often=("2",))
    )


def test_options_of_a_class_are_found_among_others() -> None:
    assert parse_known(Inner, PROG, ["quickstart", "--num-trials", "many", "--often", "2", "--bogus"]) == Inner(how_often=("2",))


def test_the_word_of_each_option_is_known() -> None:
    assert flags(Options)["num_trials"] == "--num-trials"
    assert flags(Options)["how_often"] == "--often"
    assert "recipe" not in flags(Options)


def test_help_prints_every_option_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Options, PROG, ["--help"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for option in (PROG, "--num-trials", "--time-budget-s", "--output", "--resume", "Find it.", "At most this many."):
        assert option in captured.out


@pytest.mark.parametrize("columns", ["30", "80", "200"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-trails", "3"], "no option or argument '--num-trails'; did you mean --num-trials?"),
        (["--bogus"], f"no option or argument '--bogus'; see {PROG} --help"),
        (["-x"], f"no option or argument '-x'; see {PROG} --help"),
        (["quickstart", "extra"], f"no option or argument 'extra'; see {PROG} --help"),
        (["quickstart", "--wrong", "1", "--also", "2"], f"no option or argument '--wrong'; see {PROG} --help"),
        (["--num-trials", "many"], "--num-trials cannot be 'many'; give a whole number"),
        (["--num-trials", "3.5"], "--num-trials cannot be '3.5'; give a whole number"),
        (["--num-trials", ""], "--num-trials cannot be ''; give a whole number"),
        (["--num-trials", "a\nb"], "--num-trials cannot be 'a\\nb'; give a whole number"),
        (["--time-budget-s", "10m"], "--time-budget-s cannot be '10m'; give a number of seconds"),
    ],
)
def test_a_mistake_is_one_sentence_however_wide_the_terminal(
    words: list[str], sentence: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert refused(*words) == sentence


def test_an_option_without_its_value_is_named() -> None:
    assert "--output" in refused("--output")


def test_a_value_in_brackets_is_named_whole() -> None:
    assert refused("--num-trials", "[3]").startswith("--num-trials cannot be '[3]';")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-trails", "3"], "no option or argument '--num-trails'; did you mean --num-trials?"),
        (["--num-trials", "many"], "--num-trials cannot be 'many'; give a whole number"),
        (["--output"], "--output has no value; give one, or leave it out"),
        (["--output", ""], "--output has no value; give one, or leave it out"),
        (["--output="], "--output has no value; give one, or leave it out"),
    ],
)
def test_a_mistake_is_the_same_sentence_where_stdout_can_show_no_frame(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert refused(*words) == sentence


def test_a_mistake_prints_nothing_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    refused("--bogus")
    assert capsys.readouterr() == ("", "")


def test_a_command_that_works_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: 130) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [UsageError("no option 'x'"), ConfigError("no recipe 'y'"), SettingsError("no setting 'z'")])
def test_a_users_mistake_is_one_line_on_stderr_and_exit_code_2(
    error: CompileSweepError, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert run(command) == 2
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise ConfigError("importing mine failed: ImportError: first\n  second\u2028third")

    assert run(command) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert "second" in captured.err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_cannot_show_is_spelled_out(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> int:
        print("report: Σ")
        raise ConfigError("no folder Σ")

    shown = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, buffer in shown.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(buffer, encoding=encoding, errors="strict", write_through=True))
    assert run(command) == 2
    assert shown["stdout"].getvalue() == rb"report: \u03a3" + b"\n"
    assert shown["stderr"].getvalue() == rb"error: no folder \u03a3" + b"\n"


def test_a_stream_that_has_no_encoding_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run(lambda: 0) == 0


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_output_that_is_optional_may_fail_in_every_way(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = io.StringIO()
    gone.close()
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        for stream in (None, gone, full):
            monkeypatch.setattr(sys, closed, stream)
            with optional_output():
                print("said", file=getattr(sys, closed), flush=True)
                print("said again", file=getattr(sys, closed))
            assert getattr(sys, closed) is stream


def test_a_folder_that_was_removed_under_a_command_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run(lambda: len(os.getcwd())) == 2
    assert capsys.readouterr().err == "error: the current folder does not exist any more; change to one that does\n"


def test_a_fault_of_ours_is_not_hidden() -> None:
    def command() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(command)
