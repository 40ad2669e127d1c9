"""The numerics check: compiled against two eager runs."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.checking import TOLERANCE_FACTOR, TOLERANCE_FLOOR, Numerics, NumericsStatus, Trajectory, compare

NAN, INF = math.nan, math.inf


def run(losses: list[float], norms: list[float] | None = None) -> Trajectory:
    return Trajectory(losses=losses, gradient_norms=norms or [1.0] * len(losses))


EAGER = run([4.0, 3.0, 2.0], [10.0, 8.0, 6.0])


def judged(
    compiled: Trajectory, eager: Trajectory = EAGER, again: Trajectory = EAGER, steady: list[float] | None = None
) -> Numerics:
    return compare(compiled, eager, again, [1.9, 1.8] if steady is None else steady)


def test_a_run_that_follows_eager_is_ok() -> None:
    verdict = judged(run([4.0, 3.02, 2.0], [10.0, 8.0, 6.05]))
    assert verdict.status is NumericsStatus.OK
    assert verdict.compared_steps == 3
    assert verdict.first_bad_step is None
    assert verdict.first_bad_steady_step is None
    assert verdict.loss_gap == pytest.approx(0.02 / 3.0)
    assert verdict.gradient_norm_gap == pytest.approx(0.05 / 6.0)
    assert verdict.last_loss == 1.8


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["losses", "gradient_norms"])
def test_a_number_that_is_none_in_a_compared_step_is_found(where: str, bad: float) -> None:
    losses, norms = list(EAGER.losses), list(EAGER.gradient_norms)
    (losses if where == "losses" else norms)[1] = bad
    verdict = judged(run(losses, norms))
    assert verdict.status is NumericsStatus.NAN
    assert verdict.first_bad_step == 1


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_number_that_is_none_in_a_timed_step_is_found(bad: float) -> None:
    verdict = judged(EAGER, steady=[1.9, 1.8, bad, 1.6])
    assert verdict.status is NumericsStatus.NAN
    assert verdict.first_bad_step is None
    assert verdict.first_bad_steady_step == 2


@pytest.mark.parametrize(
    ("compiled", "step"),
    [
        (run([4.0, 3.0, 2.1], [10.0, 8.0, 6.0]), 2),
        (run([3.9, 3.0, 2.0], [10.0, 8.0, 6.0]), 0),
        (run([4.0, 3.0, 2.0], [10.0, 8.5, 6.0]), 1),
    ],
)
def test_a_run_that_leaves_eager_diverges_from_the_step_it_does(compiled: Trajectory, step: int) -> None:
    verdict = judged(compiled)
    assert verdict.status is NumericsStatus.DIVERGES
    assert verdict.first_bad_step == step


def test_frozen_training_diverges() -> None:
    assert judged(run([4.0, 4.0, 4.0], [10.0, 10.0, 10.0])).status is NumericsStatus.DIVERGES


@pytest.mark.parametrize("which", ["eager", "again"])
def test_where_eager_itself_is_not_finite_nothing_is_said_of_the_compiled_run(which: str) -> None:
    broken = run([4.0, NAN, NAN], [10.0, 8.0, 6.0])
    compiled = run([4.0, NAN, NAN], [10.0, 8.0, 6.0])
    verdict = judged(compiled, broken if which == "eager" else EAGER, broken if which == "again" else EAGER)
    assert verdict.status is NumericsStatus.EAGER_UNSTABLE


def test_tolerance_is_a_multiple_of_how_far_eager_is_from_itself() -> None:
    again = run([4.0, 3.0, 2.1], [10.0, 8.0, 6.0])  # means 2.05: the loss's spread is 0.1 / 2.05
    verdict = judged(run([4.0, 3.0, 2.4], [10.0, 8.0, 6.0]), again=again)
    assert verdict.loss_tolerance == pytest.approx(TOLERANCE_FACTOR * 0.1 / 2.05)
    assert verdict.gradient_norm_tolerance == TOLERANCE_FLOOR
    assert verdict.loss_gap == pytest.approx(0.35 / 2.05)
    assert verdict.status is NumericsStatus.OK
    assert judged(run([4.0, 3.0, 2.5], [10.0, 8.0, 6.0]), again=again).status is NumericsStatus.DIVERGES


def test_two_eager_runs_that_agree_to_the_bit_leave_the_floor() -> None:
    just_within, just_beyond = 4.0 * (1 + 0.9 * TOLERANCE_FLOOR), 4.0 * (1 + 1.1 * TOLERANCE_FLOOR)
    assert judged(run([just_within, 3.0, 2.0], [10.0, 8.0, 6.0])).status is NumericsStatus.OK
    assert judged(run([just_beyond, 3.0, 2.0], [10.0, 8.0, 6.0])).status is NumericsStatus.DIVERGES


def test_an_eager_value_of_zero_divides_nothing() -> None:
    zero = run([0.0, 0.0], [0.0, 0.0])
    assert judged(run([0.0, 0.0], [0.0, 0.0]), zero, zero).status is NumericsStatus.OK
    assert judged(run([0.0, 0.5], [0.0, 0.0]), zero, zero).status is NumericsStatus.DIVERGES


def test_runs_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        judged(run([4.0, 3.0], [10.0, 8.0]))


values = st.lists(st.floats(0.01, 100), min_size=4, max_size=4)
anything = st.lists(st.floats(), min_size=4, max_size=4)


@given(values, values)
@settings(max_examples=100, deadline=None)
def test_an_eager_run_is_always_ok_beside_itself_and_another(losses: list[float], others: list[float]) -> None:
    one, other = run(losses, losses), run(others, others)
    assert judged(one, one, other).status is NumericsStatus.OK
    assert judged(other, one, other).status is NumericsStatus.OK


@given(anything, anything, values, anything)
@settings(max_examples=200, deadline=None)
def test_what_is_not_finite_is_never_ok(losses: list[float], norms: list[float], eager: list[float], steady: list[float]) -> None:
    compiled = run(losses, norms)
    verdict = judged(compiled, run(eager, eager), run(eager, eager), steady)
    if not compiled.finite() or not all(map(math.isfinite, steady)):
        assert verdict.status is NumericsStatus.NAN
    else:
        assert verdict.status in (NumericsStatus.OK, NumericsStatus.DIVERGES)
        assert (verdict.first_bad_step is None) == (verdict.status is NumericsStatus.OK)


def test_a_verdict_is_plain_json() -> None:
    values = judged(EAGER).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["status"] == "ok"
