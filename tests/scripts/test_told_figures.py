"""What the findings say of a script whose waits, samples and losses are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from compile_sweep.script import session_results
from tests.scripts.conftest import Run

AS_WRITTEN = "scope=eager,as_written=on"

START = """
import queue, threading, time, torch
from dataclasses import dataclass
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
"""

SLEEPING = """
filled = queue.Queue(1)
def fill():
    while True:
        time.sleep(0.02)
        filled.put(torch.randn(8, 16))
threading.Thread(target=fill, daemon=True).start()
for step in range(400):
    optimizer.zero_grad()
    net(filled.get()).square().mean().backward()
    optimizer.step()
"""

ACCUMULATED = """
for step in range(4000):
    times = 2 if step < 5 else 8
    for part in range(times):
        (net(torch.randn(4, 16)).square().mean() / times).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LOST = """
for step in range(4000):
    loss = net(torch.randn(8, 16)).square().mean() * (float("{value}") if step >= 8 else 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

RECORDS = """
@dataclass
class Batch:
    weights: torch.Tensor
    points: torch.Tensor
class Scored(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, batch):
        return (self.net(batch.points).square() * batch.weights).mean()
model = Scored()
for step in range(4000):
    loss = model(Batch(torch.ones(4), torch.randn(24, 16)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def measured(run: Run, folder: Path, body: str) -> tuple[Any, list[str]]:
    (folder / "told.py").write_text(START + body, encoding="utf-8")
    session, error = run("told.py", AS_WRITTEN)
    assert error is None
    return session, session_results.findings(session)


def test_a_script_that_waits_for_a_queue_is_told_that_it_sleeps(run: Run, folder: Path) -> None:
    _, told = measured(run, folder, SLEEPING)
    (said,) = [line for line in told if line.startswith("the script sleeps")]
    assert int(said.split()[3].removesuffix("%")) > 50
    assert "figures include it" in said


def test_batches_that_are_accumulated_more_often_later_are_told_with_the_number_that_was_timed(run: Run, folder: Path) -> None:
    session, told = measured(run, folder, ACCUMULATED)
    assert session.step_size()[0] == 32
    assert any(line.startswith("the model is called 8 times for each step") for line in told), "not 2, as at first"
    assert any(line.startswith("a step had 8 samples at first and 32 when it was timed") for line in told)
    assert not any("the script sleeps" in line for line in told)


@pytest.mark.parametrize(("value", "said"), [("nan", "the script's own loss is NaN"), ("inf", "the script's own loss is")])
def test_a_loss_that_is_lost_in_eager_training_is_told_first(run: Run, folder: Path, value: str, said: str) -> None:
    session, told = measured(run, folder, LOST.format(value=value))
    assert not math.isfinite(float(session.losses[-1]))
    assert told[0].startswith(said)
    assert "with nothing compiled" in told[0]


def test_a_batch_that_is_an_object_has_the_samples_of_its_largest_tensor(run: Run, folder: Path) -> None:
    session, told = measured(run, folder, RECORDS)
    assert session.step_size()[0] == 24
    assert session_results.measurement(session).samples_per_s > 0
    assert not any("own loss" in line or "at first" in line for line in told)
    assert {one.elements for one in session.stream.taken} == {4 + 24 * 16}, "its shapes are known, too"


@pytest.mark.parametrize(("ms", "said"), [(0.31234, "0.312 ms"), (42.0, "42 ms"), (999.7, "1 s"), (12345.6, "12.3 s")])
def test_times_are_neither_zero_nor_written_with_exponents(ms: float, said: str) -> None:
    assert session_results._time(ms) == said
