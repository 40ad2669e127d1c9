from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from benchmarks.search.fronts_of_sweeps import fronts_figure, fronts_info, share_at
from benchmarks.search.live_search import main
from compile_sweep.schema.outcome import Status

BEGAN = "2026-11-21T09:00:00+00:00"


def after(minutes: int, settings: str, rate: float | None, compile_s: float | None, **fields: Any) -> Any:
    """A trial of one minute that ended this many minutes after its sweep began."""
    return trial(settings, rate, compile_s, started_at=f"2026-11-21T09:{minutes - 1:02}:00+00:00", wall_s=60.0, **fields)


FOUND_ALL = [
    after(1, "scope=eager,padding=max", 100, 0.0),
    after(3, "scope=full", 300, 10.0),
    after(2, "scope=regional", 200, 5.0),
]
FOUND_LESS = [
    after(1, "scope=eager,padding=max", 100, 0.0),
    after(2, "scope=full,mode=max-autotune", status=Status.INFEASIBLE, label="compile-deadline", rate=None, compile_s=None),
    after(4, "scope=regional", 180, 6.0),
]


def made(make_sweep: MakeSweep, **sweeps: list[Any]) -> dict[str, Path]:
    config = {"workload": "captioning", "size": "tiny", "time_budget_s": 240.0}
    return {
        name: make_sweep(records, name=name, started_at=BEGAN, config=config | {"search": {"searcher": name}})
        for name, records in sweeps.items()
    }


def info_of(folders: dict[str, Path]) -> Any:
    return fronts_info({name: (analysis.load(folder), BEGAN) for name, folder in folders.items()}, title="a <b>")


def test_each_sweep_is_measured_by_what_all_found_together(make_sweep: MakeSweep) -> None:
    gain, random = info_of(made(make_sweep, gain=FOUND_ALL, random=FOUND_LESS)).lines
    assert [second for second, _ in gain.reached] == [60, 120, 180], "in the order they ended"
    assert gain.reached[-1][1] == pytest.approx(100)
    assert random.reached[-1][1] < gain.reached[1][1] < 100
    assert (gain.num_trials, gain.on_common_front, len(gain.points)) == (3, 3, 3)
    assert (random.num_trials, random.on_common_front, len(random.points)) == (3, 1, 2), "eager is equal in both"
    assert [point.label for point in gain.points if point.on_front] == [point.label for point in gain.points]
    assert share_at(gain, 59) == 0
    assert share_at(gain, 179) == gain.reached[1][1]


def test_the_volume_is_that_of_two_boxes_counted_by_hand(make_sweep: MakeSweep) -> None:
    ends = [after(1, "scope=eager,padding=max", 100, 0.0), after(2, "scope=full", 200, 10.0)]
    (line,) = info_of(made(make_sweep, gain=ends)).lines
    # The reference is a tenth of the ranges beyond the worst: 90 samples/s and 11 s.
    alone, both = (100 - 90) * 11, (100 - 90) * 11 + (200 - 100) * (11 - 10)
    assert [share for _, share in line.reached] == pytest.approx([100 * alone / both, 100])


def test_the_chart_tells_sweeps_apart_without_colours_and_escapes_names(make_sweep: MakeSweep) -> None:
    chart = fronts_figure(info_of(made(make_sweep, gain=FOUND_ALL, random=FOUND_LESS)))
    lines = [trace for trace in chart.data if trace.mode == "lines" and trace.showlegend is not False]
    assert [trace.name for trace in lines] == ["gain", "random"]
    assert lines[0].line.dash != lines[1].line.dash
    assert len({trace.marker.symbol for trace in chart.data if trace.mode == "markers"}) == 2
    assert "a &lt;b&gt;" in chart.layout.title.text
    against_time = [trace for trace in chart.data if trace.xaxis == "x2"]
    assert [trace.x[-1] for trace in against_time] == [240, 240], "until the last trial ended, whoever's it was"
    hostile = fronts_info({"<script>": (analysis.load(made(make_sweep, other=FOUND_ALL)["other"]), BEGAN)})
    assert "<script>" not in fronts_figure(hostile).to_json()


def test_a_noisy_trial_is_where_it_was_measured_and_the_front_passes_its_low_end(make_sweep: MakeSweep) -> None:
    noisy = after(2, "scope=full", 200, 10.0, stable=False, samples_per_s_ci95=(150.0, 260.0))
    chart = fronts_figure(info_of(made(make_sweep, gain=[after(1, "scope=eager,padding=max", 100, 0.0), noisy])))
    front, markers, reached = chart.data
    assert list(front.y) == [100, 150]
    assert list(markers.y) == [100, 200]
    assert list(reached.y)[-1] == pytest.approx(100)


def test_sweeps_with_one_searcher_are_told_apart_by_their_folders(make_sweep: MakeSweep, tmp_path: Path) -> None:
    config = {"search": {"searcher": "gain"}, "time_budget_s": 240.0}
    folders = [make_sweep(FOUND_ALL, name=name, config=config, started_at=BEGAN) for name in ("before", "now")]
    assert compared(*folders, "--output", tmp_path / "live.json") == 0
    assert [one["name"] for one in json.loads((tmp_path / "live.json").read_text())["sweeps"]] == ["before", "now"]


def test_a_sweep_without_a_usable_trial_is_drawn_beside_others_and_alone_is_said(make_sweep: MakeSweep) -> None:
    folders = made(make_sweep, gain=FOUND_ALL, random=FOUND_LESS[1:2])
    gain, random = info_of(folders).lines
    assert (len(gain.points), random.points, random.reached) == (3, [], [])
    assert len(fronts_figure(info_of(folders)).data) == 6
    assert "No sweep has a usable trial" in fronts_figure(info_of({"random": folders["random"]})).layout.annotations[0].text


def compared(*words: str | Path) -> int:
    return main(list(map(str, words)))


def test_the_benchmark_prints_a_row_a_sweep_and_writes_its_figures(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = made(make_sweep, gain=FOUND_ALL, random=FOUND_LESS)
    assert compared(*folders.values(), "--output", tmp_path / "live.json") == 0
    printed = capsys.readouterr().out.splitlines()
    assert "240 s" in printed[0]
    gain, random = (next(line.split() for line in printed if line.startswith(name)) for name in ("gain", "random"))
    assert gain[1:5] == ["3", "3", "3", "300"]
    assert (gain[-1], random[-1]) == ("180", "—")
    written = json.loads((tmp_path / "live.json").read_text())
    assert [one["name"] for one in written["sweeps"]] == ["gain", "random"]
    assert written["sweeps"][0]["hypervolume_percent"]["1.0"] == pytest.approx(100)


def test_sweeps_that_differ_in_more_than_the_searcher_are_refused(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = made(make_sweep, gain=FOUND_ALL)
    config = {"workload": "captioning", "size": "base", "time_budget_s": 240.0}
    other = make_sweep(FOUND_LESS, name="other", config=config)
    elsewhere = make_sweep(FOUND_LESS, name="elsewhere", environment_key="xyz")
    small = {**config, "size": "tiny"}
    loading = make_sweep(FOUND_LESS, name="loading", config={**small, "pipeline": "real"})
    asking = make_sweep(FOUND_LESS, name="asking", config={**small, "settings": ["scope=eager"]})
    alike = make_sweep(FOUND_LESS, name="alike", config=small)
    output = ("--output", tmp_path / "live.json")
    for given, words in (
        ((folders["gain"], other), "has size tiny"),
        ((folders["gain"], elsewhere), "different environments"),
        ((alike, loading), "has pipeline None and"),
        ((alike, asking), "searched different settings"),
        ((folders["gain"],), "two or more"),
        ((folders["gain"], tmp_path / "none"), "there is no folder"),
    ):
        assert compared(*given, *output) == 2
        complaint = capsys.readouterr().err
        assert words in complaint
        assert complaint.count("\n") == 1
    assert not (tmp_path / "live.json").exists()


@pytest.mark.parametrize("began", ["", "yesterday"])
def test_sweeps_that_do_not_say_when_they_began_have_fronts_and_no_times(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], tmp_path: Path, began: str
) -> None:
    folders = [make_sweep(found, name=str(len(found)), started_at=began) for found in (FOUND_ALL, FOUND_ALL[:2])]
    assert compared(*folders, "--output", tmp_path / "live.json") == 0
    assert capsys.readouterr().err == ""
    written = json.loads((tmp_path / "live.json").read_text())
    assert [(one["on_common_front"], one["reached"], one["to_goal_s"]) for one in written["sweeps"]] == [
        (3, [], None),
        (2, [], None),
    ]
