"""Which members of a front are measured again, and what is printed about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.record import Caches, TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.run.remaining import MOST_ROUNDS, announcement, disturbed_members, rounds

EAGER, REGIONAL, FULL = (CompileSettings.parse(f"scope={scope}").key for scope in ("eager", "regional", "full"))


def record(key: str, **fields: Any) -> TrialRecord:
    settings = CompileSettings.parse(key).to_dict()
    return TrialRecord(trial_id="1", settings=settings, settings_key=key, status=Status.OK, **fields)


def test_contended_members_of_the_front_are_measured_again() -> None:
    done = [record(EAGER), record(REGIONAL, contended=True), record(FULL, contended=True)]
    assert disturbed_members([EAGER, FULL], done, side_by_side=True) == [done[2]]


def test_noisy_ones_are_measured_again_where_there_were_neighbours() -> None:
    done = [record(FULL, stable=False)]
    assert disturbed_members([FULL], done, side_by_side=True) == done
    assert disturbed_members([FULL], done, side_by_side=False) == []
    assert "full, default, static (its steps were noisy)" in announcement(done)


NOISY, DISTURBED = {"stable": False}, {"stable": False, "contended": True}
WARM = {"stable": False, "caches": Caches.WARM}
LOST = {"status": Status.FAILED, "label": Label.NODE_LOST}


@pytest.mark.parametrize(
    ("attempts", "again"),
    [
        ([DISTURBED, NOISY], False),
        ([NOISY, NOISY], False),
        ([LOST, NOISY], True),
        ([NOISY, LOST], True),
        ([WARM, NOISY], True),  # cold because a warm one is only an estimate, beside others like that
        ([WARM, NOISY, NOISY], False),
        ([WARM, WARM], False),
        ([NOISY, WARM], False),  # alone, with artifacts of its own
    ],
)
def test_what_was_noisy_alone_too_is_not_measured_again(attempts: list[dict[str, Any]], again: bool) -> None:
    others = [record(REGIONAL, **NOISY)] * 2
    done = [*others, *(dataclasses.replace(record(FULL), **fields) for fields in attempts)]
    assert [one.settings_key for one in disturbed_members([FULL], done, side_by_side=True)] == [FULL] * again


@pytest.mark.parametrize("side_by_side", [True, False])
def test_those_that_shared_their_gpu_are_measured_again(side_by_side: bool) -> None:
    shared = dataclasses.replace(record(EAGER), status=Status.FAILED, label=Label.GPU_SHARED)
    assert disturbed_members([EAGER], [shared], side_by_side=side_by_side) == [shared]
    assert "others were on its GPU" in announcement([shared])


def test_the_latest_record_of_a_setting_decides() -> None:
    done = [record(FULL, contended=True), record(FULL)]
    assert disturbed_members([FULL], done, side_by_side=True) == []
    assert disturbed_members([FULL], done[::-1], side_by_side=True) == [done[0]]


def test_a_front_that_changes_is_confirmed_in_rounds() -> None:
    regional, full = CompileSettings.parse(REGIONAL), CompileSettings.parse(FULL)
    fronts = [[full], [regional], []]
    assert list(rounds(lambda: fronts.pop(0), MOST_ROUNDS)) == [[full], [regional]]


def test_what_is_still_contended_is_not_measured_for_ever() -> None:
    regional, full = CompileSettings.parse(REGIONAL), CompileSettings.parse(FULL)
    fronts = [[full], [full, regional], [full, regional]]
    assert list(rounds(lambda: fronts.pop(0), MOST_ROUNDS)) == [[full], [regional]]


def test_there_are_three_rounds_at_most() -> None:
    endless = (CompileSettings.parse(f"pad_multiple={n},dynamic=mark") for n in range(1, 100))
    assert len(list(rounds(lambda: [next(endless)], MOST_ROUNDS))) == 3


def test_it_is_said_what_is_measured_again_and_why() -> None:
    one = record(FULL, contended=True, cpu_pressure=0.123)
    assert announcement([one]) == (
        "measuring 1 member of the front again, alone, because other trials disturbed the first measurement: "
        "full, default, static (waited for cores 12% of the warm-up)"
    )
    two = announcement([one, record(REGIONAL, contended=True)])
    assert two.startswith("measuring 2 members of the front again")
    assert "regional, default, static (how long it waited for cores is not known)" in two
