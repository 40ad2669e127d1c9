"""Compares a compiled step's gradients with eager's at the same weights, where no other random numbers come between them.

Background: in half precision, eager's own gradients may be far from right ones. Projected on the gradients of the same step
without autocast, those of a ResNet-50 with random labels are 0.23 times as long in bfloat16, and GPT-2 small's 0.965 times. But
rounding has no direction of its own, so it scatters the projection of a gradient of many elements little. So compiled and eager
gradients are projected on precise ones, layer by layer, at a few points that differ by roundings.

Compiled code rounds less often than eager code, which brings its projections nearer to 1. As errors of rounding are passed on
from layer to layer, it does so in neighboring layers alike. A layer is wrong if it is neither where eager's is nor as far from
there as its neighbors are, by more than its projections scatter between the points. An error that all layers share is seen only
if it leads away from 1.

Figures: docs/results.md, "Gradients beside eager's".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from torch import Tensor

from compile_sweep.harness.distributed import agreed_numbers, num_workers
from compile_sweep.harness.numerics.finite_differences import (
    Differentiated,
    FiniteDifferences,
    Precision,
    product,
)

NUM_POINTS = 6

NUM_NEIGHBORS = 4
"""Number of layers before, and of layers after a layer in the order of the parameters, that show how much less it rounds."""

LEAST_NEIGHBORS = 3  # with fewer, a layer may be anywhere between eager's projection and 1

SCATTER_MARGIN = 5.0
"""Multiple of a layer's scatter by which it may be off. In right runs on an H100, layers were off by at most 0.8 times it."""

SHIFT_MARGIN = 3.0  # multiple of how much neighbors differ in how much less they round than eager

MAX_SCATTER = 0.1
"""Largest scatter, as a fraction of eager's projection, of a layer that is compared; others have too few elements."""

NUM_SEEDS = 8
"""Number of seeds whose losses show whether compiled code draws eager's random numbers."""

FOLLOWING = 0.45
"""Scatter of what compiled losses differ from eager ones, as a fraction of eager's from seed to seed, below which they follow.

With other random numbers it is 1.4 in the mean, and below 0.45 once in two thousand times. What all seeds have in common does not
count, since compiled code rounds less often.
"""

ALLOWED = 0.015
"""Relative error that is always tolerated. That of layers that scatter little was at most 0.001 in right runs on an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """A layer's gradients at each point, projected on precise ones, in units of these: 1 is right."""

    compiled: Sequence[float]
    eager: Sequence[float]
    random_size: float
    """What independent errors of all elements, as large as eager's are, would add to or take from a projection."""

    @property
    def scatter(self) -> float:
        differences = [one - other for one, other in zip(self.compiled, self.eager, strict=True)]
        return max(stdev(self.eager), stdev(differences))


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far a layer's gradient is from what eager's and its neighbors' lead to expect; relative."""

    error: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        return abs(self.error) > self.allowed


def layer_errors(layers: Mapping[str, Projections]) -> dict[str, LayerError]:
    """Judges layers, given in the order of the parameters; leaves out those with too few elements."""
    ratios = [one.scatter / one.random_size for one in layers.values() if one.random_size]
    typical = median(ratios) if ratios else 0.0
    # Six points may agree by chance, so a layer scatters at least as one of its size typically does.
    scatter = {name: max(one.scatter, typical * one.random_size) for name, one in layers.items()}
    compared = {name: one for name, one in layers.items() if scatter[name] < MAX_SCATTER * mean(one.eager)}
    names = list(compared)
    shifts = {name: _shift(one) for name, one in compared.items()}
    found = {}
    for at, (name, one) in enumerate(compared.items()):
        around = names[max(0, at - NUM_NEIGHBORS) : at] + names[at + 1 : at + 1 + NUM_NEIGHBORS]
        known = [shift for other in around if (shift := shifts[other]) is not None]
        eager, compiled = mean(one.eager), mean(one.compiled)
        if len(known) < LEAST_NEIGHBORS:
            expected, unsure = min(max(compiled, min(eager, 1.0)), max(eager, 1.0)), 0.0
        else:
            shift = median(known)
            expected = eager + shift * (1 - eager)
            unsure = SHIFT_MARGIN * median(abs(other - shift) for other in known) * abs(1 - eager)
        expected = min(expected, eager, key=lambda where: abs(compiled - where))  # what eager computes too is not wrong
        allowed = max(ALLOWED, (SCATTER_MARGIN * scatter[name] + unsure) / expected)
        found[name] = LayerError((compiled - expected) / expected, allowed)
    return found


def _shift(one: Projections) -> float | None:
    """Returns how far compiled code is on the way from eager to precise gradients; None if eager is there already."""
    eager, compiled = mean(one.eager), mean(one.compiled)
    if abs(1 - eager) <= max(one.scatter, 1e-3):
        return None
    return min(1.0, max(0.0, (compiled - eager) / (1 - eager)))


class _Losses(FiniteDifferences):
    """Losses of compiled and of eager code from one seed after the other."""

    def pairs(self) -> Iterator[tuple[float, float]]:
        """Yields those of compiled and of eager code, at the same weights."""
        first = self._seed
        for number in range(NUM_SEEDS):
            self._seed = first + number
            with self._eagerly():
                eager = self._evaluate()
            self._restore()
            yield self._evaluate(), eager
            self._restore()


def draws_alike(
    step: Differentiated,
    precision: Precision,
    *,
    rounding: float,
    seed: int,
    eagerly: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Tells whether compiled code draws the random numbers of eager code: its loss then follows eager's from seed to seed."""
    losses = _Losses(step, precision, rounding=rounding, seed=seed, draws=True, eagerly=eagerly, starts_nearby=False)
    try:
        pairs = list(losses.pairs())
    finally:
        losses.put_back()
    differences = [compiled - eager for compiled, eager in pairs]
    scatters = [stdev(differences), stdev(eager for _, eager in pairs)]
    of_differences, of_eager = agreed_numbers(scatters, step.device)
    return of_differences < FOLLOWING * of_eager


class BesideEager(FiniteDifferences):
    """Gradients of a compiled step, of eager code and of more precise eager code, at the same points."""

    def layers(self, precisely: Callable[[], AbstractContextManager[Any]], *, start: int = 0) -> dict[str, Projections] | None:
        """Returns each layer's projections, without layers that have no gradient; None if a number is not finite.

        Args:
            precisely: Makes eager code compute in full precision.
            start: Number of the first point; other points have other roundings.
        """
        named = self._step.layers()
        points = [self._point(self._seed + start + number, precisely, named) for number in range(NUM_POINTS)]
        if not all(math.isfinite(number) for point in points for number in point):
            return None
        found = {}
        for at, (name, indices) in enumerate(named.items()):
            squares, compiled, eager, of_eager = ([point[at + which * len(named)] for point in points] for which in range(4))
            if not all(squares):
                continue
            relative = [one / square for one, square in zip(eager, squares, strict=True)]
            noise = mean(max(0.0, one / square - r * r) for one, square, r in zip(of_eager, squares, relative, strict=True))
            count = sum(self._parameters[i].numel() for i in indices)
            found[name] = Projections(
                compiled=[one / square for one, square in zip(compiled, squares, strict=True)],
                eager=relative,
                random_size=math.sqrt(noise / count),
            )
        return found

    def _point(
        self, seed: int, precisely: Callable[[], AbstractContextManager[Any]], named: Mapping[str, Sequence[int]]
    ) -> list[float]:
        """Returns products of gradients, each for all layers: precise with precise, with compiled and with eager ones, eager²."""

        def products(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[float]:
            return [sum(product(one[i], other[i]) for i in indices) for indices in named.values()]

        self._shake(seed)
        try:
            with precisely():
                self._evaluate()
                precise = [None if gradient is None else gradient.detach().clone() for gradient in self._step.gradients()]
            with self._eagerly():
                self._evaluate()
                own = self._step.gradients()
                eager = [*products(precise, own), *products(own, own)]
            self._evaluate()
            compiled = products(precise, self._step.gradients())
        finally:
            self._restore()
        return agreed_numbers([*products(precise, precise), *compiled, *eager], self._step.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a step's gradients compare with eager's."""

    wrong: Mapping[str, float]
    """Relative errors of layers that are wrong twice, the largest first."""
    error: float
    """Largest relative error of a layer that is not wrong."""
    allowed: float
    """Largest error that may go unseen in a compared layer; what the worst layer is allowed if one is wrong."""
    share: float
    """Fraction of the layers with gradients that have enough elements to be compared."""
    evaluations: int


def compare(
    step: Differentiated,
    precision: Precision,
    *,
    rounding: float,
    seed: int,
    eagerly: Callable[[], AbstractContextManager[Any]],
    precisely: Callable[[], AbstractContextManager[Any]],
) -> Comparison | None:
    """Compares gradients layer by layer, and once more at other points if any is wrong.

    Returns:
        None if that cannot be done, as where a forward converts tensors to half precision by itself.
    """
    beside = BesideEager(step, precision, rounding=rounding, seed=seed, draws=False, eagerly=eagerly, starts_nearby=True)
    try:
        layers = beside.layers(precisely)
        first = last = layer_errors(layers or {})
        if any(one.is_wrong for one in first.values()):
            last = layer_errors(beside.layers(precisely, start=NUM_POINTS) or {})
    except RuntimeError:
        if num_workers() > 1:  # others wait for this worker
            raise
        return None
    finally:
        beside.put_back()
    if not layers or not last:
        return None
    twice = [name for name, one in last.items() if one.is_wrong and name in first and first[name].is_wrong]
    same = sorted((name for name in twice if first[name].error * last[name].error > 0), key=lambda name: -abs(last[name].error))
    right = [one for name, one in last.items() if name not in same]
    return Comparison(
        wrong={name: last[name].error for name in same},
        error=max((abs(one.error) for one in right), default=0.0),
        allowed=last[same[0]].allowed if same else max(max(one.allowed, abs(one.error)) for one in right),
        share=len(last) / len(layers),
        evaluations=beside.evaluations,
    )
