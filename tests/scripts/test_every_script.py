"""Every script of `scripts/`, under several settings and trained with one applied: by an independent clock, with its own keys."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_sweep.harness.numerics.gradient_check import Outcome
from compile_sweep.script import session_results
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.main_module import run_as_main
from compile_sweep.script.session import Session
from compile_sweep.script.spawn import SpawnInPlace
from compile_sweep.script.winner import Applier
from tests.scripts.conftest import SCRIPTS, Run

COMPILED = "scope=full,dynamic=auto,backend=aot_eager"
SETTINGS = ["scope=eager,as_written=on", "scope=eager,optimizer=fused", COMPILED]

NAMES = sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "fsdp.py")  # the workers of these need each other

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*num_workers", "ignore:.*logging interval"),
]


@pytest.fixture
def steps() -> Iterator[list[tuple[Optimizer, float]]]:
    """Yields when each optimizer stepped, by an independent clock."""
    seen: list[tuple[Optimizer, float]] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append((optimizer, time.perf_counter())))
    yield seen
    hook.remove()


def keys(session: Session) -> list[list[str]]:
    return [list(target.module.state_dict()) for target in session.found.targets]


@pytest.mark.nightly("runs a script under three settings; test_measured_scripts.py measures each script compiled")
@pytest.mark.parametrize("script", NAMES)
def test_a_script_is_measured_by_its_own_clock_under_three_settings(
    script: str, run: Run, steps: list[tuple[Optimizer, float]]
) -> None:
    pytest.importorskip({"lightning_module.py": "lightning", "accelerated.py": "accelerate"}.get(script, "torch"))
    found_keys = []
    for settings in SETTINGS:
        steps.clear()
        session, error = run(script, settings)
        assert error is session.error is None
        assert session.stream is not None
        ours = session.stream.times[-session.stream.pass_steps :]  # ours ends the script after this clock has seen the last step
        times = [at for optimizer, at in steps if optimizer is session.found.anchor][-len(ours) - 1 :]
        if not session.stream.interrupted:
            assert sum(one.ms for one in ours) == pytest.approx(1e3 * (times[-1] - times[0]), rel=0.05)
        assert session.gradient_check is None or session.gradient_check.outcome is not Outcome.WRONG
        assert session_results.measurement(session).step_ms_median > 0
        found_keys.append(keys(session))
    assert found_keys[0] == found_keys[1] == found_keys[2]


class Enough(BaseException):
    """Ends a script that has trained long enough."""


@pytest.mark.nightly("trains each script; test_winner.py does so with one")
@pytest.mark.parametrize("script", NAMES)
def test_a_script_trains_with_a_winner_applied_and_keeps_its_keys(
    script: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"lightning_module.py": "lightning", "accelerated.py": "accelerate"}.get(script, "torch"))
    kept = sys.modules["__main__"], sys.argv[:], sys.path[:]
    monkeypatch.chdir(folder)
    torch._dynamo.reset()
    said: list[str] = []
    applier = Applier(COMPILED, say=said.append)
    seen = []

    def stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
        seen.append(optimizer)
        if len(seen) > 60:
            raise Enough

    hook = register_optimizer_step_post_hook(stepped)
    try:
        with applier.own_compile.answered(plainly=True), SpawnInPlace(refuse=lambda *counts: pytest.fail(f"{counts}")).applied():
            applier.begin()
            job = ScriptJob.of(script, folder=str(folder))
            run_as_main(job.path, job.arguments)
    except (Enough, SystemExit):
        pass
    finally:
        applier.end()
        hook.remove()
        sys.modules["__main__"], sys.argv[:], sys.path[:] = kept
    assert applier.is_applied
    assert f", applied to {', '.join(_named(applier))}" in said[-1]
    for module in (target.module for target in applier.found.targets):
        assert isinstance(module, nn.Module)
        assert not any("_orig_mod" in key for key in module.state_dict())
    torch._dynamo.reset()


def _named(applier: Applier) -> list[str]:
    return [f"{target.name} ({type(target.module).__name__})" for target in applier.found.targets]
