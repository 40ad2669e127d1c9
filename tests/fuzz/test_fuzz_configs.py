"""Untrusted command lines and descriptions of a sweep to resume: exit code 0 or 2, one sentence, nothing started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fuzzing import HOSTILE, TRIED_EXTREMES, nothing_runs, numbers, spliced, texts, thoroughly, values
from hypothesis import given
from hypothesis import strategies as st

from compile_sweep.schema.errors import CompileSweepError
from compile_sweep.schema.record import SWEEP_FILE
from compile_sweep.schema.settings import CompileSettings
from orchestrator import sweep
from orchestrator.config import CachePolicy, Device, SearchConfig, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.run import sweep_folder
from orchestrator.run.stages import Stages

HARMLESS = ("exec", "compile", "import", "marshal.loads", "code.__new__")
"""Side effects of parsing options, importing the workload and printing a plan."""

SETTINGS = tuple(map(CompileSettings.parse, ("scope=eager", "scope=full", "scope=regional,dynamic=mark")))
WORKLOAD = "toy_workloads:Toy"
OPTIONS = [
    "--num-trials",
    "--size",
    "--seed",
    "--device",
    "--pipeline",
    "--max-concurrent",
    "--starts",
    "--workers-per-trial",
    "--time-budget-s",
    "--compile-deadline-s",
    "--trial-deadline-s",
    "--gpu-budget-s",
    "--searcher",
    "--objective",
    "--constraint",
    "--stop",
    "--prune",
    "--learn-from",
    "--vary",
    "--settings",
    "--cache-store",
    "--no-confirm",
    "--precompile",
    "--resume",
    "--learn-anyway",
    "--placement",
    "--no-warm-start",
]
PROPER = [
    "1",
    "2",
    "0",
    "-1",
    "cpu",
    "only",
    "resident",
    "cold",
    "shared",
    "gain",
    "on",
    "scope=full",
    "scope=eager",
    "dynamic=auto",
    "compile_s<=120",
    "samples_per_s:max",
    "front stable for 2 trials",
    "quickstart",
    "grid",
    "none",
    "redis://:secret@h:1",
    "group_window=1,2",
]


def typed(text: str) -> bool:
    """Tells whether a shell could pass the text to a program that then prints it."""
    return "\0" not in text and text.isprintable()


words = st.lists(
    st.sampled_from(OPTIONS) | st.sampled_from(PROPER) | spliced(PROPER).filter(typed) | texts.filter(typed), max_size=6
)


@pytest.fixture(autouse=True)
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Changes to an empty folder, where anything that would start a sweep fails."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(Stages, "run", lambda *arguments: pytest.fail("the sweep was started"))
    without = replace(fingerprint(), gpu=None, num_gpus=0)
    monkeypatch.setattr(sweep, "fingerprint", lambda: without)
    import_what_plans_need()
    yield
    assert list((tmp_path / "here").iterdir()) == []


@cache
def import_what_plans_need() -> None:
    """Imports all that a plan loads on demand, because the guard reports imports."""
    assert sweep.main(["--dry-run", "--workload", WORKLOAD]) == 0


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what the command prints on stderr, nothing or one sentence."""
    sys.path[:] = list(dict.fromkeys(sys.path))  # the command adds the working folder
    capsys.readouterr()
    with nothing_runs(but=HARMLESS):
        try:
            code = sweep.main(arguments)
        except SystemExit as stop:  # of --help
            code = int(stop.code or 0)
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert len(said.splitlines()) == (code == 2), said
    assert said.rstrip("\n").isprintable()
    return said


@thoroughly
@given(words)
def test_any_words_make_a_plan_or_one_sentence(capsys: pytest.CaptureFixture[str], given_words: list[str]) -> None:
    said = ran(capsys, "--dry-run", "--workload", WORKLOAD, *given_words)
    assert "secret" not in said


@thoroughly
@given(
    st.sampled_from([option for option in OPTIONS if not option.startswith("--no")]),
    texts.filter(typed) | st.sampled_from(PROPER),
)
def test_any_value_of_any_option_makes_a_plan_or_one_sentence(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    ran(capsys, "--dry-run", "--workload", WORKLOAD, option, value)
    ran(capsys, "--dry-run", "--workload", WORKLOAD, f"{option}={value}")


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("--no")])
def test_an_extreme_number_for_an_option_makes_a_plan_or_one_sentence(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in TRIED_EXTREMES:
        ran(capsys, "--dry-run", "--workload", WORKLOAD, f"{option}={number}")


@pytest.mark.parametrize("text", [text for text in HOSTILE if typed(text)])
def test_a_hostile_workload_is_refused_and_not_run(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (text, f"{text}:Workload", f"toy_workloads:{text}"):
        if name != "None":  # None represents the default
            assert ran(capsys, "--dry-run", f"--workload={name}").startswith("error: ")


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Creates the folder of a sweep to resume."""
    config = SweepConfig(recipe="quickstart", workload=WORKLOAD, size="only", settings=SETTINGS, device=Device.CPU)
    sweep_folder.begin(tmp_path / "theirs", config, replace(fingerprint(), gpu=None, num_gpus=0), None)
    return tmp_path / "theirs"


FIELDS = sorted(SweepConfig(recipe="r", workload=WORKLOAD, size="only", settings=SETTINGS).to_dict())
OF_SEARCH = sorted(SearchConfig().__dataclass_fields__)
worth = values | numbers | st.sampled_from(PROPER) | st.lists(st.sampled_from(PROPER) | texts, max_size=3)


def took_up(capsys: pytest.CaptureFixture[str], begun: Path, edits: dict[str, Any], search: dict[str, Any] | None = None) -> None:
    """Plans the sweep with these edits in its folder."""
    described = json.loads((begun / SWEEP_FILE).read_text())
    config = {**described["config"], **edits}
    if search is not None:
        config["search"] = {**described["config"]["search"], **search}
    if isinstance(config.get("workload"), str) and config["workload"] != WORKLOAD:
        config["workload"] = f"no_such_module.{config['workload']}"  # resuming imports the module that the folder names
    if "://" in str(config.get("storage")):
        config["storage"] = None
    before = (begun / SWEEP_FILE).read_bytes()
    (begun / SWEEP_FILE).write_text(json.dumps({**described, "config": config}), encoding="utf-8", errors="replace")
    try:
        ran(capsys, "--resume", "--output", str(begun), "--dry-run")
    finally:
        (begun / SWEEP_FILE).write_bytes(before)


@thoroughly
@given(
    st.dictionaries(st.sampled_from(FIELDS) | texts, worth, max_size=3),
    st.none() | st.dictionaries(st.sampled_from(OF_SEARCH) | texts, worth, max_size=3),
)
def test_any_description_of_a_sweep_to_resume_makes_a_plan_or_one_sentence(
    capsys: pytest.CaptureFixture[str], begun: Path, edits: dict[str, Any], search: dict[str, Any] | None
) -> None:
    took_up(capsys, begun, edits, search)


@pytest.mark.parametrize("name", FIELDS)
def test_an_extreme_number_in_a_description_makes_a_plan_or_one_sentence(
    name: str, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in TRIED_EXTREMES:
        took_up(capsys, begun, {name: number})


@pytest.mark.parametrize("name", OF_SEARCH)
def test_an_extreme_number_in_the_description_of_a_search_makes_a_plan_or_one_sentence(
    name: str, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in TRIED_EXTREMES:
        for searcher in (None, "tpe"):
            took_up(capsys, begun, {}, {"searcher": searcher, name: number})


@thoroughly
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(),
            "workers_per_trial": st.integers(),
            "max_concurrent": st.integers(),
            "time_budget_s": st.none() | st.floats(),
            "compile_deadline_s": st.floats(),
            "trial_deadline_s": st.floats(),
            "caches": st.sampled_from(list(CachePolicy)),
            "device": st.sampled_from(list(Device)),
            "cache": st.none() | texts,
            "precompile": st.booleans(),
            "recipe": texts,
            "size": texts,
            "settings": st.just(()) | st.just(SETTINGS),
        },
    )
)
def test_any_values_are_a_configuration_or_one_sentence(given_fields: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"recipe": "r", "workload": WORKLOAD, "size": "only", "settings": SETTINGS}
    with nothing_runs():
        try:
            found = SweepConfig(**{**usual, **given_fields})
        except CompileSweepError:
            return
        json.dumps(found.to_dict(), allow_nan=False)


def test_nothing_is_left_of_a_password_in_any_complaint(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("redis://:planted@h:1", "redis://:pl@nted@h:1", "s3://key:pla/nted@bucket/x", "redis://h:1?password=planted"):
        for given_words in (
            ["--cache-store", address],
            [f"--cach={address}"],
            ["--cach", address],
            [address],
            ["--settings", address],
            ["--cache-store", address, "--precompile"],
            ["--cache-store", address, "--num-trials", "0"],
            ["--output", address],
            ["--workload", address],
            ["--size", address],
            ["--vary", address],
            ["--learn-from", address],
            ["--storage", address, "--num-trials", "0"],
            ["--log-to", address],
            ["--seed", address],
        ):
            said = ran(capsys, "--dry-run", "--workload", WORKLOAD, *given_words)
            assert "nted" not in said, said
    assert os.listdir() == []
