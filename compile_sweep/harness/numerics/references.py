"""Eager runs that a compiled run is compared with, from the same weights and on the same batches.

They differ in ways that right runs may differ: A is plain eager; B has other random numbers and the rows of each batch in
another order, so that sums over the batch round differently, unless the loss depends on that order; R computes in a precision
above the one under test, which shows how much of a difference is rounding. If steps draw random numbers, there is more than
one B, to know how far right runs scatter.
"""

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.inspect_model import is_safe_to_copy
from compile_sweep.contract.precision import full_precision, matmul_precision
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory
from compile_sweep.harness.apply import TrainStep, applied
from compile_sweep.harness.distributed import everywhere, num_workers
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.tolerance import COARSE_FACTOR, FLOAT8_ROUNDING, FLOAT32_ROUNDING
from compile_sweep.harness.numerics.trajectory import Trajectory, local_shard, make_recorder
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.ddp_settings import Compression
from compile_sweep.schema.errors import CompileSweepError
from compile_sweep.schema.outcome import is_out_of_memory
from compile_sweep.schema.settings import Autocast, CompileSettings, MatmulPrecision

RANDOM_REPEATS = 3
"""Number of runs B if steps are random. With A and R that leaves Student's t 4 degrees of freedom at each step; the 2 of a single
B let deviations of one step pass that are ten times as large.
"""


class OriginalModel:
    """The most recently requested workload's model, as it was built.

    A trial needs six models, and drawing the random weights of a large one takes seconds; a copy takes less.
    """

    def __init__(self) -> None:
        self._of: tuple[Workload, nn.Module | None] | None = None

    def copied(self, workload: Workload, device: torch.device) -> nn.Module:
        """Returns a copy of the workload's model; builds it anew if a copy might not be faithful."""
        if self._of is None or self._of[0] is not workload:
            built = workload.build_model()
            if not is_safe_to_copy(built):
                self._of = workload, None
                return built
            self._of = workload, built
        if (original := self._of[1]) is not None:
            try:
                return _copied(original, device)
            except Exception as error:  # what prevents a copy may raise anything
                if is_out_of_memory(error):  # of the device's memory, which is not the model's fault
                    raise
                self._of = workload, None
        return workload.build_model()


def _copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Copies a model with its parameters and buffers directly to the device, without an intermediate copy."""
    memo: dict[int, object] = {}
    for weights in model.parameters():
        if type(weights) is nn.Parameter:
            copied = nn.Parameter(weights.detach().to(device, copy=True), weights.requires_grad)
            vars(copied).update(vars(weights))  # attributes, such as those an optimizer reads, which deepcopy drops
            memo[id(weights)] = copied
    memo |= {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers() if type(buffer) is Tensor}
    return copy.deepcopy(model, memo)


_original = OriginalModel()


def build_model_on(workload: Workload, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Builds the workload's model with its starting weights on the device, optionally in another dtype."""
    on_gpu = device.type == "cuda"  # on a CPU, the process's memory is measured, and the original would count
    model = _original.copied(workload, device) if on_gpu else workload.build_model()
    model = model.to(device=device)
    return model if dtype is None else model._apply(partial(_in, dtype))  # Module.to would make complex tensors real


def eager_reference(prepared: Prepared, *, seed: int | None = None) -> AbstractContextManager[tuple[nn.Module, TrainStep]]:
    """Yields a fresh model and an eager step that computes what the prepared settings should; draws from `seed` on."""
    return _stepping(prepared.eager_counterpart(), prepared.workload.seed if seed is None else seed)


@contextmanager
def _stepping(prepared: Prepared, seed: int, dtype: torch.dtype | None = None) -> Iterator[tuple[nn.Module, TrainStep]]:
    model = build_model_on(prepared.workload, prepared.device, dtype)
    optimizer = prepared.optimizer(model)
    seed_all(seed)
    with applied(prepared, model, optimizer) as step:
        yield model, step


_start: list[tuple[Workload, PythonState]] = []
"""What the user's files held when the most recent workload's first run started."""


def keep_start(workload: Workload, model: nn.Module) -> None:
    """Notes what the user's files hold, such as a global counter, for later runs to start from."""
    _start[:] = [(workload, PythonState(model, inside=False))]


def changed_in_classes(workload: Workload) -> list[str]:
    """Returns what a class of the user's files held at the start of the most recent workload's first run and has changed."""
    return [name for one, state in _start if one is workload for name in state.classes.changed()]


def record_run(workload: Workload, model: nn.Module, step: TrainStep, batches: Sequence[Batch]) -> Trajectory:
    """Runs the step once on each batch from what the user's files held at the start, and returns the recorded trajectory."""
    recorder = make_recorder(workload, model, steps=len(batches))
    now = PythonState(model, inside=False)
    for _, state in (one for one in _start if one[0] is workload):
        state.put_back()
    try:
        for batch in batches:
            recorder.step(step, batch)
    finally:
        now.put_back()  # a compiled run beside it goes on from there
    return recorder.trajectory()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class References:
    """The eager runs, and how precise they are."""

    eager: Trajectory  # run A
    permuted: Sequence[Trajectory]  # runs B
    precise: Trajectory | None  # run R; None if memory did not allow it, or if float64 is under test
    precise_dtype: str | None  # dtype of run R: float32, or float64 if float32 itself is under test; None without run R
    rounding: float  # relative rounding error of one operation under the settings
    perturbed: Sequence[Trajectory] = ()  # runs whose weights start as far away as rounding, made if a run is doubtful
    same_draws: bool = False  # whether all runs drew the random numbers that A did

    @property
    def scatters(self) -> bool:
        """Whether right runs draw other random numbers than A, so that they scatter around it."""
        return self.eager.random and not self.same_draws

    @property
    def runs(self) -> list[Trajectory]:
        """All runs, R last."""
        return [self.eager, *self.permuted, *self.perturbed, *([self.precise] if self.precise else [])]


def run_references(prepared: Prepared, batches: Sequence[Batch], *, eager: Trajectory | None = None) -> References:
    """Trains eagerly on the batches, each time from the start; all workers of a group must call this together."""
    workload, device = prepared.workload, prepared.device
    if eager is None:
        eager = _run(prepared, batches, workload.seed)
    # Inference has no sums over rows, and its outputs are compared element by element.
    parts = prepared.settings.accumulate or 1
    in_other_order = _in_other_order(workload, batches, device, eager, parts) if workload.trains else batches
    memory.reset_peaks(device)
    seeds = range(workload.seed + 1, workload.seed + 1 + (RANDOM_REPEATS if eager.random else 1))
    permuted = [_run(prepared, in_other_order, seed) for seed in seeds]
    # Twice the precision takes twice the memory; has_room multiplies by 1.6.
    room = round(1.25 * memory.read_peaks(device).in_use_bytes)
    rounding, above = precision_of(prepared.settings, workload.autocast_dtype(device), eager.weights)
    for dtype in above:
        # An error is caught only if no other worker waits for this one.
        if num_workers() > 1 and not everywhere(memory.has_room(room, device), device):
            continue
        precise = _precise(prepared, batches, dtype)
        if precise is not None:
            name = str(dtype).removeprefix("torch.")
            return References(eager=eager, permuted=permuted, precise=precise, precise_dtype=name, rounding=rounding)
    return References(eager=eager, permuted=permuted, precise=None, precise_dtype=None, rounding=rounding)


def with_perturbed_runs(prepared: Prepared, batches: Sequence[Batch], references: References) -> References:
    """Returns the references with further eager runs, which workers make together.

    Their weights start as far away as a less precise kernel rounds, and their random numbers are others.
    """
    first = prepared.workload.seed + RANDOM_REPEATS + 2
    count = MORE_RANDOM if references.eager.random else MORE_PERTURBED
    error = kernel_rounding(references.rounding)
    more = [_run(prepared, batches, first + number, perturbed_by=error) for number in range(count)]
    return replace(references, perturbed=more)


def with_the_same_draws(prepared: Prepared, batches: Sequence[Batch], references: References) -> References:
    """Returns eager run A, and runs that draw the same random numbers from weights as far away as a less precise kernel rounds.

    Run R is left out, since a step in another dtype may draw others.
    """
    error, seed = kernel_rounding(references.rounding), prepared.workload.seed
    draws = range(seed + 1, seed + 1 + MORE_PERTURBED)
    alike = [_run(prepared, batches, seed, perturbed_by=error, perturbation=draw) for draw in draws]
    return replace(references, permuted=[], precise=None, precise_dtype=None, perturbed=alike, same_draws=True)


MORE_PERTURBED = 5
"""Number of further eager runs before a deterministic run that is not far out is said to diverge."""

MORE_RANDOM = 8
"""The same for random runs: of 12 in all, some show what random numbers do that act in one step of a hundred."""


def kernel_rounding(rounding: float) -> float:
    """Returns the relative error by which kernels for the same operation may differ, given the rounding of its dtype.

    In float32 most of it is how sums are taken; in half precision, the rounding of each result is more than that.
    """
    return rounding * COARSE_FACTOR if rounding <= FLOAT32_ROUNDING else rounding


PERTURBED_ROUNDINGS = 2.0
"""Maximum change of a perturbed run's weights, in roundings of the compute dtype; rounding once is half of that."""


def perturb(parameters: Iterable[Tensor], rounding: float, seed: int = 1) -> None:
    """Changes every weight by a few roundings at random, relative to itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in parameters:
            if weights.requires_grad and weights.is_floating_point():
                shard = local_shard(weights)
                noise = torch.rand(shard.shape, generator=generator, dtype=torch.float32).mul_(2).sub_(1)
                shard.mul_(1 + PERTURBED_ROUNDINGS * rounding * noise.to(shard.device, shard.dtype))


def _run(
    prepared: Prepared, batches: Sequence[Batch], seed: int, *, perturbed_by: float | None = None, perturbation: int | None = None
) -> Trajectory:
    memory.free(prepared.device)
    with eager_reference(prepared, seed=seed) as (model, step):
        if perturbed_by is not None:
            perturb(model.parameters(), perturbed_by, seed if perturbation is None else perturbation)
        return record_run(prepared.workload, model, step, batches)


def _precise(prepared: Prepared, batches: Sequence[Batch], dtype: torch.dtype) -> Trajectory | None:
    memory.free(prepared.device)
    eager = prepared.settings.eager_counterpart()
    ddp = eager.ddp.exact() if eager.ddp is not None else None
    eager = replace(eager, autocast=Autocast.OFF, matmul_precision=MatmulPrecision.HIGHEST, ddp=ddp)
    seed = prepared.workload.seed + 1 + RANDOM_REPEATS
    try:
        with full_precision(), _stepping(prepared.with_settings(eager), seed, dtype) as (model, step):
            return record_run(prepared.workload, model, step, [_as(dtype, batch) for batch in batches])
    except CompileSweepError:
        raise
    except Exception as error:  # out of memory, or a dtype written or checked in the forward, which then fails in every worker
        if num_workers() > 1 and (is_out_of_memory(error) or isinstance(error, dist.DistError)):
            raise
        return None


def _in_other_order(
    workload: Workload, batches: Sequence[Batch], device: torch.device, eager: Trajectory, parts: int
) -> Sequence[Batch]:
    """Returns the rows in another order, so that sums over the batch round differently; unchanged if the order matters.

    The order matters if a tensor is as long as a batch has rows without being one row each, such as weights of classes. Rows stay
    in the part of the batch that they are accumulated in, because a mean over parts may weigh samples by what is beside them.
    """
    held = {name: [batch for batch in batches if name in batch.inputs] for one in batches for name in one.inputs}
    names = [name for name, having in held.items() if all(_has_rows(batch, name) for batch in having)]
    permuted = [_permuted(batch, names, parts) for batch in batches]
    return permuted if _have_one_loss(workload, batches[0], permuted[0], device, eager) else batches


def _has_rows(batch: Batch, name: str) -> bool:
    tensor = batch.inputs[name]
    return tensor.layout is torch.strided and tensor.dim() > 0 and tensor.size(0) == batch.samples


def _permuted(batch: Batch, names: Collection[str], parts: int) -> Batch:
    generator, size = torch.Generator().manual_seed(batch.length), batch.samples // parts
    order = torch.cat([part * size + torch.randperm(size, generator=generator) for part in range(parts)])
    reordered = {}
    for name in batch.inputs.keys() & names:
        tensor = batch.inputs[name]  # an earlier step may have called requires_grad_() on it
        reordered[name] = tensor.detach()[order.to(tensor.device)].requires_grad_(tensor.requires_grad)
    return replace(batch, inputs={**batch.inputs, **reordered})


def _have_one_loss(workload: Workload, batch: Batch, other: Batch, device: torch.device, eager: Trajectory) -> bool:
    """Tells whether both batches' loss, without dropout, is equal except for rounding; false if it cannot be computed."""
    memory.free(device)
    dtype = torch.promote_types(eager.weights, torch.float32)
    limit = _REORDERED_ROUNDINGS * torch.finfo(dtype).eps
    try:
        with full_precision(), torch.no_grad():
            model = build_model_on(workload, device, dtype).train(not eager.random)
            seed_all(workload.seed)
            for weights in model.parameters():  # weights that start at zero would hide what is behind them
                if weights.is_floating_point() or weights.is_complex():
                    weights.add_(_PERTURBATION * torch.randn_like(weights))
            losses = []
            for one in (batch, other):
                seed_all(workload.seed)
                losses.append(float(model(**_as(dtype, one).inputs)))
    except dist.DistError:
        raise
    except Exception:  # no memory, a dtype written into the forward, or a model that computes a loss only in training
        return False
    return math.isclose(*losses, rel_tol=limit)


_REORDERED_ROUNDINGS = 64
"""Relative error allowed for the loss of reordered rows, in roundings. Too few cost little: runs B then round like A."""

_PERTURBATION = 0.02
"""Standard deviation of the perturbation; that of the starting weights of GPT-2 and most models since."""


def _as(dtype: torch.dtype, batch: Batch) -> Batch:
    return replace(batch, inputs={name: _in(dtype, tensor) for name, tensor in batch.inputs.items()})


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Converts a tensor to that precision: real numbers stay real, complex ones complex, all others unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def precision_of(
    settings: CompileSettings, autocast: torch.dtype | None, weights: torch.dtype
) -> tuple[float, list[torch.dtype]]:
    """Returns the relative rounding error of one operation, and the dtypes that are more precise, the best first."""
    compute = compute_dtype(settings, autocast, weights)
    rounding, above = torch.finfo(compute).eps / 2, [torch.float32]
    if weights is torch.float64:  # autocast leaves float64 alone, and nothing is more precise
        rounding, above = torch.finfo(weights).eps / 2, []
    elif compute is torch.float32:
        products = str(settings.matmul_precision or matmul_precision())
        rounding, above = PRODUCTS_ROUNDING[products], [torch.float64, torch.float32] if products == "highest" else above
    compression = settings.ddp.compression if settings.ddp is not None else None
    float8 = FLOAT8_ROUNDING if settings.float8 is not None else 0.0
    return max(rounding, _COMPRESSIONS_ROUNDING.get(compression, 0.0), float8), above


def compute_dtype(settings: CompileSettings, autocast: torch.dtype | None, weights: torch.dtype) -> torch.dtype:
    """Returns the dtype of matrix products: the settings' autocast, else the workload's, else the weights' own dtype."""
    named = {Autocast.BF16: torch.bfloat16, Autocast.FP16: torch.float16, Autocast.OFF: weights}
    return named[settings.autocast] if settings.autocast is not None else autocast or weights


_COMPRESSIONS_ROUNDING: Mapping[Compression | None, float] = {
    Compression.FP16: torch.finfo(torch.float16).eps / 2,
    Compression.BF16: torch.finfo(torch.bfloat16).eps / 2,
}
"""Relative rounding error of gradients as they are sent between workers."""


PRODUCTS_ROUNDING = {"highest": FLOAT32_ROUNDING, "high": 2.0**-11, "medium": 2.0**-8}
"""TF32 has 10 fraction bits, bfloat16 has 7; products are rounded to nearest."""
