"""The project's own proposer, and its predictions."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from recorded_tables import TARGET, recorded, rows_of, settings_of_a_grid, write_sweep

from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search import Candidates, Outlook, Searcher
from orchestrator.search.gain_search import DESIGNED, GainPerSecond, designed, good_elsewhere
from orchestrator.search.surrogate import Posterior, Scale, likeness
from orchestrator.search.tables import read_table
from orchestrator.simulate import Ground, replays

AIMS = Aims.parse()


def test_it_begins_with_eager_known_good_ones_and_such_as_show_most_a_second() -> None:
    candidates = Candidates(settings_of_a_grid(100))
    guessed_s = [1.0 if s.scope is Scope.REGIONAL else 5.0 for s in candidates.settings]
    good = [candidates.settings[50], CompileSettings.parse("scope=full,autocast=fp16"), candidates.settings[0]]
    assert good[2].scope is Scope.EAGER
    places = list(designed(candidates, guessed_s, good, seed=1))
    first = [candidates.settings[place] for place in places]
    assert [s.scope for s in first[:2]] == [Scope.EAGER, Scope.EAGER]
    assert {s.padding for s in first[:2]} == {"max", "longest"}
    assert first[2] == good[0], "known good ones that are not candidates are left out, and eager ones"
    assert Scope.EAGER not in {s.scope for s in first[2:]}
    assert len(set(places)) == len(places) == DESIGNED
    shown = [set(enumerate(candidates.codes[place])) for place in places]
    for number, place in enumerate(places[3:], start=3):
        met = set().union(*shown[:number])
        values = {index: len(set(enumerate(candidates.codes[index])) - met) / guessed_s[index] for index in range(100)}
        assert values[place] == max(values.values()) > 0


def test_it_begins_with_no_more_when_nothing_is_new() -> None:
    candidates = Candidates([CompileSettings.parse(key) for key in ("scope=eager", "scope=eager,optimizer=fused")])
    assert list(designed(candidates, [1.0, 1.0])) == [0, 1]
    assert list(designed(Candidates(candidates.settings[:1]), [1.0])) == [0]


def test_what_is_known_from_a_workload_is_no_news_to_itself() -> None:
    good = {"a base": ["scope=full"], "b tiny": ["scope=regional"]}
    assert [s.scope for s in good_elsewhere("a base", good)] == [Scope.REGIONAL]
    assert len(good_elsewhere("my.module:Mine large")) > len(good_elsewhere("captioning base"))


UNRELATED = (np.diag([1.0, 1.0, 0.0]),) * 3
"""The likeness of two values in each of three fields, and of an unknown one."""


def test_likeness_falls_with_every_field_that_differs() -> None:
    codes = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1], [-1, 0, 0]], dtype=np.int32)
    (one,) = likeness(codes[:1], codes, UNRELATED)
    assert one[0] == 1.0
    assert list(one[:4]) == sorted(one[:4], reverse=True)
    assert one[4] < 1, "an unknown value is like no other"
    assert np.linalg.eigvalsh(likeness(codes[:4], codes[:4], UNRELATED)).min() > 0


def test_numbers_are_alike_by_how_few_others_lie_between_them() -> None:
    sizes = [64, 16, 32, 128]
    keys = ["scope=full", *(f"scope=full,workload.size={size},workload.kind={size % 3}" for size in sizes)]
    candidates = Candidates([CompileSettings.parse(key) for key in keys])
    of_size = candidates.likeness[candidates.names.index("workload.size")]
    usual, *codes = candidates.codes[:, candidates.names.index("workload.size")]
    assert candidates.values[candidates.names.index("workload.size")] == ("", "64", "16", "32", "128")
    to_16 = dict(zip(sizes, of_size[codes[1], codes], strict=True))
    assert 1 == to_16[16] > to_16[32] > to_16[64] > to_16[128] > 0
    assert not of_size[usual, codes].any(), "the workload's own size is no number"
    assert not of_size[-1].any(), "an unknown value is like no other"
    of_kind = candidates.likeness[candidates.names.index("workload.kind")]
    assert np.array_equal(of_kind[:-1, :-1], np.eye(3)), "two numbers have no order worth knowing"
    alike = likeness(candidates.codes, candidates.codes, candidates.likeness)
    assert np.linalg.eigvalsh(alike).min() > 0


def test_predictions_agree_with_what_was_seen_and_are_unsure_elsewhere() -> None:
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.int32)
    figures = np.array([100.0, 200.0, 300.0])
    scale = Scale.of(figures)
    known, cross = (likeness(codes[:3], others, UNRELATED[:2]) for others in (codes[:3], codes))
    posterior = Posterior(known, cross, np.ones(3, dtype=bool))
    predicted = scale.figures(posterior.mean(scale.modelled(figures)))
    assert predicted[:3] == pytest.approx(figures, rel=0.02)
    assert predicted[3] > 300, "each field's effect is expected under the other's value"
    assert posterior.deviation[3] > 5 * posterior.deviation[:3].max()


@pytest.mark.parametrize("figures", [[0.0, 0.0], [-3.0, 0.0, 5.0], [1e10, 2e10], [7.0]])
def test_any_figures_have_a_scale(figures: list[float]) -> None:
    scale = Scale.of(np.array(figures))
    assert scale.figures(scale.modelled(np.array(figures))) == pytest.approx(figures)


def test_a_setting_like_one_under_way_promises_less_news() -> None:
    settings = settings_of_a_grid(40)
    candidates, rows = Candidates(settings), rows_of(recorded(settings))
    outlook = Outlook(candidates, AIMS, TARGET)
    for row in list(rows.values())[:8]:
        outlook.tell(row)
    asked = np.arange(8, 40)
    before = outlook.expected(asked).gains
    under_way = int(asked[before.argmax()])
    outlook.begin(candidates.settings[under_way])
    assert outlook.expected(asked).gains.max() < before.max()


def test_the_time_of_a_trial_is_learnt_from_records() -> None:
    settings = settings_of_a_grid(64)
    candidates, rows = Candidates(settings), rows_of(recorded(settings))
    outlook = Outlook(candidates, AIMS, TARGET)
    for key in candidates.keys[:32]:
        outlook.tell(rows[key])
    expected = outlook.expected(np.arange(32, 64)).wall_s
    true = np.array([rows[key]["wall_s"] for key in candidates.keys[32:]])
    assert np.median(np.abs(np.log(expected / true))) < 0.25
    guess = np.array(outlook.guessed_s[32:])
    assert np.median(np.abs(np.log(expected / true))) < np.median(np.abs(np.log(guess / true)))


def test_what_was_not_tried_is_known_to_compile_longer_by_its_graphs_and_mode() -> None:
    cheap = ("scope=eager", "scope=regional", "scope=regional,optimizer=fused")
    dear = ("scope=full,mode=max-autotune", "scope=full,dynamic=buckets,buckets=64/128/192/256", "scope=full,dynamic=true")
    candidates = Candidates([CompileSettings.parse(text) for text in (*cheap, *dear)])
    outlook = Outlook(candidates, Aims.parse(["samples_per_s:max"], ["compile_s<=40"]), TARGET)
    for key, compile_s in zip(candidates.keys, (1.0, 10.0), strict=False):
        figures = {"samples_per_s": 900.0, "compile_s": compile_s, "wall_s": 60.0 + compile_s}
        outlook.tell({"settings_key": key, "status": "ok", **figures})
    expected = outlook.expected(np.arange(2, 6))
    assert expected.wall_s[0] < 100, "what trials took is the measure"
    assert (expected.wall_s[1:] > 1.3 * expected.wall_s[0]).all()
    assert (expected.gains[1:] < 0.5 * expected.gains[0]).all(), "they hardly keep to the seconds allowed"


def test_a_constraint_keeps_it_from_what_would_break_it() -> None:
    settings = settings_of_a_grid(64)
    candidates, rows = Candidates(settings), rows_of(recorded(settings))
    outlook = Outlook(candidates, Aims.parse(["samples_per_s:max"], ["compile_s<=40"]), TARGET)
    for key in candidates.keys[:24]:
        outlook.tell(rows[key])
    gains = outlook.expected(np.arange(24, 64)).gains
    scopes = np.array([candidates.settings[index].scope for index in range(24, 64)])
    assert gains[scopes == "regional"].max() > 3 * gains[scopes == "full"].max()


def test_what_is_left_to_gain_falls_to_nothing_and_its_bound_is_one() -> None:
    settings = settings_of_a_grid(40)
    rows = rows_of(recorded(settings))
    proposer = GainPerSecond(Candidates(settings), AIMS, TARGET)
    assert proposer.left().by_one == np.inf
    seen = []
    while (setting := proposer.propose()) is not None:
        proposer.tell(rows[setting.key])
        seen.append(proposer.left())
    assert all(left.by_one <= left.at_most for left in seen)
    assert seen[-1] == (0.0, 0.0)
    assert seen[-5].at_most < 0.1 * seen[5].at_most


def test_a_stopped_trial_teaches_by_its_bounds_and_is_no_failure() -> None:
    candidates = Candidates([CompileSettings.parse(f"scope={scope}") for scope in ("regional", "modular", "full")])

    def best_gain(record: dict[str, object]) -> float:
        outlook = Outlook(candidates, AIMS, TARGET)
        base = {"samples_per_s": 900.0, "compile_s": 10.0, "peak_memory_bytes": 2**34}
        outlook.tell({"settings_key": candidates.keys[0], "status": "ok", "wall_s": 60.0, **base})
        outlook.tell({"settings_key": candidates.keys[1], "wall_s": 60.0, **record})
        return float(outlook.expected(np.array([2])).gains[0])

    slower = {"samples_per_s": 700.0, "compile_s": 60.0, "peak_memory_bytes": 2**34}
    assert best_gain({"status": "stopped", "bounds": slower}) > best_gain({"status": "stopped", "bounds": {"compile_s": 60.0}})
    assert best_gain({"status": "stopped", "bounds": slower}) > best_gain({"status": "infeasible"})


def test_a_noisy_result_is_no_failure_and_counts_with_the_low_end_of_its_interval() -> None:
    candidates = Candidates([CompileSettings.parse(f"scope={scope}") for scope in ("regional", "modular", "full")])

    def expected(**record: object) -> tuple[float, float]:
        outlook = Outlook(candidates, AIMS, TARGET)
        base = {"compile_s": 10.0, "peak_memory_bytes": 2**34, "wall_s": 60.0}
        outlook.tell({"settings_key": candidates.keys[0], "status": "ok", "samples_per_s": 900.0, **base})
        outlook.tell({"settings_key": candidates.keys[1], "status": "ok", **base, **record})
        found = outlook.expected(np.array([2]))
        return float(found.gains[0]), found.volume

    noisy = expected(samples_per_s=1200.0, stable=False, samples_per_s_ci95=(1000.0, 1500.0))
    assert noisy == expected(samples_per_s=1000.0, stable=True, samples_per_s_ci95=(999.0, 1001.0))
    assert noisy != expected(samples_per_s=1200.0, stable=True, samples_per_s_ci95=(1000.0, 1500.0))


@pytest.mark.slow
def test_it_needs_a_quarter_of_the_cost_on_tables_like_recorded_ones_and_less_than_chance(
    tmp_path: Path,
) -> None:
    shares, by_chance = [], []
    for number in range(6):
        done = recorded(settings_of_a_grid(64, seed=number), seed=number)
        ground = Ground(read_table(write_sweep(tmp_path / f"table {number}", done)), AIMS)
        shares.append(statistics.median(r.share_to(0.98) for r in replays(ground, Searcher.GAIN, 3, enough=0.98)))
        by_chance.append(statistics.median(r.share_to(0.98) for r in replays(ground, Searcher.RANDOM, 9, enough=0.98)))
    assert statistics.median(shares) <= 0.25
    assert sum(own < chance for own, chance in zip(shares, by_chance, strict=True)) >= 5


@pytest.mark.nightly("two minutes of proposals; shorter tests propose from small tables")
@pytest.mark.slow
def test_the_time_of_a_proposal_stays_flat_over_thousands_of_trials() -> None:
    base = settings_of_a_grid(150)
    settings = [
        CompileSettings.from_dict({**s.fields_that_apply(), "group_window": window}) for s in base for window in range(1, 21)
    ]
    like = rows_of(recorded(base))
    rows = {
        s.key: {**row, "settings_key": s.key}
        for s, row in zip(settings, (r for r in like.values() for _ in range(20)), strict=True)
    }
    proposer = GainPerSecond(Candidates(settings), AIMS, TARGET)
    took = []
    for _ in range(2000):
        began = time.process_time()
        setting = proposer.propose()
        assert setting is not None
        proposer.tell(rows[setting.key])
        took.append(time.process_time() - began)
    assert statistics.median(took[1500:]) < 2 * statistics.median(took[300:800])
