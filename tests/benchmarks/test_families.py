"""The table of families: what is counted, and how a record becomes a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import __main__ as command
from benchmarks.families import forms
from benchmarks.families.__main__ import families, looked_at, records, run_all, strategies, table, written_lines


def test_every_family_is_a_workload_that_is_named_once() -> None:
    names = list(families())
    assert len(names) >= 60
    assert len(set(names)) == len(names)


CANNOT_BE_COMPILED = {"forms.Forces", "forms.PackedSequences", "forms.Recurrent"}
"""Families without a compiled setting that works: of gradients of gradients, and recurrent layers, which stay eager."""


@pytest.mark.nightly("some 90 s for each, a check and a sweep")
@pytest.mark.parametrize("name", sorted(families()))
def test_each_family_and_form_is_checked_and_swept_under_three_settings(name: str, tmp_path: Path) -> None:
    record = looked_at(name, families()[name], tmp_path)
    assert "refused" not in record, record
    eager, *compiled = record["trials"]
    assert eager["label"] is None, eager
    assert len(compiled) == 2
    assert not {one["label"] for one in compiled} & {"exception", "diverges"}, compiled
    assert all("; " in one["reason"] for one in compiled if one["label"] is not None), "a failure without advice"
    assert name in CANNOT_BE_COMPILED or any(one["label"] is None for one in compiled), compiled


@pytest.mark.parametrize(
    ("printed", "settings"),
    [
        (
            "  batches: 5 of 4 samples, of length 3 to 9\n  repeated blocks: a, b of class B",
            ["full,dynamic=mark", "regional,dynamic=mark"],
        ),
        ("  batches: 5 of 4 samples, of length 3 to 9\n  repeated blocks: none", ["full,dynamic=mark", "full,dynamic=auto"]),
        ("  batches: 5 of 4 samples, all of one shape\n  repeated blocks: none", ["full,dynamic=auto", "full,dynamic=static"]),
    ],
)
def test_the_settings_follow_from_what_a_check_prints(printed: str, settings: list[str]) -> None:
    assert list(strategies(printed)) == ["scope=eager", *(f"scope={one},backend=aot_eager" for one in settings)]


@pytest.mark.slow
def test_a_module_that_runs_in_a_fork_is_like_one_that_was_started(tmp_path: Path) -> None:
    code = (
        "import os, sys, json\n"
        "from benchmarks.families.command_line import ForkedModule\n"
        "module, log = sys.argv[1:]\n"
        "words = [sys.executable, '-P', '-m', module, 'word']\n"
        "with open(log, 'w+b') as file:\n"
        "    forked = ForkedModule(words, env={**os.environ, 'TOLD': 'yes'}, stderr=file)\n"
        "    forked.stdin.write(b'asked')\n"
        "    forked.stdin.close()\n"
        "    print(json.dumps([forked.stdout.read().decode(), forked.wait(), forked.poll()]))\n"
    )
    (tmp_path / "echoing.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['TOLD'], sys.stdin.read(), os.getsid(0) == os.getpid())\n"
        "print('said', file=sys.stderr)\nsys.exit(3)\n"
    )
    log = tmp_path / "log"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}", "echoing", str(log)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ran.stdout) == ["['word'] yes asked True\n", 3, 3]
    assert log.read_text() == "said\n"


def test_the_lines_are_those_of_the_functions_and_of_the_call() -> None:
    assert written_lines(forms.BatchesOfALoader) == 1
    assert written_lines(forms.GanStep) == 11


def test_a_record_becomes_a_row() -> None:
    ok = {"label": None, "reason": None, "breaks": 0, "recompiles": 0, "said": ["not shown"], "graphs": 1}
    bad = {**ok, "label": "diverges", "reason": "off by | 3%"}
    trials = [
        {**ok, "settings": "scope=eager"},
        {**ok, "settings": "scope=full,dynamic=mark"},
        {**bad, "settings": "scope=regional"},
    ]
    found = [
        {"family": "text.Some", "lines": 4, "batches": "8 to 32", "trials": trials},
        {"family": "forms.Other", "lines": 2, "refused": "padding changes"},
    ]
    rows = list(table(found, "\n| family or form | lines |\n|---|--:|\n| Old | 3 | as it was |\n| Some | 9 | other |\n"))[2:]
    assert rows.pop(0) == "| Old ¹ | 3 | as it was |"
    assert list(table([], f"{rows[0]}\n| Old ¹ | 3 | as it was |"))[2] == "| Old ¹ | 3 | as it was |"
    assert rows[0] == "| Other | 2 | | | | refused: padding changes |"
    assert rows[1].startswith("| Some | 4 | 8 to 32 | full, mark: 1 graph | regional,")
    assert rows[1].endswith("`diverges` | off by \\| 3% |")


def test_families_run_side_by_side_and_only_those_that_failed_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def looked_at(name: str, kind: object, folder: Path) -> dict[str, Any]:
        if name == "broken":
            raise RuntimeError("no luck")
        return {"family": name, "lines": 1, "refused": "x" * 100_000, "wall_s": 2.0}

    monkeypatch.setattr(command, "families", lambda: dict.fromkeys(("one", "two", "broken")))
    monkeypatch.setattr(command, "looked_at", looked_at)
    output = tmp_path / "found.jsonl"
    run_all(output, ["one"])
    for _ in range(2):
        capsys.readouterr()
        run_all(output, [], jobs=2)
    assert sorted(record["family"] for record in records(output)) == ["broken", "one", "two"]
    assert "broken: failed: RuntimeError: no luck" in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit, match="broken failed: RuntimeError: no luck; run it again"):
        list(table(records(output)))
