"""The `Workload` contract: what a sweep must know of a training or inference step, and how workloads are found by name.

A workload says how to build its model, its batches and its optimizer, and which parts of the model are worth compiling on
their own. It knows nothing of compile settings beyond the shape policy its batches are padded by.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from compile_sweep.contract.options import Option, check_inference, check_options, default_options
from compile_sweep.schema.choices import optimizer_options
from compile_sweep.schema.errors import SettingsError, WorkloadError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import Attention, CompileSettings, OptimizerKind
from compile_sweep.schema.shapes import ShapePolicy

BUILT_IN = {
    "captioning": "workloads.captioning:Captioning",
    "decoder": "workloads.decoder:Decoder",
    "detection": "workloads.detection:Detection",
    "gpt2": "workloads.gpt2:Gpt2",
    "gpt2-inference": "workloads.gpt2:Gpt2Inference",
    "layers": "workloads.layers:Layers",
    "layers-inference": "workloads.layers:LayersInference",
    "resnet": "workloads.resnet:ResNet",
    "segmentation": "workloads.segmentation:Segmentation",
}
"""Short names of the workloads that come with the project."""

ENTRY_POINT_GROUP = "compile_sweep.workloads"
"""Group of the entry points by which an installed package gives its workloads short names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's input for one worker, on its device."""

    inputs: Mapping[str, Tensor]
    """Keyword arguments of the model's forward."""
    length: int
    """Padded length, in tokens."""
    samples: int
    tokens: int
    """Useful tokens: padding not counted."""

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which it is copied to a GPU without waiting; a DataLoader calls this."""
        return replace(self, inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()})

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; the copy from page-locked memory may still be under way when this returns."""
        return replace(self, inputs={name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()})


class Workload(ABC):
    """A training step, or one of inference, that can be measured under compile settings.

    Args:
        size: one of `sizes`.
        seed: decides weights and data; equal seeds give equal samples in equal order whatever the settings.

    Raises:
        WorkloadError: `size` is none of `sizes`.
    """

    sizes: ClassVar[tuple[str, ...]]
    """Names of the sizes, the real one first."""
    batch_size: int
    """Samples a step and worker."""
    max_length: int
    """Longest sequence, in tokens."""
    min_length: int = 1
    """Length of the shortest batch there is, in tokens; lengths that hold only shorter ones are not warmed up."""
    pool_batches: int
    """Distinct batches a steady-state pass goes through."""
    learning_rate: float = 1e-4
    """Of the optimizer; costs no time, and a small one keeps the numerics check sharp."""
    trains: bool = True
    """False for inference only: no optimizer, the model in evaluation mode, and its forward gives outputs in place of a loss."""
    grad_mode: str = "inference_mode"
    """How an inference-only step keeps autograd out: torch's `inference_mode` or `no_grad`."""
    average_decay: float | None = None
    """Of an exponential moving average (EMA) of the weights that a training step keeps; None keeps none."""
    options: ClassVar[Mapping[str, Option]] = {}
    """What settings may vary of the workload itself, as `workload.NAME=value`."""
    job_options: ClassVar[frozenset[str]] = frozenset()
    """Those of `options` that change what a sample is; settings of a sweep agree on them, or they would not compare."""
    needs_gpu: ClassVar[Mapping[tuple[str, Scalar], str]] = {}
    """Options with the values of theirs that need a GPU, and why."""
    chosen: Mapping[str, Scalar]
    """The option values in force."""

    def __init__(self, size: str, seed: int) -> None:
        if size not in self.sizes:
            raise WorkloadError(f"{type(self).__name__} has no size {size!r}; use one of {', '.join(self.sizes)}")
        self.size = size
        self.seed = seed
        self.chosen = default_options(self.options)

    def under(self, settings: CompileSettings) -> Self:
        """This workload in the form that the settings ask for; itself where that is the form it has.

        Raises:
            SettingsError: the settings do not fit the workload.
        """
        self.validate(settings)
        wanted = {**default_options(self.options), **dict(settings.workload or ())}
        if wanted == dict(self.chosen):
            return self
        made = type(self)(self.size, self.seed)
        made.take(wanted)
        return made

    def validate(self, settings: CompileSettings) -> None:
        """Refuses settings that cannot work with this workload.

        Raises:
            SettingsError: they do not go with its lengths, options or kind of step.
        """
        settings.validate_for(self.max_length, self.min_length)
        check_options(type(self).__name__, self.options, settings)
        if not self.trains:
            check_inference(type(self).__name__, settings)

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        """Takes the values of `options`, before anything is built; one called batch_size becomes the batch size."""
        self.chosen = chosen
        if "batch_size" in chosen:
            self.batch_size = int(chosen["batch_size"])

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the CPU, whose forward takes a batch's inputs and returns the scalar loss.

        It is in training mode; that of an inference-only workload in evaluation mode, and its forward returns tensors.
        """

    @abstractmethod
    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        """The batches of a steady-state pass: the same samples under every policy, batched as the policy says."""

    @abstractmethod
    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        """A batch padded to exactly `length` tokens, for warming up shapes the pool happens not to hold."""

    @abstractmethod
    def regions(self, model: nn.Module) -> Sequence[str]:
        """Dotted names of the model's repeated blocks, for scope=regional."""

    @abstractmethod
    def parts(self) -> Sequence[str]:
        """Dotted names of the modules that scope=modular compiles apart; together they are the whole step."""

    @abstractmethod
    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        """For each tensor argument of that module's forward that depends on the length, the dimensions that do.

        `pair.0` is the first tensor in an argument `pair` that is a list, tuple or dictionary.

        Args:
            module: a name from `regions` or `parts`, or `""` for the whole model.
        """

    def row_lengths(self) -> Sequence[int]:
        """Lengths in tokens of a fair sample of rows, in the order training meets them; what buckets are optimised for.

        Raises:
            WorkloadError: the workload does not say.
        """
        raise WorkloadError(f"{type(self).__name__} does not say how long its rows are, which num_buckets needs; name buckets")

    def loader(self, policy: ShapePolicy, *, rank: int) -> Iterable[Batch]:
        """The workload's own input pipeline, for `--pipeline real`: endless batches on the CPU, pinned where there is a GPU.

        Raises:
            WorkloadError: the workload has none.
        """
        raise WorkloadError(f"{type(self).__name__} has no loader for --pipeline real; write one, or use --pipeline resident")

    def attention_statement(self, attention: Attention) -> str:
        """A Python statement that switches `inner`, the model without any wrapper, to this attention implementation.

        Raises:
            SettingsError: the workload has no such choice.
        """
        raise SettingsError(f"{type(self).__name__} has one attention implementation; leave attention={attention} out")

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        """Process-wide settings the workload needs, in force from before its model is built; nothing by default.

        Where `process_statements` gives any, this is entered inside itself too, and puts back what they set.
        """
        yield

    def process_statements(self) -> Sequence[str]:
        """The same as Python statements, which what is measured and exported begins with: of those that import nothing but torch.

        None by default; what `process_settings` alone sets is then missing where an export is pasted.
        """
        return ()

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        """The dtype autocast runs in on this device; None for no autocast."""
        return torch.bfloat16 if device.type == "cuda" else None

    def optimizer(self, model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer | None:
        """Adam over the model's parameters; None for an inference-only workload."""
        if not self.trains:
            return None
        options: dict[str, Any] = optimizer_options(kind)
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate, **options)


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """The model itself, without the `DistributedDataParallel` that several workers put around it."""
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


def named_workloads() -> dict[str, str]:
    """Short names of workloads and where each is, `package.module:Class`: the project's own and those of installed packages."""
    return {**{point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}, **BUILT_IN}


def load_workload(name: str) -> type[Workload]:
    """The workload class called `name`: a built-in one, one that an installed package names, or `package.module:Class`.

    Raises:
        WorkloadError: no such workload, its module does not import, or it is no `Workload`.
    """
    target = BUILT_IN.get(name) or (name if ":" in name else named_workloads().get(name, name))
    module_name, colon, class_name = target.partition(":")
    if not (colon and class_name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        known = named_workloads()
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}, or package.module:Class"
        raise WorkloadError(f"no workload is called {name!r}; {hint}")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise WorkloadError(f"workload {name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Workload):
        raise WorkloadError(f"workload {name!r}: {class_name} in {module_name} is no subclass of compile_sweep.Workload")
    if not getattr(found, "sizes", ()):
        raise WorkloadError(f"workload {name!r}: {class_name} has no sizes; name one or more, like sizes = ('base', 'tiny')")
    return found
