"""What a sweep prints at its end."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console
from samples import measured

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import MOST_AT_ONCE, SweepConfig
from orchestrator.view.live import outcome_of
from orchestrator.view.printed import show_commands, show_ending, show_plan


def ended(*, width: int = 60, **told: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    show_ending(console, ["Stay with eager.", "For [N] steps nothing pays."], **told)
    return out.getvalue()


def test_what_to_do_comes_first_and_remarks_last_as_they_are() -> None:
    remark = "1 setting was noisy and [bold]would be on the front[/bold], which is said on one line."
    counts = {Status.OK: 0, Status.FAILED: 3}
    first = "\nStay with eager.\nFor [N] steps nothing pays.\n"
    assert ended(settings=[], counts=counts, remarks=[remark]) == f"{first}trials: 0 ok, 0 infeasible, 3 failed\n{remark}\n"


def test_settings_worth_naming_have_their_gain_and_memory() -> None:
    row = ("recommended", "full, default, auto", "34 % (20 to 49)", "93 s", "32.2 GiB")
    line = next(line for line in ended(settings=[row], counts={}, width=100).splitlines() if line.startswith("recommended"))
    assert all(word in line for word in row)


def test_a_long_name_is_cut_at_80_columns_and_keeps_its_id() -> None:
    name = "A62 full, reduce-overhead, mark, fused optimizer, grouped 20, +2"
    row = ("cheapest that beats eager", name, "34 % (20 to 49)", "93 s", "32.2 GiB")
    (line,) = (one for one in ended(settings=[row], counts={}, width=80).splitlines() if one.startswith("cheapest"))
    assert "A62 full" in line
    assert "…" in line
    assert all(figure in line for figure in row[2:])
    assert name in ended(settings=[row], counts={}, width=140)


def test_commands_to_go_on_with_are_whole_on_a_line_each() -> None:
    out = io.StringIO()
    command = f"compile-sweep export {'a' * 70}"
    show_commands(Console(file=out, width=60), {"as a program": command})
    assert out.getvalue() == f"next:\n  {command}  # as a program\n"


def test_a_noisy_trials_line_has_its_interval() -> None:
    def line(**fields: Any) -> str:
        setting = CompileSettings.parse("scope=regional")
        figures = measured(850.0, 12.0) | {"samples_per_s_ci95": (800.0, 930.0)} | fields
        record = TrialRecord(
            trial_id="1", settings=setting.to_dict(), settings_key=setting.key, status=Status.OK, samples_per_s=850.0,
            compile_s=12.0, **figures,
        )  # fmt: skip
        return outcome_of(record, "A7")

    assert line(stable=False) == "ok: A7 regional, default, static: 850.0 samples/s (noisy: 800.0 to 930.0), compile 12.0 s"
    open_upwards = line(stable=False, samples_per_s_ci95=(800.0, math.inf))
    assert open_upwards == "ok: A7 regional, default, static: 850.0 samples/s (noisy: 800.0 or more), compile 12.0 s"
    assert line(stable=True) == "ok: A7 regional, default, static: 850.0 samples/s, compile 12.0 s"


def test_an_estimate_takes_no_more_trials_at_once_than_there_are() -> None:
    def minutes(at_once: int) -> str:
        out = io.StringIO()
        settings = (CompileSettings.parse("scope=full"), CompileSettings.parse("scope=eager"))
        config = SweepConfig(recipe="r", workload="captioning", size="tiny", settings=settings, max_concurrent=at_once)
        show_plan(Console(file=out, width=200), config, WorkloadFacts(max_length=32), [])
        return out.getvalue().partition("estimate: ")[2].partition(",")[0]

    assert minutes(1) == "1.7 min"
    assert minutes(2) == minutes(8) == minutes(MOST_AT_ONCE) == "0.8 min"
