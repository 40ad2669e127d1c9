"""What a call of a module depends on, and how its traces are undone: what a CUDA graph of the call must know."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from compile_sweep.contract.installed_torch import private
from compile_sweep.contract.seeding import random_numbers_put_back
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.trajectory import _generator_states
from compile_sweep.script.apply.module_state import CONSTANTS, numbers_read_by, state_of
from compile_sweep.script.job import ScriptError

Call = Callable[..., Any]

SETTING = "scope=eager,cudagraphs=on"

MOST_KINDS = 64
"""Kinds of calls that are kept apart: with more, the arguments change from call to call."""

WAITS = "it waits for the GPU, as by .item(), .cpu() or a mask's size"

_WAITED = "called a synchronizing CUDA operation"
"""What torch says in a trial run where a call waits for the GPU."""

_CPU = torch.device("cpu")


_TRANSFORM: Callable[[], object] | None = private("torch._C._functorch", "peek_interpreter_stack")
"""Returns the innermost transform of `torch.func` that is at work."""

_TENSOR = object()


@dataclass(frozen=True, slots=True)
class Form:
    """Arguments or results of a call without their tensors."""

    constants: Sequence[Any]
    """Its leaves, with `_TENSOR` in place of tensors."""
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Self:
        """Returns the form of leaves in a structure."""
        return cls([_TENSOR if isinstance(one, Tensor) else one for one in leaves], structure)

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Returns arguments or results of this form with these tensors."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if one is _TENSOR else one for one in self.constants], self.structure)


def tensors_among(leaves: Iterable[Any]) -> list[Tensor]:
    """Returns those of the leaves that are tensors."""
    return [one for one in leaves if isinstance(one, Tensor)]


class Kind(NamedTuple):
    """What a captured call depends on: all but the values of the tensors that it is given and of what the module holds."""

    structure: pytree.TreeSpec
    arguments: list[tuple[Any, ...]]
    autocast: tuple[bool, torch.dtype]
    is_inference: bool
    """Whether it is called in `torch.inference_mode`."""
    numbers: list[list[Any]]
    """Those that the forward may read."""
    memory: list[tuple[int, bool]]
    """Where weights and buffers are, and which are trained."""


class ModuleCall:
    """A module's call, with what it reads and may change.

    Args:
        module: The module; it has parameters.
        inner: Its call.
    """

    def __init__(self, module: nn.Module, inner: Call) -> None:
        self.module, self.inner = module, inner
        self.parts = list(module.modules())
        self.parameters = list(module.parameters())
        self._known = set(self.parameters)
        self._watched = numbers_read_by(self.parts)
        self.has_cudnn_dropout = any(isinstance(one, nn.RNNBase) and one.dropout > 0 < one.num_layers - 1 for one in self.parts)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.parameters[0].device

    @property
    def autocast(self) -> tuple[bool, torch.dtype]:
        """Whether autocast is on at present, and its dtype."""
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def flat_results(self, form: Form, tensors: Iterable[Tensor]) -> tuple[list[Any], pytree.TreeSpec]:
        """Runs the call with arguments of a form and these tensors; returns its results, flat, and their structure."""
        args, kwargs = form.filled(tensors)
        return pytree.tree_flatten(self.inner(*args, **kwargs))

    def why_never(self) -> str:
        """Says why no call can be captured; empty if some may be."""
        if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in self.parts):
            return "it has hooks, which a CUDA graph would not call"
        return "" if all(type(one) is nn.Parameter for one in self.parameters) else "its weights are not plain parameters"

    def why_not(self, leaves: Sequence[Any]) -> str:
        """Says why a call with these arguments cannot be captured; empty if it may be."""
        if refused := unsuitable(leaves, "is called with", self.device):
            return refused
        if forward_ad._current_level >= 0 or (_TRANSFORM is not None and _TRANSFORM() is not None):
            return "it is called in a transform of torch.func, as by vmap or jvp"
        held = [one for part in self.parts for one in part._parameters.values() if one is not None]
        if not self._known.issuperset(held):
            return "other tensors stand in for its weights, as in torch.func.functional_call"
        return ""

    def kind(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Kind:
        """Returns what a call with these arguments depends on."""
        return Kind(
            structure=structure,
            arguments=[_described(leaf) for leaf in leaves],
            autocast=self.autocast,
            is_inference=torch.is_inference_mode_enabled(),
            numbers=[[place.get(name) for name in names] for place, names in self._watched],
            memory=[(one.data_ptr(), one.requires_grad) for one in (*self.parameters, *self.buffers().values())],
        )

    def buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Returns the buffers of its parts, by part and name."""
        return {(part, name): one for part in self.parts for name, one in part._buffers.items() if one is not None}

    @contextmanager
    def put_back(self) -> Iterator[Callable[[], str]]:
        """Undoes in the end what a trial run changed; yields a function that says what a graph would leave out of it."""
        before, state, buffers = state_of(self.parts), PythonState(self.module), self.buffers()
        copies = [(one, one.detach().clone()) for one in self.state()]
        with random_numbers_put_back(self.device):  # after the capture, too: cuDNN begins its dropout anew where they were set
            drawn = _generator_states(_CPU)

            def changed() -> str:
                if drawn != _generator_states(_CPU):
                    return "it draws random numbers on the CPU"
                after = state_of(self.parts)
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

    def state(self) -> list[Tensor]:
        """Returns the tensors, besides parameters, that its parts hold."""
        held = [one for part in self.parts for one in (*part._buffers.values(), *vars(part).values())]
        tensors = {id(one): one for one in held if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)}
        return list(tensors.values())

    @contextmanager
    def holding(self, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Has the parts hold other parameters, on the same memory, in the block."""
        places = [(part, name, held) for part in self.parts for name, held in part._parameters.items() if held is not None]
        for part, name, held in places:
            setattr(part, name, others[held])
        _have_same_weights(self.parts)
        try:
            yield
        finally:
            for part, name, held in places:
                setattr(part, name, held)
            _have_same_weights(self.parts)


def _have_same_weights(parts: Sequence[nn.Module]) -> None:
    """Keeps recurrent layers from moving their weights into new memory, as they do where they notice others."""
    for part in parts:
        if isinstance(part, nn.RNNBase) and hasattr(part, "_flat_weight_refs"):
            part._flat_weight_refs = [None if one is None else weakref.ref(one) for one in part._flat_weights]


@contextmanager
def captured(module: nn.Module) -> Iterator[None]:
    """Has a call of a module captured in the block, without casts that autocast has kept; raises ScriptError if that fails."""
    torch.clear_autocast_cache()  # they would belong to the graph, or not be in it
    try:
        yield
    except Exception as error:
        first = str(_root(error)).strip().partition("\n")[0]
        raise ScriptError(
            f"{SETTING}: a call of {type(module).__name__} cannot be captured as a CUDA graph ({first}), as where it waits for "
            "the GPU, by .item(), .cpu() or a mask's size; leave cudagraphs out, or compile it: scope=full,mode=reduce-overhead"
        ) from error
    finally:
        torch.clear_autocast_cache()


def _root(error: BaseException) -> BaseException:
    """Returns the error that another one followed from: the end of a capture that failed is an error, too."""
    return error if error.__context__ is None else _root(error.__context__)


def why_a_trial_run_failed(error: Exception) -> str:
    """Says why a call cannot be captured whose trial run raised an error."""
    first = str(error).strip().partition("\n")[0]
    return WAITS if _WAITED in first else f"a trial run of a call raised {type(error).__name__}: {first}"


def changed_numbers(kind: Kind, other: Kind) -> str:
    """Says what differs in two kinds of calls besides tensors among the arguments; empty if those differ."""
    tensors, others = ([one for one in each.arguments if len(one) > 2] for each in (kind, other))  # as `_described`
    if (kind.structure, tensors, kind.autocast) != (other.structure, others, other.autocast):
        return ""
    if kind.arguments != other.arguments:
        return "numbers that it is called with change"
    return "numbers that its forward reads change" if kind.numbers != other.numbers else "its weights are in other memory"


def unsuitable(leaves: Sequence[Any], verb: str, device: torch.device) -> str:
    """Says which argument or result a graph cannot hold; empty if it can hold all."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.device != device or leaf.layout is not torch.strided or type(leaf) not in (Tensor, nn.Parameter):
                return f"it {verb} a tensor that is not a plain one on the GPU of its weights"
        elif not isinstance(leaf, CONSTANTS):
            return f"it {verb} an object of class {type(leaf).__name__}"
    return ""


def _described(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf
