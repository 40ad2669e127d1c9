"""Captures what a script's modules compute, forward and backward, as CUDA graphs, without compiling anything.

Background: a CUDA graph launches all kernels of a call at once, so a step no longer waits for Python to launch them one by one.
It repeats what was captured: the same kernels on the same memory, and no Python. So a call is captured for the shapes and values
that it was given, and only if a trial run shows that nothing else depends on Python. The method is that of
`torch.cuda.make_graphed_callables` (https://docs.pytorch.org/docs/stable/notes/cuda.html), which leaves it to the user to know
whether a module can be captured. Where one cannot be captured as a whole, its parts are, each by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_sweep.contract.inspect_model import num_layers
from compile_sweep.contract.installed_torch import private
from compile_sweep.harness.diagnostics.capture import Diagnostics
from compile_sweep.schema.causes.errors import CACHE
from compile_sweep.schema.choices import MOST_CAPTURED_SHAPES
from compile_sweep.script.apply.captured_graph import Function, Slot
from compile_sweep.script.apply.forward_graphs import ForwardGraphs
from compile_sweep.script.apply.gradient_requests import GradientRequests
from compile_sweep.script.apply.graph_memory import copied_out, wrap_call
from compile_sweep.script.apply.graph_recording import GraphRecorder, is_recording
from compile_sweep.script.apply.module_call import (
    MOST_KINDS,
    SETTING,
    Form,
    Kind,
    ModuleCall,
    changed_numbers,
    tensors_among,
)
from compile_sweep.script.apply.replayed_call import current_task
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


@dataclass(slots=True, kw_only=True)
class _Kind:
    """Calls of one kind."""

    described: Kind
    function: Function
    requests: GradientRequests


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
        self._kinds: list[_Kind] = []
        self._num_changed = 0
        trained_bytes = sum(one.nbytes for one in self._call.parameters if one.requires_grad)
        self._most_pending = max(FEW_PENDING, min(MOST_PENDING, PENDING_BYTES // max(1, trained_bytes)))
        self._slots: list[Slot] = []
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
        described = call.kind(leaves, structure)
        number = next((number for number, one in enumerate(self._kinds) if one.described == described), None)
        if number is None:
            return self._first(described, Form.of(leaves, structure), args, kwargs)
        self._num_changed = 0
        kind = self._kinds[number]
        if not kind.requests.are_possible:
            return self._without_gradients(args, kwargs)
        if not kind.requests.are_made:
            return call.inner(*args, **kwargs)
        given = tensors_among(leaves)
        if kind.requests.learned(given):
            for slot in self._slots:
                slot.graphs.pop(number, None)
        if not kind.requests.sequences:
            found = kind.requests.watched(given)
            return kind.function.form.filled(found)
        free = next((one for one in self._slots if one.is_free), None)
        if free is None:
            if len(self._slots) == self._most_pending:
                return self._eagerly(f"more than {self._most_pending} of its calls wait for their backward pass", args, kwargs)
            self._slots.append(free := Slot(self._recorder.new_pool()))
        if number not in free.graphs:
            if len(free.graphs) == MOST_CAPTURED_SHAPES:
                return self._eagerly(f"it is called in more than {MOST_CAPTURED_SHAPES} ways, by shapes or values", args, kwargs)
            made = kind.requests.captured(self._recorder, given, free)
            if isinstance(made, str):
                return self._eagerly(self._refuse(made), args, kwargs)
            free.add(number, made)
            self._captured(self._name)
        return kind.function.form.filled(free.graphs[number].replayed(given))

    def _first(self, described: Kind, arguments: Form, args: Any, kwargs: Any) -> Any:
        """Runs a call eagerly, and notes which of its results get a gradient: a model's logits need none beside its loss."""
        if self._call.has_cudnn_dropout and any(slot.graphs for slot in self._slots):
            # An eager call may begin cuDNN's dropout anew, in other memory than the graphs use.
            self._slots.clear()
            return self._eagerly(self._refuse("it has recurrent layers with dropout, and its calls differ"), args, kwargs)
        if len(self._kinds) == MOST_KINDS:  # its parts are called in as many
            self._refused = f"it is called in more than {MOST_KINDS} ways, by shapes or values"
            return self._eagerly(self._refused, args, kwargs)
        what = changed_numbers(self._kinds[-1].described, described) if self._kinds else ""
        self._num_changed = self._num_changed + 1 if what else 0
        if self._num_changed == MOST_CHANGES:
            return self._eagerly(self._refuse(f"{what} from call to call"), args, kwargs)
        before = self._call.buffers()
        results, structure = pytree.tree_flatten(self._call.inner(*args, **kwargs))
        if moved := [place for place, one in self._call.buffers().items() if before.get(place) is not one]:
            part, name = moved[0]
            self._refuse(f"its forward sets {type(part).__name__}.{name}, which a CUDA graph would not")
        places = [place for place, one in enumerate(results) if isinstance(one, Tensor)]
        for place in places:
            if results[place].requires_grad:
                results[place] = results[place].clone()  # the module itself may use the result, too
        function = Function(self._call, described.autocast, arguments)
        requests = GradientRequests(function, [results[place] for place in places])
        self._kinds.append(_Kind(described=described, function=function, requests=requests))
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


RECOMPUTED = "its activations are recomputed in the backward pass, or kept elsewhere until then"

_SAVED_HOOKS: Callable[[bool], Any] | None = private("torch._C._autograd", "_top_saved_tensors_default_hooks")


def _is_recomputed() -> bool:
    """Tells whether something else keeps what a call saves for its backward pass, or this is a backward pass."""
    return bool(_SAVED_HOOKS and _SAVED_HOOKS(True)) or current_task() != -1


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
