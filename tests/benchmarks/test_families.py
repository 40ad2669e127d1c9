"""The table of families: what is counted, and how a record becomes a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import __main__ as command
from benchmarks.families import forms
from benchmarks.families.__main__ import families, looked_at, records, run_all, table, written_lines


def test_every_family_is_a_workload_that_is_named_once() -> None:
    names = list(families())
    assert len(names) >= 60
    assert len(set(names)) == len(names)


CAN_BE_COMPILED = {name for name in families() if name not in ("forms.PackedSequences", "forms.Recurrent")}
"""Families with a compiled setting that works: torch.compile leaves recurrent layers eager."""


def checked(name: str) -> None:
    """Looks at a family, and expects eager training and a compiled setting to work, and no failure but the compiler's."""
    record = looked_at(name, families()[name])
    assert "refused" not in record, record
    eager, *compiled = record["trials"]
    assert eager["label"] is None, eager
    assert not {one["label"] for one in compiled} & {"exception", "diverges"}, compiled
    assert all("; " in one["reason"] for one in compiled if one["label"] is not None), "a failure without advice"
    assert any(one["label"] is None for one in compiled) == (name in CAN_BE_COMPILED), compiled


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_family_is_checked_and_measured_under_three_settings() -> None:
    checked("forms.Contrastive")


@pytest.mark.nightly("some 30 s of CPU time for each; the test above looks at one family")
@pytest.mark.filterwarnings("ignore")  # of the libraries' own
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sorted(families()))
def test_each_family_and_form_is_checked_and_measured_under_three_settings(name: str) -> None:
    checked(name)


def test_the_lines_are_those_of_the_functions_and_of_the_call() -> None:
    assert written_lines(forms.BatchesOfALoader) == 1
    assert written_lines(forms.GanStep) == 11


def test_a_record_becomes_a_row() -> None:
    ok = {"label": None, "reason": None, "breaks": 0, "recompiles": 0, "said": ["not shown"], "graphs": 1}
    bad = {**ok, "label": "diverges", "reason": "off by | 3 %"}
    trials = [
        {**ok, "settings": "scope=eager"},
        {**ok, "settings": "scope=full,dynamic=mark"},
        {**bad, "settings": "scope=regional"},
    ]
    found = [
        {"family": "text.Some", "lines": 4, "batches": "8 to 32", "trials": trials},
        {"family": "forms.Other", "lines": 2, "refused": "padding changes"},
    ]
    rows = list(table(found))[2:]
    assert rows[0] == "| Other | 2 | | | | refused: padding changes |"
    assert rows[1].startswith("| Some | 4 | 8 to 32 | full, mark: 1 graph | regional,")
    assert rows[1].endswith("`diverges` | off by \\| 3 % |")


def test_families_run_side_by_side_and_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def looked_at(name: str, kind: object) -> dict[str, Any]:
        if name == "broken":
            raise RuntimeError("no luck")
        return {"family": name, "refused": "x" * 100_000, "wall_s": 2.0}

    monkeypatch.setattr(command, "families", lambda: dict.fromkeys(("one", "two", "broken")))
    monkeypatch.setattr(command, "looked_at", looked_at)
    output = tmp_path / "found.jsonl"
    run_all(output, ["one"])
    capsys.readouterr()
    run_all(output, [], jobs=2)
    assert sorted(record["family"] for record in records(output)) == ["one", "two"]
    said = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in said) == ["broken", "two"]
    assert "broken: no result, exit code 1" in said
