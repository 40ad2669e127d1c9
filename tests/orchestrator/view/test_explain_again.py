"""A look at one setting measures again, with code for every graph, if graphs without code were timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from compile_sweep.schema.outcome import OK
from orchestrator.view import explain


@pytest.mark.parametrize(
    ("without_code", "hits", "measured"),
    [
        (3, [], [True, False]),
        (3, ["forward (a.py:1) hit recompile_limit 8"], [True]),  # then it runs eagerly, and no such graph was timed
        (0, [], [True]),
    ],
)
def test_graphs_without_code_that_are_timed_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, without_code: int, hits: list[str], measured: list[bool]
) -> None:
    spared: list[bool] = []

    def measured_alone(*args: Any, spares_repeats: bool = False, **options: Any) -> Any:
        spared.append(spares_repeats)
        figures = {"graphs_without_code": without_code if spares_repeats else 0, "recompile_limit_hits": hits, "targets": ()}
        return None, SimpleNamespace(figures=figures, verdict=lambda assignment: OK), ""

    monkeypatch.setattr(explain, "measured_alone", measured_alone)
    monkeypatch.setattr(explain, "print_subject", lambda *args: None)
    monkeypatch.setattr(explain, "KnownSizes", lambda **sizes: None)
    monkeypatch.setattr(explain, "explain_measurement", lambda *args: ())
    console = Console(record=True, width=200)
    facts = SimpleNamespace(max_length=1, batch_size=1)
    assert explain.explain(SimpleNamespace(settings=None, workload=facts), console, None) == 0  # type: ignore[arg-type]
    assert spared == measured
    assert ("measuring again, with code for them" in console.export_text()) == (len(measured) > 1)


def test_advice_that_the_verdict_gave_is_not_given_again() -> None:
    told = ["infeasible (recompile-limit): stopped; keep it in a buffer"]
    first = list(explain._each_advice_once(["forward hit its limit", "  → keep it in a buffer", "  → print less"], told))
    assert first == ["forward hit its limit", "  → as above", "  → print less"]
    assert list(explain._each_advice_once(["a print", "  → print less"], told)) == ["a print", "  → as above"]
