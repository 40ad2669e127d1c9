"""Decides what a sweep still has to run: settings without a record, and front members to measure cold or start warm. Pure.

Also decides which trials to repeat alone: members of the front, or candidates for it, that neighbors disturbed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile

from compile_sweep.schema.outcome import LOST_TO_MACHINES, SCRIPT_ERROR, Label, Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart, standing
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.schema.visible_text import counted
from orchestrator.config import REDIS, CachePolicy, SweepConfig


def counts(config: SweepConfig, record: TrialRecord) -> bool:
    """Tells whether a record counts as a try of its setting.

    Records of trials that the machines ended do not count, nor do warm trials of a sweep whose trials must be cold, nor a script
    that could not be measured as it is, which a person may have mended since.
    """
    if record.label in LOST_TO_MACHINES or script_failure(record) is not None:
        return False
    return config.caches is not CachePolicy.COLD or record.caches is Caches.COLD


_ALL_DIE_OF = (Label.CRASHED, Label.WORKER_DIED, Label.BUDGET_SPENT)
"""Labels of attempts of a script as it is that others of the same script would share."""


def script_failure(record: TrialRecord) -> str | None:
    """Returns why a script could not be measured as it is, which no setting changes; None if this record says nothing of that."""
    reason = record.reason or ""
    if record.settings.get("as_written") and record.label in _ALL_DIE_OF:
        return reason
    if not record.settings.get("as_written") or record.label != Label.EXCEPTION:
        return None
    return reason.removeprefix(SCRIPT_ERROR) if reason.startswith(SCRIPT_ERROR) else None


def left(config: SweepConfig, done: Sequence[TrialRecord]) -> list[CompileSettings]:
    """Returns the settings without a record that counts, in order."""
    recorded = {record.settings_key for record in done if counts(config, record)}
    return [setting for setting in config.settings if setting.key not in recorded]


def baseline_again(done: Sequence[TrialRecord]) -> list[CompileSettings]:
    """Returns the unchanged script if others were measured after it, and it was not since.

    No eager steps run beside a script's trials, so only a second measurement of the same script shows how much the speed of the
    machine changed while the others ran.
    """
    measured = [record for record in done if record.status is Status.OK]
    parsed = (CompileSettings.parse(record.settings_key) for record in reversed(measured))
    baseline = next((one for one in parsed if one.is_unchanged_script), None)
    return [] if baseline is None or measured[-1].settings_key == baseline.key else [baseline]


def baseline_to_repeat(config: SweepConfig, done: Sequence[TrialRecord]) -> list[CompileSettings]:
    """Returns the unchanged script if the sweep will measure it once more at its end, after what is left."""
    if config.script is None:
        return []
    baseline = [setting for setting in config.settings if setting.is_unchanged_script]
    has_others = any(not setting.is_unchanged_script for setting in left(config, done))
    return baseline if baseline and has_others else baseline_again(done)


BASELINE_AGAIN = "measuring the script as it is again, because the difference shows how much the machine's speed changes"


def warm_members(front: Sequence[str], done: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the members of the front, given by settings key, whose compile time is only estimated."""
    records = standing(done)
    return [records[key] for key in front if records[key].caches is Caches.WARM]


def not_started(
    config: SweepConfig, front: Sequence[str], done: Sequence[TrialRecord], starts: Sequence[WarmStart]
) -> list[CompileSettings]:
    """Returns the members of the front that have artifacts to start from, but no warm start yet.

    Args:
        starts: The sweep's warm starts. One that failed by itself counts, because it would fail again.
    """
    if not config.warm_starts or config.cache is None:
        return []
    is_redis = config.cache.startswith(REDIS)
    published = {record.settings_key for record in done if record.cache_made or (is_redis and record.caches is Caches.WARM)}
    started = {start.settings_key for start in starts if start.label not in LOST_TO_MACHINES}
    settings = [CompileSettings.parse(key) for key in front if key in published - started]
    return [setting for setting in settings if setting.scope is not Scope.EAGER]


def announced_cold(settings: Sequence[CompileSettings]) -> str:
    """Says, in one line, what is measured again cold, and why."""
    names = "; ".join(setting.label for setting in settings)
    return (
        f"measuring {counted(len(settings), 'member')} of the front again, cold, because restored caches only tell about what a "
        f"cold compile takes: {names}"
    )


def announced_starts(settings: Sequence[CompileSettings]) -> str:
    """Says, in one line, what is started again from its artifacts."""
    names = "; ".join(setting.label for setting in settings)
    return f"starting {counted(len(settings), 'member')} of the front in a fresh process each, from its own artifacts: {names}"


MOST_ROUNDS = 3


def disturbed_members(front: Sequence[str], done: Sequence[TrialRecord], *, side_by_side: bool) -> list[TrialRecord]:
    """Returns records of the front's members that other work disturbed; side by side, noisy ones too."""
    records = standing(done)

    def is_disturbed(record: TrialRecord) -> bool:
        noisy_beside_others = side_by_side and record.stable is False and not _was_repeated(record, done)
        return record.contended or record.label == Label.GPU_SHARED or noisy_beside_others

    return [records[key] for key in front if is_disturbed(records[key])]


def _was_repeated(record: TrialRecord, done: Sequence[TrialRecord]) -> bool:
    """Tells whether the record's setting was measured again, and so alone; a cold trial after a warm one does not count."""
    attempts = (other for other in done if other.settings_key == record.settings_key and other.label not in LOST_TO_MACHINES)
    return len(list(dropwhile(lambda other: other.caches is not record.caches, attempts))) > 1


def rounds(find: Callable[[], Sequence[CompileSettings]], at_most: int) -> Iterator[list[CompileSettings]]:
    """Yields the settings to run, round by round: a front changes when its members' compile times do. No setting runs twice."""
    run: set[str] = set()
    for _ in range(at_most):
        settings = [setting for setting in find() if setting.key not in run]
        if not settings:
            return
        yield settings
        run |= {setting.key for setting in settings}


def announcement(members: Sequence[TrialRecord]) -> str:
    """Says, in one line, what is measured again, and why."""
    named = "; ".join(f"{CompileSettings.parse(member.settings_key).label} ({_waited(member)})" for member in members)
    count = counted(len(members), "member")
    return f"measuring {count} of the front again, alone, because other trials disturbed the first measurement: {named}"


def _waited(member: TrialRecord) -> str:
    if member.label == Label.GPU_SHARED:
        return "others were on its GPU"
    if not member.contended:
        return "its steps were noisy"
    if member.cpu_pressure is None:
        return "how long it waited for cores is not known"
    return f"waited for cores {member.cpu_pressure:.0%} of the warm-up"
