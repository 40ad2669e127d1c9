"""A workload from a model function, a batch function and a loss function, for anyone who has a training script.

Anything else that the `Workload` contract needs is found by `inspect_model`, unless it is passed explicitly.
"""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from compile_sweep.contract.arguments import PADDED, REAL, NoMoreBatches, check_arguments, failing_as
from compile_sweep.contract.base import Batch, Workload
from compile_sweep.contract.batch_changes import (
    BatchChanges,
    find_batch_changes,
    in_any,
    kinds_of,
    lengths_if_rows_are_samples,
    lengths_if_samples_are_second,
    remark_on_kinds,
    rows_are_samples,
    samples_are_second,
    without_smaller_last,
)
from compile_sweep.contract.batches import BatchesOf, Structure, another_object, flatten, one_structure, takes
from compile_sweep.contract.inspect_model import (
    FirstForward,
    copied,
    find_dynamic_arguments,
    find_reused_modules,
    initialize_lazy_weights,
    preferred_memory_format,
    repeated_blocks,
    run_first_forward,
)
from compile_sweep.contract.model_and_loss import (
    MODEL,
    AccumulatedLoss,
    LossFn,
    ModelAndLoss,
    model_loss,
    model_outputs,
    names_inside,
)
from compile_sweep.contract.optimizers import OptimizerFn, make_optimizer
from compile_sweep.contract.seeding import seeded
from compile_sweep.contract.tensor_uses import IGNORE_INDEX, TensorUses, all_uses, each_its_own, find_uses, is_whole
from compile_sweep.contract.workload_facts import shown_name
from compile_sweep.schema.choices import MemoryFormat
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.setting_text import Scalar
from compile_sweep.schema.settings import CompileSettings, OptimizerKind
from compile_sweep.schema.shapes import AsTheyCome, PadToLongest, ShapePolicy

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[..., Any]

BATCH_SIZE = "batch_size"
"""Argument of a batch function, and option of its workload, for the number of samples in a batch."""

LENGTH = "length"
"""Argument of a batch function for the length of its longest row; without it, the function chooses the length."""

_LABELS = ("label", "labels", "target", "targets")
"""Names of targets, used if the loss is the model's own or does not run on shapes alone."""


def WorkloadFromModel(
    model_fn: ModelFn,
    batch_fn: BatchFn | None = None,
    loss_fn: LossFn | None = None,
    *,
    step_fn: LossFn | None = None,
    batches: Iterable[Any] | None = None,
    trains: bool = True,
    num_batches: int = 20,
    max_length: int | None = None,
    min_length: int | None = None,
    regions: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    pad_with: Mapping[str, float] | None = None,
    lengths: str | None = None,
    optimizer_fn: OptimizerFn | None = None,
    scheduler_fn: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = torch.bfloat16,
) -> type[ModelWorkload]:
    """Makes a workload class. Assign it to a name in your module, and `--workload my_module:THAT_NAME` finds it.

    Args:
        model_fn: Makes the model. Called with the random seed set, so that equal seeds give equal weights.
        batch_fn: Makes batch number `n`, on the CPU, padded no further than its own longest row: a dictionary of tensors, or a
            tuple, list, dataclass or nested dictionary that holds some. Called with the random seed set, so it may draw random
            numbers. If it has an argument `batch_size` with a default, settings may choose another, as
            `workload.batch_size=64`; if it has an argument `length=None`, batches to warm up a length are made by it.
        loss_fn: Called with the model and a batch, as `batch_fn` made it; calls the model and returns the scalar loss, alone or
            with logs behind it, or the outputs for inference. By default `model(**batch).loss`, as Hugging Face models have it,
            or `model(**batch)` for inference.
        step_fn: In place of `loss_fn`, a step of your own up to the optimizer's: called with the model and a batch, it calls
            `backward()` itself, as often as it likes, and returns the loss, alone or with logs behind it. Then the model is
            compiled and the step around it is not.
        batches: In place of `batch_fn`, a `DataLoader` or another iterable of batches, of which the first are taken.
        trains: False for inference.
        num_batches: Batches in a steady-state pass.
        max_length: Longest possible batch; by default the longest of the `num_batches`.
        min_length: Length that shorter batches are padded to; by default the shortest of the `num_batches`.
        regions: Dotted names of the model's repeated blocks; by default the members of each ModuleList of a single class.
        parts: Dotted names of the modules that scope=modular compiles separately; by default the model without the loss.
        dynamic: For each tensor of a batch, the dimensions that are its length; by default those that change together.
        pad_with: Padding values by tensor name; by default the index that the loss ignores for its targets, otherwise 0.
        lengths: `real` to train on batches as they come and pad nothing, which leaves dynamic=auto, mark and true to try;
            `padded` to pad also where the first dimension changes. By default padded, unless padding would change what a batch
            says of itself: ids of an `EmbeddingBag`, nodes and edges of a graph, packed sequences.
        optimizer_fn: For example `partial(torch.optim.AdamW, lr=3e-4)`; by default Adam with lr=1e-4. It receives
            `foreach=True`, or `fused=True` if the settings ask for it, provided it accepts them; a `foreach` or `fused` that
            it sets itself stays in all other cases. If its first argument is called `named_parameters` or `model`, it is
            given those in place of the parameters. It may return a list of optimizers, which step together.
        scheduler_fn: Makes a learning rate scheduler of the optimizer, which steps after each step.
        clip_grad_norm: Largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` takes it.
        accumulate: Parts into which each batch is split along its samples, one forward and backward each.
        autocast: The autocast dtype on a GPU; None for no autocast.
    """
    if batches is not None and batch_fn is None:
        batch_fn = BatchesOf(batches)
    elif batch_fn is not None and not callable(batch_fn) and batches is None:
        batch_fn = BatchesOf(batch_fn)  # a loader used as a function
    values: dict[str, Any] = {
        "both_batches": batches is not None and not isinstance(batch_fn, BatchesOf),
        "model_fn": staticmethod(model_fn),
        "batch_fn": staticmethod(batch_fn) if batch_fn is not None else None,
        "loss_fn": staticmethod(_step_or_loss(loss_fn, step_fn, trains=trains, accumulate=accumulate)),
        "has_own_step": step_fn is not None or accumulate != 1,
        "loss_name": "step_fn" if step_fn is not None and accumulate == 1 else "loss_fn",
        "both_losses": loss_fn is not None and step_fn is not None,
        "scheduler_fn": staticmethod(scheduler_fn) if scheduler_fn is not None else None,
        "clip_grad_norm": clip_grad_norm,
        "declared_accumulate": accumulate,
        "trains": trains,
        "pool_batches": num_batches,
        "declared_max_length": max_length,
        "declared_min_length": min_length,
        "declared_regions": regions,
        "declared_parts": parts,
        "declared_dynamic": dynamic,
        "pad_with": dict(pad_with or {}),
        "declared_lengths": lengths,
        "optimizer_fn": staticmethod(optimizer_fn or partial(torch.optim.Adam, lr=1e-4)),
        "autocast": autocast,
        "options": {BATCH_SIZE: int} if takes(batch_fn, BATCH_SIZE) else {},
        "__doc__": model_fn.__doc__,
        "__module__": getattr(model_fn, "__module__", __name__),
    }
    name = getattr(model_fn, "__name__", "")
    return cast(type[ModelWorkload], ABCMeta(name if name.isidentifier() else "ModelWorkload", (ModelWorkload,), values))


def _step_or_loss(loss_fn: LossFn | None, step_fn: LossFn | None, *, trains: bool, accumulate: int) -> LossFn:
    if step_fn is not None:
        return step_fn
    loss = loss_fn or (model_loss if trains else model_outputs)
    return loss if accumulate == 1 else AccumulatedLoss(loss, accumulate)


class ModelWorkload(Workload):
    """Base of the classes that `WorkloadFromModel` makes."""

    sizes = ("only",)
    model_fn: ClassVar[ModelFn]
    batch_fn: ClassVar[BatchFn | None]
    both_batches: ClassVar[bool]
    loss_fn: ClassVar[LossFn]
    loss_name: ClassVar[str]
    """The argument of `WorkloadFromModel` that `loss_fn` was, for messages."""
    optimizer_fn: ClassVar[OptimizerFn]
    scheduler_fn: ClassVar[Callable[[torch.optim.Optimizer], Any] | None]
    both_losses: ClassVar[bool]
    declared_accumulate: ClassVar[int]
    declared_max_length: ClassVar[int | None]
    declared_min_length: ClassVar[int | None]
    declared_regions: ClassVar[Sequence[str] | None]
    declared_parts: ClassVar[Sequence[str] | None]
    declared_dynamic: ClassVar[Mapping[str, Sequence[int]] | None]
    declared_lengths: ClassVar[str | None]
    pad_with: ClassVar[Mapping[str, float]]
    autocast: ClassVar[torch.dtype | None]

    def __init__(self, size: str = "only", seed: int = 0) -> None:
        super().__init__(size, seed)
        check_arguments(type(self))
        self._made: nn.Module | None = None
        self._handed_out: ref[nn.Module] | None = None
        self._batches: dict[int, list[dict[str, Tensor]]] = {}
        self._structure: Structure | None = None
        self._remarks: dict[int, list[str]] = {}
        self._dims: dict[str, Mapping[str, tuple[int, ...]]] = {}
        self._uses: TensorUses | None = None
        self._first_forward: FirstForward | None = None
        self._asked_size: int | None = None
        self._changes: BatchChanges = self._found_changes()
        for name in sorted(self.pad_with.keys() - (names := in_any(self.raw_batches(0))).keys()):
            raise WorkloadError(f"pad_with of WorkloadFromModel names {name!r}, but batches have {', '.join(names)}")
        self.batch_size = self._changes.samples
        self.max_length = self.declared_max_length or max(self._changes.lengths)
        self.min_length = self.declared_min_length or min(self.max_length, *self._changes.lengths)
        if self.min_length > self.max_length:
            raise WorkloadError(f"min_length={self.min_length} is above the longest batch's {self.max_length}; use less")

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        """Makes batches of another size, if one is chosen; raises WorkloadError if `batch_fn` returns batches of another size."""
        self.chosen = chosen
        if BATCH_SIZE not in chosen:
            return
        self._asked_size = int(chosen[BATCH_SIZE])
        self._batches.clear()
        self._dims.clear()
        self._uses = None
        self._changes = self._found_changes()
        self.batch_size = self._changes.samples
        if self.batch_size != self._asked_size:
            raise WorkloadError(
                f"the batch function was asked for batches of {self._asked_size} and made some of {self.batch_size}; "
                f"make as many samples as its argument {BATCH_SIZE} says"
            )

    def _found_changes(self) -> BatchChanges:
        batches, told = self.raw_batches(0), self.declared_dynamic
        if told is None and self.trains and (lengths := lengths_if_samples_are_second(batches)):
            self._changes = find_batch_changes(batches, lengths)
            if samples_are_second(self.build_model(), min(batches, key=self.length_of)):
                self._remarks[0].append("the first dimension is the length: samples can change places along the second")
                return self._changes
        if told is None and self.trains and (of_rows := lengths_if_rows_are_samples(batches)) is not None:
            self._changes = find_batch_changes(batches, of_rows)
            if rows_are_samples(self.build_model(), batches[0]):
                return replace(self._changes, samples=len(batches[0]))
        return find_batch_changes(batches, told)

    def build_model(self) -> nn.Module:
        if self._made is not None:
            return self._run_first(deepcopy(self._made))
        with seeded(self.seed), failing_as("the model function failed"):
            made = type(self).model_fn()
        if not isinstance(made, nn.Module):
            raise WorkloadError(f"the model function returned {type(made).__name__}; return a torch.nn.Module")
        built = ModelAndLoss(made, type(self).loss_fn, self._structure, has_own_step=self.has_own_step)
        with failing_as("the model's first forward, in which lazy layers get their weights, failed"):
            initialize_lazy_weights(built, self.raw_batches(0)[0])
        for name, module in built.train(self.trains).named_modules():
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                raise WorkloadError(f"{name} is already compiled; return the plain model, the sweep compiles it")
        copy = copied(built)
        if copy is None:
            if self._handed_out is not None and self._handed_out() is made:
                raise WorkloadError("the model function returned the same model twice; make a new one in each call")
            self._handed_out = ref(made)
            return self._run_first(built)
        self._made = built
        return self._run_first(copy)

    def _run_first(self, model: nn.Module) -> nn.Module:
        """Runs the model once if its first forward changes it, for example by installing hooks, so that this is not compiled."""
        if any(weights.is_meta for weights in model.parameters()):
            return model
        raw = min(self.raw_batches(0), key=self.length_of)
        if self._first_forward is None:
            other = copied(model)
            self._first_forward = FirstForward() if other is None else run_first_forward(other, raw, on_shapes=True)
        if self._first_forward.installs_hooks:
            run_first_forward(model, raw, on_shapes=False)
        else:
            self._first_forward.configure(model)
        return model

    def memory_format(self) -> MemoryFormat | None:
        return preferred_memory_format(self.build_model())

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        if policy.batches([1, 2, 1, 2], 1) != [[0], [1], [2], [3]]:
            raise WorkloadError("the batch function makes whole batches, whose rows cannot be grouped; leave group_window out")
        found = []
        for number, raw in enumerate(self.raw_batches(rank)):
            length = self.length_of(raw)
            if length > self.max_length and self.pads:
                where = f"batch {number} of worker {rank} has length {length}, above {self.max_length}"
                raise WorkloadError(f"{where}, the longest of worker 0's; set max_length={length} or more in WorkloadFromModel")
            found.append(self._batch(raw, self._padded_length(raw, policy), device, policy))
        return found

    def _padded_length(self, raw: Mapping[str, Tensor], policy: ShapePolicy) -> int:
        if not self.pads:
            return self.length_of(raw)
        if isinstance(policy, PadToLongest):
            return policy.padded(max(self.length_of(raw), self.min_length))
        return policy.padded(max(self._length_for_all(raw), self.min_length))

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        """Returns a batch of that length: from `batch_fn` if it accepts lengths, else the longest real one that fits, padded.

        If every batch is longer, none is cut, since it may contain lengths: the shortest is returned unchanged.
        """
        return self.batches_of_length(length, rank=rank, device=device)[0]

    def batches_of_length(self, length: int, *, rank: int, device: torch.device) -> Sequence[Batch]:
        made, kinds = self._made_at(length, rank), kinds_of(self.raw_batches(rank))
        found = {kind: made if made and kind == tuple(sorted(made)) else self._nearest(length, kinds[kind]) for kind in kinds}
        longest = (lambda raw: max(length, self._length_for_all(raw))) if self.pads else self.length_of
        return [self._batch(raw, longest(raw), device) for raw in found.values()]

    def _made_at(self, length: int, rank: int) -> dict[str, Tensor] | None:
        """Returns a batch that the user's function makes at a length; None if it accepts no length, or returns another one."""
        if not takes(type(self).batch_fn, LENGTH) or length == max(self.length_of(raw) for raw in self.raw_batches(rank)):
            return None
        with seeded((self.seed << 16) + rank):
            made, _ = self._made_batch(0, {LENGTH: length})
        fits = any(made.keys() == raw.keys() for raw in self.raw_batches(rank)) and self.length_of(made) == length
        return made if fits and self._length_for_all(made) == length else None

    def shape_policy(self, settings: CompileSettings) -> ShapePolicy:
        if self.pads:
            return super().shape_policy(settings)
        return AsTheyCome(known=tuple(sorted({self.length_of(raw) for raw in self.raw_batches(0)})))

    @property
    def unpadded_reason(self) -> str | None:
        if self.declared_lengths == REAL:
            return "lengths='real' says so"
        if self.declared_lengths == PADDED or not self._changes.dims:
            return None
        if ragged := self._changes.ragged:
            # With a padding value for each of them, the user has decided.
            return None if self._changes.dims.keys() <= self.pad_with.keys() else ragged
        bags = sorted(self.uses.bags & (self._changes.dims.keys() - self.pad_with.keys()))
        if bags:
            return f"{bags[0]} holds ids of an EmbeddingBag, whose last bag would grow"
        decided = self.pad_with.keys() | self._changes.length.keys() | (self.declared_dynamic or {}).keys()
        if positions := sorted(self.uses.positions & (self._changes.others.keys() - decided)):
            return f"{positions[0]} holds positions in another tensor, and padding would add one"
        return None

    @property
    def uses(self) -> TensorUses:
        """Describes how the step uses those tensors of a batch that change and that `pad_with` does not name."""
        if self._uses is None:
            first = in_any(self.raw_batches(0))
            padded = [name for name in self._changes.dims if name not in self.pad_with]
            unknown = [name for name in padded if is_whole(first[name])]
            # A model that computes its own loss is Hugging Face's, whose labels have these names and ignore -100.
            asks = bool(unknown) and not (type(self).loss_fn is model_loss and self._changes.ragged is None)
            found = [find_uses(self.build_model(), raw) for raw in self.kinds()] if asks else []
            self._uses = all_uses(found, self.raw_batches(0), padded)
        return self._uses

    def regions(self, model: nn.Module) -> Sequence[str]:
        inner = model.get_submodule(MODEL)
        names = repeated_blocks(inner) if self.declared_regions is None else self.declared_regions
        return names_inside(inner, names, "regions") or self._reused_modules

    @cached_property
    def _reused_modules(self) -> list[str]:
        """Lists the modules that one forward calls repeatedly, like ALBERT's single layer."""
        try:
            return find_reused_modules(self.build_model(), MODEL, min(self.raw_batches(0), key=self.length_of))
        except Exception:  # the model does not run; its first step will say why
            return []

    def parts(self) -> Sequence[str]:
        if self.declared_parts is None:
            return self._found_parts
        return names_inside(self.build_model().get_submodule(MODEL), self.declared_parts, "parts")

    @cached_property
    def _found_parts(self) -> list[str]:
        """The model or, if it has no forward of its own, like a generator with its discriminator, the modules in it."""
        inner = self.build_model().get_submodule(MODEL)
        has_forward = getattr(type(inner), "forward", None) is not nn.Module.forward
        children = [f"{MODEL}.{name}" for name, _ in inner.named_children()]
        return [MODEL] if has_forward or not children else children

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        if module == "" or not self._changes.dims:
            return self._changes.dims
        if module not in self._dims:
            model = self.build_model()
            names = list(dict.fromkeys([module, *self.regions(model), *self.parts()]))
            self._dims = {**self._dims, **find_dynamic_arguments(model, names, self._different_batches())}
        return self._dims[module]

    def _different_batches(self) -> list[dict[str, Tensor]]:
        """Returns a few batches that differ in length and in whether they contain padding: a library may drop a mask of ones."""
        return [batch for kind in kinds_of(self.raw_batches(0)).values() for batch in self._different_of_kind(kind)]

    def _different_of_kind(self, batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        different = list({self._sizes(raw): raw for raw in sorted(batches, key=self._sizes)}.values())
        if self.pads:
            # Avoid a length equal to the number of samples.
            able = [length for length in range(self.max_length, 0, -1) if length != self.batch_size]
            near = [length for length in sorted(set(self._changes.lengths)) if length in able and length != able[0]]
            short = near[1] if len(near) > 1 else near[0] if near else able[-1]
            padded = [self.padded_to(different[0], length) for length in (short, able[0])]
            return [*padded, different[0], different[-1]] if len(different) > 1 else padded
        return [different[0], *different[1:-1][:2], different[-1]]

    def _sizes(self, raw: Mapping[str, Tensor]) -> tuple[int, ...]:
        return tuple(raw[name].size(dim) for name, dims in self._changes.dims.items() if name in raw for dim in dims)

    def kinds(self, rank: int = 0) -> list[dict[str, Tensor]]:
        """Returns the shortest batch of each kind: batches that hold the same tensors are of one kind."""
        return [min(batches, key=self.length_of) for batches in kinds_of(self.raw_batches(rank)).values()]

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        return self.autocast if device.type == "cuda" else None

    def optimizer(self, model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer | None:
        if not self.trains:
            return None
        inner = model.get_submodule(MODEL) if isinstance(model, ModelAndLoss) else model
        named = ((name.removeprefix(f"{MODEL}."), weights) for name, weights in model.named_parameters())
        return make_optimizer(type(self).optimizer_fn, inner, named, kind)  # type: ignore[no-any-return]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        if (make := type(self).scheduler_fn) is None:
            return None
        with failing_as("scheduler_fn failed"):
            made = make(optimizer)
        vars(optimizer)["_opt_called"] = True  # else torch warns: a step made before its schedule does not set it
        return made

    def padded(self, batch: Mapping[str, Tensor], padded_length: Callable[[int], int]) -> dict[str, Tensor]:
        """Pads a batch from the user's own loader as the sweep padded such batches.

        Args:
            batch: Tensors by name, padded no further than its longest row.
            padded_length: The function of that name in the exported settings.

        Raises:
            WorkloadError: The batch is longer than any batch in the sweep.
        """
        if not self.pads:
            return self.padded_to(batch, self.length_of(batch))
        length = self._length_for_all(batch)
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

    def _nearest(self, length: int, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the longest batch that is at most this long, which padding keeps valid; the shortest if all are longer."""
        batches = sorted(batches, key=self._length_for_all)
        return next((raw for raw in reversed(batches) if self._length_for_all(raw) <= length), batches[0])

    def raw_batches(self, rank: int = 0) -> list[dict[str, Tensor]]:
        """Returns the worker's batches as the user's function makes them, converted to tensors by name."""
        if rank not in self._batches:
            with seeded((self.seed << 16) + rank):
                made = list(self._all_made(rank))
            if not made:
                raise WorkloadError("the batch function made no batch; its iterator is at its end")
            few = len(made) < self.pool_batches
            remarks = [f"{len(made)} batches in place of num_batches={self.pool_batches}: there are no more"] if few else []
            self._structure, texts = one_structure(made)
            self._batches[rank], left_out = without_smaller_last([tensors for tensors, _ in made])
            remarks += [f"{texts[0]} is a text that differs from batch to batch: the step gets None there"] if texts else []
            self._remarks[rank] = remarks + ([left_out] if left_out else [])
            self.pool_batches = len(self._batches[rank])
        return self._batches[rank]

    def _all_made(self, rank: int) -> Iterator[tuple[dict[str, Tensor], Structure | None]]:
        asked = {} if self._asked_size is None else {BATCH_SIZE: self._asked_size}
        for number in range(self.pool_batches):
            try:
                yield self._made_batch(number, asked)
            except NoMoreBatches:
                return

    def remarks(self, policy: ShapePolicy | None = None) -> Sequence[str]:
        kinds = remark_on_kinds(self.raw_batches(0))
        if self._first_forward is None:
            self.build_model()
        first = [] if self._first_forward is None else self._first_forward.remarks()
        lengths = self._changes.lengths if policy and self.pads else ()
        pads = policy is not None and any(policy.padded(length) != length for length in lengths)
        return [*self._remarks[0], *kinds, *first, *(self.padding_lines() if pads else ())]

    def padding(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Returns what settings can pad in the batches: dimensions and padding value, by tensor name."""
        first, dims = in_any(self.raw_batches()), self._changes.dims if self.pads else {}
        return {name: (padded, self.padding_value(name, first[name])) for name, padded in dims.items()}

    def padding_lines(self) -> list[str]:
        """Returns a line for each tensor that is padded."""
        return [
            f"pads {shown_name(name)} along dimension {' and '.join(map(str, dims))} with {value:g}"
            for name, (dims, value) in self.padding().items()
        ]

    def _made_batch(self, number: int, asked: Mapping[str, int]) -> tuple[dict[str, Tensor], Structure | None]:
        make = type(self).batch_fn
        if make is None:
            raise WorkloadError("WorkloadFromModel needs batch_fn, a function that makes a batch, or batches, a DataLoader")
        if self.both_batches:
            raise WorkloadError("WorkloadFromModel has both batch_fn and batches; leave one of them out")
        with failing_as(f"the batch function failed on batch {number}"):
            try:
                batch = make(number, **asked)
            except StopIteration:
                raise NoMoreBatches from None
        return flatten(batch)

    def length_of(self, raw: Mapping[str, Tensor]) -> int:
        """Returns the length of a batch; 1 if batches have no length."""
        sizes = (raw[name].size(dim) for name, dims in self._changes.length.items() if name in raw for dim in dims)
        return max(sizes, default=1)

    def _length_for_all(self, raw: Mapping[str, Tensor]) -> int:
        """Returns the length at which every dimension fits, with independent dimensions scaled in proportion to their largest."""
        apart = [
            math.ceil(raw[name].size(dim) * self.max_length / largest)
            for name, dims in self._changes.others.items()
            if name in raw
            for dim, largest in dims.items()
        ]
        return max(self.length_of(raw), *(min(length, self.max_length) for length in apart)) if apart else self.length_of(raw)

    def _batch(self, raw: Mapping[str, Tensor], length: int, device: torch.device, policy: ShapePolicy | None = None) -> Batch:
        inputs = {name: another_object(tensor, device) for name, tensor in self.padded_to(raw, length, policy).items()}
        tokens = min(length, self.length_of(raw))
        if not any(0 in dims for dims in self._changes.length.values()) or self._samples_are_second:
            tokens *= self.batch_size
        if (mask := raw.get("attention_mask")) is not None and mask.dim() == 2:
            tokens = int(mask[:, :length].sum())
        return Batch(inputs=inputs, length=length, samples=self.batch_size, tokens=tokens)

    @property
    def _samples_are_second(self) -> bool:
        """Tells whether the first dimension of every tensor is the length, as in (time, batch)."""
        return all(0 in self._changes.length.get(name, ()) for name, tensor in self.raw_batches(0)[0].items() if tensor.dim())

    def padded_to(self, raw: Mapping[str, Tensor], length: int, policy: ShapePolicy | None = None) -> dict[str, Tensor]:
        """Returns the batch padded to this length. Cuts nothing, and pads nothing if batches are used without padding.

        Dimensions that change independently are padded in proportion to the length, so that a bucket is one of pairs; under a
        policy that pads to the longest row they are padded by it independently.
        """
        padded = dict(raw)
        for name, tensor in raw.items() if self.pads else ():
            wanted = {
                dim: self._size_apart(tensor.size(dim), largest, length, policy)
                for dim, largest in self._changes.others.get(name, {}).items()
            }
            wanted.update(dict.fromkeys(self._changes.length.get(name, ()), length))
            sizes = tuple(max(size, wanted.get(dim, size)) for dim, size in enumerate(tensor.shape))
            if sizes != tuple(tensor.shape):
                padded[name] = tensor.new_full(sizes, self.padding_value(name, tensor))
                padded[name][tuple(map(slice, tensor.shape))] = tensor
        # If labels and ids were the same tensor object only in unpadded batches, torch would compile both cases.
        return each_its_own(padded)

    def _size_apart(self, size: int, largest: int, length: int, policy: ShapePolicy | None) -> int:
        if isinstance(policy, PadToLongest):
            return min(largest, -(-size // policy.multiple) * policy.multiple)
        return math.ceil(length * largest / self.max_length)

    def padding_value(self, name: str, tensor: Tensor) -> float:
        """Returns the value that a tensor of a batch is padded with."""
        if name in self.pad_with:
            return self.pad_with[name]
        if name in self.uses.ids:
            return 0
        if name in self.uses.ignored:
            return self.uses.ignored[name]
        return IGNORE_INDEX if is_whole(tensor) and name.lower() in _LABELS else 0
