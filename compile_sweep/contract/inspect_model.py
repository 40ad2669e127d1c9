"""What a sweep must know of a model and its batches, found out instead of told: repeated blocks, and dimensions that change.

Blocks are the members of a `ModuleList` (or, where there is none, of a `Sequential`) that are all of one class; where these have
different sizes and equal blocks inside, as the stages of a vision model have, it is those. A dimension
changes if its size differs from batch to batch; in the arguments of a module inside the model, if it differs between two runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_sweep.schema.errors import WorkloadError

Dims = dict[str, tuple[int, ...]]
"""Dimensions by name of the tensor; `pair.0` is the first in the list, tuple or dictionary `pair`."""


def repeated_blocks(model: nn.Module) -> list[str]:
    """Dotted names of the model's repeated blocks, none inside another."""
    lists = list(_blocks(model, nn.ModuleList, ""))
    return lists or list(_blocks(model, nn.Sequential, ""))


def _blocks(module: nn.Module, kind: type[nn.Module], prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        members = dict(child.named_children())
        inside = _blocks(child, kind, f"{prefix}{name}.")
        if isinstance(child, kind) and len(members) > 1 and _are_blocks(members.values()):
            own = [f"{prefix}{name}.{member}" for member in members]
            yield from own if _are_equal(members.values()) else list(inside) or own
        else:
            yield from inside


def _are_blocks(modules: Iterable[nn.Module]) -> bool:
    """Whether the modules are of one class that is more than one layer: a lone layer is nothing worth compiling apart."""
    (kind, *others) = {type(module) for module in modules}
    return not others and not issubclass(kind, nn.ModuleList | nn.ModuleDict) and all(any(m.children()) for m in modules)


def _are_equal(modules: Iterable[nn.Module]) -> bool:
    return len({tuple(tuple(parameter.shape) for parameter in module.parameters()) for module in modules}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChanges:
    """How the tensors of a workload's batches change from one to the next."""

    length: Dims
    """Dimensions that change together, most of all that change: the batches' length."""
    lengths: Sequence[int]
    """Their size in each batch; 1 throughout where nothing changes."""
    others: Mapping[str, Mapping[int, int]]
    """Dimensions that change otherwise, with their largest size, to which they are padded."""
    samples: int
    """Size of the first dimension of most tensors."""


def find_batch_changes(
    batches: Sequence[Mapping[str, Tensor]], length: Mapping[str, Sequence[int]] | None = None
) -> BatchChanges:
    """Compares batches of the same workload.

    Args:
        batches: of the batch function.
        length: the dimensions that are the length, where a person says so.

    Raises:
        WorkloadError: the batches are no batches of one kind.
    """
    first = batches[0]
    for batch in batches:
        if {name: tensor.dim() for name, tensor in batch.items()} != {name: tensor.dim() for name, tensor in first.items()}:
            raise WorkloadError(f"batches differ in their tensors: one has {_shapes(first)}, another {_shapes(batch)}")
    rows = [tensor.size(0) for tensor in first.values() if tensor.dim()]
    if not rows:
        raise WorkloadError("batches hold no tensor with a dimension; give a mapping of names to tensors")
    samples = max(rows, key=rows.count)
    together: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, tensor in first.items():
        for dim in range(tensor.dim()):
            sizes = tuple(batch[name].size(dim) for batch in batches)
            if len(set(sizes)) > 1:
                together.setdefault(sizes, []).append((name, dim))
    if length is not None:
        main = [(name, dim) for name, dims in length.items() for dim in dims]
        for name, dim in main:
            if name not in first or not 0 < dim < first[name].dim():
                raise WorkloadError(
                    f"dynamic dimension {dim} of {name}: batches have {_shapes(first)}; name dimensions from 1 on"
                )
    else:
        main = max(together.values(), key=len, default=[])
    if any(dim == 0 and first[name].size(0) == samples for group in together.values() for name, dim in group):
        counts = sorted({batch[name].size(0) for batch in batches for name, dim in _members(together) if dim == 0})
        raise WorkloadError(
            f"batches of {' and '.join(map(str, counts))} samples cannot be timed together; leave odd ones out"
            + _if_samples_come_later(batches)
        )
    dims: Dims = {name: tuple(dim for one, dim in main if one == name) for name, _ in main}
    others: dict[str, dict[int, int]] = {}
    for sizes, group in together.items():
        for name, dim in group:
            if (name, dim) not in main:
                others.setdefault(name, {})[dim] = max(sizes)
    lengths = [max(batch[name].size(dim) for name, dim in main) for batch in batches] if main else [1] * len(batches)
    return BatchChanges(length=dims, lengths=lengths, others=others, samples=samples)


def _if_samples_come_later(batches: Sequence[Mapping[str, Tensor]]) -> str:
    """What else helps where all tensors have another dimension than the first that may be the samples: of one size throughout."""
    shapes = [tensor.shape for batch in batches for tensor in batch.values() if tensor.dim()]
    rank = min(map(len, shapes))
    same = [dim for dim in range(1, rank) if len({shape[dim] for shape in shapes}) == 1]
    if not same:
        return ""
    return f", or, if dimension {same[0]} is the samples, put it first in the batch and transpose in the loss function"


def _members(together: Mapping[Any, Sequence[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    for group in together.values():
        yield from group


def _shapes(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())


def find_dynamic_arguments(
    model: nn.Module, modules: Sequence[str], short: Mapping[str, Tensor], long: Mapping[str, Tensor]
) -> dict[str, Dims]:
    """For each module, the dimensions of its forward's tensor arguments that differ between two runs of the model.

    The runs compute nothing of the batch where the model allows it: what comes of it has shapes only.

    Args:
        model: takes a batch's tensors by name.
        modules: dotted names of modules inside it; each must be called in the run.
        short: a batch.
        long: a longer one.
    """
    one, other = (_argument_shapes(model, modules, batch) for batch in (short, long))
    found: dict[str, Dims] = {}
    for name in modules:
        shapes = [(key, shape, other.get(name, {}).get(key, shape)) for key, shape in one.get(name, {}).items()]
        pairs = {key: tuple(i for i, sizes in enumerate(zip(a, b, strict=False)) if len(set(sizes)) > 1) for key, a, b in shapes}
        found[name] = {key: dims for key, dims in pairs.items() if dims}
    return found


def _argument_shapes(
    model: nn.Module, modules: Sequence[str], batch: Mapping[str, Tensor]
) -> dict[str, dict[str, tuple[int, ...]]]:
    seen: dict[str, dict[str, tuple[int, ...]]] = {}

    def watcher(name: str, signature: inspect.Signature) -> Callable[..., None]:
        def watch(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            seen[name] = {key: tuple(tensor.shape) for key, tensor in _tensors_in(given)}

        return watch

    with ExitStack() as undo, torch.random.fork_rng(devices=[]), torch.no_grad():
        for name in modules:
            module = model.get_submodule(name)
            watch = watcher(name, inspect.signature(module.forward))
            undo.callback(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        try:
            # The mode is not entered: what the model makes of no batch, as positions are, stays real, since its code may keep it.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            model(**{name: fake.from_tensor(tensor) for name, tensor in batch.items()})
        except Exception:  # what depends on values, or on a library torch does not know: then the real run says what is wrong
            model(**batch)
    return seen


def _tensors_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, as `value_at` of source_runtime.py finds them."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, list | tuple):
            yield from _tensors_in({str(index): one for index, one in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, dict):
            named = {key: one for key, one in value.items() if isinstance(key, str) and "." not in key}
            yield from _tensors_in(named, f"{prefix}{name}.")


def is_safe_to_copy(model: nn.Module) -> bool:
    """Whether nothing is attached to the model that might belong to it alone: hooks, or a forward in the place of its class's."""
    of_modules = any(
        "forward" in vars(module)
        or any(found for name, found in vars(module).items() if name.endswith("_hooks") and isinstance(found, Mapping))
        for module in model.modules()
    )
    of_weights = any(weights._backward_hooks or weights._post_accumulate_grad_hooks for weights in model.parameters())
    return not of_modules and not of_weights
