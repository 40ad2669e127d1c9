"""What a captured call is made of, and which gradients autograd goes on with."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import private
from compile_sweep.script.apply.graph_memory import copy_gradients
from compile_sweep.script.apply.graph_recording import (
    distributions_not_validated,
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
    tensors_among,
    unsuitable,
    why_a_trial_run_failed,
)
from compile_sweep.script.job import ScriptError

Gradients = Sequence[Tensor | None]


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
        self.token = torch.empty(0, device=call.device)
        """What nodes of autograd depend on for their order alone."""
        self.refused = ""
        """Why its latest results cannot be captured; empty if they can."""

    def called(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes it with gradients, in the state of autocast that it was first called in."""
        enabled, dtype = self._autocast
        with torch.enable_grad(), torch.autocast(self.call.device.type, dtype, enabled=enabled):
            found, structure = self.call.flat_results(self._arguments, tensors)
        self.form, self.refused = Form.of(found, structure), unsuitable(found, "returns", self.call.device)
        return tensors_among(found)


class Waiting:
    """Stands for a call of which more may be asked; it lives as long as what the call returned."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether all has been asked that was expected."""


class Replayed(Protocol):
    """A captured call."""

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
        return self.latest is None or self.latest.is_over

    def add(self, number: int, graph: Replayed) -> None:
        """Adds the graph of a kind of call."""
        self.graphs[number] = graph
        self.gradients.update(one.data_ptr() for one in graph.gradients if one is not None)

    def copy_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies gradients of parameters out of the graphs' memory."""
        copy_gradients(one for one in parameters if one.grad is not None and one.grad.data_ptr() in self.gradients)


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
        self.may_need = tuple(one.requires_grad for one in (*self.inputs, *self.parameters))
        """Which of the call's tensors and trained weights may need a gradient."""
        self.draws = False
        """Whether it draws random numbers on the GPU."""

    def run(self) -> list[Tensor]:
        """Returns the results of a call."""
        with self._call.holding(self._stand_ins):
            return self.function.called(self.inputs)

    @contextmanager
    def tried(self, trial: Callable[[], str]) -> Iterator[str]:
        """Runs a trial of all that is to be captured, and undoes in the end what it and the block changed.

        Args:
            trial: Says why its gradients cannot be captured; empty if they can.

        Yields:
            Why the call cannot be captured; empty if it can.
        """
        call, before = self._call, versions_of(self.inputs)
        with call.put_back() as changed, recording(), distributions_not_validated():
            drawn = generator_state(call.device)
            failed, reason = "", ""
            try:
                reason = on_side_stream(call.device, trial)
            except Exception as error:
                failed = why_a_trial_run_failed(error)
            self.draws = drawn is not None and not torch.equal(drawn, cast(Tensor, generator_state(call.device)))
            reason = failed or changed() or self.function.refused or reason
            if any(one.data_ptr() != other.data_ptr() for one, other in self._stand_ins.items()):
                reason = reason or "it moves its weights"
            if before != versions_of(self.inputs):
                reason = reason or "it changes its arguments in place"
            yield reason


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter on the same memory.

    Autograd accumulates a parameter's gradient on the stream on which the parameter was first used, as long as any result of that
    use exists, such as the loss of the step before. A captured backward pass cannot wait for that stream.
    """
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in
