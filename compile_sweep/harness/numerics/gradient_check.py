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
move in groups, one group at a time. And a gradient holds noise of rounding, which agrees with itself: projected on its own
direction, a gradient is too long by the noise's share: under bfloat16 autocast on an H200, GPT-2's by 1 %, a ResNet-50's by a
factor of three (docs/log.md). So the direction is taken next to the start, at weights that differ by a few roundings, where
the noise is another.

Output: a `GradientCheck`. Afterwards parameters, buffers, gradients and random states are what they were.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from random import Random
from typing import Any

import torch
from torch import nn

from compile_sweep.contract.base import Batch, unwrap_ddp
from compile_sweep.harness import memory
from compile_sweep.harness.apply import TrainStep
from compile_sweep.harness.distributed import everywhere, num_workers
from compile_sweep.harness.numerics.finite_differences import PRECISIONS, Differentiated, FiniteDifferences
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.references import precision_of
from compile_sweep.harness.numerics.tolerance import FLOAT8_ROUNDING
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.outcome import may_run_out_of_memory
from compile_sweep.schema.settings import Scope

NUM_LINES = 2
"""Number of lines, each of which moves every layer. On a single line, the errors of two layers may cancel."""

MAX_SINGLE_LAYERS = 16
"""Up to this many layers, each is examined by itself once something is wrong; with more, the worst one is found by halving."""

FLOOR_MARGIN = 3.0
"""Multiple of eager's residual above which compiled code that draws other random numbers counts as wrong."""

NOISE_MARGIN = 3.0  # multiple of the loss's noise of rounding above which an error in float32 is seen

LEAST_LOSS = 1e-5
"""Loss in float32 below which it may not change along its gradient at all, as a cross-entropy's logarithm of nearly 1."""

MAX_GROUPS = 16  # number of groups of layers that move in turn
GROUP_MARGIN = 2.0  # multiple of eager's residual, up to which compiled code's residual of the same group is right

COARSEST = 0.5
"""Largest detectable error with which a check may call gradients right: that of one layer that is half wrong."""

LEAST_CHECKED = 0.75  # fraction of the moved layers that must be found right for the check to say so

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
    layers: Mapping[str, float] = field(default_factory=dict)
    """Relative errors of layers out of tolerance, largest first; with many layers only the worst one is determined."""
    eager_error: float | None = None
    """Error of eager's own gradients where they are no derivatives of the loss either, and compiled ones are the same."""
    share_checked: float | None = None
    """Fraction of the layers with gradients that was checked; the other gradients are too small to be told from rounding."""
    evaluations: int = 0
    """Number of forward and backward passes."""

    @property
    def sentence(self) -> str:
        """Says, for a wrong outcome, which layers are wrong, and by how much."""
        assert self.error is not None
        assert self.allowed is not None
        named = list(self.layers)
        others = f" and of {len(named) - 1} more" if len(named) > 1 else ""
        off, allowed = (f"{100 * share:.3g} %" for share in (self.error, self.allowed))
        return (
            f"gradients of {named[0] if named else 'the model'}{others} do not belong to the loss that the compiled forward "
            f"computes: off by {off}, {allowed} allowed (finite differences in the compiled code)"
        )


def skipped(reason: str) -> GradientCheck:
    """Returns a check that was skipped."""
    return GradientCheck(outcome=Outcome.SKIPPED, reason=reason)


def check_gradients(
    step: Differentiated, *, rounding: float, draws: bool, eagerly: Callable[[], AbstractContextManager[Any]]
) -> GradientCheck:
    """Checks the gradients of a compiled step; all workers of a group must call this together."""
    if rounding >= FLOAT8_ROUNDING:
        return skipped("float8 rounds so coarsely that the loss does not follow small steps")
    precision = next(one for bound, one in PRECISIONS if rounding <= bound)
    if reason := _unfit(step.parameters.values()):
        return skipped(reason)
    found = GradientCheck(outcome=Outcome.OK)
    evaluations = 0
    for attempt in range(2):
        search = _Search(
            step,
            precision,
            rounding=rounding,
            seed=_SEED + attempt,
            draws=draws,
            eagerly=eagerly,
            starts_nearby=precision.is_half or attempt > 0,
        )
        try:
            found = search.found()
        finally:
            search.put_back()
        evaluations += search.evaluations
        if found.outcome is not Outcome.WRONG:  # a single draw does not suffice to call a setting wrong
            break
    return replace(found, evaluations=evaluations)


def _unfit(parameters: Iterable[nn.Parameter]) -> str | None:
    coarse = {p.dtype for p in parameters if p.dtype.to_real() not in (torch.float32, torch.float64)}
    if coarse:
        name = str(coarse.pop()).removeprefix("torch.")
        return f"parameters are {name}, whose rounding hides a small step"
    return None


class _Search(FiniteDifferences):
    """One attempt, with one seed."""

    _signs: Sequence[dict[str, float]] = ()
    """For each line, back or forth for each layer; empty if layers move in groups."""

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
        moves = self._moves(self._precision.widths[0])
        if not any(moves.values()):
            return skipped("no gradient is large enough to be told from rounding")
        checked = sum(move > 0 for move in moves.values()) / len(moves)
        return self._by_groups(checked) if self._precision.is_half else self._by_lines(moves, checked)

    def _by_lines(self, moves: Mapping[str, float], checked: float) -> GradientCheck:
        """Returns what shows when all layers move at once."""
        self._signs = [self._pattern(moves, line) for line in range(NUM_LINES)]
        errors: dict[float, list[float]] = {}
        for width in self._precision.widths:
            errors[width] = [self._error(self._moves(width), signs, width) for signs in self._signs]
            if (worst := max(map(abs, errors[width]))) <= self._precision.allowed:
                return self._verdict(Outcome.OK, worst, checked)
        return self._doubtful(errors, checked)

    def _doubtful(self, errors: Mapping[float, list[float]], checked: float) -> GradientCheck:
        """Judges by comparison with eager if no width shows that all is right, to tell kinks of the loss from wrong gradients."""
        self._look_nearby()
        with self._uncompiled():
            eager = {width: [self._error(self._moves(width), signs, width) for signs in self._signs] for width in errors}
            self._look_nearby()
        allowed = self._precision.allowed
        differences = {
            width: [one - other for one, other in zip(values, eager[width], strict=True)] for width, values in errors.items()
        }
        if not self._draws:  # both evaluate the same function of the same weights, so what is not smooth in it cancels
            for values in differences.values():
                if max(map(abs, values)) <= allowed:
                    verdict = self._verdict(Outcome.OK, max(map(abs, values)), checked)
                    return replace(verdict, eager_error=self._error_at_two_widths(eager))
        judged = errors if self._draws else differences
        # Eager's residual is curvature, kinks and rounding, which cancel if the random numbers are the same.
        floors = {width: max(map(abs, eager[width])) for width in errors}
        for line in range(NUM_LINES):
            plateau = _plateau({width: judged[width][line] for width in judged}, allowed)
            if plateau is None:
                continue
            width = max(plateau)
            stands_out = not self._draws or abs(judged[width][line]) > FLOOR_MARGIN * floors[width]
            if stands_out and self._is_seen(judged[width][line], width):
                return self._wrong(width, judged[width][line], checked)
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
        """Returns what shows when groups of layers move one at a time; a group that is right at one width is right."""
        names = [name for name, move in self._moves(self._precision.widths[0]).items() if move]
        groups = [names[first::MAX_GROUPS] for first in range(min(MAX_GROUPS, len(names)))]  # neighbors act on each other most
        compiled = [self._group_errors(group) for group in groups]
        doubtful = [number for number, group in enumerate(groups) if not self._is_small(group, compiled[number])]
        eager: dict[int, dict[float, float]] = {}
        if doubtful:
            with self._uncompiled():
                eager = {n: {width: self._group_error(groups[n], width) for width in compiled[n]} for n in doubtful}
        found = [self._judged(group, compiled[number], eager.get(number, {})) for number, group in enumerate(groups)]
        for group, (outcome, width, error, _) in zip(groups, found, strict=True):
            if outcome is Outcome.WRONG:
                return self._wrong(width, error, checked, group)
        share = sum(len(group) for group, one in zip(groups, found, strict=True) if one[0] is Outcome.OK) / len(names)
        if share < LEAST_CHECKED:
            return skipped(
                "eager gradients are not derivatives of the loss at the steps that can be told from rounding: it has kinks, a "
                "detach or a straight-through estimate in it, or bends too much"
            )
        _, _, error, allowed = max((one for one in found if one[0] is Outcome.OK), key=lambda one: abs(one[2]) / one[3])
        return replace(self._verdict(Outcome.OK, abs(error), checked * share), allowed=allowed)

    def _is_seen(self, error: float, width: float) -> bool:
        """Tells whether an error is larger than what rounding does to the loss; the limits in half precision allow for it."""
        return self._precision.is_half or abs(error) * width * self._size >= NOISE_MARGIN * self._noise()

    def _allowed(self, group: Sequence[str]) -> float:
        return self._precision.allowed * math.sqrt(len(group))  # the layers' rounding is independent

    def _is_small(self, group: Sequence[str], errors: Mapping[float, float]) -> bool:
        return bool(errors) and min(map(abs, errors.values())) <= self._allowed(group)

    def _group_errors(self, group: Sequence[str]) -> dict[float, float]:
        """Returns a group's errors at the widths at which all its layers can move, up to the first small one."""
        errors: dict[float, float] = {}
        for width in self._precision.widths:
            moves = self._moves(width)
            if all(moves[name] for name in group):
                errors[width] = self._group_error(group, width)
            if self._is_small(group, errors):
                break
        return errors

    def _group_error(self, group: Sequence[str], width: float) -> float:
        """Returns the error of a group whose layers move the same way, so that their errors add up."""
        moves = self._moves(width)
        return self._error({name: moves[name] for name in group}, dict.fromkeys(group, 1.0), width)

    def _judged(
        self, group: Sequence[str], errors: Mapping[float, float], eager: Mapping[float, float]
    ) -> tuple[Outcome, float, float, float]:
        """Returns a group's outcome, the width that shows it, its error there, and what is allowed."""
        allowed = self._allowed(group)
        judged = errors
        if eager and not self._draws:  # the same function of the same weights, so what is not smooth in it cancels
            judged = {width: error - eager[width] for width, error in errors.items()}
        if self._is_small(group, judged):
            width = min(judged, key=lambda width: abs(judged[width]))
            return Outcome.OK, width, judged[width], allowed
        plateau = _plateau(judged, allowed)
        if plateau is not None:
            width = max(plateau)
            if abs(judged[width]) > FLOOR_MARGIN * abs(eager[width]) and self._is_seen(judged[width], width):
                return Outcome.WRONG, width, judged[width], allowed
        limits = {width: max(allowed, GROUP_MARGIN * abs(floor)) for width, floor in eager.items()}
        for width in sorted(limits, key=limits.__getitem__):
            if abs(judged[width]) <= limits[width] <= COARSEST:
                return Outcome.OK, width, judged[width], limits[width]
        return Outcome.SKIPPED, 0.0, 0.0, math.inf

    def _wrong(self, width: float, error: float, checked: float, among: Sequence[str] | None = None) -> GradientCheck:
        layers = self._wrong_layers(width, among)
        return self._verdict(Outcome.WRONG, abs(next(iter(layers.values()), error)), checked, layers)

    def _verdict(
        self, outcome: Outcome, error: float, checked: float, layers: Mapping[str, float] | None = None
    ) -> GradientCheck:
        return GradientCheck(
            outcome=outcome, error=error, allowed=self._precision.allowed, layers=layers or {}, share_checked=checked
        )

    def _wrong_layers(self, width: float, among: Sequence[str] | None) -> dict[str, float]:
        moves = {name: move for name, move in self._moves(width).items() if move and (among is None or name in among)}
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
        signs = self._signs[0] if self._signs else dict.fromkeys(names, 1.0)
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


def _plateau(errors: Mapping[float, float], allowed: float) -> tuple[float, float] | None:
    """Returns two widths whose errors agree and are out of tolerance."""
    for (width, one), (other_width, other) in combinations(errors.items(), 2):
        if min(abs(one), abs(other)) > allowed and abs(one - other) < 0.3 * min(abs(one), abs(other)):
            return width, other_width
    return None


def check_step(prepared: Prepared, model: nn.Module, step: TrainStep, batch: Batch, *, draws: bool) -> GradientCheck | None:
    """Checks a measured step on a batch of a shape that it has run on; None if nothing of the model is compiled."""
    settings, device = prepared.settings, prepared.device
    if settings.scope is Scope.EAGER or not prepared.workload.trains:
        return None
    if settings.ddp is not None and settings.ddp.compression is not None:
        return skipped("gradients are compressed on their way between workers")
    parameters = {name: p for name, p in unwrap_ddp(model).named_parameters() if p.requires_grad}
    first = next(iter(parameters.values()))
    autocast = prepared.workload.autocast_dtype(device)
    rounding, _ = precision_of(settings, autocast, first.dtype.to_real())

    def discard() -> None:
        for parameter in parameters.values():
            if settings.keeps_gradients and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    state = PythonState(unwrap_ddp(model))

    def run() -> float:
        state.put_back()  # a counter in the forward would make each evaluation that of another function
        return step.forward_and_backward(batch)

    subject = Differentiated(
        parameters=parameters,
        buffers=lambda: list(unwrap_ddp(model).buffers()),
        run=run,
        discard=discard,
        gradients=lambda: [parameter.grad for parameter in parameters.values()],
        device=device,
    )
    several = num_workers() > 1
    if several and not everywhere(memory.has_room(memory.read_peaks(device).in_use_bytes, device), device):
        return skipped("there is no memory for a second copy of the weights")
    with may_run_out_of_memory(unless=several):  # others wait for this worker
        return check_gradients(subject, rounding=rounding, draws=draws, eagerly=run_eagerly)
    return skipped("there is no memory for a second copy of the weights")


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Makes everything that was passed to torch.compile run as it is written in the block.

    Warnings that advise compiling it (`flex_attention` warns when called eagerly) are not meant for the user here, so they are
    dropped.
    """
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield
