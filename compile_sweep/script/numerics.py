"""Checks whether a compiled run of a script computes what its eager runs compute.

Background: each run records losses, gradients, updates and the weights' movement over the steps after the discovery, by group of
modules (`trajectory.py`). During these, each forward draws its random numbers from a generator of its own, so that data that the
script draws in between are the same in every run, whatever the forward draws. There are eager runs, each in a fresh process: A is
the script unchanged, for which the trial of the script as it is may stand; A again shows by its distance from A how far the
script is from deterministic; B has weights changed by as little as rounding does, and other random numbers in the forward, which
shows how far apart right runs may be. `harness/numerics/check.py` judges by these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.contract.inspect_model import repeated_blocks
from compile_sweep.contract.precision import matmul_precision
from compile_sweep.harness.numerics.python_state import ClassState, own_files
from compile_sweep.harness.numerics.references import PRODUCTS_ROUNDING, RANDOM_REPEATS, References
from compile_sweep.harness.numerics.tolerance import FLOAT8_ROUNDING, FLOAT32_ROUNDING
from compile_sweep.harness.numerics.trajectory import Recorder, Trajectory, _norms
from compile_sweep.script.discover import Discovery, Target


class _Blocks:
    """The part of a workload that `Recorder` needs."""

    @staticmethod
    def regions(model: nn.Module) -> Sequence[str]:
        return repeated_blocks(model)


class StepRecorder(Recorder):
    """Records the steps of a script as it runs them."""

    def __init__(self, targets: Sequence[Target], *, steps: int) -> None:
        self._kept = _as_one(targets)
        super().__init__(_Blocks(), self._kept, steps=steps)  # type: ignore[arg-type]
        self._random = any(target.draws for target in targets)
        self.classes = ClassState(own_files(self._kept))

    def stepped(self, losses: Sequence[Tensor]) -> None:
        """Records a step that has ended with these losses; its gradients must still exist."""
        self._record_gradients()
        values = self._sample.values()
        self._updates.append(_norms([now - before for now, before in zip(values, self._last, strict=True)]))
        self._last = values
        self._losses.append(combined(losses, self._device))
        if self.done:
            self._buffers_last = self._sample_buffers()


def _as_one(targets: Sequence[Target]) -> nn.Module:
    """Returns the only target's module, or one that holds all by their names, none of which it has otherwise, such as `items`."""
    if len(targets) == 1:
        return targets[0].module
    kept = nn.ModuleDict()
    for target in targets:
        name = target.name.replace(".", "_")
        while hasattr(kept, name):
            name += "_"
        kept[name] = target.module
    return kept


def combined(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns one number for a step's losses: the root mean square of several, because their sum could cancel."""
    if not losses:
        return torch.zeros((), device=device)
    values = [loss.detach().double().mean().to(device) for loss in losses]
    return values[0].clone() if len(values) == 1 else torch.stack(values).square().mean().sqrt()


def rounding_of(target: Target) -> float:
    """Returns the relative rounding error of one operation in the target's precision."""
    if any(type(module).__name__ == "Float8Linear" for module in target.module.modules()):  # torchao's
        return FLOAT8_ROUNDING
    dtype = target.autocast or next(weights.dtype for weights in target.module.parameters() if weights.is_floating_point())
    if dtype is torch.float32:
        return PRODUCTS_ROUNDING[matmul_precision()] if target.device.type == "cuda" else FLOAT32_ROUNDING
    return torch.finfo(dtype).eps / 2


def save(trajectory: Trajectory, path: Path) -> None:
    """Writes a trajectory to a file."""
    torch.save(trajectory.to_dict(), path)


def load(path: Path) -> Trajectory:
    """Reads a trajectory from a file."""
    return Trajectory(**torch.load(path, weights_only=True))


EAGER_RUNS: Mapping[str, Callable[[bool], int]] = {
    "eager": lambda draws: 1,
    "again": lambda draws: 1,
    "perturbed": lambda draws: RANDOM_REPEATS if draws else 1,
}
"""Kinds of eager runs, and the number of each, by whether the forward draws random numbers."""


def references(
    eager: Trajectory,
    again: Trajectory,
    perturbed: Sequence[Trajectory],
    rounding: float,
    *,
    further: Sequence[Trajectory] = (),
) -> References:
    """Returns the references for judging a compiled run. A run that repeats A exactly adds nothing, and is left out.

    Args:
        further: Perturbed runs with the precision of float32 products that is judged.
    """
    others = [*perturbed[:RANDOM_REPEATS], *([again] if distance(eager, again) > 0 else [])]
    more = [*perturbed[RANDOM_REPEATS:], *further]
    return References(eager=eager, permuted=others, perturbed=more, precise=None, precise_dtype=None, rounding=rounding)


def distance(one: Trajectory, other: Trajectory) -> float:
    """Returns the largest relative distance of two runs in loss or norms of gradients; 0 if they are equal."""
    pairs = [(one.losses, other.losses), *((norms, other.gradients[name]) for name, norms in one.gradients.items())]
    gaps = [abs(a - b) / max(abs(a), abs(b)) for first, second in pairs for a, b in zip(first, second, strict=False) if a != b]
    return max((gap for gap in gaps if not math.isnan(gap)), default=0.0)


def facts_of(found: Discovery) -> dict[str, Any]:
    """Returns the facts from the discovery that judging needs."""
    return {"draws": any(target.draws for target in found.targets), "rounding": rounding_of(found.primary)}
