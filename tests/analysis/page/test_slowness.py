"""Why compiled settings are not faster: what their records show, grouped by the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.page.slowness import MOST_NAMED, reasons, why_none_is_faster

BREAK = "train.py:12: call to print"


def test_settings_that_are_slow_for_one_reason_stand_together(make_sweep: MakeSweep) -> None:
    broken: dict[str, Any] = {"graph_break_reasons": [BREAK], "speedup_eager": 0.9}
    records = [
        trial("scope=eager", 600, 0.1),
        trial("scope=full", 540, 50, **broken),
        trial("scope=regional", 545, 9, **broken),
        trial("scope=full,mode=reduce-overhead", 900, 60, graph_break_reasons=[BREAK]),
    ]
    (reason,) = reasons(analysis.load(make_sweep(records)))
    assert reason.found == f"1 graph break, the first at {BREAK}"
    assert reason.settings == ["A2 full, static (0.90×)", "A3 regional, static (0.90×)"]
    assert reason.advice.endswith("mend it, or compile around it")
    assert reason.num_more == 0


@pytest.mark.parametrize("fastest", [0.9, 1.2])
def test_why_no_setting_is_faster_is_told_with_what_helps_unless_one_is(make_sweep: MakeSweep, fastest: float) -> None:
    value = "train.py:12 in forward: Unsupported Tensor.item() call"
    records = [
        trial("scope=eager", 600, 0.1),
        *(trial(f"scope={scope}", 540, 50, graph_break_reasons=[value], speedup_eager=0.9) for scope in ("full", "regional")),
        trial("scope=full,mode=reduce-overhead", 600 * fastest, 60, speedup_eager=fastest),
    ]
    told = why_none_is_faster(analysis.load(make_sweep(records)))
    if fastest > 1:
        assert not told
        return
    (why,) = told  # what nothing explains is not told
    assert why.startswith("A2 full, static (0.90×) and 1 more: 1 graph break, the first at train.py:12: nothing is fused")
    assert "keep the value a tensor" in why


@pytest.mark.parametrize(("pipeline", "found"), [("script", "nothing that was recorded"), ("real", "it waits for data 40%")])
def test_a_wait_that_is_in_no_figure_is_no_reason(make_sweep: MakeSweep, pipeline: str, found: str) -> None:
    slow = trial("scope=full", 540, 50, speedup_eager=0.9, pipeline=pipeline, data_wait_share=0.4)
    (reason,) = reasons(analysis.load(make_sweep([trial("scope=eager", 600, 0.1), slow])))
    assert reason.found.startswith(found)


@pytest.mark.parametrize(
    ("high", "found"), [(math.inf, "its figure is noisy"), (800.0, "its figure is noisy"), (550.0, "nothing that")]
)
def test_what_is_noisy_and_may_be_faster_is_measured_again_instead_of_explained(
    make_sweep: MakeSweep, high: float, found: str
) -> None:
    noisy = trial(
        "scope=full", 500, 50, speedup_eager=None, speedup_eager_ci95=None, stable=False, samples_per_s_ci95=(90.0, high)
    )
    table = analysis.load(make_sweep([trial("scope=eager", 600, 0.1), noisy]))
    (reason,) = reasons(table)
    assert reason.found.startswith(found)
    assert not why_none_is_faster(table)


@pytest.mark.parametrize(("rate", "is_slow"), [(1000, False), (500, True)])
def test_what_was_not_timed_in_turn_with_eager_is_compared_with_what_is_run_today(
    make_sweep: MakeSweep, rate: float, is_slow: bool
) -> None:
    records = [trial("scope=eager", 600, 0.1), trial("scope=full", rate, 50, speedup_eager=None, speedup_eager_ci95=None)]
    assert bool(reasons(analysis.load(make_sweep(records)))) is is_slow


def test_of_many_settings_some_are_named_and_the_others_counted(make_sweep: MakeSweep) -> None:
    slow = [trial(f"scope=full,dynamic=mark,pad_multiple={n}", 300, n, speedup_eager=0.5) for n in range(1, 10)]
    (reason,) = reasons(analysis.load(make_sweep([trial("scope=eager", 600, 0.1), *slow])))
    assert (len(reason.settings), reason.num_more) == (MOST_NAMED, len(slow) - MOST_NAMED)


@pytest.mark.slow
def test_the_report_shows_it_between_the_verdict_and_the_table(make_sweep: MakeSweep) -> None:
    slow = trial("scope=full", 540, 50, graph_break_reasons=["<b>print</b>"], speedup_eager=0.9)
    page = analysis.write_report(make_sweep([trial("scope=eager", 600, 0.1), slow])).read_text(encoding="utf-8")
    at = page.index("Why some settings are not faster")
    assert page.index('id="verdict"') < at < page.index('<section id="table"')
    assert "the first at &lt;b&gt;print&lt;/b&gt;" in page
