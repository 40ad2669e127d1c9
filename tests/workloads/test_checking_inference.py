"""The check of what inference gives, on models that are unusual by right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workloads import WorkloadFromModel, measure
from workloads.errors import WorkloadError
from workloads.from_model import ModelWorkload
from workloads.measuring import Protocol
from workloads.settings import CompileSettings
from workloads.trajectory import Recorder

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=3, min_passes=2, max_passes=2, cpu_window_s=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inferred(model_fn: Callable[[], nn.Module], spelled: str = "scope=full,backend=aot_eager") -> dict[str, Any]:
    """The verdict on a model that is given 4 rows of 8 numbers."""
    workload = WorkloadFromModel(model_fn, lambda number: {"x": torch.randn(4, 8)}, trains=False, num_batches=3)("only", 0)
    torch._dynamo.reset()
    return measure(workload, CompileSettings.parse(spelled), device=CPU, protocol=SHORT).numerics


class Doubled(nn.Module):
    """No parameters; wrong when compiled, if it is told so."""

    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 * self.wrong if torch.compiler.is_compiling() else 2)


def test_a_model_without_parameters_is_measured_and_checked() -> None:
    assert inferred(Doubled)["status"] == "ok"
    assert inferred(lambda: Doubled(wrong=1.01))["status"] == "diverges"


def test_a_model_that_has_nothing_to_train_is_refused() -> None:
    workload = WorkloadFromModel(
        lambda: nn.Linear(8, 8).requires_grad_(False),
        lambda number: {"x": torch.randn(4, 8)},
        lambda model, batch: model(**batch),
    )("only", 0)
    assert isinstance(workload, ModelWorkload)
    with pytest.raises(WorkloadError, match="no parameters that train; for inference, trains=False"):
        Recorder(workload, workload.build_model())
