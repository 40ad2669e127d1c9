"""Untrusted logs and folders: records or one sentence, tables and pages of what was read, and nothing runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import HOSTILE, flipped, nested, nothing_runs, numbers, said, texts, thoroughly, values
from hypothesis import given
from hypothesis import strategies as st
from samples import measured

import analysis
from analysis.page.page import report_page
from benchmarks.search.make_table import write_table
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record
from compile_sweep.schema.errors import CompileSweepError, RecordsError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.plan.estimates import expected_s
from orchestrator.run import sweep_folder
from orchestrator.search import Searcher
from orchestrator.search.pruning import patience_with
from orchestrator.search.tables import read_table
from orchestrator.simulate import Ground, replays

SETTINGS = tuple(map(CompileSettings.parse, ("scope=eager", "scope=full", "scope=full,dynamic=mark", "scope=regional")))


def good(number: int = 1, **changes: Any) -> TrialRecord:
    chosen = SETTINGS[number]
    usual = {"trial_id": f"00{number}-a", "settings": chosen.to_dict(), "settings_key": chosen.key, "status": Status.OK,
             "workload": "captioning", "size": "tiny", "samples_per_s": 700.0 + number, "compile_s": 20.0 * number,
             "started_at": "2026-01-01T00:00:00+00:00", "wall_s": 60.0, "environment_key": "e"}  # fmt: skip
    return TrialRecord(**{**usual, **measured(700.0 + number, 20.0 * number), **changes})


START = WarmStart(trial_id="w", settings=SETTINGS[1].to_dict(), settings_key=SETTINGS[1].key, status=Status.OK, warm_start_s=3.0)
LINE, START_LINE = good().to_json(), START.to_json()
for text, kind in ((LINE, TrialRecord), (START_LINE, WarmStart)):  # whose annotations are evaluated once, by the first line
    kind.from_json(text)
FIELDS = {"trial": sorted(json.loads(LINE)), "warm-start": sorted(json.loads(START_LINE))}

worth = values | st.lists(numbers, min_size=2, max_size=2) | st.dictionaries(texts, numbers, max_size=3)
changes = st.dictionaries(st.sampled_from(FIELDS["trial"]) | texts, worth, min_size=1, max_size=4)


def changed(line: str, edits: dict[str, Any], dropped: list[str] | None = None) -> str:
    """Writes infinities as numbers that overflow, since a bare one is not JSON and is refused at once."""
    found = {**json.loads(line), **edits}
    text = json.dumps({name: value for name, value in found.items() if name not in (dropped or [])})
    return text.replace("Infinity", "1e999")


def read(parse: Callable[[str], Any], line: str) -> Any:
    with nothing_runs():
        try:
            return parse(line)
        except RecordsError as error:
            said(error)
            return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = SweepConfig(recipe="quickstart", workload="captioning", size="tiny", settings=SETTINGS, device=Device.CPU)
    sweep_folder.begin(tmp_path / "sweep", config, fingerprint(), None)
    return tmp_path / "sweep"


@thoroughly
@given(st.text(max_size=60) | values.map(json.dumps) | flipped(LINE.encode()).map(lambda line: line.decode(errors="replace")))
def test_any_line_is_a_record_or_one_sentence(line: str) -> None:
    for parse in (TrialRecord.from_json, WarmStart.from_json):
        read(parse, line)


@thoroughly
@given(changes, st.lists(st.sampled_from(FIELDS["trial"]), max_size=2))
def test_a_changed_record_reads_back_as_it_is_written(edits: dict[str, Any], dropped: list[str]) -> None:
    found = read(TrialRecord.from_json, changed(LINE, edits, dropped))
    if found is not None:
        again = TrialRecord.from_json(found.to_json())
        assert again.to_json() == found.to_json()
        assert CompileSettings.from_dict(found.settings)


@thoroughly
@given(st.dictionaries(st.sampled_from(FIELDS["warm-start"]) | texts, worth, min_size=1, max_size=4))
def test_a_changed_warm_start_reads_back_as_it_is_written(edits: dict[str, Any]) -> None:
    found = read(WarmStart.from_json, changed(START_LINE, edits))
    if found is not None:
        assert WarmStart.from_json(found.to_json()).to_json() == found.to_json()


@thoroughly
@given(st.binary(max_size=200) | flipped(f"{LINE}\n{LINE}\n".encode()))
def test_any_file_is_a_log_or_one_sentence(folder: Path, content: bytes) -> None:
    for name, reads in ((TRIALS_FILE, record.read), (WARM_STARTS_FILE, record.read_warm_starts)):
        (folder / name).write_bytes(content)
        with nothing_runs():
            try:
                reads(folder)
            except RecordsError as error:
                said(error, str(folder / name))
    (folder / WARM_STARTS_FILE).unlink()


@thoroughly
@given(changes)
def test_a_table_of_changed_records_or_one_sentence(folder: Path, edits: dict[str, Any]) -> None:
    lines = [good(0).to_json(), changed(LINE, edits), good(2).to_json()]
    (folder / TRIALS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="replace")
    with nothing_runs():
        try:
            frame = analysis.load(folder)
            analysis.pareto_front(frame)
            analysis.summary(frame)
        except CompileSweepError as error:
            said(error)


@thoroughly
@given(changes)
def test_plans_and_replays_by_changed_records_or_one_sentence(folder: Path, edits: dict[str, Any]) -> None:
    lines = [good(0).to_json(), changed(LINE, edits), good(2).to_json()]
    (folder / TRIALS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="replace")
    with nothing_runs():
        try:
            expected_s(SETTINGS[3], WorkloadFacts(max_length=64), record.read(folder))
            ground = Ground(read_table(folder), Aims.parse())
            replays(ground, Searcher.RANDOM, 1, prune=ground.pruning(patience_with(Searcher.RANDOM)))[0].share_to(0.98)
        except CompileSweepError as error:
            said(error)


@thoroughly
@given(values | st.dictionaries(st.sampled_from(["config", "environment", "planned", "schema_version"]) | texts, values))
def test_any_description_is_read_or_one_sentence(folder: Path, described: Any) -> None:
    (folder / SWEEP_FILE).write_text(json.dumps(described), encoding="utf-8", errors="replace")
    for reads in (analysis.load_sweep, sweep_folder.read_sweep):
        with nothing_runs():
            try:
                reads(folder)
            except CompileSweepError as error:
                said(error)


@pytest.mark.parametrize("text", [nested(100_000), nested(100_000, '{"a":', "}"), "1" * 5000, '"\ud800"', "\0\n\0"])
def test_what_a_reader_chokes_on_is_one_sentence(folder: Path, text: str) -> None:
    content = text.encode("utf-8", "surrogatepass")
    for name in (TRIALS_FILE, SWEEP_FILE):
        (folder / name).write_bytes(content + b"\n")
    line = text.encode("utf-8", "replace").decode()
    for parse in (TrialRecord.from_json, WarmStart.from_json):
        with pytest.raises(RecordsError):
            parse(line)
    for reads in (record.read, analysis.load, analysis.load_sweep, sweep_folder.read_sweep, read_table):
        with pytest.raises(RecordsError):
            reads(folder)
    (folder / TRIALS_FILE).write_text(f"{LINE}\n")
    with pytest.raises(RecordsError):
        write_table(folder, folder.parent / "table")


@pytest.mark.slow
def test_a_page_shows_hostile_text_as_text(folder: Path) -> None:
    """Puts each hostile string into every text field; no markup in it may appear in the page."""
    of_text = ["trial_id", "label", "reason", "phase", "device", "started_at", "environment_key", "source"]
    marked = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
    sweep = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
    names = {"workload": marked, "size": marked}  # like the sweep's, since a record of another workload is not read
    (folder / SWEEP_FILE).write_text(json.dumps(sweep | {"config": sweep["config"] | names, "cluster": True}), encoding="utf-8")
    lines = []
    for number, hostile in enumerate((*HOSTILE, marked)):
        chosen = SETTINGS[number % len(SETTINGS)]
        text = hostile.encode("utf-8", "replace").decode()
        edits = dict.fromkeys(of_text, text) | names | {"trial_id": f"{number}{text}", "status": ("ok", "failed")[number % 2]}
        edits |= {} if number % 2 else {"label": None}
        edits |= {"settings": chosen.to_dict(), "settings_key": chosen.key, "graph_break_reasons": [text], "perf_hints": [text]}
        if text:
            lines.append(changed(LINE, edits))
    (folder / TRIALS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    page = report_page(folder)
    assert "onerror=" not in page.replace("onerror=&#34;", "")
    assert "<script>alert" not in page
