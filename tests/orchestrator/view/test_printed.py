"""What a sweep prints at its end."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from samples import measured

from analysis.final_summary import Ending
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import MOST_AT_ONCE, SweepConfig
from orchestrator.sweep import _next
from orchestrator.view.live import outcome_of
from orchestrator.view.printed import say, show_commands, show_ending, show_plan, show_rest


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
    row = ("recommended", "full, default, auto", "34% (20 to 49)", "93 s", "32.2 GiB")
    line = next(line for line in ended(settings=[row], counts={}, width=100).splitlines() if line.startswith("recommended"))
    assert all(word in line for word in row)


def test_a_name_is_never_cut() -> None:
    name = "A62 full, reduce-overhead, mark, fused optimizer, grouped 20, +2"
    row = ("cheapest that beats eager", name, "34% (20 to 49)", "93 s", "32.2 GiB")
    today = ("today", "A1 eager", "—", "—", "6.0 GiB")
    assert (
        "cheapest that beats eager: A62 full, reduce-overhead, mark, fused optimizer, grouped 20, +2\n"
        "  saves 34% (20 to 49), compiles in 93 s, memory 32.2 GiB\n"
        "today: A1 eager\n"
        "  memory 6.0 GiB\n"
    ) in ended(settings=[row, today], counts={}, width=80)
    (line,) = (one for one in ended(settings=[row, today], counts={}, width=140).splitlines() if one.startswith("cheapest"))
    assert all(word in line for word in row)


def test_commands_to_go_on_with_are_whole_on_a_line_each() -> None:
    def shown(width: int) -> str:
        out = io.StringIO()
        show_commands(Console(file=out, width=width), {"as a program": command, "as a page": "compile-sweep report a"})
        return out.getvalue()

    command = f"compile-sweep export {'a' * 70}"
    assert f"  {command}  # as a program\n" in shown(140)
    assert shown(60) == f"next:\n  # as a program\n  {command}\n  # as a page\n  compile-sweep report a\n"


@pytest.mark.parametrize(("undone", "said"), [("3 settings did not run (time)", "3 settings did not run (time)"), (None, "some")])
def test_how_to_go_on_is_said_once(undone: str | None, said: str) -> None:
    out = io.StringIO()
    show_rest(Console(file=out, width=60), undone, "sweep --resume")
    assert out.getvalue().startswith(said)
    assert out.getvalue().count("go on with: sweep --resume") == 1


def test_only_commands_that_would_work_are_named() -> None:
    def purposes(settings_key: str | None, *, is_known: bool) -> list[str]:
        return [*_next(SweepConfig(), Path("results/mine"), Ending([], [], settings_key, None, is_known), "again").values()]

    report, recommend = "compile-sweep report results/mine --watch", "compile-sweep recommend results/mine --steps 1M"
    assert purposes("scope=full", is_known=True) == ["compile-sweep export results/mine", recommend, report]
    assert purposes(None, is_known=True) == [recommend, report]
    assert purposes(None, is_known=False) == [report]
    ended = Ending([], [], None, None, False, "scope=full,inductor.fallback_random=on")
    checking = "sweep --resume --settings scope=full,inductor.fallback_random=on"
    assert checking in _next(SweepConfig(), Path("results/mine"), ended, "sweep --resume").values()


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

    assert minutes(1) == "1.4 min"
    assert minutes(2) == minutes(8) == minutes(MOST_AT_ONCE) == "0.7 min"


def test_a_plan_counts_the_unchanged_script_at_the_end_once_more() -> None:
    def planned(done: Sequence[TrialRecord] = (), **fields: Any) -> list[str]:
        out = io.StringIO()
        settings = tuple(map(CompileSettings.parse, ("scope=eager,as_written=on", "scope=full,dynamic=auto")))
        config = SweepConfig(recipe="r", workload="train.py", size="script", settings=settings, max_concurrent=1, **fields)
        show_plan(Console(file=out, width=200), config, WorkloadFacts(max_length=32), done)
        return out.getvalue().splitlines()

    workload, script = planned(), planned(script={"path": "train.py"})
    (again,) = (line for line in script if line not in workload and "again at the end" in line)
    assert again.split()[-2:] == ["21", "s"]
    minutes = [float(lines[-1].split()[1]) for lines in (workload, script)]
    assert minutes[1] - minutes[0] == pytest.approx(21 / 60, abs=0.1)
    assert not any("again" in line for line in workload)


def test_a_terminal_gets_sentences_broken_between_words_and_commands_whole() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, height=24, force_terminal=True, color_system=None)
    say(console, "  [N] words of a sentence that is longer than a line of a terminal")
    command = f"compile-sweep sweep --resume --output {'results/' * 6}"
    show_rest(console, "2 of 3 settings did not run", command)
    show_commands(console, {"as a page": command})
    assert out.getvalue().splitlines() == [
        "  [N] words of a sentence that is longer",
        "  than a line of a terminal",
        "2 of 3 settings did not run; go on with:",
        f"  {command}",
        "next:",
        "  # as a page",
        f"  {command}",
    ]
