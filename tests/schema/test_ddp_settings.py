"""Settings of several workers: their spelling, what is refused, and their source."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.harness.source import Facts, to_source, wrapped_and_compiled, wrapper
from compile_sweep.schema.ddp_settings import DdpSettings, check_ddp_workers
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.space import Target, choose

VALUES: dict[str, list[Any]] = {
    "bucket_cap_mb": [None, 1, 25, "100"],
    "compression": [None, "none", "fp16", "bf16", "powersgd"],
    "powersgd_rank": [None, 1, 4],
    "powersgd_start": [None, 2, 10],
    "optimize_ddp": [None, True, "off", "ddp_optimizer", "python_reducer", "no_optimization"],
    "around": [None, "model", "wrapper"],
    "gradient_as_bucket_view": [None, True, "off"],
    "static_graph": [None, "on", False],
    "find_unused_parameters": [None, True, False],
    "batched_grad_copy": [None, True],
    "broadcast_buffers": [None, True, False],
}


def facts(**fields: Any) -> Facts:
    usual: dict[str, Any] = {
        "workload": "Toy", "device_type": "cuda", "torch_version": (2, 13), "max_length": 16, "targets": {"": {}},
        "autocast": None, "attention": None, "num_workers": 2,
    }  # fmt: skip
    return Facts(**(usual | fields))


def source(spelled: str, **fields: Any) -> str:
    return to_source(CompileSettings.parse(spelled), facts(**fields))


@given(
    scope=st.sampled_from(["eager", "full", "regional"]),
    values=st.fixed_dictionaries({name: st.sampled_from(options) for name, options in VALUES.items()}),
)
@settings(deadline=None)
def test_what_is_accepted_is_read_back_equal_and_written_as_source(scope: str, values: dict[str, Any]) -> None:
    try:
        made = CompileSettings(scope=scope, ddp=values)  # type: ignore[arg-type]
    except SettingsError:
        return
    assert CompileSettings.parse(made.key) == made
    assert CompileSettings.from_dict(made.to_dict()) == made
    assert CompileSettings.from_dict(made.fields_that_apply()) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.eager_counterpart().scope == "eager"
    compile(to_source(made, facts()), "source", "exec")


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("ddp.optimize_ddp=on,ddp.compression=none,ddp.around=model,ddp.broadcast_buffers=on,ddp.static_graph=off", ""),
        ("ddp.optimize_ddp=off", "ddp.optimize_ddp=no_optimization"),
        ("ddp.compression=powersgd,ddp.powersgd_rank=1,ddp.powersgd_start=2", "ddp.compression=powersgd"),
    ],
)
def test_what_torch_does_anyway_is_the_same_setting(spelling: str, canonical: str) -> None:
    assert CompileSettings.parse(spelling).key == CompileSettings.parse(canonical).key


def test_torchs_bucket_size_said_is_another_setting_than_none_said() -> None:
    assert CompileSettings.parse("ddp.bucket_cap_mb=25") != CompileSettings()


@pytest.mark.parametrize(
    ("spelling", "named"),
    [
        ("ddp.bucket_cap=9", ["ddp.bucket_cap ", "did you mean bucket_cap_mb?"]),
        ("ddp=fast", ["write it like ddp.bucket_cap_mb=100"]),
        ("ddp.bucket_cap_mb=0", ["ddp.bucket_cap_mb=0", "MiB"]),
        ("ddp.compression=zip", ["ddp.compression=zip", "powersgd"]),
        ("ddp.optimize_ddp=python_reducer_without_compiled_forward", ["ignores it"]),
        ("ddp.powersgd_rank=4", ["ddp.powersgd_rank", "ddp.compression=powersgd"]),
        ("ddp.compression=powersgd,ddp.powersgd_start=1", ["ddp.powersgd_start=1", "2 or more"]),
        ("ddp.static_graph=on,ddp.find_unused_parameters=on", ["ddp.static_graph", "finds unused parameters once"]),
        ("ddp.optimize_ddp=python_reducer,ddp.static_graph=on", ["ddp.static_graph", "python_reducer"]),
        ("ddp.optimize_ddp=python_reducer,ddp.compression=powersgd", ["buckets", "python_reducer"]),
        ("ddp.optimize_ddp=python_reducer,static_gradients=on", ["static_gradients", "python_reducer"]),
        ("ddp.optimize_ddp=python_reducer,ddp.around=wrapper", ["ddp.around=wrapper", "python_reducer"]),
        ("scope=eager,ddp.optimize_ddp=off", ["ddp.optimize_ddp", "scope=eager"]),
        ("scope=regional,ddp.around=wrapper", ["ddp.around=wrapper", "scope=full"]),
        ("fullgraph=on,ddp.around=wrapper", ["fullgraph=on", "DistributedDataParallel"]),
        ("static_gradients=on,ddp.gradient_as_bucket_view=on", ["ddp.gradient_as_bucket_view", "static_gradients"]),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(spelling: str, named: list[str]) -> None:
    with pytest.raises(SettingsError) as refusal:
        CompileSettings.parse(spelling)
    assert all(name in str(refusal.value) for name in named), str(refusal.value)


def test_a_whole_graph_inside_the_wrapper_is_no_contradiction() -> None:
    assert CompileSettings.parse("fullgraph=on,ddp.bucket_cap_mb=50").fullgraph


@pytest.mark.parametrize(
    ("workers", "named"),
    [
        ({"num_workers": 1}, "there is one; add --workers-per-trial 2"),
        ({"num_workers": 2, "trains": False}, "only infers"),
        ({"num_workers": 2, "has_gpu": False}, "needs NCCL"),
    ],
)
def test_what_the_workers_cannot_follow_is_refused(workers: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        check_ddp_workers(DdpSettings(compression="bf16"), workload="Toy", **workers)  # type: ignore[arg-type]
    check_ddp_workers(None, workload="Toy", **workers)


def test_a_sweep_leaves_out_what_its_workers_cannot_follow_and_says_why() -> None:
    candidates = [{"scope": "eager"}, {"scope": "full", "ddp.static_graph": True}]
    alone, together = (choose(candidates, Target(max_length=16, has_gpu=True, num_workers=n)) for n in (1, 2))
    assert [(len(one.settings), len(one.excluded)) for one in (alone, together)] == [(1, 1), (2, 0)]
    assert "ddp.static_graph=on needs several workers" in alone.excluded[0].reason


def test_the_eager_twin_reduces_gradients_alike_and_is_told_nothing_about_compiling() -> None:
    twin = CompileSettings.parse("ddp.compression=fp16,ddp.optimize_ddp=off,ddp.around=wrapper").eager_counterpart()
    assert twin == CompileSettings.parse("scope=eager,ddp.compression=fp16")
    assert CompileSettings.parse("ddp.optimize_ddp=off").eager_counterpart() == CompileSettings.parse("scope=eager")


def test_a_more_precise_run_rounds_no_gradients_and_keeps_what_is_another_update() -> None:
    assert DdpSettings(compression="fp16").exact() is None  # type: ignore[arg-type]
    power = DdpSettings(compression="powersgd", powersgd_rank=4)  # type: ignore[arg-type]
    assert power.exact() == power


def test_one_worker_has_no_wrapper_in_its_source() -> None:
    assert "DistributedDataParallel" not in source("scope=full", num_workers=1)
    assert "DistributedDataParallel" not in source("scope=full", num_workers=2, grad_mode="no_grad")


@pytest.mark.parametrize("scope", ["eager", "full", "regional"])
def test_the_wrapper_goes_around_what_is_compiled_unless_it_is_compiled_itself(scope: str) -> None:
    assert "forward = distributed(compile_model(model))" in source(f"scope={scope}")
    assert "forward = compile_model(distributed(model))" in source("scope=full,ddp.around=wrapper")
    assert wrapped_and_compiled(None) == "distributed(compile_model(model))"


def test_arguments_hooks_and_switches_are_torchs_own() -> None:
    text = source("ddp.compression=powersgd,ddp.powersgd_rank=4,ddp.bucket_cap_mb=50,ddp.optimize_ddp=off")
    assert "DistributedDataParallel(model, bucket_cap_mb=50)" in text
    assert "PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)" in text
    assert "wrapped.register_comm_hook(state, powerSGD_hook)" in text
    assert 'torch._dynamo.config.optimize_ddp = "no_optimization"' in text
    assert "import bf16_compress_hook" in source("ddp.compression=bf16")


def test_the_name_of_an_argument_follows_the_version_of_torch() -> None:
    ddp = DdpSettings(broadcast_buffers=False)
    assert "broadcast_buffers=False" in "\n".join(wrapper(ddp, (2, 12)))
    assert "forward_sync_buffers=False" in "\n".join(wrapper(ddp, (2, 13)))


def test_a_reducer_in_python_comes_with_a_compiled_backward() -> None:
    text = source("ddp.optimize_ddp=python_reducer,autocast=fp16")
    assert "torch._dynamo.config.compiled_autograd = True" in text
    assert "backward = torch.compile(run_backward, dynamic=False)" in text
    assert "backward(scaler.scale(loss))" in text
