"""Tables of variations, and the pitfalls of compiling vision models as the records show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.levers.variations import main
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, append
from compile_sweep.schema.settings import CompileSettings

GIB = 2**30


def recorded(folder: Path, spelled: str, ms: float = 10.0, times_eager: float | None = None, **further: Any) -> None:
    settings = CompileSettings.parse(spelled)
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "settings": settings.to_dict(),
        "settings_key": settings.key,
        "status": Status.OK,
        "samples_per_s": 5.0,
        "workload": "segmentation",
        "size": "b0",
        "device": "a GPU",
        "step_ms_median": ms,
        "speedup_eager": times_eager,
        "speedup_eager_ci95": (times_eager - 0.1, times_eager + 0.1) if times_eager else None,
        **further,
    }
    append(folder, TrialRecord(trial_id=f"{spelled} {further.get('num_workers', 1)}", **values))


def printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_each_variation_is_a_row_with_eager_and_compiled_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, "scope=full,workload.batch_size=4", 6.0, 1.5, graph_breaks=2)
    recorded(tmp_path, "scope=eager", 10.0, peak_memory_bytes=4 * GIB)
    recorded(tmp_path, "scope=full,mode=reduce-overhead", 5.0, 2.0, peak_memory_bytes=5 * GIB)
    recorded(tmp_path, "scope=full,dynamic=true", 9.0, 1.1, status=Status.INFEASIBLE, label="diverges")
    lines = printed(tmp_path, capsys)
    assert lines[:7] == [
        "segmentation (b0) on a GPU",
        "",
        "| varied, ms/step | eager | full | full reduce-overhead |",
        "|---|---|---|---|",
        "| nothing | 10 | – | 5 (2.00×) |",
        "| batch_size=4 | – | 6 (1.50×, 2 breaks) | – |",
        "| dynamic=true | – | 9 (1.10×), diverges | – |",
    ]
    assert "| nothing | 4.00 | – | 5.00 |" in lines


def test_ways_of_reducing_gradients_are_columns_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, "scope=full,ddp.optimize_ddp=no_optimization", 6.0, num_workers=2, peak_memory_bytes=5 * GIB)
    recorded(tmp_path, "scope=full", 10.0, num_workers=2, peak_memory_bytes=4 * GIB)
    recorded(tmp_path, "scope=eager", 12.0, num_workers=2, peak_memory_bytes=4 * GIB)
    recorded(tmp_path, "scope=eager,workload.ema=on", 12.0, num_workers=2)
    lines = printed(tmp_path, capsys)
    assert lines[2] == "| varied, ms/step | eager | full | full, optimize ddp no_optimization |"
    assert "| 2 workers | 12 | 10 | 6 |" in lines
    assert any(line.endswith("no longer holds: peak memory in units of eager's, default 1.00.") for line in lines)


def test_pitfalls_hold_or_not_by_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, "scope=eager", peak_memory_bytes=10 * GIB)
    recorded(tmp_path, "scope=full", times_eager=1.6, peak_memory_bytes=8 * GIB)
    recorded(tmp_path, "scope=full,mode=reduce-overhead", times_eager=1.8, peak_memory_bytes=12 * GIB)
    recorded(tmp_path, "scope=full,autocast=off", times_eager=1.1)
    recorded(tmp_path, "scope=full,workload.ema=on", times_eager=1.5)
    recorded(tmp_path, "scope=full,workload.norm=sync", times_eager=1.4)
    told = [line for line in printed(tmp_path, capsys) if line.startswith("- ")]
    plain, without = "1.60 (1.50 to 1.70) times as fast as eager", "1.10 (1.00 to 1.20) times as fast as eager"
    assert told == [
        "- “No EMA with torch.compile”: no longer holds: with EMA compiled is 1.50 (1.40 to 1.60) times as fast as eager, "
        f"without {plain}.",
        "- “No SyncBN with torch.compile”: cannot be told from one worker, which has nothing to synchronise: "
        "1.40 (1.30 to 1.50) times as fast as eager.",
        "- “A smaller batch, because compiling takes more memory”: holds for some modes: peak memory in units of eager's, "
        "default 0.80, reduce-overhead 1.20.",
        f"- “AMP gives the largest gain”: holds: with AMP compiled is {plain}, in float32 {without}.",
    ]


def test_two_workers_tell_of_synchronised_normalisation_and_failures_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, "scope=full", times_eager=1.6, num_workers=2)
    recorded(tmp_path, "scope=full,workload.norm=sync", times_eager=1.0, num_workers=2, graph_breaks=9)
    recorded(tmp_path, "scope=full,workload.ema=on", status=Status.INFEASIBLE, label="out-of-memory", reason="it took too much")
    told = "\n".join(printed(tmp_path, capsys))
    assert "“No EMA with torch.compile”: holds: compiled with EMA it is out-of-memory, it took too much." in told
    assert "holds: 9 graph breaks, with SyncBN compiled is 1.00 (0.90 to 1.10) times as fast as eager, with BN 1.60" in told
    assert "takes more memory”: not measured." in told
    assert "| norm=sync, 2 workers | 10 (1.00×, 9 breaks) |" in told


@pytest.mark.parametrize(("folders", "said"), [([], "give the folder"), (["nowhere"], "nowhere holds no good trial")])
def test_bad_input_is_one_sentence(
    folders: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(folders) == 2
    assert said in capsys.readouterr().err


def test_settings_that_differ_in_anything_but_how_they_are_compiled_have_rows_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, "scope=full", 6.0)
    recorded(tmp_path, "scope=full,optimizer=fused", 5.0)
    recorded(tmp_path, "scope=full,group_window=100", 4.0)
    recorded(tmp_path, "scope=full,mode=max-autotune,inductor.coordinate_descent_tuning=off", 3.0)
    lines = printed(tmp_path, capsys)
    assert "| nothing | 6 | 3 |" in lines
    assert "| optimizer=fused | 5 | – |" in lines
    assert "| group_window=100 | 4 | – |" in lines
