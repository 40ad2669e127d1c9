"""Finds what a sweep must know about a model: repeated blocks, and dimensions of their arguments that change.

Repeated blocks are the members of a `ModuleList` (or, if there is none, of a `Sequential`, which may hold an embedding and a head
beside them, or of a `ModuleDict` whose members are equal) that are all of one class. If they differ in size and contain equal
blocks, like the stages of a vision model, the blocks are the inner ones. A model without such lists may have three or more equal
modules of a class of its own side by side. A dimension of an inner module's argument changes if it differs between two runs.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from compile_sweep.contract.batch_changes import Dims
from compile_sweep.schema.choices import MemoryFormat
from compile_sweep.schema.shapes import make_policy

if TYPE_CHECKING:
    from compile_sweep.contract.base import Workload

_PER_REGION = 1 / 8
"""Compile time of a graph besides its layers, as a fraction of the whole model's. Measured ratios of regional to full were 0.24
for GPT-2, 1.7 for ResNet-50 (H100) and 0.3 for captioning (H200; docs/results.md).
"""

_FEWEST_LAYERS = 3
"""Equal modules that count as blocks without a list of them; two may be an encoder and a decoder, or two towers."""


def repeated_blocks(model: nn.Module) -> list[str]:
    """Returns the dotted names of the model's repeated blocks, none of which contains another."""
    found = (list(_blocks(model, kind, "")) for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    return next(filter(None, found), None) or _own_blocks(model)


def _own_blocks(model: nn.Module) -> list[str]:
    """Returns modules of classes that are not torch's, of which a module holds three or more that are equal."""
    alike: dict[Any, list[str]] = {}
    for name, parent in model.named_modules():
        is_container = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for key, module in parent.named_children():
            if (is_container and _is_own_layer(module)) or (_is_own(module) and any(module.children())):
                kind = (name, type(module), tuple(parameter.shape for parameter in module.parameters()))
                alike.setdefault(kind, []).append(f"{name}.{key}" if name else key)
    found = [name for names in alike.values() if len(names) >= _FEWEST_LAYERS for name in names]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _is_own_layer(module: nn.Module) -> bool:
    """Tells whether a module without modules in it has a forward that is not torch's, and a weight of two dimensions or more."""
    return _is_own(module) and not any(module.children()) and any(weights.dim() > 1 for weights in module.parameters())


def _is_own(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)  # the class of a torch.jit.ScriptModule has none
    return forward is not None and not forward.__module__.startswith("torch.")


class _NothingDrawn(TorchFunctionMode):
    """Leaves out normal random numbers for tensors without values: torch would load its compiler for them, in a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, Tensor.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """Makes models with shapes but without values, so that a large one takes no memory here."""
    with torch.device("meta"), _NothingDrawn():
        yield


def preferred_memory_format(model: nn.Module) -> MemoryFormat | None:
    """Returns the memory format worth trying: that of the convolutions if they are a large part of the model.

    They are if they have at least a fifth of the weights, or if they outnumber linear layers, as before the large classifier of a
    VGG. A transformer's patch embedding is a convolution too, but such a small part of the work that its format does not matter.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    num_linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    for layout, kind in ((MemoryFormat.CHANNELS_LAST, nn.Conv2d), (MemoryFormat.CHANNELS_LAST_3D, nn.Conv3d)):
        convolutions = [module for module in model.modules() if isinstance(module, kind)]
        held = sum(module.weight.numel() for module in convolutions)
        if held and (5 * held >= total or len(convolutions) > num_linear):
            return layout
    return None


def regional_share(model: nn.Module, regions: Sequence[str]) -> float:
    """Returns the compile time of scope=regional divided by that of scope=full, as estimated from the model's structure.

    Regions of one kind are compiled once, so what counts is the fraction of the model's layers in distinct regions; and each of
    those that is more than one layer has a graph that takes time. 0.21 for GPT-2's twelve blocks, 1.5 for ResNet-50's stages.
    """
    layers = [num_layers(module) for module in _distinct(model, regions)]
    return sum(layers) / num_layers(model) + _PER_REGION * sum(number > 1 for number in layers)


def _distinct(model: nn.Module, regions: Sequence[str]) -> list[nn.Module]:
    """Returns a region of each kind: equal in structure, shapes and fractions, such as a rate of stochastic depth.

    Whole numbers are often a block's own, and hardly ever what its forward computes with.
    """

    def kind(module: nn.Module) -> Any:
        fractions = [(name, one) for part in module.modules() for name, one in vars(part).items() if isinstance(one, float)]
        return repr(module), tuple(weights.shape for weights in module.parameters()), tuple(fractions)

    return list({kind(module): module for module in map(model.get_submodule, regions)}.values())


def kinds_of_blocks(model: nn.Module, regions: Sequence[str]) -> int:
    """Returns how many graphs the forward of a class may take with scope=regional: one for each kind of its regions."""
    return max(Counter(map(type, _distinct(model, regions))).values(), default=0)


def num_layers(module: nn.Module) -> int:
    """Returns how many of the modules in it have no others inside."""
    return sum(not any(part.children()) for part in module.modules())


class Operators(NamedTuple):
    """The operators with gradients that computed some tensors: nodes of their autograd graph."""

    number: int = 0
    num_slices: int = 0
    """Slices of one tensor, one by one, such as `x[:, i]` in a loop, where there are many; of the tensor with the most."""
    sliced_elements: int = 0
    """Elements that the backward pass of all such slices writes: for each one as many as the whole tensor has."""


_MANY_SLICES = 16
_SLICES = ("SelectBackward0", "SliceBackward0")


def operators_of(outputs: Iterable[tuple[str, Tensor]], inputs: Iterable[tuple[str, Tensor]] = ()) -> Operators:
    """Counts the operators that computed these tensors, given by name, from such inputs, whatever computed those."""
    before = {tensor.grad_fn for _, tensor in inputs if tensor.grad_fn is not None}
    waiting = {tensor.grad_fn for _, tensor in outputs if tensor.grad_fn is not None} - before
    seen = set(waiting)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - seen - before
        seen |= following
        waiting |= following
    slices: dict[Any, list[int]] = defaultdict(list)
    for node in seen:
        if type(node).__name__ in _SLICES:
            slices[node.next_functions[0]].append(math.prod(node._saved_self_sym_sizes))  # type: ignore[attr-defined]
    many = [sizes for sizes in slices.values() if len(sizes) >= _MANY_SLICES]
    return Operators(
        number=sum(type(node).__name__ != "AccumulateGrad" for node in seen),
        num_slices=max(map(len, many), default=0),
        sliced_elements=sum(map(sum, many)),
    )


def has_attention(model: nn.Module) -> bool:
    """Tells whether any module is named attention, or calls torch's `scaled_dot_product_attention`."""
    return any("attention" in type(module).__name__.lower() for module in model.modules()) or calls_attention(model)


def calls_attention(model: nn.Module) -> bool:
    """Tells whether the source of any module's class, but for torch's own, has torch's `scaled_dot_product_attention`."""
    kinds = {type(module) for module in model.modules()}
    own = (kind for kind in kinds if not kind.__module__.startswith("torch.nn."))  # of torch's, only attention has it
    return any("scaled_dot_product_attention" in _source_of(kind) for kind in own)  # finding a source takes 0.1 s


def facts_of_blocks(blocks: Mapping[nn.Module, Sequence[str]]) -> dict[str, Any]:
    """Returns the fields of `WorkloadFacts` that follow from models and the names of their repeated blocks."""
    shares = [regional_share(model, names) for model, names in blocks.items() if names]
    facts: dict[str, Any] = {"regional_share": round(max(shares), 3)} if shares else {}
    return {
        **facts,
        "has_blocks": bool(shares),
        "kinds_of_blocks": max((kinds_of_blocks(model, names) for model, names in blocks.items()), default=0),
        "num_weights": sum(len(list(model.parameters())) for model in blocks),
    }


def model_facts(workload: Workload) -> dict[str, Any]:
    """Returns the fields of `WorkloadFacts` that follow from the model; few if it cannot be built.

    It is built without values, or with them where that fails, or where blocks are found only by running it.
    """
    facts: dict[str, Any] = {"autocasts": workload.autocast_dtype(torch.device("cuda")) is not None}
    for device in ("meta", "cpu"):
        try:
            other = type(workload)(workload.size, workload.seed) if device == "meta" else workload  # makes batches with values
            with without_values() if device == "meta" else torch.device(device):
                model = other.build_model()
            blocks = other.regions(model)
        except Exception:  # a user's functions may raise anything, and no plan requires these facts
            continue
        if blocks or device == "cpu":
            return {**facts, **facts_of_blocks({model: blocks}), "has_attention": has_attention(model)}
    return facts


def batch_lengths(workload: Workload) -> tuple[int, ...]:
    """Returns the length of each batch in a workload's pool, in tokens; empty if its batches cannot be made here."""
    policy = make_policy(workload.max_length, multiple=1, buckets=None, min_length=workload.min_length)
    try:
        return tuple(batch.length for batch in workload.pool(policy, rank=0, device=torch.device("cpu")))
    except Exception:  # a user's functions may raise anything, and no plan requires this fact
        return ()


def _source_of(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in a notebook, or generated
        return ""


def _blocks(module: nn.Module, kind: type[nn.Module], prefix: str) -> Iterator[str]:
    members = _members(module, kind)
    own = [f"{prefix}{name}" for name in members]
    inside = (found for name, child in module.named_children() for found in _blocks(child, kind, f"{prefix}{name}."))
    yield from own if own and _are_equal(members.values()) else list(inside) or own


def _members(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    """Returns the blocks that a container holds by name: modules of one class, each with layers inside.

    A Sequential may hold other modules around them, such as an embedding and a head. A ModuleDict may hold the heads of tasks, so
    its members count only if they are equal.
    """
    if not isinstance(module, kind):
        return {}
    members = dict(module.named_children())
    if kind is nn.Sequential:
        members = _most_common(members)
    equal = kind is not nn.ModuleDict or _are_equal(members.values())
    return members if len(members) > 1 and equal and _are_blocks(members.values()) else {}


def _most_common(members: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns the members with layers inside that are of the most common class."""
    deep = {name: member for name, member in members.items() if any(member.children())}
    kind = next((kind for kind, _ in Counter(map(type, deep.values())).most_common(1)), None)
    blocks = {name: member for name, member in deep.items() if type(member) is kind}
    others = [member for name, member in deep.items() if name not in blocks]
    return {} if 2 * _num_weights(others) > _num_weights(blocks.values()) else blocks


def _are_blocks(modules: Iterable[nn.Module]) -> bool:
    """Tells whether the modules are all of one class with submodules: a single layer is not worth compiling separately."""
    (kind, *others) = {type(module) for module in modules}
    return not others and not issubclass(kind, nn.ModuleList | nn.ModuleDict) and all(any(m.children()) for m in modules)


def _num_weights(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _are_equal(modules: Iterable[nn.Module]) -> bool:
    return len({tuple(tuple(parameter.shape) for parameter in module.parameters()) for module in modules}) == 1


def find_dynamic_arguments(model: nn.Module, modules: Sequence[str], batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Dims]:
    """Finds the dimensions of each module's tensor arguments that differ between runs of the model.

    The runs use fake tensors, which have shapes but no data, if the model allows it.

    Args:
        batches: Two or more that differ in length, and in anything that may omit an argument, such as a mask of ones.
    """
    runs = [_argument_shapes(model, modules, batch) for batch in batches]
    found: dict[str, Dims] = {}
    for name in modules:
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for run in runs:
            for key, shape in run.get(name, {}).items():
                shapes.setdefault(key, []).append(shape)
        dims = {
            key: tuple(i for i, sizes in enumerate(zip(*seen, strict=False)) if len(set(sizes)) > 1)
            for key, seen in shapes.items()
        }
        found[name] = {key: changing for key, changing in dims.items() if changing}
    return found


def _argument_shapes(
    model: nn.Module, modules: Sequence[str], batch: Mapping[str, Tensor]
) -> dict[str, dict[str, tuple[int, ...]]]:
    seen: dict[str, dict[str, tuple[int, ...]]] = {}

    def watcher(name: str, signature: inspect.Signature) -> Callable[..., None]:
        def watch(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            seen[name] = {key: tuple(tensor.shape) for key, tensor in tensors_in(given)}

        return watch

    with ExitStack() as undo, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name in modules:
            module = model.get_submodule(name)
            watch = watcher(name, inspect.signature(module.forward))
            undo.callback(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        _run_on_shapes(model, batch)
    return seen


def find_reused_modules(model: nn.Module, inside: str, batch: Mapping[str, Tensor]) -> list[str]:
    """Finds the outermost modules that one run repeats: recurrent cells, and modules of an own class or with modules inside."""
    called: dict[str, int] = {}
    with ExitStack() as undo, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, module in model.get_submodule(inside).named_modules(prefix=inside):
            is_block = any(module.children()) or _is_own_layer(module) or isinstance(module, nn.RNNCellBase)
            if name == inside or (is_block and not isinstance(module, nn.ModuleList | nn.ModuleDict)):

                def count(module: nn.Module, args: Any, name: str = name) -> None:
                    called[name] = called.get(name, 0) + 1

                undo.callback(module.register_forward_pre_hook(count).remove)
        _run_on_shapes(model, batch, before_again=called.clear)
    of_model = called.pop(inside, 1)  # more than one where a loss calls it for each of two views, or batches are split
    fewest = {name: 2 if any(model.get_submodule(name).children()) else _FEWEST_LAYERS for name in called}
    often = [name for name, calls in called.items() if calls >= fewest[name] * of_model]
    return [name for name in often if not any(name.startswith(f"{other}.") for other in often)]


class FirstForward(NamedTuple):
    """What a model's first forward changes."""

    installs_hooks: bool = False
    """Whether it installs hooks, or replaces the forward of a module."""
    configuration: Mapping[tuple[str, int], Any] = MappingProxyType({})
    """Values that it sets in the model's configurations, by name and number of the configuration."""

    def configure(self, model: nn.Module) -> None:
        """Sets these values in another copy of the model."""
        configs = _configs(model)
        for (name, number), value in self.configuration.items():
            setattr(configs[number], name, value)

    def remarks(self) -> list[str]:
        """Says what is done in advance because the first forward would do it."""
        hooks = ["runs the model once before anything is compiled: its first forward installs hooks"] * self.installs_hooks
        named = " and ".join(f"config.{name}" for name, _ in self.configuration)
        return [*hooks, f"sets {named} before anything is compiled, as the model's first forward would"] if named else hooks


def run_first_forward(model: nn.Module, batch: Mapping[str, Tensor], *, on_shapes: bool) -> FirstForward:
    """Runs the model once, without dropout, and returns what that changes.

    Args:
        model: Takes a batch's tensors by name. Its gradients and its mode are restored.
        on_shapes: Whether to run it on fake tensors, some of which the model may keep.
    """
    attached, configured = _attached(model), _configuration(model)
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _run_on_shapes(model, batch) if on_shapes else model(**batch)
    except Exception:  # the model does not run; its first step will say why
        return FirstForward()
    finally:
        for module, mode in training.items():
            module.training = mode
        model.zero_grad(set_to_none=True)
    changed = {at: value for at, value in _configuration(model).items() if repr(configured.get(at, value)) != repr(value)}
    return FirstForward(any(attached.get(name, now) != now for name, now in _attached(model).items()), changed)


def initialize_lazy_weights(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Runs a model once, without dropout, if it has weights whose sizes its first forward finds out, as `nn.LazyLinear` does."""
    lazy = [weights for weights in (*model.parameters(), *model.buffers()) if is_lazy(weights)]
    if lazy:
        with torch.random.fork_rng(devices=[]):
            model.eval()(**{name: tensor.to(lazy[0].device) for name, tensor in batch.items()})
        model.zero_grad(set_to_none=True)


def _configs(model: nn.Module) -> list[Any]:
    held = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in held if hasattr(config, "__dict__")}.values())


def _attached(model: nn.Module) -> dict[str, tuple[int, bool]]:
    return {
        name: (len(module._forward_hooks) + len(module._forward_pre_hooks), "forward" in vars(module))
        for name, module in model.named_modules()
    }


def _configuration(model: nn.Module) -> dict[tuple[str, int], bool | int | float | str | None]:
    return {
        (name, number): value
        for number, config in enumerate(_configs(model))
        for name, value in vars(config).items()
        if isinstance(value, bool | int | float | str | None)
    }


def _run_on_shapes(model: nn.Module, batch: Mapping[str, Tensor], before_again: Callable[[], None] = lambda: None) -> None:
    """Runs the model on fake tensors, which have shapes but no data, or on the batch itself if it does not allow that."""
    try:
        # The fake mode is not entered: tensors that the model creates, such as positions, stay real, since the model may keep
        # them.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with _what_is_compiled_runs_eagerly():
            model(**{name: fake.from_tensor(tensor) for name, tensor in batch.items()})
    except Exception:  # data-dependent code, or an unsupported library: the real run then reports any real error
        before_again()
        model(**batch)


def _what_is_compiled_runs_eagerly() -> AbstractContextManager[Any]:
    """A block in which parts that the model compiles itself run eagerly: compiled kernels would look for data in fake tensors."""
    is_loaded = "torch._dynamo" in sys.modules  # as by any `torch.compile`; importing it takes seconds
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def tensors_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields tensors by name, also those in lists, tuples and mappings, as `value_at` in source_runtime.py names them."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, list | tuple):
            yield from tensors_in({str(index): one for index, one in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            named = {key: one for key, one in value.items() if isinstance(key, str) and "." not in key}
            yield from tensors_in(named, f"{prefix}{name}.")


def shapes_of(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of each tensor of a call; of a nested tensor, the number of its elements."""
    every = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    named = {name: _with_attributes(value) for name, value in every.items()}
    return tuple((tensor.numel(),) if tensor.is_nested else tuple(tensor.shape) for _, tensor in tensors_in(named))


_NOT_BATCHES = ("edge_index", "edge_label_index", "adj_t", "offsets", "time_idx")
"""Endings of arguments that hold no texts: ends of a graph's edges, where bags of ids begin, times."""

_OF_TOKENS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _is_list_of_images(value: Any) -> TypeGuard[Sequence[Tensor]]:
    """Tells whether this is a list of images of one or three channels, each of its own size."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(one, Tensor) and one.dim() == 3 and one.size(0) in (1, 3) and one.is_floating_point() for one in value)
        and len({one.size(0) for one in value}) == 1
    )


def _with_attributes(value: Any) -> Any:
    """Returns a batch that is an object of a class of its own, such as a dataclass, as a mapping of the tensors it holds."""
    if isinstance(value, Tensor | Mapping | list | tuple | nn.Module | type) or value is None:
        return value
    names = [
        *getattr(value, "__dict__", ()),
        *(one.name for one in (fields(value) if is_dataclass(value) else ())),
    ]  # of slots, too
    held = {name: one for name in dict.fromkeys(names) if isinstance(one := getattr(value, name, None), Tensor)}
    return held or value


def _largest_first(value: Any) -> Any:
    """Returns a mapping with its largest tensors first: of an image detector's batch, the images, not their boxes.

    Texts decide where there are some, since a text may come with several images.
    """
    if not isinstance(value, Mapping):
        return value
    if "input_ids" in value:
        return {"input_ids": value["input_ids"], **value}
    return dict(sorted(value.items(), key=lambda item: -item[1].numel() if isinstance(item[1], Tensor) else 0))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


@lru_cache(maxsize=64)
def _names_of_arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """Returns the names of the positional arguments of a class's forward; empty if they cannot be told."""
    try:
        _, *every = inspect.signature(kind.forward).parameters.values()
    except (AttributeError, TypeError, ValueError):  # the class of a torch.jit.ScriptModule has none
        return ()
    return tuple(one.name for one in every if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


def size_of(args: Any, kwargs: Any, *, is_time_first: bool = False, module: nn.Module | None = None) -> tuple[int, int]:
    """Returns samples and tokens of a call: the first dimension of a tensor, and the size of a batch of texts.

    A batch of texts has integers in two dimensions, the samples' first. Ids of other kinds, such as a recommender's by feature
    and a graph's edges, count as no tokens; then there are as many as samples. A list of images is a batch, as of torchvision's
    detection models, and of a mapping, or an object with tensors as attributes, the largest tensor decides. Where there are no
    tensors, arrays of numpy count.

    Args:
        is_time_first: Whether samples are the second dimension, as by default of torch's recurrent layers and transformers.
        module: The module that is called, whose arguments have names.
    """
    names = () if module is None else _names_of_arguments(cast(Any, type(module)))
    args, kwargs = [*map(_with_attributes, args)], {name: _with_attributes(value) for name, value in kwargs.items()}
    named = {names[index] if index < len(names) else str(index): value for index, value in enumerate(args)} | kwargs
    first = next(iter(named.values()), None)
    if isinstance(first, PackedSequence):
        return int(first.batch_sizes[0]), len(first.data)
    if _is_list_of_images(first):  # not the states of a recurrent layer, which come later
        return len(first), len(first)
    if next(tensors_in(named), None) is None:  # the forward makes tensors of arrays itself
        named = {name: torch.from_numpy(value) for name, value in named.items() if _is_array(value)}
    samples = tokens = 0
    for name, tensor in tensors_in({name: _largest_first(value) for name, value in named.items()}):
        if name.endswith(_NOT_BATCHES):
            continue
        if tensor.dim() > is_time_first:
            samples = samples or tensor.size(int(is_time_first))
        if not tokens and tensor.dim() == 2 and tensor.dtype in _OF_TOKENS and tensor.size(int(is_time_first)) == samples:
            tokens = tensor.numel()
    return samples or 1, tokens or samples or 1


def are_time_first(sizes: Sequence[tuple[int, int]]) -> bool:
    """Tells from samples and tokens of calls, by `size_of`, whether what looks like samples is the length of texts.

    It is if it differs in most calls, and the other dimension never does.
    """
    firsts, seconds = {samples for samples, _ in sizes}, {tokens / samples for samples, tokens in sizes}
    return len(firsts) > max(2, len(sizes) / 2) and len(seconds) == 1 and max(seconds) > 1


def is_safe_to_copy(model: nn.Module) -> bool:
    """Tells whether a copy would be independent of the model: no hooks, and no replaced forward."""
    of_modules = any(
        "forward" in vars(module)
        or any(found for name, found in vars(module).items() if name.endswith("_hooks") and isinstance(found, Mapping))
        for module in model.modules()
    )
    of_weights = any(weights._backward_hooks or weights._post_accumulate_grad_hooks for weights in model.parameters())
    return not of_modules and not of_weights


def copied(model: nn.Module) -> nn.Module | None:
    """Copies the model; None if it cannot be copied or the copy would share state, such as weights held by a closure."""
    try:
        return deepcopy(model) if is_safe_to_copy(model) else None
    except Exception:  # whatever prevents a copy, such as a lock, may raise anything
        return None
