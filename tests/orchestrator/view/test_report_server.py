"""The report that `--serve` offers is there while the sweep runs, and its server ends with it."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from orchestrator.view.report_server import served_report


@pytest.mark.slow
def test_the_report_is_served_while_the_block_runs_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "trials.jsonl").touch()
    said: list[str] = []
    announced = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        announced.set()

    with served_report(tmp_path, say):
        assert announced.wait(120)
        found = re.fullmatch(
            r"report: (http://127\.0\.0\.1:(\d+)/\S*) \(from another machine: ssh -L \2:127\.0\.0\.1:\2 \S+\)", said[0]
        )
        assert found, said
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            assert b"No trial has finished yet" in answer.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(found[1], timeout=5)


def test_a_server_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.view.report_server._SERVE", "raise SystemExit(1)")
    said: list[str] = []
    announced = threading.Event()
    with served_report(tmp_path, lambda line: (said.append(line), announced.set())[1]):
        assert announced.wait(60)
    assert said == ["the report is not served, because its server did not start; compile-sweep report DIR --watch says why"]
