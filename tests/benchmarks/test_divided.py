import math
from pathlib import Path

import pytest

from benchmarks.numerics.divided import divided


def test_a_second_call_does_only_what_the_first_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # restored, because `divided` sets it
    path = tmp_path / "new" / "found.jsonl"
    assert divided(path, {"four": (4.0,), "less": (-1.0,)}, math.sqrt, 2) == {"four": 2.0}
    assert "less: ValueError" in capsys.readouterr().err  # told, and not written
    assert divided(path, {"four": (4.0,), "nine": (9.0,)}, math.sqrt, 1) == {"four": 2.0, "nine": 3.0}
    assert "1 of 1: nine" in capsys.readouterr().err
