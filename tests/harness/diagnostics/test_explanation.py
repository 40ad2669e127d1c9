"""A measurement in words."""

from __future__ import annotations

from typing import Any

import pytest

from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_measurement
from compile_sweep.schema.settings import CompileSettings

MEASUREMENT: dict[str, Any] = {
    "graphs": 2,
    "graph_break_reasons": [],
    "recompile_reasons": [],
    "recompile_limit_hits": [],
    "fallbacks": [],
    "cudagraph_skips": 0,
    "cudagraph_skip_reasons": [],
    "perf_hints": [],
    "step_ms_median": 20.0,
    "step_ms_ci95": [19.9, 20.1],
    "stable": True,
    "samples_per_s": 3200.0,
    "speedup_eager": 1.5,
    "data_wait_share": None,
    "compile_s": 50.0,
    "first_step_s": 30.0,
    "compile_phases_s": {"dynamo": 5.0, "inductor": 45.0, "cudagraph_capture": 0.0},
    "peak_memory_bytes": 16 * 2**30,
    "peak_reserved_bytes": 20 * 2**30,
    "compile_peak_memory_bytes": 18 * 2**30,
    "cudagraph_pool_bytes": 4 * 2**30,
    "numerics": {"status": "ok", "compared_steps": 10, "worst": "gradients of decoder: off by 1%, 2% allowed"},
}


def sections(spelled: str, targets: tuple[str, ...] = (), **fields: Any) -> dict[str, list[str]]:
    settings = CompileSettings.parse(spelled)
    lengths = KnownSizes(settings=settings, max_length=128, batch_size=4)
    return {part.title: list(part.lines) for part in explain_measurement({**MEASUREMENT, **fields}, settings, lengths, targets)}


@pytest.mark.parametrize(
    ("spelled", "targets", "graphs", "words"),
    [
        ("scope=full", (), 2, "2 graphs of the model and its loss as one"),
        ("scope=eager", (), 1, "1 graph: scope=eager compiles no part of the model"),
        ("scope=modular", ("encoder", "decoder"), 2, "2 graphs of 2 modules: encoder, decoder"),
        ("scope=regional", tuple(f"h.{i}" for i in range(12)), 1, "1 graph of 12 modules: h.0, h.1, h.2, … h.11"),
    ],
)
def test_it_says_what_was_compiled(spelled: str, targets: tuple[str, ...], graphs: int, words: str) -> None:
    assert sections(spelled, targets, graphs=graphs)["compiled"][0] == words


def test_a_recompile_is_said_once_with_its_number_and_what_helps() -> None:
    reason = "forward (model.py:3): tensor 'ids' size mismatch at index 1. expected 64, actual 72"
    assert sections("scope=full,dynamic=auto", recompile_reasons=[reason] * 3)["recompiles"] == [
        f"{reason} (3 times)",
        "  → the sequence length changed from 64 to 72 (dimension 1 of ids): dynamic=auto compiles the first length alone and "
        "then once for all; dynamic=mark does so at once",
    ]


def test_what_helps_several_recompiles_is_said_once_below_them() -> None:
    reasons = [
        f"{where}: tensor 'ids' size mismatch at index 1. expected 64, actual 72" for where in ("step (net.py:3)", "f (net.py:9)")
    ]
    first, second, said = sections("scope=full,dynamic=auto", recompile_reasons=reasons)["recompiles"]
    assert (first, second) == tuple(reasons)
    assert said.startswith("  → the sequence length changed from 64 to 72")


def test_code_after_a_break_in_a_block_is_of_blocks_too() -> None:
    reasons = [
        "forward of Layer (net.py:1): tensor 'args[0]' size mismatch at index 1. expected 256, actual 64",
        "forward from line 7 on (net.py:7): ___check_type_id(self.drop_path, 9), type=<class 'Identity'> # net.py:8 in forward",
        "forward (net.py:2): tensor 'hidden' size mismatch at index 1. expected 256, actual 64",
    ]
    said = sections("scope=regional,dynamic=auto", recompile_reasons=reasons)["recompiles"]
    assert any("and each kind of them" in line for line in said)
    assert not any("was replaced by another" in line or "keep it fixed" in line for line in said)
    alone = sections("scope=full,dynamic=auto", recompile_reasons=reasons[1:])["recompiles"]
    assert any("was replaced by another" in line for line in alone)


def test_a_length_that_must_be_even_is_padded_to_multiples() -> None:
    reason = "forward (model.py:3): (batch['ids'].size()[1] % 2) == 0 # associative_scan( # mamba.py:236 in scan"
    (_, said) = sections("scope=full,dynamic=mark", recompile_reasons=[reason])["recompiles"]
    assert "dimension 1 of ids is a multiple of 2" in said
    assert "pad_multiple=2" in said


def test_a_graph_break_keeps_torchs_advice_and_gets_ours() -> None:
    reason = "model.py:28 in forward: Unsupported Tensor.item() call\n  code: if x.item() > 0:\n  hint: capture_scalar_outputs"
    assert sections("scope=full", graph_break_reasons=[reason])["graph breaks"] == [
        "model.py:28 in forward: Unsupported Tensor.item() call",
        "  code: if x.item() > 0:",
        "  hint: capture_scalar_outputs",
        "  → keep the value a tensor, x.detach() in place of x.item() and torch.where(condition, a, b) in place of `if`, or read "
        "it after the step and not in the forward; or try dynamo.capture_scalar_outputs=on, which keeps the number of .item(), "
        "int() or float() in the graph",
    ]


def test_skipped_cuda_graphs_are_spoken_of_only_where_they_were_asked_for() -> None:
    assert "CUDA graphs skipped" not in sections("scope=full")
    found = sections("scope=full,mode=reduce-overhead", cudagraph_skip_reasons=["skipping cudagraphs due to mutated inputs"])
    assert len(found["CUDA graphs skipped"]) == 2


def test_what_was_not_met_is_said_too() -> None:
    found = sections("scope=full")
    assert [found[title] for title in ("graph breaks", "recompiles", "recompile limits hit", "runs eagerly")] == [["none"]] * 4


def test_compile_time_is_told_by_phase_with_shares_and_without_what_took_none() -> None:
    total, *phases = sections("scope=full")["compile time"]
    assert total == "50.0 s; the first step took 30.0 s"
    assert [line.split() for line in phases] == [["dynamo", "5.0", "s", "10%"], ["inductor", "45.0", "s", "90%"]]


def test_memory_names_what_cuda_graphs_keep() -> None:
    assert sections("scope=full")["memory"] == [
        "peak in use while training: 16.00 GiB",
        "peak reserved from the device: 20.00 GiB",
        "peak while compiling and warming up: 18.00 GiB",
        "of which CUDA graphs keep for themselves: 4.00 GiB, 25% of the peak",
    ]
    on_cpu = {"peak_reserved_bytes": None, "compile_peak_memory_bytes": None, "cudagraph_pool_bytes": None}
    assert sections("scope=full", **on_cpu)["memory"] == ["peak in use while training: 16.00 GiB"]


def test_times_and_numerics_are_told_with_their_uncertainty() -> None:
    found = sections("scope=full", stable=False, data_wait_share=0.12)
    assert found["time"] == [
        "20 ms a step (95%: 19.9 to 20.1, and not stable), 3,200.0 samples/s",
        "1.50 times as fast as eager on the same batches",
        "12.0% of the time it waits for data",
    ]
    assert found["numerics"] == ["ok, over 10 steps beside eager: gradients of decoder: off by 1%, 2% allowed"]


SLOW: dict[str, Any] = {"speedup_eager": 1.04}
WHY = "why it is not faster than eager"


@pytest.mark.parametrize(
    ("spelled", "fields", "words"),
    [
        ("scope=full", {"graphs": 0}, ["no graph was compiled"]),
        ("scope=full,backend=aot_eager", {}, ["backend=aot_eager generates no code"]),
        ("scope=full", {"data_wait_share": 0.31}, ["it waits for data 31% of the time"]),
        (
            "scope=full",
            {"graph_break_reasons": ["model.py:28 in forward: Unsupported Tensor.item() call"]},
            ["1 graph break, the first at model.py:28"],
        ),
        (
            "scope=full",
            {"perf_hints": ["Torchinductor does not support code generation for complex operators."]},
            ["it computes with complex numbers, which Inductor does not fuse"],
        ),
        (
            "scope=full",
            {"step_ms_median": 0.64},
            ["a step takes 0.64 ms, and any call of compiled code costs some tenths"],
        ),
        (
            "scope=full",
            {"recompile_limit_hits": ["forward (model.py:3) hit recompile_limit 8: self.t == 1.9"], "step_ms_median": 1.0},
            ["forward (model.py:3) runs eagerly since it hit its recompile limit", "a step takes 1 ms"],
        ),
        ("scope=full", {"fallbacks": ["forward would not convert, at model.py:3"]}, ["1 part of it runs eagerly"]),
        ("scope=full,mode=reduce-overhead", {"cudagraph_skip_reasons": ["mutated inputs"]}, ["CUDA graphs were skipped"]),
        ("scope=full", {}, ["nothing that was recorded explains it"]),
    ],
)
def test_a_setting_that_is_not_faster_says_why(spelled: str, fields: dict[str, Any], words: list[str]) -> None:
    lines = sections(spelled, **SLOW, **fields)[WHY]
    assert [line[: len(start)] for line, start in zip(lines[::2], words, strict=True)] == words
    assert all(line.startswith("  → ") for line in lines[1::2])


@pytest.mark.parametrize(("spelled", "speedup"), [("scope=full", 1.05), ("scope=full", None), ("scope=eager", 0.9)])
def test_what_is_faster_or_eager_or_was_not_compared_needs_no_reason(spelled: str, speedup: float | None) -> None:
    assert WHY not in sections(spelled, speedup_eager=speedup)


def test_breaks_that_torch_puts_in_itself_are_no_reason() -> None:
    at_the_optimizer = "torch/optim/optimizer.py:10 in step: Call to `torch._dynamo.graph_break()`"
    assert sections("scope=full", **SLOW, graph_break_reasons=[at_the_optimizer])[WHY][0].startswith("nothing that was recorded")
