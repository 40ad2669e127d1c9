"""Captures calls of a module that need no gradients as CUDA graphs: those of a teacher, of a rollout, or of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compile_sweep.schema.choices import MOST_CAPTURED_SHAPES
from compile_sweep.script.apply.graph_recording import (
    GraphRecorder,
    distributions_not_validated,
    on_side_stream,
    recording,
    versions_of,
)
from compile_sweep.script.apply.module_call import MOST_KINDS, Form, Kind, ModuleCall, captured, tensors_among, unsuitable


@dataclass(slots=True, kw_only=True)
class _Forward:
    """A captured call."""

    inputs: Sequence[Tensor]
    """Memory that the call's tensors are copied to."""
    graph: Any
    outputs: Sequence[Tensor]
    results: Form


class ForwardGraphs:
    """Calls of a module without gradients, captured at the second time that one of their kind comes.

    What cannot be captured runs eagerly, without a word: the settings promise graphs of what trains. Results are copied out of
    the graphs' memory, so that scripts may keep them, and one pool of memory serves all.
    """

    def __init__(self, call: ModuleCall, recorder: GraphRecorder) -> None:
        self._call, self._recorder = call, recorder
        self._pool: Any = None
        self._kinds: list[Kind] = []
        self._captured: dict[int, _Forward | None] = {}
        """By the number of the kind; None for one that cannot be captured."""

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Runs a call."""
        call = self._call
        if len(self._kinds) == MOST_KINDS and not self._captured:
            return call.inner(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if call.has_cudnn_dropout or call.why_not(leaves):
            return call.inner(*args, **kwargs)
        kind = call.kind(leaves, structure)
        number = next((number for number, one in enumerate(self._kinds) if one == kind), None)
        if number is None:
            if len(self._kinds) < MOST_KINDS:
                self._kinds.append(kind)
            return call.inner(*args, **kwargs)
        if number not in self._captured and len(self._captured) < MOST_CAPTURED_SHAPES:
            self._captured[number] = self._capture(leaves, structure)
        forward = self._captured.get(number)
        if forward is None:
            return call.inner(*args, **kwargs)
        if given := [one.detach() for one in tensors_among(leaves)]:
            torch._foreach_copy_(list(forward.inputs), given)
        forward.graph.replay()
        return forward.results.filled(one.clone() for one in forward.outputs)

    def _capture(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Forward | None:
        """Captures a call; returns None if it cannot be."""
        call = self._call
        inputs = [one.detach().clone() for one in tensors_among(leaves)]
        form = Form.of(leaves, structure)
        results: list[Any] = []
        outer = structure

        @torch.no_grad()
        def run() -> list[Tensor]:
            nonlocal results, outer
            results, outer = call.flat_results(form, inputs)
            return tensors_among(results)

        before = versions_of(inputs)
        with call.put_back() as changed, recording(), distributions_not_validated():
            try:
                outputs = on_side_stream(call.device, run)
            except Exception:  # whatever it is, the call itself will raise it, too
                return None
            if changed() or unsuitable(results, "returns", call.device) or any(one.requires_grad for one in outputs):
                return None
            if before != versions_of(inputs):  # it changes its arguments
                return None
            self._pool = self._pool or self._recorder.new_pool()
            with captured(call.module):
                graph, outputs = self._recorder.record(run, call.device, self._pool)
        return _Forward(inputs=inputs, graph=graph, outputs=outputs, results=Form.of(results, outer))
