"""Canaries: secrets planted in everything that a trial may say come out nowhere, whatever the output."""

from __future__ import annotations

import base64
import gzip
import os
import re
import string
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import trial

import analysis
from analysis import export
from analysis.final_summary import ending
from analysis.page.page import report_page
from analysis.table import markdown_table
from compile_sweep.schema import redact
from compile_sweep.schema.errors import ConfigError, one_line_message
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import append, read
from orchestrator.run.sweep_folder import write_json
from orchestrator.tracking.base import entry_of
from orchestrator.view.live import outcome_of

SOURCE = "from __future__ import annotations\n\nx = 1\n"
PLAIN = string.ascii_letters + string.digits
SECRET = st.text(PLAIN, min_size=20, max_size=40)
IN_VARIABLES = st.sampled_from(["HF_TOKEN", "OPENAI_KEY", "DB_PASSWORD", "DOCKER_AUTH_CONFIG", "AWS_SECRET_ACCESS_KEY"])
SPELLINGS = {
    "in a URI": "postgres://me:{}@host/db",
    "signed": "https://store.example/blob?x=1&sig={}&se=2",
    "bearer": "Authorization: Bearer {}",
    "webhook": "https://hooks.slack.com/services/{}",
    "GitHub": "ghp_{}0123456789",
    "Hugging Face": "hf_{}0123456789",
}
"""Forms in which a secret is known without being in a variable."""


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


@settings(max_examples=5, deadline=None)
@given(secret=SECRET, name=IN_VARIABLES, before=st.text(max_size=5), after=st.text(max_size=5))
def test_the_value_of_a_variable_comes_out_nowhere(secret: str, name: str, before: str, after: str) -> None:
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, {name: secret}):
        for output, text in planted(Path(folder), f"{before}{secret}{after}"):
            assert secret not in text, output


@settings(max_examples=5, deadline=None)
@given(secret=SECRET, spelling=st.sampled_from([*SPELLINGS]))
def test_what_looks_like_a_secret_comes_out_nowhere(secret: str, spelling: str) -> None:
    with TemporaryDirectory() as folder:
        for output, text in planted(Path(folder), f"it said {SPELLINGS[spelling].format(secret)} and went on"):
            assert secret not in text, (output, spelling)


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
