"""Numerics: does a compiled run follow eager training on the same weights and batches?

Background: compared are the loss, the gradient norm and the update of each group of modules over the first steps, and where
the parameters and buffers are after them. What is allowed follows from how far eager runs are from each other and from a more
precise one (`references.py`), by the tests in `tolerance.py`; no constant is guessed. If compiled code draws eager's random
numbers, a run within the scatter of other draws is also compared with eager runs of the same draws. Beside it every number of
the run, timed steps included, must be finite. Of inference, the outputs are compared. Output: a status and the gaps behind it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compile_sweep.contract.base import Batch
from compile_sweep.harness.distributed import everywhere
from compile_sweep.harness.numerics.gradient_check import GradientCheck, Outcome
from compile_sweep.harness.numerics.reference_store import ReferenceStore
from compile_sweep.harness.numerics.references import (
    References,
    changed_in_classes,
    run_references,
    with_perturbed_runs,
    with_the_same_draws,
)
from compile_sweep.harness.numerics.tolerance import (
    FLOAT32_ROUNDING,
    GRADIENTS,
    LOSS,
    UPDATES,
    ComparisonContext,
    Gap,
    Quantity,
    calm_steps,
    compare_movement,
    compare_outputs,
    compare_series,
    movement_widened_by_chance,
    steps_of_rare_chance,
    widened_by_chance,
)
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.harness.numerics.what_to_try import Advice, what_to_try
from compile_sweep.harness.outputs import zero_infinities
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.causes.errors import REENTRANT_CHECKPOINT
from compile_sweep.schema.settings import CompileSettings


class NumericsStatus(StrEnum):
    """How the compiled run compares with eager."""

    OK = "ok"
    NAN = "nan"
    """NaN or infinite in a compared or a timed step where eager is finite."""
    DIVERGES = "diverges"
    """Further from eager than right runs are."""
    EAGER_UNSTABLE = "eager_unstable"
    """Eager itself is not finite on these batches or does not repeat, so nothing can be said of the compiled run. Outputs of
    inference that are inf or -inf in every eager run, as masked scores are, count as finite: those of the compiled run must be so
    in the same places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The verdict and its evidence. Gaps are relative to eager; mappings go by module group."""

    status: NumericsStatus
    compared_steps: int
    first_bad_step: int | None
    """Index of the first compared step that is not finite or, if status is diverges, out of tolerance by itself. None if only
    figures taken after the last step are out: parameters, buffers and finite differences.
    """
    first_bad_steady_step: int | None
    """Index of the first timed step whose loss is not finite."""
    last_loss: float | None
    """Loss at the end of the steady state; None if it is not finite."""
    judged_steps: int
    """Number of compared steps before chance alone drove eager runs apart; all of them if nothing is random."""
    random: bool
    """Whether eager steps draw random numbers, so that right runs scatter."""
    reference: str | None
    """dtype of the more precise run: float32, or float64 if float32 is under test. None if memory did not allow one, or if
    float64 is under test.
    """
    loss: Gap
    gradients: Mapping[str, Gap]
    """Gaps of the gradients' norms."""
    updates: Mapping[str, Gap]
    """Gaps of how far each step moves the parameters."""
    parameters: Mapping[str, Gap]
    """Gaps of the parameters' positions after the compared steps, in units of how far the reference moved them."""
    buffers: Mapping[str, Gap]
    """Gaps of floating-point buffers' positions, if any run moved them."""
    outputs: Gap | None = None
    """Gap of the elements of inference outputs. The loss above is then the outputs' root mean square."""
    gradient_check: GradientCheck | None = None
    """Whether the gradients belong to the loss, by finite differences in the compiled code. None for inference, eager settings
    and if it was not requested.
    """
    worst: str
    """The figure nearest to its tolerance, or furthest above."""
    remark: str | None = None
    """What is out of tolerance without making the setting unusable, and its usual cause."""
    advice: str | None = None
    """What to try if the status is diverges."""
    remedy: str | None = None
    """Settings to add that the advice names and that are worth a trial, as a key spells them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "status": str(self.status)}


def check_numerics(
    prepared: Prepared,
    batches: Sequence[Batch],
    compiled: Trajectory,
    steady_losses: Sequence[float],
    *,
    eager: Trajectory | None = None,
    eager_steady_losses: Sequence[float] = (),
    gradient_check: GradientCheck | None = None,
    recompiles: Sequence[str] = (),
    unsynchronized: Sequence[str] = (),
    store: ReferenceStore | None = None,
    on_eager_runs: Callable[[], None] = lambda: None,
) -> Numerics:
    """Runs the references that are not kept, and judges a compiled run. Needs as much memory as training in float32."""
    kept = store.load(prepared, batches, eager) if store is not None and eager is not None else None
    if kept is None:
        on_eager_runs()
    references = kept or run_references(prepared, batches, eager=eager)
    settings = prepared.settings
    judged = partial(
        judge,
        compiled,
        steady_losses=steady_losses,
        eager_steady_losses=eager_steady_losses,
        gradient_check=gradient_check,
        settings=settings,
        recompiles=recompiles,
        unsynchronized=unsynchronized,
        changed_in_classes=changed_in_classes(prepared.workload),
        on_gpu=prepared.device.type == "cuda",
    )
    found = judged(references=references)
    within = math.inf if found.random else _FAR
    doubtful = not references.perturbed and may_be_chance(found.to_dict(), within=within)
    if not everywhere(not doubtful, prepared.device):  # all workers run eager steps together
        references = with_perturbed_runs(prepared, batches, references)
        found, kept = judged(references=references), None
    if store is not None and kept is None and found.status is not NumericsStatus.EAGER_UNSTABLE:
        store.save(prepared, batches, references)
    follows = found.status is NumericsStatus.OK and settings.draws_eagers and draws_eagers(compiled, references)
    if everywhere(follows, prepared.device):
        found = judged(references=with_the_same_draws(prepared, batches, references))
    return found


_FOLLOWING = 0.5
"""Distance of a step's loss from that of eager run A, as a fraction of the scatter of eager runs, below which it follows.

With other random numbers it is 1.4 in the mean, and below 0.5 in each of ten steps once in four hundred thousand times.
"""


def draws_eagers(compiled: Trajectory, references: References) -> bool:
    """Tells whether the compiled run drew the random numbers of eager run A: each step's loss is then close to A's."""
    rounds_less = references.rounding > FLOAT32_ROUNDING  # in half precision, compiled code rounds less often than eager code
    if not references.eager.random or references.same_draws or rounds_less:
        return False
    eager = np.array([run.losses for run in references.runs])
    scatter = math.sqrt(float(eager.var(axis=0, ddof=1).mean()))
    return bool((np.abs(np.array(compiled.losses) - eager[0]) < _FOLLOWING * scatter).all())


_FAR = 30.0  # multiple of its tolerance beyond which no figure of a deterministic run is looked into with more eager runs

_SMALL = 0.1
"""Relative gap that is looked into in any case: eager runs in float32 may repeat so exactly that almost nothing is tolerated."""


def may_be_chance(numerics: Mapping[str, Any], *, within: float = _FAR) -> bool:
    """Tells whether a run diverges so little that eager runs with other roundings or random numbers may be as far apart.

    Few eager runs show too little of a distribution with long tails, as under an optimizer that takes whole steps from small
    gradients (Adadelta's first steps with random labels were 0.2 apart on average and up to 0.86), or of a model that decides by
    the largest of several numbers, as a matching of boxes and a router of experts do, or whose random numbers rarely act.

    Args:
        within: Multiple of its tolerance that every figure is within, unless it is small.
    """
    checked = numerics["gradient_check"]
    if numerics["status"] != NumericsStatus.DIVERGES or (checked is not None and checked["outcome"] == Outcome.WRONG):
        return False
    if numerics["worst"].endswith(ZERO_GRADIENTS):
        return False
    gaps = [numerics["loss"], *(gap for name in ("gradients", "updates", "parameters") for gap in numerics[name].values())]
    return all(gap["gap"] is not None and gap["gap"] <= max(within * (gap["tolerance"] or 0.0), _SMALL) for gap in gaps)


def judge(
    compiled: Trajectory,
    references: References,
    steady_losses: Sequence[float],
    eager_steady_losses: Sequence[float] = (),
    gradient_check: GradientCheck | None = None,
    *,
    settings: CompileSettings | None = None,
    is_script: bool = False,
    recompiles: Sequence[str] = (),
    unsynchronized: Sequence[str] = (),
    changed_in_classes: Sequence[str] = (),
    on_gpu: bool = False,
) -> Numerics:
    """Judges a compiled run by existing eager runs of the same length; takes the same arguments as `check_numerics`.

    Args:
        settings: The settings of the compiled run; what they have already is not advised.
        is_script: Whether the run is a script's, which has no `--bisect`.
        recompiles: Recompiles of the compiled run, which may explain why it diverges.
        unsynchronized: Kernels of the compiled run that read back what they store without a barrier, which may explain it, too.
        changed_in_classes: Attributes of classes that changed during the run, which may explain it, too.
        on_gpu: Whether it ran on a GPU.
    """
    lost: list[str] = []
    lengths = {len(run.losses) for run in (compiled, *references.runs)}
    if len(lengths) > 1:
        raise ValueError(f"runs of {' and '.join(map(str, sorted(lengths)))} steps cannot be compared")
    infinite = any(any(counts) for counts in references.eager.infinities)
    steady_bad, eager_steady_bad = (_first_not_finite(losses, infinite) for losses in (steady_losses, eager_steady_losses))
    eager_bad = [
        found for run in references.runs if (found := _not_finite(run) or _infinite_elsewhere(run, references)) is not None
    ]
    bad = _not_finite(compiled) or _infinite_elsewhere(compiled, references) or _buffers_not_finite(compiled, references)
    about = None if eager_bad or bad else _circumstances(compiled, references)
    compared = list(_comparisons(compiled, references, about)) if about else []
    out = [comparison for comparison in compared if comparison.gap.share > 1]
    outside = [comparison for comparison in out if comparison.respect != "buffers"]
    remark = _remark_on_buffers(out) if out and not outside else None
    first_bad_step = bad.step if bad else None
    if eager_bad or (steady_bad is not None and eager_steady_bad is not None):
        status = NumericsStatus.EAGER_UNSTABLE
        worst = f"eager: {eager_bad[0].text}" if eager_bad else f"eager: loss of timed step {eager_steady_bad} is not finite"
    elif bad:
        status, worst = NumericsStatus.NAN, bad.text
    elif steady_bad is not None:
        status, worst = NumericsStatus.NAN, f"loss of timed step {steady_bad} is not finite"
    elif differing := differs(references):
        status, worst = NumericsStatus.EAGER_UNSTABLE, differing
    else:
        status = NumericsStatus.DIVERGES if outside else NumericsStatus.OK
        first_bad_step = min((step for one in outside if (step := one.first_bad_step) is not None), default=None)
        counted = [comparison for comparison in compared if outside or comparison not in out]
        worst = max(counted, key=lambda comparison: comparison.gap.share).text
        if gradient_check is not None and gradient_check.outcome is Outcome.WRONG:
            status, first_bad_step, worst, remark = NumericsStatus.DIVERGES, None, gradient_check.sentence, None
        missing = _zero_only_in([compiled], references.runs)
        lost = [] if missing else _zero_only_in(references.runs, [compiled])
        if zero := missing or lost:
            status, first_bad_step, remark = NumericsStatus.DIVERGES, 0, None
            others = f" and of {len(zero) - _MAX_NAMED} more" if len(zero) > _MAX_NAMED else ""
            worst = f"gradients of {', '.join(zero[:_MAX_NAMED])}{others} {ZERO_IN_EAGER if lost else ZERO_GRADIENTS}"
    advice = Advice(REENTRANT_CHECKPOINT if lost else None)
    if status is NumericsStatus.DIVERGES and not lost:
        settings = settings or CompileSettings()
        is_wrong = gradient_check is not None and gradient_check.outcome is Outcome.WRONG
        advice = what_to_try(
            references,
            settings,
            recompiles,
            unsynchronized,
            changed=gradient_check.read_then_changed if gradient_check is not None else (),
            changed_before=gradient_check.changed_then_read if gradient_check is not None else (),
            changed_in_classes=changed_in_classes,
            compiling_branches=gradient_check.compiling_branches if gradient_check is not None else (),
            is_wrong=is_wrong,
            is_script=is_script,
            on_gpu=on_gpu,
        )
    gaps: dict[str, dict[str, Gap]] = defaultdict(dict)
    for one in compared:
        gaps[one.respect][one.module] = one.gap
    return Numerics(
        status=status,
        compared_steps=len(compiled.losses),
        first_bad_step=first_bad_step,
        first_bad_steady_step=steady_bad,
        last_loss=steady_losses[-1] if steady_losses and math.isfinite(steady_losses[-1]) else None,
        judged_steps=len(about.calm) if about else 0,
        random=references.eager.random,
        reference=references.precise_dtype,
        loss=gaps["loss"].get("", Gap(gap=None, tolerance=None, kind="rms")),
        gradients=gaps["gradients"],
        updates=gaps["updates"],
        parameters=gaps["parameters"],
        buffers=gaps["buffers"],
        outputs=gaps["outputs"].get(""),
        gradient_check=gradient_check,
        worst=worst,
        remark=remark,
        advice=advice.text,
        remedy=advice.remedy,
    )


def _remark_on_buffers(out: Sequence[_Comparison]) -> str:
    worst = max(out, key=lambda comparison: comparison.gap.share)
    return (
        f"loss, gradients and parameters agree with eager, and only running statistics do not: {worst.text}. They do not act on "
        "training. Usual cause: a forward that checkpointing runs twice counts a batch twice in eager and once compiled"
    )


_MAX_NAMED = 2  # modules without gradients that are named; the others are counted

ZERO_GRADIENTS = "are zero in every compared step, and in no step of eager runs"


ZERO_IN_EAGER = "are zero in every step of eager runs, and in no compared step"


def _zero_only_in(runs: Sequence[Trajectory], others: Sequence[Trajectory]) -> list[str]:
    """Lists groups of modules that never get gradients in the first runs, and get some in each step of each other."""
    return [
        module
        for module, norms in runs[0].gradients.items()
        if norms and not any(any(run.gradients[module]) for run in runs) and all(all(run.gradients[module]) for run in others)
    ]


_REPEATS_ROUNDINGS = 1 / 8
"""Roundings of the compute dtype by which the first loss of two eager runs may differ: relative to the loss, and to the change
that its gradient implies if all weights are off by their size, since a loss near zero may be a difference of large numbers.
Actual differences were 2e-7, in bfloat16 too: the rows of a batch round alike wherever they are.
"""

_REPEATS_SHARE = 1e-3
"""Fraction of the loss that is always allowed: convolutions round to TF32 where matrix products do not. This widens tolerances by
1 or 2%.
"""


def differs(references: References) -> str | None:
    """Says that eager steps with equal weights and rows do not repeat although they draw no random numbers; else None."""
    eager = references.eager
    if eager.random:
        return None
    for other in references.permuted:
        size = max(abs(loss) for run in (eager, other) for loss in run.losses)
        slope = sum(max(run.gradients[name][0] for run in (eager, other)) * norm for name, norm in eager.start_norms.items())
        allowed = _REPEATS_ROUNDINGS * references.rounding * (size + slope) + _REPEATS_SHARE * size
        if abs(eager.losses[0] - other.losses[0]) > allowed:
            return (
                f"two eager runs from the same weights on the same batch have losses {eager.losses[0]:.6g} and "
                f"{other.losses[0]:.6g}: something outside the model changes between runs; keep state in the model, or give "
                "loss_fn as an nn.Module"
            )
    return None


@dataclass(frozen=True, slots=True)
class _Comparison:
    respect: str
    module: str
    gap: Gap
    step_gaps: Sequence[float]  # gap of each step by itself; empty for figures taken once, after the last step

    @property
    def first_bad_step(self) -> int | None:
        """Index of the first step out of tolerance by itself; there is one whenever a mean over the steps is out."""
        if not self.step_gaps:
            return None
        limit = self.gap.tolerance or 0.0
        return next((step for step, gap in enumerate(self.step_gaps) if gap > limit), len(self.step_gaps) - 1)

    @property
    def text(self) -> str:
        what = f"{self.respect} of {self.module}" if self.module else self.respect
        times = f", {self.gap.share:.3g} times as much" if math.isfinite(self.gap.share) and self.gap.share > 1 else ""
        return f"{what}: off by {_percent(self.gap.gap)}, {_percent(self.gap.tolerance)} allowed{times}"


def _comparisons(compiled: Trajectory, references: References, about: ComparisonContext) -> Iterator[_Comparison]:
    runs, last = references.runs, references.runs[-1]
    every = (compiled, *runs)
    steps = len(compiled.losses)
    rarely = bool(about.random and references.perturbed) and any(
        steps_of_rare_chance([run.gradients[module] for run in runs]).any() for module in compiled.gradients
    )

    def compared(respect: Quantity, module: str, series: Sequence[Sequence[float]], sizes: Sequence[float]) -> _Comparison:
        own, *values = series
        gap, step_gaps = compare_series(respect, own, values, sizes, about)
        if rarely and gap.share > 1:
            gap = widened_by_chance(gap, own, values, about.calm)
        return _Comparison(respect.name, module, gap, step_gaps)

    yield compared(LOSS, "", [run.losses for run in every], [max(map(abs, last.losses))] * steps)
    if _outputs_compare(references):
        outputs, *eager = ([zero_infinities(elements) for elements in run.outputs] for run in every)
        gap, step_gaps = compare_outputs(outputs, eager, about)
        yield _Comparison("outputs", "", gap, step_gaps)
    whole = [math.hypot(*norms) for norms in zip(*last.gradients.values(), strict=True)]
    for module in compiled.gradients:
        weights = last.start_norms[module]
        ways = compiled.movement[module], [run.movement[module] for run in runs]
        moved = compare_movement(*ways, weights, steps, about)
        if rarely and moved.share > 1:
            moved = movement_widened_by_chance(moved, *ways)
        yield compared(GRADIENTS, module, [run.gradients[module] for run in every], whole)
        yield compared(UPDATES, module, [run.updates[module] for run in every], [weights] * steps)
        yield _Comparison("parameters", module, moved, [])
    for module in _moved_buffers(compiled, references):
        moved = compare_movement(
            compiled.buffers[module], [run.buffers[module] for run in runs], last.buffer_norms[module], steps, about
        )
        yield _Comparison("buffers", module, moved, [])


def _moved_buffers(compiled: Trajectory, references: References) -> list[str]:
    """Lists groups whose buffers some run moved, and every eager run moved to finite numbers."""
    runs = (compiled, *references.runs)
    return [module for module in _sound_buffers(compiled, references) if any(bool(run.buffers[module].any()) for run in runs)]


def _sound_buffers(compiled: Trajectory, references: References) -> list[str]:
    def is_sound(module: str) -> bool:
        return all(module in run.buffers and bool(run.buffers[module].isfinite().all()) for run in references.runs)

    return [module for module in compiled.buffers if is_sound(module)]


def _outputs_compare(references: References) -> bool:
    """Tells whether outputs can be compared element by element; those of other random numbers differ legitimately."""
    return bool(references.eager.outputs) and not references.scatters


def _circumstances(compiled: Trajectory, references: References) -> ComparisonContext:
    random = references.scatters
    norms = [[run.gradients[module] for run in references.runs] for module in compiled.gradients]
    return ComparisonContext(
        random=random,
        has_precise=references.precise is not None,
        rounding=references.rounding,
        comparisons=1 + _outputs_compare(references) + 3 * len(compiled.gradients) + len(_moved_buffers(compiled, references)),
        calm=calm_steps(norms) if random else range(len(compiled.losses)),
    )


def _percent(relative: float | None) -> str:
    return "an unknown amount" if relative is None else f"{100 * relative:.3g}%"


@dataclass(frozen=True, slots=True)
class _NotFinite:
    step: int
    text: str


def _not_finite(run: Trajectory) -> _NotFinite | None:
    """Returns the first number that is not finite, in the order in which a step computes them."""
    series = {
        "loss": run.losses,
        **{f"gradients of {module}": norms for module, norms in run.gradients.items()},
        **{f"updates of {module}": lengths for module, lengths in run.updates.items()},
    }
    found = [(step, what) for what, values in series.items() if (step := _first_not_finite(values)) is not None]
    if not found:
        return None
    step, what = min(found, key=lambda item: item[0])
    return _NotFinite(step, f"{what} of step {step}: not finite")


def _infinite_elsewhere(run: Trajectory, references: References) -> _NotFinite | None:
    """Returns the first step whose infinite outputs differ from run A's, in position among the samples or in number."""
    eager = references.eager
    pairs = zip(zip(run.outputs, run.infinities, strict=False), zip(eager.outputs, eager.infinities, strict=False), strict=False)
    for step, ((elements, counts), (expected, expected_counts)) in enumerate(pairs):
        if list(counts) != list(expected_counts) or not torch.equal(
            _signs_of_infinities(elements), _signs_of_infinities(expected)
        ):
            return _NotFinite(step, f"outputs of step {step}: infinite elsewhere than eager ones")
    return None


def _buffers_not_finite(compiled: Trajectory, references: References) -> _NotFinite | None:
    """Returns the first buffers that the compared steps moved to NaN or infinity, and no eager run did."""
    bad = (module for module in _sound_buffers(compiled, references) if not bool(compiled.buffers[module].isfinite().all()))
    return next((_NotFinite(len(compiled.losses) - 1, f"buffers of {module}: not finite") for module in bad), None)


def _signs_of_infinities(elements: Tensor) -> Tensor:
    return torch.where(elements.isinf(), elements.sign(), 0.0)


def _first_not_finite(values: Sequence[float], infinite: bool = False) -> int | None:
    """Returns the index of the first value that is NaN or, unless infinities are valid, infinite."""
    return next((step for step, value in enumerate(values) if math.isnan(value) or (math.isinf(value) and not infinite)), None)
