"""Numerics: does a compiled run follow eager training on the same weights and batches?

Background: dropout draws other random numbers in a compiled kernel than in eager mode, so losses never agree to rounding. Two
eager runs that differ in nothing but their random numbers show how far apart two right runs are; a compiled one must stay
within a multiple of that. Output: a status and the gaps behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

TOLERANCE_FACTOR = 4.0
"""Times the gap between two eager runs that a compiled run may be away from their mean."""

TOLERANCE_FLOOR = 0.01
"""Relative; what is always allowed, about what one bfloat16 rounding is (2**-7)."""


class NumericsStatus(StrEnum):
    """How the compiled run compares with eager."""

    OK = "ok"
    NAN = "nan"
    DIVERGES = "diverges"
    EAGER_UNSTABLE = "eager-unstable"
    """Eager itself is not finite on these batches, so nothing can be said of the compiled run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The first steps of a run."""

    losses: Sequence[float]
    gradient_norms: Sequence[float]
    """Global 2-norm of all gradients, before the update, for each step."""

    def finite(self) -> bool:
        """Whether every value is a number."""
        return all(math.isfinite(value) for value in (*self.losses, *self.gradient_norms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The verdict and what it rests on; gaps are relative to eager."""

    status: NumericsStatus
    compared_steps: int
    first_bad_step: int | None
    """Index of the first compared step that is not finite or, where status is diverges, out of tolerance."""
    loss_gap: float | None
    loss_tolerance: float | None
    gradient_norm_gap: float | None
    gradient_norm_tolerance: float | None
    first_bad_steady_step: int | None
    """Index of the first timed step whose loss is not finite."""
    last_loss: float | None
    """Loss at the end of the steady state."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "status": str(self.status)}


def compare(compiled: Trajectory, eager: Trajectory, eager_again: Trajectory, steady_losses: Sequence[float]) -> Numerics:
    """Judges a compiled run.

    Args:
        compiled: the first steps under the settings.
        eager: the same batches from the same weights, eagerly.
        eager_again: once more, with other random numbers.
        steady_losses: losses of the compiled run's timed steps, which must be finite.
    """
    gaps = [
        _gaps(compiled.losses, eager.losses, eager_again.losses),
        _gaps(compiled.gradient_norms, eager.gradient_norms, eager_again.gradient_norms),
    ]
    steady_bad = next((step for step, loss in enumerate(steady_losses) if not math.isfinite(loss)), None)
    bad = [step for series in gaps for step, gap in enumerate(series.gaps) if not gap <= series.tolerance]
    broken = [
        step for series in (compiled.losses, compiled.gradient_norms) for step, v in enumerate(series) if not math.isfinite(v)
    ]
    if not (eager.finite() and eager_again.finite()):
        status = NumericsStatus.EAGER_UNSTABLE
    elif not compiled.finite() or steady_bad is not None:
        status = NumericsStatus.NAN
    else:
        status = NumericsStatus.DIVERGES if bad else NumericsStatus.OK
    return Numerics(
        status=status,
        compared_steps=len(compiled.losses),
        first_bad_step=min(broken if status is NumericsStatus.NAN else bad, default=None),
        loss_gap=max(gaps[0].gaps, default=None),
        loss_tolerance=gaps[0].tolerance,
        gradient_norm_gap=max(gaps[1].gaps, default=None),
        gradient_norm_tolerance=gaps[1].tolerance,
        first_bad_steady_step=steady_bad,
        last_loss=steady_losses[-1] if steady_losses else None,
    )


@dataclass(frozen=True, slots=True)
class _Gaps:
    gaps: list[float]
    tolerance: float


def _gaps(compiled: Sequence[float], eager: Sequence[float], again: Sequence[float]) -> _Gaps:
    means = [(a + b) / 2 for a, b in zip(eager, again, strict=True)]
    spread = max((abs(a - b) / abs(m) for a, b, m in zip(eager, again, means, strict=True) if m), default=0.0)
    gaps = [abs(c - m) / abs(m) if m else abs(c) for c, m in zip(compiled, means, strict=True)]
    return _Gaps(gaps, max(TOLERANCE_FLOOR, TOLERANCE_FACTOR * spread))
