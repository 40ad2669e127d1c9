from __future__ import annotations

import pytest

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims
from orchestrator.search import Budget, Spending, StableFront

AIMS = Aims.parse(["samples_per_s:max", "compile_s:min"])
FAILED = {"status": "failed", "wall_s": 100.0}


def ok(rate: float, compile_s: float, wall_s: float = 100.0, num_workers: int = 1) -> dict[str, object]:
    return {"status": "ok", "samples_per_s": rate, "compile_s": compile_s, "wall_s": wall_s, "num_workers": num_workers}


def test_a_front_that_did_not_move_for_so_many_trials_is_enough() -> None:
    spending = Spending(AIMS, rule=StableFront.parse("front stable for 3 trials"))
    for record in (FAILED, FAILED, FAILED, FAILED, ok(500, 1), ok(400, 2), FAILED, ok(900, 30), ok(500, 1), FAILED):
        spending.tell(record)
        assert spending.reason_to_stop() is None, "before there is a front, or fewer than three since it moved"
    spending.tell(ok(100, 50))
    assert spending.reason_to_stop() == "the front has not moved for 3 trials"
    spending.tell(ok(1000, 60))
    assert spending.reason_to_stop() is None


@pytest.mark.parametrize(("text", "trials"), [("front stable for 6 trials", 6), (" front  stable for 1 trial ", 1)])
def test_a_rule_is_read(text: str, trials: int) -> None:
    assert StableFront.parse(text) == StableFront(trials)


@pytest.mark.parametrize(
    "text", ["", "front stable", "front stable for 0 trials", "stable for 6 trials", "front stable for six trials"]
)
def test_what_is_no_rule_is_told_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like"):
        StableFront.parse(text)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_is_a_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-budget-s"):
        Budget(gpu_s=seconds)
    with pytest.raises(ConfigError, match="--time-budget-s"):
        Budget(time_s=seconds)


def test_gpu_seconds_count_whole_trials_and_every_worker() -> None:
    spending = Spending(AIMS, budget=Budget(gpu_s=500.0))
    spending.tell(ok(500, 90, wall_s=100.0, num_workers=2))
    spending.tell(FAILED)
    assert spending.gpu_s == 300.0
    assert spending.reason_to_stop() is None
    assert spending.left_s() == 200.0
    assert spending.left_s(num_workers=2) == 100.0
    assert spending.left_s(under_way_gpu_s=150.0) == 50.0
    spending.tell(ok(600, 90, wall_s=200.0))
    assert spending.reason_to_stop() == "the budget of 500 GPU-seconds is spent"


def test_a_time_budget_counts_the_clock() -> None:
    spending = Spending(AIMS, budget=Budget(time_s=60.0))
    assert spending.left_s() == 60.0
    assert spending.left_s(elapsed_s=30.0) == 30.0
    assert spending.reason_to_stop(59.0) is None
    assert spending.reason_to_stop(60.0) == "the budget of 60 s is spent"
