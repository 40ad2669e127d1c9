"""Two workers measure settings together, by gloo on the CPU: what is wrapped and compiled, and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
from workers_at_work import measured_together

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

QUICK = "backend=aot_eager"
"""Traces and splits like Inductor, without generating code."""


def both(workload: str, *settings: str, size: str = "only") -> list[list[dict[str, Any]]]:
    return measured_together(f"toy_workloads:{workload}", size, settings)


def test_every_scope_trains_as_eager_does_with_the_gradients_of_all() -> None:
    eager, full, wrapper, regional, modular = both(
        "Toy",
        "scope=eager,ddp.compression=fp16",
        f"scope=full,fullgraph=on,{QUICK}",
        f"scope=full,ddp.around=wrapper,{QUICK}",
        f"scope=regional,optimizer=compiled,ddp.gradient_as_bucket_view=on,{QUICK}",
        f"scope=modular,dynamic=mark,pad_multiple=4,ddp.static_graph=on,{QUICK}",
    )
    for ranks in (eager, full, wrapper, regional, modular):
        first, second = ranks
        assert first["numerics"]["status"] == "ok", first["numerics"]["worst"]
        assert first["fallbacks"] == []
        assert first["optimize_ddp"] is True, "torch's configuration is put back"
        assert {name: first[name] for name in TOGETHER} == {name: second[name] for name in TOGETHER}
        assert len(first["compile_s_by_rank"]) == len(first["peak_memory_bytes_by_rank"]) == 2
        assert first["compile_s"] == max(first["compile_s_by_rank"])
        assert first["samples_per_s_per_worker"] == pytest.approx(first["samples_per_s"] / 2)
    assert [len(full[0]["graph_break_reasons"]), full[0]["graphs"]] == [0, 1], "the wrapper is around what is compiled"
    assert wrapper[0]["graph_break_reasons"], "Dynamo runs the wrapper's forward in pieces"


TOGETHER = ("compile_s", "samples_per_s", "tokens_per_s", "mean_length", "peak_memory_bytes", "numerics")


@pytest.mark.nightly("compiles in three more worker groups; the test above trains in every scope")
def test_the_compiler_splits_its_graph_by_buckets_unless_told_not_to() -> None:
    split, whole, python = both(
        "Wide",
        f"scope=full,ddp.bucket_cap_mb=1,{QUICK}",
        f"scope=full,ddp.bucket_cap_mb=1,ddp.optimize_ddp=off,{QUICK}",
        f"scope=full,ddp.optimize_ddp=python_reducer,{QUICK}",
    )
    assert [ranks[0]["numerics"]["status"] for ranks in (split, whole, python)] == ["ok"] * 3
    assert split[0]["aot_graphs"] >= 3
    assert whole[0]["aot_graphs"] == 1
    assert python[0]["graphs"] == 2, "the backward is a graph of its own, with the reduction in it"
    assert python[0]["optimize_ddp"] is True


def test_parameters_without_gradients_have_to_be_looked_for() -> None:
    lost, found, fixed = both(
        "UnusedParameters",
        "scope=eager",
        f"scope=full,ddp.find_unused_parameters=on,{QUICK}",
        "scope=eager,ddp.static_graph=on",
    )
    assert all("find_unused_parameters" in one["error"] for one in lost)
    for ranks in (found, fixed):
        assert ranks[0]["numerics"]["status"] == "ok", ranks[0]


def test_what_gloo_cannot_do_is_refused_in_a_sentence() -> None:
    for compression, ranks in zip(("bf16", "powersgd"), both("Toy", *_COMPRESSED), strict=True):
        needed = f"SettingsError: ddp.compression={compression} needs NCCL, and NCCL needs GPUs; use fp16"
        assert [one["error"] for one in ranks] == [needed] * 2


_COMPRESSED = ("scope=eager,ddp.compression=bf16", "scope=eager,ddp.compression=powersgd")
