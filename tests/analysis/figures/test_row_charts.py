"""What the charts with a row per setting, the timeline and the parallel coordinates show, tested by their info."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sweep_folders import MakeSweep, trial, typical_trials, warm_start

import analysis
from analysis.figures import (
    break_even_info,
    cache_figure,
    cache_info,
    effects_figure,
    effects_info,
    memory_figure,
    memory_info,
    parallel_figure,
    parallel_info,
    region_prices_info,
    step_times_figure,
    step_times_info,
    timeline_figure,
    timeline_info,
)
from analysis.figures.timeline import Pause
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, append

HOSTILE = "<img src=x>"


def test_step_times_are_those_of_usable_trials_the_quickest_on_top(make_sweep: MakeSweep) -> None:
    info = step_times_info(analysis.load(make_sweep()))
    assert [row.trial_id for row in info.rows] == [
        "buckets", "regional-auto", "full", "regional", "eager-longest", "eager-max",
    ]  # fmt: skip
    assert info.num_left_out == 0
    assert {row.num_steps for row in info.rows} == {4}


def test_of_many_steps_the_least_and_the_longest_are_drawn(make_sweep: MakeSweep) -> None:
    steps = [100.0 + place for place in range(1000)]
    (row,) = step_times_info(analysis.load(make_sweep([trial("scope=full", 600, 50, step_ms=steps)]))).rows
    assert (row.drawn_ms[0], row.drawn_ms[-1], row.num_steps) == (100.0, 1099.0, 1000)
    assert len(row.drawn_ms) == 160
    assert row.quartiles_ms == pytest.approx((349.75, 599.5, 849.25))


def test_a_box_says_the_interval_of_its_median(make_sweep: MakeSweep) -> None:
    figure = step_times_figure(step_times_info(analysis.load(make_sweep([trial("scope=full", 640, 50)]))))
    hovers = [trace.hovertext for trace in figure.data if trace.type == "box"]
    assert len(hovers) == 1
    assert "step 100 ms (95%: 99.8–100.2)" in hovers[0]


def test_memory_ascends_and_leaves_room_for_the_device(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 900, 50, peak_memory_bytes=30 * 2**30, cudagraph_pool_bytes=5 * 2**30),
        trial("scope=regional", 800, 20, peak_memory_bytes=20 * 2**30),
    ]
    info = memory_info(analysis.load(make_sweep(records)), 140 * 2**30)
    assert [bar.peak_bytes / 2**30 for bar in info.bars] == [20, 30]
    figure = memory_figure(info)
    assert figure.layout.xaxis.range[1] > 140
    pool = next(trace for trace in figure.data if trace.name == "CUDA-graph pool")
    assert (list(pool.x), list(pool.y)) == ([5.0], [1])
    assert "21% of the device" in figure.data[0].hovertext[1]


def test_a_setting_that_is_not_usable_cold_is_in_no_row_for_its_warm_trial(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 900, 6, caches=Caches.WARM, trial_id="warm"),
        trial("scope=full", status=Status.INFEASIBLE, label="diverges", trial_id="cold"),
        trial("scope=regional", 800, 5, caches=Caches.WARM, trial_id="warm only"),
        trial("scope=modular", 700, 50),
    ]
    df = analysis.load(make_sweep(records))
    names = ["A2 regional, static", "A3 modular, static"]
    assert sorted(bar.setting_name for bar in memory_info(df).bars) == sorted(names)
    assert sorted(row.setting_name for row in step_times_info(df).rows) == sorted(names)
    assert sorted(line.setting_name for line in parallel_info(df).lines) == sorted(names)


def test_trials_side_by_side_have_lanes_of_their_own(make_sweep: MakeSweep) -> None:
    def at(second: int, name: str, **fields: object) -> TrialRecord:
        return trial(
            f"scope=full,dynamic=mark,pad_multiple={second + 1}", 640, 20, trial_id=name, wall_s=60.0,
            started_at=f"2026-11-21T09:00:{second:02d}+00:00", **fields,
        )  # fmt: skip

    records = [at(0, "first"), at(5, "beside"), at(59, "after the first"), at(58, "two workers", num_workers=2)]
    info = timeline_info(analysis.load(make_sweep(records)))
    assert {span.trial_id: span.lanes for span in info.spans} == {
        "first": (0,), "beside": (1,), "two workers": (2, 3), "after the first": (0,),
    }  # fmt: skip
    assert info.lane_names == ["1", "2", "3", "4"]
    parts = info.spans[0].parts_s
    assert parts == pytest.approx({"other": 60 - 21 - 0.613333, "warming-up": 21.0, "steady": 0.613333}, abs=1e-3)
    assert info.busy == pytest.approx(300 / (4 * 119))


def test_a_trial_that_says_what_its_seconds_went_to_is_drawn_by_its_phases(make_sweep: MakeSweep) -> None:
    phases_s = {"starting": 1.0, "building": 2.0, "warming-up": 30.0, "steady": 5.0, "checking": 1.5, "done": 0.5}
    records = [trial("scope=full", 640, 20, wall_s=40.0, phases_s=phases_s, started_at="2026-11-21T09:00:00+00:00")]
    info = timeline_info(analysis.load(make_sweep(records)))
    assert info.spans[0].parts_s == phases_s
    assert (info.compiling, info.measuring) == pytest.approx((0.75, 0.875))
    assert [trace.name for trace in timeline_figure(info).data][-1] == "publishing, ending"


def test_a_trial_is_on_the_lanes_of_its_gpus_and_one_that_names_none_where_there_is_room(make_sweep: MakeSweep) -> None:
    def at(second: int, name: str, gpus: list[str], **fields: object) -> TrialRecord:
        return trial(
            f"scope=full,dynamic=mark,pad_multiple={second + 1}", 640, 20, trial_id=name, wall_s=20.0, gpus=gpus,
            started_at=f"2026-11-21T09:00:{second:02d}+00:00", **fields,
        )  # fmt: skip

    records = [
        at(0, "on ten", ["node:10"]),
        at(1, "on two", ["node:2"]),
        at(2, "never came up", []),
        at(25, "on both", ["node:10", "node:2"], num_workers=2),
        at(46, "nowhere", []),
    ]
    info = timeline_info(analysis.load(make_sweep(records)))
    assert {span.trial_id: span.lanes for span in info.spans} == {
        "on ten": (1,), "on two": (0,), "never came up": (2,), "on both": (0, 1), "nowhere": (2,),
    }  # fmt: skip
    assert info.lane_names == ["2", "10", "other"]
    axis = timeline_figure(info).layout.yaxis
    assert (axis.title.text, list(axis.ticktext)) == ("GPU", ["2", "10", "other"])


def test_long_pauses_are_cut_out_of_the_time_line(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 500, 0, trial_id="first", wall_s=100.0, gpus=["a:0"], started_at="2026-11-21T09:00:00+00:00"),
        trial("scope=full", 640, 20, trial_id="soon", wall_s=100.0, gpus=["a:0"], started_at="2026-11-21T09:01:50+00:00"),
        trial("scope=regional", 600, 20, trial_id="next day", wall_s=90.0, gpus=[], started_at="2026-11-22T09:00:00+00:00"),
    ]
    info = timeline_info(analysis.load(make_sweep(records)))
    assert info.pauses == [Pause(210.0, 86400.0 - 210.0)]
    assert info.busy == pytest.approx(290 / 300)
    assert info.num_gpus == 1
    figure = timeline_figure(info)
    assert max(max(trace.base) for trace in figure.data) < 300 / 60
    assert [shape.x0 for shape in figure.layout.shapes] == [210 / 60]


def test_lanes_of_several_hosts_say_which(make_sweep: MakeSweep) -> None:
    began = {"started_at": "2026-11-21T09:00:00+00:00", "wall_s": 60.0}
    records = [trial("scope=full", 640, 20, gpus=["b:0"], **began), trial("scope=eager", 600, 0, gpus=["a:1"], **began)]
    assert timeline_info(analysis.load(make_sweep(records))).lane_names == ["a:1", "b:0"]


def test_a_trial_without_figures_is_lost_time_and_one_without_a_start_is_left_out(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", status=Status.FAILED, label="worker-died", wall_s=30.0, started_at="2026-11-21T09:00:00+00:00"),
        trial("scope=regional", 640, 20),
    ]
    info = timeline_info(analysis.load(make_sweep(records)))
    assert [(span.parts_s, span.outcome) for span in info.spans] == [({"lost": 30.0}, "worker-died")]
    assert info.num_left_out == 1
    assert [trace.name for trace in timeline_figure(info).data] == ["ended without a figure"]


def test_parallel_coordinates_have_an_axis_for_what_differs(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full,optimizer=fused", 900, 100),
        trial("scope=regional,optimizer=fused", 800, 10),
        trial("scope=modular,optimizer=fused", 700, 1),
    ]
    info = parallel_info(analysis.load(make_sweep(records)))
    assert [axis.column for axis in info.axes] == ["scope", "compile_s", "peak_memory_bytes", "samples_per_s"]
    places = {line.setting_name: line.places for line in info.lines}
    assert places["A2 regional, static, fused optimizer"] == pytest.approx([1.0, 0.5, 0.5, 0.5])  # seconds by decades
    names = [note.name for note in parallel_figure(info).layout.annotations if note.name]
    assert names == ["scope=full", "scope=modular", "scope=regional"]


def test_parallel_coordinates_have_an_axis_for_an_option_of_the_workload(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full,batch_size=64", 900, 100),
        trial("scope=full,batch_size=8", 800, 10),
        trial("scope=full", 700, 1),
    ]
    info = parallel_info(analysis.load(make_sweep(records)))
    (axis,) = (axis for axis in info.axes if axis.is_choice)
    assert (axis.column, axis.title) == ("workload.batch_size", "batch size")
    assert [words for _, words in axis.ticks] == ["usual", "8", "64"]
    names = [note.name for note in parallel_figure(info).layout.annotations if note.name]
    assert names == ["workload.batch_size=8", "workload.batch_size=64"]  # as the filter finds them in a setting's key


def test_parallel_coordinates_place_a_warm_trial_by_its_estimate(make_sweep: MakeSweep) -> None:
    warm = trial("scope=full,optimizer=fused", 950, 5, caches=Caches.WARM, cold_equivalent_s=100.0)
    info = parallel_info(analysis.load(make_sweep([trial("scope=full", 900, 100), trial("scope=regional", 800, 10), warm])))
    axis = [axis.column for axis in info.axes].index("compile_s")
    places = {line.setting_name: line.places[axis] for line in info.lines}
    assert places["A3 full, static, fused optimizer"] == places["A1 full, static"] == 1
    assert places["A2 regional, static"] == 0
    said = {line.setting_name: line.figures.split(", ")[1] for line in info.lines}
    assert said["A3 full, static, fused optimizer"] == "≈ 100 s compile"
    assert said["A1 full, static"] == "100 s compile"


def test_long_titles_of_axes_have_a_line_for_each_word(make_sweep: MakeSweep) -> None:
    records = [trial("scope=full", 900, 100), trial("scope=full,shape_padding=off", 890, 90)]
    chart = parallel_figure(parallel_info(analysis.load(make_sweep(records))))
    titles = [note.text for note in chart.layout.annotations if note.text.startswith("<b>")]
    assert titles == ["<b>shape<br>padding</b>", "<b>compile s</b>", "<b>peak GiB</b>", "<b>samples/s</b>"]


def test_parallel_coordinates_need_two_settings(make_sweep: MakeSweep) -> None:
    figure = parallel_figure(parallel_info(analysis.load(make_sweep([trial("scope=full", 900, 100)]))))
    assert "no two settings" in figure.layout.annotations[0].text


def test_caches_compare_a_cold_compile_with_a_warm_start(make_sweep: MakeSweep) -> None:
    found = {"restore_s": 2.0, "cache_hits": 30, "cache_misses": 10, "cache_saved_s": 80.0}
    records = [
        trial("scope=full", 900, 100, trial_id="cold"),
        trial("scope=full", 900, 7, trial_id="warm", caches=Caches.WARM, **found),
        trial("scope=regional", 700, 30, trial_id="other"),
        trial("scope=modular", 600, 30, trial_id="never started warm"),
    ]
    folder = make_sweep(records)
    steps_s = 10 * 64 / 700  # of the warm-up, cold or warm
    start = {"restore_s": 1.5, "load_s": 8.0, "warmup_steps": 10, "warmup_s": 2.5 + steps_s}
    append(folder, replace(warm_start("scope=regional", 12.0 + steps_s), **start))
    info = cache_info(analysis.load(folder))
    assert [(row.cold_s, row.warm_s, row.hits, row.hit_share) for row in info.rows] == [
        (100.0, 9.0, 30.0, 0.75), (30.0, pytest.approx(4.0), None, None),
    ]  # fmt: skip
    hover = cache_figure(info).data[0].hovertext[0]
    assert "30 hits, 10 misses (75.0% hit)" in hover
    assert cache_figure(info).layout.xaxis.title.text == "seconds of restoring and compiling"
    assert cache_info(analysis.load(folder).iloc[:0]).rows == []


def test_caches_save_what_break_even_reckons_with(make_sweep: MakeSweep) -> None:
    """This holds even if a whole warm start, with loading and steps, takes longer than compiling cold."""
    folder = make_sweep([trial("scope=full", 300, 3.3), trial("scope=eager", 250, 0.3)])
    append(folder, replace(warm_start("scope=full", 8.0), restore_s=0.5, load_s=4.0, warmup_s=0.5 + 10 * 64 / 300))
    df = analysis.load(folder)
    (row,) = cache_info(df).rows
    reckoned = next(setting for setting in break_even_info(df).settings if setting.label == row.setting_name)
    assert (row.cold_s, row.warm_s) == (reckoned.cold_s, pytest.approx(reckoned.warm_s)) == (3.3, pytest.approx(1.0))
    name = cache_figure(cache_info(df)).layout.annotations[0].text.replace("\u00a0", " ")
    assert "3.30× quicker" in name


def test_a_start_that_compiles_longer_than_cold_is_slower(make_sweep: MakeSweep) -> None:
    records = [trial("scope=full", 300, 4), trial("scope=full", 300, 5, caches=Caches.WARM, trial_id="warm")]
    (name,) = cache_figure(cache_info(analysis.load(make_sweep(records)))).layout.annotations
    assert "1.25× slower" in name.text.replace("\u00a0", " ")


def test_a_warm_trial_alone_shows_its_estimate(make_sweep: MakeSweep) -> None:
    warm = trial("scope=full", 900, 7, caches=Caches.WARM, restore_s=2.0, cold_equivalent_s=95.0)
    (row,) = cache_info(analysis.load(make_sweep([warm]))).rows
    assert (row.cold_s, row.is_estimate, row.warm_s) == (95.0, True, 9.0)


def test_effects_say_what_a_change_is_worth(make_sweep: MakeSweep) -> None:
    records = [
        trial(f"scope={scope},optimizer={optimizer}{window}", 600 if optimizer == "fused" else 500, 60 if scope == "full" else 15)
        for scope in ("full", "regional", "modular")
        for optimizer in ("foreach", "fused")
        for window in ("", ",group_window=100")
    ]  # fmt: skip
    df = analysis.load(make_sweep(records))
    first = effects_info(df).effects[0]
    assert (first.name, first.before, first.after) == ("optimizer", "foreach", "fused")
    figure = effects_figure(effects_info(df))
    names = [note.text.replace("\u00a0", " ") for note in figure.layout.annotations]
    assert "optimizer: foreach → fused · <b>+20.0" in names[0]
    assert any(name.startswith("group_window: not set → 100 ·") for name in names)


def test_an_interval_of_two_pairs_that_disagree_leaves_the_bars_their_room(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 500, 60), trial("scope=full,optimizer=fused", 550, 60),
        trial("scope=regional", 480, 15), trial("scope=regional,optimizer=fused", 620, 15),
    ]  # fmt: skip
    info = effects_info(analysis.load(make_sweep(records)))
    optimizer = next(one for one in info.effects if one.name == "optimizer")
    assert optimizer.rate.high > 1.5
    low, high = effects_figure(info).layout.xaxis.range
    values = [0.0, *(100 * one.rate.value for one in info.effects)]
    assert low < min(values) < max(values) < high < 3 * max(values)


def test_parts_have_prices_from_modular_trials_alone(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 800, 90),
        trial("scope=full,optimizer=fused", 880, 90),
        trial("scope=modular", 700, 60),
        trial("scope=modular,parts.encoder.mode=reduce-overhead", 770, 75),
    ]
    (effect,) = region_prices_info(analysis.load(make_sweep(records))).effects
    assert effect.name == "parts.encoder"
    assert effect.rate.value == pytest.approx(0.1)
    assert effect.compile_s is not None
    assert effect.compile_s.value == pytest.approx(15)


@pytest.mark.parametrize("draw", ["steps", "memory", "timeline", "parallel", "caches"])
def test_text_of_a_record_is_never_mark_up(make_sweep: MakeSweep, draw: str) -> None:
    records = [*typical_trials(), trial("scope=full", 800, 5, caches=Caches.WARM)]
    df = analysis.load(make_sweep([*records]))
    df["setting_name"] = df["trial_id"] = HOSTILE
    df["gpus"] = [[f"{HOSTILE}:0"]] * len(df)
    df["wall_s"] = 100.0
    df["started_at"] = "2026-11-21T09:00:00+00:00"
    df["started_at"] = df["started_at"].astype("datetime64[us, UTC]")
    figure = {
        "steps": lambda: step_times_figure(step_times_info(df)),
        "memory": lambda: memory_figure(memory_info(df)),
        "timeline": lambda: timeline_figure(timeline_info(df)),
        "parallel": lambda: parallel_figure(parallel_info(df)),
        "caches": lambda: cache_figure(cache_info(df)),
    }[draw]()
    text = str(figure.to_plotly_json())
    assert "&lt;img" in text
    assert "<img" not in text
