"""Two workers measure settings together, by gloo on the CPU: what is wrapped and compiled, and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
from toy_workloads import Toy
from workers_at_work import Job, measured_together

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

QUICK = "backend=aot_eager"
"""Traces and splits like Inductor, without generating code."""

TOY, UNUSED, WIDE = (f"toy_workloads:{name}" for name in ("Toy", "UnusedParameters", "Wide"))

Ranks = list[dict[str, Any]]
"""What each worker says of a job."""

JOBS = {
    "eager": Job(TOY, "scope=eager,ddp.compression=fp16"),
    "full": Job(TOY, f"scope=full,fullgraph=on,{QUICK}"),
    "wrapper": Job(TOY, f"scope=full,ddp.around=wrapper,{QUICK}"),
    "regional": Job(TOY, f"scope=regional,ddp.gradient_as_bucket_view=on,{QUICK}"),
    "modular": Job(TOY, f"scope=modular,dynamic=mark,pad_multiple=4,ddp.static_graph=on,{QUICK}"),
    "until steady": Job(TOY, "scope=eager", protocol={"max_passes": 6, "cpu_target_width": 0.1}),
    "unused parameters": Job(UNUSED, "scope=eager"),
    "unused parameters, looked for": Job(UNUSED, f"scope=full,ddp.find_unused_parameters=on,{QUICK}"),
    "unused parameters, static graph": Job(UNUSED, "scope=eager,ddp.static_graph=on"),
    "bf16": Job(TOY, "scope=eager,ddp.compression=bf16"),
    "powersgd": Job(TOY, "scope=eager,ddp.compression=powersgd"),
}


@pytest.fixture(scope="module")
def together() -> dict[str, Ranks]:
    """What two workers say of all jobs, which they measure one after the other: processes that import torch take longest."""
    return dict(zip(JOBS, measured_together(list(JOBS.values())), strict=True))


def test_every_scope_trains_as_eager_does_with_the_gradients_of_all(together: dict[str, Ranks]) -> None:
    for scope in ("eager", "full", "wrapper", "regional", "modular"):
        first, second = together[scope]
        assert first["numerics"]["status"] == "ok", first["numerics"]["worst"]
        assert first["fallbacks"] == []
        assert first["optimize_ddp"] is True, "torch's configuration is put back"
        assert {name: first[name] for name in TOGETHER} == {name: second[name] for name in TOGETHER}
        assert len(first["compile_s_by_rank"]) == len(first["peak_memory_bytes_by_rank"]) == 2
        assert first["compile_s"] == max(first["compile_s_by_rank"])
        assert first["samples_per_s_per_worker"] == pytest.approx(first["samples_per_s"] / 2)
    full, wrapper = together["full"][0], together["wrapper"][0]
    assert [len(full["graph_break_reasons"]), full["graphs"]] == [0, 1], "the wrapper is around what is compiled"
    assert wrapper["graph_break_reasons"], "Dynamo runs the wrapper's forward in pieces"


TOGETHER = ("compile_s", "samples_per_s", "tokens_per_s", "mean_length", "peak_memory_bytes", "numerics")


def test_workers_that_measure_until_the_interval_is_narrow_take_the_same_steps(together: dict[str, Ranks]) -> None:
    first, second = ((one["steady_steps"], len(one["eager_step_ms"])) for one in together["until steady"])
    assert first == second
    assert first[0] % Toy.pool_batches == 0
    assert first[1] > 0


@pytest.mark.nightly("compiles in three more worker groups; the test above trains in every scope")
def test_the_compiler_splits_its_graph_by_buckets_unless_told_not_to() -> None:
    (split, _), (whole, _), (python, _) = measured_together(
        [
            Job(WIDE, f"scope=full,ddp.bucket_cap_mb=1,{QUICK}"),
            Job(WIDE, f"scope=full,ddp.bucket_cap_mb=1,ddp.optimize_ddp=off,{QUICK}"),
            Job(WIDE, f"scope=full,ddp.optimize_ddp=python_reducer,{QUICK}"),
        ]
    )
    assert [one["numerics"]["status"] for one in (split, whole, python)] == ["ok"] * 3
    assert split["aot_graphs"] >= 3
    assert whole["aot_graphs"] == 1
    assert python["graphs"] == 2, "the backward is a graph of its own, with the reduction in it"
    assert python["optimize_ddp"] is True


def test_parameters_without_gradients_have_to_be_looked_for(together: dict[str, Ranks]) -> None:
    assert all("find_unused_parameters" in one["error"] for one in together["unused parameters"])
    for fixed in ("looked for", "static graph"):
        first, _ = together[f"unused parameters, {fixed}"]
        assert first["numerics"]["status"] == "ok", first


@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_what_gloo_cannot_do_is_refused_in_a_sentence(compression: str, together: dict[str, Ranks]) -> None:
    needed = f"SettingsError: ddp.compression={compression} needs NCCL, and NCCL needs GPUs; use fp16"
    assert [one["error"] for one in together[compression]] == [needed] * 2
