"""Converts loaders' batches to tensors by name and back: dictionaries, tuples, lists, dataclasses, graphs, nested tensors.

A dictionary of tensors stays unchanged. In any other batch, each tensor gets a name: `0` and `1` in a pair,
`labels.0.boxes` in a list of dictionaries under `labels`. The rest is a `Structure`, which puts the tensors back in place.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from compile_sweep.contract.arguments import parameters_of
from compile_sweep.schema.errors import WorkloadError

SINGLE = "batch"  # name of the tensor in a batch that is a single tensor

_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), enum.Enum, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The parts of a batch other than its tensors."""

    kind: str  # tensor, jagged, constant, mapping, sequence, fields, attributes or, of batches of several kinds, either
    name: str = ""  # name of a tensor; for a jagged one, the common part of the names of its `values` and `offsets`
    keys: tuple[Any, ...] = ()  # of `either`, the sorted names of the tensors of each kind of batch
    parts: tuple[Structure, ...] = ()
    value: Any = None  # a constant, or what makes the container: a class, or an object to copy

    def named_parts(self, name: str) -> Iterator[tuple[str, Structure]]:
        """Yields the parts, by their dotted names in a batch in which this has a name."""
        for key, part in zip(self.keys or range(len(self.parts)), self.parts, strict=True):
            yield f"{name}.{key}" if name else str(key), part


def flatten(batch: Any) -> tuple[dict[str, Tensor], Structure | None]:
    """Returns a batch's tensors by name, and its structure, None for a dictionary of tensors; WorkloadError names a misfit."""
    if type(batch) is dict and batch and all(_is_plain(name, value) for name, value in batch.items()):
        return dict(batch), None
    tensors: dict[str, Tensor] = {}
    structure = _taken_apart(batch, "", tensors)
    if structure.kind == "constant":
        raise WorkloadError(
            f"the batch function returned {type(batch).__name__}; return tensors in a dictionary, a tuple, a list or a dataclass"
        )
    if not tensors:
        raise WorkloadError(
            f"the batch function returned a {type(batch).__name__} without a tensor; put the tensors of the batch into it"
        )
    return tensors, structure


def rebuild(structure: Structure, tensors: Mapping[str, Tensor]) -> Any:
    """Puts tensors back in their places in the batch. Dynamo can trace this."""
    if structure.kind == "tensor":
        return tensors[structure.name]
    if structure.kind == "constant":
        return structure.value
    if structure.kind == "either":
        return rebuild(structure.parts[structure.keys.index(tuple(sorted(tensors)))], tensors)
    if structure.kind == "jagged":
        values, offsets = tensors[f"{structure.name}.values"], tensors[f"{structure.name}.offsets"]
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    parts = [rebuild(part, tensors) for part in structure.parts]
    if structure.kind == "sequence":
        return structure.value(parts)
    named = dict(zip(structure.keys, parts, strict=True))
    if structure.kind == "mapping":
        return named if structure.value is dict else structure.value(named)
    if structure.kind == "fields":
        return structure.value(**named)
    rebuilt = copy.copy(structure.value)
    for (name, part), held in zip(named.items(), structure.parts, strict=True):
        if held.kind != "constant":  # the copy has it
            setattr(rebuilt, name, part)
    return rebuilt


def another_object(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on a device as an object of its own, which shares the data if that is there already.

    The compiler notes dynamic dimensions on a tensor's object, so marks on a kept batch would outlive the trial that sets them.
    """
    moved = tensor.to(device)
    return tensor.detach().requires_grad_(tensor.requires_grad) if moved is tensor else moved


@contextmanager
def unchanged(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuses a step that writes into its batch, because later steps and eager ones would see a changed batch."""
    # Inference tensors do not count changes.
    counted = {name: tensor for name, tensor in inputs.items() if not tensor.is_inference()}
    before = {name: tensor._version for name, tensor in counted.items()}
    yield
    if changed := [name for name, tensor in counted.items() if tensor._version != before[name]]:
        what = " and ".join(map(repr, changed))
        raise WorkloadError(
            f"a step changes {what} of its batch in place, so that the next step on it would compute something else; make a new "
            "tensor in the model or loss function, x - 0.5 in place of x.sub_(0.5), or a clone first"
        )


def constants_of(structure: Structure | None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields a batch's constants, by name."""
    if structure is None:
        return
    if structure.kind == "constant":
        yield name, structure.value
    for inner, part in structure.named_parts(name):
        yield from constants_of(part, inner)


def one_structure(batches: Sequence[tuple[Mapping[str, Tensor], Structure | None]]) -> tuple[Structure | None, list[str]]:
    """Returns the structure of all batches, with None for texts that differ, and their names; WorkloadError if it differs.

    Batches may differ in which tensors they hold, such as a mask; the structure is then `either` of one of each kind.
    """
    kinds: dict[tuple[str, ...], list[Structure | None]] = {}
    for tensors, structure in batches:
        kinds.setdefault(tuple(sorted(tensors)), []).append(structure)
    if all(structure is None for _, structure in batches) or len(kinds) == 1:
        return _common_structure([structure for _, structure in batches])
    explicit = [[one or _plain(names) for one in structures] for names, structures in kinds.items()]
    first = explicit[0][0]
    for structures in explicit[1:]:
        if not _differ_in_presence(first, structures[0]):
            raise WorkloadError(f"batches differ in what they are made of: {_difference(first, structures[0])}")
    found = [_common_structure(structures) for structures in explicit]
    texts = dict.fromkeys(name for _, names in found for name in names)
    return Structure("either", keys=tuple(kinds), parts=tuple(part for part, _ in found if part)), list(texts)


def _plain(names: Sequence[str]) -> Structure:
    """Returns the structure of a dictionary of tensors."""
    return Structure("mapping", keys=tuple(names), parts=tuple(Structure("tensor", name) for name in names), value=dict)


def _differ_in_presence(one: Structure, other: Structure) -> bool:
    """Tells whether two batches differ only in keys that one of them lacks, or has as None."""
    if any(held.kind == "constant" and held.value is None for held in (one, other)):
        return True
    if one.kind != other.kind or (one.kind == "sequence" and len(one.parts) != len(other.parts)):
        return False
    mine, theirs = (dict(held.named_parts("")) for held in (one, other))
    return all(_differ_in_presence(mine[key], theirs[key]) for key in mine.keys() & theirs.keys())


_NUMBERS_OF_TENSORS = "with dynamo.capture_scalar_outputs=on in the settings where the model needs its .item() or .tolist()"
"""What keeps numbers that are read from a tensor in the graph."""


def _common_structure(structures: Sequence[Structure | None]) -> tuple[Structure | None, list[str]]:
    """Returns the structure of batches of one kind, and the names of texts; WorkloadError if it differs."""
    first = structures[0]
    constants, texts = dict(constants_of(first)), dict[str, None]()
    for structure in structures[1:]:
        for name, value in constants_of(structure):
            if name not in constants or constants[name] == value:
                continue
            if _is_list_of_numbers(value):
                raise WorkloadError(
                    f"the batch function returned {name!r} as a list of numbers, which differ from batch to batch; use "
                    f"torch.tensor(…) of it, {_NUMBERS_OF_TENSORS}"
                )
            if not _is_text(value):
                raise WorkloadError(
                    f"batches hold {name!r} as {type(value).__name__}, once {constants[name]!r} and once {value!r}; make it a "
                    f"tensor if the step computes with it, {_NUMBERS_OF_TENSORS}; compute it in the model from the batch's "
                    "tensors, such as x.size(1); or leave it out of the batch"
                )
            texts[name] = None
        if _outline(structure) != _outline(first):
            raise WorkloadError(f"batches differ in what they are made of: {_difference(first, structure)}")
    return (_without(first, texts) if first and texts else first), list(texts)


def _without(structure: Structure, names: Collection[str], name: str = "") -> Structure:
    if structure.kind == "constant":
        return dataclasses.replace(structure, value=None) if name in names else structure
    parts = tuple(_without(part, names, inner) for inner, part in structure.named_parts(name))
    return dataclasses.replace(structure, parts=parts)


class BatchesOf:
    """A batch function that returns by number the batches of a loader that can be iterated repeatedly; an iterator cannot."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def __call__(self, number: int) -> Any:
        """Returns the batch of that number; raises StopIteration after the last."""
        if self._iterator is None or number < self._next:
            self._iterator, self._next = iter(self.loader), 0
        for _ in range(number - self._next):
            next(self._iterator)
        self._next = number + 1
        return next(self._iterator)


def takes(batch_fn: Callable[..., Any] | None, argument: str) -> bool:
    """Tells whether the function has an argument of that name with a default."""
    taken = parameters_of(batch_fn).get(argument)
    return taken is not None and taken.default is not Parameter.empty


def _outline(structure: Structure | None) -> Any:
    if structure is None:
        return None
    return structure.kind, structure.name, structure.keys, tuple(map(_outline, structure.parts))


_MADE_SAME = "make it the same in all of them"


def _difference(one: Structure | None, other: Structure | None, name: str = "") -> str:
    """Says where the structures of two batches differ first."""
    named = repr(name) if name else "the batch"
    if (one is None or other is None) and (held := one or other) is not None and held.kind == "mapping":
        other_than_tensors = [pair for pair in zip(held.keys, held.parts, strict=True) if pair[1].kind != "tensor"]
        key, part = other_than_tensors[0] if other_than_tensors else ("the batch", held)
        return f"{key!r} is {_described(part)} in one and a tensor in another; {_MADE_SAME}"
    if one is None or other is None or one.kind != other.kind:
        return f"{named} is {_described(one)} in one and {_described(other)} in another; {_MADE_SAME}"
    if one.keys != other.keys:
        only = [repr(key) for key in (*one.keys, *other.keys) if (key in one.keys) != (key in other.keys)]
        return f"only some have {' and '.join(only)}; put it into all of them"
    if len(one.parts) != len(other.parts):
        return (
            f"{named} has {len(one.parts)} parts in one and {len(other.parts)} in another; use lists of one length, or one tensor"
        )
    for (inner, mine), theirs in zip(one.named_parts(name), other.parts, strict=True):
        if _outline(mine) != _outline(theirs):
            return _difference(mine, theirs, inner)
    return f"{named} has other tensors"


def _described(structure: Structure | None) -> str:
    if structure is None:
        return "a dictionary of tensors"
    if structure.kind == "constant":
        return repr(structure.value)
    return "a tensor" if structure.kind in ("tensor", "jagged") else f"a {getattr(structure.value, '__name__', 'container')}"


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and not value.is_nested


def _taken_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Structure:
    inside = f"{name}." if name else ""
    if isinstance(value, Tensor):
        name = name or SINGLE
        if value.is_nested:
            if value.layout is not torch.jagged:
                raise WorkloadError(f"{name} is a nested tensor of torch's older kind; make it with layout=torch.jagged")
            tensors[f"{name}.values"], tensors[f"{name}.offsets"] = value.values(), value.offsets()  # type: ignore[attr-defined]
            return Structure("jagged", name)
        tensors[name] = value
        return Structure("tensor", name)
    if isinstance(value, _CONSTANTS) or _is_text(value) or (name and _is_list_of_numbers(value)):
        return Structure("constant", value=value)
    keys: Sequence[Any]
    parts: Sequence[Any]
    make: Any = type(value)
    if isinstance(value, Mapping):
        keys, parts = list(value), list(value.values())
        kind, make = "mapping", dict if type(value) is dict else _maker_of(value)
    elif isinstance(value, list | tuple):
        if _is_list_of_numbers(value):
            raise WorkloadError("the batch function returned 'a batch' as a list of numbers; use torch.tensor(…) of it")
        keys, parts, kind = range(len(value)), value, "sequence"
        make = getattr(make, "_make", make)  # for a named tuple
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = [field.name for field in dataclasses.fields(value) if field.init]
        parts, kind, make = [getattr(value, key) for key in keys], "fields", type(value)
    elif (held := _attributes(value)) is not None:
        keys, parts, kind, make = list(held), list(held.values()), "attributes", value
    else:
        raise WorkloadError(
            f"the batch function returned {name or 'a batch'!r} as {type(value).__name__}, not a tensor; return tensors"
            + (", torch.from_numpy(…)" if type(value).__name__ == "ndarray" else "")
        )
    made = tuple(_taken_apart(part, f"{inside}{key}", tensors) for key, part in zip(keys, parts, strict=True))
    return Structure(kind, keys=tuple(keys) if kind != "sequence" else (), parts=made, value=make)


def _is_text(value: Any) -> bool:
    """Tells whether this is a text, or a list of texts such as the names of a batch's files."""
    texts = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(one, str | bytes) for one in texts)


def _maker_of(value: Mapping[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    """Returns what makes a mapping of this class; `dict` if the class needs other arguments."""
    kind = type(value)
    try:
        kind(dict(value))  # type: ignore[call-arg]
    except Exception:  # a class of another library may raise anything
        return dict
    return kind


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns the parts of a graph such as PyTorch Geometric's `Data` or `Batch`: an object with `to_dict` and attributes."""
    to_dict = getattr(value, "to_dict", None)
    if not callable(to_dict):
        return None
    held = to_dict()
    kept = (Tensor, int, float, str)
    return {key: one for key, one in held.items() if isinstance(one, kept)} if isinstance(held, Mapping) else None


def _is_list_of_numbers(value: Any) -> bool:
    """Tells whether this is a list of numbers, or of lists of them, such as the lengths of a batch's rows."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(_is_list_of_numbers(one) or (isinstance(one, int | float) and not isinstance(one, bool)) for one in value)
