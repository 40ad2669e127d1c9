"""What requires NCCL with several workers, on two GPUs: compression, CUDA graphs, and the reducers with real kernels."""

from __future__ import annotations

import pytest
import torch
from workers_at_work import Job, measured_together

pytestmark = [pytest.mark.ray, pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

REDUCED = (
    "scope=eager,ddp.compression=bf16",
    "scope=eager,ddp.compression=powersgd,ddp.find_unused_parameters=on",
    "scope=full,ddp.bucket_cap_mb=1",
    "scope=full,ddp.compression=fp16,ddp.static_graph=on",
    "scope=full,optimizer=compiled,ddp.gradient_as_bucket_view=on",
    "scope=full,ddp.optimize_ddp=python_reducer",
    "scope=regional,dynamic=mark,ddp.bucket_cap_mb=1,ddp.optimize_ddp=off",
)

GRAPHED = (
    "scope=full,mode=reduce-overhead,ddp.optimize_ddp=off",
    "scope=full,mode=reduce-overhead,ddp.bucket_cap_mb=1",
    "scope=regional,mode=reduce-overhead",
)


@TWO_GPUS
def test_captioning_follows_eager_however_gradients_are_reduced() -> None:
    found = measured_together([Job("captioning", one, "tiny") for one in REDUCED], device="cuda", timeout_s=900)
    for spelled, ranks in zip(REDUCED, found, strict=True):
        for one in ranks:
            assert "error" not in one, (spelled, one)
            assert one["numerics"]["status"] == "ok", (spelled, one["numerics"]["worst"])
            assert one["fallbacks"] == [], spelled


@TWO_GPUS
def test_cuda_graphs_are_recorded_between_reductions() -> None:
    found = measured_together([Job("captioning", one, "tiny") for one in GRAPHED], device="cuda", timeout_s=900)
    for spelled, ranks in zip(GRAPHED, found, strict=True):
        for one in ranks:
            assert "error" not in one, (spelled, one)
            assert one["numerics"]["status"] == "ok", (spelled, one["numerics"]["worst"])
            assert one["cudagraph_skips"] == 0, (spelled, one["cudagraph_skip_reasons"])
            assert one["cudagraph_pool_bytes"], spelled
