"""Which attempts are repeated: after faults of the machines, with growing waits; faults of the setting are results."""

from __future__ import annotations

from itertools import pairwise

import pytest

from compile_sweep.schema.outcome import LONGEST_BACKOFF_S, LOST_TO_MACHINES, LOST_TO_PRECOMPILE, Label, backoff_s

LOST = "the node left"


@pytest.mark.parametrize("label", sorted(set(Label) - LOST_TO_MACHINES - {Label.WORKER_DIED} | {Label.BUDGET_SPENT}))
def test_what_is_a_result_is_not_repeated(label: Label) -> None:
    assert backoff_s(label, []) is None


@pytest.mark.parametrize("label", sorted(LOST_TO_MACHINES - {Label.BUDGET_SPENT}))
def test_a_fault_of_the_machines_is_repeated_later_each_time_up_to_a_limit(label: Label) -> None:
    waits = [backoff_s(label, [LOST] * before) for before in range(label.tries - 1)]
    assert len(waits) >= 2
    assert all(one is not None and two is not None and two == 2 * one for one, two in pairwise(waits))
    assert backoff_s(label, [LOST] * (label.tries - 1)) is None
    assert backoff_s(label, [LOST] * label.tries) is None


def test_a_worker_that_went_without_a_word_gets_one_more_chance() -> None:
    assert backoff_s(Label.WORKER_DIED, []) is not None
    assert backoff_s(Label.WORKER_DIED, [LOST]) is None


def test_an_attempt_lost_to_traced_functions_does_not_count() -> None:
    lost = f"{LOST_TO_PRECOMPILE}AssertionError"
    assert backoff_s(Label.WORKER_DIED, [lost]) == backoff_s(Label.WORKER_DIED, [])
    assert backoff_s(Label.WORKER_DIED, [lost, LOST]) is None


def test_a_success_is_not_repeated() -> None:
    assert backoff_s(None, []) is None


def test_no_wait_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Label.NODE_LOST, "tries", 100)
    assert backoff_s(Label.NODE_LOST, [LOST] * 49) == LONGEST_BACKOFF_S
