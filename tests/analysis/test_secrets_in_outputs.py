"""Canaries: secrets planted in everything that a trial may say come out nowhere, whatever the output."""

from __future__ import annotations

import base64
import gzip
import io
import os
import re
import string
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from secret_forms import made_up
from sweep_folders import trial

import analysis
from analysis import compare, export
from analysis.final_summary import ending
from analysis.page.page import report_page
from analysis.page.server import ReportServer
from analysis.table import markdown_table
from compile_sweep.schema import redact
from compile_sweep.schema.errors import ConfigError, one_line_message
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import append, read
from orchestrator.run.sweep_folder import write_json
from orchestrator.tracking.base import entry_of
from orchestrator.view.live import State, outcome_of, screen

SOURCE = "from __future__ import annotations\n\nx = 1\n"
PLAIN = string.ascii_letters + string.digits
SECRET = st.text(PLAIN, min_size=20, max_size=40)
IN_VARIABLES = st.sampled_from(["HF_TOKEN", "OPENAI_KEY", "DB_PASSWORD", "DOCKER_AUTH_CONFIG", "AWS_SECRET_ACCESS_KEY"])


def planted(folder: Path, said: str) -> Iterator[tuple[str, str]]:
    """Yields every output of a sweep whose trials said this wherever they can, by name."""
    everywhere = {"perf_hints": [said], "findings": [said], "graph_break_reasons": [said], "fallbacks": [said], "device": said}
    record = trial("scope=full", 900, 50, source=f"{SOURCE}# {said}\n", **everywhere)
    failed = trial("scope=regional", status=Status.FAILED, label="exception", reason=said, phase=said, **everywhere)
    for one in (trial("scope=eager", 500, 0.1, source=SOURCE), record, failed):
        append(folder, one)
    config = {"workload": "toy", "script": {"path": said, "arguments": [said]}}
    write_json(folder / "sweep.json", {"config": config, "environment": {"gpu": said}})
    logs = folder / "logs" / failed.trial_id
    logs.mkdir(parents=True)
    (logs / "worker-0.log").write_text(f"before {said} after\n")
    redact.redact_logs(logs)
    yield from ((path.name, path.read_text()) for path in folder.rglob("*.*") if path.is_file())
    df = analysis.load(folder)
    yield "table", markdown_table(df)
    yield "error", one_line_message(ConfigError(f"it says {said}"))
    for one in read(folder):
        yield "plain line", outcome_of(one, "A1")
        yield "tracker", str(entry_of(one))
    export.to_csv(df, folder / "trials.csv")
    yield "CSV", (folder / "trials.csv").read_text()


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(secret=SECRET, name=IN_VARIABLES, before=st.text(max_size=5), after=st.text(max_size=5))
def test_the_value_of_a_variable_comes_out_nowhere(secret: str, name: str, before: str, after: str) -> None:
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, {name: secret}):
        for output, text in planted(Path(folder), f"{before}{secret}{after}"):
            assert secret not in text, output


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1_000), form=st.sampled_from([*made_up(0)]))
def test_what_looks_like_a_secret_comes_out_nowhere(seed: int, form: str) -> None:
    said, secret = made_up(seed)[form]
    with TemporaryDirectory() as folder:
        for output, text in planted(Path(folder), f"it said {said} and went on"):
            assert secret not in text, (output, form)


@pytest.mark.slow
def test_secrets_in_all_forms_come_out_in_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = made_up(7)
    texts = [f"it said {text}" for text, _ in forms.values()]
    source = SOURCE + "".join(f"# {line}\n" for text in texts for line in text.splitlines())
    hints: dict[str, Any] = {"perf_hints": texts, "findings": texts, "graph_break_reasons": texts}
    failed = trial("scope=regional", status=Status.FAILED, label="exception", reason="; ".join(texts), **hints)
    trials = [trial("scope=eager", 500, 0.1, source=SOURCE), trial("scope=full", 900, 50, source=source, **hints), failed]
    for one in trials:
        append(tmp_path, one)
    write_json(tmp_path / "sweep.json", {"config": {"workload": "toy", "script": {"path": "train.py", "arguments": texts}}})
    (tmp_path / "logs" / failed.trial_id).mkdir(parents=True)
    (tmp_path / "logs" / failed.trial_id / "worker-0.log").write_text("\n".join(texts))  # of a trial that still runs
    outputs = {"compare": str(compare.main([str(tmp_path), str(tmp_path)])) + str(capsys.readouterr())}
    assert export.main([str(tmp_path), "A2", "--no-rerun", "--only", "best"]) == 0
    outputs["export of a script"] = str(capsys.readouterr())
    write_json(tmp_path / "sweep.json", {"config": {"workload": "toy", "shown": texts}})
    assert export.main([str(tmp_path), "A2", "--no-rerun", "--only", "best"]) == 0
    outputs["export"] = str(capsys.readouterr())
    with ReportServer(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        for path in ("", f"logs/{failed.trial_id}/worker-0.log"):
            with urllib.request.urlopen(f"{server.url}{path}", timeout=60) as answer:
                outputs[f"served {path}"] = answer.read().decode()
        server.shutdown()
        thread.join()
    (packed,) = re.findall(r'<script type="application/octet-stream" id="(?:data)">(.*?)</script>', outputs["served "])
    outputs["page's data"] = gzip.decompress(base64.b64decode(packed)).decode()
    for width in (20, 200):
        terminal = Console(file=io.StringIO(), width=width, height=50, force_terminal=True)
        state = State(planned=3, records=list(read(tmp_path)))
        terminal.print(screen(state, title="toy", elapsed_s=1.0, expected_s={}, size=terminal.size))
        outputs[f"terminal of {width} columns"] = terminal.file.getvalue()  # type: ignore[attr-defined]
    outputs |= {path.name: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file() and path.name != "worker-0.log"}
    for output, text in outputs.items():
        assert not [form for form, (_, secret) in forms.items() if secret in text], output
    assert all(redact.REDACTED in outputs[name] for name in ("page's data", "trials.jsonl", "sweep.json", "best.py"))


@pytest.mark.slow
def test_report_and_program_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "Zq8Kd0WmPt4yLxRb7NcU"
    monkeypatch.setenv("HF_TOKEN", secret)
    assert all(secret not in text for _, text in planted(tmp_path, f"it said {secret}"))
    assert secret not in str(ending(tmp_path))
    page = report_page(tmp_path)
    packed = re.findall(r'<script type="application/octet-stream" id="(?:data)">(.*?)</script>', page)
    assert len(packed) == 1
    for text in (page, gzip.decompress(base64.b64decode(packed[0])).decode()):
        assert secret not in text
        assert redact.REDACTED in text  # it was planted there
    write_json(tmp_path / "sweep.json", {"config": {"workload": "toy"}})
    assert export.main([str(tmp_path), "A2", "--no-rerun", "--only", "best"]) == 0
    assert secret not in (tmp_path / "best.py").read_text() + (tmp_path / "best.json").read_text()
