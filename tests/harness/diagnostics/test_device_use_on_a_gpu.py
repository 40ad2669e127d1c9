"""How a measured step uses a GPU: counts, rates and a profile, each within its possible range."""

from __future__ import annotations

import pytest
import torch

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = Protocol(min_passes=2, max_passes=2, min_window_s=0.0)


@pytest.mark.parametrize(("name", "size"), [("gpt2", "small"), ("resnet", "resnet50"), ("captioning", "base")])
def test_a_step_of_a_real_size_reaches_a_possible_share_of_the_card(name: str, size: str) -> None:
    torch._dynamo.reset()
    prepared = prepare(load_workload(name)(size, 0), CompileSettings.parse("scope=eager"), torch.device("cuda"))
    use = measure(prepared, protocol=SHORT).device_use
    assert 0.02 < use["mfu"] < 1.05, use
    assert 0 < use["bandwidth"] < 1.5, use
    assert 1e13 < use["matrix_flops_per_s"] < 1e16, use
    assert 3e11 < use["copy_bytes_per_s"] < 1e13, use
    assert 0.05 < use["busy"] <= 1, use
    assert use["kernels_per_step"] > 100, use
    shares = {name: value for name, value in use.items() if name.endswith("_share")}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares.get("other_share", 0.0) < 0.25, "kernels that no pattern knows"
    assert {"gpt2": "matmul_share", "resnet": "convolution_share", "captioning": "matmul_share"}[name] in shares


def test_the_gradient_check_says_something_of_captioning_under_autocast() -> None:
    torch._dynamo.reset()
    prepared = prepare(load_workload("captioning")("base", 0), CompileSettings.parse("scope=regional"), torch.device("cuda"))
    found = measure(prepared, protocol=SHORT)
    check = found.numerics["gradient_check"]
    assert check["outcome"] == "ok", check
    assert check["allowed"] <= 0.5, check
    assert check["share_checked"] > 0.5, check
    assert "mfu" in found.device_use
