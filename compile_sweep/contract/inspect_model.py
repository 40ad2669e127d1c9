"""Finds what a sweep must know about a model and its batches: repeated blocks, and dimensions that change.

Repeated blocks are the members of a `ModuleList` (or, if there is none, of a `Sequential`, which may hold an embedding and a head
beside them, or of a `ModuleDict` whose members are equal) that are all of one class. If they differ in size and contain equal
blocks, like the stages of a vision model, the blocks are the inner ones. A model without such lists may have three or more equal
modules of a class of its own side by side. A dimension of a batch changes if its size differs between batches; a dimension of an
inner module's argument, if it differs between two runs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from compile_sweep.contract.tensor_uses import is_whole
from compile_sweep.schema.choices import MemoryFormat
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.shapes import make_policy

if TYPE_CHECKING:
    from compile_sweep.contract.base import Workload

_PER_REGION = 1 / 8
"""Compile time of a graph besides its layers, as a fraction of the whole model's. Measured ratios of regional to full were 0.24
for GPT-2, 1.7 for ResNet-50 (H100) and 0.3 for captioning (H200; docs/results.md).
"""

_FEWEST_LAYERS = 3
"""Equal modules that count as blocks without a list of them; two may be an encoder and a decoder, or two towers."""

Dims = dict[str, tuple[int, ...]]
"""Dimensions by tensor name; `pair.0` is the first tensor in the list, tuple or dictionary `pair`."""


def repeated_blocks(model: nn.Module) -> list[str]:
    """Returns the dotted names of the model's repeated blocks, none of which contains another."""
    found = (list(_blocks(model, kind, "")) for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    return next(filter(None, found), None) or _own_blocks(model)


def _own_blocks(model: nn.Module) -> list[str]:
    """Returns modules of classes that are not torch's, of which a module holds three or more that are equal."""
    alike: dict[Any, list[str]] = {}
    for name, parent in model.named_modules():
        is_container = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for key, module in parent.named_children():
            if (is_container and _is_own_layer(module)) or (_is_own(module) and any(module.children())):
                kind = (name, type(module), tuple(parameter.shape for parameter in module.parameters()))
                alike.setdefault(kind, []).append(f"{name}.{key}" if name else key)
    found = [name for names in alike.values() if len(names) >= _FEWEST_LAYERS for name in names]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _is_own_layer(module: nn.Module) -> bool:
    """Tells whether a module without modules in it has a forward that is not torch's, and a weight of two dimensions or more."""
    return _is_own(module) and not any(module.children()) and any(weights.dim() > 1 for weights in module.parameters())


def _is_own(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)  # the class of a torch.jit.ScriptModule has none
    return forward is not None and not forward.__module__.startswith("torch.")


def preferred_memory_format(model: nn.Module) -> MemoryFormat | None:
    """Returns the memory format worth trying: that of the convolutions if they are a large part of the model.

    They are if they have at least a fifth of the weights, or if they outnumber linear layers, as before the large classifier of a
    VGG. A transformer's patch embedding is a convolution too, but such a small part of the work that its format does not matter.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    num_linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    for layout, kind in ((MemoryFormat.CHANNELS_LAST, nn.Conv2d), (MemoryFormat.CHANNELS_LAST_3D, nn.Conv3d)):
        convolutions = [module for module in model.modules() if isinstance(module, kind)]
        held = sum(module.weight.numel() for module in convolutions)
        if held and (5 * held >= total or len(convolutions) > num_linear):
            return layout
    return None


def regional_share(model: nn.Module, regions: Sequence[str]) -> float:
    """Returns the compile time of scope=regional divided by that of scope=full, as estimated from the model's structure.

    Regions with equal structure and shapes are compiled once, so what counts is the fraction of the model's layers in distinct
    regions; and each of those has a graph of its own. 0.21 for GPT-2's twelve blocks, 1.5 for ResNet-50's four stages.
    """
    modules = (model.get_submodule(name) for name in regions)
    distinct = {(repr(module), tuple(weights.shape for weights in module.parameters())): module for module in modules}
    return sum(map(_num_layers, distinct.values())) / _num_layers(model) + _PER_REGION * len(distinct)


def _num_layers(module: nn.Module) -> int:
    return sum(not any(part.children()) for part in module.modules())


def has_attention(model: nn.Module) -> bool:
    """Tells whether any module is named attention, or calls torch's `scaled_dot_product_attention`."""
    kinds = {type(module) for module in model.modules()}
    if any("attention" in kind.__name__.lower() for kind in kinds):
        return True
    own = (kind for kind in kinds if not kind.__module__.startswith("torch.nn."))  # of torch's, only attention has it
    return any("scaled_dot_product_attention" in _source_of(kind) for kind in own)  # finding a source takes 0.1 s


def facts_of_blocks(blocks: Mapping[nn.Module, Sequence[str]]) -> dict[str, Any]:
    """Returns the fields of `WorkloadFacts` that follow from models and the names of their repeated blocks."""
    shares = [regional_share(model, names) for model, names in blocks.items() if names]
    facts: dict[str, Any] = {"regional_share": round(max(shares), 3)} if shares else {}
    return {**facts, "has_blocks": bool(shares), "has_attention": any(map(has_attention, blocks))}


def model_facts(workload: Workload) -> dict[str, Any]:
    """Returns the fields of `WorkloadFacts` that follow from the model; few if it cannot be built.

    It is built without values, or with them where that fails, or where blocks are found only by running it.
    """
    facts: dict[str, Any] = {"autocasts": workload.autocast_dtype(torch.device("cuda")) is not None}
    for device in ("meta", "cpu"):
        try:
            other = type(workload)(workload.size, workload.seed) if device == "meta" else workload  # makes batches with values
            with torch.device(device):
                model = other.build_model()
            blocks = other.regions(model)
        except Exception:  # a user's functions may raise anything, and no plan requires these facts
            continue
        if blocks or device == "cpu":
            return {**facts, **facts_of_blocks({model: blocks})}
    return facts


def batch_lengths(workload: Workload) -> tuple[int, ...]:
    """Returns the length of each batch in a workload's pool, in tokens; empty if its batches cannot be made here."""
    policy = make_policy(workload.max_length, multiple=1, buckets=None, min_length=workload.min_length)
    try:
        return tuple(batch.length for batch in workload.pool(policy, rank=0, device=torch.device("cpu")))
    except Exception:  # a user's functions may raise anything, and no plan requires this fact
        return ()


def _source_of(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in a notebook, or generated
        return ""


def _blocks(module: nn.Module, kind: type[nn.Module], prefix: str) -> Iterator[str]:
    members = _members(module, kind)
    own = [f"{prefix}{name}" for name in members]
    inside = (found for name, child in module.named_children() for found in _blocks(child, kind, f"{prefix}{name}."))
    yield from own if own and _are_equal(members.values()) else list(inside) or own


def _members(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    """Returns the blocks that a container holds by name: modules of one class, each with layers inside.

    A Sequential may hold other modules around them, such as an embedding and a head. A ModuleDict may hold the heads of tasks, so
    its members count only if they are equal.
    """
    if not isinstance(module, kind):
        return {}
    members = dict(module.named_children())
    if kind is nn.Sequential:
        members = _most_common(members)
    equal = kind is not nn.ModuleDict or _are_equal(members.values())
    return members if len(members) > 1 and equal and _are_blocks(members.values()) else {}


def _most_common(members: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns the members with layers inside that are of the most common class."""
    deep = {name: member for name, member in members.items() if any(member.children())}
    kind = next((kind for kind, _ in Counter(map(type, deep.values())).most_common(1)), None)
    blocks = {name: member for name, member in deep.items() if type(member) is kind}
    others = [member for name, member in deep.items() if name not in blocks]
    return {} if 2 * _num_weights(others) > _num_weights(blocks.values()) else blocks


def _are_blocks(modules: Iterable[nn.Module]) -> bool:
    """Tells whether the modules are all of one class with submodules: a single layer is not worth compiling separately."""
    (kind, *others) = {type(module) for module in modules}
    return not others and not issubclass(kind, nn.ModuleList | nn.ModuleDict) and all(any(m.children()) for m in modules)


def _num_weights(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _are_equal(modules: Iterable[nn.Module]) -> bool:
    return len({tuple(tuple(parameter.shape) for parameter in module.parameters()) for module in modules}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChanges:
    """How the tensors of a workload's batches change between batches."""

    length: Dims
    """The batches' length: the largest group of dimensions that change together."""
    lengths: Sequence[int]
    """Size of these dimensions in each batch; always 1 if nothing changes."""
    others: Mapping[str, Mapping[int, int]]
    """Dimensions that change independently of the length, with the largest size."""
    samples: int
    """Size of the first dimension of most tensors, if it is constant; 1 if it is constant in none."""
    ragged: str | None = None
    """Why padding would change the meaning of the batches, as far as their shapes show; None if it would not."""

    @property
    def dims(self) -> Dims:
        """Every dimension that changes."""
        names = [*self.length, *(name for name in self.others if name not in self.length)]
        return {name: tuple(sorted({*self.length.get(name, ()), *self.others.get(name, ())})) for name in names}


def find_batch_changes(
    batches: Sequence[Mapping[str, Tensor]], length: Mapping[str, Sequence[int]] | None = None
) -> BatchChanges:
    """Compares the batches of a workload; raises WorkloadError if they differ in their tensors or number of samples."""
    first = batches[0]
    for batch in batches:
        if {name: tensor.dim() for name, tensor in batch.items()} != {name: tensor.dim() for name, tensor in first.items()}:
            only = " and ".join(sorted(first.keys() ^ batch.keys()))
            right = f"; put {only} into all of them, a mask of ones where nothing is masked" if only else ""
            raise WorkloadError(f"batches differ in their tensors: one has {_shapes(first)}, another {_shapes(batch)}{right}")
    if not any(tensor.dim() for tensor in first.values()):
        raise WorkloadError("batches hold no tensor with a dimension; give a mapping of names to tensors")
    together: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, tensor in first.items():
        for dim in range(tensor.dim()):
            sizes = tuple(batch[name].size(dim) for batch in batches)
            if len(set(sizes)) > 1:
                together.setdefault(sizes, []).append((name, dim))
    if length is not None:
        main = [(name, dim) for name, dims in length.items() for dim in dims]
        for name, dim in main:
            if name not in first or not 0 <= dim < first[name].dim():
                raise WorkloadError(
                    f"dynamic dimension {dim} of {name}: batches have {_shapes(first)}; name dimensions from 0 on"
                )
    else:
        main = max(together.values(), key=len, default=[])
        _refuse_unequal_samples(batches, together)
    dims: Dims = {name: tuple(dim for one, dim in main if one == name) for name, _ in main}
    others: dict[str, dict[int, int]] = {}
    for sizes, group in together.items():
        for name, dim in group:
            if (name, dim) not in main:
                others.setdefault(name, {})[dim] = max(sizes)
    lengths = [max(batch[name].size(dim) for name, dim in main) for batch in batches] if main else [1] * len(batches)
    changing = {place for group in together.values() for place in group}
    ragged = _why_ragged(changing, dims, others, told=length is not None)
    samples = max(map(_rows_of_list, batches)) or _samples(first, changing | {*main})
    return BatchChanges(length=dims, lengths=lengths, others=others, samples=samples, ragged=ragged)


def _samples(first: Mapping[str, Tensor], changing: Collection[tuple[str, int]]) -> int:
    """Returns the size of the first dimension of most tensors, or of a second one if every first one is the length.

    In a batch of lists, such as one of images and one of their boxes, it is the number of members.
    """
    if members := _members_of_lists(first, changing):
        return members
    steady = {name: tensor.size(0) for name, tensor in first.items() if tensor.dim() and (name, 0) not in changing}
    if any(dim == 0 for _, dim in changing):  # a graph: its edges have a row of sources and one of targets
        edges = {name for name, rows in steady.items() if rows == 2 and (name, 1) in changing and is_whole(first[name])}
        steady = {name: rows for name, rows in steady.items() if name not in edges}
    outer = [name for name in steady if "." not in name] or list(steady)  # tensors inside lists may have rows of their own
    outer = [name for name in outer if not _are_bounds(first[name], set(steady.values()))] or outer
    if rows := [steady[name] for name in outer]:
        # Excludes, for example, the edges of a graph.
        whole = {steady[name] for name in outer if not any(one == name for one, _ in changing)}
        return max(rows, key=lambda size: (rows.count(size), size in whole))
    second = {tensor.size(1) if tensor.dim() > 1 and (name, 1) not in changing else 0 for name, tensor in first.items()}
    return second.pop() if len(second) == 1 and second != {0} else 1


def lengths_if_samples_are_second(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    """Returns the first dimension of every tensor, which may be the length; empty where the second cannot count samples."""
    leading = [{tuple(tensor.shape[:2]) for tensor in batch.values()} for batch in batches]
    sizes = {size for of_batch in leading for size in of_batch}
    if any(len(of_batch) != 1 for of_batch in leading) or len(sizes) == 1 or any(len(size) != 2 for size in sizes):
        return {}
    return dict.fromkeys(batches[0], (0,)) if len({samples for _, samples in sizes}) == 1 else {}


def samples_are_second(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Tells whether the second dimension of all tensors counts samples, and not the first."""

    def flipped(*dims: int) -> dict[str, Tensor]:
        return {name: tensor.flip(dims) for name, tensor in batch.items()}

    return _is_an_order_of_samples(model, batch, flipped(1), flipped(0))


def lengths_if_rows_are_samples(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[int, ...]] | None:
    """Returns the length of plain lists of equal tensors, if they are rows, not columns; None for batches of another form."""
    for batch in batches:
        shapes = {(tensor.dtype, tensor.shape) for tensor in batch.values()}
        if len(batch) <= 2 or not all(map(str.isdigit, batch)) or len(shapes) > 1 or not batch["0"].dim():
            return None
    return dict.fromkeys(batches[0], (0,)) if len({batch["0"].shape for batch in batches}) > 1 else {}


def rows_are_samples(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Tells whether each tensor of a plain list of equal ones is a sample, and not a number for each sample."""
    reordered = dict(zip(batch, reversed([*batch.values()]), strict=True))
    return _is_an_order_of_samples(model, batch, reordered, {name: tensor.flip(0) for name, tensor in batch.items()})


def _is_an_order_of_samples(
    model: nn.Module, batch: Mapping[str, Tensor], reordered: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> bool:
    """Tells whether the loss is the same of a reordered batch, and not of one that is reordered in another way.

    The order of samples changes no loss, and that of tokens or frames does. The model is put into evaluation mode.
    """
    model.eval()

    def loss(inputs: Mapping[str, Tensor]) -> float:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return float(model(**inputs).detach())

    try:
        as_it_is, as_samples, otherwise = loss(batch), loss(reordered), loss(other)
    except Exception:  # a user's functions may raise anything; the first step says what is wrong
        return False
    return abs(as_samples - as_it_is) <= 1e-5 * abs(as_it_is) < abs(otherwise - as_it_is)


def _rows_of_list(first: Mapping[str, Tensor]) -> int:
    """Returns how many rows a batch has that is a plain list of rows of several lengths; 0 if it is something else."""
    rows = list(first.values())
    if len(rows) <= 2 or not all(map(str.isdigit, first)) or not all(row.dim() for row in rows):  # 2: source and target
        return 0
    are_alike = len({(row.dtype, row.shape[1:]) for row in rows}) == 1
    return len(rows) if are_alike and len({row.size(0) for row in rows}) > 1 else 0


def _members_of_lists(first: Mapping[str, Tensor], changing: Collection[tuple[str, int]]) -> int:
    """Returns how many members each list of a batch of lists has; 0 if it is none, or its tensors have their samples in rows."""
    members: dict[str, set[str]] = {}
    for name in first:
        of_list, _, rest = name.partition(".")
        members.setdefault(of_list, set()).add(rest.partition(".")[0])
    counts = {len(found) if all(map(str.isdigit, found)) else 0 for found in members.values()}
    rows = {0 if (name, 0) in changing else tensor.size(0) for name, tensor in first.items() if tensor.dim()}
    return counts.pop() if len(counts) == 1 and len(rows) > 1 else 0


def _are_bounds(tensor: Tensor, sizes: Collection[int]) -> bool:
    """Tells whether a tensor holds where each sample begins and where the last one ends, one number more than samples."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.numel() - 1 not in sizes:
        return False
    return int(tensor[0]) == 0 and bool((tensor.diff() >= 0).all())


def _why_ragged(
    changing: Collection[tuple[str, int]], length: Dims, others: Mapping[str, Mapping[int, int]], *, told: bool
) -> str | None:
    rows = [name for name, dim in changing if dim == 0]
    if rows:
        return f"the first dimension of {_listed(rows)} changes"
    twice = [] if told else [name for name, dims in others.items() if name in length or len(dims) > 1]
    return f"two dimensions of {_listed(twice)} change apart" if twice else None


def _listed(names: Iterable[str]) -> str:
    found = sorted(set(names))
    return " and ".join(found) if len(found) < 4 else f"{found[0]}, {found[1]} and {len(found) - 2} others"


def _refuse_unequal_samples(
    batches: Sequence[Mapping[str, Tensor]], together: Mapping[tuple[int, ...], Sequence[tuple[str, int]]]
) -> None:
    """Refuses batches whose tensors all have a varying number of rows."""
    with_rows = {name for name, tensor in batches[0].items() if tensor.dim()}
    for sizes, group in together.items():
        if {name for name, dim in group if dim == 0} == with_rows:
            told = "{" + ", ".join(f"{name!r}: (0,)" for name in batches[0] if name in with_rows) + "}"
            raise WorkloadError(
                f"batches of {' and '.join(map(str, sorted(set(sizes))))} samples cannot be timed together; leave odd ones out"
                + _if_samples_come_later(batches)
                + f"; if the first dimension is the length, or batches hold as many tokens instead, say so with dynamic={told}"
            )


def _if_samples_come_later(batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Returns an additional hint if all tensors share another dimension of constant size, which may be the samples."""
    shapes = [tensor.shape for batch in batches for tensor in batch.values() if tensor.dim()]
    rank = min(map(len, shapes))
    same = [dim for dim in range(1, rank) if len({shape[dim] for shape in shapes}) == 1]
    if not same:
        return ""
    return f", or, if dimension {same[0]} is the samples, put it first in the batch and transpose in the loss function"


def without_smaller_last(batches: Sequence[dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], str | None]:
    """Drops a last batch with fewer samples, as from a loader without `drop_last`, and says so."""
    *others, last = batches
    names = [name for name, tensor in last.items() if tensor.dim()]
    if not others or not names or any(batch.keys() != last.keys() for batch in others):
        return list(batches), None
    same = [name for name in names if len({tuple(batch[name].shape[:1]) for batch in others}) == 1]
    rows = [others[0][name].size(0) for name in same if others[0][name].dim()]
    samples = max(rows, key=rows.count, default=0)
    now = {last[name].size(0) for name in same if others[0][name].shape[:1] == (samples,)}
    if len(now) != 1 or samples <= (left := now.pop()) or len(others) < 2:
        return list(batches), None
    return others, f"batch {len(others)} has {left} samples in place of {samples} and is left out, as with drop_last=True"


def _shapes(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())


def find_dynamic_arguments(model: nn.Module, modules: Sequence[str], batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Dims]:
    """Finds the dimensions of each module's tensor arguments that differ between runs of the model.

    The runs use fake tensors, which have shapes but no data, if the model allows it.

    Args:
        batches: Two or more that differ in length, and in anything that may omit an argument, such as a mask of ones.
    """
    runs = [_argument_shapes(model, modules, batch) for batch in batches]
    found: dict[str, Dims] = {}
    for name in modules:
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for run in runs:
            for key, shape in run.get(name, {}).items():
                shapes.setdefault(key, []).append(shape)
        dims = {
            key: tuple(i for i, sizes in enumerate(zip(*seen, strict=False)) if len(set(sizes)) > 1)
            for key, seen in shapes.items()
        }
        found[name] = {key: changing for key, changing in dims.items() if changing}
    return found


def _argument_shapes(
    model: nn.Module, modules: Sequence[str], batch: Mapping[str, Tensor]
) -> dict[str, dict[str, tuple[int, ...]]]:
    seen: dict[str, dict[str, tuple[int, ...]]] = {}

    def watcher(name: str, signature: inspect.Signature) -> Callable[..., None]:
        def watch(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            seen[name] = {key: tuple(tensor.shape) for key, tensor in tensors_in(given)}

        return watch

    with ExitStack() as undo, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name in modules:
            module = model.get_submodule(name)
            watch = watcher(name, inspect.signature(module.forward))
            undo.callback(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        _run_on_shapes(model, batch)
    return seen


def find_reused_modules(model: nn.Module, inside: str, batch: Mapping[str, Tensor]) -> list[str]:
    """Finds the outermost modules that one run repeats: recurrent cells, and modules of an own class or with modules inside."""
    called: dict[str, int] = {}
    with ExitStack() as undo, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, module in model.get_submodule(inside).named_modules(prefix=inside):
            is_block = any(module.children()) or _is_own_layer(module) or isinstance(module, nn.RNNCellBase)
            if name != inside and is_block and not isinstance(module, nn.ModuleList | nn.ModuleDict):

                def count(module: nn.Module, args: Any, name: str = name) -> None:
                    called[name] = called.get(name, 0) + 1

                undo.callback(module.register_forward_pre_hook(count).remove)
        _run_on_shapes(model, batch, before_again=called.clear)
    fewest = {name: 2 if any(model.get_submodule(name).children()) else _FEWEST_LAYERS for name in called}
    often = [name for name, calls in called.items() if calls >= fewest[name]]
    return [name for name in often if not any(name.startswith(f"{other}.") for other in often)]


HOOKS = "", -1  # what a first forward changes, if it installs hooks or forwards


def first_forward_changes(
    model: nn.Module, batch: Mapping[str, Tensor], *, on_shapes: bool
) -> dict[tuple[str, int], bool | int | float | str | None]:
    """Runs the model once, without dropout, and returns what that changes: `HOOKS`, and values by name and number of the config.

    Args:
        model: Takes a batch's tensors by name. Its gradients and its mode are restored.
        on_shapes: Whether to run it on fake tensors, some of which the model may keep.
    """
    attached, configured = _attached(model), _configuration(model)
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _run_on_shapes(model, batch) if on_shapes else model(**batch)
    except Exception:  # the model does not run; its first step will say why
        return {}
    finally:
        for module, mode in training.items():
            module.training = mode
        model.zero_grad(set_to_none=True)
    hooks = {HOOKS: None} if any(attached.get(name, now) != now for name, now in _attached(model).items()) else {}
    return hooks | {at: value for at, value in _configuration(model).items() if repr(configured.get(at, value)) != repr(value)}


def set_configuration(model: nn.Module, changes: Mapping[tuple[str, int], Any]) -> None:
    """Sets the values that a first forward would set."""
    configs = _configs(model)
    for (name, number), value in changes.items():
        setattr(configs[number], name, value)


def remarks_on_first_forward(changes: Mapping[tuple[str, int], Any]) -> list[str]:
    """Says what is done in advance because the first forward would do it."""
    hooks = ["runs the model once before anything is compiled: its first forward installs hooks"] if HOOKS in changes else []
    named = " and ".join(f"config.{name}" for name, _ in changes if name)
    return [*hooks, f"sets {named} before anything is compiled, as the model's first forward would"] if named else hooks


def initialize_lazy_weights(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Runs a model once, without dropout, if it has weights whose sizes its first forward finds out, as `nn.LazyLinear` does."""
    lazy = [weights for weights in (*model.parameters(), *model.buffers()) if is_lazy(weights)]
    if lazy:
        with torch.random.fork_rng(devices=[]):
            model.eval()(**{name: tensor.to(lazy[0].device) for name, tensor in batch.items()})
        model.zero_grad(set_to_none=True)


def _configs(model: nn.Module) -> list[Any]:
    held = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in held if hasattr(config, "__dict__")}.values())


def _attached(model: nn.Module) -> dict[str, tuple[int, bool]]:
    return {
        name: (len(module._forward_hooks) + len(module._forward_pre_hooks), "forward" in vars(module))
        for name, module in model.named_modules()
    }


def _configuration(model: nn.Module) -> dict[tuple[str, int], bool | int | float | str | None]:
    return {
        (name, number): value
        for number, config in enumerate(_configs(model))
        for name, value in vars(config).items()
        if isinstance(value, bool | int | float | str | None)
    }


def _run_on_shapes(model: nn.Module, batch: Mapping[str, Tensor], before_again: Callable[[], None] = lambda: None) -> None:
    """Runs the model on fake tensors, which have shapes but no data, or on the batch itself if it does not allow that."""
    try:
        # The fake mode is not entered: tensors that the model creates, such as positions, stay real, since the model may keep
        # them.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model(**{name: fake.from_tensor(tensor) for name, tensor in batch.items()})
    except Exception:  # data-dependent code, or an unsupported library: the real run then reports any real error
        before_again()
        model(**batch)


def tensors_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields tensors by name, also those in lists, tuples and mappings, as `value_at` in source_runtime.py names them."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, list | tuple):
            yield from tensors_in({str(index): one for index, one in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            named = {key: one for key, one in value.items() if isinstance(key, str) and "." not in key}
            yield from tensors_in(named, f"{prefix}{name}.")


def is_safe_to_copy(model: nn.Module) -> bool:
    """Tells whether a copy would be independent of the model: no hooks, and no replaced forward."""
    of_modules = any(
        "forward" in vars(module)
        or any(found for name, found in vars(module).items() if name.endswith("_hooks") and isinstance(found, Mapping))
        for module in model.modules()
    )
    of_weights = any(weights._backward_hooks or weights._post_accumulate_grad_hooks for weights in model.parameters())
    return not of_modules and not of_weights


def copied(model: nn.Module) -> nn.Module | None:
    """Copies the model; None if it cannot be copied or the copy would share state, such as weights held by a closure."""
    try:
        return deepcopy(model) if is_safe_to_copy(model) else None
    except Exception:  # whatever prevents a copy, such as a lock, may raise anything
        return None
