"""The `Workload` contract: what a sweep must know about a training or inference step, and the lookup of workloads by name.

A workload builds its model, batches and optimizer, and names the parts of the model that are worth compiling separately. It knows
nothing about compile settings except the shape policy that its batches are padded by.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from compile_sweep.contract.inspect_model import preferred_memory_format, without_values
from compile_sweep.contract.options import (
    Option,
    check_inference,
    check_options,
    check_own_step,
    default_options,
    for_real_lengths,
)
from compile_sweep.contract.workload_names import find_workload, import_named
from compile_sweep.schema.choices import MemoryFormat, optimizer_options
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import Attention, CompileSettings, OptimizerKind
from compile_sweep.schema.shapes import ShapePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one step for one worker, on its device."""

    inputs: Mapping[str, Tensor]
    """Keyword arguments of the model's forward."""
    length: int
    """Padded length, in tokens."""
    samples: int
    tokens: int
    """Useful tokens, without padding."""

    def pin_memory(self) -> Self:
        """Copies the batch to page-locked memory, from which a GPU copy does not block; a DataLoader calls this."""
        return replace(self, inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()})

    def to(self, device: torch.device) -> Self:
        """Copies the batch to `device`; a copy from page-locked memory may still be in progress on return."""
        return replace(self, inputs={name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()})


class Workload(ABC):
    """A training or inference step that can be measured under compile settings.

    Args:
        size: One of `sizes`.
        seed: Determines weights and data; equal seeds give equal samples in equal order, whatever the settings.

    Raises:
        WorkloadError: `size` is not one of `sizes`.
    """

    sizes: ClassVar[tuple[str, ...]]
    """Names of the sizes, the real one first."""
    batch_size: int
    """Samples per step and worker."""
    max_length: int
    """Longest sequence, in tokens."""
    min_length: int = 1
    """Tokens in the shortest possible batch; padded lengths that only shorter batches would use are not warmed up."""
    pool_batches: int
    """Number of distinct batches in a steady-state pass."""
    learning_rate: float = 1e-4
    """Learning rate of the optimizer. It does not affect timing, and a small one keeps the numerics check sharp."""
    trains: bool = True
    """False for inference: no optimizer, the model in evaluation mode, and a forward that returns outputs instead of a loss."""
    grad_mode: str = "inference_mode"
    """How an inference step disables autograd: torch's `inference_mode` or `no_grad`."""
    average_decay: float | None = None
    """Decay of an exponential moving average (EMA) of the weights, kept by the training step; None for no average."""
    has_own_step: bool = False
    """Whether the model's forward runs the backward pass, too, so that it is not compiled as a whole."""
    clip_grad_norm: float | None = None
    """Maximum norm of all gradients together, to which a training step clips them; None for no clipping."""
    options: ClassVar[Mapping[str, Option]] = {}
    """Variations of the workload that settings may choose, as `workload.NAME=value`."""
    job_options: ClassVar[frozenset[str]] = frozenset()
    """Those `options` that change what a sample is. All settings of a sweep must agree on them to be comparable."""
    needs_gpu: ClassVar[Mapping[tuple[str, Scalar], str]] = {}
    """Option values that need a GPU, with the reason."""
    convolutional: ClassVar[bool | None] = None
    """Whether convolutions do much of the work, so that memory formats are tried. None finds out by building the model."""
    chosen: Mapping[str, Scalar]
    """The option values in effect."""

    def __init__(self, size: str, seed: int) -> None:
        if size not in self.sizes:
            raise WorkloadError(f"{type(self).__name__} has no size {size!r}; use one of {', '.join(self.sizes)}")
        self.size = size
        self.seed = seed
        self.chosen = default_options(self.options)

    @property
    def has_one_shape(self) -> bool:
        """Whether every batch has the same shape, so that none is padded."""
        return self.min_length == self.max_length

    @property
    def unpadded_reason(self) -> str | None:
        """Why batches are used without padding; None if they are padded as the settings say."""
        return None

    @property
    def pads(self) -> bool:
        """Whether batches are padded as settings say."""
        return self.unpadded_reason is None

    def shape_policy(self, settings: CompileSettings) -> ShapePolicy:
        """Returns the policy that batches are made and padded by under these settings."""
        return settings.shape_policy(self.max_length, self.min_length)

    def remarks(self, policy: ShapePolicy | None = None) -> Sequence[str]:
        """Returns sentences for the record about what was done to batches and model.

        Args:
            policy: Policy that batches are padded by; None to leave out padding.
        """
        return ()

    def under(self, settings: CompileSettings) -> Self:
        """Returns this workload with the options that the settings ask for; itself if it already has them.

        Raises:
            SettingsError: The settings do not fit the workload.
        """
        self.validate(settings)
        wanted = {**default_options(self.options), **dict(settings.workload or ())}
        if wanted == dict(self.chosen):
            return self
        made = type(self)(self.size, self.seed)
        made.take(wanted)
        return made

    def validate(self, settings: CompileSettings) -> None:
        """Checks that settings can work with this workload.

        Raises:
            SettingsError: The settings do not fit its lengths, options or kind of step.
        """
        if (why := self.unpadded_reason) is not None:
            for_real_lengths(settings, why)
        else:
            settings.validate_for(self.max_length, self.min_length)
        check_options(type(self).__name__, self.options, settings)
        if self.has_own_step:
            check_own_step(type(self).__name__, settings)
        if not self.trains:
            check_inference(type(self).__name__, settings)

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        """Applies values of `options` before anything is built; `batch_size`, if it is an option, sets the batch size."""
        self.chosen = chosen
        if "batch_size" in chosen:
            self.batch_size = int(chosen["batch_size"])

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the model on the CPU. Its forward takes a batch's inputs and returns the scalar loss.

        The model is in training mode. For an inference workload it is in evaluation mode, and its forward returns tensors.
        """

    @abstractmethod
    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        """Returns the batches of a steady-state pass: the same samples under every policy, batched as the policy says."""

    @abstractmethod
    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        """Returns a batch padded to exactly `length` tokens, to warm up lengths that the pool happens not to contain."""

    def batches_of_length(self, length: int, *, rank: int, device: torch.device) -> Sequence[Batch]:
        """Returns a batch of each kind at that length: batches that hold the same tensors are of one kind."""
        return [self.batch_of_length(length, rank=rank, device=device)]

    @abstractmethod
    def regions(self, model: nn.Module) -> Sequence[str]:
        """Returns the dotted names of the model's repeated blocks, for scope=regional."""

    @abstractmethod
    def parts(self) -> Sequence[str]:
        """Returns the dotted names of the modules that scope=modular compiles separately; together they are the whole step."""

    @abstractmethod
    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        """Returns, for each tensor argument of a module's forward that depends on the length, the dimensions that do.

        `pair.0` is the first tensor in an argument `pair` that is a list, tuple or dictionary.

        Args:
            module: A name from `regions` or `parts`, or `""` for the whole model.
        """

    def row_lengths(self) -> Sequence[int]:
        """Returns the lengths of a representative sample of rows, in tokens and in training order, to optimize buckets for.

        Raises:
            WorkloadError: The workload does not know its row lengths.
        """
        raise WorkloadError(f"{type(self).__name__} does not say how long its rows are, which num_buckets needs; name buckets")

    def loader(self, policy: ShapePolicy, *, rank: int) -> Iterable[Batch]:
        """Returns the workload's own input pipeline, for `--pipeline real`: endless CPU batches, pinned if there is a GPU.

        Raises:
            WorkloadError: The workload has no input pipeline.
        """
        raise WorkloadError(f"{type(self).__name__} has no loader for --pipeline real; write one, or use --pipeline resident")

    def attention_statement(self, attention: Attention) -> str:
        """Returns a Python statement that switches `inner`, the unwrapped model, to this attention implementation.

        Raises:
            SettingsError: The workload offers no choice of attention.
        """
        raise SettingsError(f"{type(self).__name__} has one attention implementation; leave attention={attention} out")

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        """Applies the process-wide settings that the workload needs, entered before its model is built. None by default.

        If `process_statements` returns any, this context is entered inside itself as well, and must restore what they set.
        """
        yield

    def process_statements(self) -> Sequence[str]:
        """Returns the process-wide settings as Python statements for measured and exported source; they may only use torch.

        The default has none. Settings that are only in `process_settings` are missing wherever an export is pasted.
        """
        return ()

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        """Returns the autocast dtype on this device; None for no autocast."""
        return torch.bfloat16 if device.type == "cuda" else None

    def memory_format(self) -> MemoryFormat | None:
        """Returns the memory format that is worth trying besides torch's default, or None."""
        if self.convolutional is False:
            return None
        try:
            with without_values():
                # A separate workload, because this one may keep the model that it built.
                return preferred_memory_format(type(self)(self.size, self.seed).build_model())
        except Exception:  # some models can only be built with values; they get no proposal
            return None

    def optimizer(self, model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer | None:
        """Returns Adam over the model's parameters; None for an inference workload."""
        if not self.trains:
            return None
        options: dict[str, Any] = optimizer_options(kind)
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate, **options)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Returns the learning-rate scheduler, whose `step()` is called after each step; None by default."""
        return None


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Returns the model inside a `DistributedDataParallel`, or the model itself."""
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


_NAMED = 5  # number of a module's workloads that an error names


def _workloads_in(module: str) -> Iterator[str]:
    """Yields the names of the workloads in an imported module, except what it has from this package."""
    for name, value in [*vars(sys.modules[module]).items()]:
        if isinstance(value, type) and issubclass(value, Workload) and not value.__module__.startswith("compile_sweep."):
            yield name


def load_workload(name: str) -> type[Workload]:
    """Returns the workload class called `name`: a built-in one, one from an installed package, or the user's own.

    Args:
        name: A short name, `package.module:Class` or `path/to/file.py:Class`.

    Raises:
        WorkloadError: There is no such workload, its module does not import, or it is not a `Workload`.
    """
    module, class_name = find_workload(name)
    found = import_named(name)
    if found is None:
        there = [*_workloads_in(module)]
        hint = (
            f"use {', '.join(get_close_matches(class_name, there, n=1) or there[:_NAMED])}"
            if there
            else "it has no workload at all"
        )
        raise WorkloadError(f"workload {name!r}: {module} has no class {class_name}; {hint}")
    if not isinstance(found, type) or not issubclass(found, Workload):
        raise WorkloadError(f"workload {name!r}: {class_name} in {module} is not a subclass of compile_sweep.Workload")
    if not getattr(found, "sizes", ()):
        raise WorkloadError(f"workload {name!r}: {class_name} has no sizes; name one or more, like sizes = ('base', 'tiny')")
    return found
