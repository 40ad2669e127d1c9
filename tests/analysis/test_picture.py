"""Without a browser there is no picture, and one sentence says so."""

from __future__ import annotations

from pathlib import Path

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


def test_the_title_says_what_was_measured_on_what_as_far_as_known() -> None:
    known = SweepInfo(config={"workload": "captioning", "size": "base"}, environment={"gpu": "NVIDIA H200", "torch": "2.13.0"})
    assert picture.picture_title(known) == "captioning base · NVIDIA H200 · torch 2.13.0"
    assert picture.picture_title(SweepInfo()) == "sweep"
