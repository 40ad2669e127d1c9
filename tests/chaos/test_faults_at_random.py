"""Random faults, several in one sweep, with its driver killed now and then: invariants that must always hold."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
from arena import Arena, Arenas, setting

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(7200), pytest.mark.usefixtures("only_in_full")]

BY_SETTING = {
    "exception": {"exception"},
    "segfault": {"crashed"},
    "abort": {"crashed"},
    "kill": {"worker-died"},
    "exit": {"worker-died"},
    "address-space": {"out-of-memory"},
    "stuck": {"compile-deadline", "trial-deadline"},
    "hang": {"compile-deadline", "trial-deadline"},
    "stop": {"compile-deadline", "trial-deadline"},
}
"""Kinds of faults, and the labels that each may lead to."""

BY_MACHINE = {"ray::ImplicitFunc", "ray::ProgressTracker", "ray::TrainController", "ray::RayTrainWorker", "driver"}
OF_MACHINES = {"worker-died", "trial-died", "actor-lost", "node-lost", "crashed"}
"""Labels that a trial may get if its processes were killed at random more often than it is retried."""

PHASES = ("building", "warming-up", "steady", "eager-runs")
SETTINGS = range(8)


def drawn(dice: random.Random) -> dict[int, dict[str, Any]]:
    """Draws what happens to which setting; at least one is spared."""
    hit = dice.sample(list(SETTINGS), k=dice.randint(2, 5))
    return {
        multiple: {
            "kind": dice.choice(list(BY_SETTING)),
            "phase": dice.choice(PHASES),
            "times": dice.choice([1, 1_000]),
        }
        for multiple in hit
    }


def run(arena: Arena, dice: random.Random) -> None:
    """Runs a sweep to its end, through random kills and as many resumes as needed."""
    words = (
        "--cache-store",
        "none",
        "--compile-deadline-s",
        "20",
        "--trial-deadline-s",
        "60",
        "--settings",
        *map(setting, SETTINGS),
    )
    running = arena.start(*words)
    for _ in range(dice.randint(1, 4)):
        ends_at = time.monotonic() + dice.uniform(5, 60)
        while running.poll() is None and time.monotonic() < ends_at:
            time.sleep(0.2)
        victim = dice.choice(sorted(BY_MACHINE))
        print(f"  kills {victim}", flush=True)
        if running.poll() is not None:
            break
        if victim != "driver":
            arena.kill(victim)
            continue
        running.kill()
        running.communicate(timeout=60)
        arena.check_nothing_is_left()
        has_begun = (arena.output / "sweep.json").exists()
        running = arena.start("--resume") if has_begun else arena.start(*words)
    done = arena.finish(running, timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    again = arena.sweep("--resume")  # runs what failed only because of the machines; usually nothing
    assert again.returncode == 0, again.stdout + again.stderr


def check(arena: Arena, faults: Mapping[int, Mapping[str, Any]]) -> None:
    """Checks that no record is lost or duplicated, each label is possible for its fault, and spared settings are measured."""
    records = arena.records()
    assert len({record["trial_id"] for record in records}) == len(records)
    latest = {record["settings"]["pad_multiple"] or 0: record for record in records}
    assert latest.keys() == set(SETTINGS)
    superseded = [record for record in records if record is not latest[record["settings"]["pad_multiple"] or 0]]
    assert all(record["label"] in OF_MACHINES for record in superseded), superseded
    for multiple, record in latest.items():
        allowed = set(OF_MACHINES) if record["tries"] > 1 or multiple in faults else set()
        if multiple in faults:
            allowed |= BY_SETTING[faults[multiple]["kind"]]
        assert record["status"] == "ok" or record["label"] in allowed, record
        assert record["tries"] == len(record["retry_reasons"]) + 1


def test_whatever_happens_no_trial_and_no_record_is_lost(
    arenas: Arenas, seed: int, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nchaos seed {seed}: repeat it with --chaos-seed {seed}", flush=True)
        for number in range(rounds):
            dice = random.Random(f"{seed}-{number}")
            faults = drawn(dice)
            words = ", ".join(f"{multiple}: {fault['kind']} while {fault['phase']}" for multiple, fault in sorted(faults.items()))
            print(f"round {number}: {words}", flush=True)
            arena = arenas(faults)
            run(arena, dice)
            arena.check_nothing_is_left()
            check(arena, faults)
