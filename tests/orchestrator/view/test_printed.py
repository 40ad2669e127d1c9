"""What a sweep says at its end."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console
from samples import measured

from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import MOST_AT_ONCE, SweepConfig
from orchestrator.view.live import outcome_of
from orchestrator.view.printed import show_plan, show_summary


def said(*remarks: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=60)
    show_summary(console, [], {Status.OK: 0, Status.FAILED: 3}, remarks=remarks)
    return out.getvalue()


def test_remarks_come_last_as_they_are() -> None:
    remark = "1 setting was noisy and [bold]would be on the front[/bold], which is said on one line."
    assert (
        said(remark)
        == f"no trial gave a usable result; the reasons are in the report\ntrials: 0 ok, 0 infeasible, 3 failed\n{remark}\n"
    )
    assert said().endswith("3 failed\n")


def test_a_noisy_trials_line_has_its_interval() -> None:
    def line(**fields: Any) -> str:
        setting = CompileSettings.parse("scope=regional")
        figures = measured(850.0, 12.0) | {"samples_per_s_ci95": (800.0, 930.0)} | fields
        record = TrialRecord(
            trial_id="1", settings=setting.to_dict(), settings_key=setting.key, status=Status.OK, samples_per_s=850.0,
            compile_s=12.0, **figures,
        )  # fmt: skip
        return outcome_of(record)

    assert line(stable=False) == "ok: regional, default, static: 850.0 samples/s (noisy: 800.0 to 930.0), compile 12.0 s"
    open_upwards = line(stable=False, samples_per_s_ci95=(800.0, math.inf))
    assert open_upwards == "ok: regional, default, static: 850.0 samples/s (noisy: 800.0 or more), compile 12.0 s"
    assert line(stable=True) == "ok: regional, default, static: 850.0 samples/s, compile 12.0 s"


def test_an_estimate_takes_no_more_trials_at_once_than_there_are() -> None:
    def minutes(at_once: int) -> str:
        out = io.StringIO()
        settings = (CompileSettings.parse("scope=full"), CompileSettings.parse("scope=eager"))
        config = SweepConfig(recipe="r", workload="captioning", size="tiny", settings=settings, max_concurrent=at_once)
        show_plan(Console(file=out, width=200), config, 32, [])
        return out.getvalue().partition("estimate: ")[2].partition(",")[0]

    assert minutes(1) == "1.7 min"
    assert minutes(2) == minutes(8) == minutes(MOST_AT_ONCE) == "0.8 min"
