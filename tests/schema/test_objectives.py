from __future__ import annotations

import math
from typing import Any

import pytest

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims, Constraint, Goal, Objective, figure
from compile_sweep.schema.pareto import dominates, front, reference_point

OK = {"status": "ok", "samples_per_s": 900.0, "compile_s": 30.0, "peak_memory_bytes": 18 * 2**30}


def test_an_objective_is_a_figure_and_a_direction() -> None:
    objective = Objective.parse(" samples_per_s : max ")
    assert (objective.name, objective.goal) == ("samples_per_s", Goal.MAX)
    assert objective.loss(OK) == -900.0
    assert str(objective) == "samples_per_s:max"
    assert Objective.parse("warm_start_s:min").loss({"warm_start_s": 4}) == 4.0


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("compile_s<=120", "compile_s", 120.0),
        ("compile_s <= 2min", "compile_s", 120.0),
        ("peak_memory_bytes<=40GiB", "peak_memory_bytes", 40 * 2**30),
        ("peak_memory_bytes<=1.5 GB", "peak_memory_bytes", 1.5e9),
        ("step_ms_median<=0.1s", "step_ms_median", 100.0),
        ("samples_per_s>=1e3", "samples_per_s", 1000.0),
        ("graphs<=4", "graphs", 4.0),
    ],
)
def test_a_constraint_is_a_bound_in_any_unit_of_its_figure(text: str, name: str, bound: float) -> None:
    constraint = Constraint.parse(text)
    assert (constraint.name, constraint.bound, constraint.is_upper) == (name, bound, "<=" in text)
    assert constraint.excess(bound) == 0


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (Objective, "sampels_per_s:max", "did you mean samples_per_s?"),
        (Objective, "samples_per_s", "write samples_per_s:max or samples_per_s:min"),
        (Objective, "samples_per_s:up", "which way is better"),
        (Objective, "status:max", "no numeric field"),
        (Objective, "stable:max", "no numeric field"),
        (Constraint, "compile_s<120", "write it like compile_s<=120"),
        (Constraint, "compile_s<=", "write it like"),
        (Constraint, "compil_s<=120", "did you mean compile_s?"),
        (Constraint, "compile_s<=3GiB", "use one of ms, s, min, h"),
        (Constraint, "samples_per_s>=3s", "leave the unit out"),
        (Constraint, "steady_steps>=3s", "leave the unit out"),
        (Constraint, "compile_s<=1e999", "not finite"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(kind: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r".") as complaint:
        kind.parse(text)
    assert words in str(complaint.value)
    assert "\n" not in str(complaint.value)


def test_aims_have_the_usual_three_objectives_unless_told_otherwise() -> None:
    assert [str(objective) for objective in Aims.parse().objectives] == [
        "samples_per_s:max",
        "compile_s:min",
        "peak_memory_bytes:min",
    ]
    assert Aims.parse(["compile_s:min"]).losses(OK) == (30.0,)
    with pytest.raises(ConfigError, match="given twice"):
        Aims.parse(["compile_s:min", "compile_s:max"])
    with pytest.raises(ConfigError, match="no objective"):
        Aims(())


def test_violations_are_in_parts_of_the_bound_and_failures_are_violations() -> None:
    aims = Aims.parse(["samples_per_s:max"], ["compile_s<=20", "samples_per_s>=1000"])
    assert aims.violations(OK) == pytest.approx((0.0, 0.5, 0.1))
    assert not aims.is_usable(OK)
    assert aims.violations({"status": "infeasible", "label": "out-of-memory"}) == (1.0, 1.0, 1.0)
    assert aims.violations({"status": "ok", "compile_s": 3.0})[0] == 1.0, "ok, but without the objective's figure"
    assert Aims.parse([], ["compile_s<=30"]).is_usable(OK)


def test_a_warm_trials_compile_time_is_its_estimate_of_the_cold_one() -> None:
    warm = {**OK, "caches": "warm", "compile_s": 2.0, "cold_equivalent_s": 31.0}
    assert figure(warm, "compile_s") == 31.0
    assert figure({**warm, "cold_equivalent_s": None}, "compile_s") is None
    assert figure({"stable": True}, "stable") is None
    assert figure({"compile_s": float("nan")}, "compile_s") is None


def test_a_noisy_record_counts_with_the_worse_ends_of_its_intervals() -> None:
    noisy = {**OK, "samples_per_s": 1000.0, "samples_per_s_ci95": (800.0, 1300.0), "tokens_per_s": 500.0, "step_ms_median": 64.0,
             "step_ms_ci95": (50.0, 80.0), "compile_s": 30.0, "stable": False}  # fmt: skip
    aims = Aims.parse(["samples_per_s:max", "tokens_per_s:max", "step_ms_median:min", "compile_s:min"])
    assert aims.losses(noisy) == (-800.0, -400.0, 80.0, 30.0)
    assert aims.losses({**noisy, "stable": True}) == (-1000.0, -500.0, 64.0, 30.0)
    assert aims.losses({**noisy, "samples_per_s_ci95": None}) == (-1000.0, -500.0, 80.0, 30.0)
    open_upwards = {**noisy, "samples_per_s_ci95": (204.5, math.inf)}
    assert aims.losses(open_upwards) == (-204.5, -102.25, 80.0, 30.0)
    for unbounded in ((0.0, math.inf), [0.0, None]):
        worst = {**noisy, "step_ms_ci95": unbounded}
        assert aims.losses(worst) is None
        assert Aims.parse([], ["step_ms_median<=1000"]).violations(worst)[-1] == 1.0
    bounds = ["samples_per_s>=900", "step_ms_median<=70"]
    assert Aims.parse([], bounds).violations(noisy) == pytest.approx((0.0, 1 / 9, 1 / 7))
    assert Aims.parse([], bounds).is_usable({**noisy, "stable": True})
    with pytest.raises(ConfigError, match=r"samples_per_s>=900; the nearest has 800$"):
        Aims.parse([], bounds).refuse_infeasible([noisy])


def test_constraints_that_nothing_keeps_are_refused_with_what_comes_nearest() -> None:
    rows = [OK, {**OK, "compile_s": 20.0}, {"status": "infeasible"}]
    Aims.parse([], ["compile_s<=25"]).refuse_infeasible(rows)
    with pytest.raises(ConfigError, match=r"compile_s<=10; the nearest has 20$"):
        Aims.parse([], ["compile_s<=10"]).refuse_infeasible(rows)
    with pytest.raises(ConfigError, match="no record has a figure for the constraint graphs<=1"):
        Aims.parse([], ["graphs<=1"]).refuse_infeasible(rows)
    with pytest.raises(ConfigError, match="none of the 1 records is ok"):
        Aims.parse().refuse_infeasible([{"status": "failed"}])
    slow_or_long = [{**OK, "compile_s": 1.0}, {**OK, "samples_per_s": 2000.0}]
    with pytest.raises(ConfigError, match="all constraints at once"):
        Aims.parse([], ["compile_s<=10", "samples_per_s>=1500"]).refuse_infeasible(slow_or_long)


def test_a_front_has_what_nothing_dominates_each_once() -> None:
    assert front([(2.0, 2.0), (1.0, 3.0), (3.0, 3.0), (1.0, 3.0), (2.0, 1.0)]) == [(1.0, 3.0), (2.0, 1.0)]
    assert dominates((1.0, 2.0), (1.0, 3.0))
    assert not dominates((1.0, 2.0), (1.0, 2.0))
    assert not dominates((1.0, 2.0), (0.0, 3.0))


def test_the_reference_lies_beyond_the_worst_of_each_objective() -> None:
    assert reference_point([(-1000.0, 5.0), (-500.0, 5.0)]) == pytest.approx((-450.0, 5.5))
    with pytest.raises(ValueError, match="needs points"):
        reference_point([])
