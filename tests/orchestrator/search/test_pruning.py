"""When a running trial is stopped, and that it is not while it may still be good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search import Candidates
from orchestrator.search.pruning import Patience, Pruning, Sighting, Stop, replayed

GIB = 2**30
FACTS = WorkloadFacts(max_length=256)
AIMS = Aims.parse()
TWO = Aims.parse(["samples_per_s:max", "compile_s:min"])


def setting(text: str) -> CompileSettings:
    return CompileSettings.parse(text)


def row(text: str, samples_per_s: float, compile_s: float, gib: float = 16, *, status: str = "ok", **more: Any) -> dict[str, Any]:
    """A recorded attempt: its warm-up's own steps took 2 s, its timed ones 30 s."""
    return {
        "trial_id": "1",
        "settings_key": setting(text).key,
        "status": status,
        "samples_per_s": samples_per_s,
        "compile_s": compile_s,
        "warmup_s": compile_s + 2,
        "peak_memory_bytes": gib * GIB,
        "step_ms_median": 100.0,
        "steady_steps": 300,
        "eager_step_ms": [200.0] * 50,
        "num_workers": 1,
        "wall_s": compile_s + 80,
        **more,
    }


EAGER = row("scope=eager,padding=longest", 600, 0.5, 24)
REGIONAL = row("scope=regional,dynamic=mark", 900, 20, 16)
FULL = row("scope=full,dynamic=mark,optimizer=fused", 1500, 60, 16)


SLOW_TO_COMPILE = [
    row(f"scope={scope},dynamic={dynamic},optimizer={optimizer}", speed + gain, compile_s + 2 * gain, 16)
    for scope, dynamic, speed, compile_s in (
        ("full", "true", 1600, 200),
        ("full", "auto", 1550, 240),
        ("regional", "mark", 1400, 20),
    )
    for optimizer, gain in (("foreach", 0), ("fused", 20))
]
"""Whole graphs are slow to compile and little faster than regions, which leaves little hope for slower ones."""

CANDIDATES = Candidates(
    [
        setting(key)
        for scope in ("eager", "regional", "full", "modular")
        for dynamic in (("static",) if scope == "eager" else ("static", "true", "auto", "mark"))
        for optimizer in ("foreach", "fused", "compiled")
        for key in [f"scope={scope}" + (f",dynamic={dynamic}" if scope != "eager" else "") + f",optimizer={optimizer}"]
    ]
)


def pruning(rows: Sequence[dict[str, Any]], aims: Aims = AIMS, **patience: Any) -> Pruning:
    found = Pruning(CANDIDATES, aims, FACTS, patience=Patience(**{"least_gain": 0.01, **patience}))
    for told in rows:
        found.tell(told)
    return found


def compiling(text: str, seconds: float) -> Sighting:
    return Sighting(setting=setting(text), phase="warming-up", elapsed_s=seconds + 20, in_phase_s=seconds)


def timed(text: str, **early: float) -> Sighting:
    return Sighting(setting=setting(text), phase="steady", elapsed_s=100, in_phase_s=5, early=early)


def stopped(found: Stop | None) -> Stop:
    assert found is not None
    return found


def test_a_compile_that_breaks_a_constraint_is_stopped_and_says_what_it_would_have_had() -> None:
    judge = pruning([EAGER], Aims.parse((), ["compile_s<=50"]))
    assert judge.decide(compiling("scope=full", 52)) is None  # 3 s of these may be steps
    stop = stopped(judge.decide(compiling("scope=full", 54)))
    assert (stop.label, stop.bounds["compile_s"]) == ("dominated", 51)
    assert "compile_s<=50" in stop.reason


def test_steps_of_more_lengths_than_were_ever_met_are_not_taken_for_compiling() -> None:
    aims = Aims.parse((), ["compile_s<=40"])
    one_length = row("scope=full", 1000, 30)  # 12 steps, 2 s
    asked = compiling("scope=full,dynamic=mark", 50)  # 32 lengths: 74 steps, 12 s of these
    assert pruning([one_length], aims).decide(asked) is None
    assert pruning([one_length, EAGER], aims).decide(asked) is not None, "eager has met all of them, in 2 s"


def test_a_warm_trial_that_was_stopped_says_nothing_of_cold_compiles() -> None:
    asked = compiling("scope=full,dynamic=true,optimizer=compiled", 350)
    last = SLOW_TO_COMPILE[3]
    bounds = {name: last[name] for name in ("samples_per_s", "peak_memory_bytes")} | {"compile_s": 2.0}
    halted = {"settings_key": last["settings_key"], "status": "stopped", "label": "dominated", "bounds": bounds}
    rest = [one for one in SLOW_TO_COMPILE if one is not last]
    assert pruning([EAGER, *rest, halted], TWO, known_compiled=6).decide(asked) is not None
    assert pruning([EAGER, *rest, {**halted, "caches": "warm"}], TWO, known_compiled=6).decide(asked) is None


def test_while_no_step_of_the_workload_was_timed_nothing_is_known_of_a_compile() -> None:
    assert pruning([], Aims.parse((), ["compile_s<=50"])).decide(compiling("scope=full", 400)) is None


def test_a_compile_is_stopped_once_it_has_little_left_to_gain() -> None:
    judge = pruning([EAGER, *SLOW_TO_COMPILE], TWO, known_compiled=4)
    asked = "scope=full,dynamic=true,optimizer=compiled"
    assert judge.decide(compiling(asked, 10)) is None  # if it ended now, it would be among the fastest to compile
    stop = stopped(judge.decide(compiling(asked, 350)))
    assert stop.label == "dominated"
    assert "expected to add" in stop.reason
    assert stop.bounds == {"compile_s": 347, "warmup_s": 350, "wall_s": 370}


def test_where_compile_time_is_no_objective_what_may_be_faster_compiles_as_long_as_it_likes() -> None:
    judge = pruning([EAGER, *SLOW_TO_COMPILE], Aims.parse(["samples_per_s:max"]), known_compiled=4)
    assert judge.decide(compiling("scope=full,dynamic=true,optimizer=compiled", 350)) is None


def test_nothing_is_expected_of_a_compile_before_enough_are_known() -> None:
    asked = compiling("scope=full,dynamic=true,optimizer=compiled", 350)
    assert pruning([EAGER, *SLOW_TO_COMPILE], TWO, known_compiled=7).decide(asked) is None
    assert pruning([EAGER, *SLOW_TO_COMPILE], TWO, known_compiled=6).decide(asked) is not None


def test_what_was_stopped_after_its_first_pass_is_known_for_expectations() -> None:
    asked = compiling("scope=full,dynamic=true,optimizer=compiled", 350)
    last = SLOW_TO_COMPILE[3]
    bounds = {name: last[name] for name in ("samples_per_s", "compile_s", "peak_memory_bytes")}
    halted = {"settings_key": last["settings_key"], "status": "stopped", "label": "dominated", "bounds": bounds}
    rest = [one for one in SLOW_TO_COMPILE if one is not last]
    assert pruning([EAGER, *rest], TWO, known_compiled=6).decide(asked) is None
    assert pruning([EAGER, *rest, halted], TWO, known_compiled=6).decide(asked) is not None
    while_compiling = {**halted, "bounds": {"compile_s": 240.0}}
    assert pruning([EAGER, *rest, while_compiling], TWO, known_compiled=6).decide(asked) is None


def test_after_the_first_pass_what_is_dominated_is_stopped_with_its_bounds() -> None:
    judge = pruning([EAGER, REGIONAL, FULL])
    asked = "scope=full"
    early = {"compile_s": 70.0, "peak_memory_bytes": 17.0 * GIB}
    stop = stopped(judge.decide(timed(asked, samples_per_s=1300, **early)))
    assert (stop.label, stop.bounds["compile_s"], stop.bounds["samples_per_s"]) == ("dominated", 70, pytest.approx(1430))
    assert stop.reason == (
        "stopped after the first timed pass: with 1430 samples/s, 70 s of compiling, 17 GiB of peak memory at best, it is "
        f"dominated by “{setting(str(FULL['settings_key'])).label}”"
    )
    assert judge.decide(timed(asked, samples_per_s=1400, **early)) is None  # ten percent more is not excluded
    assert judge.decide(timed(asked, samples_per_s=1300, **early | {"compile_s": 40.0})) is None
    assert judge.decide(timed(asked, samples_per_s=1300, **early | {"peak_memory_bytes": 10.0 * GIB})) is None


def test_after_the_first_pass_constraints_on_anything_it_tells_count() -> None:
    aims = Aims.parse(["samples_per_s:max"], ["peak_memory_bytes<=12GiB", "samples_per_s>=500"])
    judge = pruning([], aims)
    assert judge.decide(timed("scope=full", samples_per_s=480, peak_memory_bytes=11 * GIB)) is None
    assert (
        "samples_per_s>=500" in stopped(judge.decide(timed("scope=full", samples_per_s=400, peak_memory_bytes=11 * GIB))).reason
    )
    assert "peak_memory" in stopped(judge.decide(timed("scope=full", samples_per_s=900, peak_memory_bytes=13 * GIB))).reason


def test_an_objective_of_which_nothing_is_known_keeps_a_trial_going() -> None:
    judge = pruning([{**FULL, "warm_start_s": 3.0}], Aims.parse(["samples_per_s:max", "warm_start_s:min"]))
    assert judge.decide(timed("scope=full", samples_per_s=1.0, compile_s=500)) is None


def test_a_bound_from_below_says_nothing_against_wanting_more() -> None:
    judge = pruning([FULL], Aims.parse(["samples_per_s:max"], ["compile_s>=30"]))
    assert judge.decide(timed("scope=full", samples_per_s=1600, compile_s=10)) is None


def test_what_failed_or_breaks_a_constraint_dominates_nothing() -> None:
    early = timed("scope=full", samples_per_s=1300, compile_s=70, peak_memory_bytes=17 * GIB)
    assert pruning([row("scope=full,dynamic=mark", 1500, 60, status="infeasible")]).decide(early) is None
    assert pruning([FULL], Aims.parse((), ["compile_s<=50"])).decide(compiling("scope=full", 45)) is None


def test_eager_trials_are_never_stopped() -> None:
    judge = pruning([EAGER, FULL], Aims.parse((), ["peak_memory_bytes<=1GiB"]))
    assert judge.decide(timed("scope=eager", samples_per_s=10, compile_s=3, peak_memory_bytes=50 * GIB)) is None


def test_a_compile_far_beyond_its_family_is_given_up_as_endless() -> None:
    family = [row("scope=full,dynamic=buckets,bucket_size=64", 1, 98), row("scope=full,dynamic=buckets,bucket_size=128", 1, 38)]
    judge = pruning(family)
    assert pruning(family[:1]).compile_deadline_s(setting("scope=full,dynamic=buckets,bucket_size=32")) is None
    # 100 s for 4 graphs are 25 s per graph: four times that for each of 8.
    assert judge.compile_deadline_s(setting("scope=full,dynamic=buckets,bucket_size=32")) == 800
    assert judge.compile_deadline_s(setting("scope=full,dynamic=mark")) is None
    quick = pruning([row("scope=regional", 1, 3), row("scope=regional,optimizer=fused", 1, 4)])
    assert quick.compile_deadline_s(setting("scope=regional")) == 60
    assert quick.decide(compiling("scope=regional", 59)) is None
    stop = stopped(quick.decide(compiling("scope=regional", 61)))
    assert stop.label == "compile-deadline"
    assert stop.bounds["compile_s"] == 58


def test_a_deadline_goes_by_cold_compiles_and_by_the_estimates_of_warm_ones() -> None:
    warm = {"caches": "warm", "compile_s": 4.0, "warmup_s": 6.0}
    keys = ("scope=full,dynamic=mark", "scope=full,dynamic=mark,optimizer=fused")
    judge = pruning([{**row(key, 900, 4), **warm, "cold_equivalent_s": 75.0} for key in keys])
    assert judge.compile_deadline_s(setting(keys[0])) == 4 * 77
    unknown = pruning([{**row(key, 900, 4), **warm, "cold_equivalent_s": None} for key in keys])
    assert unknown.compile_deadline_s(setting(keys[0])) is None


REPLAYED = [EAGER, REGIONAL, FULL, row("scope=full", 700, 90, 20)]


def test_a_replayed_trial_costs_what_it_took_until_it_was_stopped() -> None:
    prune = replayed(CANDIDATES, AIMS, FACTS)
    assert [prune(one, REPLAYED[:number]) for number, one in enumerate(REPLAYED[:3])] == [None] * 3
    found = prune(REPLAYED[3], REPLAYED[:3])
    assert found is not None
    # All of 170 s except the timed steps after the first pass, 20 s, and the eager ones, 10 s.
    assert (found["status"], found["label"], found["wall_s"]) == ("stopped", "dominated", pytest.approx(140))
    assert found["bounds"]["compile_s"] == 90
    assert "samples_per_s" not in found
    assert not AIMS.is_usable(found)


def test_a_replayed_compile_stops_when_its_constraint_breaks_endless_ones_included() -> None:
    prune = replayed(CANDIDATES, Aims.parse((), ["compile_s<=50"]), FACTS)
    found = prune(FULL, [EAGER])
    assert found is not None
    assert found["phase"] == "warming-up"
    # 38 s to start and build, 50 s of compiling, and 3 s that may be steps.
    assert found["wall_s"] == pytest.approx(38 + 53, abs=0.5)
    endless = {"settings_key": setting("scope=full,mode=max-autotune").key, "label": "compile-deadline", "wall_s": 600.0}
    found = prune({**endless, "status": "infeasible"}, [EAGER])
    assert found is not None
    assert found["wall_s"] == pytest.approx(53, abs=0.5)
    died = {**endless, "status": "failed", "label": "worker-died"}
    assert prune(died, [EAGER]) is None


def test_a_new_replay_begins_with_nothing_learnt() -> None:
    prune = replayed(CANDIDATES, AIMS, FACTS)
    assert prune(REPLAYED[3], REPLAYED[:3]) is not None
    assert prune(REPLAYED[3], []) is None
    assert prune(REPLAYED[3], [EAGER]) is None
    assert prune(REPLAYED[3], [EAGER, FULL]) is not None
    assert prune(REPLAYED[3], [EAGER]) is None
