"""Records the first steps of a training run: loss, gradients and parameters, by module.

Background: a run is compared with others on the same weights and batches, so each keeps a few numbers per step. They are
computed on the device and fetched once at the end, so that recording neither waits for the device nor changes the cost of a
step. Only a fixed random sample of a large tensor's elements is kept, the same in every run: a copy of the parameters would
raise the peak memory that is being measured.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from compile_sweep.contract.base import Batch, Workload, unwrap_ddp
from compile_sweep.contract.batches import unchanged
from compile_sweep.harness.apply import InferenceStep, TrainStep
from compile_sweep.harness.outputs import any_nan, count_infinities, rms, sample_elements, zero_infinities
from compile_sweep.schema.errors import WorkloadError

COMPARED_STEPS = 10

MAX_GROUPS = 40
"""Maximum number of groups. Above it, modules are named by fewer components, and consecutive blocks are merged."""

SAMPLED_ELEMENTS = 4096
"""Number of sampled elements per parameter tensor; smaller ones are kept whole. A norm of so many is off by about 1%, equally in
every run.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The first steps of a run; mappings go by module group, and are empty for inference."""

    losses: Sequence[float]
    gradients: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """2-norm of each group's gradients before the update, for each step."""
    updates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """2-norm of how far each group's parameters moved, for each step."""
    movement: Mapping[str, Tensor] = field(default_factory=dict)
    """Sampled elements of each group: position after the last step minus the start, on the CPU in float64, scaled so that the
    2-norm estimates that of the whole group.
    """
    start_norms: Mapping[str, float] = field(default_factory=dict)
    """2-norm of each group's parameters before the first step."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Like `movement`, for each group's floating-point buffers, such as running statistics."""
    buffer_norms: Mapping[str, float] = field(default_factory=dict)
    """2-norm of each group's buffers before the first step."""
    weights: torch.dtype
    """dtype of the parameters; of the buffers if an inference model has no parameters; otherwise torch's default."""
    random: bool
    """Whether the first step drew random numbers from torch, numpy or Python. The other steps then do so as well; so does
    autotuning.
    """
    outputs: Sequence[Tensor] = ()
    """For inference, sampled elements of each step's outputs, on the CPU in float64; empty for training."""
    infinities: Sequence[Sequence[int]] = ()
    """For inference, how many elements of each step's whole outputs are inf and -inf, by output; `losses` does not contain them.
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name, as `torch.save` writes them; `Trajectory(**values)` restores the trajectory."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def make_recorder(workload: Workload, model: nn.Module, *, steps: int = COMPARED_STEPS) -> Recorder | OutputRecorder:
    """Returns a recorder for the first steps of a run of this workload; takes the same arguments as `Recorder`."""
    return (Recorder if workload.trains else OutputRecorder)(workload, model, steps=steps)


class Recorder:
    """Records the first steps of one training run of the model, which may be in a `DistributedDataParallel`."""

    def __init__(self, workload: Workload, model: nn.Module, *, steps: int = COMPARED_STEPS) -> None:
        inner = unwrap_ddp(model)
        parameters = dict(inner.named_parameters())
        self._groups = {group: [parameters[name] for name in names] for group, names in module_groups(workload, inner).items()}
        self._steps = steps
        if not any(weights.requires_grad for weights in parameters.values()):
            raise WorkloadError(
                f"the model of {type(workload).__name__} has no parameters that train; for inference, trains=False"
            )
        first = next(weights for weights in parameters.values() if weights.requires_grad)  # frozen weights may be integers
        self._device, self._weights = first.device, first.dtype.to_real()
        self._sample = _Sample(self._groups)
        self._start = self._last = self._sample.values()
        self._sample_buffers = partial(_sampled_buffers, workload, inner, self._device)
        self._buffers_start = self._buffers_last = self._sample_buffers()
        self._losses: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._updates: list[Tensor] = []
        self._random = False

    @property
    def done(self) -> bool:
        """Tells whether all steps are recorded."""
        return len(self._losses) >= self._steps

    def step(self, step: TrainStep, batch: Batch) -> Tensor:
        """Runs `step` on the batch and returns its loss; records it unless recording is done."""
        if self.done:
            return step(batch)
        # One step is enough: a step that draws random numbers always does.
        states = None if self._losses else _generator_states(self._device)
        with unchanged(batch.inputs):
            loss = step(batch, before_update=self._record_gradients)
        if states is not None:
            self._random = states != _generator_states(self._device)
        values = self._sample.values()
        self._updates.append(_norms([now - before for now, before in zip(values, self._last, strict=True)]))
        self._last = values
        self._losses.append(loss)
        if self.done:
            self._buffers_last = self._sample_buffers()
        return loss

    def trajectory(self) -> Trajectory:
        """Returns what was recorded; waits for the device."""
        names = list(self._groups)
        gradients, updates = (_columns(rows) for rows in (self._gradients, self._updates))
        moved = [(now - before).cpu() for now, before in zip(self._last, self._start, strict=True)]
        return Trajectory(
            losses=_columns([loss.reshape(1) for loss in self._losses])[0] if self._losses else [],
            gradients=dict(zip(names, gradients, strict=bool(gradients))),
            updates=dict(zip(names, updates, strict=bool(updates))),
            movement=dict(zip(names, moved, strict=True)),
            start_norms=dict(zip(names, _norms(self._start).tolist(), strict=True)),
            buffers={
                group: torch.where(now == before, 0.0, now - before).cpu()  # a mask's -inf stays unchanged
                for group, now in self._buffers_last.items()
                if (before := self._buffers_start.get(group)) is not None and before.shape == now.shape
            },
            buffer_norms={
                group: float(torch.linalg.vector_norm(start.nan_to_num(0, 0, 0))) for group, start in self._buffers_start.items()
            },
            weights=self._weights,
            random=self._random,
        )

    def _record_gradients(self) -> None:
        norms = []
        for parameters in self._groups.values():
            gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
            norms.append(get_total_norm(gradients).double() if gradients else self._start[0].new_zeros(()))
        self._gradients.append(torch.stack(norms))


class OutputRecorder:
    """Records the first steps of one inference run; takes the same arguments as `Recorder`."""

    def __init__(self, workload: Workload, model: nn.Module, *, steps: int = COMPARED_STEPS) -> None:
        held = [*model.parameters(), *model.buffers()]  # an inference model may lack either
        self._weights = next((one.dtype for one in held if one.is_floating_point()), torch.get_default_dtype())
        self._device = held[0].device if held else None
        self._steps = steps
        self._digests: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._infinities: list[Tensor] = []
        self._random = False

    @property
    def done(self) -> bool:
        return len(self._digests) >= self._steps

    def step(self, step: TrainStep, batch: Batch) -> Tensor:
        """Runs `step` on the batch and returns the digest of its outputs; records them unless recording is done."""
        if self.done:
            return step(batch)
        device = self._device or next((tensor.device for tensor in batch.inputs.values()), torch.device("cpu"))
        states = None if self._digests else _generator_states(device)
        with unchanged(batch.inputs):
            found = step(batch)
        assert isinstance(step, InferenceStep)
        if states is not None:
            self._random = states != _generator_states(device)
        elements = sample_elements(step.outputs)
        self._outputs.append(elements)
        self._infinities.append(count_infinities(step.outputs))
        self._digests.append(torch.where(any_nan(step.outputs), torch.nan, rms(zero_infinities(elements))))
        step.outputs = ()
        return found

    def trajectory(self) -> Trajectory:
        return Trajectory(
            losses=_columns([found.reshape(1) for found in self._digests])[0] if self._digests else [],
            weights=self._weights,
            random=self._random,
            outputs=[elements.cpu().double() for elements in self._outputs],
            infinities=[counts.tolist() for counts in self._infinities],
        )


class _Sample:
    """A sample of elements of each group's tensors, the same for equal shapes."""

    def __init__(self, groups: Mapping[str, Sequence[Tensor]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._chosen: list[list[tuple[Tensor, Tensor | None]]] = []
        self._scales: list[Tensor] = []
        for parameters in groups.values():
            chosen: list[tuple[Tensor, Tensor | None]] = []
            scales = []
            for parameter in parameters:
                total = local_shard(parameter).numel()
                count = min(total, SAMPLED_ELEMENTS)
                where = None
                if count < total:
                    where = torch.randint(total, (count,), generator=generator).to(parameter.device)
                chosen.append((parameter, where))
                scales.append(torch.full((count,), math.sqrt(total / max(1, count)), dtype=torch.float64))
            self._chosen.append(chosen)
            self._scales.append(torch.cat(scales).to(parameters[0].device))

    @torch.no_grad()
    def values(self) -> list[Tensor]:
        """Returns a copy of the sampled elements, one tensor per group."""
        kept = [[_elements(parameter, where) for parameter, where in chosen] for chosen in self._chosen]
        return [torch.cat(group) * scale for group, scale in zip(kept, self._scales, strict=True)]


def _sampled_buffers(workload: Workload, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Returns sampled elements of floating-point buffers, by group; looked up by name, since a step may replace a buffer."""
    buffers = {name: held for name, held in model.named_buffers() if held.is_floating_point() and held.device == device}
    groups = group_by_module(workload, model, buffers)
    sample = _Sample({group: [buffers[name] for name in names] for group, names in groups.items()})
    return dict(zip(groups, sample.values(), strict=True))


def _dense(gradient: Tensor) -> Tensor:
    """Returns the gradient or, if it is sparse, its stored elements, which have the same norm."""
    return gradient.coalesce().values() if gradient.is_sparse else local_shard(gradient)


def local_shard(tensor: Tensor) -> Tensor:
    """Returns the tensor, or this worker's shard if FSDP2 or tensor parallelism shards it; shards are compared with shards."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _elements(parameter: Tensor, where: Tensor | None) -> Tensor:
    flat = local_shard(parameter).reshape(-1)
    return flat if where is None else flat[where]


def module_groups(workload: Workload, model: nn.Module) -> dict[str, list[str]]:
    """Returns the names of the trained parameters by group of modules; see `group_by_module`."""
    return group_by_module(workload, model, [name for name, parameter in model.named_parameters() if parameter.requires_grad])


def group_by_module(workload: Workload, model: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Groups names of parameters or buffers by module, into about `MAX_GROUPS` groups at most.

    Each of the workload's repeated blocks is a group; others go by the module that owns them.
    """
    blocks = list(workload.regions(model))
    together = max(1, math.ceil(len(blocks) / (MAX_GROUPS * 3 // 4)))
    runs = [blocks[i : i + together] for i in range(0, len(blocks), together)]
    group_of = {block: run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs for block in run}
    deepest = max((name.count(".") for name in names), default=0)
    groups: dict[str, list[str]] = {}
    for components in range(max(deepest, 1), 0, -1):
        groups = {}
        for name in names:
            group = next((group_of[above] for above in _above(name) if above in group_of), None)
            groups.setdefault(group or ".".join(name.split(".")[:-1][:components]) or name, []).append(name)
        if len(groups) <= MAX_GROUPS:
            break
    return groups


def _above(name: str) -> Iterator[str]:
    """Yields the dotted names of the modules that contain a parameter, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])


def _columns(rows: Sequence[Tensor]) -> list[list[float]]:
    return torch.stack([row.double() for row in rows]).T.tolist() if rows else []


def _generator_states(device: torch.device) -> list[object]:
    """Returns comparable states of torch's, numpy's and Python's random generators."""
    torchs = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [*(state.tolist() for state in torchs), pickle.dumps(np.random.get_state(legacy=False)), random.getstate()]
