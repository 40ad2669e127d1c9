"""The benchmark of the regional recipe: its processes, its report, and one real process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recipes import regional_recipe


def test_each_arrangement_gives_both_scopes_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def pretend(order: tuple[str, ...], num_layers: int, *, trains: bool) -> dict[str, float]:
        asked.append((order, num_layers, trains))
        return {name: {"full": 8.0, "regional": 2.0}[name] * (1 + trains) for name in order if name != "other"}

    monkeypatch.setattr(regional_recipe, "_in_a_process", pretend)
    assert regional_recipe.main(["--output", str(tmp_path / "recipe.json")]) == 0
    assert [order for order, layers, trains in asked if layers == 64 and not trains] == [
        ("full", "regional"), ("full",), ("regional",), ("other", "full"), ("other", "regional"),
    ]  # fmt: skip
    assert "4.0×" in capsys.readouterr().out
    rows = json.loads((tmp_path / "recipe.json").read_text())["rows"]
    assert [(row["what"], row["full_s"], row["regional_s"], row["ratio"]) for row in rows] == [
        *[("forward", 8.0, 2.0, 4.0)] * 3, *[("training", 16.0, 4.0, 4.0)] * 3,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly("compiles a model twice; the tables are tested with made-up figures")
def test_a_process_times_first_steps_of_what_it_is_told() -> None:
    found = regional_recipe._in_a_process(("other", "regional"), 2, trains=True)
    assert list(found) == ["regional"]
    assert 0 < found["regional"] < 200


def test_a_process_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert regional_recipe.main(["--output", str(tmp_path / "recipe.json")]) == 2
    assert "a process that compiles full then regional failed" in capsys.readouterr().err
    assert not (tmp_path / "recipe.json").exists()


def test_a_process_that_does_not_end_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regional_recipe, "LIMIT_S", 0.05)
    assert regional_recipe.main(["--output", str(tmp_path / "recipe.json")]) == 2
    assert "a process that compiles full then regional was not done after 0.05 s" in capsys.readouterr().err
