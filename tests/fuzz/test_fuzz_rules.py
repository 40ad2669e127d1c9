"""Constraints, objectives, rules of --fail-on and --stop, and counts from untrusted text: a value or one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from fuzzing import HOSTILE, nothing_runs, numbers, said, spliced, thoroughly, values
from hypothesis import given
from hypothesis import strategies as st

from analysis.command_line import amount, count
from analysis.comparison.rules import Rule
from compile_sweep.schema.errors import CompileSweepError, ConfigError
from compile_sweep.schema.objectives import FIELDS, Aims, Constraint, Objective
from orchestrator.search.stopping import Budget, StableFront

FIGURES = ["compile_s", "samples_per_s", "peak_memory_bytes", "step_ms_median", "graph_breaks", "warm_start_s", *FIELDS[:3]]
NUMBERS = ["0", "1", "120", "1.5", ".5", "1e3", "1e999", "-3", "+15", "40", "9" * 400, "٣"]
UNITS = ["", "s", "ms", "min", "h", "GiB", "kB", "%", "B"]

bounds = spliced([*FIGURES, "<=", ">=", "<", ">", "=", *NUMBERS, *UNITS, " "])
near = st.builds("".join, st.tuples(*map(st.sampled_from, (FIGURES, ["<=", ">=", "<", ">"], ["", "+", "-"], NUMBERS, UNITS))))
goals = spliced([*FIGURES, ":", "max", "min", " "])
stops = spliced(["front", "stable", "for", "trials", "trial", " ", *NUMBERS])
PARSERS: dict[str, Callable[[str], Any]] = {
    "constraint": Constraint.parse,
    "objective": Objective.parse,
    "fail-on": Rule.parse,
    "stop": StableFront.parse,
    "count": count,
    "amount": amount,
}


def parsed(parse: Callable[[str], Any], text: str) -> Any:
    """Returns the value, or None if one sentence says why there is none."""
    with nothing_runs():
        try:
            return parse(text)
        except CompileSweepError as error:
            said(error)
            return None


@thoroughly
@given(bounds | near)
def test_a_constraint_is_a_finite_bound_that_reads_back(text: str) -> None:
    if (found := parsed(Constraint.parse, text)) is not None:
        assert math.isfinite(found.bound)
        assert found.name in FIELDS
        again = Constraint.parse(str(found))
        assert (again.name, again.is_upper) == (found.name, found.is_upper)
        assert again.bound == pytest.approx(found.bound, rel=1e-5)


@thoroughly
@given(near | bounds, numbers | values)
def test_a_constraint_judges_any_record(text: str, value: Any) -> None:
    if (found := parsed(Constraint.parse, text)) is None:
        return
    for record in ({found.name: value}, {found.name: value, "caches": "warm", "cold_equivalent_s": value}):
        with nothing_runs():
            violation = found.violation(record)
        assert violation is None or isinstance(violation, float)


@thoroughly
@given(goals)
def test_an_objective_reads_back(text: str) -> None:
    if (found := parsed(Objective.parse, text)) is not None:
        assert Objective.parse(str(found)) == found


@thoroughly
@given(
    st.lists(goals, max_size=3), st.lists(bounds | near, max_size=3), st.dictionaries(st.sampled_from(FIGURES), numbers | values)
)
def test_aims_judge_any_record(objectives: list[str], constraints: list[str], record: dict[str, Any]) -> None:
    try:
        aims = Aims.parse(objectives, constraints)
    except ConfigError:
        return
    with nothing_runs():
        assert isinstance(aims.is_usable({"status": "ok", **record}), bool)


@thoroughly
@given(near | bounds | st.sampled_from(["failures", "numerics"]))
def test_a_rule_is_a_finite_limit(text: str) -> None:
    if (found := parsed(Rule.parse, text)) is not None:
        assert found.kind is not None or math.isfinite(found.limit)
        assert Rule.parse(found.words) == found


@thoroughly
@given(stops)
def test_a_stop_reads_back(text: str) -> None:
    if (found := parsed(StableFront.parse, text)) is not None:
        assert StableFront.parse(str(found)) == found
        assert found.trials >= 1


@thoroughly
@given(spliced([*NUMBERS, "k", "M", "_", ",", "e5", " "]))
def test_counts_and_amounts_are_finite(text: str) -> None:
    found, much = parsed(count, text), parsed(amount, text)
    assert found is None or (isinstance(found, int) and found >= 0)
    assert much is None or (math.isfinite(much) and much >= 0)


@thoroughly
@given(st.none() | st.floats(), st.none() | st.floats())
def test_a_budget_is_finite_and_above_nothing(time_s: float | None, gpu_s: float | None) -> None:
    try:
        found = Budget(time_s=time_s, gpu_s=gpu_s)
    except ConfigError:
        return
    assert all(value is None or 0 < value < math.inf for value in (found.time_s, found.gpu_s))


@pytest.mark.parametrize("parser", PARSERS)
def test_what_is_special_is_refused_or_read_by_every_parser(parser: str) -> None:
    for text in HOSTILE:
        for near_text in (text, f"compile_s<={text}", f"{text}<=1", f"compile_s>{text}%", f"{text}:max", f"compile_s:{text}",
                          f"front stable for {text} trials"):  # fmt: skip
            parsed(PARSERS[parser], near_text)
