"""Settings as levers, and what recorded sweeps say about each."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks.levers.lever_prior import gains_in, prior_text
from compile_sweep.schema.causes.errors import GRAPHS_POOL
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.lever_prior import LeverGain, Prior, parse_prior, shipped_prior
from orchestrator.search.levers import Lever, changed, fails_alike, levers_of


def levers(text: str) -> dict[str, str]:
    return levers_of(CompileSettings.parse(text))


@pytest.mark.parametrize(
    ("setting", "pulled"),
    [
        ("scope=eager", {}),
        ("scope=eager,as_written=on", {}),
        ("scope=eager,padding=longest,optimizer=fused", {"padding": "longest", "optimizer": "fused"}),
        ("scope=full,mode=reduce-overhead", {"scope": "full", "cudagraphs": "on"}),
        ("scope=full,mode=max-autotune", {"scope": "full", "cudagraphs": "on", "max_autotune": "on"}),
        ("scope=full,mode=max-autotune-no-cudagraphs", {"scope": "full", "max_autotune": "on"}),
        (
            "scope=full,mode=max-autotune,inductor.coordinate_descent_tuning=off",
            {"scope": "full", "cudagraphs": "on", "max_autotune": "on"},
        ),
        ("scope=full,inductor.coordinate_descent_tuning=off", {"scope": "full"}),
        ("scope=full,inductor.coordinate_descent_tuning=on", {"scope": "full", "options.coordinate_descent_tuning": "on"}),
        ("scope=regional,dynamic=buckets,buckets=16/64", {"scope": "regional", "dynamic": "buckets:16/64"}),
        ("scope=full,optimizer=compiled", {"scope": "full", "optimizer": "fused", "compiled_optimizer": "compiled"}),
    ],
)
def test_a_setting_pulls_the_levers_that_are_not_at_their_baseline(setting: str, pulled: dict[str, str]) -> None:
    assert levers(setting) == pulled


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("optimizer=fused", "optimizer=compiled"),
        ("optimizer=foreach", "optimizer=compiled"),
        ("dynamic=buckets,buckets=16/64", "dynamic=mark,inductor.triton.mix_order_reduction=off"),
    ],
)
def test_what_goes_together_is_one_change(before: str, after: str) -> None:
    assert len(changed(levers(f"scope=full,{before}"), levers(f"scope=full,{after}"))) == 1


def test_a_compiled_optimizers_gain_is_over_a_fused_one() -> None:
    done = [
        record(f"scope=full,optimizer={kind}", rate) for kind, rate in (("foreach", 100.0), ("fused", 130.0), ("compiled", 131.0))
    ]
    gains = {one.lever: one.log_gain for one in gains_in(done)}
    assert gains == {
        "optimizer=fused": pytest.approx(math.log(1.3), abs=1e-3),
        "compiled_optimizer=compiled": pytest.approx(math.log(131 / 130), abs=1e-3),
    }


def test_what_failed_by_a_workloads_option_says_nothing_of_its_other_options() -> None:
    failed = CompileSettings.parse("scope=full,workload.matching=python")
    assert "workload" in (fails_alike(failed, "silent-fallback", "hungarian runs eagerly") or ())


@pytest.mark.parametrize("cache", ["", ",use_cache=off"])
def test_what_cannot_be_traced_fails_whatever_the_lengths_and_with_a_cache_if_it_fails_without(cache: str) -> None:
    failed = CompileSettings.parse(f"scope=full,dynamic=auto,pad_to_multiple_of=64{cache}")
    shared = fails_alike(failed, "silent-fallback", "forward runs eagerly") or ()
    assert not {"dynamic", "pad_to_multiple_of"} & set(shared)
    assert ("use_cache" in shared) is not bool(cache)


@pytest.mark.parametrize("loss", ["", ",compile_loss=on"])
def test_what_failed_with_a_compiled_loss_says_nothing_of_settings_without_it(loss: str) -> None:
    failed = CompileSettings.parse(f"scope=full,dynamic=auto,optimizer=fused{loss}")
    shared = fails_alike(failed, "silent-fallback", "forward runs eagerly") or ()
    assert "optimizer" not in shared
    assert ("scope" in shared, "compile_loss" in shared) == (True, bool(loss))
    told = "torch did not compile all that it should: forward of Translator (train.py:5) runs eagerly"
    for classes, may_be_the_loss in (((), True), (("Translate", "Loss"), True), (("Encoder", "Translator"), False)):
        shared = fails_alike(failed, "silent-fallback", told, classes) or ()
        assert ("scope" in shared, "compile_loss" in shared) == (True, may_be_the_loss and bool(loss))
    assert "compile_loss" not in (fails_alike(failed, "compile-error", GRAPHS_POOL) or ("compile_loss",))  # no loss has weights


def test_to_compile_is_one_change_whatever_it_calls_the_lengths() -> None:
    assert changed(levers("scope=eager,padding=longest"), levers("scope=full,dynamic=auto")) == ["scope"]
    assert changed(levers("scope=full"), levers("scope=full,dynamic=auto")) == ["dynamic"]
    assert changed(levers("scope=full,mode=reduce-overhead"), levers("scope=regional")) == ["cudagraphs", "scope"]


def record(setting: str, samples_per_s: float | None, **fields: Any) -> TrialRecord:
    made = CompileSettings.parse(setting)
    status = Status.OK if samples_per_s else Status.INFEASIBLE
    known = {
        "workload": "made",
        "size": "up",
        "device": "NVIDIA H100",
        "status": status,
        "samples_per_s": samples_per_s,
        **fields,
    }
    return TrialRecord(trial_id=setting, settings=made.to_dict(), settings_key=made.key, **known)


def test_a_gain_is_the_median_over_pairs_that_differ_in_the_lever_alone() -> None:
    done = [
        record("scope=eager", 100.0),
        record("scope=full", 200.0),
        record("scope=full,optimizer=fused", 220.0),
        record("scope=full,mode=reduce-overhead", 300.0),
        record("scope=full,mode=reduce-overhead,optimizer=fused", 360.0),
        record("scope=nested", None),
        record("scope=regional", 999.0, status=Status.FAILED, label="node-lost"),
    ]
    found = {(gain.lever, gain.compiled): gain for gain in gains_in(done)}
    assert found["optimizer=fused", True].log_gain == pytest.approx((math.log(1.1) + math.log(1.2)) / 2, abs=1e-4)
    assert found["optimizer=fused", True].pairs == 2
    assert found["scope=full", False].log_gain == pytest.approx(math.log(2), abs=1e-4)
    assert (found["scope=nested", False].pairs, found["scope=nested", False].failed) == (0, 1)
    assert ("scope=regional", False) not in found, "what its machines ended says nothing of a lever"
    assert {gain.device for gain in found.values()} == {"cuda"}


def gain(workload: str, log_gain: float, **fields: Any) -> LeverGain:
    usual = {"lever": "cudagraphs=on", "compiled": True, "size": "base", "device": "cuda", "pairs": 1, "failed": 0}
    return LeverGain(**{**usual, "workload": workload, "log_gain": log_gain, **fields})


GRAPHS = Lever("cudagraphs", "on")


def test_what_was_learned_on_the_workload_itself_or_its_family_is_left_out() -> None:
    prior = Prior([gain("gpt2", 1.0), gain("gpt2-inference", 1.2), gain("resnet", 0.4)])
    assert prior.elsewhere("gpt2", has_gpu=True).of(GRAPHS, compiled=True).num_workloads == 1
    assert prior.elsewhere("captioning", has_gpu=True).of(GRAPHS, compiled=True).num_workloads == 2


def test_a_lever_is_expected_to_gain_what_it_did_elsewhere_the_surer_the_more_workloads_agree() -> None:
    one = Prior([gain("resnet", 0.4)]).of(GRAPHS, compiled=True)
    many = Prior([gain(f"model-{number}", 0.4) for number in range(6)]).of(GRAPHS, compiled=True)
    assert 0 < one.log_gain < many.log_gain < 0.4
    assert many.spread < one.spread
    unknown = Prior().of(Lever("optimizer", "nobodys"), compiled=True)
    assert (unknown.log_gain, unknown.num_workloads) == (0.0, 0)


def test_sizes_of_one_workload_count_as_one_and_another_device_as_half() -> None:
    sizes = [gain("gpt2", 0.4, size=size) for size in ("small", "large", "xl")]
    expected = [Prior(known).of(GRAPHS, compiled=True).log_gain for known in (sizes, sizes[:1])]
    assert expected[0] == pytest.approx(expected[1])
    here, there = (Prior([gain("gpt2", 0.8)]).elsewhere("x", has_gpu=has).of(GRAPHS, compiled=True) for has in (True, False))
    assert there.log_gain < here.log_gain


def test_what_failed_elsewhere_is_less_likely_to_work() -> None:
    fails = Prior([gain("a", 0.0, pairs=0, failed=6)]).of(GRAPHS, compiled=True)
    works = Prior([gain("a", 0.3, pairs=6)]).of(GRAPHS, compiled=True)
    assert fails.works < 0.5 < works.works


def test_the_shipped_prior_is_what_its_text_says_and_knows_the_levers_that_win() -> None:
    assert shipped_prior().elsewhere("nobodys", has_gpu=True).of(GRAPHS, compiled=True).log_gain > 0.2
    gains = [gain("b", 0.25), gain("a", 0.5)]
    parsed = parse_prior(prior_text(gains))
    assert parsed.of(GRAPHS, compiled=True) == Prior(gains).of(GRAPHS, compiled=True)
    assert prior_text(gains) == prior_text(reversed(gains))


@pytest.mark.parametrize(
    "change",
    [
        {"log_gain": "much"},
        {"log_gain": 1},
        {"pairs": -1},
        {"device": "tpu"},
        {"lever": "fused"},
        {"colour": "red"},
        {"failed": True},
    ],
)
def test_a_prior_that_was_not_written_so_is_refused(change: dict[str, Any]) -> None:
    told = json.loads(prior_text([gain("a", 0.5)]))
    told["gains"][0] |= change
    with pytest.raises(ConfigError, match="holds no gains of levers"):
        parse_prior(json.dumps(told))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2, "gains": []}'])
def test_a_file_that_is_no_prior_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="install compile-sweep again"):
        parse_prior(text)


@pytest.mark.parametrize(("layout", "shared"), [(",memory_format=channels_last", ("memory_format",)), ("", None)])
def test_a_view_that_cannot_be_laid_out_otherwise_fails_with_every_other_lever(
    layout: str, shared: tuple[str, ...] | None
) -> None:
    failed = CompileSettings.parse(f"scope=eager,optimizer=fused{layout}")
    reason = "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension spans two)"
    assert fails_alike(failed, "exception", reason) == shared


def test_what_saves_no_memory_fails_like_a_script_that_runs_out_of_it_as_it_is() -> None:
    shared = fails_alike(CompileSettings.parse("scope=eager,as_written=on"), "out-of-memory", "out of memory") or ()
    assert "scope" in shared
    assert not {"optimizer", "matmul_precision", "memory_format", "as_written"} & set(shared)
    assert fails_alike(CompileSettings.parse("scope=eager,optimizer=fused"), "out-of-memory", "out of memory") is None


@pytest.mark.parametrize("compiles_loss", [True, False])
def test_an_operator_that_fails_while_it_is_traced_does_so_with_another_optimizer(compiles_loss: bool) -> None:
    """As of a recommender whose forward makes its tensors of arrays: three settings failed alike within two seconds."""
    failed = CompileSettings.parse(f"scope=full,dynamic=auto,optimizer=fused{',compile_loss=on' if compiles_loss else ''}")
    reason = "ScriptError: the compiler raised TorchRuntimeError: RuntimeError when making fake tensor call: expected long"
    shared = fails_alike(failed, "compile-error", reason) or ()
    assert {"scope", "dynamic"} < set(shared)
    assert "optimizer" not in shared
    assert ("compile_loss" in shared) is compiles_loss
    assert fails_alike(failed, "compile-error", "the compiler raised InductorError: no such operator") is None
