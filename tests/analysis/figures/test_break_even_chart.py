"""The chart of what a job takes: settings, their baseline, and where the lines cross."""

from __future__ import annotations

import pytest
from sweep_folders import MakeSweep, trial, warm_start

import analysis
from analysis.figures import break_even_data, break_even_figure, break_even_info
from compile_sweep.schema.record import Caches, TrialRecord, append


def test_lines_are_multiples_of_what_is_run_today(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 500, 0.0),
        trial("scope=eager,padding=longest", 640, 0.0),
        trial("scope=full,dynamic=mark", 1280, 100),
    ]
    info = break_even_info(analysis.load(make_sweep(records)))
    assert info.baseline is not None
    assert info.settings[info.baseline].label == "A2 eager, pad to longest ×8"
    assert info.samples_per_step == 64
    compiled, eager = (line for line in break_even_figure(info).data if line.visible)
    assert list(eager.y) == pytest.approx([1.0] * len(eager.y))
    assert compiled.x[0] == pytest.approx(100)
    assert compiled.y[0] == pytest.approx((100 + 100 * 0.05) / (100 * 0.1))
    assert compiled.y[-1] == pytest.approx(0.5, abs=0.001)


def test_settings_that_never_win_are_not_drawn_but_torch_compile_as_it_comes_is(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 500, 0.0),
        trial("scope=full", 600, 60),
        trial("scope=regional,dynamic=mark", 900, 10),
        trial("scope=modular", 550, 90),
    ]
    lines = break_even_figure(break_even_info(analysis.load(make_sweep(records)))).data
    names = [line.name for line in lines if line.visible]
    assert len(lines) == 4
    assert names == ["A3 regional, mark", "A2 full, static", "A1 eager"]


def test_a_page_gets_warm_starts_only_where_they_were_measured(make_sweep: MakeSweep) -> None:
    folder = make_sweep([trial("scope=eager", 500, 0.0), trial("scope=full", 600, 60), trial("scope=modular", 700, 60)])
    assert break_even_data(break_even_info(analysis.load(folder)))["has_warm"] is False
    append(folder, warm_start("scope=full", 14.0, warmup_s=12.0, warmup_steps=10))
    data = break_even_data(break_even_info(analysis.load(folder)))
    assert data["has_warm"] is True
    warm = {one["label"]: one["warm_s"] for one in data["settings"]}
    assert warm["A3 modular, static"] is None
    assert 0 < warm["A2 full, static"] < 60


@pytest.mark.parametrize(
    "records", [[], [trial("scope=full", 600, 60, step_ms=[])], [trial("scope=full", 600, 60, caches=Caches.WARM)]]
)
def test_without_step_times_there_is_nothing_to_reckon(make_sweep: MakeSweep, records: list[TrialRecord]) -> None:
    info = break_even_info(analysis.load(make_sweep(records)))
    assert info.settings == []
    assert "No usable trial" in break_even_figure(info).layout.annotations[0].text
