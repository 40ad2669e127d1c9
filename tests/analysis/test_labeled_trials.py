"""No silent winners: a labeled trial, however fast, is never a choice, and is shown separately with its reason."""

from __future__ import annotations

import re

import pytest
from sweep_folders import MakeSweep, trial, typical_trials

import analysis
from analysis.page.table import table
from analysis.table import markdown_table
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord

LABELS = {
    "nan": Status.INFEASIBLE,
    "diverges": Status.INFEASIBLE,
    "recompile-limit": Status.INFEASIBLE,
    "cudagraphs-skipped": Status.INFEASIBLE,
    "silent-fallback": Status.INFEASIBLE,
    "input-bound": Status.INFEASIBLE,
    "gpu-shared": Status.FAILED,
}
REASON = "what went wrong in this trial"


def labelled(label: str) -> list[TrialRecord]:
    """The typical sweep, and a labeled trial that would beat all of it in speed and compile time."""
    winner = trial(
        "scope=regional,mode=reduce-overhead,dynamic=mark", 5000, 0.001,
        trial_id="winner", status=LABELS[label], label=label, reason=REASON,
    )  # fmt: skip
    return [*typical_trials(), winner]


@pytest.fixture(params=LABELS)
def label(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_trial_would_win_without_its_label(make_sweep: MakeSweep) -> None:
    *others, winner = labelled("gpu-shared")
    found = analysis.summary(analysis.load(make_sweep([*others, trial(winner.settings_key, 5000, 0.001, trial_id="winner")])))
    assert found.best is not None
    assert found.best["trial_id"] == "winner"


def test_a_labelled_trial_is_no_choice(make_sweep: MakeSweep, label: str) -> None:
    df = analysis.load(make_sweep(labelled(label)))
    assert "winner" not in set(analysis.pareto_front(df)["trial_id"])
    found = analysis.summary(df)
    assert [choice["trial_id"] for choice in (found.best, found.knee) if choice is not None] == ["buckets", "regional-auto"]
    _, rows = table(df)
    assert len(rows) == found.counts[Status.OK] == 6


def test_a_labelled_eager_trial_is_no_baseline(make_sweep: MakeSweep, label: str) -> None:
    records = [
        trial("scope=eager,optimizer=fused", 900, 0, status=LABELS[label], label=label),
        trial("scope=eager", 500, 0),
        trial("scope=full", 800, 50),
    ]
    df = analysis.speedup_over_eager(analysis.load(make_sweep(records)))
    assert df["speedup_best_eager"].tolist()[1:] == df["speedup_same_padding"].tolist()[1:] == [1.0, 1.6]


@pytest.mark.slow
def test_they_are_listed_apart_with_their_reasons(make_sweep: MakeSweep) -> None:
    records = typical_trials()
    for number, label in enumerate(LABELS):
        fastest = {"trial_id": f"winner-{number}", "status": LABELS[label], "label": label, "reason": f"{REASON}: {label}"}
        settings = f"scope=regional,mode=reduce-overhead,dynamic=mark,pad_multiple={number + 2}"
        records.append(trial(settings, 5000, 0.001, **fastest))
    folder = make_sweep(records)
    page = re.sub(r"<(script|style)\b.*?</\1>", "", analysis.write_report(folder).read_text(), flags=re.DOTALL)
    apart = page[page.index("Unusable trials") :]
    before = re.sub(r'<details class="trial">.*?</details>', "", page[: page.index("Unusable trials")], flags=re.DOTALL)
    assert REASON not in before, "but in the trials' own folds"
    markdown = markdown_table(analysis.load(folder))
    for label, status in LABELS.items():
        assert re.search(rf'class="tag {status}">{status}</span> {label}</h4>', apart)
        assert f"{REASON}: {label}" in apart
        assert f"{status}: {label} |" in markdown


def test_it_is_hollow_in_the_chart_and_not_among_the_compile_times(make_sweep: MakeSweep, label: str) -> None:
    df = analysis.load(make_sweep(labelled(label)))
    figure = analysis.figures.pareto_figure(df)
    assert label in [annotation.text.replace("<br>", " ") for annotation in figure.layout.annotations]
    symbols = [symbol for trace in figure.data if trace.hovertext for symbol in trace.marker.symbol]
    assert sum(symbol.endswith("-open") for symbol in symbols) == 2  # this one, and the NaN of the typical sweep
    assert "winner" not in {bar.trial_id for bar in analysis.figures.compile_phases_info(df).bars}
