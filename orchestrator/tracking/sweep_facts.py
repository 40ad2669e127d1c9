"""What trackers are told of the sweep that trials belong to, read from its `sweep.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import folder
from workloads.spelling import flattened

_IN_THE_FOLDER = ("settings", "excluded")
"""Fields of a configuration that are too long to show."""


class SweepFacts(NamedTuple):
    """A sweep."""

    name: str
    """Its folder's name."""
    identity: str
    """The same for every run of one sweep, and for no other's."""
    what: str
    """Workload and size, fit for a name in a tracker."""
    config: dict[str, str]
    environment: dict[str, str]


def facts_of(output: Path) -> SweepFacts:
    """What the folder's `sweep.json` says.

    Raises:
        RecordsError: there is none, or it is not what this version writes.
    """
    sweep: dict[str, Any] = folder.read_sweep(output)
    config, environment = dict(sweep["config"]), dict(sweep["environment"])
    name = output.absolute().name
    first = next(iter(sweep.get("runs", [])), sweep)  # each run of a sweep says when it itself began
    return SweepFacts(
        name=name,
        identity=f"{name} {first.get('started_at', '')}".strip(),
        what="-".join(str(config[key]).replace(":", ".") for key in ("workload", "size") if config.get(key)),
        config=_words({key: value for key, value in config.items() if key not in _IN_THE_FOLDER}),
        environment=_words(environment),
    )


def _words(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in flattened(values) if value not in (None, "", [])}
