"""Memory by batch size: in the report's chart, in a trial's fold, and in the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.break_even import Job
from analysis.figures import batch_memory_figure, batch_memory_info
from analysis.page.trial_folds import trial_folds
from analysis.recommend import recommend, verdict

GIB = 2**30
EAGER_PEAKS = {"96": 18.0 * GIB, "192": 35.0 * GIB, "384": 69.0 * GIB, "480": None, "432": 77.5 * GIB}
FULL_PEAKS = {"96": 14.0 * GIB, "192": 27.0 * GIB, "544": 77.0 * GIB, "576": None}


@pytest.fixture
def folder(make_sweep: MakeSweep) -> Path:
    """A sweep with the memory of two settings; a third was not asked for it, and one failed."""
    return make_sweep(
        [
            trial("scope=eager", 500, 0, batch_peak_bytes=EAGER_PEAKS),
            trial("scope=full", 900, 60, batch_peak_bytes=FULL_PEAKS),
            trial("scope=regional", 800, 20),
            trial("scope=modular", status="failed", label="exception", reason="it raised"),
        ]
    )


def test_the_chart_has_a_line_per_setting_and_a_cross_for_what_did_not_fit(folder: Path) -> None:
    info = batch_memory_info(analysis.load(folder), 80 * GIB)
    assert [curve.setting_id for curve in info.curves] == ["A2", "A1"]
    assert info.curves[1].fitting == [(96, 18.0 * GIB), (192, 35.0 * GIB), (384, 69.0 * GIB), (432, 77.5 * GIB)]
    assert [curve.too_large for curve in info.curves] == [[576], [480]]
    chart = batch_memory_figure(info)
    assert [list(trace.y) for trace in chart.data if trace.mode == "markers"] == [[80.0], [80.0]]
    assert [trace.name for trace in chart.data if trace.mode != "markers"] == ["A2 full", "A1 eager"]
    assert max(max(trace.x) for trace in chart.data) == 576 < chart.layout.xaxis.range[1]


def test_a_sweep_that_did_not_look_has_no_chart(make_sweep: MakeSweep) -> None:
    folder = make_sweep([trial("scope=eager", 500, 0), trial("scope=full", 900, 60)])
    assert batch_memory_info(analysis.load(folder)).curves == []
    assert "Memory by batch size" not in Path(analysis.write_report(folder)).read_text(encoding="utf-8")


def test_a_setting_under_which_nothing_fits_is_drawn(make_sweep: MakeSweep) -> None:
    info = batch_memory_info(analysis.load(make_sweep([trial("scope=full", 900, 60, batch_peak_bytes={"1": None})])))
    assert info.curves[0].too_large == [1]
    assert [list(trace.x) for trace in batch_memory_figure(info).data] == [[], [1]]


@pytest.mark.slow
def test_the_fold_and_the_verdict_say_how_large_a_batch_may_be(folder: Path) -> None:
    df = analysis.load(folder)
    (fold,) = (fold for fold in trial_folds(folder, df) if "A2" in fold.setting_name)
    assert dict(fold.facts)["batches"].startswith(
        "the largest batch that fits: 544, 8.5 times 64 (memory by batch size: 96 14.00"
    )
    assert verdict(recommend(df, Job(steps=100_000)))[-1] == "Batches of up to 544 samples fit the device's memory with it."
    assert "Memory by batch size" in Path(analysis.write_report(folder)).read_text(encoding="utf-8")
