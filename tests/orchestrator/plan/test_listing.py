"""Lists of workloads, recipes and settings."""

from __future__ import annotations

import io
from dataclasses import fields

import pytest
from rich.console import Console

from compile_sweep import describe
from compile_sweep.contract import workload_names
from compile_sweep.contract.workload_names import BUILT_IN
from compile_sweep.schema.settings import CompileSettings
from orchestrator import sweep
from orchestrator.plan import listing
from orchestrator.plan.describer import Describer
from orchestrator.plan.recipes import RECIPES


def test_everything_that_can_be_named_has_its_line() -> None:
    workloads, recipes, settings = (
        dict(lines) for lines in (listing.workloads(Describer()), listing.recipes(), listing.settings())
    )
    assert set(BUILT_IN) <= set(workloads)
    assert list(recipes) == list(RECIPES)
    assert len(settings) == len(fields(CompileSettings))
    assert "workload.NAME" in settings
    for what in (*workloads.values(), *recipes.values(), *settings.values()):
        assert what
        assert "\n" not in what
    assert workloads["gpt2"].endswith("Sizes: xl, large, medium, small, tiny. Options: batch_size=N.")
    assert "ema=off|on, norm=batch|sync" in workloads["segmentation"]
    assert workloads["layers"].endswith("Options: batch_size=N.")


def test_a_workload_that_does_not_load_is_said_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**BUILT_IN, "broken": "no_such_module:Thing"}
    monkeypatch.setattr(describe, "named_workloads", lambda: found)
    monkeypatch.setattr(workload_names, "named_workloads", lambda: found)
    lines = dict(listing.workloads(Describer()))
    assert "broken" in lines["broken"]
    assert set(lines) == set(found)


def test_it_is_printed_under_three_titles() -> None:
    printed = io.StringIO()
    listing.show(Console(file=printed, width=80), Describer())
    lines = printed.getvalue().splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["workloads", "recipes", "settings"]
    assert any(line.startswith("  quickstart ") for line in lines)


def test_the_sweeps_command_prints_it_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "\n  captioning " in printed
    assert "\n  group_window " in printed
