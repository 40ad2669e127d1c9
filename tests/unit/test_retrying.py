"""Which attempts are repeated: the machines' faults are, with growing patience; the setting's are results."""

from __future__ import annotations

from itertools import pairwise

import pytest

from orchestrator.failures import INFRASTRUCTURE, Label
from orchestrator.retrying import LONGEST_BACKOFF_S, MOST_ATTEMPTS, backoff_s


@pytest.mark.parametrize("label", sorted(set(Label) - INFRASTRUCTURE - {Label.WORKER_DIED}))
def test_what_is_a_result_is_not_repeated(label: Label) -> None:
    assert backoff_s(label, 1) is None


@pytest.mark.parametrize("label", sorted(INFRASTRUCTURE))
def test_a_fault_of_the_machines_is_repeated_later_each_time_up_to_a_limit(label: Label) -> None:
    waits = [backoff_s(label, attempts) for attempts in range(1, MOST_ATTEMPTS[label])]
    assert len(waits) >= 2
    assert all(one is not None and two is not None and two == 2 * one for one, two in pairwise(waits))
    assert backoff_s(label, MOST_ATTEMPTS[label]) is None
    assert backoff_s(label, MOST_ATTEMPTS[label] + 1) is None


def test_a_worker_that_went_without_a_word_gets_one_more_chance() -> None:
    assert backoff_s(Label.WORKER_DIED, 1) is not None
    assert backoff_s(Label.WORKER_DIED, 2) is None


def test_a_success_is_not_repeated() -> None:
    assert backoff_s(None, 1) is None


def test_no_wait_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST_ATTEMPTS, Label.NODE_LOST, 100)
    assert backoff_s(Label.NODE_LOST, 50) == LONGEST_BACKOFF_S
