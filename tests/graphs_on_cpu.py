"""Stands for CUDA graphs on a CPU: a replay computes the call again, into the same memory each time, as a CUDA graph does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.script.apply import captured
from compile_sweep.script.apply.graph_recording import GraphRecorder, Run, recording


class Replayed:
    """A graph whose replay calls a function."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class Recorder(GraphRecorder):
    """Stands for CUDA graphs on a CPU."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.recorded = self.replayed = self.recorded_forward = self.replayed_forward = self.recorded_gradients = 0
        self.replayed_gradients = 0
        self.module = module or nn.Module()
        self._gradients: dict[int, list[Tensor]] = {}
        """By the pool that their memory is in."""

    def new_pool(self) -> Any:
        return object()

    def record(self, run: Run, device: torch.device, pool: Any) -> tuple[Any, list[Tensor]]:
        outputs, trains = self._results(run)
        self.recorded += trains
        self.recorded_forward += not trains

        def replay() -> None:
            self.replayed += trains
            self.replayed_forward += not trains
            for gradient in self._gradients.get(id(pool), []):
                gradient.fill_(torch.nan)  # a call may use this memory
            with recording():
                live = run()
            for place, one in zip(outputs, live, strict=True):
                place.copy_(one.detach())

        return Replayed(replay), outputs

    def record_gradients(
        self, run: Callable[[], Sequence[Tensor | None]], device: torch.device, pool: Any
    ) -> tuple[Any, list[Tensor | None]]:
        self.recorded_gradients += 1
        memory = [None if one is None else torch.full_like(one, torch.nan).detach() for one in run()]
        self._gradients.setdefault(id(pool), []).extend(one for one in memory if one is not None)

        def replay() -> None:
            self.replayed_gradients += 1
            for place, one in zip(memory, run(), strict=True):
                if place is not None and one is not None:
                    place.copy_(one.detach())

        return Replayed(replay), memory

    def _results(self, run: Run) -> tuple[list[Tensor], bool]:
        """Returns memory for the results, and leaves buffers as they were: capturing computes nothing."""
        before = [one.clone() for one in self.module.buffers()]
        live = run()
        for one, value in zip(self.module.buffers(), before, strict=True):
            one.data.copy_(value)
        return [one.detach().clone() for one in live], any(one.requires_grad for one in live)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records what settings capture."""
    made = Recorder()
    monkeypatch.setattr(captured, "GraphRecorder", lambda: made)
    return made
