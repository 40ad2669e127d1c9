"""Which trials have to be measured again alone: those a person would choose, or might, had neighbours not disturbed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile

from orchestrator.failures import Label
from orchestrator.records import LOST_TO_MACHINES, TrialRecord, standing
from workloads.settings import CompileSettings

MOST_ROUNDS = 3


def disturbed_members(front: Sequence[str], done: Sequence[TrialRecord], *, side_by_side: bool) -> list[TrialRecord]:
    """The record that counts of each member of the front whose figures others on its host or GPU disturbed.

    Args:
        front: settings keys of the front there would be if noisy trials were as good as their figures, and those that shared
            their GPU were on it.
        done: the sweep's records, in order.
        side_by_side: whether trials ran beside others; one that is noisy alone would be as noisy again.
    """
    records = standing(done)

    def is_disturbed(record: TrialRecord) -> bool:
        noisy_beside_others = side_by_side and record.stable is False and not _was_repeated(record, done)
        return record.contended or record.label == Label.GPU_SHARED or noisy_beside_others

    return [records[key] for key in front if is_disturbed(records[key])]


def _was_repeated(record: TrialRecord, done: Sequence[TrialRecord]) -> bool:
    """Whether its setting was measured again, and so alone: else only a cold trial repeats what has a record, a warm one."""
    attempts = (other for other in done if other.settings_key == record.settings_key and other.label not in LOST_TO_MACHINES)
    return len(list(dropwhile(lambda other: other.caches is not record.caches, attempts))) > 1


def rounds(members: Callable[[], Sequence[TrialRecord]]) -> Iterator[list[TrialRecord]]:
    """What to measure again, round by round: a front changes when its members' compile times do.

    No setting is measured again twice, and there are at most three rounds.

    Args:
        members: finds those to be measured again, by the records there are when it is called.
    """
    repeated: set[str] = set()
    for _ in range(MOST_ROUNDS):
        again = [member for member in members() if member.settings_key not in repeated]
        if not again:
            return
        yield again
        repeated |= {member.settings_key for member in again}


def announcement(members: Sequence[TrialRecord]) -> str:
    """What is measured again and why, as one line."""
    named = "; ".join(f"{CompileSettings.parse(member.settings_key).label} ({_waited(member)})" for member in members)
    count = "1 member" if len(members) == 1 else f"{len(members)} members"
    return f"measuring {count} of the front again, alone, because other trials disturbed the first measurement: {named}"


def _waited(member: TrialRecord) -> str:
    if member.label == Label.GPU_SHARED:
        return "others were on its GPU"
    if not member.contended:
        return "its steps were noisy"
    if member.cpu_pressure is None:
        return "how long it waited for cores is not known"
    return f"waited for cores {member.cpu_pressure:.0%} of the warm-up"
