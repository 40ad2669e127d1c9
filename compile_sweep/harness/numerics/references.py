"""Eager runs that a compiled run is compared with, from the same weights on the same batches.

They differ in what right runs may differ in: A is eager as it is; B has other random numbers and the rows of each batch in
another order, so that sums over the batch round otherwise, unless the loss depends on that order; R computes in a precision
above the one under test, which shows how much of a difference is rounding. Where steps draw random numbers there is more than
one B, to know how far right runs scatter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.inspect_model import is_safe_to_copy
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory
from compile_sweep.harness.apply import TrainStep, applied
from compile_sweep.harness.distributed import everywhere, num_workers
from compile_sweep.harness.numerics.trajectory import Trajectory, make_recorder
from compile_sweep.harness.precision import matmul_precision, preserve_precision, use_full_precision
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.ddp_settings import Compression
from compile_sweep.schema.settings import Autocast, CompileSettings, MatmulPrecision

RANDOM_REPEATS = 3
"""Runs B where steps are random. With A and R that leaves Student's t 4 degrees of freedom at each step; with one B its 2 let
deviations of a single step pass that are ten times as large."""


class OriginalModel:
    """The model of the workload that was last asked for, as it was built.

    A trial needs six, and the random weights of a large one take seconds; a copy takes less.
    """

    def __init__(self) -> None:
        self._of: tuple[Workload, nn.Module | None] | None = None

    def copied(self, workload: Workload, device: torch.device) -> nn.Module:
        """A model of the workload's; one that a copy might not do justice to is built each time."""
        if self._of is None or self._of[0] is not workload:
            built = workload.build_model()
            if not is_safe_to_copy(built):
                self._of = workload, None
                return built
            self._of = workload, built
        if (original := self._of[1]) is not None:
            try:
                return _copied(original, device)
            except torch.OutOfMemoryError:  # the device's, of which the model is not to blame
                raise
            except Exception:  # what stands in the way of a copy may raise anything
                self._of = workload, None
        return workload.build_model()


def _copied(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose parameters and buffers are on the device, without a copy of them in between."""
    memo: dict[int, object] = {}
    for weights in model.parameters():
        if type(weights) is nn.Parameter:
            copied = nn.Parameter(weights.detach().to(device, copy=True), weights.requires_grad)
            vars(copied).update(vars(weights))  # what an optimizer goes by, say, and deepcopy leaves out
            memo[id(weights)] = copied
    memo |= {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers() if type(buffer) is Tensor}
    return copy.deepcopy(model, memo)


_original = OriginalModel()


def build_model_on(workload: Workload, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A model of the workload's with its starting weights, on the device; in another precision, if one is named."""
    on_gpu = device.type == "cuda"  # on a CPU memory is measured of the whole process, of which the original would be a part
    model = _original.copied(workload, device) if on_gpu else workload.build_model()
    model = model.to(device=device)
    return model if dtype is None else model._apply(partial(_in, dtype))  # Module.to would make complex tensors real ones


@contextmanager
def eager_reference(prepared: Prepared, *, seed: int | None = None) -> Iterator[tuple[nn.Module, TrainStep]]:
    """A model with the starting weights and an eager step of it that computes what the prepared settings should compute.

    Args:
        prepared: the settings under test.
        seed: of the random numbers drawn from here on; None for the workload's.
    """
    with _stepping(prepared.eager_counterpart(), prepared.workload.seed if seed is None else seed) as (model, step):
        yield model, step


@contextmanager
def _stepping(prepared: Prepared, seed: int, dtype: torch.dtype | None = None) -> Iterator[tuple[nn.Module, TrainStep]]:
    model = build_model_on(prepared.workload, prepared.device, dtype)
    optimizer = prepared.optimizer(model)
    seed_all(seed)
    with applied(prepared, model, optimizer) as step:
        yield model, step


def record_run(workload: Workload, model: nn.Module, step: TrainStep, batches: Sequence[Batch]) -> Trajectory:
    """Runs the step on the batches, once each, and says what happened."""
    recorder = make_recorder(workload, model, steps=len(batches))
    for batch in batches:
        recorder.step(step, batch)
    return recorder.trajectory()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class References:
    """The eager runs, and how precise they are."""

    eager: Trajectory
    """Run A."""
    permuted: Sequence[Trajectory]
    """Runs B."""
    precise: Trajectory | None
    """Run R; None where memory did not allow it, or float64 is under test."""
    precise_dtype: str | None
    """What run R computed in: float32, or float64 where float32 itself is under test; None without it."""
    rounding: float
    """Relative rounding error of one operation under the settings."""

    @property
    def runs(self) -> list[Trajectory]:
        """All of them, R last."""
        return [self.eager, *self.permuted, *([self.precise] if self.precise else [])]


def run_references(prepared: Prepared, batches: Sequence[Batch], *, eager: Trajectory | None = None) -> References:
    """Trains eagerly on the batches, each time from the start; all workers of a group must call it together.

    Args:
        prepared: the settings under test.
        batches: of the compared steps.
        eager: run A where the caller has recorded it already, with `recorded` in `eager_reference`.
    """
    workload, device = prepared.workload, prepared.device
    if eager is None:
        eager = _run(prepared, batches, workload.seed)
    # Inference sums over no rows, and its outputs are compared element by element.
    in_other_order = _in_other_order(workload, batches, device, eager) if workload.trains else batches
    memory.reset_peaks(device)
    seeds = range(workload.seed + 1, workload.seed + 1 + (RANDOM_REPEATS if eager.random else 1))
    permuted = [_run(prepared, in_other_order, seed) for seed in seeds]
    # Twice the precision takes twice the memory, of which has_room adds a factor of 1.6.
    room = round(1.25 * memory.read_peaks(device).in_use_bytes)
    rounding, above = precision_of(prepared.settings, workload.autocast_dtype(device), eager.weights)
    for dtype in above:
        # An error is caught only where no other worker waits for this one.
        if num_workers() > 1 and not everywhere(memory.has_room(room, device), device):
            continue
        precise = _precise(prepared, batches, dtype)
        if precise is not None:
            name = str(dtype).removeprefix("torch.")
            return References(eager=eager, permuted=permuted, precise=precise, precise_dtype=name, rounding=rounding)
    return References(eager=eager, permuted=permuted, precise=None, precise_dtype=None, rounding=rounding)


def _run(prepared: Prepared, batches: Sequence[Batch], seed: int) -> Trajectory:
    memory.free(prepared.device)
    with eager_reference(prepared, seed=seed) as (model, step):
        return record_run(prepared.workload, model, step, batches)


def _precise(prepared: Prepared, batches: Sequence[Batch], dtype: torch.dtype) -> Trajectory | None:
    memory.free(prepared.device)
    eager = prepared.settings.eager_counterpart()
    ddp = eager.ddp.exact() if eager.ddp is not None else None
    eager = replace(eager, autocast=Autocast.OFF, matmul_precision=MatmulPrecision.HIGHEST, ddp=ddp)
    seed = prepared.workload.seed + 1 + RANDOM_REPEATS
    try:
        with _full_precision(), _stepping(prepared.with_settings(eager), seed, dtype) as (model, step):
            return record_run(prepared.workload, model, step, [_as(dtype, batch) for batch in batches])
    except RuntimeError as error:  # out of memory, or a model with a dtype written into its forward, which is so in every worker
        if num_workers() > 1 and isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        return None


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TF32, in matrix products and in convolutions."""
    with preserve_precision():
        use_full_precision()
        yield


def _in_other_order(workload: Workload, batches: Sequence[Batch], device: torch.device, eager: Trajectory) -> Sequence[Batch]:
    """The same rows in another order, so that sums over the batch round otherwise; as they are where the order counts.

    It counts where a tensor is as long as a batch has rows but has none, such as weights of classes.
    """
    names = [name for name in batches[0].inputs if all(_has_rows(batch, name) for batch in batches)]
    permuted = [_permuted(batch, names) for batch in batches]
    return permuted if _have_one_loss(workload, batches[0], permuted[0], device, eager) else batches


def _has_rows(batch: Batch, name: str) -> bool:
    tensor = batch.inputs[name]
    return tensor.dim() > 0 and tensor.size(0) == batch.samples


def _permuted(batch: Batch, names: Sequence[str]) -> Batch:
    order = torch.randperm(batch.samples, generator=torch.Generator().manual_seed(batch.length))
    reordered = {name: batch.inputs[name][order.to(batch.inputs[name].device)] for name in names}
    return replace(batch, inputs={**batch.inputs, **reordered})


def _have_one_loss(workload: Workload, batch: Batch, other: Batch, device: torch.device, eager: Trajectory) -> bool:
    """Whether the loss of the two, without dropout, is the same but for rounding; not where it cannot be had."""
    memory.free(device)
    dtype = torch.promote_types(eager.weights, torch.float32)
    limit = _REORDERED_ROUNDINGS * torch.finfo(dtype).eps
    try:
        with _full_precision(), torch.no_grad():
            model = build_model_on(workload, device, dtype).train(not eager.random)
            seed_all(workload.seed)
            for weights in model.parameters():  # those that start at zero would hide what is behind them
                if weights.is_floating_point() or weights.is_complex():
                    weights.add_(_PERTURBATION * torch.randn_like(weights))
            losses = []
            for one in (batch, other):
                seed_all(workload.seed)
                losses.append(float(model(**_as(dtype, one).inputs)))
    except dist.DistError:
        raise
    except Exception:  # no memory, a dtype written into the forward, or a model that computes a loss only while it trains
        return False
    return math.isclose(*losses, rel_tol=limit)


_REORDERED_ROUNDINGS = 64
"""Relative, that the loss of reordered rows may be off by. Too few cost little: runs B then round as A does."""

_PERTURBATION = 0.02
"""Standard deviation; what GPT-2 and most since start their weights with."""


def _as(dtype: torch.dtype, batch: Batch) -> Batch:
    return replace(batch, inputs={name: _in(dtype, tensor) for name, tensor in batch.inputs.items()})


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor in that precision: real numbers stay real, complex ones complex, all others what they are."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def precision_of(
    settings: CompileSettings, autocast: torch.dtype | None, weights: torch.dtype
) -> tuple[float, list[torch.dtype]]:
    """Relative rounding error of one operation, and the dtypes that are above it, the best first."""
    rounding, above = _precision_of_compute(settings, autocast, weights)
    compression = settings.ddp.compression if settings.ddp is not None else None
    return max(rounding, _COMPRESSIONS_ROUNDING.get(compression, 0.0)), above


def compute_dtype(settings: CompileSettings, autocast: torch.dtype | None, weights: torch.dtype) -> torch.dtype:
    """What matrix products compute in: the settings' autocast, else the workload's, else the weights' own dtype."""
    named = {Autocast.BF16: torch.bfloat16, Autocast.FP16: torch.float16, Autocast.OFF: weights}
    return named[settings.autocast] if settings.autocast is not None else autocast or weights


_COMPRESSIONS_ROUNDING: Mapping[Compression | None, float] = {
    Compression.FP16: torch.finfo(torch.float16).eps / 2,
    Compression.BF16: torch.finfo(torch.bfloat16).eps / 2,
}
"""Of gradients on their way between workers."""


def _precision_of_compute(
    settings: CompileSettings, autocast: torch.dtype | None, weights: torch.dtype
) -> tuple[float, list[torch.dtype]]:
    if weights is torch.float64:  # autocast leaves it alone, and there is nothing above it
        return torch.finfo(weights).eps / 2, []
    compute = compute_dtype(settings, autocast, weights)
    if compute is not torch.float32:
        return torch.finfo(compute).eps / 2, [torch.float32]
    if (products := str(settings.matmul_precision or matmul_precision())) != "highest":
        return _PRODUCTS_ROUNDING[products], [torch.float32]
    return torch.finfo(compute).eps / 2, [torch.float64, torch.float32]


_PRODUCTS_ROUNDING = {"high": 2.0**-11, "medium": 2.0**-8}
"""TF32 has 10 bits behind the point, bfloat16 has 7; products are rounded to nearest."""
