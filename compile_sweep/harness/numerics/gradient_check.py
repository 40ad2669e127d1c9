"""Checks that the gradients of a compiled step belong to its loss, by finite differences of the loss in the compiled code alone.

Background: two runs with different random numbers scatter, and a comparison with eager must allow for that. Within one program,
with one seed before each forward, the loss is a function of the parameters, and its difference between two points is the integral
of its gradient along the way. By Simpson's rule over the points -1, 0 and 1 of a line in parameter space

    L(1) - L(-1) = (p(-1) + 4 p(0) + p(1)) / 3 + O(step ** 5),

where p is the gradient's projection on the line. The residual, in units of the change of the loss that one layer's move causes,
is 0 if the gradients are right and e if one layer's are (1 + e) times what they should be.

In float32, every layer moves along its own gradient, far enough to change the loss by the same amount, so that a small layer
counts as much as a large one; and back or forth at random, so that the loss stays near its value. Two such lines at one width
suffice if nothing is wrong. A residual that is equal at two widths is an error, unless eager has it too: a loss with `detach` or
a straight-through estimate in it has gradients that are not derivatives. Other residuals are curvature, kinks or rounding. In a
model that has fit its batch, loss and gradients are small beside what they are computed from, so an error must also be larger
than what rounding does to the loss, and show again along directions that are taken next to the start (see below).

In half precision, a move that stands out from rounding bends the loss if all layers of a deep network make it at once, so they
move in groups, one group at a time, and as far as it takes for rounding to be small beside the change of the loss, unless the
loss bends so much there that nothing is gained. How coarsely it rounds and bends is seen from how much more is left over on one
half of a line than on the other: a wrong gradient is wrong on both, and a jump is not. A group in doubt moves farther and less
far, in eager code too, and what is wrong must show again, layer by layer, along other directions. Where nothing is random, what
eager leaves over at the same points is subtracted: curvature and most of the rounding cancel.

A gradient also holds noise of rounding, which agrees with itself: projected on its own direction, it is too long by the noise's
share: under bfloat16 autocast on an H200, GPT-2's by 1%, a ResNet-50's by a factor of three (docs/log.md). So the direction is
taken next to the start, at weights that differ by a few roundings, where the noise is another.

Where nothing is random, or compiled code draws eager's random numbers, gradients in half precision are first compared with
eager's (`beside_eager.py`). If that sees errors as small in enough layers, it spares the finite differences.

Output: a `GradientCheck`. Afterwards parameters, buffers, gradients and random states are what they were.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from random import Random
from statistics import median
from typing import Any

import torch
from torch import nn

from compile_sweep.harness.numerics.beside_eager import NUM_SEEDS, Comparison, compare, draws_alike
from compile_sweep.harness.numerics.finite_differences import (
    NOISE_MARGIN,
    NUM_PROBES,
    PRECISIONS,
    UNEVEN_MARGIN,
    Differentiated,
    FiniteDifferences,
    Look,
    Precision,
    Residual,
    Rounding,
)
from compile_sweep.harness.numerics.tolerance import FLOAT8_ROUNDING

NUM_LINES = 2
"""Number of lines, each of which moves every layer. On a single line, the errors of two layers may cancel."""

MAX_SINGLE_LAYERS = 16  # up to so many layers, each is examined by itself once something is wrong; of more, the worst by halving

FLOOR_MARGIN = 3.0
"""Multiple of eager's residual above which compiled code that draws other random numbers counts as wrong."""

LEAST_LOSS = 1e-5
"""Loss in float32 below which it may not change along its gradient at all, as a cross-entropy's logarithm of nearly 1."""

MAX_GROUPS = 16  # number of groups of layers that move in turn
GROUP_MARGIN = 2.0  # multiple of eager's residual, up to which compiled code's residual of the same group is right
FINE_SHARE = 0.2  # fraction of the allowed error that rounding should stay below; groups move further until it does
FULL_SHARE = 0.6  # fraction of a width's change of the loss that a layer must be able to make, for that width to be its own
SCALES = (2.0, 0.7)  # how far a group moves once more, if it is in doubt
MAX_CONFIRMED = 4  # number of wrong layers that are looked at once more, along other directions
SINGLES_AT_ONCE = 8  # least number of layers of wrong groups that are looked at before enough of them may be wrong

COARSEST = 0.5
"""Largest detectable error with which a check may call gradients right: that of one layer that is half wrong."""

LEAST_CHECKED = 0.75  # fraction of the moved layers that must be found right for the check to say so
LEAST_COMPARED = 0.5
"""Fraction of the layers to be comparable with eager's. Batch normalizations of a ResNet have too few elements."""

FINE = 0.15
"""Largest error that may go unseen in a comparison with eager that spares the finite differences: about what these see of one
layer in bfloat16, 10% of GPT-2 small and 20% of captioning (docs/results.md).
"""

_SEED = 0x5EED


class Outcome(StrEnum):
    """The outcome of a gradient check."""

    OK = "ok"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheck:
    """Whether the gradients of a step belong to its loss."""

    outcome: Outcome
    reason: str | None = None
    """Why the check was skipped, if it was."""
    error: float | None = None
    """Error relative to one layer's gradient, the largest over the lines; that of the worst layer if the outcome is wrong."""
    allowed: float | None = None
    """What a right one may show, on the line where that is most: an error of a layer up to this may go unseen."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """Relative errors of layers out of tolerance, largest first; with many layers only the worst one is determined."""
    eager_error: float | None = None
    """Error of eager's own gradients where they are no derivatives of the loss either, and compiled ones are the same."""
    follows_eager: bool = False  # whether it is only known that compiled and eager losses change alike along the gradients
    share_checked: float | None = None
    """Fraction of the layers with gradients that was checked; the other gradients are too small to be told from rounding."""
    beside_eager: bool = False
    """Whether it was seen by comparison with eager's gradients at the same weights, rather than by finite differences."""
    evaluations: int = 0
    """Number of forward and backward passes."""
    read_then_changed: Sequence[str] = ()
    """Tensors that the forward reads and then changes in place (`changed_in_place.py`)."""
    changed_then_read: Sequence[str] = ()  # that it changes in place and then reads
    compiling_branches: Sequence[str] = ()
    """Functions of the user's that ask whether they are being compiled (`compiling_branches.py`)."""

    @property
    def sentence(self) -> str:
        """Says, for a wrong outcome, which layers are wrong, and by how much."""
        assert self.error is not None
        assert self.allowed is not None
        named = list(self.layers)
        others = f" and of {len(named) - 1} more" if len(named) > 1 else ""
        off, allowed = (f"{100 * share:.3g}%" for share in (self.error, self.allowed))
        which = f"gradients of {named[0] if named else 'the model'}{others}"
        if self.beside_eager:
            return f"{which} are not eager's at the same weights and batch: off by {off}, {allowed} allowed"
        return (
            f"{which} do not belong to the loss that the compiled forward computes: off by {off}, {allowed} allowed (finite "
            "differences in the compiled code)"
        )


def skipped(reason: str) -> GradientCheck:
    """Returns a check that was skipped."""
    return GradientCheck(outcome=Outcome.SKIPPED, reason=reason)


def check_gradients(
    step: Differentiated,
    *,
    rounding: float,
    draws: bool,
    eagerly: Callable[[], AbstractContextManager[Any]],
    precisely: Callable[[], AbstractContextManager[Any]] | None = None,
    draws_eagers: bool = False,
) -> GradientCheck:
    """Checks the gradients of a compiled step; all workers of a group must call this together.

    Args:
        draws: Whether the step draws random numbers.
        draws_eagers: Whether compiled code should then draw the same as eager code from the same seed, which is verified.
        precisely: Makes eager code compute in full precision, for a comparison with its gradients; None for no comparison.
    """
    if rounding >= FLOAT8_ROUNDING:
        return skipped("float8 rounds so coarsely that the loss does not follow small steps")
    precision = next(one for bound, one in PRECISIONS if rounding <= bound)
    if reason := _unfit(step.parameters.values()):
        return skipped(reason)
    evaluations = 0
    if draws and draws_eagers:  # if it does, the loss is the same function of the weights to both
        draws = not draws_alike(step, precision, rounding=rounding, seed=_SEED, eagerly=eagerly)
        evaluations = 2 * NUM_SEEDS
    other = None
    if not draws and precisely is not None and precision.is_half:
        other = compare(step, precision, rounding=rounding, seed=_SEED, eagerly=eagerly, precisely=precisely)
        if other is not None and (other.wrong or (other.share >= LEAST_CHECKED and other.allowed <= FINE)):
            return _seen_beside(other, evaluations + other.evaluations)
    found = _by_finite_differences(step, precision, rounding, draws, eagerly)
    found = found if found.outcome is Outcome.WRONG else _beside(found, other)
    return replace(found, evaluations=found.evaluations + evaluations)


def _by_finite_differences(
    step: Differentiated, precision: Precision, rounding: float, draws: bool, eagerly: Callable[[], AbstractContextManager[Any]]
) -> GradientCheck:
    def attempt(number: int, among: Sequence[str] = (), known: Rounding | None = None) -> tuple[GradientCheck, Rounding | None]:
        nearby, seed = precision.is_half or number > 0, _SEED + number
        search = _Search(step, precision, rounding=rounding, seed=seed, draws=draws, eagerly=eagerly, starts_nearby=nearby)
        search.among, search.known = among, known
        try:
            return replace(search.found(), evaluations=search.evaluations), search.known
        finally:
            search.put_back()

    first, known = attempt(0)
    if first.outcome is not Outcome.WRONG:
        return first
    # A single draw does not suffice to call a setting wrong.
    again, _ = attempt(1, list(first.layers)[:MAX_CONFIRMED], known)
    evaluations = first.evaluations + again.evaluations
    if again.outcome is not Outcome.WRONG or known is None:
        return replace(again, evaluations=evaluations)
    layers = {name: error for name, error in again.layers.items() if first.layers[name] * error > 0}
    if not layers:
        reason = f"gradients of {next(iter(first.layers))} look wrong along one direction and not along another, as by rounding"
        return replace(skipped(reason), evaluations=evaluations)
    return replace(again, layers=layers, error=abs(next(iter(layers.values()))), evaluations=evaluations)


def _beside(found: GradientCheck, other: Comparison | None) -> GradientCheck:
    """Returns what a comparison with eager's gradients says if it sees smaller errors than finite differences."""
    if other is None:
        return found
    evaluations = found.evaluations + other.evaluations
    sees_more = other.share >= LEAST_COMPARED and (found.allowed is None or other.allowed < found.allowed)
    if not other.wrong and not sees_more:
        return replace(found, evaluations=evaluations)
    return _seen_beside(other, evaluations)


def _seen_beside(other: Comparison, evaluations: int) -> GradientCheck:
    return GradientCheck(
        outcome=Outcome.WRONG if other.wrong else Outcome.OK,
        error=abs(next(iter(other.wrong.values()), other.error)),
        allowed=other.allowed,
        layers=other.wrong,
        share_checked=other.share,
        beside_eager=True,
        evaluations=evaluations,
    )


def _unfit(parameters: Iterable[nn.Parameter]) -> str | None:
    coarse = {p.dtype for p in parameters if p.dtype.to_real() not in (torch.float32, torch.float64)}
    if coarse:
        name = str(coarse.pop()).removeprefix("torch.")
        return f"parameters are {name}, whose rounding hides a small step"
    return None


@dataclass(frozen=True, slots=True)
class _Judgment:
    """The outcome of one group."""

    outcome: Outcome
    error: float
    limit: float


class _Search(FiniteDifferences):
    """One attempt, with one seed."""

    among: Sequence[str] = ()
    """Layers that an earlier attempt called wrong; only these are looked at. Empty for all."""
    known: Rounding | None = None
    """How coarsely the loss rounds, once groups of layers have moved."""
    _signs: Sequence[dict[str, float]] = ()
    """For each line, back or forth for each layer."""

    def found(self) -> GradientCheck:
        """Returns what the lines show."""
        self._center = self._begun()
        if self._center is None:
            return skipped("the loss or a gradient is not finite")
        again = self._at({}, 0.0)
        self._size = abs(self._center.loss) or 1.0
        if abs(again.loss - self._center.loss) > 0.5 * self._precision.widths[0] * self._size:
            return skipped(
                f"the loss of the same weights, batch and random numbers is {self._center.loss:.6g} once and {again.loss:.6g} "
                "the next time"
            )
        if not self._precision.is_half and self._size < LEAST_LOSS:
            return skipped(f"the loss is {self._center.loss:.3g}, so close to 0 that rounding hides how it changes")
        self._choose_what_to_hold()
        moves = self._moves(self._precision.widths[0])
        if not any(moves.values()):
            return skipped("no gradient is large enough to be told from rounding")
        checked = sum(move > 0 for move in moves.values()) / len(moves)
        in_groups = self._precision.is_half or self.known is not None
        return self._by_groups(checked) if in_groups else self._by_lines(moves, checked)

    def _by_lines(self, moves: Mapping[str, float], checked: float) -> GradientCheck:
        """Returns what shows when all layers move at once."""
        self._signs = [self._pattern(moves, line) for line in range(NUM_LINES)]
        self._residuals: dict[tuple[bool, float, int], Residual] = {}
        errors: dict[float, list[float]] = {}
        for width in self._precision.widths:
            errors[width] = [self._line(width, line) for line in range(NUM_LINES)]
            if (worst := max(map(abs, errors[width]))) <= self._precision.allowed:
                return self._verdict(Outcome.OK, worst, checked)
        return self._doubtful(errors, checked)

    def _line(self, width: float, line: int) -> float:
        left = self._residual(self._moves(width), self._signs[line])
        self._residuals[self._is_eager, width, line] = left
        return left.total / (width * self._size)

    def _doubtful(self, errors: Mapping[float, list[float]], checked: float) -> GradientCheck:
        """Judges by comparison with eager if no width shows that all is right, to tell kinks of the loss from wrong gradients."""
        self._look_nearby()
        with self._uncompiled():
            eager = {width: [self._line(width, line) for line in range(NUM_LINES)] for width in errors}
            self._look_nearby()
        allowed = self._precision.allowed
        differences = {
            width: [one - other for one, other in zip(values, eager[width], strict=True)] for width, values in errors.items()
        }
        if not self._draws:  # both evaluate the same function of the same weights, so what is not smooth in it cancels
            for values in differences.values():
                if max(map(abs, values)) <= allowed:
                    verdict = self._verdict(Outcome.OK, max(map(abs, values)), checked)
                    return replace(verdict, eager_error=self._error_at_two_widths(eager), follows_eager=True)
        judged = errors if self._draws else differences
        # Eager's residual is curvature, kinks and rounding, which cancel if the random numbers are the same.
        floors = {width: max(map(abs, eager[width])) for width in errors}
        for line in range(NUM_LINES):
            plateau = _plateau({width: judged[width][line] for width in judged}, allowed)
            if plateau is None:
                continue
            width = max(plateau)
            stands_out = not self._draws or abs(judged[width][line]) > FLOOR_MARGIN * floors[width]
            left = judged[width][line] * width * self._size
            ours, theirs = self._residuals[False, width, line], self._residuals[True, width, line]
            chance = [ours.uneven] if self._draws else [ours.uneven - theirs.uneven, ours.bend - theirs.bend]
            if stands_out and self._is_seen(left) and abs(left) > UNEVEN_MARGIN * max(map(abs, chance)):
                layers = self._wrong_layers(width)
                error = abs(next(iter(layers.values()), judged[width][line]))
                return self._verdict(Outcome.WRONG, error, checked, layers)
        return self._by_groups(checked)

    def _error_at_two_widths(self, errors: Mapping[float, Sequence[float]]) -> float | None:
        """Returns the largest error of a line that is equal at two widths, which is not curvature; None if there is none."""
        found = []
        for line in range(NUM_LINES):
            of_line = {width: values[line] for width, values in errors.items()}
            plateau = _plateau(of_line, self._precision.allowed)
            found += [] if plateau is None else [abs(of_line[max(plateau)])]
        return max(found, default=None)

    def _by_groups(self, checked: float) -> GradientCheck:
        """Returns what shows when groups of layers move one at a time, each as far as makes rounding small beside its change."""
        names = [name for name, move in self._moves(self._precision.widths[0]).items() if move]
        names = [name for name in names if not self.among or name in self.among]
        if not names:
            return skipped(f"the gradient of {self.among[0]} is too small to be told from rounding")
        lines = dict(enumerate(self._first_looks(names)))
        assert self.known is not None
        limits = {at: look.limit(self._precision.allowed, self.known) for at, (_, look) in lines.items()}
        found = {at: _Judgment(Outcome.OK, look.error, limits[at]) for at, (_, look) in lines.items()}
        # What eager leaves over too cancels if nothing is random, so rounding need not be allowed for.
        most = math.inf if self._draws else self._precision.allowed
        doubtful = {at for at, one in found.items() if not abs(one.error) <= min(one.limit, most) or one.limit > COARSEST}
        if doubtful and not self._draws:  # groups that look right show how differently compiled and eager code round
            doubtful |= set([at for at in lines if at not in doubtful][: max(0, NUM_PROBES - len(doubtful))])
        found |= self._beside_eager({at: lines[at] for at in doubtful})
        suspects = {at for at, one in found.items() if one.outcome is Outcome.WRONG}
        if wrong := self._wrong_alone({at: lines[at][0] for at in suspects}, found):
            wrong = dict(sorted(wrong.items(), key=lambda item: -abs(item[1])))
            return self._verdict(Outcome.WRONG, abs(next(iter(wrong.values()))), checked, wrong)
        for at in suspects:  # no layer is wrong by itself, so roundings of several add up
            found[at] = replace(found[at], outcome=Outcome.OK, limit=abs(found[at].error))
        right = [at for at, one in found.items() if one.outcome is Outcome.OK and one.limit <= COARSEST]
        share = sum(len(lines[at][0]) for at in right) / len(names)
        if share < LEAST_CHECKED:
            looks = [look for _, look in lines.values()]
            uneven, left = (100 * typical for typical in (_unevenness(looks), median(abs(look.error) for look in looks)))
            return skipped(
                "eager gradients are not derivatives of the loss at the steps that can be told from rounding: it has kinks, a "
                "jump, a detach or a straight-through estimate in it, or bends too much (where each layer changes the loss by "
                f"{100 * self.known.width:g}%, {left:.0f}% of one layer's change does not follow from gradients, and "
                f"{uneven:.0f}% differs between back and forth)"
            )
        error = max(abs(found[at].error) for at in right)
        return replace(self._verdict(Outcome.OK, error, checked * share), allowed=max(found[at].limit for at in right))

    def _wrong_alone(self, lines: Mapping[int, Mapping[str, float]], found: Mapping[int, _Judgment]) -> dict[str, float]:
        """Returns layers of wrong groups that are wrong by themselves, and by how much; of many, those of the worst groups."""
        wrong = {name: found[at].error for at, moves in lines.items() for name in moves if len(moves) == 1}
        worst = sorted((at for at in lines if len(lines[at]) > 1), key=lambda at: abs(found[at].error))
        while worst and len(wrong) < MAX_CONFIRMED:
            singles: list[dict[str, float]] = []
            while worst and len(singles) < SINGLES_AT_ONCE:
                singles += [{name: move} for name, move in lines[worst.pop()].items()]
            judged = self._beside_eager({next(iter(moves)): (moves, self._look(moves)) for moves in singles})
            wrong |= {name: one.error for name, one in judged.items() if one.outcome is Outcome.WRONG}
        return wrong

    def _first_looks(self, names: Sequence[str]) -> list[tuple[dict[str, float], Look]]:
        """Returns how far the layers of each group move at first, and what that shows.

        Farther, rounding is smaller beside the change of the loss, and the loss bends more: of GPT-2 small with a batch of 64,
        right gradients leave over at most 1.5% of a layer at the first width and 22% at the next. So layers move by another
        width than the first only where their lines are more even.
        """
        if self.known is not None:
            return [(line, self._look(line)) for line in self._lines(names, self.known.width)]
        width = self._precision.widths[0]
        lines = self._lines(names, width)
        probes = [self._look(line) for line in lines[:NUM_PROBES]]
        for other in self._other_widths(probes):
            others = self._lines(names, other)
            theirs = [self._look(line) for line in others[:NUM_PROBES]]
            if _unevenness(theirs) < _unevenness(probes):
                width, lines, probes = other, others, theirs
                break
        looks = [*probes, *map(self._look, lines[len(probes) :])]
        self.known = replace(Rounding.of(looks), width=width)
        return list(zip(lines, looks, strict=True))

    def _other_widths(self, probes: Sequence[Look]) -> list[float]:
        """Returns widths at which errors may be seen better than at the first one, the most promising first."""
        first = self._precision.widths[0]
        ladder = sorted(width for width in self._precision.widths if width >= first)
        noise, fine = Rounding.of_few(probes).noise, FINE_SHARE * self._precision.allowed * self._size
        wanted = next((width for width in ladder if noise <= fine * width), ladder[-1])
        wider = [width for width in reversed(ladder) if first < width <= wanted]
        is_uneven = UNEVEN_MARGIN * _unevenness(probes) > self._precision.allowed
        return [*wider, *(width for width in self._precision.widths if width < first and is_uneven)]

    def _lines(self, names: Sequence[str], width: float) -> list[dict[str, float]]:
        """Returns how far the layers of each group move; those that cannot make a width's change of the loss are apart."""
        by_width: dict[float, list[str]] = defaultdict(list)
        for name in names:
            by_width[self._own_width(name, width)].append(name)
        lines: list[dict[str, float]] = []
        for own, alike in sorted(by_width.items(), reverse=True):
            count = len(alike) if self.among else max(1, round(MAX_GROUPS * len(alike) / max(MAX_GROUPS, len(names))))
            moves = self._moves(own)
            lines += [{name: moves[name] for name in group} for group in _strided(alike, count)]
        return lines

    def _own_width(self, name: str, wanted: float) -> float:
        """Returns the largest width up to a wanted one whose change of the loss a layer makes, or nearly."""
        if wanted == self._precision.widths[0]:
            return wanted
        full = FULL_SHARE * self._size
        widths = [w for w in self._precision.widths if w <= wanted and self._moves(w)[name] * self._slopes[name] >= full * w]
        return max(widths, default=min(wanted, self._precision.widths[0]))

    def _look(self, moves: Mapping[str, float]) -> Look:
        """Moves layers the same way, so that their errors add up."""
        left = self._residual(moves, dict.fromkeys(moves, 1.0))
        return Look(left, sum(move * self._slopes[name] for name, move in moves.items()) / len(moves))

    def _beside_eager(self, lines: Mapping[Any, tuple[dict[str, float], Look]]) -> dict[Any, _Judgment]:
        """Judges groups by comparison with eager: at the same points first, then farther and nearer ones."""
        if not lines:
            return {}
        looks = {at: {1.0: look} for at, (_, look) in lines.items()}
        with self._uncompiled():
            eager = {at: {1.0: self._look(moves)} for at, (moves, _) in lines.items()}
        found = self._judgments(looks, eager)
        rest = {
            at: {scale: _scaled(moves, scale) for scale in self._scales(moves)}
            for at, (moves, _) in lines.items()
            if found[at].outcome is not Outcome.OK
        }
        if rest:
            for at, scaled in rest.items():
                looks[at] |= {scale: self._look(moves) for scale, moves in scaled.items()}
            with self._uncompiled():
                for at, scaled in rest.items():
                    eager[at] |= {scale: self._look(moves) for scale, moves in scaled.items()}
            found = self._judgments(looks, eager)
        return found

    def _scales(self, moves: Mapping[str, float]) -> list[float]:
        is_within = all(SCALES[0] * move <= self._reach[name] for name, move in moves.items())
        return list(SCALES if is_within else SCALES[1:])

    def _judgments(
        self, compiled: Mapping[Any, Mapping[float, Look]], eager: Mapping[Any, Mapping[float, Look]]
    ) -> dict[Any, _Judgment]:
        assert self.known is not None
        judged, rounding = compiled, self.known
        if not self._draws:  # the same function of the same weights, so what is not smooth in it cancels
            judged = {at: {k: look.beyond(eager[at][k]) for k, look in looks.items()} for at, looks in compiled.items()}
            rounding = Rounding.of([look for looks in judged.values() for look in looks.values()])
            if rounding.noise < self.known.beside_eager:
                rounding = Rounding(self.known.beside_eager, rounding.center)
            self.known = replace(self.known, beside_eager=rounding.noise)
        return {at: self._judged(compiled[at], eager[at], judged[at], rounding) for at in compiled}

    def _judged(
        self, compiled: Mapping[float, Look], eager: Mapping[float, Look], judged: Mapping[float, Look], rounding: Rounding
    ) -> _Judgment:
        """Judges a group by its lines at some scales: those of compiled code, less those of eager if nothing is random."""
        assert self.known is not None
        limits = {scale: look.limit(self._precision.allowed, rounding) for scale, look in judged.items()}
        for scale, look in judged.items():
            # Compiled code may also round less than eager, whose own gradients are then the ones that are off.
            noise = 0.0 if self._draws else 2 * self.known.noise / look.unit
            floor = FLOOR_MARGIN * max(0.0, abs(eager[scale].error) - noise)
            stands_out = abs(look.error) > max(limits[scale], floor) and abs(compiled[scale].error) > self._precision.allowed
            if stands_out and self._is_seen(look.left.total) and any(look.agrees(other, rounding) for other in judged.values()):
                return _Judgment(Outcome.WRONG, look.error, limits[scale])
        best = min(limits, key=limits.__getitem__)
        if abs(judged[best].error) > limits[best]:
            limits = {scale: max(limit, GROUP_MARGIN * abs(eager[scale].error)) for scale, limit in limits.items()}
            best = min(limits, key=limits.__getitem__)
        error, limit = judged[best].error, limits[best]
        return _Judgment(Outcome.OK if abs(error) <= limit <= COARSEST else Outcome.SKIPPED, error, limit)

    def _is_seen(self, left: float) -> bool:
        """Tells whether a residual is larger than what rounding does to the loss; the limits in half precision allow for it."""
        return self._precision.is_half or abs(left) >= NOISE_MARGIN * self._noise()

    def _verdict(
        self, outcome: Outcome, error: float, checked: float, layers: Mapping[str, float] | None = None
    ) -> GradientCheck:
        return GradientCheck(
            outcome=outcome, error=error, allowed=self._precision.allowed, layers=layers or {}, share_checked=checked
        )

    def _wrong_layers(self, width: float) -> dict[str, float]:
        moves = {name: move for name, move in self._moves(width).items() if move}
        if len(moves) > MAX_SINGLE_LAYERS:
            moves = self._worst_half(moves, width)
        found = {}
        for name, move in moves.items():
            left = self._error({name: move}, {name: 1.0}, width)
            found[name] = left * width * self._size / (move * self._slopes[name])
        # A single evaluation of each has no second width to confirm it: values far below the worst may be rounding.
        least = max(self._precision.allowed, max(map(abs, found.values())) / 10)
        wrong = {name: one for name, one in found.items() if abs(one) > least}
        return dict(sorted(wrong.items(), key=lambda item: -abs(item[1])))

    def _worst_half(self, moves: Mapping[str, float], width: float) -> dict[str, float]:
        """Narrows down to one layer by halving."""
        names = list(moves)
        signs = self._signs[0]
        while len(names) > 1:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            left = [abs(self._error({n: moves[n] for n in half}, signs, width)) for half in halves]
            names = halves[0] if left[0] >= left[1] else halves[1]
        return {name: moves[name] for name in names}

    def _pattern(self, moves: Mapping[str, float], line: int) -> dict[str, float]:
        """Chooses back or forth for each layer. The choices do not balance, or an error common to all layers would cancel."""
        random = Random(line)
        changes = {name: move * self._slopes[name] for name, move in moves.items()}
        least = math.sqrt(sum(change**2 for change in changes.values()))
        while True:
            signs = {name: random.choice((-1.0, 1.0)) for name in moves}
            if abs(sum(signs[name] * change for name, change in changes.items())) >= 0.999 * least:
                return signs


def _unevenness(looks: Sequence[Look]) -> float:
    """Returns how uneven lines typically are, by rounding and bends, in units of one layer's change of the loss."""
    return median(abs(look.left.uneven) / look.unit for look in looks)


def _scaled(moves: Mapping[str, float], scale: float) -> dict[str, float]:
    return {name: scale * move for name, move in moves.items()}


def _strided(names: Sequence[str], most: int) -> list[list[str]]:
    """Divides layers into groups; neighbors, which act on each other most, are in different ones."""
    count = min(most, len(names))
    return [list(names[first::count]) for first in range(count)]


def _plateau(errors: Mapping[float, float], allowed: float) -> tuple[float, float] | None:
    """Returns two widths whose errors agree and are out of tolerance."""
    for (width, one), (other_width, other) in combinations(errors.items(), 2):
        if min(abs(one), abs(other)) > allowed and abs(one - other) < 0.3 * min(abs(one), abs(other)):
            return width, other_width
    return None
