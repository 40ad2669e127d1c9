"""Finds tensors of a model that its forward both reads and changes in place, of which torch may compute wrong gradients.

Background: eager autograd keeps what an operation reads, and raises an exception where that has changed before the backward
pass, unless the forward has copied it first. Compiled code leaves the copy out, or computes what followed from it again in the
backward pass, from the tensor as it is by then: a queue of features or a running center, read and then updated, gives gradients
that belong to another loss. So it is where the forward changes a tensor and then reads it, such as a counter of steps: the
backward pass that torch 2.13 compiles may change it once more. A new tensor, assigned in place of the old one, has neither.

Output: names of such tensors: buffers of the user's own modules, and frozen parameters. torch.nn's own buffers, such as running
statistics, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compile_sweep.contract.seeding import own_random_numbers
from compile_sweep.harness.distributed import num_workers
from compile_sweep.harness.numerics.compiling_branches import compiling_branches
from compile_sweep.harness.numerics.finite_differences import PRECISIONS, Differentiated, FiniteDifferences, untrained_tensors
from compile_sweep.harness.numerics.gradient_check import GradientCheck

_SEED = 0x5EED


def with_what_changed(
    found: GradientCheck, model: nn.Module, step: Differentiated, eagerly: Callable[[], AbstractContextManager[Any]]
) -> GradientCheck:
    """Returns a check with what a forward does that may make compiled code differ; workers call this together."""
    before, after = changes_in_place(model, step, eagerly)
    return replace(found, read_then_changed=before, changed_then_read=after, compiling_branches=compiling_branches(model))


def changes_in_place(
    model: nn.Module, step: Differentiated, eagerly: Callable[[], AbstractContextManager[Any]]
) -> tuple[list[str], list[str]]:
    """Returns names of tensors that an eager forward reads for its gradients and then changes in place, and the other way round.

    A step that torch cannot watch, such as one with `flex_attention`, gives no names.
    """
    held = _of_the_user(model)
    if not held:
        return [], []
    precision, watched = PRECISIONS[0][1], None
    try:
        watched = _Watched(step, precision, rounding=0.0, seed=_SEED, draws=True, eagerly=eagerly, starts_nearby=False)
        return watched.names(held)
    except Exception as error:  # what cannot be watched may raise anything, and memory may not suffice for the copies
        if num_workers() > 1 and not isinstance(error, NotImplementedError):  # others wait for this worker
            raise
        return [], []
    finally:
        if watched is not None:
            watched.put_back()


def _of_the_user(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that may be meant, by name."""
    owners = {name: type(module).__module__ for name, module in model.named_modules()}
    return {
        name: tensor
        for name, tensor in untrained_tensors(model).items()
        if isinstance(tensor, nn.Parameter) or not owners[name.rpartition(".")[0]].startswith("torch.nn.")
    }


class _Watched(FiniteDifferences):
    def names(self, held: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Returns the names of tensors that are read and then changed, and of those that are changed and then read."""
        with self._eagerly():
            self._evaluate()
            before = {name: value for name, (_, value) in self._untrained.items()}
            changed = {name: one for name, one in held.items() if name in before and not torch.equal(one, before[name])}
            if not changed:  # as of most models, which spares the time of watching
                return [], []
            self._restore_untrained()  # before it watches, since that changes tensors in place itself
            self._step.discard()
            reads = _Reads(changed)
            with own_random_numbers(self._step.device, self._seed), reads:
                self._step.run()
        return reads.names()


class _Reads(TorchDispatchMode):
    """Watches which tensors are read, where what follows from them goes, and which are changed afterwards.

    Tensors are known by their storage, so that views count as what they are views of.
    """

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = {_storage(tensor): name for name, tensor in held.items()}
        self._read: set[str] = set()
        self._changed: set[str] = set()
        self._used: set[str] = set()
        self._following: dict[int, set[str]] = defaultdict(set)
        """By storage, the names of the tensors that it follows from, as they were when they were first read."""
        self._written: set[str] = set()
        self._used_after: set[str] = set()
        self._following_after: dict[int, set[str]] = defaultdict(set)
        """The same of tensors as they were after they were changed."""
        self._alive: list[Tensor] = []  # so that no storage is another's successor

    def names(self) -> tuple[list[str], list[str]]:
        """Returns those that are read and then changed, and those that gradients depend on as they were after a change."""
        found = (self._changed & self._used, self._used_after)
        before, after = ([name for name in self._held.values() if name in names] for names in found)  # in the order of the model
        return before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == -1:  # the backward pass changes nothing that the forward reads
            self._note(*_reads_and_writes(func, args, kwargs or {}), outputs)
        return outputs

    def _note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], outputs: Any) -> None:
        sources = {name for tensor in reads for name in self._following.get(_storage(tensor), ())}
        sources |= {name for tensor in reads if (name := self._held.get(_storage(tensor))) and name not in self._changed}
        self._read |= sources
        after = {name for tensor in reads for name in self._following_after.get(_storage(tensor), ())}
        after |= {name for tensor in reads if (name := self._held.get(_storage(tensor))) and name in self._written}
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in reads):
            self._used |= sources
            self._used_after |= after
        for tensor in [*writes, *_tensors(outputs)] if (sources - self._used) | (after - self._used_after) else ():
            self._following[_storage(tensor)] |= sources - self._used
            self._following_after[_storage(tensor)] |= after - self._used_after
            self._alive.append(tensor)
        self._written |= {name for tensor in writes if (name := self._held.get(_storage(tensor)))}
        self._changed |= {name for tensor in writes if (name := self._held.get(_storage(tensor))) in self._read and name}


def _reads_and_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors that an operator reads and those that it changes; one that returns a view does not read it."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    declared = getattr(getattr(func, "_schema", None), "arguments", None)
    if declared is None:  # an operator of higher order
        return list(_tensors((args, kwargs))), []
    for number, argument in enumerate(declared):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is None:
            reads += _tensors(value)
        elif alias.is_write:
            writes += _tensors(value)
    return reads, writes


def _tensors(values: Any) -> Iterator[Tensor]:
    leaves: Iterable[Any] = pytree.tree_leaves(values)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
