"""The clock of a script's steps: what it counts as waiting for data, and what as a checkpoint."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import CompileContext, CompileId, compile_context
from torch.utils.data import DataLoader, IterableDataset

from compile_sweep.script.clock import StepClock, loaders_watched, saves_watched

PAUSE_S = 0.02


class SlowToStart(DataLoader[Any]):
    """A loader that takes a while before its first batch, like one whose workers start."""

    def _get_iterator(self) -> Any:
        time.sleep(PAUSE_S)
        return super()._get_iterator()


class Nested(IterableDataset[Any]):
    """Batches of another loader, which takes a while for each."""

    def __iter__(self) -> Iterator[Any]:
        for batch in DataLoader(Slow(), batch_size=2):
            yield from batch


class Slow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(4):
            time.sleep(PAUSE_S)
            yield torch.tensor(number)


def waits_ms(loader: DataLoader[Any]) -> tuple[float, float]:
    """Milliseconds of waiting and of everything in an epoch of steps that do nothing."""
    clock = StepClock(torch.device("cpu"))
    clock.start()
    with loaders_watched(lambda: clock):
        for _ in loader:
            clock.step((1, 1))
    times = clock.stop()
    return sum(one.wait_ms for one in times), sum(one.ms for one in times)


def test_a_loader_that_starts_its_workers_anew_at_each_epoch_is_waited_for() -> None:
    wait_ms, whole_ms = waits_ms(SlowToStart([torch.ones(1)] * 3))
    assert 1e3 * PAUSE_S <= wait_ms <= whole_ms


def test_a_loader_inside_another_is_waited_for_once() -> None:
    wait_ms, whole_ms = waits_ms(DataLoader(Nested(), batch_size=2))
    assert 4e3 * PAUSE_S <= wait_ms <= whole_ms


def are_checkpoints(*, compiles: bool) -> list[bool]:
    """Whether each of two steps counts as one with a checkpoint: one that pickles a tensor, and one that saves it."""
    clock = StepClock(torch.device("cpu"))
    clock.start()
    with (
        saves_watched(lambda: clock),
        compile_context(CompileContext(CompileId(frame_id=0, frame_compile_id=0))) if compiles else nullcontext(),
    ):
        pickle.dumps(torch.ones(2))
        clock.step((1, 1))
        torch.save({"weights": torch.ones(2)}, io.BytesIO())
        clock.step((1, 1))
    return [one.interrupted for one in clock.stop()]


def test_a_checkpoint_is_one_by_pickle_too_and_not_what_the_compiler_pickles_for_its_cache() -> None:
    """A recommender's embeddings leave a tensor in the graph, and its compile time was left out with the checkpoint."""
    assert are_checkpoints(compiles=False) == [True, True]
    assert are_checkpoints(compiles=True) == [False, False]


def test_the_time_that_a_script_sleeps_outside_of_a_loader_is_known() -> None:
    clock = StepClock(torch.device("cpu"))
    shares = []
    for seconds in (PAUSE_S, 0.0):
        clock.start()
        for _ in range(5):
            time.sleep(seconds)
            until = time.thread_time() + (PAUSE_S if not seconds else PAUSE_S / 20)
            while time.thread_time() < until:
                pass
            clock.step((1, 1))
        clock.stop()
        shares.append(clock.idle_share)
    slept, worked = shares
    assert 0.5 < slept <= 1
    assert worked < 0.25, "waiting for a core is no sleep"


def test_the_wait_for_a_loader_is_no_sleep_of_the_script() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    with loaders_watched(lambda: clock):
        for _ in SlowToStart([torch.ones(1)] * 3):
            clock.step((1, 1))
    clock.stop()
    assert clock.idle_share < 0.5


def test_threads_that_share_a_core_wait_for_it() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # this thread, and the child, which inherits it
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(10 * PAUSE_S)
        clock = StepClock(torch.device("cpu"))
        clock.start()
        until = time.thread_time() + 5 * PAUSE_S
        while time.thread_time() < until:
            pass
        clock.step((1, 1))
        clock.stop()
    finally:
        spinning.kill()
        spinning.wait()
        os.sched_setaffinity(0, cores)
    assert clock.core_wait_share > 0.2
