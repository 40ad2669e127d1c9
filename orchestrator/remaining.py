"""What a sweep has yet to run: settings without a record, members of the front to be measured cold or started warm. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config import REDIS, CachePolicy, SweepConfig
from orchestrator.failures import INFRASTRUCTURE
from orchestrator.records import Caches, TrialRecord, WarmStart, standing
from workloads.settings import CompileSettings, Scope


def counts(config: SweepConfig, record: TrialRecord) -> bool:
    """Whether a setting was tried: where trials are to be cold, not by a warm one, nor by one that the machines ended."""
    return record.label not in INFRASTRUCTURE and (config.caches is not CachePolicy.COLD or record.caches is Caches.COLD)


def left(config: SweepConfig, done: Sequence[TrialRecord]) -> list[CompileSettings]:
    """Settings without a record that counts, in order.

    Args:
        config: the sweep's.
        done: its records.
    """
    recorded = {record.settings_key for record in done if counts(config, record)}
    return [setting for setting in config.settings if setting.key not in recorded]


def warm_members(front: Sequence[str], done: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Members of the front, by their settings keys, whose compile time is only estimated."""
    records = standing(done)
    return [records[key] for key in front if records[key].caches is Caches.WARM]


def not_started(
    config: SweepConfig, front: Sequence[str], done: Sequence[TrialRecord], starts: Sequence[WarmStart]
) -> list[CompileSettings]:
    """Members of the front that have artifacts to start from, and no warm start yet.

    Args:
        config: the sweep's.
        front: settings keys.
        done: the sweep's trials.
        starts: its warm starts, failed ones included: a start that failed once would again.
    """
    if not config.warm_starts or config.cache is None:
        return []
    is_redis = config.cache.startswith(REDIS)
    published = {record.settings_key for record in done if record.cache_made or (is_redis and record.caches is Caches.WARM)}
    started = {start.settings_key for start in starts if start.label not in INFRASTRUCTURE}
    settings = [CompileSettings.parse(key) for key in front if key in published - started]
    return [setting for setting in settings if setting.scope is not Scope.EAGER]


def announced_cold(members: Sequence[TrialRecord]) -> str:
    """What is measured again cold and why, as one line."""
    return f"measuring {_counted(members)} again, cold, because restored caches only tell about what a cold compile takes: " + (
        "; ".join(CompileSettings.parse(member.settings_key).label for member in members)
    )


def announced_starts(settings: Sequence[CompileSettings]) -> str:
    """What is started again, as one line."""
    names = "; ".join(setting.label for setting in settings)
    return f"starting {_counted(settings)} in a fresh process each, from its own artifacts: {names}"


def _counted(members: Sequence[object]) -> str:
    return f"{len(members)} member{'' if len(members) == 1 else 's'} of the front"
