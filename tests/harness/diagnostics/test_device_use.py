"""What limits a step on its device: counts, kinds of kernels, and the resulting advice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.diagnostics.device_use import (
    copy_rate,
    count_work,
    device_use,
    kind_of_kernel,
    matrix_rate,
    time_by_kind,
)
from compile_sweep.harness.diagnostics.late_compiles import LateCompile, LateCompiles
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.numerics.step_check import run_eagerly
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.causes.slowness import why_not_faster
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")
SHORT = Protocol(min_passes=2, max_passes=2, cpu_window_s=0.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>(Params)", "matmul"),
        ("triton_tem_fused_addmm_gelu_3", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("triton_per_fused_native_layer_norm_2", "reductions"),
        ("triton_red_fused__log_softmax_nll_loss_forward_7", "reductions"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10>", "reductions"),
        ("triton_poi_fused_gelu_5", "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "pointwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::indexing_backward_kernel", "other"),
    ],
)
def test_a_kernel_is_of_a_kind_by_its_name(name: str, kind: str) -> None:
    assert kind_of_kernel(name) == kind


def test_the_time_of_kernels_is_shared_out_by_kind() -> None:
    shares = time_by_kind([("gemm", 30.0), ("triton_poi_x", 50.0), ("gemm", 20.0)])
    assert (shares["matmul"], shares["pointwise"]) == (0.5, 0.5)
    assert sum(shares.values()) == pytest.approx(1)
    assert time_by_kind([]) == {}


def test_the_work_of_a_forward_and_backward_is_counted() -> None:
    layer = nn.Linear(16, 24, bias=False)
    rows = torch.randn(8, 16, requires_grad=True)
    found = count_work(lambda: layer(rows).sum().backward())
    assert found["flops_per_step"] == 3 * 2 * 8 * 16 * 24, "one product forward, two backward"
    assert found["unaligned_products"] == 0
    assert found["eager_bytes_per_step"] >= 3 * 4 * (8 * 16 + 16 * 24 + 8 * 24), "each product reads two matrices and writes one"


def test_products_with_an_odd_side_are_told_by_their_share() -> None:
    aligned, odd = nn.Linear(16, 16), nn.Linear(16, 7)
    found = count_work(lambda: (aligned(torch.ones(8, 16)), odd(torch.ones(8, 16))))
    assert found["unaligned_products"] == pytest.approx(7 / 23)


def test_a_flex_attentions_work_is_counted() -> None:
    query, size = torch.randn(1, 2, 128, 16), 2 * 128 * 128 * 16
    with run_eagerly():
        found = count_work(lambda: flex_attention(query, query, query))
    assert found["flops_per_step"] == 2 * 2 * size, "two products for each of two heads"


def test_counting_warns_of_no_hooks_of_its_own() -> None:
    layer = nn.Linear(16, 24, bias=False)
    compiled = torch.compile(layer, backend="eager")
    with run_eagerly(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_work(lambda: compiled(torch.ones(8, 16)))["flops_per_step"] == 2 * 8 * 16 * 24


def test_rates_are_measured() -> None:
    assert matrix_rate(torch.float32, CPU, size=128) > 1e6
    assert copy_rate(CPU, size=128) > 1e6


FOUND: dict[str, Any] = {
    "graphs": 1, "recompile_limit_hits": [], "recompile_reasons": [], "fallbacks": [], "data_wait_share": None,
    "graph_break_reasons": [], "perf_hints": [], "cudagraph_skip_reasons": [], "step_ms_median": 50.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("use", "names", "words"),
    [
        ({}, ["not known"], "nothing that was recorded"),
        ({"mfu": 0.4}, ["not known"], "torch.profiler"),
        ({"mfu": 0.4, "kernels_per_step": 0.0}, ["not profiled"], "saw none of the GPU's kernels"),
        ({"busy": 0.35, "kernels_per_step": 2345.0, "matmul_share": 0.9}, ["launch-bound"], "kernels 35% of the time, 2,345"),
        (
            {"busy": 0.97, "kernels_per_step": 90.0, "matmul_share": 0.5, "attention_share": 0.2, "mfu": 0.61},
            ["matmul-bound"],
            "70% of its kernels' time is matrix products, attention and convolutions, at 61% of the card's",
        ),
        (
            {"busy": 0.97, "kernels_per_step": 90.0, "matmul_share": 0.2, "pointwise_share": 0.5, "reductions_share": 0.3},
            ["memory-bound"],
            "80% of its kernels' time is element-wise",
        ),
        (
            {"busy": 0.97, "kernels_per_step": 90.0, "matmul_share": 0.9, "unaligned_products": 0.3},
            ["matmul-bound", "shapes"],
            "30% of its matrix products",
        ),
    ],
)
def test_what_a_profile_says_is_why_a_setting_is_not_faster(use: dict[str, float], names: list[str], words: str) -> None:
    reasons = why_not_faster({**FOUND, "device_use": use}, 1.01)
    assert [one.name for one in reasons] == names
    assert any(words in str(one) for one in reasons), reasons
    assert why_not_faster({**FOUND, "device_use": use}, 1.2) == []


@pytest.mark.parametrize(("speedup", "words"), [(1.0, "leaves little to fuse"), (0.53, "generates are slower here than those")])
def test_a_setting_that_is_far_slower_for_no_known_reason_is_not_said_to_have_little_to_fuse(speedup: float, words: str) -> None:
    (reason,) = why_not_faster(FOUND, speedup)
    assert reason.name == "not known"
    assert words in reason.advice
    assert ("leaves little to fuse" in reason.advice) is (speedup == 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the profiler sees a GPU")
def test_a_profile_that_fails_is_told_and_one_that_was_not_made_is_not() -> None:
    layer = nn.Linear(2, 2)
    step: Any = type("Step", (), {"forward_and_backward": layer, "__call__": lambda self, batch: layer(batch)})()
    rest: dict[str, Any] = {"step_ms": 1.0, "dtype": torch.float32, "device": torch.device("cuda")}
    batch: Any = torch.ones(1, 2)
    with pytest.warns(UserWarning, match="not wholly known"):
        found = [device_use(step, batch, **rest, speedup_eager=speedup) for speedup in (1.0, 1.5)]
    assert found == [{"kernels_per_step": 0.0}, {}]


def test_a_work_that_is_compiled_again_in_every_timed_step_is_no_faster_for_that() -> None:
    recompiles = [f"forward (model.py:3): self.model.count == {number}" for number in range(9)]
    late = LateCompiles(lambda batch: torch.zeros(()), recompiles, steps=4)
    late.found = [LateCompile(step=number, graphs=1, seconds=0.5, reasons=[]) for number in range(4, 9)]
    found = {**FOUND, "recompile_reasons": recompiles, "findings": late.sentences(has_stopped=False)}
    (reason,) = why_not_faster(found, 0.3)
    assert reason.name == "recompiles"
    assert "self.register_buffer('count'," in reason.advice
    (once,) = why_not_faster({**found, "findings": late.sentences(has_stopped=True)}, 0.3)
    assert once.name == "not known"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "size"), [("gpt2", "small"), ("resnet", "resnet50"), ("captioning", "base")])
def test_a_step_of_a_real_size_reaches_a_possible_share_of_the_card(name: str, size: str) -> None:
    prepared = prepare(load_workload(name)(size, 0), CompileSettings.parse("scope=eager"), torch.device("cuda"))
    use = measure(prepared, protocol=SHORT).device_use
    assert 0.02 < use["mfu"] < 1.05, use
    assert 0 < use["bandwidth"] < 1.5, use
    assert 1e13 < use["matrix_flops_per_s"] < 1e16, use
    assert 3e11 < use["copy_bytes_per_s"] < 1e13, use
    assert use["kernels_per_step"] > 100, use
    assert 0.05 < use["busy"] <= 1, use
    shares = {name: value for name, value in use.items() if name.endswith("_share")}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares.get("other_share", 0.0) < 0.25, "kernels that no pattern knows"
    assert {"gpt2": "matmul_share", "resnet": "convolution_share", "captioning": "matmul_share"}[name] in shares


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gradient_check_says_something_of_captioning_under_autocast() -> None:
    prepared = prepare(load_workload("captioning")("base", 0), CompileSettings.parse("scope=regional"), torch.device("cuda"))
    found = measure(prepared, protocol=SHORT)
    check = found.numerics["gradient_check"]
    assert check["outcome"] == "ok", check
    assert check["allowed"] <= 0.5, check
    assert check["share_checked"] > 0.5, check
    assert "mfu" in found.device_use
