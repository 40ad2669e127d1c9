"""The report: one file, written atomically, in which nothing from a record is run or rendered as markup."""

from __future__ import annotations

import errno
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_folders import MakeSweep, ReportOn, trial, typical_trials

import analysis
from analysis import report
from analysis.choose.break_even import Job
from analysis.figures import break_even_chart, memory_figure, memory_info
from analysis.formatting import durations, interval
from analysis.page.table import table, table_data
from analysis.recommend import recommend, verdict
from compile_sweep.schema.errors import SweepFolderError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>"'&{{7*7}}"""


def page_without_scripts(path: Path) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_the_report_names_every_trial_and_why_some_are_not_usable(report_on: ReportOn) -> None:
    path = report_on()
    page = page_without_scripts(path)
    assert path.name == "report.html"
    for expected in (
        "buckets of 32",
        "the loss is NaN at step 3",
        "compile-deadline",
        "worker 0 ended by signal 9",
        "NVIDIA H200",
    ):
        assert expected in page
    assert page.index("compile-deadline") < page.index("worker-died")


@pytest.mark.slow
@pytest.mark.parametrize("records", [[], [trial("scope=full", status=Status.FAILED)], [trial("scope=eager", 500, 0)]])
def test_a_sweep_with_little_in_it_has_a_report_too(make_sweep: MakeSweep, records: list[TrialRecord]) -> None:
    assert "Verdict" in page_without_scripts(analysis.write_report(make_sweep(records)))


@pytest.mark.slow
def test_the_figures_at_a_glance_are_of_the_setting_that_the_verdict_names(make_sweep: MakeSweep) -> None:
    fastest = trial("scope=full", 2970, 1000, peak_memory_bytes=9 * 2**30)
    sooner = trial("scope=regional", 2960, 50, peak_memory_bytes=4 * 2**30)
    page = page_without_scripts(analysis.write_report(make_sweep([trial("scope=eager", 2000, 1), fastest, sooner])))
    lead = page[page.index('class="lead"') : page.index('class="tiles"')]
    glance = page[page.index('class="tiles"') : page.index('class="finding"')]
    assert "regional" in lead
    for figure in ("30.9%", "37 min", "4.0 GiB", "over 99.8%"):
        assert f"<b>{figure}</b>" in glance


@pytest.mark.slow
def test_of_many_settings_the_verdict_says_what_the_command_does(make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the comparison with eager, which faster settings push out of the chart."""
    monkeypatch.setattr(break_even_chart, "_MOST_SETTINGS", 10)
    ahead = [trial(f"scope=regional,dynamic=mark,group_window={n}", 1000 + n, 5, trial_id=f"{n}") for n in range(1, 13)]
    folder = make_sweep([*ahead, trial("scope=eager", 300, 9, trial_id="eager"), trial("scope=full", 400, 60, trial_id="plain")])
    df, attempts = analysis.load(folder), analysis.load(folder, all_attempts=True)
    expected = verdict(recommend(df, Job(steps=100_000), attempts=attempts))
    assert "against A13 (eager); " in expected[1]
    page = html.unescape(page_without_scripts(analysis.write_report(folder)))
    assert f'<p class="lead">{expected[0]}</p>' in page
    assert f'<p class="finding">{" ".join(expected[1:])}</p>' in page


@pytest.mark.slow
def test_the_head_counts_what_was_stopped_early_where_something_was(make_sweep: MakeSweep, report_on: ReportOn) -> None:
    stopped = trial("scope=regional,dynamic=true", status=Status.STOPPED, label="dominated", trial_id="stopped")
    page = page_without_scripts(analysis.write_report(make_sweep([*typical_trials(), stopped])))
    assert "6 ok · 2 infeasible · 1 failed · 1 stopped early" in page
    assert "stopped early" not in page_without_scripts(report_on())


@pytest.mark.slow
def test_without_an_eager_trial_break_even_says_what_its_multiples_are_of(make_sweep: MakeSweep) -> None:
    compiled = [trial("scope=full", 900, 60), trial("scope=regional", 800, 9)]
    note = "Lower is better: 1 is what {} takes."
    page = page_without_scripts(analysis.write_report(make_sweep(compiled)))
    assert note.format("the setting with the fastest step") in page
    with_eager = analysis.write_report(make_sweep([*compiled, trial("scope=eager", 500, 0.5)], name="with eager"))
    assert note.format("A3 (eager)") in page_without_scripts(with_eager)


@pytest.mark.slow
def test_memory_is_said_to_be_that_of_the_worst_worker(make_sweep: MakeSweep) -> None:
    record = trial("scope=full", 900, 60, num_workers=2, peak_memory_bytes=2**34, peak_memory_bytes_by_rank=[2**33, 2**34])
    folder = make_sweep([record])
    df = analysis.load(folder)
    heading = next(heading for heading in table(df)[0] if heading.name == "peak_memory_bytes")
    axis = memory_figure(memory_info(df)).layout.xaxis.title.text
    page = page_without_scripts(analysis.write_report(folder))
    method = page[page.index("<dt>peak memory</dt>") :]
    for words in (heading.meaning, axis, method[: method.index("</dd>")]):
        assert "worst of" in words
        assert "worker 0" not in words


@pytest.mark.slow
def test_hostile_text_stays_text(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 700, 50, trial_id=HOSTILE, numerics={"status": HOSTILE, "worst": HOSTILE}, environment_key=HOSTILE),
        trial("scope=regional", 600, 9, status=Status.INFEASIBLE, label=HOSTILE, reason=HOSTILE, phase=HOSTILE),
    ]
    folder = make_sweep(records, config={HOSTILE: HOSTILE, "workload": HOSTILE}, environment={"gpu": [HOSTILE]})
    page = analysis.write_report(folder).read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "{{7*7}}" in page
    assert page.count("</script>") == 4  # theme, data, plotly, the page's own


def test_the_table_shows_what_a_figure_rests_on_and_keeps_the_details_for_later(make_sweep: MakeSweep) -> None:
    headings, (row,) = table(analysis.load(make_sweep([trial("scope=full", 900, 50, outliers=2)])))
    shown = {heading.title: cell for heading, cell in row.columns if not heading.is_detail}
    assert shown["vs eager interleaved"][:3] == ("1.50×", 1.5, "1.49–1.51")
    assert shown["throughput"].under == "891–909"
    assert shown["compile"].note.startswith("Dynamo 4.00 s, AOTAutograd 11.0 s")
    assert row.numerics == ("ok", pytest.approx(0.3), "30% of tolerance", "updates of encoder: off by 3.00%, 10.00% allowed")
    assert [remark.text for remark in row.remarks] == ["2 outliers"]
    details = {heading.title for heading in headings if heading.is_detail}
    assert {"peak reserved", "compile memory", "CUDA-graph pool", "clock drift", "outliers"} <= details
    assert "data wait" not in details | shown.keys()  # nothing waited: batches were resident


def test_a_settings_cold_and_warm_trial_share_a_row_and_a_warm_one_alone_has_its_own(make_sweep: MakeSweep) -> None:
    warm = {"caches": Caches.WARM, "cold_equivalent_s": 48.0}
    records = [
        trial("scope=full", 900, 50, trial_id="cold"),
        trial("scope=full", 890, 6, trial_id="warm", **warm),
        trial("scope=regional", 700, 4, trial_id="alone", **warm),
        trial("scope=modular", status=Status.INFEASIBLE, label="nan", trial_id="wrong"),
        trial("scope=modular", 950, 5, trial_id="wrong warm", **warm),
    ]
    _, rows = table(analysis.load(make_sweep(records)))
    shown = [[row.setting_name, *(cell.text for one, cell in row.columns if one.name.endswith("compile_s"))] for row in rows]
    assert shown == [
        ["A3 modular, static", "—", "5.00"],
        ["A1 full, static", "50.0", "6.00"],
        ["A2 regional, static", "—", "4.00"],
    ]


def test_a_trial_measured_with_the_real_pipeline_says_how_long_it_waits(make_sweep: MakeSweep) -> None:
    records = [trial("scope=full", 900, 50, pipeline="real", data_wait_share=0.021)]
    _, (row,) = table(analysis.load(make_sweep(records)))
    assert [cell.text for heading, cell in row.columns if heading.title == "data wait"] == ["2.1"]
    assert [remark.text for remark in row.remarks] == ["real pipeline, 2.1% waiting"]


def test_a_figure_s_number_is_in_the_unit_of_its_heading(make_sweep: MakeSweep) -> None:
    record = trial(
        "scope=full", 900, 50, peak_memory_bytes=40 * 2**30, clock_drift=0.191, pipeline="real", data_wait_share=0.02, outliers=2
    )
    headings, rows = table(analysis.load(make_sweep([record])))
    data = table_data(headings, rows, "command")
    numbers = {column["title"]: cell[:2] for column, cell in zip(data["columns"], data["rows"][0]["cells"], strict=True)}
    for title, expected in (
        ("peak memory", ["40.0", 40.0]), ("clock drift", ["19.1", 19.1]), ("data wait", ["2.0", 2.0]), ("outliers", ["2", 2.0]),
        ("throughput", ["900", 900.0]), ("compile", ["50.0", 50.0]),
    ):  # fmt: skip
        assert numbers[title] == expected, title


@pytest.mark.parametrize(
    ("low", "high", "written"),
    [
        (1214.3, 1223.1, "1,214–1,223"),
        (722.94, 723.03, "722.94–723.03"),
        (1.4968, 1.5031, "1.497–1.503"),
        (1.041, 1.144, "1.04–1.14"),
        (3, 3, "3.0000–3.0000"),
    ],
)
def test_an_interval_has_as_many_digits_as_its_width_needs(low: float, high: float, written: str) -> None:
    assert interval(low, high) == written
    assert interval(low, None) == ""


def test_durations_that_are_read_together_have_one_unit() -> None:
    assert durations(-6960, 2.8 * 3600) == ["−1.9 h", "2.8 h"]
    assert durations(-31, 41) == ["−31 s", "41 s"]
    assert durations(99, 19 * 60, None) == ["1.6 min", "19 min", "—"]


@pytest.mark.slow
def test_a_log_is_linked_only_where_its_folder_is(make_sweep: MakeSweep) -> None:
    folder = make_sweep(
        [
            trial("scope=full", status=Status.FAILED, trial_id="a b#1"),
            trial("scope=regional", status=Status.FAILED, trial_id="gone"),
            trial("scope=modular", status=Status.FAILED, trial_id="../logs"),
        ]
    )
    (folder / "logs" / "a b#1").mkdir(parents=True)
    page = page_without_scripts(analysis.write_report(folder))
    assert set(re.findall(r'href="(logs[^"]*)"', page)) == {"logs/a%20b%231/"}
    assert page.count("no log kept") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "No space left on device); make room"),
        (errno.EFBIG, "File too large); make room"),
        (errno.EROFS, "Read-only file system); make the folder writable, or see it with --watch"),
    ],
)
def test_a_report_that_cannot_be_finished_leaves_the_old_one(
    make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    folder = make_sweep()
    (folder / "report.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SweepFolderError, match=re.escape(said)):
        analysis.write_report(folder)
    assert (folder / "report.html").read_text() == "old"
    assert not list(folder.glob(".report*"))


@pytest.mark.slow
def test_the_command_prints_the_path(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep()
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")


@pytest.mark.slow
def test_the_command_refuses_bad_input_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analysis.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds no trials.jsonl" in done.stderr


@pytest.mark.slow
def test_importing_analysis_brings_in_neither_plotly_nor_torch_nor_ray() -> None:
    code = "import sys, analysis; sys.exit(bool({'plotly', 'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(hasattr(analysis, name) for name in analysis.__all__)


@pytest.mark.slow
def test_without_javascript_the_fastest_settings_and_what_is_missing_are_there(report_on: ReportOn) -> None:
    page = page_without_scripts(report_on())
    assert "Without JavaScript, this page has no charts" in page
    assert ".chart, .copy-command" in report_on().read_text().partition("<noscript><style>")[2].partition("</style>")[0]
    rows = page[page.index('<table id="trials">') :]
    rows = rows[: rows.index("</table>")]
    assert rows.count("<tr>") == 1 + 6  # headings, and the usable ones
    assert rows.index(" full, buckets of 32") < rows.index(" regional, auto")
    assert "<td>1,046</td>" in rows
    assert "the loss is NaN" not in rows


@pytest.mark.slow
def test_the_page_has_three_parts_that_its_contents_name_in_order(report_on: ReportOn) -> None:
    page = page_without_scripts(report_on())
    assert re.findall(r'<h2 class="part" id="(\w+)">', page) == ["decide", "why", "details"]
    linked = re.findall(r'<a href="#([\w-]+)">', page)
    places = [page.index(f'id="{name}"') for name in linked]
    assert len(linked) > 10
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best.json", "best.py", "report.html"])
def test_a_pipe_beside_the_records_does_not_hang_a_report(make_sweep: MakeSweep, name: str) -> None:
    folder = make_sweep([trial("scope=eager,padding=max", 500, 0)])
    os.mkfifo(folder / name)
    assert "<html" in analysis.write_report(folder).read_text()
