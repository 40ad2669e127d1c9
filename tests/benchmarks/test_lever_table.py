"""The table of levers: its settings, its arithmetic, and a whole run on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.levers import lever_table
from benchmarks.levers.lever_table import JOBS, Job, added, plan_of, rows_of, target_of, without
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings

GIB = 2**30
JOB = Job(
    "layers",
    "tiny",
    "scope=full,dynamic=auto,optimizer=fused",
    {"fused": without(optimizer=None), "combo": added("inductor.combo_kernels=on"), "other": added("inductor.combo_kernel=on")},
)


def record(settings: CompileSettings, samples_per_s: float, **fields: Any) -> TrialRecord:
    known = {"status": Status.OK, "samples_per_s": samples_per_s, "samples_per_s_ci95": (samples_per_s - 1, samples_per_s + 1)}
    usual = {"compile_s": 20.0, "peak_memory_bytes": 2 * GIB}
    return TrialRecord(
        trial_id=settings.key, settings=settings.to_dict(), settings_key=settings.key, **{**known, **usual, **fields}
    )


@pytest.mark.slow
def test_every_lever_of_every_job_makes_a_setting_that_a_gpu_can_run() -> None:
    for name, job in JOBS.items():
        plan = plan_of(job, target_of(job.workload, job.size, has_gpu=True))
        assert not plan.excluded, f"{name}: {plan.excluded}"
        assert plan.best.claims_cudagraphs
        assert len({other.key for other in plan.others.values()}) == len(job.levers)


def test_a_lever_is_in_the_table_with_and_without_it() -> None:
    plan = plan_of(JOB, target_of(JOB.workload, JOB.size, has_gpu=False))
    assert list(plan.others) == ["fused", "combo"]
    assert "did you mean combo_kernels?" in plan.excluded["other"]
    trials = [
        record(plan.best, 200.0),
        record(plan.others["fused"], 100.0, peak_memory_bytes=3 * GIB, compile_s=10.0),
        record(plan.others["combo"], 150.0, status=Status.INFEASIBLE, label="diverges"),
    ]
    fused, combo = rows_of(JOB, plan, trials)
    assert fused == "| fused | 200 | 100 | 2.000× (1.978–2.022) | 2.0, 3.0 | 20.0, 10.0 |  |"
    assert combo.startswith("| combo | 150 | 200 | 0.750× ")
    assert combo.endswith("with: `diverges` |")
    assert list(rows_of(JOB, plan, trials[1:])) == [], "without the best setting there is nothing to compare with"


def test_names_that_no_job_has_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean fused"):
        plan_of(JOB, target_of(JOB.workload, JOB.size, has_gpu=False), ["fuse"])
    monkeypatch.setattr(sys, "argv", ["lever_table", "gpt3", "--output", "anywhere"])
    assert lever_table.main() == 2
    assert "there is no job 'gpt3'; use one of gpt2, resnet, segmentation, captioning" in capsys.readouterr().err


@pytest.mark.nightly("runs two sweeps of two settings; the tests above check the settings and the table")
def test_a_run_on_the_cpu_prints_the_table_and_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    levers = {"fused": without(optimizer=None), "compiling": without(scope="eager", backend=None, dynamic=None)}
    job = Job("layers", "tiny", "scope=full,dynamic=auto,backend=eager,optimizer=fused", levers)
    monkeypatch.setitem(JOBS, "layers", job)
    words = ["layers", "--size", "tiny", "--output", str(tmp_path / "sweep")]
    monkeypatch.setattr(sys, "argv", ["lever_table", *words, "--levers", "fused"])
    assert lever_table.main() == 0
    assert "| fused | " in capfd.readouterr().out
    monkeypatch.setattr(sys, "argv", ["lever_table", *words, "--levers", "compiling"])
    assert lever_table.main() == 0
    out = capfd.readouterr().out
    assert "| fused | " in out
    assert "| compiling | " in out
