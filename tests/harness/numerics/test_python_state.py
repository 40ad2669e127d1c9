"""What modules keep in Python is restored, so that the same function is evaluated again."""

from __future__ import annotations

import random
import weakref
from collections import deque
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compile_sweep.harness.numerics.python_state import ClassState, PythonState, own_files


class Frozen(dict[str, int]):
    def update(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("this configuration does not change")

    clear = __setitem__ = __delitem__ = update


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.1)
        self.count, self.rate, self.table = 3, 0.5, torch.zeros(2)
        self.means: list[Tensor] = [torch.ones(1)]
        self.recent: deque[int] = deque([1])
        self.sums = {"loss": 1.0}
        self.config = Frozen(width=4)
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def forward(self) -> list[object]:
        self.count += 1
        self.rate *= 0.9
        self.inner.p += 0.1
        self.table = self.table + 1
        self.means.append(torch.ones(1))
        self.recent.append(2)
        self.sums["loss"] += 1
        self.sums[f"step {self.count}"] = 0.0
        drawn = [torch.rand(1, generator=self.own).item(), self.python.random(), self.numpy.random()]
        held = [len(self.means), len(self.recent), self.sums["loss"], self.table[0].item()]
        return [self.count, self.rate, self.inner.p, *held, *drawn]


def test_the_same_call_gives_the_same_once_the_state_is_put_back() -> None:
    model = Keeps()
    state = PythonState(model)
    first = model()
    assert model() != first
    state.put_back()
    assert model() == first
    assert model.inner.training
    assert list(model.sums) == ["loss", "step 4"]


class Schedule:
    def __init__(self) -> None:
        self.steps, self.seen = 0, [0]


schedule, STATE, count = Schedule(), {"step": 0}, 0


class Scheduled(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.own = Schedule()

    def forward(self) -> list[int]:
        global count
        count += 1
        Scheduled.calls += 1
        for one in (schedule, self.own):
            one.steps += 1
            one.seen.append(one.steps)
        STATE["step"] += 1
        return [count, Scheduled.calls, schedule.steps, len(schedule.seen), self.own.steps, len(self.own.seen), STATE["step"]]


def test_counters_in_globals_classes_and_objects_are_put_back_too() -> None:
    model = Scheduled()
    state, outside = PythonState(model), PythonState(model, inside=False)
    first = model()
    assert all(later > one for later, one in zip(model(), first, strict=True))
    state.put_back()
    assert model() == first
    outside.put_back()
    assert model() == [*first[:4], first[4] + 1, first[5] + 1, first[6]], "the model's own schedule goes on"


def test_a_number_of_a_class_that_has_changed_is_named() -> None:
    model = Scheduled()
    state = PythonState(model, inside=False)
    assert state.classes.changed() == []
    model()
    assert state.classes.changed() == ["Scheduled.calls"]
    state.put_back()
    assert state.classes.changed() == []


def test_a_number_of_a_class_that_another_file_defines_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "annealing.py").write_text("class Annealing:\n    rate = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    annealing = import_module("annealing").Annealing
    monkeypatch.setitem(globals(), "Annealing", annealing)
    state = PythonState(Scheduled(), inside=False)
    annealing.rate = 0.5
    assert state.classes.changed() == ["Annealing.rate"]
    state.put_back()
    assert annealing.rate == 1.0


def test_what_classes_hold_is_kept_without_the_tensors_that_a_script_has_in_its_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be a step's loss and outputs, which take much memory."""
    monkeypatch.setitem(globals(), "outputs", torch.ones(3))
    kept = weakref.ref(globals()["outputs"])
    state = ClassState(own_files(Scheduled()))
    globals()["outputs"] = None
    assert kept() is None
    assert state.changed() == []
