"""The verdict says no more than was measured."""

from __future__ import annotations

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.load import SweepInfo
from analysis.verdict import cautions, verdict
from orchestrator.records import Caches, Status, TrialRecord


def judge(make_sweep: MakeSweep, records: list[TrialRecord] | None = None) -> str:
    df = analysis.load(make_sweep(records))
    return " ".join(verdict(df, analysis.summary(df)))


def test_the_best_setting_its_gain_and_its_cost_come_first(make_sweep: MakeSweep) -> None:
    words = judge(make_sweep)
    assert words.startswith("The fastest setting is “full, default, buckets of 32, compiled optimizer”, at 1,046 samples/s")
    assert "1.50× the best eager setting" in words
    assert "440 s of cold compiling; that is paid back after about 22 min" in words
    assert "The knee of the front is “regional, default, auto”" in words


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "No trial has finished yet"),
        ([trial("scope=full", status=Status.FAILED, label="oom")], "of 1, 0 infeasible and 1 failed. The most"),
        ([trial("scope=full", 700, 50)], "nothing to compare it with"),
        ([trial("scope=full", 700, 50), trial("scope=regional", 650, 9)], "no eager trial is usable"),
        ([trial("scope=eager", 700, 0), trial("scope=full", 650, 50)], "No compiled setting beats eager"),
        ([trial("scope=eager", 700, 0), trial("scope=eager,padding=longest", 650, 0)], "None of the compiled settings"),
        ([trial("scope=eager", 700, 0), trial("scope=full", 705, 50)], "may be noise"),
    ],
)  # fmt: skip
def test_less_is_said_where_less_is_known(make_sweep: MakeSweep, records: list[TrialRecord], said: str) -> None:
    assert said in judge(make_sweep, records)


def test_what_speaks_against_the_figures_is_said(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 700, 50, environment_key="a"),
        trial("scope=eager", 700, 50, environment_key="b", caches=Caches.WARM, num_workers=2),
    ]
    df = analysis.load(make_sweep(records))
    sweep = SweepInfo(planned=("x",), environment={"gpu": None}, config={"max_concurrent": 4})
    notes = " ".join(cautions(df, sweep))
    for expected in (
        "1 of 1 planned",
        "2 different environments",
        "numbers of workers",
        "processor",
        "4 trials",
        "warm",
    ):
        assert expected in notes
    assert cautions(df[:1], SweepInfo()) == []
