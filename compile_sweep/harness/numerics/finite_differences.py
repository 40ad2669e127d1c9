"""Losses along lines in parameter space, and how far they are from what the gradients say.

Each layer has a direction of its own, taken from its gradient; a line moves some of them at once. See
`compile_sweep.harness.numerics.gradient_check` for what it is for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compile_sweep.contract.seeding import own_random_numbers
from compile_sweep.harness.distributed import agreed_numbers, num_workers

STARTING_SCALE = 0.02
"""Root mean square that weights are assumed to have at least, for those such as biases that start at zero."""

LEAST_SHARE = 0.1
"""Fraction of the usual change of the loss that a layer must be able to make within `max_move`; the gradients of others are too
small to be told from rounding, and these layers stay fixed.
"""

NUDGE = 4.0  # largest relative change of a weight, in roundings, at which directions are taken next to the start
NUM_PROBES = 4  # number of groups whose lines at the first width show how coarsely the loss rounds
UNEVEN_MARGIN = 2.0  # multiple of a line's unevenness that an error must exceed; a jump is as large as its unevenness
NOISE_MARGIN = 3.0  # multiple of the loss's noise of rounding above which an error in float32 is seen
MAX_CORRECTIONS = 3  # number of evaluations that hold what a forward derives from its weights for frozen parameters
MAX_FOLLOWERS = 4  # frozen parameters for each trained one that may follow it, as in copies that are its averages
NUM_HOLDING = 3  # number of lines along which eager code shows whether frozen parameters must be held
HELD = 0.005  # fraction of their change that may be left over; where they follow by a tenth, 0.01 left 0.3% of an error
NUM_NEARBY = 4  # number of points next to the start whose losses show the noise of rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How precisely the check can look, given the precision of the step."""

    allowed: float
    """Relative error of one layer's gradient that is tolerated."""
    widths: Sequence[float]
    """Relative changes of the loss that each layer makes; the first one is tried first."""
    max_move: float
    """Maximum move of a layer, as a fraction of its 2-norm: beyond it, the loss is not a polynomial of low degree."""
    is_half: bool = True
    """Whether rounding is coarse, as in half precision."""


PRECISIONS = (
    (2.0**-20, Precision(allowed=0.003, widths=(1e-4, 3e-5, 3e-4), max_move=0.01, is_half=False)),
    (2.0**-11.5, Precision(allowed=0.015, widths=(1e-3, 3e-3, 3e-4), max_move=0.03)),
    (math.inf, Precision(allowed=0.03, widths=(1e-3, 3e-3, 3e-4, 1e-2, 3e-2), max_move=0.1)),
)
"""By the largest relative rounding error of one operation that each applies to: float32, half precision, bfloat16. The effect of
rounding and the allowed error are measured in benchmarks/numerics/gradient_errors.py (docs/results.md).
"""


@dataclass(slots=True, kw_only=True, eq=False)
class Differentiated:
    """A step whose gradients can be computed without an update.

    Args:
        untrained: Returns, by name, what a forward may change by itself: see `untrained_tensors`; called each time, since a
            forward may replace buffers.
        run: Runs forward and backward on one batch from the current random state; returns the loss and keeps the gradients.
        gradients: Returns the gradients, in the order of the parameters.
    """

    parameters: Mapping[str, nn.Parameter]
    untrained: Callable[[], Mapping[str, Tensor]]
    run: Callable[[], float]
    discard: Callable[[], None]
    gradients: Callable[[], Sequence[Tensor | None]]
    device: torch.device

    @classmethod
    def of_model(cls, model: nn.Module, run: Callable[[], float], device: torch.device) -> Differentiated:
        """Returns the step that `run` makes of a model, whose gradients are on its parameters."""
        parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        return cls(
            parameters=parameters,
            untrained=partial(untrained_tensors, model),
            run=run,
            discard=model.zero_grad,
            gradients=lambda: [one.grad for one in parameters.values()],
            device=device,
        )

    def layers(self) -> dict[str, list[int]]:
        """Returns the indices of each layer's parameters; a layer is a module that has some itself."""
        named: dict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(self.parameters):
            named[name.rpartition(".")[0] or name].append(index)
        return dict(named)


def untrained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns buffers and frozen parameters by name: a forward may move either, as a momentum encoder's weights.

    Left out are parameters that nothing can be added to: quantized ones, and those of libraries' own types; and all that are
    frozen if they are far more than those that train, as below low-rank adapters: copies of them may not fit in memory.
    """
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad and _is_plain(one)}
    num_trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    if sum(one.numel() for one in frozen.values()) > MAX_FOLLOWERS * num_trained:
        frozen = {}
    return {**frozen, **dict(model.named_buffers())}


def _is_plain(weights: nn.Parameter) -> bool:
    is_coarse = not weights.dtype.is_floating_point or weights.dtype.itemsize < 2
    return type(weights) is nn.Parameter and not is_coarse and not weights.is_inference()


@dataclass(frozen=True, slots=True)
class Point:
    """Result of a forward and backward at one point."""

    loss: float
    slopes: Sequence[float]  # for each layer, the projection of its gradient on its own direction at the start


class Residual(NamedTuple):
    """What the slopes of a line say of the loss, less what the loss does."""

    total: float
    """Half of what is left over from one end of the line to the other."""
    uneven: float
    """Half of how much more is left over on the way forth than on the way back. A wrong gradient is wrong on both, so this shows
    rounding, jumps and kinks alone.
    """
    bend: float
    """How much larger the slope is in the middle than at the ends. What eager's is beyond that is a kink in the middle, of which
    compiled and eager code see different sides.
    """


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding does to the residual of a line, in units of the loss."""

    noise: float
    """Standard deviation, from how uneven lines are, which wrong gradients don't make them."""
    center: float
    """Unevenness that all lines share, from the rounding of the loss in their middle."""
    beside_eager: float = 0.0
    """The same as `noise` of the difference between compiled and eager code."""
    width: float = 0.0
    """Relative change of the loss that each layer made."""

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Rounding:
        """Estimates it from all lines or from the half that changes the loss least, which bends least."""
        uneven = [look.left.uneven for look in sorted(looks, key=lambda look: look.unit)]
        every, half = cls._of(uneven), uneven[: len(uneven) // 2]
        return every if len(half) < NUM_PROBES else min(every, cls._of(half), key=lambda one: one.noise)

    @classmethod
    def _of(cls, uneven: Sequence[float]) -> Rounding:
        if len(uneven) < NUM_PROBES:  # too few to tell the middle's rounding from the ends'
            return cls(math.sqrt(sum(one**2 for one in uneven) / len(uneven) / 3), 0.0)
        center = median(uneven)
        return cls(1.4826 * median(abs(one - center) for one in uneven), center)

    @classmethod
    def of_few(cls, looks: Sequence[Look]) -> Rounding:
        """Guesses it from few lines; more often too large than too small."""
        uneven = [look.left.uneven for look in looks]
        return cls.of(looks) if len(uneven) < NUM_PROBES else cls(1.3 * stdev(uneven), mean(uneven))


@dataclass(frozen=True, slots=True)
class Look:
    """What a line that moves one group of layers shows."""

    left: Residual
    unit: float
    """Change of the loss that one of the layers makes."""
    kink: float = 0.0
    """How much the slope in the middle differs from eager's more than at the ends, if eager's is subtracted."""

    @property
    def error(self) -> float:
        return self.left.total / self.unit

    def limit(self, allowed: float, rounding: Rounding) -> float:
        """Returns the error that right gradients may show."""
        uneven = max(abs(self.left.uneven - rounding.center), self.kink)
        return max(allowed, max(NOISE_MARGIN * rounding.noise, UNEVEN_MARGIN * uneven) / self.unit)

    def agrees(self, other: Look, rounding: Rounding) -> bool:
        """Tells whether a line that went farther or less far shows the same, and not by chance."""
        noise = 2 * rounding.noise / other.unit
        least = min(abs(self.error), abs(other.error))
        return other is not self and abs(other.error) > noise and abs(self.error - other.error) <= 0.3 * least + noise

    def beyond(self, other: Look) -> Look:
        """Returns what is left of it without what the same line shows in eager code."""
        left = Residual(*(one - its for one, its in zip(self.left, other.left, strict=True)))
        return Look(left, self.unit, kink=abs(left.bend))


class FiniteDifferences:
    """A step whose loss and slopes are evaluated with its layers moved.

    Args:
        draws: Whether a step draws random numbers, so that eager's loss is a different function.
        starts_nearby: Whether directions are taken next to the start, where the noise of the gradients is another.
    """

    def __init__(
        self,
        step: Differentiated,
        precision: Precision,
        *,
        rounding: float,
        seed: int,
        draws: bool,
        eagerly: Callable[[], AbstractContextManager[Any]],
        starts_nearby: bool,
    ) -> None:
        self.evaluations = 0
        self._step, self._precision, self._seed, self._draws, self._eagerly = step, precision, seed, draws, eagerly
        self._parameters = list(step.parameters.values())
        self._start = [p.detach().clone() for p in self._parameters]
        self._untrained = {name: (held, held.clone()) for name, held in step.untrained().items()}
        self._knows_what_moves = False
        self._layers: dict[str, list[int]] = {}
        self._directions: list[Tensor | None] = []
        self._is_eager = False
        self._holds = False
        """Whether moving frozen parameters are held at what they are after a forward at the start."""
        self._after: dict[str, Tensor] = {}
        """Frozen parameters that a forward moves, as they are after one at the start."""
        self._losses: dict[bool, dict[Any, float]] = {False: {}, True: {}}
        """Losses of compiled and of eager code, by point."""
        self._center: Point | None = None
        self._size = 1.0
        self._rounding = rounding
        self._starts_nearby = starts_nearby

    def put_back(self) -> None:
        """Restores parameters and buffers, and drops the gradients."""
        self._restore()
        self._restore_untrained()
        self._step.discard()

    def _restore(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._start, strict=True):
                parameter.copy_(value)

    def _restore_untrained(self) -> None:
        """Restores in place, including replaced buffers, so that addresses known to CUDA graphs stay valid."""
        current = self._step.untrained()
        with torch.no_grad():
            for name, (known, value) in self._untrained.items():
                now = current.get(name, known)
                for held in (known,) if now is known else (known, now):
                    if held.shape == value.shape:
                        held.copy_(value)

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        compiled_center, compiled_after = self._center, self._after
        self._is_eager = True
        try:
            with self._eagerly():
                self._center = self._at({}, 0.0)
                yield
        finally:
            self._center, self._after = compiled_center, compiled_after
            self._is_eager = False

    def _begun(self) -> Point | None:
        """Takes each layer's direction from the gradient at the current weights, or next to them, and evaluates there."""
        if self._starts_nearby:
            self._shake(self._seed)
        loss = self._evaluate()
        gradients = self._step.gradients()
        self._directions = [None if g is None else dense(g).detach().clone() for g in gradients]
        has_some = {layer: [i for i in of if self._directions[i] is not None] for layer, of in self._step.layers().items()}
        named = {layer: indices for layer, indices in has_some.items() if indices}
        squares = [0.0 if d is None else dot(d, d) for d in self._directions]
        self._norms = {layer: math.sqrt(sum(squares[i] for i in indices)) for layer, indices in named.items()}
        if not math.isfinite(loss) or not all(map(math.isfinite, self._norms.values())):
            return None
        self._layers = {layer: indices for layer, indices in named.items() if self._norms[layer]}
        self._reach = {
            layer: self._precision.max_move * self._norm_of_weights(indices) for layer, indices in self._layers.items()
        }
        self._restore()
        center = self._at({}, 0.0) if self._starts_nearby else Point(loss, [self._norms[layer] for layer in self._layers])
        self._slopes = dict(zip(self._layers, center.slopes, strict=True))
        return center if math.isfinite(center.loss) and all(map(math.isfinite, center.slopes)) else None

    def _choose_what_to_hold(self) -> None:
        """Chooses whether frozen parameters that a forward moves are held where layers move.

        A momentum encoder follows the weights, by a percent of their move, before it computes. Autograd rightly does not follow
        that, but the loss does. One that follows at the end of a forward does not act on its loss, and must not be held. Which
        of the two it is, eager code shows.
        """
        if not self._after:
            return
        moves = {name: move for name, move in self._moves(self._precision.widths[0]).items() if move}
        seed, left = self._seed, {False: 0.0, True: 0.0}
        for draw in range(NUM_HOLDING):  # along one line and with one draw, what the loss follows may cancel
            random, self._seed = Random(draw), seed + draw
            signs = {name: random.choice((-1.0, 1.0)) for name in moves}
            with self._uncompiled():
                for self._holds in left:
                    left[self._holds] += self._residual(moves, signs).total ** 2
        self._seed, self._holds = seed, left[True] < left[False]
        self._losses[True].clear()

    def _noise(self) -> float:
        """Returns what rounding does to the loss, once eager code has been evaluated at the same points.

        A loss close to zero may be the difference of numbers close to one. It then changes in steps that are large for it, and
        compiled and eager code take them at different points.
        """
        eager = self._losses[True]
        squares = [] if self._draws else [(loss - eager[at]) ** 2 for at, loss in self._losses[False].items() if at in eager]
        distance = math.sqrt(sum(squares) / len(squares)) if squares else 0.0
        nearby = [stdev(losses[at] for at in losses if isinstance(at, int)) for losses in self._losses.values()]
        return max(distance, *nearby, self._rounding * self._size)

    def _look_nearby(self) -> None:
        """Evaluates the loss at weights that differ from the start by a few roundings."""
        for draw in range(NUM_NEARBY):
            self._shake(self._seed + draw)
            try:
                self._losses[self._is_eager][draw] = self._evaluate()
            finally:
                self._restore()

    def _shake(self, seed: int) -> None:
        generator = torch.Generator(self._step.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self._parameters:
                change = torch.rand(parameter.shape, device=parameter.device, generator=generator).mul_(2).sub_(1)
                parameter.mul_(change.mul_(NUDGE * self._rounding).add_(1))

    def _norm_of_weights(self, indices: Sequence[int]) -> float:
        count = sum(self._start[i].numel() for i in indices)
        return max(math.sqrt(sum(dot(self._start[i], self._start[i]) for i in indices)), STARTING_SCALE * math.sqrt(count))

    def _moves(self, width: float) -> dict[str, float]:
        """Returns how far each layer moves along its direction, as a 2-norm; 0 for one that cannot change the loss enough."""
        change = width * self._size
        found = {}
        for name, slope in self._slopes.items():
            move = min(change / slope, self._reach[name]) if slope > 0 else 0.0
            found[name] = move if move * slope >= LEAST_SHARE * change else 0.0
        return found

    def _error(self, moves: Mapping[str, float], signs: Mapping[str, float], width: float) -> float:
        """Returns the residual of Simpson's rule, in units of one layer's change of the loss."""
        return self._residual(moves, signs).total / (width * self._size)

    def _residual(self, moves: Mapping[str, float], signs: Mapping[str, float]) -> Residual:
        """Returns what a line leaves over, in units of the loss."""
        steps = {name: signs[name] * move for name, move in moves.items() if move}
        after, before = (self._at(steps, side) for side in (1.0, -1.0))
        for side, point in (("after", after), ("before", before)):
            self._losses[self._is_eager][side, *steps.items()] = point.loss
        assert self._center is not None
        center = self._center
        slopes = zip(self._layers, before.slopes, center.slopes, after.slopes, strict=True)
        moved = [(steps[name], b, c, a) for name, b, c, a in slopes if name in steps]
        forth = sum(step * (5 * a + 8 * c - b) / 12 for step, b, c, a in moved) - (after.loss - center.loss)
        back = sum(step * (5 * b + 8 * c - a) / 12 for step, b, c, a in moved) - (center.loss - before.loss)
        bend = sum(step * (c - (a + b) / 2) for step, b, c, a in moved)
        return Residual(*agreed_numbers([(forth + back) / 2, (forth - back) / 2, bend], self._step.device))

    def _at(self, steps: Mapping[str, float], side: float) -> Point:
        """Evaluates with each layer moved by its step along its direction, then restores the weights."""
        self._move(steps, side)
        try:
            loss = self._evaluate_holding() if steps and self._holds else self._evaluate()
            if not steps:
                self._after = self._moved_frozen()
        finally:
            self._restore()  # all of them, since a forward may move weights, too, as one that clips them
        gradients = self._step.gradients()
        return Point(
            loss,
            [
                sum(product(gradients[i], self._directions[i]) for i in indices) / self._norms[layer]
                for layer, indices in self._layers.items()
            ],
        )

    def _move(self, steps: Mapping[str, float], side: float) -> None:
        with torch.no_grad():
            for name, step in steps.items():
                for i in self._layers[name]:
                    direction = self._directions[i]
                    assert direction is not None
                    torch.add(self._start[i], direction, alpha=side * step / self._norms[name], out=self._parameters[i])

    def _forget_what_rests(self) -> None:
        """Drops frozen parameters that a forward has not moved, which spares their copies."""
        self._untrained = {
            name: (held, value)
            for name, (held, value) in self._untrained.items()
            if not isinstance(held, nn.Parameter) or not torch.equal(held, value)
        }
        self._knows_what_moves = True

    def _moved_frozen(self) -> dict[str, Tensor]:
        """Returns copies of the frozen parameters that the last evaluation moved."""
        held = [(name, now, value) for name, (now, value) in self._untrained.items() if isinstance(now, nn.Parameter)]
        return {name: now.detach().clone() for name, now, value in held if not torch.equal(now, value)}

    def _evaluate_holding(self) -> float:
        """Evaluates so that moving frozen parameters end where they do at the start, by moving where they begin."""
        offsets = {name: torch.zeros_like(after) for name, after in self._after.items()}
        loss, first = self._evaluate(), None
        for _ in range(MAX_CORRECTIONS):
            gaps = {name: self._untrained[name][0].detach() - after for name, after in self._after.items()}
            (size,) = agreed_numbers([math.sqrt(sum(dot(gap, gap) for gap in gaps.values()))], self._step.device)
            first = size if first is None else first
            if size <= HELD * first:
                break
            for name, gap in gaps.items():
                offsets[name] -= gap
            loss = self._evaluate(offsets)
        return loss

    def _evaluate(self, offsets: Mapping[str, Tensor] | None = None) -> float:
        """Evaluates at the current weights; offsets are added to frozen parameters."""
        self.evaluations += 1
        self._restore_untrained()
        with torch.no_grad():
            for name, offset in (offsets or {}).items():
                self._untrained[name][0].add_(offset)
        self._step.discard()
        with own_random_numbers(self._step.device, self._seed):
            # The loss whose gradients workers have after averaging them.
            loss = self._step.run()
            if not self._knows_what_moves:
                self._forget_what_rests()
            if num_workers() == 1:
                return loss
            shared = torch.tensor(loss, device=self._step.device, dtype=torch.float64)
            torch.distributed.all_reduce(shared)
            return float(shared) / num_workers()


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient that may be sparse, as an embedding's, with all its elements."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def product(one: Tensor | None, other: Tensor | None) -> float:
    """Dot product of gradients, each of which may be sparse; 0 if there is none."""
    return 0.0 if one is None or other is None else dot(dense(one), dense(other))


def dot(one: Tensor, other: Tensor) -> float:
    """Dot product of real vectors; complex numbers count as pairs of real ones, as their gradients do."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return float((one * other).sum(dtype=torch.float64))
