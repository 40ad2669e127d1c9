"""Discovers, during a script's first steps, what it trains: modules, optimizers, where a step ends, what changes between batches.

Background: during those steps nothing is compiled (`torch.compiler.set_stance("force_eager")`), so the watching code can never be
part of a graph. It is removed before anything is compiled. A target is an outermost module that is called with gradients enabled
and whose parameters an optimizer holds: an evaluation before the first step has none, a GAN has two. A step ends with an
optimizer's step; with several optimizers, with the step of the one that completes the set.
"""

import gc
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_sweep.contract.inspect_model import Operators, operators_of, repeated_blocks, size_of, tensors_in
from compile_sweep.contract.installed_torch import private
from compile_sweep.harness.numerics.trajectory import _generator_states
from compile_sweep.schema.part_settings import PartSettings, settings_of_part
from compile_sweep.script.apply.optimizer_support import has_sparse_gradients
from compile_sweep.script.job import ScriptError
from compile_sweep.script.monkeypatch import replaced

STEPS = 3  # minimum number of watched steps: differences between batches show from the second one on

MAX_STEPS = 12
"""Number of steps of the busiest optimizer after which optimizers without a step are no longer waited for."""

_GENERATOR = "_checkpoint_without_reentrant_generator"  # torch 2.15 calls it by a new name, and keeps this one for others
WITHOUT_REENTRANT = f"{_GENERATOR}_impl" if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl") else _GENERATOR
"""What `torch.utils.checkpoint` runs around a function whose activations it does not keep, with use_reentrant=False."""

MAX_UNSTEPPED = 20  # number of backward passes, without an optimizer of torch's, after which each counts as a step

LOSS_FUNCTIONS = tuple(
    name for name in dir(nn.functional) if name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div")) and name[0] != "_"
)  # in `torch.nn.functional`

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensor arguments by name, as `value_at` of the exported source finds them."""


@dataclass(slots=True, eq=False)
class Target:
    """A module to compile."""

    called: nn.Module
    """The module that the script calls: `DistributedDataParallel` or the script's own compiled module, if there is one."""
    module: nn.Module
    """The module itself."""
    name: str = ""
    """Its name in the script, or its class's name."""
    calls: int = 0
    """Number of calls by the script itself, rather than by another target."""
    is_called_inside: bool = False
    """Whether another target has called it, too."""
    draws: bool = False
    """Whether its forward draws random numbers, as dropout does."""
    shapes: list[Shapes] = field(default_factory=list)
    """Shapes of its arguments, per call."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Samples and tokens, per call."""
    autocast: torch.dtype | None = None
    """Autocast dtype when it is called."""
    differentiated_twice: bool = False
    """Whether its gradients are differentiated again (`create_graph=True`), as no compiled code's can be."""
    is_left_out: bool = False
    """Whether the settings leave it eager."""
    outlasts: bool = False
    """Whether what it returned before a backward pass is read after it, as by a discriminator that trains after its generator."""
    uncaptured: dict[str, int] = field(default_factory=dict)
    """Number of its calls that were to be captured as CUDA graphs and were not, by the reason."""
    captured: set[str] = field(default_factory=set)
    """Names of its parts that were captured; that of the whole is empty."""
    operators: Operators = field(default_factory=Operators)
    """The operators in its forward that have gradients."""

    @property
    def stays_eager(self) -> bool:
        """Whether no setting compiles it."""
        return self.differentiated_twice or self.is_left_out

    @property
    def device(self) -> torch.device:
        """Device of its parameters."""
        return next(self.module.parameters()).device

    @property
    def blocks(self) -> list[str]:
        """Dotted names of its repeated blocks."""
        return repeated_blocks(self.module)

    def changing(self) -> dict[str, tuple[int, ...]]:
        """Dimensions of its arguments that differed between calls."""
        return changing(self.shapes)


def changing(calls: list[Shapes]) -> dict[str, tuple[int, ...]]:
    """Returns the dimensions that differ between calls, by argument."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in (calls[0] if calls else {}).items():
        others = [other for call in calls if len(other := call.get(name, ())) == len(shape)]
        if dims := tuple(dim for dim, size in enumerate(shape) if any(other[dim] != size for other in others)):
            found[name] = dims
    return found


@dataclass(slots=True, kw_only=True)
class Discovery:
    """What was discovered so far."""

    targets: list[Target] = field(default_factory=list)
    frozen: list[Target] = field(default_factory=list)
    """Networks that are called in every step and not trained, such as a teacher or a frozen encoder."""
    optimizers: list[Optimizer] = field(default_factory=list)
    """Optimizers that stepped, in the order of their first step."""
    steps: dict[int, int] = field(default_factory=dict)
    """Number of steps of each optimizer, by index."""
    _stepped_after: dict[int, int] = field(default_factory=dict)
    """Number of backward passes before each optimizer's last step, by index."""
    constructed: list[weakref.ref[Optimizer]] = field(default_factory=list)
    block_shapes: dict[nn.Module, list[Shapes]] = field(default_factory=dict)
    """Argument shapes of the targets' repeated blocks."""
    marked: bool = False
    """Whether the script marks its own steps, with `compile_sweep.steps`."""
    num_marked: int = 0
    """Number of steps that it has marked."""
    steps_by_backward: bool = False
    """Whether each backward pass counts as a step, because no optimizer of torch's steps: a library's own, or a loop by hand."""
    num_backward: int = 0
    """Number of backward passes."""
    loss_modules: list[nn.Module] = field(default_factory=list)
    """Modules without trained parameters that gradients pass through, such as `nn.CrossEntropyLoss()`."""
    loss_functions: list[str] = field(default_factory=list)
    """Names of functions of `torch.nn.functional` that gradients pass through likewise."""
    num_functional: int = 0
    """Number of gradients taken by torch.func."""
    num_recomputed: int = 0
    """Number of calls whose activations are recomputed in the backward pass."""
    num_attended: int = 0
    """Number of calls of `scaled_dot_product_attention`."""
    makes_cache: bool = False
    """Whether a model returns a cache of keys and values in training, as those of transformers do unless told not to."""
    num_taken: int = 0
    """Number of gradients taken by `torch.autograd.grad`."""
    raised_in: tuple[BaseException, Target] | None = None
    """What last left a module's call, and which."""
    losses_that_vary: set[nn.Module | str] = field(default_factory=set)
    """Those of `loss_modules` and `loss_functions` that are given tensors of other shapes after the first step."""
    num_skipped: int = 0
    """Number of steps that a gradient scaler skipped, because of gradients that are not finite."""
    _loss_shapes: dict[nn.Module | str, set[tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    called: dict[nn.Module, Target] = field(default_factory=dict)
    _untrained: dict[nn.Module, Target] = field(default_factory=dict)
    _blocks: dict[nn.Module, str] = field(default_factory=dict)
    _depth: int = 0
    _returned: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Target, int, float]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """The memory of what targets returned, with the numbers of backward passes and of steps until then."""

    @property
    def compiled(self) -> list[Target]:
        """The targets that settings compile."""
        return [target for target in self.targets if not target.stays_eager]

    @property
    def trained_and_frozen(self) -> list[Target]:
        """The targets, then the networks that are not trained."""
        return [*self.targets, *self.frozen]

    @property
    def all_compiled(self) -> list[Target]:
        """Those of both that settings compile."""
        return [target for target in self.trained_and_frozen if not target.stays_eager]

    @property
    def anchor(self) -> Optimizer | None:
        """The optimizer whose step ends a step; None if the script marks steps itself."""
        return None if self.marked or not self.optimizers else self.optimizers[-1]

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return self.num_marked if self.marked else self.steps.get(len(self.optimizers) - 1, 0)

    @property
    def micro_steps(self) -> int:
        """Number of calls per step of the least-called module: more than one with gradient accumulation."""
        steps = self.num_backward if self.steps_by_backward else self.num_steps
        if not self.targets or not steps:
            return 1
        return max(1, round(min(target.calls for target in self.targets) / (steps + self.num_skipped)))

    @property
    def primary(self) -> Target:
        """The target whose batches are counted: the least-called one, of several the largest."""
        return min(self.targets, key=lambda target: (target.calls, -sum(p.numel() for p in target.module.parameters())))

    @property
    def steps_together(self) -> bool:
        """Whether all optimizers stepped after the same backward pass, as where one has the matrices and one the rest."""
        return len(set(self._stepped_after.values())) == 1

    def averages(self) -> Iterator[nn.Module]:
        """Yields copies of the targets that steps do not call, such as an average of the weights, which is evaluated."""
        called = [target for target in self._untrained.values() if target.calls >= self.num_steps - 1]
        known = {part for target in (*self.targets, *called) for part in target.module.modules()}
        yield from {one for target in self.targets for one in copies_of(target.module)} - known

    def is_over(self) -> bool:
        """Whether discovery is complete: each optimizer has stepped, often enough."""
        if self.marked:
            return self.num_marked >= STEPS
        if not self.optimizers or self._depth:
            return False
        alive = {id(optimizer) for ref in self.constructed if (optimizer := ref()) is not None}
        waiting = alive - {id(optimizer) for optimizer in self.optimizers}
        return (not waiting and self.num_steps >= STEPS) or max(self.steps.values()) >= MAX_STEPS

    def stepped(self, optimizer: Optimizer) -> None:
        """Records a step of an optimizer."""
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        index = next(index for index, known in enumerate(self.optimizers) if known is optimizer)
        self.steps[index] = self.steps.get(index, 0) + 1
        self._stepped_after[index] = self.num_backward
        has_sparse_gradients(optimizer)  # now: most scripts have none left when their next step begins
        self.settle()

    def passed_backward(self) -> bool:
        """Records a backward pass; returns whether it counts as a step."""
        self.num_backward += 1
        has_steps = self.marked or self.optimizers or self.constructed
        self.steps_by_backward |= not has_steps and self.num_backward > MAX_UNSTEPPED
        if self.steps_by_backward:
            self.marked = True
            self.num_marked += 1
            self.settle()
        return self.steps_by_backward

    def note_error(self, error: BaseException, target: Target) -> None:
        """Notes that an error left a call of a module; the innermost of several counts."""
        if self.raised_in is None or self.raised_in[0] is not error:
            self.raised_in = error, target

    def settle(self) -> None:
        """Decides which of the modules called so far are targets."""
        held = {id(weights) for optimizer in self._holders() for group in optimizer.param_groups for weights in group["params"]}
        self.targets = _without_parts(
            [
                target
                for target in _inside_wrappers(self.called.values())
                if any(id(weights) in held if held else weights.requires_grad for weights in target.module.parameters())
            ]
        )
        self.frozen = list(self._frozen(held))
        others = {*self.called, *(target.module for target in self.frozen)}
        self.loss_modules = [module for module in self.loss_modules if module not in others]
        for target in self.trained_and_frozen:
            self._blocks.update({target.module.get_submodule(name): name for name in target.blocks})

    def _frozen(self, held: set[int]) -> Iterator[Target]:
        parts = {part for target in self.targets for part in target.module.modules()}
        for target in _without_parts(list(self._untrained.values())):
            weights = list(target.module.parameters())
            is_trained = target.module in parts or any(id(one) in held if held else one.requires_grad for one in weights)
            if not is_trained and not target.draws and 0 < self.num_steps - 1 <= target.calls:
                yield target

    def _holders(self) -> Iterator[Optimizer]:
        yield from self.optimizers
        yield from (optimizer for ref in self.constructed if (optimizer := ref()) is not None)

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module's call and records facts about it."""
        if not is_of_the_loop() or _passes_on(module):
            return run(module, *args, **kwargs)
        if self._depth:
            if (inner := self.called.get(module)) is not None:
                inner.is_called_inside = True
            if module in self._blocks:
                self.block_shapes.setdefault(module, []).append(_shapes(module, args, kwargs))
            outputs = run(module, *args, **kwargs)
            self.makes_cache |= _has_cache(outputs)
            return outputs
        weights = list(module.parameters())
        trains = torch.is_grad_enabled() and any(one.requires_grad for one in weights)
        trains &= not any(map(nn.parameter.is_lazy, weights))  # its first call makes its weights, at random
        self._note_what_outlasts(args, kwargs, begins=module if trains else None)
        target = self._noted(module, args, kwargs) if trains else None
        idle = self._noted_untrained(module, args, kwargs) if not trains and self.num_steps else None
        watched = target or idle
        before = _generator_states(watched.device) if watched is not None and not watched.draws and watched.calls <= 2 else None
        self._depth += 1
        try:
            outputs = run(module, *args, **kwargs)
        finally:
            self._depth -= 1
            if watched is not None and before is not None:
                watched.draws = before != _generator_states(watched.device)
        if target is not None:
            self.makes_cache |= _has_cache(outputs)
            if not target.operators.number:
                target.operators = operators_of(tensors_in({"": outputs}), tensors_in({"": args, **kwargs}))
            _note_second_derivatives(target, outputs)
            for _, tensor in tensors_in({"": outputs}):
                steps = math.inf if tensor.grad_fn is None else self.num_steps  # a batch that is passed on stays anyway
                self._returned.update(dict.fromkeys(_memory_of({"": tensor}), (target, self.num_backward, steps)))
        elif idle is None and not trains and _is_of_loss(args, kwargs, outputs):
            self._note_loss(module, self.loss_modules, args, kwargs)
        return outputs

    def _note_what_outlasts(self, args: Any, kwargs: Any, *, begins: nn.Module | None) -> None:
        """Notes what may be read after a backward pass.

        It is given to a module; or it is still held when another one trains in the same step, as what two generators made
        is when the first critic trains; or two steps later, as in a pool of earlier pictures.
        """
        given = set(_memory_of({"": args, **kwargs}))
        for memory, (target, num_backward, num_steps) in list(self._returned.items()):
            in_its_step = num_steps == self.num_steps and begins not in (None, target.called)
            after_backward = num_backward < self.num_backward and (memory in given or in_its_step)
            target.outlasts |= after_backward or num_steps <= self.num_steps - 2

    def call_loss(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a loss function and records its name, unless a module calls it."""
        outputs = run(*args, **kwargs)
        if not self._depth and is_of_the_loop() and _is_of_loss(args, kwargs, outputs):
            self._note_loss(name, self.loss_functions, args, kwargs)
        return outputs

    def _note_loss(self, loss: nn.Module | str, known: list[Any], args: Any, kwargs: Any) -> None:
        shapes = tuple(tuple(tensor.shape) for _, tensor in tensors_in({"": args, **kwargs}))
        seen = self._loss_shapes.setdefault(loss, set())
        if self.num_steps and shapes not in seen:
            self.losses_that_vary.add(loss)
        seen.add(shapes)
        if loss not in known:
            known.append(loss)

    def _noted_untrained(self, module: nn.Module, args: Any, kwargs: Any) -> Target | None:
        """Notes a call of a network that may not be trained; of a single layer there is nothing to gain."""
        is_layer = next(module.children(), None) is None
        if is_layer or next(module.parameters(), None) is None or isinstance(module, torch.jit.ScriptModule):
            return None
        return self._noted(module, args, kwargs, among=self._untrained)

    def _noted(self, module: nn.Module, args: Any, kwargs: Any, among: dict[nn.Module, Target] | None = None) -> Target:
        known = self.called if among is None else among
        target = known.get(module)
        if target is None:
            target = known[module] = Target(called=module, module=unwrapped(module))
        target.calls += 1
        if len(target.shapes) < 64:
            target.shapes.append(_shapes(target.module, args, kwargs))
            target.sizes.append(size_of(args, kwargs, module=target.module))
        kind = target.device.type
        target.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return target


def _memory_of(values: Mapping[str, Any]) -> Iterator[torch.UntypedStorage]:
    for _, tensor in tensors_in(values):
        with suppress(RuntimeError):  # sparse tensors and those of torch.func have none
            yield tensor.untyped_storage()


def _has_cache(outputs: Any) -> bool:
    return torch.is_grad_enabled() and getattr(outputs, "past_key_values", None) is not None


def _inside_wrappers(targets: Iterable[Target]) -> Iterator[Target]:
    """Yields the targets, and in place of wrappers that the script makes anew for each step, as odeint does, what they wrap."""
    wrappers: dict[Any, list[Target]] = {}
    for target in targets:
        inside = _wrapped(target.module)
        wrappers.setdefault((type(target.module), inside[-1]) if inside else target, []).append(target)
    for alike in wrappers.values():
        if len(alike) < STEPS:
            yield from alike
            continue
        held = [_wrapped(one.module) for one in alike]
        inner = next(one for one in held[0] if all(one in others for others in held))  # the rest are made anew, too
        module = unwrapped(inner)
        known = inspect.signature(module.forward).parameters.keys()
        shapes = [shapes for one in alike for shapes in one.shapes if shapes.keys() <= known]
        calls, sizes = sum(one.calls for one in alike), [size for one in alike for size in one.sizes]
        flags: Any = {name: any(getattr(one, name) for one in alike) for name in ("draws", "differentiated_twice", "outlasts")}
        yield replace(alike[-1], called=inner, module=module, calls=calls, shapes=shapes, sizes=sizes, **flags)


def _wrapped(module: nn.Module) -> list[nn.Module]:
    """Returns the modules inside that hold all of a module's weights, each in the one before."""
    inner = next(module.children(), None)
    if inner is None or not {*module.parameters()} <= {*inner.parameters()}:
        return []
    return [inner, *_wrapped(inner)]


def _without_parts(targets: list[Target]) -> list[Target]:
    """Returns the targets, of a module and its parts only what is called more often: others may only have been tried once."""
    if len(targets) < 2:
        return targets
    modules = {id(target): set(target.module.modules()) for target in targets}
    weights = {id(target): {id(one) for one in target.module.parameters()} for target in targets}

    def is_part(part: Target, whole: Target) -> bool:
        # A layer of Keras holds the weights of its layers without being their parent.
        within = part.module in modules[id(whole)] or (part.is_called_inside and weights[id(part)] < weights[id(whole)])
        return within and part.module is not whole.module

    def is_left_out(target: Target) -> bool:
        around = (other for other in targets if is_part(target, other) and other.calls >= target.calls)
        inside = (other for other in targets if is_part(other, target) and other.calls > target.calls)
        return any(around) or any(inside)

    return [target for target in targets if not is_left_out(target)]


def copies_of(module: nn.Module) -> list[nn.Module]:
    """Returns other models with the same weights' shapes, such as an average of the weights."""
    shapes = {name: weight.shape for name, weight in module.named_parameters()}
    same_kind = [one for one in gc.get_objects() if type(one) is type(module) and one is not module]
    return [one for one in same_kind if {name: weight.shape for name, weight in one.named_parameters()} == shapes]


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside `torch.compile`'s, `DistributedDataParallel`, `DataParallel` or Lightning Fabric's."""
    while True:
        if isinstance(module, OptimizedModule):
            module = module._orig_mod
        elif isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif _passes_on(module):
            module = module._forward_module  # type: ignore[assignment]
        else:
            return module


def _passes_on(module: nn.Module) -> bool:
    """Tells whether a module is Lightning Fabric's, which converts arguments for another module and hooks its outputs."""
    return type(module).__name__ == "_FabricModule"


def _note_second_derivatives(target: Target, outputs: Any) -> None:
    """Notes whether gradients come back to a target's outputs while gradients are on, as they do with `create_graph=True`."""

    def note(gradient: Tensor) -> None:
        target.differentiated_twice |= torch.is_grad_enabled()

    for _, output in tensors_in({"": outputs}):
        if output.grad_fn is not None:
            output.register_hook(note)


class Watch:
    """Watches calls of modules, optimizers and backward passes, from `begin` until the first call after the discovery is over.

    Nothing is compiled meanwhile. Watching ends in a module's call, because torch does not allow removing a hook while hooks run.
    """

    def __init__(
        self, on_step: Callable[[], None], on_over: Callable[[], None], on_functional: Callable[[], None] = lambda: None
    ) -> None:
        self.found = Discovery()
        self._on_step, self._on_over, self._on_functional = on_step, on_over, on_functional
        self.next_call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        """The call that comes after the discovery, while `on_over` is called: a module and its arguments."""
        self._undo = ExitStack()
        self._is_over = False

    def begin(self) -> None:
        """Starts watching."""
        found = self.found

        def called_by(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self._is_over:  # other code may have kept this function
                    return call(module, *args, **kwargs)
                if found.is_over() and threading.current_thread() is threading.main_thread():
                    self.end()
                    self.next_call = (module, args, kwargs)
                    self._on_over()
                    self.next_call = None
                    return module(*args, **kwargs)
                return found.call(module, call, args, kwargs)

            return called

        def constructed_by(construct: Callable[..., None]) -> Callable[..., None]:
            def constructed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
                found.constructed.append(weakref.ref(optimizer))
                construct(optimizer, *args, **kwargs)

            return constructed

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not found.marked:
                found.stepped(optimizer)
                if optimizer is found.anchor:
                    self._on_step()

        def passing(backward: Callable[..., None]) -> Callable[..., None]:
            def passed(*args: Any, **kwargs: Any) -> None:
                backward(*args, **kwargs)
                if not self._is_over and is_of_the_loop() and found.passed_backward():
                    self._on_step()

            return passed

        def scaled(step: Callable[..., Any]) -> Callable[..., Any]:
            def attempted(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                before = found.num_steps
                returned = step(scaler, optimizer, *args, **kwargs)
                found.num_skipped += found.num_steps == before and found.anchor in (None, optimizer)
                return returned

            return attempted

        def noting(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            return lambda loss: lambda *args, **kwargs: found.call_loss(name, loss, args, kwargs)

        self._undo.enter_context(replaced(nn.Module, "__call__", called_by))
        self._undo.enter_context(replaced(torch.autograd, "backward", passing))
        self._undo.enter_context(replaced(torch.amp.GradScaler, "step", scaled))
        for name in LOSS_FUNCTIONS:
            self._undo.enter_context(replaced(nn.functional, name, noting(name)))

        def counted(counter: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            setattr(found, counter, getattr(found, counter) + 1)
            self._on_functional()
            return function(*args, **kwargs)

        checkpoint, transforms = torch.utils.checkpoint, private("torch._functorch", "eager_transforms")
        for owner, name, counter in (
            (torch.autograd, "grad", "num_taken"),
            (nn.functional, "scaled_dot_product_attention", "num_attended"),
            (checkpoint, WITHOUT_REENTRANT, "num_recomputed"),
            (checkpoint.CheckpointFunction, "apply", "num_recomputed"),
            (transforms, "grad_and_value_impl", "num_functional"),
            (transforms, "_vjp_with_argnums", "num_functional"),
        ):
            if hasattr(owner, name):
                self._undo.enter_context(replaced(owner, name, partial(partial, counted, counter)))
        self._undo.enter_context(replaced(Optimizer, "__init__", constructed_by))
        self._undo.callback(register_optimizer_step_post_hook(stepped).remove)
        self._undo.callback(torch.compiler.set_stance, "default")
        torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        """Stops watching, if it has not stopped."""
        self._is_over = True
        self._undo.close()


def leave_out(targets: list[Target], parts: Sequence[tuple[str, PartSettings]] | None) -> None:
    """Marks targets that settings leave eager; call it before anything is compiled.

    Raises:
        ScriptError: There is no target of a part's name, or none is left to compile.
    """
    known = {name for target in targets for name in (target.name, target.name.rpartition(".")[2])}
    if unknown := [name for name, _ in parts or () if name not in known]:
        others = ", ".join(target.name for target in targets)
        raise ScriptError(f"the script trains no module called {unknown[0]}; parts may name {others}")
    for target in targets:
        target.is_left_out = settings_of_part(parts, target.name).compile is False
    if all(target.is_left_out for target in targets):
        raise ScriptError("the settings leave all modules of the script eager; use scope=eager, or leave a compile=off out")


def is_of_the_loop() -> bool:
    """Tells whether this is the training loop: not another thread, nor a backward pass, where checkpointing repeats calls."""
    return torch._C._current_graph_task_id() == -1 and threading.current_thread() is threading.main_thread()


def _is_of_loss(args: Any, kwargs: Any, outputs: Any) -> bool:
    """Tells whether gradients pass through a call, unlike those of a metric that is given the loss."""
    given = any(tensor.requires_grad for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor))
    return torch.is_grad_enabled() and given and any(tensor.requires_grad for _, tensor in tensors_in({"": outputs}))


def _shapes(module: nn.Module, args: Any, kwargs: Any) -> Shapes:
    try:
        named: Mapping[str, Any] = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        named = {str(index): value for index, value in enumerate(args)} | kwargs
    return {name: tuple(value.shape) for name, value in tensors_in(named)}
