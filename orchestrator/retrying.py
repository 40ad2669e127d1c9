"""Which attempts are repeated, how often and after how long. Pure.

A fault of the machines says nothing about the setting, so the setting is tried again, later each time: what failed may need time
to come back. A fault of the setting is a result. A worker that went without a word may be either, and gets one more chance.
Where traced functions are kept, torch may be at fault, which can do that for some only, so the setting gets a chance without.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.failures import Label

FIRST_BACKOFF_S = 2.0
LONGEST_BACKOFF_S = 30.0

MOST_ATTEMPTS = {
    Label.NODE_LOST: 4,
    Label.ACTOR_LOST: 4,
    Label.TRIAL_DIED: 4,
    Label.DEVICE_LOST: 3,
    Label.DISK_FULL: 3,
    Label.WORKER_DIED: 2,
}
"""Attempts in all, by what ended the latest; a label that is not here is not tried again."""

OF_PRECOMPILE = frozenset({Label.COMPILE_ERROR, Label.EXCEPTION, Label.CRASHED})
"""What ends an attempt that keeps traced functions where torch cannot keep or load one of them."""

LOST_TO_PRECOMPILE = "with --precompile: "
"""What the reason of such an attempt begins with: a process that goes on with a trial knows only reasons of its attempts."""


def was_lost_to_precompile(failed: Sequence[str]) -> bool:
    """Whether one of a trial's attempts, given their reasons, was ended by keeping traced functions."""
    return any(reason.startswith(LOST_TO_PRECOMPILE) for reason in failed)


def backoff_s(label: Label | None, failed: Sequence[str]) -> float | None:
    """Seconds to wait before the next attempt; None if there is to be none.

    Args:
        label: of the latest attempt; None if it was ok.
        failed: why each attempt before it failed. One lost to keeping traced functions does not count.
    """
    attempts = 1 + sum(not reason.startswith(LOST_TO_PRECOMPILE) for reason in failed)
    if label is None or attempts >= MOST_ATTEMPTS.get(label, 1):
        return None
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempts - 1)))
