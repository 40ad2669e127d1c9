"""Without a browser there is no picture, and one sentence says so."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from sweep_folders import MakeSweep

from analysis import picture
from analysis.load import SweepInfo


def test_without_a_browser_one_sentence_says_so(
    make_sweep: MakeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert picture.main([str(make_sweep()), str(tmp_path / "front.png")]) == 2
    assert "no Chromium is installed" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.parametrize("chart", ["front", "break-even", "phases"])
def test_a_chart_is_drawn_as_an_svg_with_its_words(chromium: str, make_sweep: MakeSweep, tmp_path: Path, chart: str) -> None:
    path = picture.write_picture(make_sweep(), tmp_path / "chart.svg", chart)
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["width"] == "1200"
    words = "".join(root.itertext())
    assert {"front": "samples per second", "break-even": "length of the job", "phases": "cold compile time"}[chart] in words


@pytest.mark.browser
def test_a_chart_that_the_report_does_not_have_is_refused_with_those_it_has(
    chromium: str, make_sweep: MakeSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert picture.main([str(make_sweep()), str(tmp_path / "chart.png"), "--chart", "weather"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "front, break-even, effects, memory" in said


def test_the_title_says_what_was_measured_on_what_as_far_as_known() -> None:
    known = SweepInfo(config={"workload": "captioning", "size": "base"}, environment={"gpu": "NVIDIA H200", "torch": "2.13.0"})
    assert picture.picture_title(known) == "captioning base · NVIDIA H200 · torch 2.13.0"
    assert picture.picture_title(SweepInfo()) == "sweep"
