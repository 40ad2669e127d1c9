"""The eager runs that a script's trials are judged by: when they are made, side by side or alone, and with what settings."""

from __future__ import annotations

import os
import time
from itertools import combinations
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_sweep.harness.numerics.check import ZERO_GRADIENTS
from compile_sweep.harness.numerics.references import MORE_PERTURBED
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.script import numerics, run_one, trial
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.session import Kind
from compile_sweep.script.trial import OutOfTime, RunFailed, ScriptTrial
from tests.scripts.conftest import Run


def recorded(losses: list[float], movement: torch.Tensor) -> Trajectory:
    return Trajectory(
        losses=losses,
        gradients={"net": [losses[0], losses[0]]},
        updates={"net": [0.1, 0.1]},
        movement={"net": movement},
        start_norms={"net": 1.0},
        buffers={},
        buffer_norms={},
        weights=torch.float32,
        random=False,
    )


@pytest.mark.parametrize("fits", [True, False])
def test_eager_runs_that_fit_run_side_by_side_and_one_that_fails_runs_again_alone(
    fits: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_at_once, calls = Barrier(3, timeout=20), list[str]()

    def once(
        self: ScriptTrial, base: Path, kind: str, settings: CompileSettings, *, forward_seed: int = 0, side_by_side: int = 1
    ) -> None:
        assert settings.scope is Scope.EAGER
        assert side_by_side == (3 if fits and len(calls) < 3 else 1)
        calls.append(kind)
        if fits and len(calls) <= 3:
            all_at_once.wait()
            if kind == "again":
                raise RunFailed("torch.OutOfMemoryError", "out of memory")
        (base / "trajectory").write_text(f"{kind} {forward_seed}")

    monkeypatch.setattr(ScriptTrial, "_once", once)
    (base := tmp_path / "trial").mkdir()
    job = ScriptJob.of("plain_loop.py", [], folder=str(folder))
    trial = ScriptTrial(job=job, settings=CompileSettings(), base=base, references=tmp_path)
    trial._make_references(draws=False, at_once=3 if fits else 1)
    assert calls[3:] == (["again"] if fits else [])
    assert {kind: (tmp_path / f"{kind}-0").read_text() for kind in calls} == {
        "eager": "eager 0",
        "again": "again 0",
        "perturbed": "perturbed 1",
    }
    trial._make_references(draws=False, at_once=3 if fits else 1)
    assert len(calls) == 3 + fits, "they are made once"


def test_further_eager_runs_have_the_precision_of_the_settings_that_are_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(self: ScriptTrial, base: Path, kind: str, settings: CompileSettings, *, forward_seed: int = 0, **_: int) -> None:
        (base / "trajectory").write_text(f"{kind} {settings.matmul_precision} {forward_seed}")

    monkeypatch.setattr(ScriptTrial, "_once", once)
    (tmp_path / "train.py").write_text("")
    (base := tmp_path / "trial").mkdir()
    (kept := tmp_path / "kept").mkdir()
    job, settings = ScriptJob.of("train.py", folder=str(tmp_path)), CompileSettings.parse("scope=eager,matmul_precision=high")
    ScriptTrial(job=job, settings=settings, base=base, references=kept)._make_references(False, at_once=1, more=2)
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "eager-0": "eager None 0",
        "again-0": "again None 0",
        "perturbed-0": "perturbed None 1",
        "perturbed-high-1": "perturbed high 2",
        "perturbed-high-2": "perturbed high 3",
    }


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize(("settings", "graphs"), [("scope=eager,as_written=on", 0), ("scope=full", 1)])
def test_only_the_script_as_it_is_is_measured_without_eager_runs_once_their_time_is_used_up(
    settings: str, graphs: int, in_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(trial: ScriptTrial, folder: Path, kind: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        if time.monotonic() > trial.ends_at:
            raise OutOfTime({})
        (folder / "trajectory").write_text(kind)
        facts = {"facts": {"draws": False, "rounding": 2.0**-24}, "runs_at_once": 1, "losses": [1.0], "as_it_is": {}}
        return {"measurement": {"graphs": graphs, "samples_per_s": 8.0}, "findings": [], **facts}

    monkeypatch.setattr(ScriptTrial, "_once", once)
    monkeypatch.setattr("compile_sweep.script.trial._references", lambda *_: SimpleNamespace(eager=SimpleNamespace(random=False)))
    monkeypatch.setattr("compile_sweep.script.trial._judged", lambda *_: {"numerics": {"status": "diverges", "random": True}})
    monkeypatch.setattr("compile_sweep.script.trial._is_doubtful", lambda _: False)
    (tmp_path / "train.py").write_text("")
    found = ScriptTrial(
        job=ScriptJob.of("train.py", folder=str(tmp_path)),
        settings=CompileSettings.parse(settings),
        base=tmp_path,
        references=tmp_path / "kept",
        eager_runs_end_at=time.monotonic() + (100.0 if in_time else -1.0),
    ).run()
    assert found["samples_per_s"] == 8.0
    was_judged = in_time or graphs == 1
    assert ("numerics" in found, "time budget was used up" not in str(found["findings"])) == (was_judged, was_judged)


@pytest.mark.parametrize(
    ("settings", "graphs", "at_once", "made"),
    [
        ("scope=eager,as_written=on", 0, 1, ["again", "perturbed"]),
        ("scope=eager,as_written=on", 0, 3, ["again", "eager", "perturbed"]),  # which have fewer threads each
        ("scope=eager,as_written=on", 1, 1, ["again", "eager", "perturbed"]),  # the script compiles itself
        ("scope=eager,optimizer=fused", 0, 1, ["again", "eager", "perturbed"]),
    ],
)
def test_the_script_as_it_is_counts_as_an_eager_run(
    settings: str, graphs: int, at_once: int, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []

    def once(self: ScriptTrial, base: Path, kind: str, settings: CompileSettings, **_: int) -> None:
        kinds.append(kind)
        numerics.save(recorded([1.0, 0.9], torch.ones(4, dtype=torch.float64)), base / "trajectory")

    monkeypatch.setattr(ScriptTrial, "_once", once)
    (tmp_path / "train.py").write_text("")
    (kept := tmp_path / "kept").mkdir()
    job = ScriptJob.of("train.py", folder=str(tmp_path))
    run = ScriptTrial(job=job, settings=CompileSettings.parse(settings), base=tmp_path, references=kept)
    outcome = {
        "facts": {"draws": False, "rounding": 2.0**-24},
        "runs_at_once": at_once,
        "losses": [1.0, 0.9],
        "gradient_check": None,
        "measurement": {"device": "cpu", "recompile_reasons": [], "graphs": graphs},
        "unsynchronized_kernels": [],
        "changed_in_classes": [],
    }
    once(run, tmp_path, "measured", run.settings)
    judged = run.judge_numbers(tmp_path, outcome, [])
    assert judged["numerics"]["status"] == "ok"
    assert sorted(kinds[1:]) == made
    assert (kept / "eager-0").exists()


@pytest.mark.parametrize(
    ("settings", "expected"), [("scope=eager,matmul_precision=high", "ok"), ("scope=eager,optimizer=fused", "diverges")]
)
def test_an_optimizer_that_takes_signs_is_judged_by_eager_runs_that_round_as_coarsely(
    settings: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adagrad's first step moves each element by the rate; of many small ones, TF32 changes the sign of one in a hundred."""
    signs = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sign()

    def kept(name: str, seed: int = 0) -> None:
        flipped = torch.rand(len(signs), generator=torch.Generator().manual_seed(seed)) < (0.01 if seed else 0)
        numerics.save(recorded([1.0, 0.9], torch.where(flipped, -signs, signs)), tmp_path / name)

    def make(self: ScriptTrial, draws: bool, *, at_once: int, more: int = 0) -> None:
        for number in range(3, 3 + more):
            kept(f"perturbed-high-{number}", number)

    for name in ("eager-0", "again-0", "perturbed-0"):
        kept(name)
    kept("trajectory", 1)
    monkeypatch.setattr(ScriptTrial, "_make_references", make)
    (tmp_path / "train.py").write_text("")
    job = ScriptJob.of("train.py", folder=str(tmp_path))
    run = ScriptTrial(job=job, settings=CompileSettings.parse(settings), base=tmp_path, references=tmp_path)
    outcome = {
        "facts": {"draws": False, "rounding": 2.0**-11},
        "runs_at_once": 1,
        "losses": [1.0, 0.9],
        "gradient_check": None,
        "measurement": {"device": "cuda", "recompile_reasons": [], "graphs": 0},
        "unsynchronized_kernels": [],
        "changed_in_classes": [],
    }
    assert run.judge_numbers(tmp_path, outcome, [])["numerics"]["status"] == expected


@pytest.mark.parametrize(
    ("reserved", "host_pages", "world_size", "at_once"),
    [(2, 2**40, "1", 5), (30, 2**40, "1", 3), (90, 2**40, "1", 1), (0, 2**40, "1", 1), (2, 1, "1", 1), (2, 2**40, "2", 1)],
)
def test_as_many_eager_runs_start_side_by_side_as_fit_the_gpu_and_the_host(
    reserved: int, host_pages: int, world_size: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_one.memory, "total_bytes", lambda device: 100)
    monkeypatch.setattr(os, "sysconf", lambda name: host_pages)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    peaks = SimpleNamespace(reserved_bytes=reserved, tensors_bytes=None)
    session: Any = SimpleNamespace(peaks=peaks, device=torch.device("cuda"))
    assert run_one._runs_at_once(session) == at_once


@pytest.mark.slow
def test_eager_runs_that_settle_a_doubt_start_at_weights_of_their_own_as_far_off_as_kernels_round(run: Run) -> None:
    moved: list[torch.Tensor] = []
    for seed in (0, 1, 2, 5, 6):
        kind = Kind.PERTURBED if seed else Kind.EAGER
        session, error = run("plain_loop.py", "scope=eager,as_written=on", "--width", "32", kind=kind, forward_seed=seed)
        assert error is session.error is None
        assert session.trajectory is not None
        moved.append(torch.cat(list(session.trajectory.movement.values())))
    unchanged, *others = moved
    assert all(not torch.equal(one, other) for one, other in combinations(others, 2))
    usual, usual_too, further, further_too = (float((one - unchanged).norm() / unchanged.norm()) for one in others)
    assert 0 < max(usual, usual_too) < min(further, further_too) < 1e-2


GAP = {"gap": 0.25, "tolerance": 0.21, "kind": "distance"}
NEAR = {
    "status": "diverges", "random": True, "worst": "parameters of conv1", "gradient_check": None, "loss": GAP | {"gap": 0.1},
    "gradients": {}, "updates": {}, "parameters": {"conv1": GAP},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"status": "ok"}, False),
        ({"random": False}, True),
        ({"parameters": {"conv1": GAP | {"gap": 0.9}}}, True),
        ({"random": False, "parameters": {"conv1": GAP | {"gap": 0.9}}}, False),
        ({"parameters": {"conv1": GAP | {"gap": None}}}, False),
        ({"worst": f"gradients of conv1 {ZERO_GRADIENTS}"}, False),
        ({"gradient_check": {"outcome": "wrong"}}, False),
    ],
)
def test_what_random_numbers_may_explain_is_judged_again_by_more_eager_runs(
    changes: dict[str, Any], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    verdicts = iter([{"numerics": NEAR | changes}, {"numerics": {"status": "ok"}}])
    monkeypatch.setattr(ScriptTrial, "_make_references", lambda self, draws, *, at_once, more=0: made.append(more))
    monkeypatch.setattr(trial, "_judged", lambda *given: next(verdicts))
    monkeypatch.setattr(trial, "_references", lambda *given: SimpleNamespace(eager=SimpleNamespace(random=False)))
    (tmp_path / "train.py").write_text("")
    run = ScriptTrial(
        job=ScriptJob.of("train.py", folder=str(tmp_path)),
        settings=CompileSettings.parse("scope=full"),
        base=tmp_path,
        references=tmp_path,
    )
    found = run.judge_numbers(tmp_path, {"facts": {"draws": True}, "runs_at_once": 3}, [])
    assert made == ([0, MORE_PERTURBED] if expected else [0])
    assert found["numerics"]["status"] == ("ok" if expected else (NEAR | changes)["status"])


def test_a_script_whose_data_no_seed_fixes_is_compared_with_more_eager_runs_and_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[bool, int]] = []

    def kept(name: str, loss: float) -> None:
        numerics.save(recorded([loss, loss / 2], torch.full((4,), loss / 50, dtype=torch.float64)), tmp_path / name)

    def make(self: ScriptTrial, draws: bool, *, at_once: int, more: int = 0) -> None:
        made.append((draws, more))
        for number in range(3 if draws else 1):
            kept(f"perturbed-{number}", 1.2 + number / 10)

    kept("eager-0", 1.0)
    kept("again-0", 1.4)
    kept("trajectory", 1.3)
    monkeypatch.setattr(ScriptTrial, "_make_references", make)
    (tmp_path / "train.py").write_text("")
    job = ScriptJob.of("train.py", folder=str(tmp_path))
    run = ScriptTrial(job=job, settings=CompileSettings.parse("scope=full"), base=tmp_path, references=tmp_path)
    facts = {"draws": False, "rounding": 2.0**-24}
    findings: list[str] = []
    outcome = {
        "facts": facts,
        "runs_at_once": 3,
        "losses": [1.0],
        "gradient_check": None,
        "measurement": {"device": "cpu", "recompile_reasons": [], "graphs": 0},
        "unsynchronized_kernels": [],
        "changed_in_classes": [],
    }
    found = run.judge_numbers(tmp_path, outcome, findings)["numerics"]
    assert made[:2] == [(False, 0), (True, 0)]
    assert (found["status"], found["random"]) == ("ok", True)
    assert findings == [
        "not deterministic: two eager runs are 29% apart in loss or gradients after the first steps; compiled runs are allowed "
        "as much"
    ]


@pytest.mark.slow
def test_weights_that_a_model_under_vmap_trains_are_perturbed_outside_of_it(run: Run, folder: Path) -> None:
    """Drawing is refused inside of vmap, so the script seemed to fail by itself."""
    (folder / "tasks.py").write_text(
        "import torch\nfrom torch.func import functional_call, vmap\n"
        "torch.manual_seed(0)\nnet = torch.nn.Linear(3, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "def loss(weights, x):\n    return functional_call(net, weights, (x,)).square().mean()\n"
        "for _ in range(100):\n    optimizer.zero_grad()\n"
        "    vmap(loss, (None, 0))(dict(net.named_parameters()), torch.randn(4, 5, 3)).mean().backward()\n    optimizer.step()\n"
    )
    runs = [run("tasks.py", "scope=eager,as_written=on", kind=kind, forward_seed=1) for kind in (Kind.EAGER, Kind.PERTURBED)]
    losses = [session.trajectory.losses for session, error in runs if error is session.error is None and session.trajectory]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[1]
