"""Gradients of captured calls that are differentiated again, captured as functions of their own.

A penalty on gradients takes them with `create_graph=True`, and a differential equation does so as often as its order says. Each
is a function of what the call was given and of the gradients of its results, and is captured with its own gradients, which may be
differentiated again in turn. It computes the call anew, so that no graph needs the memory of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compile_sweep.script.apply.captured_graph import Function, Gradients, Slot, capture_call, learn, spread, watched
from compile_sweep.script.apply.graph_recording import GraphRecorder, recording
from compile_sweep.script.apply.module_call import unsuitable


class _Gradient(Function):
    """The gradients of a function, of what it is given and the gradients of its results."""

    def __init__(
        self, of: Function, autocast: tuple[bool, torch.dtype], is_given: Sequence[bool], needed: Sequence[bool]
    ) -> None:
        super().__init__(of.call, autocast)
        self._of, self._is_given, self._needed = of, is_given, needed
        self.found: list[bool] = []
        """Which of the gradients that are needed there are: a result may not depend on every weight."""

    def results(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        number = len(tensors) - sum(self._is_given)
        given = spread(tensors[number:], self._is_given)
        found = self._of.gradients(tensors[:number], weights, given, self._needed, create_graph=True)
        self.found = [one is not None for one in found]
        gradients = [one for one in found if one is not None]
        self.refused = unsuitable(gradients, "has", self.call.device)
        return gradients


@dataclass(slots=True, eq=False, kw_only=True)
class _Kind:
    """Gradients that are asked for in one way."""

    way: list[Any]
    """Which results have a gradient, what requires one, which gradients are needed, and the state of autocast."""
    function: _Gradient
    examples: Sequence[Tensor]
    """What it was given at first."""
    derivatives: "Derivatives"
    """Gradients of these gradients."""
    uses: list[int] = field(default_factory=list)
    """How often each of these gradients got a gradient itself."""
    slots: list[Slot] = field(default_factory=list)
    num_slots: int = 1
    is_refused: bool = False


class Derivatives:
    """Gradients of a captured function that may be differentiated again.

    They are computed as they are at first. `prepare`, which is called outside of backward passes, captures them.

    Args:
        function: The function.
        recorder: Captures them.
        most_pending: Number of gradients of a kind that may wait for their own backward pass at the same time.
    """

    def __init__(self, function: Function, recorder: GraphRecorder, most_pending: int) -> None:
        self._function, self._recorder, self._most_pending = function, recorder, most_pending
        self._kinds: list[_Kind] = []
        function.derive = self._derived

    def prepare(self) -> None:
        """Captures the gradients that were differentiated again, and those of these."""
        for kind in self._kinds:
            while any(kind.uses) and len(kind.slots) < kind.num_slots:
                kind.slots.append(Slot(self._recorder.new_pool()))
            for slot in kind.slots:
                if slot.is_free and not slot.graphs and not kind.is_refused:
                    more = partial(learn, kind.uses, kind.slots, 0)
                    made = capture_call(kind.function, self._recorder, kind.examples, kind.uses, slot, more)
                    if isinstance(made, str):
                        kind.is_refused = True
                    else:
                        slot.add(0, made)
                        kind.examples = made.inputs
            kind.derivatives.prepare()

    def _derived(
        self, tensors: Sequence[Tensor], weights: Sequence[Tensor], given: Gradients, needed: Sequence[bool]
    ) -> Gradients:
        gradients = [one for one in given if one is not None]
        everything = [*tensors, *gradients]
        kind = self._kind(everything, [one is not None for one in given], needed)
        slot = next((one for one in kind.slots if one.is_free and one.graphs), None)
        if slot is None:
            kind.num_slots = min(len(kind.slots) + 1, self._most_pending)
            with recording():
                found = kind.function.called(everything, weights)
            kind.uses = kind.uses or watched(found)
        else:
            found = list(slot.graphs[0].replayed(everything))
        return spread(spread(found, kind.function.found), needed)

    def _kind(self, everything: Sequence[Tensor], is_given: Sequence[bool], needed: Sequence[bool]) -> _Kind:
        autocast = self._function.call.autocast
        way = [is_given, [one.requires_grad for one in everything], needed, autocast]
        if (known := next((one for one in self._kinds if one.way == way), None)) is not None:
            return known
        function = _Gradient(self._function, autocast, is_given, needed)
        derivatives = Derivatives(function, self._recorder, self._most_pending)
        examples = [one.detach().requires_grad_(one.requires_grad) for one in everything]
        self._kinds.append(made := _Kind(way=way, function=function, examples=examples, derivatives=derivatives))
        return made
