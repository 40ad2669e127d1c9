"""Finds what a sweep must know about a workload's batches: which dimensions change, how many samples there are, their kinds.

A dimension changes if its size differs between batches. Batches that hold the same tensors are of one kind.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compile_sweep.contract.tensor_uses import is_whole
from compile_sweep.contract.workload_facts import shown_name
from compile_sweep.schema.errors import WorkloadError

Dims = dict[str, tuple[int, ...]]
"""Dimensions by tensor name; `pair.0` is the first tensor in the list, tuple or dictionary `pair`."""


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
    """Compares the batches of a workload; raises WorkloadError if they differ in their tensors or number of samples.

    A tensor may be in some batches only, such as a mask. Its dimensions are compared in these.
    """
    first = in_any(batches)
    for batch in batches:
        if not batch.keys() & batches[0].keys() or any(tensor.dim() != first[name].dim() for name, tensor in batch.items()):
            other = [name for name, tensor in batch.items() if tensor.dim() != first[name].dim()]
            right = f"; name {other[0]!r} otherwise where it has other dimensions, which makes kinds of batches" if other else ""
            raise WorkloadError(f"batches differ in their tensors: one has {_shapes(first)}, another {_shapes(batch)}{right}")
    if not any(tensor.dim() for tensor in first.values()):
        raise WorkloadError("batches hold no tensor with a dimension; give a mapping of names to tensors")
    together: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name in sorted(first, key=lambda name: sum(name not in batch for batch in batches)):
        for dim in range(first[name].dim()):
            if len(set(sizes := _sizes_like_others(batches, name, dim, together))) > 1:
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
        _refuse_unequal_samples(batches, first, together)
    dims: Dims = {name: tuple(dim for one, dim in main if one == name) for name, _ in main}
    others: dict[str, dict[int, int]] = {}
    for sizes, group in together.items():
        for name, dim in group:
            if (name, dim) not in main:
                others.setdefault(name, {})[dim] = max(sizes)
    lengths = [max((batch[name].size(dim) for name, dim in main if name in batch), default=1) for batch in batches]
    changing = {place for group in together.values() for place in group}
    ragged = _why_ragged(changing, dims, others, told=length is not None)
    samples = max(map(_rows_of_list, batches)) or _samples(first, changing | {*main})
    return BatchChanges(length=dims, lengths=lengths, others=others, samples=samples, ragged=ragged)


def kinds_of(batches: Sequence[dict[str, Tensor]]) -> dict[tuple[str, ...], list[dict[str, Tensor]]]:
    """Returns the batches of each kind, by the sorted names of their tensors, in the order in which the kinds come."""
    kinds: dict[tuple[str, ...], list[dict[str, Tensor]]] = {}
    for batch in batches:
        kinds.setdefault(tuple(sorted(batch)), []).append(batch)
    return kinds


def remark_on_kinds(batches: Sequence[dict[str, Tensor]]) -> list[str]:
    """Says how many batches hold the tensors that only some batches hold; nothing if all hold the same."""
    kinds = kinds_of(batches)
    if len(kinds) == 1:
        return []
    in_all = set(batches[0]).intersection(*batches)
    told = []
    for names, some in sorted(kinds.items(), key=lambda kind: -len(kind[0])):
        only = " and ".join(repr(name) for name in names if name not in in_all)
        told.append(f"{len(some)} with {only}" if only else f"{len(some)} without")
    return [f"batches are of {len(kinds)} kinds, {', '.join(told)}: each kind has graphs of its own and is warmed up"]


def in_any(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of the first batch, and of those that it lacks the first."""
    return {**{name: one for batch in reversed(batches) for name, one in batch.items()}, **batches[0]}


def _sizes_like_others(
    batches: Sequence[Mapping[str, Tensor]], name: str, dim: int, together: Iterable[tuple[int, ...]]
) -> tuple[int, ...]:
    """Returns a dimension's size in each batch: where some lack the tensor, as of dimensions that agree in the other batches."""
    having = [number for number, batch in enumerate(batches) if name in batch]
    sizes = [batches[number][name].size(dim) for number in having]
    if len(having) == len(batches):
        return tuple(sizes)
    agree = (others for others in together if [others[number] for number in having] == sizes)
    alone = dict(zip(having, sizes, strict=True))
    of_samples = (
        dim == 0
        and len(set(sizes)) == 1
        and any(
            tensor.dim() and {batch[other].size(0) for batch in batches if other in batch} == set(sizes)
            for other, tensor in batches[having[0]].items()
            if all(other in batch for batch in batches)
        )
    )
    found = None if of_samples else next(agree, None)
    return found or tuple(alone.get(number, sizes[0]) for number in range(len(batches)))


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
    rows_of_all = {first[name].size(dim) for name, dim in changing if dim == 0}
    bounds = {name for name in outer if _are_bounds(first[name], steady.values(), rows_of_all)}
    if bounds == {*outer} and bounds:  # sequences one after the other, and where each of them begins
        return first[outer[0]].numel() - 1
    outer = [name for name in outer if name not in bounds]
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
    return dict.fromkeys(in_any(batches), (0,)) if len({samples for _, samples in sizes}) == 1 else {}


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
    if len(counts) != 1 or (len(rows) == 1 and (rows != {0} or counts <= {1, 2})):  # 2: source and target
        return 0
    return counts.pop()


def _are_bounds(tensor: Tensor, samples: Collection[int], rows_of_all: Collection[int]) -> bool:
    """Tells whether a tensor holds where each sample begins and where the last one ends, one number more than samples.

    That is so if something else has as many samples, or if the last one ends where the rows of all samples together do.
    """
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.numel() < 2:
        return False
    if tensor.numel() - 1 not in samples and int(tensor[-1]) not in rows_of_all:
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
    found = [shown_name(name) for name in sorted(set(names))]
    return " and ".join(found) if len(found) < 4 else f"{found[0]}, {found[1]} and {len(found) - 2} others"


def _refuse_unequal_samples(
    batches: Sequence[Mapping[str, Tensor]],
    first: Mapping[str, Tensor],
    together: Mapping[tuple[int, ...], Sequence[tuple[str, int]]],
) -> None:
    """Refuses batches whose tensors all have a varying number of rows."""
    with_rows = {name for name, tensor in first.items() if tensor.dim()}
    for sizes, group in together.items():
        if {name for name, dim in group if dim == 0} == with_rows:
            told = "{" + ", ".join(f"{name!r}: (0,)" for name in first if name in with_rows) + "}"
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
    names = [name for name in names if all(name in batch for batch in others)]
    if not others or not names:
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
