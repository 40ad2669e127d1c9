"""Workloads that set float32 precision by torch's newer attributes, for which its older functions raise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from compile_sweep.contract.from_model import WorkloadFromModel
from compile_sweep.contract.precision import (
    convolutions_allow_tf32,
    fp32_precisions,
    matmul_precision,
    preserve_precision,
    use_full_precision,
)
from compile_sweep.harness.compile_cache.torch_state import torch_configuration
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=3, min_passes=2, max_passes=2, cpu_window_s=0.0)
PRODUCTS = WorkloadFromModel(
    partial(torch.nn.Linear, 8, 8), lambda number: {"x": torch.randn(8, 8)},
    lambda model, batch: model(batch["x"]).square().mean(), num_batches=3,
)  # fmt: skip

BACKENDS = torch.backends
PLACES: dict[str, tuple[Any, str, str]] = {
    "matmul": (BACKENDS.cuda.matmul, "tf32", "high"),
    "all": (BACKENDS, "tf32", "high"),
    "cudnn": (BACKENDS.cudnn, "tf32", "high"),
    "conv": (BACKENDS.cudnn.conv, "ieee", "highest"),
    "mkldnn": (BACKENDS.mkldnn.matmul, "bf16", "medium"),
}


@pytest.fixture(params=PLACES)
def named(request: pytest.FixtureRequest) -> Iterator[str]:
    """The older functions' name for the precision of products that a newer attribute was set to."""
    place, value, name = PLACES[request.param]
    at_first = fp32_precisions()
    with preserve_precision():
        for products in (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul):  # as in a process that called no older function
            products.fp32_precision = "none"
        before = place.fp32_precision
        place.fp32_precision = value
        try:
            with pytest.raises(RuntimeError):
                _ = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            yield name
        finally:
            place.fp32_precision = before
    assert fp32_precisions() == at_first


def test_such_a_workload_is_measured_and_its_precision_is_what_it_was(named: str) -> None:
    before = fp32_precisions()
    for spelled in ("scope=eager", "scope=eager,matmul_precision=high"):
        found = measure(prepare(PRODUCTS(), CompileSettings.parse(spelled), CPU), protocol=SHORT)
        assert found.numerics["status"] == "ok", found.numerics
        assert fp32_precisions() == before
        # only float64 is above float32; lower precisions are compared with float32
        is_exact = named == "highest" and spelled == "scope=eager"
        assert found.numerics["reference"] == ("float64" if is_exact else "float32")


def test_its_precision_has_a_name_and_is_part_of_what_artifacts_are_kept_under(named: str) -> None:
    assert matmul_precision() == named
    kept = torch_configuration()
    assert kept["float32_matmul_precision"] == named
    assert kept["float32_precision"] == " ".join(f"{name}={value}" for name, value in fp32_precisions().items())


def test_a_precise_reference_is_precise_and_puts_back_what_was_set(named: str) -> None:
    before = fp32_precisions()
    with preserve_precision():
        use_full_precision()
        assert not {"tf32", "bf16"} & set(fp32_precisions().values())
        assert matmul_precision() == "highest"
        assert not convolutions_allow_tf32()
    assert (fp32_precisions(), matmul_precision()) == (before, named)


def test_the_older_functions_alone_need_no_component_of_their_own() -> None:
    assert "float32_precision" not in torch_configuration()
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, fp32_precisions()
    with preserve_precision():
        torch.set_float32_matmul_precision("medium")
        assert (matmul_precision(), "float32_precision" in torch_configuration()) == ("medium", False)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, fp32_precisions()) == before
