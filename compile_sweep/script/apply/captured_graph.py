"""A captured call as autograd sees it: CUDA graphs that are replayed, and what happens where they do not suffice."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import private
from compile_sweep.script.apply.graph_memory import copy_gradients
from compile_sweep.script.apply.graph_recording import (
    GraphRecorder,
    Recording,
    distributions_not_validated,
    forward_and_backward,
    generator_state,
    on_side_stream,
    recording,
    set_generator_state,
    versions_of,
)
from compile_sweep.script.apply.module_call import SETTING, ModuleCall, captured, why_a_trial_run_failed
from compile_sweep.script.job import ScriptError

Gradients = Sequence[Tensor | None]
Learn = Callable[[Sequence[int]], None]

Derive = Callable[[Sequence[Tensor], Sequence[Tensor], Gradients, Sequence[bool]], Gradients]
"""Computes gradients that may be differentiated again: from the tensors that a call was given, the trained weights, the gradients
of its results, and which of the tensors and weights need a gradient. Returns one for each of these, None where none is needed.
"""


class Function(ABC):
    """A function of tensors and of a module's trained weights, whose calls of one kind are captured.

    Args:
        call: Calls of the module.
        autocast: Whether autocast is on where it is called, and its dtype.
    """

    def __init__(self, call: ModuleCall, autocast: tuple[bool, torch.dtype]) -> None:
        self.call, self.autocast = call, autocast
        self.refused = ""
        """Why its latest results cannot be captured; empty if they can."""
        self.derive: Derive | None = None
        """None if its gradients cannot be captured."""

    @abstractmethod
    def results(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Computes it from the tensors that it is given and the trained weights, which the module holds."""

    def called(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Computes it with gradients, in the state of autocast that it was first called in."""
        enabled, dtype = self.autocast
        with torch.enable_grad(), torch.autocast(self.call.device.type, dtype, enabled=enabled):
            return self.results(tensors, weights)

    def gradients(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[Tensor],
        given: Gradients,
        needed: Sequence[bool],
        *,
        create_graph: bool,
    ) -> tuple[Tensor | None, ...]:
        """Runs it, and returns the gradients that are needed, of the tensors that it is given and of the trained weights."""
        pairs = zip(self.called(tensors, weights), given, strict=True)
        used = [(one, gradient) for one, gradient in pairs if gradient is not None]
        wanted = [one for one, is_needed in zip((*tensors, *weights), needed, strict=True) if is_needed]
        outputs, gradients = [one for one, _ in used], [gradient for _, gradient in used]
        return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, create_graph=create_graph)


class Waiting:
    """Stands for a call whose backward passes are yet to come; it lives as long as what the call returned."""

    def __init__(self, num_backward: int) -> None:
        self.num_left = num_backward


@dataclass(slots=True, kw_only=True)
class Graph:
    """A captured call."""

    inputs: Sequence[Tensor]
    """Memory that the call's tensors are copied to."""
    parameters: Sequence[nn.Parameter]
    recording: Recording
    have_gradients: Sequence[bool]
    """Which of the results depend on something that is trained."""
    num_backward: int
    """Number of backward passes through one call: more than one with `retain_graph=True`."""
    slot: "Slot"
    function: Function
    draws: bool
    """Whether it draws random numbers on the GPU."""
    is_pure: bool
    """Whether its results depend on what it is given and nothing else, and it changes nothing."""
    learn: Learn
    """Notes which of the results, besides those captured with one, got a gradient."""

    def replayed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call with these tensors."""
        held = (one for one in self.parameters if one.grad is not None and one.grad.data_ptr() in self.slot.gradients)
        copy_gradients(held)
        waiting = Waiting(self.num_backward)
        found = _Replay.apply(self, waiting, *tensors, *self.parameters)  # type: ignore[no-untyped-call, unused-ignore]
        return cast(tuple[Tensor, ...], found)


@dataclass(slots=True)
class Slot:
    """Graphs that share memory, of which only one may wait for its backward pass."""

    pool: Any
    graphs: dict[int, Graph] = field(default_factory=dict)
    """By the number of the kind of call."""
    gradients: set[int] = field(default_factory=set)
    """Addresses of the gradients that the graphs compute; a forward graph may use that memory as well."""
    _latest: weakref.ref[Waiting] | None = None

    @property
    def latest(self) -> Waiting | None:
        """The latest call, while anything of it exists."""
        return None if self._latest is None else self._latest()

    @latest.setter
    def latest(self, waiting: Waiting) -> None:
        self._latest = weakref.ref(waiting)

    @property
    def is_free(self) -> bool:
        return self.latest is None or self.latest.num_left <= 0

    def add(self, number: int, graph: Graph) -> None:
        """Adds the graph of a kind of call."""
        self.graphs[number] = graph
        self.gradients.update(one.data_ptr() for one in graph.recording.gradients if one is not None)


class _Replay(torch.autograd.Function):
    """A captured call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, waiting: Waiting, *tensors: Tensor) -> tuple[Tensor, ...]:
        given, recording = tensors[: len(graph.inputs)], graph.recording
        if given:
            torch._foreach_copy_(list(graph.inputs), list(given))
        ctx.drawn = generator_state(graph.function.call.device) if graph.draws else None
        recording.forward.replay()
        graph.slot.latest = waiting
        ctx.graph, ctx.waiting, ctx.are_leaves = graph, waiting, [one.is_leaf for one in given]
        ctx.given, ctx.versions = given, versions_of(given)
        ctx.set_materialize_grads(False)
        outputs = tuple(one.detach() for one in recording.outputs)
        ctx.mark_non_differentiable(*(one for one, known in zip(outputs, graph.have_gradients, strict=True) if not known))
        return outputs

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        graph, waiting = cast(Graph, ctx.graph), cast(Waiting, ctx.waiting)
        is_repeated = waiting.num_left < graph.num_backward
        recording = graph.recording
        pairs = enumerate(zip(recording.output_gradients, given, strict=True))
        more = [place for place, (memory, gradient) in pairs if memory is None and gradient is not None]
        is_lost = graph.slot.latest is not waiting or (is_repeated and graph.num_backward == 1)
        if torch.is_grad_enabled() or is_lost or more:
            waiting.num_left -= 1
            graph.learn(more)
            return None, None, *_not_captured(ctx, given)
        for memory, gradient in zip(recording.output_gradients, given, strict=True):
            if memory is not None:
                memory.zero_() if gradient is None else memory.copy_(gradient)
        recording.backward.replay()
        waiting.num_left -= 1
        found = iter(recording.gradients)
        of_inputs = [next(found) if one.requires_grad else None for one in graph.inputs]
        copied = graph.num_backward > 1 or not _accumulates(ctx)
        held = [_held(one, copied=copied or leaf) for one, leaf in zip(of_inputs, ctx.are_leaves, strict=True)]
        return None, None, *held, *(_held(one, copied=copied) for one in found)


def _not_captured(ctx: Any, given: Gradients) -> Gradients:
    """Returns gradients that the graph of the backward pass cannot compute.

    Those that are differentiated again have graphs of their own, if possible. For those of results that had no gradient at first,
    and those of a backward pass that is repeated, the call runs again as it is.
    """
    graph, tensors = cast(Graph, ctx.graph), cast(Sequence[Tensor], ctx.given)
    is_changed = ctx.versions != versions_of(tensors)
    needed = [one.requires_grad for one in (*tensors, *graph.parameters)]
    if again := torch.is_grad_enabled():
        needed = [is_known and _is_needed(node) for is_known, (node, _) in zip(needed, ctx.next_functions, strict=True)]
    function, call = graph.function, graph.function.call
    if again and graph.is_pure and function.derive is not None and not is_changed:
        return function.derive(tensors, graph.parameters, given, needed)
    if call.has_cudnn_dropout or is_changed:
        why = "has dropout of recurrent layers" if call.has_cudnn_dropout else "was given a tensor that changed since"
        raise ScriptError(
            f"{SETTING} does not work where, in some steps only, a backward pass is repeated (retain_graph=True), gradients are "
            f"differentiated again (create_graph=True) or another result gets a gradient, and the module {why}; leave "
            "cudagraphs out"
        )
    if not again:
        tensors = [one.detach().requires_grad_(one.requires_grad) for one in tensors]
    with call.put_back(), recording():
        set_generator_state(call.device, ctx.drawn)
        found = function.gradients(tensors, graph.parameters, given, needed, create_graph=again)
    return spread(found, needed)


def watched(results: Sequence[Tensor]) -> list[int]:
    """Returns how often each result has got a gradient, counted from now on; empty if none can."""
    uses = [0] * len(results) if any(one.requires_grad for one in results) else []

    def note(number: int, _: Tensor) -> None:
        uses[number] += 1

    for number, one in enumerate(results):
        if one.requires_grad:
            one.register_hook(partial(note, number))
    return uses


def learn(uses: list[int], slots: Sequence[Slot], number: int, places: Sequence[int]) -> None:
    """Notes that more results of a kind of call get gradients, for which its next call is captured anew.

    Args:
        uses: How often each of its results gets a gradient.
        slots: Where its graphs are.
        number: Number of the kind.
        places: The results.
    """
    for place in places:
        uses[place] += 1
    for slot in slots if places else ():
        slot.graphs.pop(number, None)


def spread(found: Gradients, needed: Sequence[bool]) -> Gradients:
    """Returns gradients in the places where they are needed, and None in the others."""
    rest = iter(found)
    return [next(rest) if is_needed else None for is_needed in needed]


def _held(gradient: Tensor | None, *, copied: bool) -> Tensor | None:
    """Returns a gradient for autograd, which keeps the memory of one that nobody else holds."""
    return gradient if gradient is None else gradient.clone() if copied else gradient.detach()


_WILL_EXECUTE: Callable[[Any], bool] | None = private("torch._C", "_will_engine_execute_node")
"""Tells in a backward pass whether a node of autograd is executed in it."""


def _accumulates(ctx: Any) -> bool:
    """Tells whether gradients become those of the parameters, rather than results of `torch.autograd.grad`, which may be kept."""
    last = next((node for node, _ in reversed(ctx.next_functions) if type(node).__name__ == "AccumulateGrad"), None)
    try:
        return _WILL_EXECUTE is not None and (last is None or _WILL_EXECUTE(last))
    except RuntimeError:  # what torch says of a parameter whose gradient is taken
        return False


def _is_needed(node: Any) -> bool:
    """Tells whether a backward pass goes on to a node; that of `torch.autograd.grad` only does where a gradient is asked for."""
    try:
        return node is not None and (_WILL_EXECUTE is None or _WILL_EXECUTE(node))
    except RuntimeError:  # what torch says of a tensor whose gradient is taken
        return True


def capture_call(
    function: Function, recorder: GraphRecorder, given: Sequence[Tensor], uses: Sequence[int], slot: Slot, learn: Learn
) -> Graph | str:
    """Captures a call of a function; returns why if it cannot be.

    Args:
        function: The function; it ran before.
        recorder: Captures it.
        given: Tensors that a call was given.
        uses: How often each result gets a gradient.
        slot: Where the graphs' memory is.
        learn: Notes which of the results, besides those captured with one, got a gradient.
    """
    call = function.call
    inputs = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
    parameters = [one for one in call.parameters if one.requires_grad]
    stand_ins = {one: _stand_in(one) for one in call.parameters}
    trained = [stand_ins[one] for one in parameters]
    wanted = [*(one for one in inputs if one.requires_grad), *trained]

    def run() -> list[Tensor]:
        with call.holding(stand_ins):
            return function.called(inputs, trained)

    before = versions_of(inputs)
    with call.put_back() as changed, recording(), distributions_not_validated():
        drawn, state = generator_state(call.device), versions_of(call.state())
        try:
            have_gradients, reason = on_side_stream(call.device, lambda: forward_and_backward(run, uses, wanted, parameters))
        except Exception as error:
            return why_a_trial_run_failed(error)
        draws = drawn is not None and not torch.equal(drawn, cast(Tensor, generator_state(call.device)))
        reason = changed() or function.refused or reason
        if any(one.data_ptr() != other.data_ptr() for one, other in stand_ins.items()):
            reason = reason or "it moves its weights"
        if before != versions_of(inputs):
            reason = reason or "it changes its arguments in place"
        if reason:
            return reason
        is_pure = not draws and not call.has_cudnn_dropout and state == versions_of(call.state())
        with captured(call.module):
            made = recorder.record(run, uses, wanted, slot.pool)
    return Graph(
        inputs=inputs,
        parameters=parameters,
        recording=made,
        have_gradients=have_gradients,
        num_backward=max(uses),
        slot=slot,
        function=function,
        draws=draws,
        learn=learn,
        is_pure=is_pure,
    )


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter on the same memory.

    Autograd accumulates a parameter's gradient on the stream on which the parameter was first used, as long as any result of that
    use exists, such as the loss of the step before. A captured backward pass cannot wait for that stream.
    """
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in
