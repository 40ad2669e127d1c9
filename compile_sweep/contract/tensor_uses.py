"""How a step uses the integer tensors of its batch: targets of a loss that ignores an index, ids, or positions.

A step runs once on shapes alone, and each operation is examined that takes one of them, unchanged or rearranged. So targets
are recognized by the loss and its `ignore_index`, whatever their names, and so are numbers that padding would invalidate.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IGNORE_INDEX = -100
"""What targets hold where the losses of torch and Hugging Face ignore them."""

_LOSSES = {"nll_loss_forward": (1, 4), "nll_loss2d_forward": (1, 4)}
"""Operators with a target and an ignored index, and the positions of these among their arguments."""

_INDEXING = {"index", "index_select", "gather", "index_add", "index_put", "index_put_", "index_add_", "scatter", "scatter_add"}
"""Operators that take positions in another tensor."""

_MOVING = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "select", "slice", "t", "transpose", "permute"}
_MOVING |= {"clone", "_to_copy", "alias", "detach", "unbind", "split", "flatten", "contiguous"}
_MOVING |= {"constant_pad_nd", "cat", "stack", "roll", "flip", "repeat"}  # such as targets after a first token
"""Operators whose result contains the numbers of their argument."""


@dataclass(slots=True)
class TensorUses:
    """Uses of a batch's integer tensors, by name."""

    ignored: dict[str, int] = field(default_factory=dict)
    """Targets of a loss, with the index that it ignores."""
    ids: set[str] = field(default_factory=set)
    """Row numbers of an embedding table."""
    bags: set[str] = field(default_factory=set)
    """Ids that an `EmbeddingBag` sums, and the beginnings of its bags."""
    positions: set[str] = field(default_factory=set)
    """Positions in another tensor that is not a table of weights: spans, edges of a graph, bounds of packed sequences."""


def all_uses(found: Iterable[TensorUses | None], batches: Sequence[Mapping[str, Tensor]], names: Collection[str]) -> TensorUses:
    """Returns the uses in several steps, such as one for each kind of batch; tensors of these names that hold -100 ignore it."""
    marked = [name for name in names if any(bool((raw[name] == IGNORE_INDEX).any()) for raw in batches if name in raw)]
    every = TensorUses(ignored=dict.fromkeys(marked, IGNORE_INDEX))
    for uses in filter(None, found):
        every.ignored |= uses.ignored
        every.ids |= uses.ids
        every.bags |= uses.bags
        every.positions |= uses.positions
    return every


class _Watch(TorchDispatchMode):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = TensorUses()
        self._names: dict[int, set[str]] = {}
        self._moved: set[int] = set()
        self._kept: list[Tensor] = []  # keeps tensors alive, because another one could get the id of a deleted one
        for name, tensor in tensors.items():
            self._keep(tensor, {name}, moved=True)

    def _keep(self, tensor: Tensor, names: set[str], *, moved: bool) -> None:
        self._kept.append(tensor)
        self._names[id(tensor)] = self._names.get(id(tensor), set()) | names
        if moved:
            self._moved.add(id(tensor))

    def _of(self, value: Any) -> set[str]:
        return set().union(*(self._names.get(id(one), set()) for one in tree_leaves(value) if isinstance(one, Tensor)))

    def _as_it_is(self, value: Any) -> set[str]:
        return self._of([one for one in tree_leaves(value) if id(one) in self._moved])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _LOSSES:
            target, ignored = (args[place] if place < len(args) else None for place in _LOSSES[name])
            self.uses.ignored |= dict.fromkeys(self._of(target), int(ignored) if isinstance(ignored, int) else IGNORE_INDEX)
        elif name == "embedding":
            self.uses.ids |= self._as_it_is(args[1])
        elif name.startswith("_embedding_bag"):
            self.uses.bags |= self._of(args[1:3])
        elif name == "gather" and args[2].size(args[1]) == 1:
            pass  # one number of each row, such as the log-probability of its target: a row more is one that a mask leaves out
        elif name in _INDEXING:
            used = self.uses.ids if isinstance(args[0], nn.Parameter) else self.uses.positions
            used |= self._as_it_is(args[1:])
        if names := self._of([args, kwargs]):
            moved = name in _MOVING and bool(self._as_it_is(args[:1]))
            for one in tree_leaves(result):
                if isinstance(one, Tensor) and not (one.is_floating_point() or one.is_complex() or one.dtype is torch.bool):
                    self._keep(one, names, moved=moved)
        return result


def find_uses(model: nn.Module, batch: Mapping[str, Tensor]) -> TensorUses | None:
    """Determines how a step uses the batch's integer tensors; None if it does not run. Give it a copy of the model."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    batch = each_its_own(batch)
    for to_run in (lambda: {name: fake.from_tensor(tensor) for name, tensor in batch.items()}, lambda: dict(batch)):
        try:
            tensors = to_run()
            watch = _Watch({name: tensor for name, tensor in tensors.items() if is_whole(tensor)})
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), watch:
                model(**tensors)
        except Exception:  # a user's functions may raise anything; a real step will say what is wrong
            continue
        return watch.uses
    return None


def each_its_own(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that are in the batch under several names, such as labels that are the ids, to tell their uses apart."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in batch.items():
        apart[name] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    return apart


def is_whole(tensor: Tensor) -> bool:
    """Tells whether a tensor contains integers that may be ids or targets."""
    return tensor.dtype in (torch.int32, torch.int64)
