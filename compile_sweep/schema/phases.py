"""The phases of a measurement. Kept apart from the harness, because code that only watches one needs no torch."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The phases of a measurement, in order."""

    STARTING = "starting"
    BUILDING = "building"
    WARMING_UP = "warming-up"
    STEADY = "steady"
    CHECKING = "checking"
    DONE = "done"
