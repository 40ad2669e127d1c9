"""From evidence to verdict: label, status, and a readable reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.harness.numerics.check import NumericsStatus
from compile_sweep.schema.causes.breaks import advice_on_break
from compile_sweep.schema.outcome import (
    LOST_TO_MACHINES,
    OK,
    Death,
    Label,
    Status,
    Verdict,
    backoff_s,
    judge_death,
    judge_measurement,
    judge_trial_death,
    judge_warm_start,
    naming_first_break,
    reason_of_fallback,
    verdict_of,
)

STATUSES = {
    Label.SWEEP_DIED: Status.FAILED,
    Label.NAN: Status.INFEASIBLE,
    Label.DIVERGES: Status.INFEASIBLE,
    Label.EAGER_UNSTABLE: Status.FAILED,
    Label.RECOMPILE_LIMIT: Status.INFEASIBLE,
    Label.CUDAGRAPHS_SKIPPED: Status.INFEASIBLE,
    Label.SILENT_FALLBACK: Status.INFEASIBLE,
    Label.INPUT_BOUND: Status.INFEASIBLE,
    Label.OUT_OF_MEMORY: Status.INFEASIBLE,
    Label.COMPILE_ERROR: Status.INFEASIBLE,
    Label.COMPILE_DEADLINE: Status.INFEASIBLE,
    Label.TRIAL_DEADLINE: Status.FAILED,
    Label.EXCEPTION: Status.FAILED,
    Label.CRASHED: Status.FAILED,
    Label.DEVICE_FAULT: Status.INFEASIBLE,
    Label.DEVICE_LOST: Status.FAILED,
    Label.DISK_FULL: Status.FAILED,
    Label.GPU_SHARED: Status.FAILED,
    Label.NOT_STARTED: Status.FAILED,
    Label.NODE_LOST: Status.FAILED,
    Label.ACTOR_LOST: Status.FAILED,
    Label.WORKER_DIED: Status.FAILED,
    Label.TRIAL_DIED: Status.FAILED,
    Label.NOT_WARM: Status.FAILED,
    Label.DOMINATED: Status.STOPPED,
    Label.BUDGET_SPENT: Status.STOPPED,
}
"""Repeats the statuses on purpose, so that no change of what is at fault goes unnoticed."""


def numerics(status: str = "ok", **fields: Any) -> dict[str, Any]:
    """A numerics check without findings, with these fields changed."""
    return {"status": status, "first_bad_step": None, "first_bad_steady_step": None, "worst": "", **fields}


def measurement(**fields: Any) -> dict[str, Any]:
    """A worker's measurement that speaks for the setting, with these fields changed."""
    fine = {
        "numerics": numerics(),
        "recompile_limit_hits": [],
        "fallbacks": [],
        "cudagraph_skips": 0,
        "cudagraph_skip_reasons": [],
        "data_wait_share": None,
        "stable": True,
        "step_ms_median": 20.0,
        "step_ms_ci95": (19.95, 20.05),
    }
    return {**fine, **fields}


def death(**fields: Any) -> Death:
    """A worker that died silently in the steady state, in time, with these fields changed."""
    known = {"phase": "steady", "in_phase_s": 5.0, "elapsed_s": 60.0, "compile_deadline_s": 600.0, "trial_deadline_s": 900.0}
    return Death(**{**known, **fields})


MEASURED: list[tuple[Label, dict[str, Any], list[str]]] = [
    (
        Label.GPU_SHARED,
        {"gpu_neighbours": ["process 7, 2.0 GiB"], "stable": False},
        ["did not have the GPU to itself", "process 7"],
    ),
    (Label.NAN, {"numerics": numerics("nan", first_bad_step=1)}, ["not finite from step 1 on", "eager is"]),
    (
        Label.NAN,
        {"numerics": numerics("nan", first_bad_steady_step=2, last_loss=0.5)},
        ["of timed step 2 is not finite, although training goes"],
    ),
    (Label.NAN, {"numerics": numerics("nan", first_bad_steady_step=2)}, ["not finite from timed step 2 on"]),
    (
        Label.DIVERGES,
        {"numerics": numerics("diverges", first_bad_step=2, worst="gradients of decoder are off by 7% (allowed 2%)")},
        ["from step 2 on", "gradients of decoder are off by 7% (allowed 2%)"],
    ),
    (Label.DIVERGES, {"numerics": numerics("diverges", worst="parameters of decoder")}, ["batches: parameters of decoder"]),
    (Label.EAGER_UNSTABLE, {"numerics": numerics("eager_unstable", worst="losses 4 and 5")}, ["eager itself", "losses 4"]),
    (
        Label.RECOMPILE_LIMIT,
        {"recompile_limit_hits": ["forward (model.py:10) hit recompile_limit 8: tensor 'ids' size mismatch"]},
        ["torch stopped compiling", "forward (model.py:10) hit recompile_limit 8", "dynamic=mark"],
    ),
    (
        Label.SILENT_FALLBACK,
        {"fallbacks": ["nothing was compiled"]},
        ["torch did not compile all that it should: nothing was compiled"],
    ),
    (Label.SILENT_FALLBACK, {"fallbacks": ["forward (model.py:10) runs eagerly", "b", "c"]}, ["model.py:10", "(and 2 more)"]),
    (
        Label.CUDAGRAPHS_SKIPPED,
        {"cudagraph_skips": 2, "cudagraph_skip_reasons": ["\nskipping cudagraphs due to cpu device\nmore"]},
        ["not used: skipping cudagraphs due to cpu device"],
    ),
    (Label.CUDAGRAPHS_SKIPPED, {"cudagraph_skips": 1}, ["torch gave no reason"]),
    (Label.INPUT_BOUND, {"data_wait_share": 0.3}, ["waits for data 30%", "allowed 5%", "--pipeline resident"]),
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
    (
        Label.DEVICE_FAULT,
        {"error_type": "torch.AcceleratorError", "error_text": "CUDA error: an illegal memory access was encountered"},
        ["in phase steady", "illegal memory access"],
    ),
    (
        Label.DEVICE_LOST,
        {"error_type": "torch.AcceleratorError", "error_text": "CUDA error: uncorrectable ECC error encountered"},
        ["no setting", "ECC"],
    ),
    (
        Label.DEVICE_LOST,
        {"error_type": "torch.AcceleratorError", "error_text": "CUDA error: CUDA-capable device(s) is/are busy or unavailable"},
        ["busy or unavailable"],
    ),
    (
        Label.DEVICE_LOST,
        {"error_type": "builtins.RuntimeError", "error_text": "No CUDA GPUs are available", "phase": "starting"},
        ["the GPU failed in phase starting", "No CUDA GPUs are available"],
    ),
    # While a worker is set up, before any of our functions runs in it, its exception is all that is known.
    (Label.NOT_STARTED, {"elapsed_s": 930.0, "phase": "starting", "has_started": False}, ["had started after 930 s"]),
    (Label.DEVICE_LOST, {"error_text": "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "phase": "starting"}, []),
    (Label.DEVICE_LOST, {"error_text": "CUDA error: uncorrectable ECC error encountered", "phase": "starting"}, ["ECC"]),
    (
        Label.DEVICE_LOST,  # other processes' memory: nothing of the setting is there yet
        {"error_text": "CUDA error: out of memory", "phase": "starting"},
        ["the GPU was full before the trial used it"],
    ),
    (
        Label.DEVICE_LOST,
        {"error_type": "torch.AcceleratorError", "error_text": "CUDA error: out of memory\nmore", "phase": "starting"},
        ["the GPU was full"],
    ),
    (
        Label.OUT_OF_MEMORY,
        {"error_type": "builtins.OSError", "error_text": "[Errno 12] Cannot allocate memory"},
        ["out of memory in phase steady: OSError"],
    ),
    (
        Label.OUT_OF_MEMORY,
        {
            "error_type": "builtins.RuntimeError",
            "error_text": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        },
        ["out of memory in phase steady", "CUBLAS_STATUS_ALLOC_FAILED"],
    ),
    (Label.OUT_OF_MEMORY, {"error_text": "[Errno 12] Cannot allocate memory"}, ["out of memory in phase steady: [Errno 12]"]),
    (
        Label.DISK_FULL,
        {"error_type": "builtins.OSError", "error_text": "[Errno 28] No space left on device: '/tmp/x'"},
        ["a disk was full", "No space left"],
    ),
    (
        Label.EXCEPTION,
        {
            "error_type": "torch._inductor.exc.InductorError",
            "error_text": "OSError: /tmp/torchinductor_me/ab/cabc.main.so: file too short",
            "error_is_compilers": True,
        },
        ["cabc.main.so: file too short", "no fault of the setting: remove it"],
    ),
    (Label.DISK_FULL, {"error_text": "[Errno 28] No space left on device"}, ["a disk was full"]),
    (
        Label.ACTOR_LOST,
        {"error_type": "ray.exceptions.ActorDiedError", "error_text": "The actor is dead because its owner died."},
        ["was gone", "its owner died"],
    ),
    (Label.NODE_LOST, {"nodes_lost": 1}, ["the host of a worker left the cluster in phase steady"]),
    (
        Label.NODE_LOST,  # another worker's exception is only a consequence
        {"nodes_lost": 2, "error_type": "builtins.RuntimeError", "error_text": "Connection reset by peer"},
        ["2 hosts"],
    ),
    (
        Label.WORKER_DIED,
        {"error_type": "builtins.RuntimeError", "error_text": "Connection closed by peer [127.0.0.1]:5", "num_workers": 2},
        ["a worker died without an exception", "another one says", "closed by peer"],
    ),
    (
        Label.EXCEPTION,  # with a single worker, something else closed
        {"error_type": "builtins.RuntimeError", "error_text": "Connection closed by peer"},
        ["closed by peer"],
    ),
    (Label.CRASHED, {"fatal": "Segmentation fault", "phase": "warming-up"}, ["Segmentation fault in phase warming-up"]),
    (Label.OUT_OF_MEMORY, {"oom_killed": True}, ["the host ran out of memory", "the kernel ended"]),
    (
        Label.OUT_OF_MEMORY,
        {"error_text": "3 Workers were killed due to the node running low on memory."},
        ["the host ran out of memory", "Ray ended"],
    ),
    (Label.COMPILE_DEADLINE, {"phase": "warming-up", "timed_out": True, "in_phase_s": 0.0}, ["after 600 s"]),
    (Label.TRIAL_DEADLINE, {"phase": "checking", "timed_out": True, "elapsed_s": 10.0}, ["in phase checking"]),
    (Label.COMPILE_DEADLINE, {"phase": "warming-up", "in_phase_s": 600.0}, ["after 600 s"]),
    (
        Label.COMPILE_DEADLINE,
        {
            "phase": "warming-up",
            "in_phase_s": 600.0,
            "recompiles": [
                f"forward (model.py:3): tensor 'ids' size mismatch at index 1. expected {size}, actual {size + 2}"
                for size in (8, 12)
            ],
        },
        ["compiled 2 times anew, lately forward (model.py:3)", "expected 12, actual 14", "lengths"],
    ),
    (
        Label.COMPILE_DEADLINE,
        {
            "phase": "warming-up",
            "in_phase_s": 600.0,
            "recompiles": [
                f"forward (model.py:3): tensor '{name}' size mismatch at index 1. expected 12, actual 14"
                for name in ("input_ids", "labels")
            ],
        },
        ["compiled 2 times anew", "compiles anew for each dimension that changes for the first time", "dynamic=mark"],
    ),
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


@pytest.mark.parametrize(
    "fields",
    [
        {"elapsed_s": 930.0},
        {"elapsed_s": 890.0, "timed_out": True},
        {"elapsed_s": 61.0, "error_text": "The worker group startup timed out after 60 seconds waiting for 1 workers."},
    ],
    ids=["no report", "its own deadline", "Ray's deadline"],
)
def test_a_trial_that_never_came_to_start_says_nothing_about_its_setting(fields: dict[str, Any]) -> None:
    usual = {"phase": "starting", "in_phase_s": 1.0, "trial_deadline_s": 900.0, "has_started": False}
    verdict = judge_death(death(**usual | fields))
    check(verdict, Label.NOT_STARTED, [f"no worker had started after {fields['elapsed_s']:.0f} s", "no fault of the setting"])
    assert backoff_s(verdict.label, []) is not None, "it is tried again"
    assert verdict.label in LOST_TO_MACHINES, "and again with --resume"
    check(judge_trial_death(930.0, 900.0, "The actor died", has_started=False), Label.NOT_STARTED, ["after 930 s"])


@pytest.mark.parametrize(
    ("restored", "words"), [(0, ["none of its artifacts"]), (None, ["none of"]), (9, ["found nothing it could use"])]
)
def test_a_start_from_artifacts_that_helped_nothing_is_labelled(restored: int | None, words: list[str]) -> None:
    check(judge_warm_start({"cache_hits": 0, "cache_restored": restored}), Label.NOT_WARM, words)


def test_a_start_whose_caches_could_not_be_watched_is_not_known_to_be_warm() -> None:
    check(judge_warm_start({"first_step_s": 1.0}), Label.NOT_WARM, ["none of its artifacts"])


def test_a_start_that_found_something_in_its_caches_was_warm() -> None:
    assert judge_warm_start({"cache_hits": 1, "cache_restored": 9}) == OK
    assert judge_warm_start({"cache_hits": 1, "cache_restored": None}) == OK  # from a remote cache


def test_every_label_is_met_above_and_has_a_status() -> None:
    elsewhere = {
        Label.TRIAL_DIED,
        Label.NOT_WARM,
        Label.DOMINATED,
        Label.BUDGET_SPENT,
        Label.SWEEP_DIED,
    }  # the last by orchestrator/run/sweep_folder.py
    met = {label for label, _, _ in (*MEASURED, *DEATHS)} | elsewhere
    assert met == set(Label) == set(STATUSES)


def test_a_measurement_nothing_speaks_against_is_ok() -> None:
    assert judge_measurement(measurement(), claims_cudagraphs=True) == OK == Verdict(status=Status.OK)


def test_skipped_cuda_graphs_matter_only_where_they_were_asked_for() -> None:
    skipped = measurement(cudagraph_skips=3, cudagraph_skip_reasons=["cpu device"])
    assert judge_measurement(skipped, claims_cudagraphs=False) == OK


def test_what_rules_a_setting_out_weighs_more_than_what_only_makes_its_figure_uncertain() -> None:
    faults: list[dict[str, Any]] = [
        {"numerics": numerics("nan", first_bad_step=0)},
        {"recompile_limit_hits": ["hit"]},
        {"fallbacks": ["nothing was compiled"]},
        {"cudagraph_skips": 1},
        {"data_wait_share": 0.5},
        {"gpu_neighbours": ["process 7"]},
    ]
    expected = ["nan", "recompile-limit", "silent-fallback", "cudagraphs-skipped", "input-bound", "gpu-shared"]
    for first, label in enumerate(expected):
        every_later_fault_too = {name: value for fault in reversed(faults[first:]) for name, value in fault.items()}
        assert judge_measurement(measurement(**every_later_fault_too), claims_cudagraphs=True).label == label


def test_noise_alone_is_no_reason_against_a_setting() -> None:
    assert judge_measurement(measurement(stable=False, step_ms_ci95=(15.0, 25.0)), claims_cudagraphs=False) == OK


def test_every_verdict_of_the_numerics_check_but_ok_has_a_label() -> None:
    for status in set(NumericsStatus) - {NumericsStatus.OK}:
        found = judge_measurement(measurement(numerics=numerics(str(status))), claims_cudagraphs=False)
        assert found.label == str(status).replace("_", "-")


@pytest.mark.parametrize("share", [None, 0.0, 0.05])
def test_waiting_for_data_a_twentieth_of_the_time_is_no_fault(share: float | None) -> None:
    assert judge_measurement(measurement(data_wait_share=share), claims_cudagraphs=False) == OK


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
@settings(deadline=None)
def test_a_reason_is_one_readable_line_whatever_the_error_said(text: str, phase: str, raised: bool) -> None:
    error_type = "builtins.RuntimeError" if raised else None
    reasons = [
        judge_death(death(error_type=error_type, error_text=text, phase=phase)).reason,
        judge_trial_death(30.0, 900.0, text).reason,
        judge_measurement(measurement(cudagraph_skips=1, cudagraph_skip_reasons=[text]), claims_cudagraphs=True).reason,
        judge_measurement(measurement(fallbacks=[text]), claims_cudagraphs=False).reason,
    ]
    for reason in reasons:
        assert reason is not None
        assert len(reason.splitlines()) == 1


def test_a_long_message_is_cut() -> None:
    verdict = judge_death(death(error_type="builtins.RuntimeError", error_text="x" * 10_000))
    assert verdict.reason is not None
    assert len(verdict.reason) < 400
    assert "…" in verdict.reason


def test_a_trial_that_was_stopped_failed_of_nothing_and_one_given_up_is_to_blame() -> None:
    check(verdict_of(Label.DOMINATED, "stopped: it had nothing to gain"), Label.DOMINATED, ["nothing to gain"])
    check(verdict_of(Label.COMPILE_DEADLINE, "given up"), Label.COMPILE_DEADLINE, ["given up"])


def test_advice_to_fix_a_break_inside_something_names_the_first_that_is_not_that_one() -> None:
    inner = "common.py:337 in forward: Dynamic control flow\n  code: if x.sum() > 0:\n  explanation: none"
    around = "yolo.py:165 in <listcomp>: Missing tp_iternext\n  code: [f(x) for x in y]"
    advice = advice_on_break(around)
    assert advice is not None
    assert advice.endswith("fix the break inside it first")
    named = f"{advice}, Dynamic control flow at common.py:337 in forward"
    assert naming_first_break(advice, [around, inner]) == naming_first_break(advice, [inner, around]) == named
    assert naming_first_break(f"  → {advice}", [inner]) == f"  → {named}"
    assert naming_first_break(advice, [around]) == advice, "there is none to name"
    long = naming_first_break(advice, [inner.replace("flow", "flow " + 9 * "of data-dependent expressions ")])
    assert len(named) < len(long) < len(named) + 80
    assert long.endswith(" … at common.py:337 in forward")
    assert naming_first_break("leave it out", [inner]) == "leave it out"
    fallback = "the frame <listcomp> (yolo.py:165) runs eagerly: graph break in loop, at yolo.py:165"
    assert "Dynamic control flow at common.py:337" in reason_of_fallback([fallback], [around, inner])
