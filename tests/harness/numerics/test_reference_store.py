"""Eager runs that trials share: used where they are of the same training, and only there; the verdict is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_workloads import Toy, ToyModel

from compile_sweep.harness.numerics import references as module
from compile_sweep.harness.numerics.check import Numerics, NumericsStatus, check_numerics
from compile_sweep.harness.numerics.reference_store import ReferenceStore, is_same_run
from compile_sweep.harness.numerics.references import MORE_RANDOM, eager_reference, record_run
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")
EAGER = CompileSettings.parse("scope=eager")


class _Drops(ToyModel):
    def spoiled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * nn.functional.dropout(torch.ones(8), 0.1, training=self.training).mean()


class Dropping(Toy):
    """Draws random numbers in its steps."""

    model_class = _Drops


def a_wrong_gradient(model: nn.Module) -> None:
    for parameter in model.get_submodule("body.blocks.1").parameters():
        parameter.register_hook(lambda gradient: gradient * 20)


class Trials:
    """Checks runs of a workload as trials of one sweep do, and counts the eager runs that they make beside run A."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
        self.made = 0
        self.store = None if folder is None else ReferenceStore(folder=folder)
        for name in ("_run", "_precise"):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, run: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            self.made += 1
            return run(*arguments, **named)

        return counted

    def check(
        self, workload: Toy, spoil: Callable[[nn.Module], object] = lambda model: None, spelled: str = "scope=full"
    ) -> Numerics:
        prepared = prepare(workload, CompileSettings.parse(spelled), CPU)
        batches = list(workload.pool(prepared.policy, rank=0, device=CPU))[:3]
        self.made = 0
        compiled, eager = (_trained(workload, spelled, fault) for fault in (spoil, lambda model: None))
        return check_numerics(prepared, batches, compiled, [1.0], eager=eager, store=self.store)


def _trained(workload: Toy, spelled: str, spoil: Callable[[nn.Module], object]) -> Trajectory:
    prepared = prepare(workload, CompileSettings.parse(spelled), CPU)
    batches = list(workload.pool(prepared.policy, rank=0, device=CPU))[:3]
    with eager_reference(prepared) as (model, step):
        spoil(model)
        return record_run(workload, model, step, batches)


@pytest.mark.parametrize("kind", [Toy, Dropping])
def test_later_trials_use_the_first_ones_runs_and_judge_alike(
    kind: type[Toy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, trials = Trials(monkeypatch, None), Trials(monkeypatch, tmp_path)
    first = trials.check(kind("only", 0))
    assert trials.made == (2 if kind is Toy else 4)
    assert first.status is NumericsStatus.OK
    for fault, status in ((lambda model: None, NumericsStatus.OK), (a_wrong_gradient, NumericsStatus.DIVERGES)):
        found = trials.check(kind("only", 0), fault)
        assert trials.made == (MORE_RANDOM if kind is Dropping and status is NumericsStatus.DIVERGES else 0)
        assert found.status is status
        assert found.to_dict() == alone.check(kind("only", 0), fault).to_dict()


@pytest.mark.parametrize(
    ("seed", "spelled"),
    [
        (1, "scope=full"),
        (0, "scope=full,dynamic=mark,pad_multiple=4"),
        (0, "scope=full,matmul_precision=high"),
        (0, "scope=full,accumulate=3"),
    ],
)
def test_runs_of_another_training_are_not_used(seed: int, spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, tmp_path)
    trials.check(Toy("only", 0))
    trials.check(Toy("only", seed), spelled=spelled)
    assert trials.made == 2
    trials.check(Toy("only", 0), spelled="scope=regional,optimizer=fused")  # eager beside it is the first one's
    assert trials.made == 0


def test_what_changed_unseen_by_the_name_shows_in_the_trials_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, tmp_path)
    trials.check(Toy("only", 0))
    monkeypatch.setattr(ToyModel, "spoiled", lambda self, loss: loss * 1.001)
    trials.check(Toy("only", 0))
    assert trials.made == 2
    run = _trained(Toy("only", 0), "scope=full", lambda model: None)
    assert is_same_run(run, run)
    assert not is_same_run(run, replace(run, updates={name: [2 * size for size in sizes] for name, sizes in run.updates.items()}))


def test_a_damaged_file_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, tmp_path)
    trials.check(Toy("only", 0))
    (kept,) = tmp_path.iterdir()
    for damaged in (b"", kept.read_bytes()[:1000], b"not a file of torch's"):
        kept.write_bytes(damaged)
        assert trials.check(Toy("only", 0)).status is NumericsStatus.OK
        assert trials.made == 2
    assert trials.check(Toy("only", 0)).status is NumericsStatus.OK
    assert trials.made == 0


def test_a_folder_of_a_sweep_that_was_removed_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = tmp_path / "sweep"
    trials = Trials(monkeypatch, sweep / ".eager-runs")
    trials.check(Toy("only", 0))
    assert not sweep.exists()
    sweep.mkdir()
    trials.check(Toy("only", 0))
    assert len(list((sweep / ".eager-runs").iterdir())) == 1
