"""What `orchestrator.check` prints of a setting that it tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from compile_sweep.schema.causes.breaks import advice_on_break
from compile_sweep.schema.settings import CompileSettings
from orchestrator import check
from orchestrator.check import Tried, _costs, _findings, _recipes
from orchestrator.config import Device
from orchestrator.plan.recipes import candidates
from orchestrator.plan.space import Target, choose


def test_nothing_is_said_of_compiling_where_nothing_is_compiled() -> None:
    found = {"speedup_eager": None, "step_ms_median": 778.0, "compile_s": 2.2, "findings": ()}
    tried = Tried(settings=CompileSettings.parse("scope=eager"), wall_s=9.0, verdict="", measurement=found)
    target: Any = SimpleNamespace(max_length=8, batch_size=4)
    assert list(_findings(tried, target)) == ["works", "about 778 ms a step"]


def test_recipes_that_do_not_suit_a_workload_are_left_out_and_the_default_comes_first() -> None:
    own = Target(workload="mine.py:Mine", max_length=1, has_gpu=False, has_blocks=False)
    assert set(_recipes(own)) == {"quickstart", "regional", "modes", "grid"}
    assert {"inference", "generation"} <= set(_recipes(replace(own, trains=False)))
    assert "captioning" in _recipes(replace(own, workload="Captioning"))
    unpadded = Target(workload="mine.py:Mine", max_length=9, min_length=4, has_gpu=False, unpadded_reason="lengths='real'")
    labels = [setting.label for setting in _recipes(unpadded)["regional"]]
    assert labels == [setting.label for setting in choose(candidates("regional", unpadded), unpadded).settings]
    assert len(labels) == 3
    first, second, *_ = _costs(_recipes(own), [], own, Device.CPU)
    assert first == "auto, the default: what is worth trying here, for 5 min or as long as --effort says"
    assert second.startswith("quickstart: ")


def test_advice_that_the_verdict_gives_is_not_repeated_below_it() -> None:
    break_text = "net.py:3 in forward: Data-dependent branching"
    advice = advice_on_break(break_text)
    found = {
        "speedup_eager": None, "step_ms_median": 7.0, "compile_s": 2.2, "findings": (), "graphs": 3,
        "graph_break_reasons": [break_text], "recompile_reasons": [],
    }  # fmt: skip
    target: Any = SimpleNamespace(max_length=8, batch_size=4)
    for verdict, times in ((f"silent-fallback: runs eagerly; {advice}", 1), ("silent-fallback: runs eagerly", 1), ("", 1)):
        tried = Tried(settings=CompileSettings.parse("scope=full"), wall_s=9.0, verdict=verdict, measurement=found)
        lines = list(_findings(tried, target))
        assert f"graph break: {break_text}" in lines
        assert sum(line.count(str(advice)) for line in lines) == times


@pytest.mark.parametrize(("failed", "times"), [((), 1), (("mark",), 0), (("auto",), 1)])
def test_a_strategy_that_has_failed_is_not_advised(failed: tuple[str, ...], times: int) -> None:
    found = {
        "speedup_eager": None, "step_ms_median": 7.0, "compile_s": 2.2, "findings": (), "graphs": 2, "graph_break_reasons": [],
        "recompile_reasons": ["forward (net.py:3): tensor 'ids' size mismatch at index 1. expected 6, actual 7"],
    }  # fmt: skip
    target: Any = SimpleNamespace(max_length=8, batch_size=4)
    before = [Tried(settings=_dynamic(name), wall_s=9.0, verdict="wrong", measurement=None) for name in failed]
    lines = list(_findings(Tried(settings=_dynamic("auto"), wall_s=9.0, verdict="", measurement=found), target, before))
    assert sum(line.count("then once for all") for line in lines) == 1
    assert sum(line.count("dynamic=mark does so at once") for line in lines) == times


def _dynamic(name: str) -> CompileSettings:
    return CompileSettings.parse(f"scope=full,dynamic={name},pad_multiple=1")


def test_the_phase_that_a_trial_is_in_is_told_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def attempted(subject: object, servers: object, *, on_phase: Callable[[float, str], None], **own: object) -> None:
        on_phase(12.3, "warming-up")
        raise Ended

    told: list[str] = []
    monkeypatch.setattr(check, "measured_alone", attempted)
    target: Any = SimpleNamespace(size="only")
    servers: Any = None
    with pytest.raises(Ended):
        check._try(CompileSettings(), check.Options(workload="mine.py:Mine"), target, Device.CPU, servers, told.append)
    assert told == ["warming-up, 12 s in"]


def test_lines_break_between_words_on_a_terminal_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    line = "has a step of its own: where settings say scope=full, the model is compiled and the step around it is not"
    check._say_below(Console(width=80, force_terminal=True, soft_wrap=True), [line])
    broken = capsys.readouterr().out.splitlines()
    assert [text[: len(text) - len(text.lstrip())] for text in broken] == ["  ", "    "]
    assert max(map(len, broken)) <= 80
    assert " ".join(text.strip() for text in broken) == line
    check._say_below(Console(width=80, soft_wrap=True), [line])
    assert capsys.readouterr().out == f"  {line}\n"
