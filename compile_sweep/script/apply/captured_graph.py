"""A captured call as autograd sees it: CUDA graphs that are replayed, and what happens where they do not suffice."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

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
from compile_sweep.script.apply.module_call import (
    SETTING,
    Form,
    ModuleCall,
    captured,
    tensors_among,
    unsuitable,
    why_a_trial_run_failed,
)
from compile_sweep.script.job import ScriptError

Gradients = Sequence[Tensor | None]

Learn = Callable[[Sequence[int], bool], None]
"""Notes which results got a gradient that the call was not captured with, and whether gradients are differentiated again."""


class Function:
    """What a module's calls of one kind compute from the tensors that they are given.

    Args:
        call: Calls of the module.
        autocast: Whether autocast is on where it is called, and its dtype.
        arguments: Form of the arguments.
    """

    def __init__(self, call: ModuleCall, autocast: tuple[bool, torch.dtype], arguments: Form) -> None:
        self.call, self._autocast, self._arguments = call, autocast, arguments
        self.form = arguments
        """That of its latest results."""
        self.refused = ""
        """Why its latest results cannot be captured; empty if they can."""

    def called(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes it with gradients, in the state of autocast that it was first called in."""
        enabled, dtype = self._autocast
        with torch.enable_grad(), torch.autocast(self.call.device.type, dtype, enabled=enabled):
            found, structure = self.call.flat_results(self._arguments, tensors)
        self.form, self.refused = Form.of(found, structure), unsuitable(found, "returns", self.call.device)
        return tensors_among(found)

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
        pairs = zip(self.called(tensors), given, strict=True)
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
    learn: Learn

    @property
    def gradients(self) -> Sequence[Tensor | None]:
        """Memory of the gradients of weights."""
        return self.recording.gradients

    def replayed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call with these tensors."""
        self.slot.copy_gradients(self.parameters)
        waiting = Waiting(self.num_backward)
        found = _Replay.apply(self, waiting, *tensors, *self.parameters)  # type: ignore[no-untyped-call, unused-ignore]
        return cast(tuple[Tensor, ...], found)


class Replayed(Protocol):
    """A captured call, whatever of it was captured."""

    @property
    def gradients(self) -> Iterable[Tensor | None]:
        """Memory of the gradients that it computes."""

    def replayed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the results of a call with these tensors."""


@dataclass(slots=True)
class Slot:
    """Graphs that share memory, of which only one may wait for its backward pass."""

    pool: Any
    graphs: dict[int, Replayed] = field(default_factory=dict)
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

    def add(self, number: int, graph: Replayed) -> None:
        """Adds the graph of a kind of call."""
        self.graphs[number] = graph
        self.gradients.update(one.data_ptr() for one in graph.gradients if one is not None)

    def copy_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies gradients of parameters out of the graphs' memory."""
        copy_gradients(one for one in parameters if one.grad is not None and one.grad.data_ptr() in self.gradients)


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
        if (again := torch.is_grad_enabled()) or is_lost or more:
            waiting.num_left -= 1
            graph.learn(more, again)
            return None, None, *_not_captured(ctx, given)
        for memory, gradient in zip(recording.output_gradients, given, strict=True):
            if memory is not None:
                memory.zero_() if gradient is None else memory.copy_(gradient)
        recording.backward.replay()
        waiting.num_left -= 1
        found = iter(recording.gradients)
        of_inputs = [next(found) if one.requires_grad else None for one in graph.inputs]
        copied = graph.num_backward > 1 or not accumulates(ctx.next_functions)
        of_inputs = [held(one, copied=copied or leaf) for one, leaf in zip(of_inputs, ctx.are_leaves, strict=True)]
        return None, None, *of_inputs, *(held(one, copied=copied) for one in found)


def _not_captured(ctx: Any, given: Gradients) -> Gradients:
    """Returns gradients that the graph of the backward pass cannot compute: the call runs again, as it is.

    They are differentiated again, or those of results that had no gradient at first, or of a backward pass that is repeated.
    """
    graph, tensors = cast(Graph, ctx.graph), cast(Sequence[Tensor], ctx.given)
    needed = [one.requires_grad for one in (*tensors, *graph.parameters)]
    if again := torch.is_grad_enabled():
        needed = are_needed(needed, ctx.next_functions)
    else:
        tensors = as_leaves(tensors)
    with run_again(graph.function.call, ctx.given, ctx.versions, ctx.drawn):
        found = graph.function.gradients(tensors, graph.parameters, given, needed, create_graph=again)
    return spread(found, needed)


@contextmanager
def run_again(call: ModuleCall, given: Sequence[Tensor], versions: Sequence[int], drawn: Tensor | None) -> Iterator[None]:
    """Has a call that was captured run again in the block, as it is, with what it was given and the same random numbers.

    Raises:
        ScriptError: It would compute something else.
    """
    is_changed = versions != versions_of(given)
    if call.has_cudnn_dropout or is_changed:
        why = "has dropout of recurrent layers" if call.has_cudnn_dropout else "was given a tensor that changed since"
        raise ScriptError(
            f"{SETTING} does not work where, in some steps only, a backward pass is repeated (retain_graph=True), gradients are "
            f"differentiated again (create_graph=True) or another result gets a gradient, and the module {why}; leave "
            "cudagraphs out"
        )
    with call.put_back(), recording():
        set_generator_state(call.device, drawn)
        yield


def as_leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns tensors on the same memory that are leaves for autograd."""
    return [one.detach().requires_grad_(one.requires_grad) for one in tensors]


def watched(results: Sequence[Tensor], again: Callable[[], None]) -> list[int]:
    """Returns how often each result has got a gradient, counted from now on; empty if none can.

    Args:
        results: The results.
        again: Called if the gradients may be differentiated again.
    """
    uses = [0] * len(results) if any(one.requires_grad for one in results) else []

    def note(number: int, _: Tensor) -> None:
        uses[number] += 1
        if torch.is_grad_enabled():
            again()

    for number, one in enumerate(results):
        if one.requires_grad:
            one.register_hook(partial(note, number))
    return uses


def spread(found: Gradients, needed: Sequence[bool]) -> Gradients:
    """Returns gradients in the places where they are needed, and None in the others."""
    rest = iter(found)
    return [next(rest) if is_needed else None for is_needed in needed]


def held(gradient: Tensor | None, *, copied: bool) -> Tensor | None:
    """Returns a gradient for autograd, which keeps the memory of one that nobody else holds."""
    return gradient if gradient is None else gradient.clone() if copied else gradient.detach()


_WILL_EXECUTE: Callable[[Any], bool] | None = private("torch._C", "_will_engine_execute_node")
"""Tells in a backward pass whether a node of autograd is executed in it."""


def accumulates(edges: Sequence[Any]) -> bool:
    """Tells whether gradients become those of the parameters, rather than results of `torch.autograd.grad`, which may be kept.

    Args:
        edges: The nodes that a backward pass goes on to, with the numbers of their gradients.
    """
    last = next((node for node, _ in reversed(edges) if type(node).__name__ == "AccumulateGrad"), None)
    try:
        return _WILL_EXECUTE is not None and (last is None or _WILL_EXECUTE(last))
    except RuntimeError:  # what torch says of a parameter whose gradient is taken
        return False


def are_needed(known: Sequence[bool], edges: Sequence[Any]) -> list[bool]:
    """Tells which of these gradients a backward pass goes on with; `torch.autograd.grad` only does where one is asked for.

    Args:
        known: Which of them may be needed.
        edges: For each, the node that it is for, with the number of the gradient.
    """
    return [is_known and _is_needed(node) for is_known, (node, _) in zip(known, edges, strict=True)]


def _is_needed(node: Any) -> bool:
    try:
        return node is not None and (_WILL_EXECUTE is None or _WILL_EXECUTE(node))
    except RuntimeError:  # what torch says of a tensor whose gradient is taken
        return True


class CallMemory:
    """Memory that a captured call works with.

    Args:
        function: What is captured; it ran before.
        given: Tensors that a call was given.
    """

    def __init__(self, function: Function, given: Sequence[Tensor]) -> None:
        self.function, self._call = function, function.call
        self.inputs = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
        self.parameters = [one for one in self._call.parameters if one.requires_grad]
        self._stand_ins = {one: _stand_in(one) for one in self._call.parameters}
        self.trained = [self._stand_ins[one] for one in self.parameters]
        self.wanted = [*(one for one in self.inputs if one.requires_grad), *self.trained]
        self.have_gradients: Sequence[bool] = []
        """Which of the results depend on something that is trained."""
        self.draws = False
        """Whether it draws random numbers on the GPU."""

    def run(self) -> list[Tensor]:
        """Returns the results of a call."""
        with self._call.holding(self._stand_ins):
            return self.function.called(self.inputs)

    @contextmanager
    def tried(self, uses: Sequence[int], more: Callable[[], object] = lambda: None) -> Iterator[str]:
        """Runs a call and its backward pass as a trial, and undoes in the end what they and the block changed.

        Args:
            uses: How often each result gets a gradient.
            more: What else is to be captured.

        Yields:
            Why the call cannot be captured; empty if it can.
        """
        call, before = self._call, versions_of(self.inputs)

        def trial() -> tuple[list[bool], str]:
            found = forward_and_backward(self.run, uses, self.wanted, self.parameters)
            more()
            return found

        with call.put_back() as changed, recording(), distributions_not_validated():
            drawn = generator_state(call.device)
            failed, reason = "", ""
            try:
                self.have_gradients, reason = on_side_stream(call.device, trial)
            except Exception as error:
                failed = why_a_trial_run_failed(error)
            self.draws = drawn is not None and not torch.equal(drawn, cast(Tensor, generator_state(call.device)))
            reason = failed or changed() or self.function.refused or reason
            if any(one.data_ptr() != other.data_ptr() for one, other in self._stand_ins.items()):
                reason = reason or "it moves its weights"
            if before != versions_of(self.inputs):
                reason = reason or "it changes its arguments in place"
            yield reason


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
        learn: Notes what the graph does not compute.
    """
    memory = CallMemory(function, given)
    with memory.tried(uses) as reason:
        if reason:
            return reason
        with captured(function.call.module):
            made = recorder.record(memory.run, uses, memory.wanted, slot.pool)
    return Graph(
        inputs=memory.inputs,
        parameters=memory.parameters,
        recording=made,
        have_gradients=memory.have_gradients,
        num_backward=max(uses),
        slot=slot,
        function=function,
        draws=memory.draws,
        learn=learn,
    )


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter on the same memory.

    Autograd accumulates a parameter's gradient on the stream on which the parameter was first used, as long as any result of that
    use exists, such as the loss of the step before. A captured backward pass cannot wait for that stream.
    """
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in
