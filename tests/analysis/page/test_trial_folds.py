"""The fold of each trial in a report, for readers who want all details."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.page import trial_folds as module
from analysis.page.trial_folds import trial_folds


def test_a_fold_says_all_of_a_trial_and_shows_the_end_of_its_log(make_sweep: MakeSweep) -> None:
    folder = make_sweep(
        [
            trial("scope=eager", 500, 0),
            trial(
                "scope=full", 900, 60, trial_id="002-full", source="compiled = torch.compile(model)", graphs=1, graph_breaks=1,
                graph_break_reasons=["print at model.py:7"], recompiles=30,
                recompile_reasons=[f"guard {number} failed" for number in range(30)], phases_s={"starting": 2.0, "checking": 0.0},
                step_ms=[10.0, 11.0, 12.0, 30.0],
            ),
            trial("scope=regional", status="failed", label="exception", reason="it raised"),
        ]
    )  # fmt: skip
    logs = folder / "logs" / "002-full"
    logs.mkdir(parents=True)
    (logs / "worker-0.log").write_text("first\n" * 500 + "\x1b[31mlast hf_" + "a" * 34 + "\n")
    (fold,) = (one for one in trial_folds(folder, analysis.load(folder)) if "full" in one.setting_name)
    facts, lists = dict(fold.facts), dict(fold.lists)
    assert fold.code == "compiled = torch.compile(model)"
    assert facts["graphs"] == "1 graph, 1 break, 30 recompiles"
    assert facts["phases"] == "starting 2.0 s"
    assert "4 steps: " in facts["steps"]
    assert "10.0 to 30.0 ms in all" in facts["steps"]
    assert lists["graph breaks"] == ["print at model.py:7"]
    assert lists["recompiles"][-1] == "and 10 more"
    assert fold.log == "logs/002-full/worker-0.log"
    first, *_, last = fold.log_end.splitlines()
    assert (first, last) == ("first", r"\x1b[31mlast ***")


def test_the_front_comes_first_and_failures_last(make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_sweep(
        [
            trial("scope=regional", status="failed", label="exception", reason="it raised"),
            trial("scope=eager", 500, 0),
            trial("scope=modular", 700, 90),
            trial("scope=full", 900, 60),
        ]
    )
    df = analysis.load(folder)
    folds = trial_folds(folder, df)
    assert [fold.on_front for fold in folds] == [True, True, False, False]
    assert folds[-1].outcome == "failed exception"
    assert folds[-1].reason == "it raised"
    monkeypatch.setattr(module, "MOST_FOLDS", 2)
    assert trial_folds(folder, df) == folds[:2]


@pytest.mark.slow
def test_the_page_holds_the_folds_without_a_script(make_sweep: MakeSweep) -> None:
    records = [trial("scope=full", 900, 60, source="a < b  # <script>")]
    records += [trial(f"scope=regional,dynamic=buckets,bucket_size={size}", status="failed", label="exception", reason="raised")
                for size in (8, 16, 32, 64, 128)]  # fmt: skip
    page = Path(analysis.write_report(make_sweep(records))).read_text(encoding="utf-8")
    assert page.count('<details class="trial') == 6
    assert "a &lt; b  # &lt;script&gt;" in page
    assert "<summary>2 more with this label</summary>" in page
