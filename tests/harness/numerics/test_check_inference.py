"""The check of inference outputs, on models with unusual but valid outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_sweep import WorkloadFromModel, measure
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.harness.measure import Protocol
from compile_sweep.harness.numerics.trajectory import Recorder
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.settings import CompileSettings

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=3, min_passes=2, max_passes=2, cpu_window_s=0.0)


def inferred(model_fn: Callable[[], nn.Module], spelled: str = "scope=full,backend=aot_eager") -> dict[str, Any]:
    """Returns the verdict on a model given 4 rows of 8 numbers."""
    workload = WorkloadFromModel(model_fn, lambda number: {"x": torch.randn(4, 8)}, trains=False, num_batches=3)("only", 0)
    torch._dynamo.reset()
    return measure(prepare(workload, CompileSettings.parse(spelled), CPU), protocol=SHORT).numerics


class Doubled(nn.Module):
    """Has no parameters; optionally wrong when compiled."""

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


class Masked(nn.Module):
    """Scores of which some are -inf, optionally changed when compiled."""

    def __init__(self, faulty: Callable[[Tensor, Tensor], Tensor] = lambda scores, x: scores) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.faulty = faulty

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).masked_fill(x < 0, -torch.inf)
        return self.faulty(scores, x) if torch.compiler.is_compiling() else scores


def test_outputs_that_are_infinite_by_right_are_compared() -> None:
    verdict = inferred(Masked)
    assert verdict["status"] == "ok", verdict["worst"]
    assert 0 < verdict["outputs"]["tolerance"] < 1e-4
    assert verdict["last_loss"] is None


@pytest.mark.parametrize(
    ("faulty", "status"),
    [
        (lambda scores, x: scores * 1.01, "diverges"),
        (lambda scores, x: scores.clamp_min(-5.0), "nan"),  # finite, where eager is not
        (lambda scores, x: scores.abs(), "nan"),  # inf in place of -inf
        (lambda scores, x: scores.roll(1, 0), "nan"),  # as many, but elsewhere
        (lambda scores, x: scores.masked_fill(x > 1, -torch.inf), "nan"),  # more
        (lambda scores, x: scores - scores, "nan"),  # NaN where eager is infinite
    ],
)
def test_what_is_wrong_about_infinite_outputs_is_found(faulty: Callable[[Tensor, Tensor], Tensor], status: str) -> None:
    assert inferred(lambda: Masked(faulty))["status"] == status


def test_infinities_of_large_outputs_are_counted_beyond_the_sample() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = x.repeat(100, 100)
            if torch.compiler.is_compiling():
                first = torch.zeros_like(scores, dtype=torch.bool)
                first[0, 0] = True
                return scores.masked_fill(first, -torch.inf)
            return scores

    assert inferred(Large)["status"] == "nan"


def test_nothing_is_said_where_eager_runs_overflow_in_one_precision_and_not_in_the_other() -> None:
    class Overflowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e30 * 1e30 * 1e-30 * 1e-30

    verdict = inferred(Overflowing)
    assert verdict["status"] == "eager_unstable"
    assert verdict["worst"] == "eager: outputs of step 0: infinite elsewhere than eager ones"


def test_both_parts_of_complex_outputs_are_compared() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x, x * 1.01 if torch.compiler.is_compiling() else x).conj()

    assert inferred(Turned)["status"] == "diverges"
    assert inferred(Turned, "scope=eager")["status"] == "ok"
