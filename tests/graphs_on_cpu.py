"""Stands for CUDA graphs on a CPU: a replay computes the call again, into the same memory each time, as a CUDA graph does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.script.apply import captured
from compile_sweep.script.apply.graph_recording import GraphRecorder, Recording, Run, recording


class Replayed:
    """A graph whose replay calls a function."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class Recorder(GraphRecorder):
    """Stands for CUDA graphs on a CPU."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.recorded = self.replayed = self.recorded_forward = self.replayed_forward = 0
        self.module = module or nn.Module()

    def new_pool(self) -> Any:
        return object()

    def record(self, run: Run, uses: Sequence[int], wanted: Sequence[Tensor], pool: Any) -> Recording:
        self.recorded += 1
        outputs = self._results(run)
        memory = [torch.zeros_like(one) if used else None for one, used in zip(outputs, uses, strict=True)]
        gradients: list[Tensor | None] = [torch.full_like(one, torch.nan) for one in wanted]
        live: list[Tensor] = []

        def forward() -> None:
            self.replayed += 1
            for gradient in gradients:
                assert gradient is not None
                gradient.fill_(torch.nan)  # a forward graph may use this memory
            with torch.enable_grad(), recording():
                live[:] = run()
            for place, one in zip(outputs, live, strict=True):
                place.copy_(one.detach())

        def backward() -> None:
            used = [one for one, is_used in zip(live, uses, strict=True) if is_used]
            with torch.enable_grad():
                given = [one for one in memory if one is not None]
                found = torch.autograd.grad(used, wanted, given, allow_unused=True, retain_graph=max(uses) > 1)
            for place, one in zip(gradients, found, strict=True):
                assert place is not None
                place.zero_() if one is None else place.copy_(one)

        return Recording(
            forward=Replayed(forward),
            backward=Replayed(backward),
            outputs=outputs,
            output_gradients=memory,
            gradients=gradients,
        )

    def record_forward(self, run: Run, device: torch.device, pool: Any) -> tuple[Any, Sequence[Tensor]]:
        self.recorded_forward += 1
        outputs = self._results(run)

        def forward() -> None:
            self.replayed_forward += 1
            with recording():
                live = run()
            for place, one in zip(outputs, live, strict=True):
                place.copy_(one.detach())

        return Replayed(forward), outputs

    def _results(self, run: Run) -> list[Tensor]:
        """Returns memory for the results, and leaves buffers as they were: capturing computes nothing."""
        before = [one.clone() for one in self.module.buffers()]
        outputs = [one.detach().clone() for one in run()]
        for one, value in zip(self.module.buffers(), before, strict=True):
            one.data.copy_(value)
        return outputs


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records what settings capture."""
    made = Recorder()
    monkeypatch.setattr(captured, "GraphRecorder", lambda: made)
    return made
