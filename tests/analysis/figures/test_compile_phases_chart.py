"""The bars of compile time, tested by their info."""

from __future__ import annotations

import pandas as pd
import pytest
from sweep_folders import MakeSweep, trial, typical_trials

import analysis
from analysis.columns import COMPILE_PHASES
from analysis.figures import compile_phases_figure, compile_phases_info
from analysis.figures.chart_style import PHASE_COLORS
from compile_sweep.schema.record import Caches, TrialRecord


def test_usable_compiled_trials_have_a_bar_the_quickest_on_top(make_sweep: MakeSweep) -> None:
    info = compile_phases_info(analysis.load(make_sweep()))
    assert [(bar.trial_id, bar.on_front) for bar in info.bars] == [
        ("regional", True),
        ("regional-auto", True),
        ("full", False),
        ("buckets", True),
    ]
    assert info.phases == [phase for phase in COMPILE_PHASES if phase != "autotuning"]  # the missing phase took no time
    figure = compile_phases_figure(info)
    assert [trace.name for trace in figure.data] == [COMPILE_PHASES[phase].title for phase in info.phases]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # place 0 is on top
    assert [note.text.startswith("★") for note in figure.layout.annotations] == [True, True, False, True]


def test_the_parts_of_a_bar_reach_its_compile_time(make_sweep: MakeSweep) -> None:
    info = compile_phases_info(analysis.load(make_sweep()))
    figure = compile_phases_figure(info)
    reach = [0.0] * len(info.bars)
    for trace in figure.data:
        for place, seconds in zip(trace.y, trace.x, strict=True):
            reach[place] += seconds
    assert reach == pytest.approx([bar.compile_s for bar in info.bars])


def test_a_part_says_its_seconds_its_share_and_what_it_is(make_sweep: MakeSweep) -> None:
    figure = compile_phases_figure(compile_phases_info(analysis.load(make_sweep([trial("scope=full", 700, 50)]))))
    hover = next(trace.hovertext[0] for trace in figure.data if trace.name == "Inductor")
    assert hover.startswith("Inductor: 17.0 s, 34% of 50.0 s<br>graph passes")
    assert hover.endswith("<br>A1 full, static")


def test_what_a_phase_lacks_is_left_out_and_not_drawn_as_nothing(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 700, 50, compile_phases_s={"dynamo": 20.0, "autotuning": 0.0, "other": 30.0}),
        trial("scope=regional", 700, 9, compile_phases_s={"inductor": 9.0}),
    ]
    figure = compile_phases_figure(compile_phases_info(analysis.load(make_sweep(records))))
    assert {trace.name: list(trace.y) for trace in figure.data} == {"Dynamo": [1], "Inductor": [0], "other": [1]}


def test_with_many_trials_the_front_stays_and_the_fastest_of_the_others(make_sweep: MakeSweep) -> None:
    records = [trial("scope=regional", 100, 1, trial_id="slow but quick to compile")]
    records += [trial(f"scope=full,dynamic=mark,pad_multiple={n}", 500 + n, 50 + n, trial_id=str(n)) for n in range(1, 9)]
    records += [trial(f"scope=full,dynamic=auto,pad_multiple={n}", 200 + n, 90, trial_id=f"beaten {n}") for n in range(1, 31)]
    info = compile_phases_info(analysis.load(make_sweep(records)))
    assert len(info.bars) == 14
    assert info.num_left_out == 25
    assert {bar.trial_id for bar in info.bars if bar.on_front} == {"slow but quick to compile", *map(str, range(1, 9))}
    assert {bar.trial_id for bar in info.bars if not bar.on_front} == {f"beaten {n}" for n in range(26, 31)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "records",
    [
        [],
        [trial("scope=eager", 500, 1.0)],
        [trial("scope=full", 700, 50, compile_phases_s={})],
        [trial("scope=full", 700, 50, caches=Caches.WARM)],
    ],
)
def test_without_phases_there_are_no_bars_and_no_section(make_sweep: MakeSweep, records: list[TrialRecord]) -> None:
    folder = make_sweep(records)
    info = compile_phases_info(analysis.load(folder))
    assert info.bars == []
    assert "No usable trial" in compile_phases_figure(info).layout.annotations[0].text
    assert "Where the compile time goes" not in analysis.write_report(folder).read_text()


@pytest.mark.slow
def test_the_report_shows_the_bars_below_the_front_and_above_the_table(make_sweep: MakeSweep) -> None:
    page = analysis.write_report(make_sweep()).read_text()
    places = [
        page.index(words)
        for words in ("On the front, by cold compile time</h4>", "Where the compile time goes</h3>", "Usable trials</h3>")
    ]
    assert places == sorted(places)


def test_text_of_a_record_is_never_mark_up_in_the_bars(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep(typical_trials()))
    df["setting_name"] = pd.Series(["<b>x</b>"] * len(df), dtype="string")
    figure = compile_phases_figure(compile_phases_info(df))
    texts = [note.text for note in figure.layout.annotations] + [text for trace in figure.data for text in trace.hovertext]
    assert texts
    assert all("&lt;b&gt;x" in text and "<b>x" not in text for text in texts)


def test_every_phase_has_a_colour_of_its_own() -> None:
    assert PHASE_COLORS.keys() == COMPILE_PHASES.keys()
    assert len(set(PHASE_COLORS.values())) == len(PHASE_COLORS)


@pytest.mark.parametrize("paper", ["#ffffff", "#14171c"])
def test_every_phase_is_told_from_a_light_and_from_a_dark_page(paper: str) -> None:
    def luminance(color: str) -> float:
        """Relative luminance, as defined in WCAG 2.2."""
        shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for color in PHASE_COLORS.values():
        dark, light = sorted((luminance(color), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= 3, color
