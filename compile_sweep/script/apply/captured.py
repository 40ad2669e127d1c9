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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_sweep.contract.inspect_model import num_layers
from compile_sweep.contract.installed_torch import private
from compile_sweep.contract.seeding import random_numbers_put_back
from compile_sweep.harness.diagnostics.capture import Diagnostics
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.trajectory import _generator_states
from compile_sweep.schema.causes.errors import CACHE
from compile_sweep.schema.choices import MOST_CAPTURED_SHAPES
from compile_sweep.script.apply.graph_memory import copied_out, copy_gradients, wrap_call
from compile_sweep.script.apply.graph_recording import (
    Record,
    Recording,
    distributions_not_validated,
    forward_and_backward,
    on_side_stream,
    record_on_gpu,
)
from compile_sweep.script.apply.module_state import CONSTANTS, numbers_read_by, state_of
from compile_sweep.script.discover import Target
from compile_sweep.script.job import ScriptError

Call = Callable[..., Any]

MOST_KINDS = 64
"""Kinds of calls that are kept apart: with more, the arguments change from call to call."""

MOST_PENDING = 4
"""Calls of one module that may wait for their backward pass at the same time, each in memory of its own."""

MOST_CHANGES = 4
"""Calls in a row that differ in numbers, or in where weights are in memory, but not in the shapes of their arguments."""

LEAST_LAYERS = 8
"""Layers of a part that is captured by itself: a replay takes about as long as launching the kernels of a few layers does."""

SETTING = "scope=eager,cudagraphs=on"


class _Waiting:
    """Stands for a call whose backward passes are yet to come; it lives as long as what the call returned."""

    def __init__(self, num_backward: int) -> None:
        self.num_left = num_backward


class _Kind(NamedTuple):
    """What a captured call depends on: all but the values of the tensors that it is given and of what the module holds."""

    structure: pytree.TreeSpec
    arguments: list[tuple[Any, ...]]
    autocast: tuple[bool, torch.dtype]
    numbers: list[list[Any]]
    """Those that the forward may read."""
    memory: list[tuple[int, bool]]
    """Where weights and buffers are, and which are trained."""


@dataclass(slots=True, kw_only=True)
class _Graph:
    """A captured call."""

    inputs: Sequence[Tensor]
    """Memory that the call's tensors are copied to."""
    parameters: Sequence[nn.Parameter]
    recording: Recording
    have_gradients: Sequence[bool]
    """Which of the tensors among the results depend on something that is trained."""
    constants: Sequence[Any]
    """The results of the call, with `_TENSOR` in place of tensors."""
    structure: pytree.TreeSpec
    num_backward: int
    """Number of backward passes through one call: more than one with `retain_graph=True`."""
    slot: "_Slot"


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
        recording.forward.replay()
        graph.slot.latest = waiting
        ctx.graph, ctx.waiting, ctx.are_leaves = graph, waiting, [one.is_leaf for one in given]
        ctx.set_materialize_grads(False)
        outputs = tuple(one.detach() for one in recording.outputs)
        ctx.mark_non_differentiable(*(one for one, known in zip(outputs, graph.have_gradients, strict=True) if not known))
        return outputs

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ScriptError(
                f"{SETTING} does not work where gradients are differentiated again (create_graph=True) in some steps only; leave "
                "cudagraphs out"
            )
        graph, waiting = cast(_Graph, ctx.graph), cast(_Waiting, ctx.waiting)
        is_repeated = waiting.num_left < graph.num_backward
        if graph.slot.latest is not waiting or (is_repeated and graph.num_backward == 1):
            raise ScriptError(
                f"{SETTING} does not work where a backward pass is repeated (retain_graph=True) in some steps only, or after the "
                "module was called again; leave cudagraphs out"
            )
        recording = graph.recording
        for memory, gradient in zip(recording.output_gradients, given, strict=True):
            if memory is None and gradient is not None:
                raise ScriptError(f"{SETTING} does not work where a module's result gets gradients in some steps only")
            if memory is not None:
                memory.zero_() if gradient is None else memory.copy_(gradient)
        recording.backward.replay()
        waiting.num_left -= 1
        found = iter(recording.gradients)
        of_inputs = [next(found) if one.requires_grad else None for one in graph.inputs]
        copied = graph.num_backward > 1 or not _accumulates(ctx)
        held = [_held(one, copied=copied or leaf) for one, leaf in zip(of_inputs, ctx.are_leaves, strict=True)]
        return None, None, *held, *(_held(one, copied=copied) for one in found)


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


_capturing = False
"""Whether a call is being captured, of which the calls of parts, which other modules may share, belong to it."""


class CapturedModule:
    """A module whose calls with gradients are captured at their second time, and replayed from then on.

    Once a call cannot be captured and none was before, the module runs eagerly, and its parts are captured instead.

    Args:
        module: The module.
        inner: Its call.
        skipped: Called with the reason of each call that runs eagerly because it cannot be captured.
        captured: Called with the name of each part that is captured in place of the module.
        name: Name of the module, if it is such a part.
        record: Captures a call.
        new_pool: Returns a pool of memory for graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        inner: Call,
        skipped: Callable[[str], None],
        *,
        captured: Callable[[str], None] = lambda name: None,
        name: str = "",
        record: Record | None = None,
        new_pool: Callable[[], Any] | None = None,
    ) -> None:
        self._module, self._inner, self._skipped, self._captured, self._name = module, inner, skipped, captured, name
        self._record = record or record_on_gpu
        self._new_pool = new_pool or torch.cuda.graph_pool_handle
        self._parts = list(module.modules())
        self._parameters = list(module.parameters())
        self._known = set(self._parameters)
        self._watched = numbers_read_by(self._parts)
        self._kinds: list[_Kind] = []
        """Kinds of calls so far."""
        self._uses: list[list[int]] = []
        """For each kind, how often each result of its first call got a gradient from the script."""
        self._num_changed = 0
        self._slots: list[_Slot] = []
        self._refused = ""
        self._has_cudnn_dropout = any(isinstance(one, nn.RNNBase) and one.dropout > 0 < one.num_layers - 1 for one in self._parts)
        if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in self._parts):
            self._refuse("it has hooks, which a CUDA graph would not call")
        elif any(type(one) is not nn.Parameter for one in self._parameters):
            self._refuse("its weights are not plain parameters")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _capturing:
            return self._inner(*args, **kwargs)
        if refused := self._refused or (RECOMPUTED if _is_recomputed() else ""):
            return self._eagerly(refused, args, kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        refused = _unsuitable(leaves, "is called with", self._parameters[0].device)
        held = [one for part in self._parts for one in part._parameters.values() if one is not None]
        if not refused and not self._known.issuperset(held):
            refused = "other tensors stand in for its weights, as in torch.func.functional_call"
        if refused:
            return self._eagerly(self._refuse(refused), args, kwargs)
        kind = self._kind(leaves, structure)
        number = next((number for number, one in enumerate(self._kinds) if one == kind), None)
        if number is None:
            return self._first(kind, args, kwargs)
        self._num_changed = 0
        if not any(self._uses[number]):
            return self._inner(*args, **kwargs)
        slot = next((one for one in self._slots if one.is_free), None)
        if slot is None:
            if len(self._slots) == MOST_PENDING:
                return self._eagerly(f"more than {MOST_PENDING} of its calls wait for their backward pass", args, kwargs)
            self._slots.append(slot := _Slot(self._new_pool()))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        graph = slot.graphs.get(number)
        if graph is None:
            if len(slot.graphs) == MOST_CAPTURED_SHAPES:
                return self._eagerly(f"it is called in more than {MOST_CAPTURED_SHAPES} ways, by shapes or values", args, kwargs)
            made = self._capture(leaves, structure, self._uses[number], slot)
            if isinstance(made, str):
                return self._eagerly(self._refuse(made), args, kwargs)
            graph = slot.graphs[number] = made
            self._captured(self._name)
            slot.gradients.update(one.data_ptr() for one in graph.recording.gradients if one is not None)
        copy_gradients(one for one in self._parameters if one.grad is not None and one.grad.data_ptr() in slot.gradients)
        waiting = _Waiting(graph.num_backward)
        outputs = iter(_Replay.apply(graph, waiting, *tensors, *graph.parameters))  # type: ignore[no-untyped-call, unused-ignore]
        results = [next(outputs) if one is _TENSOR else one for one in graph.constants]
        return pytree.tree_unflatten(results, graph.structure)

    def _first(self, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """Runs a call eagerly, and notes which of its results get a gradient: a model's logits need none beside its loss."""
        if self._has_cudnn_dropout and any(slot.graphs for slot in self._slots):
            # An eager call may begin cuDNN's dropout anew, in other memory than the graphs use.
            self._slots.clear()
            return self._eagerly(self._refuse("it has recurrent layers with dropout, and its calls differ"), args, kwargs)
        if len(self._kinds) == MOST_KINDS:  # its parts are called in as many
            self._refused = f"it is called in more than {MOST_KINDS} ways, by shapes or values"
            return self._eagerly(self._refused, args, kwargs)
        what = _changed(self._kinds[-1], kind) if self._kinds else ""
        self._num_changed = self._num_changed + 1 if what else 0
        if self._num_changed == MOST_CHANGES:
            return self._eagerly(self._refuse(f"{what} from call to call"), args, kwargs)
        before = self._buffers()
        results, structure = pytree.tree_flatten(self._inner(*args, **kwargs))
        if moved := [place for place, one in self._buffers().items() if before.get(place) is not one]:
            part, name = moved[0]
            self._refuse(f"its forward sets {type(part).__name__}.{name}, which a CUDA graph would not")
        places = [place for place, one in enumerate(results) if isinstance(one, Tensor)]
        uses = [0] * len(places)
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
            for name, part in _parts_of_several_layers(self._module, self._name):
                wrap_call(part, partial(self._as_part, part, name))
        return reason

    def _as_part(self, part: nn.Module, name: str, inner: Call) -> Call:
        call = CapturedModule(
            part, inner, lambda reason: None, captured=self._captured, name=name, record=self._record, new_pool=self._new_pool
        )
        return copied_out(call, applies=torch.is_grad_enabled)  # the module may keep what a part returns

    def _eagerly(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._skipped(reason)
        return self._inner(*args, **kwargs)

    def _kind(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Kind:
        device = self._parameters[0].device.type
        return _Kind(
            structure=structure,
            arguments=[_described(leaf) for leaf in leaves],
            autocast=(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            numbers=[[place.get(name) for name in names] for place, names in self._watched],
            memory=[(one.data_ptr(), one.requires_grad) for one in (*self._parameters, *self._buffers().values())],
        )

    def _capture(self, leaves: Sequence[Any], structure: pytree.TreeSpec, uses: Sequence[int], slot: _Slot) -> _Graph | str:
        """Captures a call; returns why if it cannot be."""
        inputs = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)]
        parameters = [one for one in self._parameters if one.requires_grad]
        stand_ins = {one: _stand_in(one) for one in self._parameters}
        results: list[Any] = []
        structures: list[pytree.TreeSpec] = []

        def run() -> list[Tensor]:
            nonlocal results
            copies = iter(inputs)
            args, kwargs = pytree.tree_unflatten([next(copies) if isinstance(one, Tensor) else one for one in leaves], structure)
            with _replaced(self._parts, stand_ins):
                results, outer = pytree.tree_flatten(self._inner(*args, **kwargs))
            structures.append(outer)
            return [one for one in results if isinstance(one, Tensor)]

        device = self._parameters[0].device
        before = [one._version for one in inputs]
        wanted = [*(one for one in inputs if one.requires_grad), *(stand_ins[one] for one in parameters)]
        with self._put_back(device) as changed, _belonging_to_this_call(), distributions_not_validated():
            try:
                have_gradients, reason = on_side_stream(device, lambda: forward_and_backward(run, uses, wanted, parameters))
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                return WAITS if _WAITED in first else f"a trial run of a call raised {type(error).__name__}: {first}"
            reason = changed() or _unsuitable(results, "returns", device) or reason
            if any(one.data_ptr() != other.data_ptr() for one, other in stand_ins.items()):
                reason = reason or "it moves its weights"
            if before != [one._version for one in inputs]:
                reason = reason or "it changes its arguments in place"
            if reason:
                return reason
            recording = self._recorded(run, uses, wanted, slot.pool)
        constants = [_TENSOR if isinstance(one, Tensor) else one for one in results]
        return _Graph(
            inputs=inputs,
            parameters=parameters,
            recording=recording,
            have_gradients=have_gradients,
            constants=constants,
            structure=structures[-1],
            num_backward=max(uses),
            slot=slot,
        )

    def _recorded(
        self, run: Callable[[], Sequence[Tensor]], uses: Sequence[int], wanted: Sequence[Tensor], pool: Any
    ) -> Recording:
        torch.clear_autocast_cache()  # casts that are kept would belong to the graph, or not be in it
        try:
            return self._record(run, uses, wanted, pool)
        except Exception as error:
            first = str(_root(error)).strip().partition("\n")[0]
            raise ScriptError(
                f"{SETTING}: a call of {type(self._module).__name__} cannot be captured as a CUDA graph ({first}), as where it "
                "waits for the GPU, by .item(), .cpu() or a mask's size; leave cudagraphs out, or compile it: "
                "scope=full,mode=reduce-overhead"
            ) from error
        finally:
            torch.clear_autocast_cache()

    @contextmanager
    def _put_back(self, device: torch.device) -> Iterator[Callable[[], str]]:
        """Undoes in the end what a trial run changed; yields a function that says what a graph would leave out of it."""
        before, state, buffers = state_of(self._parts), PythonState(self._module), self._buffers()
        copies = [(one, one.detach().clone()) for one in {id(one): one for one in self._tensors()}.values()]
        with random_numbers_put_back(device):  # after the capture, too: cuDNN begins its dropout anew where they were set
            drawn = _generator_states(_CPU)

            def changed() -> str:
                if drawn != _generator_states(_CPU):
                    return "it draws random numbers on the CPU"
                after = state_of(self._parts)
                names = {name for (_, name), _ in after.items() ^ before.items()}
                first = min(names, key=lambda name: ("._" in name, name), default="")
                return f"its forward sets {first}, which a CUDA graph would not" if first else ""

            try:
                yield changed
            finally:
                for one, copied in copies:
                    one.data.copy_(copied)  # a backward pass that is yet to come may have kept it
                for (part, name), buffer in buffers.items():
                    part._buffers[name] = buffer
                state.put_back()

    def _buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        return {(part, name): one for part in self._parts for name, one in part._buffers.items() if one is not None}

    def _tensors(self) -> Iterator[Tensor]:
        for part in self._parts:
            held = (*part._buffers.values(), *vars(part).values())
            yield from (one for one in held if isinstance(one, Tensor) and not isinstance(one, nn.Parameter))


_CPU = torch.device("cpu")

_TENSOR = object()
"""Stands for a tensor among a call's results."""

WAITS = "it waits for the GPU, as by .item(), .cpu() or a mask's size"

_WAITED = "called a synchronizing CUDA operation"
"""What torch says in a trial run where a call waits for the GPU."""

RECOMPUTED = "its activations are recomputed in the backward pass, or kept elsewhere until then"

_SAVED_HOOKS: Callable[[bool], Any] | None = private("torch._C._autograd", "_top_saved_tensors_default_hooks")
_TASK: Callable[[], int] | None = private("torch._C", "_current_graph_task_id")


def _is_recomputed() -> bool:
    """Tells whether something else keeps what a call saves for its backward pass, or this is a backward pass."""
    return bool(_SAVED_HOOKS and _SAVED_HOOKS(True)) or bool(_TASK and _TASK() != -1)


@contextmanager
def _belonging_to_this_call() -> Iterator[None]:
    """Has no part's call captured by itself in the block."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


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


def _described(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf


def _changed(kind: _Kind, other: _Kind) -> str:
    """Says what differs in two kinds of calls besides tensors among the arguments; empty if those differ."""
    tensors, others = ([one for one in each.arguments if len(one) > 2] for each in (kind, other))  # as `_described`
    if (kind.structure, tensors, kind.autocast) != (other.structure, others, other.autocast):
        return ""
    if kind.arguments != other.arguments:
        return "numbers that it is called with change"
    return "numbers that its forward reads change" if kind.numbers != other.numbers else "its weights are in other memory"


def _unsuitable(leaves: Sequence[Any], verb: str, device: torch.device) -> str:
    """Says which argument or result a graph cannot hold; empty if it can hold all."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.device != device or leaf.layout is not torch.strided or type(leaf) not in (Tensor, nn.Parameter):
                return f"it {verb} a tensor that is not a plain one on the GPU of its weights"
        elif not isinstance(leaf, CONSTANTS):
            return f"it {verb} an object of class {type(leaf).__name__}"
    return ""


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


def _root(error: BaseException) -> BaseException:
    """Returns the error that another one followed from: the end of a capture that failed is an error, too."""
    return error if error.__context__ is None else _root(error.__context__)


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


def captured_in_parts(targets: Iterable[Target]) -> Iterator[str]:
    """Says which modules run as CUDA graphs of their parts, and why."""
    for target in targets:
        if _is_captured_in_parts(target) and target.uncaptured:
            reason = next(iter(target.uncaptured))
            parts = sorted(target.captured, key=lambda name: (name.count("."), name))  # large ones first
            others = f" and {len(parts) - 1} other{'s' * (len(parts) > 2)}" if len(parts) > 1 else ""
            advice = "; with use_cache=off the whole may be" if CACHE.search(reason) else ""
            yield f"{reason}; captured as CUDA graphs of its own: {parts[0]}{others}{advice}"
