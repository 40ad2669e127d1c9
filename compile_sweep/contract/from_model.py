"""A workload from a model function, a batch function and a loss function, for anyone who has a training script.

Anything else that the `Workload` contract needs is found by `inspect_model`, unless it is passed explicitly.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import Parameter, signature
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.inspect_model import (
    BatchChanges,
    find_batch_changes,
    find_dynamic_arguments,
    is_safe_to_copy,
    preferred_memory_format,
    repeated_blocks,
)
from compile_sweep.contract.seeding import seeded
from compile_sweep.schema.choices import MemoryFormat, optimizer_options
from compile_sweep.schema.errors import CompileSweepError, SettingsError, WorkloadError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import OptimizerKind
from compile_sweep.schema.shapes import ShapePolicy

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[..., Mapping[str, Tensor]]
LossFn = Callable[[nn.Module, dict[str, Any]], Any]
OptimizerFn = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer from parameters, like the classes of `torch.optim`. Receives `foreach=` or `fused=` if it accepts them."""

MODEL = "model"
"""Name of the user's model inside the module that is measured."""

IGNORE_INDEX = -100
"""Padding for integer tensors named like labels: torch's and Hugging Face's losses ignore it."""

BATCH_SIZE = "batch_size"
"""Argument of a batch function, and the option of its workload, that says how many samples a batch has."""

_LABELS = ("label", "labels", "target", "targets")


class ModelAndLoss(nn.Module):
    """The user's model and loss function as one module.

    Args:
        model: The user's model.
        loss_fn: Called with the model and a batch; calls the model and returns the loss, or the outputs for inference.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        found = getattr(type(model), "loss_function", None)
        if loss_fn is model_loss and isinstance(found, property) and found.fset:
            # transformers looks the loss up in each forward and logs if the class name is unknown, which breaks the graph.
            found.fset(model, model.loss_function)

    def forward(self, **batch: Tensor) -> Any:
        """Returns the loss, or the outputs for inference."""
        found = self.loss_fn(self.model, batch)
        if self.training and not isinstance(found, Tensor):
            raise WorkloadError(f"the loss function returned {type(found).__name__}; return the loss alone, a tensor")
        return found


def model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Returns the loss that a Hugging Face model computes when its batch contains labels."""
    loss: Tensor = model(**batch).loss
    return loss


def model_outputs(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Returns what the model returns."""
    return model(**batch)


def WorkloadFromModel(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    loss_fn: LossFn | None = None,
    *,
    trains: bool = True,
    num_batches: int = 20,
    max_length: int | None = None,
    min_length: int | None = None,
    regions: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    pad_with: Mapping[str, float] | None = None,
    optimizer_fn: OptimizerFn | None = None,
    autocast: torch.dtype | None = torch.bfloat16,
) -> type[ModelWorkload]:
    """Makes a workload class. Assign it to a name in your module, and `--workload my_module:THAT_NAME` finds it.

    Args:
        model_fn: Makes the model. Called with the random seed set, so that equal seeds give equal weights.
        batch_fn: Makes batch number `n` as tensors by name, on the CPU, padded no further than its own longest row.
            Called with the random seed set, so it may draw random numbers. If it has an argument `batch_size` with a default,
            settings may choose another, as `workload.batch_size=64`.
        loss_fn: Called with the model and a batch; calls the model and returns the scalar loss, or the outputs for inference.
            By default `model(**batch).loss`, as Hugging Face models have it, or `model(**batch)` for inference.
        trains: False for inference.
        num_batches: Batches in a steady-state pass.
        max_length: Longest possible batch; by default the longest of the `num_batches`.
        min_length: Length that shorter batches are padded to; by default the shortest of the `num_batches`.
        regions: Dotted names of the model's repeated blocks; by default the members of each ModuleList of a single class.
        parts: Dotted names of the modules that scope=modular compiles separately; by default the model without the loss.
        dynamic: For each tensor of a batch, the dimensions that are its length; by default those that change together.
        pad_with: Padding values by tensor name; by default -100 for integer labels and targets, otherwise 0.
        optimizer_fn: For example `partial(torch.optim.AdamW, lr=3e-4)`; by default Adam with lr=1e-4. It receives
            `foreach=True`, or `fused=True` if the settings ask for it, provided it accepts them; a `foreach` or `fused` that
            it sets itself stays in all other cases.
        autocast: The autocast dtype on a GPU; None for no autocast.
    """
    values: dict[str, Any] = {
        "model_fn": staticmethod(model_fn),
        "batch_fn": staticmethod(batch_fn),
        "loss_fn": staticmethod(loss_fn or (model_loss if trains else model_outputs)),
        "trains": trains,
        "pool_batches": num_batches,
        "declared_max_length": max_length,
        "declared_min_length": min_length,
        "declared_regions": regions,
        "declared_parts": parts,
        "declared_dynamic": dynamic,
        "pad_with": dict(pad_with or {}),
        "optimizer_fn": staticmethod(optimizer_fn or partial(torch.optim.Adam, lr=1e-4)),
        "autocast": autocast,
        "options": {BATCH_SIZE: int} if _takes_batch_size(batch_fn) else {},
        "__doc__": model_fn.__doc__,
        "__module__": getattr(model_fn, "__module__", __name__),
    }
    name = getattr(model_fn, "__name__", "")
    return cast(type[ModelWorkload], ABCMeta(name if name.isidentifier() else "ModelWorkload", (ModelWorkload,), values))


class ModelWorkload(Workload):
    """Base of the classes that `WorkloadFromModel` makes."""

    sizes = ("only",)
    model_fn: ClassVar[ModelFn]
    batch_fn: ClassVar[BatchFn]
    loss_fn: ClassVar[LossFn]
    optimizer_fn: ClassVar[OptimizerFn]
    declared_max_length: ClassVar[int | None]
    declared_min_length: ClassVar[int | None]
    declared_regions: ClassVar[Sequence[str] | None]
    declared_parts: ClassVar[Sequence[str] | None]
    declared_dynamic: ClassVar[Mapping[str, Sequence[int]] | None]
    pad_with: ClassVar[Mapping[str, float]]
    autocast: ClassVar[torch.dtype | None]

    def __init__(self, size: str = "only", seed: int = 0) -> None:
        super().__init__(size, seed)
        _check_told(type(self))
        self._made: nn.Module | None = None
        self._handed_out: ref[nn.Module] | None = None
        self._batches: dict[int, list[dict[str, Tensor]]] = {}
        self._dims: dict[str, Mapping[str, tuple[int, ...]]] = {}
        self._asked_size: int | None = None
        self._changes: BatchChanges = find_batch_changes(self.raw_batches(0), self.declared_dynamic)
        for name in sorted(self.pad_with.keys() - self.raw_batches(0)[0].keys()):
            raise WorkloadError(
                f"pad_with of WorkloadFromModel names {name!r}, but batches have {', '.join(self.raw_batches(0)[0])}"
            )
        self.batch_size = self._changes.samples
        self.max_length = self.declared_max_length or max(self._changes.lengths)
        self.min_length = self.declared_min_length or min(self.max_length, *self._changes.lengths)
        if self.min_length > self.max_length:
            raise WorkloadError(f"min_length={self.min_length} is above the longest batch's {self.max_length}; use less")

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        """Makes batches of another size, if one is chosen.

        Raises:
            WorkloadError: the batch function makes others than it is asked for.
        """
        self.chosen = chosen
        if BATCH_SIZE not in chosen:
            return
        self._asked_size = int(chosen[BATCH_SIZE])
        self._batches.clear()
        self._dims.clear()
        self._changes = find_batch_changes(self.raw_batches(0), self.declared_dynamic)
        self.batch_size = self._changes.samples
        if self.batch_size != self._asked_size:
            raise WorkloadError(
                f"the batch function was asked for batches of {self._asked_size} and made some of {self.batch_size}; "
                f"make as many samples as its argument {BATCH_SIZE} says"
            )

    def build_model(self) -> nn.Module:
        if self._made is not None:
            return deepcopy(self._made)
        with seeded(self.seed), _failing_as("the model function failed"):
            made = type(self).model_fn()
        if not isinstance(made, nn.Module):
            raise WorkloadError(f"the model function returned {type(made).__name__}; return a torch.nn.Module")
        built = ModelAndLoss(made, type(self).loss_fn).train(self.trains)
        for name, module in built.named_modules():
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                raise WorkloadError(f"{name} is already compiled; return the plain model, the sweep compiles it")
        copied = _copied(built)
        if copied is None:
            if self._handed_out is not None and self._handed_out() is made:
                raise WorkloadError("the model function returned the same model twice; make a new one in each call")
            self._handed_out = ref(made)
            return built
        self._made = built
        return copied

    def memory_format(self) -> MemoryFormat | None:
        return preferred_memory_format(self.build_model())

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        if policy.batches([1, 2, 1, 2], 1) != [[0], [1], [2], [3]]:
            raise WorkloadError("the batch function makes whole batches, whose rows cannot be grouped; leave group_window out")
        found = []
        for number, raw in enumerate(self.raw_batches(rank)):
            length = self.length_of(raw)
            if length > self.max_length:
                where = f"batch {number} of worker {rank} has length {length}, above {self.max_length}"
                raise WorkloadError(f"{where}, the longest of worker 0's; set max_length={length} or more in WorkloadFromModel")
            found.append(self._batch(raw, policy.padded(max(length, self.min_length)), device))
        return found

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        return self._batch(self._nearest(length, rank), length, device)

    def regions(self, model: nn.Module) -> Sequence[str]:
        inner = model.get_submodule(MODEL)
        names = repeated_blocks(inner) if self.declared_regions is None else self.declared_regions
        return _inside(inner, names, "regions")

    def parts(self) -> Sequence[str]:
        if self.declared_parts is None:
            return [MODEL]
        return _inside(self.build_model().get_submodule(MODEL), self.declared_parts, "parts")

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        if module == "":
            return self._changes.length
        if not self._changes.length:
            return {}
        if module not in self._dims:
            model = self.build_model()
            names = list(dict.fromkeys([module, *self.regions(model), *self.parts()]))
            shortest = self._nearest(0)  # padded: a library may drop a mask that is all ones, and with it an argument
            short, long = (self.padded_to(shortest, length) for length in self._two_lengths())
            self._dims = {**self._dims, **find_dynamic_arguments(model, names, short, long)}
        return self._dims[module]

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        return self.autocast if device.type == "cuda" else None

    def optimizer(self, model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer | None:
        if not self.trains:
            return None
        make = type(self).optimizer_fn
        made = make(model.parameters(), **_options_for(make, kind))
        if any(one.name == "closure" and one.default is Parameter.empty for one in signature(made.step).parameters.values()):
            raise WorkloadError(f"optimizer_fn: {_name_of(make)} needs a closure at each step; use one that steps without")
        return made

    def padded(self, batch: Mapping[str, Tensor], padded_length: Callable[[int], int]) -> dict[str, Tensor]:
        """Pads a batch from the user's own loader just as the sweep padded such batches.

        Args:
            batch: Tensors by name, padded no further than its longest row.
            padded_length: The function of that name in the exported settings.

        Raises:
            WorkloadError: the batch is longer than any batch in the sweep.
        """
        length = self.length_of(batch)
        try:
            wanted = padded_length(max(length, self.min_length)) if length <= self.max_length else 0
        except (ValueError, StopIteration):  # the data has grown since the sweep
            wanted = 0
        if wanted < length:
            raise WorkloadError(
                f"this batch has length {length}, above the longest that the settings were measured with; "
                f"set max_length={length} or more in WorkloadFromModel, and sweep again"
            )
        return self.padded_to(batch, wanted)

    @property
    def batch_changes(self) -> BatchChanges:
        """How the batches differ from each other."""
        return self._changes

    def _nearest(self, length: int, rank: int = 0) -> dict[str, Tensor]:
        """Returns the longest batch that is no longer than this, which padding leaves true; cutting one leaves its lengths wrong.

        If all are longer, returns the shortest.
        """
        batches = sorted(self.raw_batches(rank), key=self.length_of)
        return next((raw for raw in reversed(batches) if self.length_of(raw) <= length), batches[0])

    def _two_lengths(self) -> tuple[int, int]:
        """Returns two lengths that differ from each other and from the number of samples, which could be taken for a length."""
        able = [length for length in range(self.max_length, 0, -1) if length != self.batch_size]
        near = [length for length in sorted(set(self._changes.lengths)) if length in able and length != able[0]]
        return (near[1] if len(near) > 1 else near[0] if near else able[-1]), able[0]

    def raw_batches(self, rank: int = 0) -> list[dict[str, Tensor]]:
        """Returns the worker's batches as the user's function makes them."""
        if rank not in self._batches:
            with seeded((self.seed << 16) + rank):
                self._batches[rank] = [self._made_batch(number) for number in range(self.pool_batches)]
        return self._batches[rank]

    def _made_batch(self, number: int) -> dict[str, Tensor]:
        with _failing_as(f"the batch function failed on batch {number}"):
            asked = {} if self._asked_size is None else {BATCH_SIZE: self._asked_size}
            batch = type(self).batch_fn(number, **asked)
        return _tensors(batch)

    def length_of(self, raw: Mapping[str, Tensor]) -> int:
        """Returns the length of a batch, 1 where batches have none."""
        return max((raw[name].size(dim) for name, dims in self._changes.length.items() for dim in dims), default=1)

    def _batch(self, raw: Mapping[str, Tensor], length: int, device: torch.device) -> Batch:
        inputs = {name: tensor.to(device) for name, tensor in self.padded_to(raw, length).items()}
        tokens = self.batch_size * min(length, self.length_of(raw))
        mask = raw.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            tokens = int(mask[:, :length].sum())
        return Batch(inputs=inputs, length=length, samples=self.batch_size, tokens=tokens)

    def padded_to(self, raw: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        """Returns the batch padded to this length, or cut to it if it is longer."""
        padded = dict(raw)
        for name, tensor in raw.items():
            wanted = dict(self._changes.others.get(name, {}))
            wanted.update(dict.fromkeys(self._changes.length.get(name, ()), length))
            sizes = tuple(wanted.get(dim, size) for dim, size in enumerate(tensor.shape))
            if sizes != tuple(tensor.shape):
                kept = tuple(slice(0, min(size, there)) for size, there in zip(sizes, tensor.shape, strict=True))
                padded[name] = tensor.new_full(sizes, self.padding_value(name, tensor))
                padded[name][kept] = tensor[kept]
        # If labels were the same tensor object as the ids in unpadded batches only, torch would compile both cases.
        seen: set[int] = set()
        for name, tensor in padded.items():
            if id(tensor) in seen:
                padded[name] = tensor.clone()
            seen.add(id(tensor))
        return padded

    def padding_value(self, name: str, tensor: Tensor) -> float:
        """Returns what a tensor of a batch is padded with."""
        is_label = name.lower() in _LABELS and tensor.dtype in (torch.int32, torch.int64)
        return self.pad_with.get(name, IGNORE_INDEX if is_label else 0)


def _takes_batch_size(batch_fn: BatchFn) -> bool:
    """Whether the function has an argument for the size of its batches, and a size of its own."""
    try:
        taken = signature(batch_fn).parameters.get(BATCH_SIZE)
    except (TypeError, ValueError):  # no function, or one written in C; calling it will tell
        return False
    return taken is not None and taken.default is not Parameter.empty


def _copied(model: nn.Module) -> nn.Module | None:
    """Copies the model; None if it cannot be copied or the copy would share state, such as weights held by a closure."""
    try:
        return deepcopy(model) if is_safe_to_copy(model) else None
    except Exception:  # whatever prevents a copy, such as a lock, may raise anything
        return None


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turns anything a user's function raises into a `WorkloadError` with the original as its cause."""
    try:
        yield
    except (CompileSweepError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise WorkloadError(f"{what}: {type(error).__name__}: {error}") from error


def _check_told(workload: type[ModelWorkload]) -> None:
    """Checks the arguments of `WorkloadFromModel`.

    Not done in `WorkloadFromModel` itself, where one bad workload in a module would hide the others.
    """
    numbers = {
        "num_batches": workload.pool_batches,
        "max_length": workload.declared_max_length,
        "min_length": workload.declared_min_length,
    }
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, Integral) and not isinstance(number, bool) and number >= 1):
            raise WorkloadError(f"{name}={number!r} of WorkloadFromModel is not a whole number of 1 or more")
    dynamic = workload.declared_dynamic
    if dynamic is not None and not (isinstance(dynamic, Mapping) and all(map(_are_dimensions, dynamic.values()))):
        raise WorkloadError(
            f"dynamic={dynamic!r} of WorkloadFromModel does not give tensors their dimensions; write dynamic={{'ids': (1,)}}"
        )


def _are_dimensions(dims: Any) -> bool:
    return isinstance(dims, Sequence) and all(isinstance(dim, Integral) for dim in dims)


def _options_for(make: OptimizerFn, kind: OptimizerKind) -> dict[str, bool]:
    """Returns the options of an optimizer kind that the optimizer accepts and does not set itself.

    Raises:
        SettingsError: the settings ask for a fused optimizer, and it has no such option.
    """
    try:
        taken = signature(make).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        taken = MappingProxyType({})
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in taken.values())
    preset = {name: taken[name].default for name in ("foreach", "fused") if name in taken}
    wanted = optimizer_options(kind)
    if "fused" in wanted:
        if "fused" not in preset and not takes_any:
            raise SettingsError(f"optimizer=fused: {_name_of(make)} takes no fused=; leave optimizer=fused out")
        return {**wanted, "foreach": False} if preset.get("foreach") is True else wanted
    is_open = all(default is None for default in preset.values())
    return wanted if is_open and (takes_any or "foreach" in preset) else {}


def _name_of(make: Any) -> str:
    """Returns the name of the class or function, also if `partial` wraps it."""
    while isinstance(make, partial):
        make = make.func
    return getattr(make, "__name__", type(make).__name__)


def _tensors(batch: Any) -> dict[str, Tensor]:
    if not isinstance(batch, Mapping):
        raise WorkloadError(f"the batch function returned {type(batch).__name__}; return a dictionary of tensors by name")
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise WorkloadError(f"the batch function returned {name!r} as {kind}, not a tensor; return tensors by name")
    return dict(batch)


def _inside(model: nn.Module, names: Sequence[str], what: str) -> list[str]:
    known = {name for name, _ in model.named_modules()}
    for name in names:
        if name not in known:
            raise WorkloadError(f"{what}: the model has no module {name!r}; names are those of model.named_modules()")
    return [f"{MODEL}.{name}" for name in names]
