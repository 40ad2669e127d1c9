"""Checks that the gradients of a compiled step belong to its loss, by finite differences of the loss in the compiled code alone.

Background: two runs with different random numbers scatter, and a comparison with eager must allow for that. Within one program,
with one seed before each forward, the loss is a function of the parameters, and its difference between two points is the integral
of its gradient along the way. By Simpson's rule over the points -1, 0 and 1 of a line in parameter space

    L(1) - L(-1) = (p(-1) + 4 p(0) + p(1)) / 3 + O(step ** 5),

where p is the gradient's projection on the line. The residual, in units of the change of the loss that one layer's move causes,
is 0 if the gradients are right and e if one layer's are (1 + e) times what they should be.

Every layer moves along its own gradient, far enough to change the loss by the same amount, so that a small layer counts as much
as a large one; and back or forth at random, so that the loss stays near its value. Two such lines at one width suffice if nothing
is wrong. A residual that is equal at two widths is an error, unless eager has it too: a loss with `detach` or a straight-through
estimate in it has gradients that are not derivatives. Other residuals are curvature, kinks or rounding. In a deep network under
autocast, a move that stands out from rounding bends the loss if all layers make it at once. So if lines cannot tell, layers move
in groups, one group at a time, which takes more evaluations.

Output: a `GradientCheck`. Afterwards parameters, buffers, gradients and random states are what they were.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, unwrap_ddp
from compile_sweep.contract.seeding import own_random_numbers
from compile_sweep.harness import memory
from compile_sweep.harness.apply import TrainStep
from compile_sweep.harness.distributed import agreed_numbers, everywhere, num_workers
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.references import precision_of
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.settings import Scope

NUM_LINES = 2
"""Number of lines, each of which moves every layer. On a single line, the errors of two layers may cancel."""

STARTING_SCALE = 0.02
"""Root mean square that weights are assumed to have at least, for those such as biases that start at zero."""

LEAST_SHARE = 0.1
"""Fraction of the usual change of the loss that a layer must be able to make within `max_move`; the gradients of others are too
small to be told from rounding, and these layers stay fixed.
"""

MAX_SINGLE_LAYERS = 16
"""Up to this many layers, each is examined by itself once something is wrong; with more, the worst one is found by halving."""

SCATTER = 0.3
"""Fraction of eager's residual by which compiled code may differ from it. With right gradients, GPT-2 and a ResNet-50 under
autocast differed by 1 to 12 % of it on an H100, and the residual was 0.4 and 1.8 layers' worth (docs/results.md).
"""

FLOOR_MARGIN = 3.0
"""Multiple of eager's residual above which compiled code that draws other random numbers counts as wrong."""

MAX_GROUPS = 16
"""Number of groups of layers that move in turn if all together bend the loss too much."""

GROUP_MARGIN = 2.0
"""Multiple of eager's largest residual over the groups, up to which compiled code's residuals are right."""

FINE_ENOUGH = 0.2
"""Detectable error below which groups are not moved at another width, which might detect smaller ones."""

COARSEST = 1.0
"""Largest detectable error with which a check may call gradients right: that of one layer that is completely wrong."""

_SEED = 0x5EED


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How precisely the check can look, given the precision of the step."""

    allowed: float
    """Relative error of one layer's gradient that is tolerated."""
    widths: Sequence[float]
    """Relative changes of the loss that each layer makes; the first one is tried first."""
    max_move: float
    """Maximum move of a layer, as a fraction of its 2-norm: beyond it, the loss is not a polynomial of low degree."""


PRECISIONS = (
    (2.0**-20, Precision(allowed=0.003, widths=(1e-4, 3e-5, 3e-4), max_move=0.01)),
    (2.0**-11.5, Precision(allowed=0.015, widths=(1e-3, 3e-3, 3e-4), max_move=0.03)),
    (math.inf, Precision(allowed=0.03, widths=(1e-3, 3e-3, 1e-2), max_move=0.1)),
)
"""By the largest relative rounding error of one operation that each applies to: float32, half precision, bfloat16. The effect of
rounding and the allowed error are measured in benchmarks/gradient_errors.py (docs/results.md).
"""


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


@dataclass(slots=True, kw_only=True, eq=False)
class Differentiated:
    """A step whose gradients can be computed without an update.

    Args:
        parameters: Trained parameters, by dotted name.
        buffers: Returns the model's buffers; called each time, since a forward may replace them.
        run: Runs forward and backward on one batch from the current random state; returns the loss and keeps the gradients.
        discard: Drops the gradients as the step itself does.
        gradients: Returns the gradients, in the order of the parameters.
        device: The device that the step runs on.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Callable[[], Iterable[Tensor]]
    run: Callable[[], float]
    discard: Callable[[], None]
    gradients: Callable[[], Sequence[Tensor | None]]
    device: torch.device


def skipped(reason: str) -> GradientCheck:
    """Returns a check that was skipped."""
    return GradientCheck(outcome=Outcome.SKIPPED, reason=reason)


def check_gradients(
    step: Differentiated, *, rounding: float, draws: bool, eagerly: Callable[[], AbstractContextManager[Any]]
) -> GradientCheck:
    """Checks the gradients of a compiled step; all workers of a group must call this together.

    Args:
        step: The step under test.
        rounding: Relative error of one operation in the step's precision.
        draws: Whether a step draws random numbers, so that eager's loss is a different function.
        eagerly: Context in which `step` runs uncompiled.
    """
    precision = next(one for bound, one in PRECISIONS if rounding <= bound)
    if reason := _unfit(step.parameters.values()):
        return skipped(reason)
    found = GradientCheck(outcome=Outcome.OK)
    evaluations = 0
    for attempt in range(2):
        search = _Search(step, precision, seed=_SEED + attempt, draws=draws, eagerly=eagerly)
        try:
            found = search.found()
        finally:
            search.put_back()
        evaluations += search.evaluations
        # With random numbers or coarse rounding, a single draw does not suffice to call a setting wrong.
        if found.outcome is not Outcome.WRONG or not (draws or precision is not PRECISIONS[0][1]):
            break
    return replace(found, evaluations=evaluations)


def _unfit(parameters: Iterable[nn.Parameter]) -> str | None:
    coarse = {p.dtype for p in parameters if p.dtype.to_real() not in (torch.float32, torch.float64)}
    if coarse:
        name = str(coarse.pop()).removeprefix("torch.")
        return f"parameters are {name}, whose rounding hides a small step"
    return None


def _put_back(step: Differentiated, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Restores buffers in place, including replaced ones, so that addresses known to CUDA graphs stay valid."""
    for (known, value), now in zip(buffers, step.buffers(), strict=True):
        known.copy_(value)
        if now is not known and now.shape == value.shape:
            now.copy_(value)


@dataclass(frozen=True, slots=True)
class _Point:
    """Result of a forward and backward at one point."""

    loss: float
    slopes: Sequence[float]
    """For each layer, the projection of its gradient on its own direction at the start."""


class _Search:
    """One attempt, with one seed."""

    def __init__(
        self,
        step: Differentiated,
        precision: Precision,
        *,
        seed: int,
        draws: bool,
        eagerly: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.evaluations = 0
        self._step, self._precision, self._seed, self._draws, self._eagerly = step, precision, seed, draws, eagerly
        self._parameters = list(step.parameters.values())
        self._start = [p.detach().clone() for p in self._parameters]
        self._buffers = [(b, b.clone()) for b in step.buffers()]
        self._layers: dict[str, list[int]] = {}
        self._directions: list[Tensor | None] = []
        self._signs: list[dict[str, float]] = []

    def put_back(self) -> None:
        """Restores parameters and buffers, and drops the gradients."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._start, strict=True):
                parameter.copy_(value)
            _put_back(self._step, self._buffers)
        self._step.discard()

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
        widths = self._precision.widths
        errors = defaultdict[float, list[float]](list)
        for width in widths:
            moves = self._moves(width)
            if not any(moves.values()):
                return skipped("no gradient is large enough to be told from rounding")
            if not self._signs:
                self._signs = [self._pattern(moves, line) for line in range(NUM_LINES)]
                checked = sum(move > 0 for move in moves.values()) / len(moves)
            errors[width] = [self._error(moves, signs, width) for signs in self._signs]
            if max(map(abs, errors[width])) <= self._precision.allowed:
                return self._verdict(Outcome.OK, max(map(abs, errors[width])), checked)
        return self._doubtful(errors, checked)

    def _doubtful(self, errors: Mapping[float, list[float]], checked: float) -> GradientCheck:
        """Judges by comparison with eager if no width shows that all is right, to tell kinks of the loss from wrong gradients."""
        with self._uncompiled():
            eager = {width: [self._error(self._moves(width), signs, width) for signs in self._signs] for width in errors}
        allowed = self._precision.allowed
        differences = {
            width: [one - other for one, other in zip(values, eager[width], strict=True)] for width, values in errors.items()
        }
        if not self._draws:  # both evaluate the same function of the same weights, so what is not smooth in it cancels
            for values in differences.values():
                if max(map(abs, values)) <= allowed:
                    return self._verdict(Outcome.OK, max(map(abs, values)), checked)
        judged = errors if self._draws else differences
        # Eager's residual is curvature, kinks and rounding. In float32 it cancels if the random numbers are the same.
        floors = {width: max(map(abs, eager[width])) for width in errors}
        limits = {width: max(allowed, SCATTER * floor) for width, floor in floors.items()}
        fine = self._precision is PRECISIONS[0][1]
        exact = fine and not self._draws
        for line in range(NUM_LINES):
            plateau = _plateau([(width, judged[width][line]) for width in judged], allowed)
            if plateau is None:
                continue
            width, error = max((width, judged[width][line]) for width in plateau)
            if not exact and abs(error) <= (FLOOR_MARGIN * floors[width] if self._draws else limits[width]):
                continue
            return self._wrong(width, error, checked)
        for width in () if fine else sorted(limits, key=limits.__getitem__):
            found = max(map(abs, differences[width]))
            if found <= limits[width] <= COARSEST:
                return replace(self._verdict(Outcome.OK, found, checked), allowed=limits[width])
        return self._by_groups(checked) or skipped(
            "eager gradients are not derivatives of the loss at the steps that can be told from rounding: it has kinks, a detach "
            "or a straight-through estimate in it, or bends too much"
        )

    def _by_groups(self, checked: float) -> GradientCheck | None:
        """Returns what layers show that move in small groups, one at a time; None if that is inconclusive."""
        precision = self._precision
        names = [name for name, move in self._moves(precision.widths[0]).items() if move]
        groups = [names[first::MAX_GROUPS] for first in range(min(MAX_GROUPS, len(names)))]  # neighbors act on each other most
        judged: dict[float, list[float]] = {}
        floors: dict[float, float] = {}
        for width in precision.widths:
            judged[width] = self._group_errors(groups, width)
            if (found := max(map(abs, judged[width]))) <= precision.allowed:
                return self._verdict(Outcome.OK, found, checked)
            with self._uncompiled():
                eager = self._group_errors(groups, width)
            floors[width] = max(map(abs, eager))
            if not self._draws:
                judged[width] = [one - other for one, other in zip(judged[width], eager, strict=True)]
            seen = max(precision.allowed, GROUP_MARGIN * floors[width])
            if floors[width] > 2 * COARSEST or max(map(abs, judged[width])) <= seen <= FINE_ENOUGH:
                break
        for number, group in enumerate(groups):
            plateau = _plateau([(width, judged[width][number]) for width in judged], precision.allowed)
            if plateau is None:
                continue
            width, error = max((width, judged[width][number]) for width in plateau)
            if abs(error) > FLOOR_MARGIN * floors[width]:
                return self._wrong(width, error, checked, group)
        limits = {width: max(precision.allowed, GROUP_MARGIN * floor) for width, floor in floors.items()}
        for width in sorted(limits, key=limits.__getitem__):
            found = max(map(abs, judged[width]))
            if found <= limits[width] <= COARSEST:
                return replace(self._verdict(Outcome.OK, found, checked), allowed=limits[width])
        return None

    def _group_errors(self, groups: Sequence[Sequence[str]], width: float) -> list[float]:
        """Returns the error of each group; all its layers move the same way, so that their errors add up."""
        moves = self._moves(width)
        return [self._error({name: moves[name] for name in group}, dict.fromkeys(group, 1.0), width) for group in groups]

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Makes evaluations in the block eager."""
        compiled_center = self._center
        try:
            with self._eagerly():
                self._center = self._at({}, 0.0)
                yield
        finally:
            self._center = compiled_center

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
        """Returns the relative errors of single layers, the worst first."""
        moves = {name: move for name, move in self._moves(width).items() if move and (among is None or name in among)}
        if len(moves) > MAX_SINGLE_LAYERS:
            moves = self._worst_half(moves, width)
        found = {}
        for name, move in moves.items():
            left = self._error({name: move}, {name: 1.0}, width)
            found[name] = left * width * self._size / (move * self._norms[name])
        # A single evaluation of each has no second width to confirm it: values far below the worst may be rounding.
        least = max(self._precision.allowed, max(map(abs, found.values())) / 10)
        wrong = {name: one for name, one in found.items() if abs(one) > least}
        return dict(sorted(wrong.items(), key=lambda item: -abs(item[1])))

    def _worst_half(self, moves: Mapping[str, float], width: float) -> dict[str, float]:
        """Narrows down to one layer by halving."""
        names = list(moves)
        while len(names) > 1:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            left = [abs(self._error({n: moves[n] for n in half}, self._signs[0], width)) for half in halves]
            names = halves[0] if left[0] >= left[1] else halves[1]
        return {name: moves[name] for name in names}

    def _begun(self) -> _Point | None:
        """Evaluates at the current weights, and takes each layer's direction from there."""
        loss = self._evaluate()
        gradients = self._step.gradients()
        self._directions = [None if g is None else _dense(g).detach().clone() for g in gradients]
        named: dict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(self._step.parameters):
            if self._directions[index] is not None:
                named[name.rpartition(".")[0] or name].append(index)
        squares = [0.0 if d is None else _dot(d, d) for d in self._directions]
        self._norms = {layer: math.sqrt(sum(squares[i] for i in indices)) for layer, indices in named.items()}
        if not math.isfinite(loss) or not all(map(math.isfinite, self._norms.values())):
            return None
        self._layers = {layer: indices for layer, indices in named.items() if self._norms[layer]}
        self._reach = {
            layer: self._precision.max_move * self._norm_of_weights(indices) for layer, indices in self._layers.items()
        }
        return _Point(loss, [self._norms[layer] for layer in self._layers])

    def _norm_of_weights(self, indices: Sequence[int]) -> float:
        count = sum(self._start[i].numel() for i in indices)
        return max(math.sqrt(sum(_dot(self._start[i], self._start[i]) for i in indices)), STARTING_SCALE * math.sqrt(count))

    def _moves(self, width: float) -> dict[str, float]:
        """Returns how far each layer moves along its gradient, as a 2-norm."""
        change = width * self._size
        moves = {name: min(change / self._norms[name], self._reach[name]) for name in self._layers}
        return {name: move if move * self._norms[name] >= LEAST_SHARE * change else 0.0 for name, move in moves.items()}

    def _pattern(self, moves: Mapping[str, float], line: int) -> dict[str, float]:
        """Chooses back or forth for each layer. The choices do not balance, or an error common to all layers would cancel."""
        random = Random(line)
        changes = {name: move * self._norms[name] for name, move in moves.items()}
        least = math.sqrt(sum(change**2 for change in changes.values()))
        while True:
            signs = {name: random.choice((-1.0, 1.0)) for name in moves}
            if abs(sum(signs[name] * change for name, change in changes.items())) >= 0.999 * least:
                return signs

    def _error(self, moves: Mapping[str, float], signs: Mapping[str, float], width: float) -> float:
        """Returns the residual of Simpson's rule, in units of one layer's change of the loss."""
        steps = {name: signs[name] * move for name, move in moves.items() if move}
        after, before = (self._at(steps, side) for side in (1.0, -1.0))
        assert self._center is not None
        slopes = zip(self._layers, before.slopes, self._center.slopes, after.slopes, strict=True)
        integral = sum(steps.get(name, 0.0) * (b + 4 * c + a) / 3 for name, b, c, a in slopes)
        (left,) = agreed_numbers([(integral - (after.loss - before.loss)) / 2], self._step.device)
        return left / (width * self._size)

    def _at(self, steps: Mapping[str, float], side: float) -> _Point:
        """Evaluates with each layer moved by its step along its direction, then restores the weights."""
        self._move(steps, side)
        try:
            loss = self._evaluate()
        finally:
            self._move(steps, 0.0)
        gradients = self._step.gradients()
        return _Point(
            loss,
            [
                sum(self._projection(gradients[i], i) for i in indices) / self._norms[layer]
                for layer, indices in self._layers.items()
            ],
        )

    def _projection(self, gradient: Tensor | None, index: int) -> float:
        direction = self._directions[index]
        return 0.0 if gradient is None or direction is None else _dot(_dense(gradient), direction)

    def _move(self, steps: Mapping[str, float], side: float) -> None:
        with torch.no_grad():
            for name, step in steps.items():
                for i in self._layers[name]:
                    direction = self._directions[i]
                    assert direction is not None
                    if side:
                        torch.add(self._start[i], direction, alpha=side * step / self._norms[name], out=self._parameters[i])
                    else:
                        self._parameters[i].copy_(self._start[i])

    def _evaluate(self) -> float:
        self.evaluations += 1
        with torch.no_grad():
            _put_back(self._step, self._buffers)
        self._step.discard()
        with own_random_numbers(self._step.device, self._seed):
            return _mean_over_workers(self._step.run(), self._step.device)


def _plateau(errors: Sequence[tuple[float, float]], allowed: float) -> tuple[float, float] | None:
    """Returns two widths whose errors agree and are out of tolerance."""
    for i, (width, one) in enumerate(errors):
        for other_width, other in errors[i + 1 :]:
            if min(abs(one), abs(other)) > allowed and abs(one - other) < 0.3 * min(abs(one), abs(other)):
                return width, other_width
    return None


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _dot(one: Tensor, other: Tensor) -> float:
    """Dot product of real vectors; complex numbers count as pairs of real ones, as their gradients do."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return float((one * other).sum(dtype=torch.float64))


def _mean_over_workers(loss: float, device: torch.device) -> float:
    """Returns the loss whose gradients workers have after averaging them."""
    if num_workers() == 1:
        return loss
    shared = torch.tensor(loss, device=device, dtype=torch.float64)
    torch.distributed.all_reduce(shared)
    return float(shared) / num_workers()


def check_step(prepared: Prepared, model: nn.Module, step: TrainStep, batch: Batch, *, draws: bool) -> GradientCheck | None:
    """Checks a measured training step on one batch; None if nothing of the model is compiled.

    Args:
        prepared: The settings in force.
        model: The model that the step trains.
        step: A step that has run before on a batch of this shape.
        batch: The batch to evaluate the loss on.
        draws: Whether the step draws random numbers.
    """
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
            if settings.static_gradients and parameter.grad is not None:
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
    try:
        return check_gradients(subject, rounding=rounding, draws=draws, eagerly=run_eagerly)
    except torch.OutOfMemoryError:
        if several:  # others wait for this worker
            raise
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
