"""Trials that cannot be told apart: drawn together on the front, and named in the list under it."""

from __future__ import annotations

from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.pareto import summary
from analysis.choose.uncertainty import chance
from analysis.figures import pareto_figure, pareto_info
from analysis.page.verdict import front_list
from compile_sweep.schema.record import TrialRecord

TIE = "cannot be told apart"


def close_trials() -> list[TrialRecord]:
    """Eager, two almost equal trials of which one is on the front, and one apart from them."""
    return [
        trial("scope=eager", 500, 0.1, trial_id="eager"),
        trial("scope=regional", 700, 20, trial_id="regional"),
        trial("scope=regional,optimizer=fused", 699, 20.3, trial_id="fused"),
        trial("scope=full", 900, 60, trial_id="full"),
    ]


def test_what_cannot_be_told_apart_is_a_group_led_by_the_most_probable(make_sweep: MakeSweep) -> None:
    info = pareto_info(analysis.load(make_sweep(close_trials())))
    assert [[point.trial_id for point in group] for group in info.ties] == [["regional", "fused"]]
    points = {point.trial_id: point for point in info.points}
    assert points["fused"].equal_to == "A2 regional, static"
    assert points["regional"].equal_to is None
    assert 0.05 < (points["fused"].front_probability or 0) < (points["regional"].front_probability or 0)
    assert points["full"].front_probability == 1.0
    assert not points["fused"].on_front


def test_the_chart_joins_them_and_the_hover_says_how_probable_each_is(make_sweep: MakeSweep) -> None:
    chart = pareto_figure(pareto_info(analysis.load(make_sweep(close_trials()))))
    (tie,) = (trace for trace in chart.data if trace.name == TIE)
    assert list(tie.x) == [20, 20.3, None]
    hovers = [text for trace in chart.data for text in trace.hovertext or ()]
    fused = next(text for text in hovers if "fused optimizer" in text).replace("<br>", " ")
    assert "may be on the front: " in fused
    assert "cannot be told apart from “A2 regional, static”" in fused
    assert any("on the front: over 99.8% probable" in text.replace("<br>", " ") for text in hovers)


def test_without_ties_nothing_is_joined(make_sweep: MakeSweep) -> None:
    records = [one for one in close_trials() if one.trial_id != "fused"]
    info = pareto_info(analysis.load(make_sweep(records)))
    assert info.ties == []
    assert TIE not in [trace.name for trace in pareto_figure(info).data]


def test_the_list_names_what_equals_each_member_and_what_else_may_be_on_the_front(make_sweep: MakeSweep) -> None:
    records = [*close_trials(), trial("scope=modular", 890, 57, trial_id="modular")]
    df = analysis.load(make_sweep(records))
    found = front_list(df, summary(df), analysis.uncertain_front(df).trials)
    names = [entry.setting_name for entry in found.entries]
    assert names == ["A1 eager", "A2 regional, static", "A5 modular, static", "A4 full, static"]
    assert [len(entry.equals) for entry in found.entries][:2] == [0, 1]
    assert found.entries[1].equals[0].startswith("A3 regional, static, fused optimizer (may be on the front: ")
    assert found.others == []


def test_a_long_group_is_cut_short_with_how_many_more(make_sweep: MakeSweep) -> None:
    twins = [
        trial(f"scope=regional,pad_multiple={n},dynamic=mark", 700 - 0.01 * n, 20, trial_id=f"twin-{n}") for n in range(1, 8)
    ]
    df = analysis.load(make_sweep([trial("scope=eager", 500, 0.1), *twins]))
    _, entry = front_list(df, summary(df), analysis.uncertain_front(df).trials).entries
    assert (len(entry.equals), entry.num_more_equals) == (4, 2)


def test_no_draws_make_anything_certain() -> None:
    assert [chance(share) for share in (1.0, 0.5, 0.0)] == ["over 99.8%", "50.0%", "under 0.2%"]
