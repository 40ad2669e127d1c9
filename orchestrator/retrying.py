"""Which attempts are repeated, how often and after how long. Pure.

A fault of the machines says nothing about the setting, so the setting is tried again, later each time: what failed may need time
to come back. A fault of the setting is a result. A worker that went without a word may be either, and gets one more chance.
Where traced functions are kept, torch may be at fault, which can do that for some only, so the setting gets a chance without.
"""

from __future__ import annotations

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


def backoff_s(label: Label | None, attempts: int) -> float | None:
    """Seconds to wait before the next attempt; None if there is to be none.

    Args:
        label: of the latest attempt; None if it was ok.
        attempts: made so far, the latest included, and without one that keeping traced functions ended.
    """
    if label is None or attempts >= MOST_ATTEMPTS.get(label, 1):
        return None
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempts - 1)))
