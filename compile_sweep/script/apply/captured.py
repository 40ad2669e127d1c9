"""Captures what a script's modules compute, forward and backward, as CUDA graphs, without compiling anything.

Background: a CUDA graph launches all kernels of a call at once, so a step no longer waits for Python to launch them one by one.
It repeats what was captured: the same kernels on the same memory, and no Python. So a call is captured for the shapes and values
that it was given, and only if a trial run shows that nothing else depends on Python. The method is that of
`torch.cuda.make_graphed_callables` (https://docs.pytorch.org/docs/stable/notes/cuda.html), which leaves it to the user to know
whether a module can be captured. Where one cannot be captured as a whole, its parts are, each by itself.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_sweep.contract.inspect_model import num_layers
from compile_sweep.contract.installed_torch import private
from compile_sweep.harness.diagnostics.capture import Diagnostics
from compile_sweep.schema.causes.errors import CACHE
from compile_sweep.schema.choices import MOST_CAPTURED_SHAPES
from compile_sweep.script.apply.forward_graphs import ForwardGraphs
from compile_sweep.script.apply.graph_memory import copied_out, copy_gradients, wrap_call
from compile_sweep.script.apply.graph_recording import (
    GraphRecorder,
    Recording,
    distributions_not_validated,
    forward_and_backward,
    generator_state,
    is_recording,
    on_side_stream,
    recording,
    set_generator_state,
    versions_of,
)
from compile_sweep.script.apply.module_call import (
    MOST_KINDS,
    SETTING,
    Form,
    Kind,
    ModuleCall,
    captured,
    changed_numbers,
    tensors_among,
    unsuitable,
    why_a_trial_run_failed,
)
from compile_sweep.script.discover import Target
from compile_sweep.script.job import ScriptError

Call = Callable[..., Any]

FEW_PENDING, MOST_PENDING, PENDING_BYTES = 4, 32, 2**30
"""Calls of one module that may wait for their backward pass at the same time, each with memory of its own: the first number in
any case, and up to the second if their gradients take no more than the third.
"""

MOST_CHANGES = 4
"""Calls in a row that differ in numbers, or in where weights are in memory, but not in the shapes of their arguments."""

LEAST_LAYERS = 8
"""Layers of a part that is captured by itself: a replay takes about as long as launching the kernels of a few layers does."""


class _Waiting:
    """Stands for a call whose backward passes are yet to come; it lives as long as what the call returned."""

    def __init__(self, num_backward: int) -> None:
        self.num_left = num_backward


@dataclass(slots=True, kw_only=True)
class _Graph:
    """A captured call."""

    inputs: Sequence[Tensor]
    """Memory that the call's tensors are copied to."""
    parameters: Sequence[nn.Parameter]
    recording: Recording
    have_gradients: Sequence[bool]
    """Which of the tensors among the results depend on something that is trained."""
    arguments: Form
    results: Form
    num_backward: int
    """Number of backward passes through one call: more than one with `retain_graph=True`."""
    slot: "_Slot"
    call: ModuleCall
    autocast: tuple[bool, torch.dtype]
    draws: bool
    """Whether it draws random numbers on the GPU."""
    learn: Callable[[Sequence[int]], None]
    """Notes which of the results, besides those captured with one, got a gradient."""


@dataclass(slots=True)
class _Slot:
    """Graphs that share memory, of which only one may wait for its backward pass."""

    pool: Any
    graphs: dict[int, _Graph] = field(default_factory=dict)
    """By the number of the kind of call."""
    gradients: set[int] = field(default_factory=set)
    """Addresses of the gradients that the graphs compute; a forward graph may use that memory as well."""
    _latest: weakref.ref[_Waiting] | None = None

    @property
    def latest(self) -> _Waiting | None:
        """The latest call, while anything of it exists."""
        return None if self._latest is None else self._latest()

    @latest.setter
    def latest(self, waiting: _Waiting) -> None:
        self._latest = weakref.ref(waiting)

    @property
    def is_free(self) -> bool:
        return self.latest is None or self.latest.num_left <= 0


class _Replay(torch.autograd.Function):
    """A captured call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, waiting: _Waiting, *tensors: Tensor) -> tuple[Tensor, ...]:
        given, recording = tensors[: len(graph.inputs)], graph.recording
        if given:
            torch._foreach_copy_(list(graph.inputs), list(given))
        ctx.drawn = generator_state(graph.call.device) if graph.draws else None
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
        graph, waiting = cast(_Graph, ctx.graph), cast(_Waiting, ctx.waiting)
        is_repeated = waiting.num_left < graph.num_backward
        recording = graph.recording
        pairs = enumerate(zip(recording.output_gradients, given, strict=True))
        more = [place for place, (memory, gradient) in pairs if memory is None and gradient is not None]
        is_lost = graph.slot.latest is not waiting or (is_repeated and graph.num_backward == 1)
        if torch.is_grad_enabled() or is_lost or more:
            waiting.num_left -= 1
            graph.learn(more)
            return None, None, *_computed_again(ctx, given)
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


def _computed_again(ctx: Any, given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients that were not captured, from a call that runs again as it is.

    They are second derivatives, those of results that had no gradient at first, and those of a backward pass that is repeated.
    """
    graph, tensors = cast(_Graph, ctx.graph), cast(Sequence[Tensor], ctx.given)
    if graph.call.has_cudnn_dropout or ctx.versions != versions_of(tensors):
        why = "has dropout of recurrent layers" if graph.call.has_cudnn_dropout else "was given a tensor that changed since"
        raise ScriptError(
            f"{SETTING} does not work where, in some steps only, a backward pass is repeated (retain_graph=True), gradients are "
            f"differentiated again (create_graph=True) or another result gets a gradient, and the module {why}; leave "
            "cudagraphs out"
        )
    again = torch.is_grad_enabled()
    if not again:
        tensors = [one.detach().requires_grad_(one.requires_grad) for one in tensors]
    enabled, dtype = graph.autocast
    with graph.call.put_back(), recording(), torch.enable_grad():
        set_generator_state(graph.call.device, ctx.drawn)
        with torch.autocast(graph.call.device.type, dtype, enabled=enabled):
            results, _ = graph.call.flat_results(graph.arguments, tensors)
        pairs = zip(tensors_among(results), given, strict=True)
        used = [(one, gradient) for one, gradient in pairs if gradient is not None]
        wanted = [*(one for one in tensors if one.requires_grad), *graph.parameters]
        outputs, gradients = [one for one, _ in used], [gradient for _, gradient in used]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, create_graph=again))
    return [*(next(found) if one.requires_grad else None for one in tensors), *found]


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


class CapturedModule:
    """A module whose calls are captured at their second time, and replayed from then on.

    Calls without gradients, as in a rollout or an evaluation, have graphs of their own, or run eagerly.
    Once a call cannot be captured and none was before, the module runs eagerly, and its parts are captured instead.

    Args:
        module: The module.
        inner: Its call.
        skipped: Called with the reason of each call that runs eagerly because it cannot be captured.
        captured: Called with the name of each part that is captured in place of the module.
        name: Name of the module, if it is such a part.
        recorder: Captures calls.
    """

    def __init__(
        self,
        module: nn.Module,
        inner: Call,
        skipped: Callable[[str], None],
        *,
        captured: Callable[[str], None] = lambda name: None,
        name: str = "",
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._call, self._skipped, self._captured, self._name = ModuleCall(module, inner), skipped, captured, name
        self._recorder = recorder or GraphRecorder()
        self._without_gradients = ForwardGraphs(self._call, self._recorder)
        self._kinds: list[Kind] = []
        """Kinds of calls so far."""
        self._uses: list[list[int]] = []
        """For each kind, how often each result of its first call got a gradient from the script; empty if none could."""
        self._num_changed = 0
        trained_bytes = sum(one.nbytes for one in self._call.parameters if one.requires_grad)
        self._most_pending = max(FEW_PENDING, min(MOST_PENDING, PENDING_BYTES // max(1, trained_bytes)))
        self._slots: list[_Slot] = []
        self._refused = ""
        if refused := self._call.why_never():
            self._refuse(refused)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if torch.compiler.is_compiling() or is_recording():
            return call.inner(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._without_gradients(args, kwargs)
        if refused := self._refused or (RECOMPUTED if _is_recomputed() else ""):
            return self._eagerly(refused, args, kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if refused := call.why_not(leaves):
            return self._eagerly(self._refuse(refused), args, kwargs)
        kind = call.kind(leaves, structure)
        number = next((number for number, one in enumerate(self._kinds) if one == kind), None)
        if number is None:
            return self._first(kind, args, kwargs)
        self._num_changed = 0
        if not self._uses[number]:
            return self._without_gradients(args, kwargs)
        if not any(self._uses[number]):
            return call.inner(*args, **kwargs)
        slot = next((one for one in self._slots if one.is_free), None)
        if slot is None:
            if len(self._slots) == self._most_pending:
                return self._eagerly(f"more than {self._most_pending} of its calls wait for their backward pass", args, kwargs)
            self._slots.append(slot := _Slot(self._recorder.new_pool()))
        graph = slot.graphs.get(number)
        if graph is None:
            if len(slot.graphs) == MOST_CAPTURED_SHAPES:
                return self._eagerly(f"it is called in more than {MOST_CAPTURED_SHAPES} ways, by shapes or values", args, kwargs)
            made = self._capture(leaves, structure, number, slot)
            if isinstance(made, str):
                return self._eagerly(self._refuse(made), args, kwargs)
            graph = slot.graphs[number] = made
            self._captured(self._name)
            slot.gradients.update(one.data_ptr() for one in graph.recording.gradients if one is not None)
        copy_gradients(one for one in call.parameters if one.grad is not None and one.grad.data_ptr() in slot.gradients)
        waiting = _Waiting(graph.num_backward)
        given = (*tensors_among(leaves), *graph.parameters)
        return graph.results.filled(_Replay.apply(graph, waiting, *given))  # type: ignore[no-untyped-call, unused-ignore]

    def _first(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Runs a call eagerly, and notes which of its results get a gradient: a model's logits need none beside its loss."""
        if self._call.has_cudnn_dropout and any(slot.graphs for slot in self._slots):
            # An eager call may begin cuDNN's dropout anew, in other memory than the graphs use.
            self._slots.clear()
            return self._eagerly(self._refuse("it has recurrent layers with dropout, and its calls differ"), args, kwargs)
        if len(self._kinds) == MOST_KINDS:  # its parts are called in as many
            self._refused = f"it is called in more than {MOST_KINDS} ways, by shapes or values"
            return self._eagerly(self._refused, args, kwargs)
        what = changed_numbers(self._kinds[-1], kind) if self._kinds else ""
        self._num_changed = self._num_changed + 1 if what else 0
        if self._num_changed == MOST_CHANGES:
            return self._eagerly(self._refuse(f"{what} from call to call"), args, kwargs)
        before = self._call.buffers()
        results, structure = pytree.tree_flatten(self._call.inner(*args, **kwargs))
        if moved := [place for place, one in self._call.buffers().items() if before.get(place) is not one]:
            part, name = moved[0]
            self._refuse(f"its forward sets {type(part).__name__}.{name}, which a CUDA graph would not")
        places = [place for place, one in enumerate(results) if isinstance(one, Tensor)]
        uses = [0] * len(places) if any(results[place].requires_grad for place in places) else []
        self._kinds.append(kind)
        self._uses.append(uses)
        for number, place in enumerate(places):
            if results[place].requires_grad:
                results[place] = results[place].clone()  # the module itself may use the result, too
                results[place].register_hook(_noting(uses, number))
        return pytree.tree_unflatten(results, structure)

    def _refuse(self, reason: str) -> str:
        """Captures the module's parts from now on, unless calls of the whole were captured before; returns the reason."""
        if not self._refused and not any(slot.graphs for slot in self._slots):
            self._refused = reason
            for name, part in _parts_of_several_layers(self._call.module, self._name):
                wrap_call(part, partial(self._as_part, part, name))
        return reason

    def _as_part(self, part: nn.Module, name: str, inner: Call) -> Call:
        call = CapturedModule(part, inner, lambda reason: None, captured=self._captured, name=name, recorder=self._recorder)
        return copied_out(call, applies=torch.is_grad_enabled)  # the module may keep what a part returns

    def _eagerly(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._skipped(reason)
        return self._call.inner(*args, **kwargs)

    def _learn(self, number: int, places: Sequence[int]) -> None:
        """Notes that more of a call's results get gradients; the next call of the kind is captured anew."""
        for place in places:
            self._uses[number][place] += 1
        for slot in self._slots if places else ():
            slot.graphs.pop(number, None)

    def _capture(self, leaves: Sequence[Any], structure: pytree.TreeSpec, number: int, slot: _Slot) -> _Graph | str:
        """Captures a call of a kind; returns why if it cannot be."""
        call, uses = self._call, self._uses[number]
        inputs = [one.detach().clone().requires_grad_(one.requires_grad) for one in tensors_among(leaves)]
        arguments = Form.of(leaves, structure)
        parameters = [one for one in call.parameters if one.requires_grad]
        stand_ins = {one: _stand_in(one) for one in call.parameters}
        results: list[Any] = []
        outer = structure

        def run() -> list[Tensor]:
            nonlocal results, outer
            with _replaced(call.parts, stand_ins):
                results, outer = call.flat_results(arguments, inputs)
            return tensors_among(results)

        before = versions_of(inputs)
        wanted = [*(one for one in inputs if one.requires_grad), *(stand_ins[one] for one in parameters)]
        with call.put_back() as changed, recording(), distributions_not_validated():
            drawn = generator_state(call.device)
            try:
                have_gradients, reason = on_side_stream(call.device, lambda: forward_and_backward(run, uses, wanted, parameters))
            except Exception as error:
                return why_a_trial_run_failed(error)
            draws = drawn is not None and not torch.equal(drawn, cast(Tensor, generator_state(call.device)))
            reason = changed() or unsuitable(results, "returns", call.device) or reason
            if any(one.data_ptr() != other.data_ptr() for one, other in stand_ins.items()):
                reason = reason or "it moves its weights"
            if before != versions_of(inputs):
                reason = reason or "it changes its arguments in place"
            if reason:
                return reason
            with captured(call.module):
                made = self._recorder.record(run, uses, wanted, slot.pool)
        return _Graph(
            inputs=inputs,
            parameters=parameters,
            recording=made,
            have_gradients=have_gradients,
            arguments=arguments,
            results=Form.of(results, outer),
            num_backward=max(uses),
            slot=slot,
            call=call,
            autocast=self._kinds[number].autocast,
            draws=draws,
            learn=partial(self._learn, number),
        )


RECOMPUTED = "its activations are recomputed in the backward pass, or kept elsewhere until then"

_SAVED_HOOKS: Callable[[bool], Any] | None = private("torch._C._autograd", "_top_saved_tensors_default_hooks")
_TASK: Callable[[], int] | None = private("torch._C", "_current_graph_task_id")


def _is_recomputed() -> bool:
    """Tells whether something else keeps what a call saves for its backward pass, or this is a backward pass."""
    return bool(_SAVED_HOOKS and _SAVED_HOOKS(True)) or bool(_TASK and _TASK() != -1)


def _parts_of_several_layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost modules inside that train and are worth a CUDA graph, with their names."""
    for inner, part in module.named_children():
        path = f"{name}.{inner}".lstrip(".")
        if type(part).forward is nn.Module.forward:  # a list of modules
            yield from _parts_of_several_layers(part, path)
        elif any(one.requires_grad for one in part.parameters()) and (
            num_layers(part) >= LEAST_LAYERS or isinstance(part, nn.RNNBase)
        ):
            yield path, part


def _noting(uses: list[int], number: int) -> Callable[[Tensor], None]:
    def noted(_: Tensor) -> None:
        uses[number] += 1

    return noted


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter on the same memory.

    Autograd accumulates a parameter's gradient on the stream on which the parameter was first used, as long as any result of that
    use exists, such as the loss of the step before. A captured backward pass cannot wait for that stream.
    """
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in


@contextmanager
def _replaced(parts: Sequence[nn.Module], others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Has modules hold other parameters, on the same memory, in the block."""
    places = [(part, name, held) for part in parts for name, held in part._parameters.items() if held is not None]
    for part, name, held in places:
        setattr(part, name, others[held])
    _have_same_weights(parts)
    try:
        yield
    finally:
        for part, name, held in places:
            setattr(part, name, held)
        _have_same_weights(parts)


def _have_same_weights(parts: Sequence[nn.Module]) -> None:
    """Keeps recurrent layers from moving their weights into new memory, as they do where they notice others."""
    for part in parts:
        if isinstance(part, nn.RNNBase) and hasattr(part, "_flat_weight_refs"):
            part._flat_weight_refs = [None if one is None else weakref.ref(one) for one in part._flat_weights]


def capture(targets: Sequence[Target]) -> None:
    """Replaces the calls of a script's modules by captured ones.

    Raises:
        ScriptError: Several workers train together.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ScriptError(f"{SETTING} is for one worker; use scope=full,mode=reduce-overhead")
    for target in targets:
        noted = partial(CapturedModule, target.module, skipped=partial(_count, target), captured=target.captured.add)
        wrap_call(target.module, noted)


def _count(target: Target, reason: str) -> None:
    sentence = f"{target.name} runs eagerly: {reason}"
    target.uncaptured[sentence] = target.uncaptured.get(sentence, 0) + 1


def _is_captured_in_parts(target: Target) -> bool:
    return bool(target.captured) and "" not in target.captured


def with_uncaptured(found: Diagnostics, targets: Iterable[Target]) -> Diagnostics:
    """Returns diagnostics with the calls of a script's modules that were to be captured and were not, not even in parts."""
    counts = [target.uncaptured for target in targets if not _is_captured_in_parts(target)]
    return replace(
        found,
        cudagraph_skips=found.cudagraph_skips + sum(sum(one.values()) for one in counts),
        cudagraph_skip_reasons=[*found.cudagraph_skip_reasons, *chain.from_iterable(counts)],
    )


def left_eager(frozen: Iterable[Target]) -> Iterator[str]:
    """Says which networks that are not trained run eagerly where their inputs' gradients are wanted, and why."""
    yield from (next(iter(target.uncaptured)) for target in frozen if target.uncaptured and not target.captured)


def captured_in_parts(targets: Iterable[Target]) -> Iterator[str]:
    """Says which modules run as CUDA graphs of their parts, and why."""
    for target in targets:
        if _is_captured_in_parts(target) and target.uncaptured:
            reason = next(iter(target.uncaptured))
            parts = sorted(target.captured, key=lambda name: (name.count("."), name))  # large ones first
            others = f" and {len(parts) - 1} other{'s' * (len(parts) > 2)}" if len(parts) > 1 else ""
            advice = "; with use_cache=off the whole may be" if CACHE.search(reason) else ""
            yield f"{reason}; captured as CUDA graphs of its own: {parts[0]}{others}{advice}"
