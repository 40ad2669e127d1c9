"""One verdict: the end of a sweep, its report, `recommend` and `best.py` agree, for recorded sweeps."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from samples import REPOSITORY
from sweep_folders import MakeSweep, trial

import analysis
from analysis import export, recommend
from analysis.choose.decision import Outcome
from analysis.final_summary import Ending, ending
from analysis.formatting import percent
from compile_sweep.schema.outcome import Status

RESULTS = REPOSITORY / "docs" / "results"

SWEEPS = {
    Outcome.USE: "h100-resnet",
    Outcome.STAY: "h200-workloads/layers-inference",
    Outcome.UNCLEAR: "h100-gpt2-levers",
}
"""A recorded sweep for each outcome."""

STEPS = {Outcome.UNCLEAR: "1000"}
"""Length of the job; by default the usual one."""

BEGINNINGS = {
    Outcome.USE: "Use “A3 full, reduce-overhead, static, memory format channels_last”.",
    Outcome.STAY: "Stay with A1 (eager).",
    Outcome.UNCLEAR: "Cannot tell whether “A9 full, reduce-overhead, static” is faster than",
}


@pytest.fixture(params=SWEEPS)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    return Outcome(request.param)


@pytest.fixture
def folder(outcome: Outcome, tmp_path: Path) -> Path:
    copy = tmp_path / "sweep"
    copy.mkdir()
    for name in ("trials.jsonl", "sweep.json", "warm_starts.jsonl"):
        if (RESULTS / SWEEPS[outcome] / name).exists():
            shutil.copy(RESULTS / SWEEPS[outcome] / name, copy / name)
    return copy


def recommended(folder: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert recommend.main([str(folder), "--steps", steps]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_recommend_and_best_py_say_the_same(folder: Path, outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    steps = STEPS.get(outcome, "100000")
    said = recommended(folder, steps, capsys)
    assert said[0].startswith(BEGINNINGS[outcome])
    assert export.main([str(folder), "--only", "best", "--no-rerun", "--steps", steps]) == 0
    program = (folder / "best.py").read_text(encoding="utf-8")
    head = " ".join(re.findall(r"^# (.*)$", program, flags=re.MULTILINE))
    assert f"{said[0]} {said[1]}" in head
    assert json.loads((folder / "best.json").read_text(encoding="utf-8"))["because"][:2] == said[:2]


@pytest.mark.slow
def test_the_end_of_a_sweep_and_its_report_say_what_recommend_does(
    folder: Path, outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    first, why, *others = ending(folder).sentences
    assert recommended(folder, "100000", capsys)[: 2 + len(others)] == [first, why, *others]
    page = html.unescape(analysis.write_report(folder).read_text(encoding="utf-8"))
    assert f'<p class="lead">{first}</p>' in page
    assert f'<p class="finding">{" ".join([why, *others])}</p>' in page
    if outcome is not Outcome.UNCLEAR:  # it is unclear for a shorter job
        assert first.startswith(BEGINNINGS[outcome])


def test_what_would_tell_is_said_where_it_is_not_clear(capsys: pytest.CaptureFixture[str]) -> None:
    said = recommended(RESULTS / SWEEPS[Outcome.UNCLEAR], "1000", capsys)
    assert re.fullmatch(r"For 1,000 steps .*, it saves −0\.\d+ s to 12 s of 43 s \(95%\); .* is 95\.\d%\.", said[1])
    steps = re.match(r"What would tell: a job of ([\d,]+) steps or more, in which it certainly saves time; or ", said[2])
    assert steps
    longer = recommended(RESULTS / SWEEPS[Outcome.UNCLEAR], steps[1].replace(",", ""), capsys)
    assert longer[0] == "Use “A9 full, reduce-overhead, static”."


def test_only_settings_that_somebody_might_choose_are_named() -> None:
    named = {one.what: one for one in ending(RESULTS / "h200-captioning").named}
    assert set(named) == {"recommended", "cheapest that beats eager", "best eager", "today"}
    assert named["today"].saves == "—"
    assert named["best eager"].setting.startswith("A42 eager, ")
    assert [one.what for one in ending(RESULTS / SWEEPS[Outcome.STAY]).named] == ["best eager, today"]


def test_what_is_probably_slower_is_not_called_better_and_no_command_trains_with_it(make_sweep: MakeSweep) -> None:
    def ended(samples_per_s: float) -> Ending:
        wide = {"samples_per_s_ci95": [0.7 * samples_per_s, 1.3 * samples_per_s], "step_ms_ci95": [40.0, 80.0]}
        slower = trial("scope=full", samples_per_s, 1.0, trial_id="2", **wide)
        return ending(make_sweep([trial("scope=eager", 500, 0.5), slower], name=f"sweep-{samples_per_s}"))

    better, worse = ended(510), ended(490)
    assert (better.named[0].what, worse.named[0].what) == ("may be better", "not certainly slower")
    assert better.settings_key is not None
    assert worse.settings_key is None


def test_the_gain_of_a_script_that_waits_for_data_is_said_to_be_without_the_wait(make_sweep: MakeSweep) -> None:
    def said(share: float, pipeline: str) -> str:
        waits = {"data_wait_share": share, "pipeline": pipeline}
        faster = trial("scope=full", 900, 1.0, trial_id="2", **waits)
        eager = trial("scope=eager,as_written=on", 500, 0.0, **waits)
        return ending(make_sweep([eager, faster], name=f"{pipeline}-{share}")).sentences[-1]

    assert said(0.42, "script").startswith("Times are without the wait for data, which is 42% of a step")
    assert "wait for data" not in said(0.01, "script")
    assert "wait for data" not in said(0.42, "real")


def test_without_a_usable_trial_the_end_says_so(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text("")
    (tmp_path / "sweep.json").write_text("{}")
    found = ending(tmp_path)
    assert found.sentences == ["No trial has finished yet, so there is nothing to choose from."]
    assert (found.named, found.settings_key, found.is_known) == ([], None, False)


def test_a_sweep_that_tried_nothing_else_cannot_tell(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep([trial("scope=eager", 500, 0.5)])
    found = ending(folder)
    assert found.sentences[0] == "Cannot tell whether any setting is faster than A1 (eager)."
    assert "What would tell: " in found.sentences[1]
    assert [one.what for one in found.named] == ["best eager, today"]
    assert (found.settings_key, found.is_known) == (None, True)
    assert recommended(folder, "100000", capsys)[:2] == found.sentences
    page = html.unescape(analysis.write_report(folder).read_text(encoding="utf-8"))
    assert f'<p class="lead">{found.sentences[0]}</p>' in page


def test_where_no_other_setting_is_usable_the_baseline_stays(make_sweep: MakeSweep) -> None:
    failed = trial("scope=full", status=Status.INFEASIBLE, label="diverges", trial_id="2")
    assert ending(make_sweep([trial("scope=eager", 500, 0.5), failed])).sentences[:2] == [
        "Stay with A1 (eager).", "No other setting that was tried is both usable and faster.",
    ]  # fmt: skip


@pytest.mark.parametrize("label", ["node-lost", "exception"])  # such as a script that ends before a compiled trial is done
def test_where_every_other_trial_failed_the_end_cannot_tell(label: str, make_sweep: MakeSweep) -> None:
    failed = trial("scope=full", status=Status.FAILED, label=label, trial_id="2")
    first, why = ending(make_sweep([trial("scope=eager", 500, 0.5), failed])).sentences[:2]
    assert first == "Cannot tell whether any setting is faster than A1 (eager)."
    assert "its trial failed" in why


def test_a_script_that_compiles_itself_is_no_eager_setting(make_sweep: MakeSweep) -> None:
    own = trial("scope=eager,as_written=on", 500, 15.0, graphs=1)
    other = trial("scope=eager,optimizer=fused", 400, 0.5)
    named = {one.what: one for one in ending(make_sweep([own, other])).named}
    assert set(named) == {"cheapest that beats eager, today", "best eager"}
    assert named["cheapest that beats eager, today"].compile == "15 s"


def test_next_to_no_loss_is_zero_percent_without_a_minus(make_sweep: MakeSweep) -> None:
    wide = {"samples_per_s_ci95": [250.0, 750.0], "step_ms_ci95": [40.0, 80.0]}
    named = ending(make_sweep([trial("scope=eager", 500, 0.5), trial("scope=full", 499.9, 1.0, trial_id="2", **wide)])).named
    assert named[0].saves.startswith("0% (−")
    assert percent(-0.0004) == "0.0%"
