"""Help, plans, sources, error messages and results are unchanged; see `golden.py` for how to change them on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from command_lines import ALL, BAD_INPUT, EXPORTED, ON_CPU, ON_GPU, ONE, RECOMFIXED, REPORTED, RESULTS
from golden import check, normalized, run
from page_digest import columns_of, data_of, shortened, words_of

from compile_sweep.contract.installed_torch import torch_version


def _skip_other_sources(name: str) -> None:
    if name.startswith("source/") and torch_version() < (2, 13):
        pytest.skip("before torch 2.13, lengths that change are compiled without shape_padding")


@pytest.mark.usefixtures("here", "no_gpu")
@pytest.mark.parametrize("name", ON_CPU)
def test_what_is_printed_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _skip_other_sources(name)
    check(name, "\n".join(run(line, capsys) for line in ON_CPU[name]))


@pytest.mark.usefixtures("here", "one_gpu")
@pytest.mark.parametrize("name", ON_GPU)
def test_what_is_printed_with_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _skip_other_sources(name)
    check(name, "\n".join(run(line, capsys) for line in ON_GPU[name]))


@pytest.mark.usefixtures("results", "no_gpu")
@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_is_refused_and_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, "\n".join(run(line, capsys) for line in BAD_INPUT[name]))


@pytest.mark.usefixtures("results", "no_gpu")
@pytest.mark.parametrize("name", RESULTS)
def test_what_committed_records_come_to(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, "\n".join(run(line, capsys) for line in RESULTS[name]))


@pytest.mark.usefixtures("no_gpu")
def test_tables_of_all_committed_sweeps(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = sorted(log.parent.relative_to(results.parent) for log in results.rglob("trials.jsonl"))
    printed = "\n".join(run(f"table {sweep}", capsys) for sweep in sweeps)
    assert printed.count("exit code 0\n") == len(sweeps), "a committed record cannot be read"
    check("results/table_of_sweeps.txt", printed)


@pytest.mark.usefixtures("results", "no_gpu")
def test_recommendations_of_committed_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    printed = "\n".join(run(f"recommend {sweep} --steps 100k", capsys) for sweep in RECOMFIXED)
    check("results/recommend_of_sweeps.txt", printed)


@pytest.mark.usefixtures("results", "no_gpu")
@pytest.mark.parametrize("line", EXPORTED)
def test_what_is_exported_of_committed_records(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, *words = line.split()
    into = Path(words[-1]) if "--output" in words else Path(folder)
    name = f"results/export/{Path(folder).name}"
    check(f"{name}.txt", run(line, capsys))
    check(f"{name}.best.py.txt", (into / "best.py").read_text(encoding="utf-8"))
    said = json.loads((into / "best.json").read_text(encoding="utf-8"))
    check(f"{name}.best.json", json.dumps(shortened(said), indent=2, ensure_ascii=False) + "\n")
    for form, read in (("csv", pd.read_csv), ("parquet", pd.read_parquet)):
        if (path := into / f"trials.{form}").exists():
            check(f"{name}.{form}.txt", columns_of(read(path)))


@pytest.mark.usefixtures("results", "no_gpu")
@pytest.mark.parametrize("folder", REPORTED)
def test_what_is_reported_of_committed_records(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(f"report {folder}", capsys)
    page = Path(folder, "report.html").read_text(encoding="utf-8")
    name = folder.removeprefix("results/").replace("/", "_")
    check(f"results/report/{name}.txt", f"{printed}\n{normalized(words_of(page))}")
    check(f"results/report/{name}.json", normalized(data_of(page)))


@pytest.mark.usefixtures("results", "no_gpu")
def test_what_the_page_of_a_comparison_says(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(f"compare {ONE} {ALL} --fail-on compile_s>+15% --output compare.html", capsys)
    page = Path("compare.html").read_text(encoding="utf-8")
    check("results/compare_page.txt", f"{printed}\n{normalized(words_of(page))}")
