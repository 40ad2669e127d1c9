"""What `orchestrator.check` prints of a setting that it tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from compile_sweep.schema.settings import CompileSettings
from orchestrator.check import Tried, _findings


def test_nothing_is_said_of_compiling_where_nothing_is_compiled() -> None:
    found = {"speedup_eager": None, "step_ms_median": 778.0, "compile_s": 2.2, "findings": ()}
    tried = Tried(settings=CompileSettings.parse("scope=eager"), wall_s=9.0, verdict="", measurement=found)
    target: Any = SimpleNamespace(max_length=8, batch_size=4)
    assert list(_findings(tried, target)) == ["works", "about 778 ms a step"]
