"""From evidence to verdict: which label, which status, and a reason a person can read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.failures import OK, Death, Label, Verdict, judge_death, judge_measurement, judge_trial_death
from orchestrator.records import Status
from workloads.checking import NumericsStatus, Trajectory, compare

STATUSES = {
    Label.NAN: Status.INFEASIBLE,
    Label.DIVERGES: Status.INFEASIBLE,
    Label.EAGER_UNSTABLE: Status.FAILED,
    Label.RECOMPILE_LIMIT: Status.INFEASIBLE,
    Label.CUDAGRAPHS_SKIPPED: Status.INFEASIBLE,
    Label.OUT_OF_MEMORY: Status.INFEASIBLE,
    Label.COMPILE_ERROR: Status.INFEASIBLE,
    Label.COMPILE_DEADLINE: Status.INFEASIBLE,
    Label.TRIAL_DEADLINE: Status.FAILED,
    Label.EXCEPTION: Status.FAILED,
    Label.WORKER_DIED: Status.FAILED,
    Label.TRIAL_DIED: Status.FAILED,
}
"""Written out a second time on purpose: whether a setting is to blame is not to change unnoticed."""


def numerics(compiled: list[float], steady: list[float], eager: list[float] | None = None) -> dict[str, Any]:
    """The real check's verdict on these losses."""
    follows = eager or [2.0, 1.9, 1.8]
    return compare(
        Trajectory(losses=compiled, gradient_norms=[1.0] * len(compiled)),
        Trajectory(losses=follows, gradient_norms=[1.0] * len(follows)),
        Trajectory(losses=follows, gradient_norms=[1.0] * len(follows)),
        steady,
    ).to_dict()


def measurement(**fields: Any) -> dict[str, Any]:
    """What a worker measured that speaks for the setting, apart from these fields."""
    fine = {
        "numerics": numerics([2.0, 1.9, 1.8], [1.7]),
        "recompile_limit_hits": [],
        "cudagraph_skips": 0,
        "cudagraph_skip_reasons": [],
    }
    return {**fine, **fields}


def death(**fields: Any) -> Death:
    """A worker that went without a word while steady and in time, apart from these fields."""
    known = {"phase": "steady", "in_phase_s": 5.0, "elapsed_s": 60.0, "compile_deadline_s": 600.0, "trial_deadline_s": 900.0}
    return Death(**{**known, **fields})


NAN = float("nan")

MEASURED: list[tuple[Label, dict[str, Any], list[str]]] = [
    (Label.NAN, {"numerics": numerics([2.0, NAN, 1.8], [1.7])}, ["not finite from step 1 on", "eager is"]),
    (Label.NAN, {"numerics": numerics([2.0, float("inf"), 1.8], [1.7])}, ["not finite from step 1 on"]),
    (Label.NAN, {"numerics": numerics([2.0, 1.9, 1.8], [1.7, 1.6, NAN])}, ["not finite from timed step 2 on"]),
    (Label.DIVERGES, {"numerics": numerics([2.0, 1.9, 3.6], [1.7])}, ["from step 2 on", "loss off by 100.00%", "allowed 1.00%"]),
    (Label.EAGER_UNSTABLE, {"numerics": numerics([2.0, 1.9, 1.8], [1.7], eager=[2.0, NAN, 1.8])}, ["eager itself"]),
    (
        Label.RECOMPILE_LIMIT,
        {"recompile_limit_hits": ["torch._dynamo hit config.recompile_limit (8)\n   function: 'forward' (model.py:10)\n"]},
        ["recompile limit in forward"],
    ),
    (Label.RECOMPILE_LIMIT, {"recompile_limit_hits": ["hit"]}, ["recompile limit and runs"]),
    (
        Label.CUDAGRAPHS_SKIPPED,
        {"cudagraph_skips": 2, "cudagraph_skip_reasons": ["\nskipping cudagraphs due to cpu device\nmore"]},
        ["not used: skipping cudagraphs due to cpu device"],
    ),
    (Label.CUDAGRAPHS_SKIPPED, {"cudagraph_skips": 1}, ["torch gave no reason"]),
]

DEATHS: list[tuple[Label, dict[str, Any], list[str]]] = [
    (
        Label.OUT_OF_MEMORY,
        {"error_type": "torch.OutOfMemoryError", "error_text": "CUDA out of memory. Tried to allocate 20 GiB.\nlong tail"},
        ["out of memory in phase steady", "Tried to allocate 20 GiB"],
    ),
    (
        Label.OUT_OF_MEMORY,
        {"error_type": "builtins.RuntimeError", "error_text": "CUDA error: out of memory", "phase": "building"},
        ["in phase building"],
    ),
    (
        Label.OUT_OF_MEMORY,
        {
            "error_type": "torch._dynamo.exc.BackendCompilerFailed",
            "error_text": "backend='inductor' raised: OutOfMemoryError",
            "error_is_compilers": True,
        },
        ["BackendCompilerFailed"],
    ),
    (
        Label.COMPILE_ERROR,
        {"error_type": "torch._dynamo.exc.Unsupported", "error_text": "call_method\n  trace", "error_is_compilers": True},
        ["Unsupported: call_method"],
    ),
    (
        Label.EXCEPTION,
        {"error_type": "builtins.ValueError", "error_text": "a row of 300 tokens does not fit", "phase": "building"},
        ["ValueError: a row of 300 tokens does not fit (in phase building)"],
    ),
    (
        Label.EXCEPTION,  # however late: an exception says more than the clock
        {"error_type": "builtins.ValueError", "phase": "warming-up", "in_phase_s": 700.0, "elapsed_s": 1000.0},
        ["ValueError"],
    ),
    (Label.COMPILE_DEADLINE, {"phase": "warming-up", "in_phase_s": 600.0}, ["after 600 s"]),
    (Label.COMPILE_DEADLINE, {"phase": "warming-up", "in_phase_s": 880.0, "elapsed_s": 900.0}, ["after 600 s"]),
    (Label.TRIAL_DEADLINE, {"phase": "checking", "elapsed_s": 900.0}, ["after 900 s", "in phase checking"]),
    (Label.TRIAL_DEADLINE, {"phase": "warming-up", "in_phase_s": 599.0, "elapsed_s": 901.0}, ["in phase warming-up"]),
    (Label.WORKER_DIED, {"error_text": "worker 0 ended by signal 9\nstack"}, ["in phase steady", "ended by signal 9"]),
    (Label.WORKER_DIED, {"phase": "warming-up", "in_phase_s": 599.0}, ["in phase warming-up", "no message"]),
    (Label.WORKER_DIED, {"phase": "steady", "in_phase_s": 700.0}, ["in phase steady"]),
]


def check(verdict: Verdict, label: Label, words: list[str]) -> None:
    assert verdict.label is label
    assert verdict.status is STATUSES[label]
    assert verdict.reason is not None
    assert len(verdict.reason.splitlines()) == 1
    for part in words:
        assert part in verdict.reason


@pytest.mark.parametrize(("label", "fields", "words"), MEASURED)
def test_a_measurement_that_speaks_against_the_setting_is_labelled(
    label: Label, fields: dict[str, Any], words: list[str]
) -> None:
    check(judge_measurement(measurement(**fields), claims_cudagraphs=True), label, words)


@pytest.mark.parametrize(("label", "fields", "words"), DEATHS)
def test_what_ended_an_attempt_is_labelled(label: Label, fields: dict[str, Any], words: list[str]) -> None:
    check(judge_death(death(**fields)), label, words)


@pytest.mark.parametrize(
    ("label", "elapsed_s", "words"),
    [(Label.TRIAL_DEADLINE, 930.0, ["after 900 s", "killed"]), (Label.TRIAL_DIED, 30.0, ["own process", "The actor died"])],
)
def test_a_trial_whose_own_process_ended_is_labelled(label: Label, elapsed_s: float, words: list[str]) -> None:
    check(judge_trial_death(elapsed_s, 900.0, "\nThe actor died\nunexpectedly"), label, words)


def test_every_label_is_met_above_and_has_a_status() -> None:
    met = {label for label, _, _ in (*MEASURED, *DEATHS)} | {Label.TRIAL_DIED}
    assert met == set(Label) == set(STATUSES)


def test_a_measurement_nothing_speaks_against_is_ok() -> None:
    assert judge_measurement(measurement(), claims_cudagraphs=True) == OK == Verdict(status=Status.OK)


def test_skipped_cuda_graphs_matter_only_where_they_were_asked_for() -> None:
    skipped = measurement(cudagraph_skips=3, cudagraph_skip_reasons=["cpu device"])
    assert judge_measurement(skipped, claims_cudagraphs=False) == OK


def test_wrong_numbers_weigh_more_than_a_recompile_limit() -> None:
    both = measurement(numerics=numerics([NAN, 1.9, 1.8], [1.7]), recompile_limit_hits=["hit"])
    assert judge_measurement(both, claims_cudagraphs=False).label is Label.NAN


def test_every_verdict_of_the_numerics_check_but_ok_is_a_label() -> None:
    assert {str(status) for status in NumericsStatus} - {"ok"} <= {str(label) for label in Label}


def test_a_nan_after_a_divergence_is_reported_where_the_nan_is() -> None:
    in_compared = judge_measurement(measurement(numerics=numerics([2.0, 3.8, NAN], [1.7])), claims_cudagraphs=False)
    assert in_compared.reason is not None
    assert "not finite from step 2 on" in in_compared.reason
    in_timed = judge_measurement(measurement(numerics=numerics([2.0, 3.8, 1.8], [1.7, NAN])), claims_cudagraphs=False)
    assert in_timed.reason is not None
    assert "not finite from timed step 1 on" in in_timed.reason


@pytest.mark.parametrize(
    ("error_type", "text"),
    [
        ("builtins.RuntimeError", "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        ("builtins.MemoryError", ""),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 20 GiB for an array"),
    ],
)
def test_a_cpu_without_memory_is_out_of_memory_too(error_type: str, text: str) -> None:
    assert judge_death(death(error_type=error_type, error_text=text)).label is Label.OUT_OF_MEMORY


def test_an_exception_whose_text_begins_with_an_empty_line_keeps_its_message() -> None:
    verdict = judge_death(death(error_type="builtins.RuntimeError", error_text="\n\nexpected a tensor\nand more"))
    assert verdict.reason is not None
    assert "expected a tensor" in verdict.reason


@given(text=st.text(), phase=st.sampled_from(["starting", "building", "warming-up", "steady", "checking"]), raised=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_reason_is_one_readable_line_whatever_the_error_said(text: str, phase: str, raised: bool) -> None:
    error_type = "builtins.RuntimeError" if raised else None
    reasons = [
        judge_death(death(error_type=error_type, error_text=text, phase=phase)).reason,
        judge_trial_death(30.0, 900.0, text).reason,
        judge_measurement(measurement(cudagraph_skips=1, cudagraph_skip_reasons=[text]), claims_cudagraphs=True).reason,
    ]
    for reason in reasons:
        assert reason is not None
        assert len(reason.splitlines()) == 1


def test_a_long_message_is_cut() -> None:
    verdict = judge_death(death(error_type="builtins.RuntimeError", error_text="x" * 10_000))
    assert verdict.reason is not None
    assert len(verdict.reason) < 400
    assert "…" in verdict.reason
