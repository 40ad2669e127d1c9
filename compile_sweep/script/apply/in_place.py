"""Applies compile settings to the modules and optimizers of a running script, in place.

A module keeps its class, its attributes and the keys of its `state_dict`. Its forward is compiled and called through
`_compiled_call_impl`, like `Module.compile` does, which neither pickles nor deep copies of the module (such as an average of the
weights) include. A class's forward gets a code object for each size of its weights: kinds of blocks share no limit of graphs.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from compile_sweep.contract.installed_torch import config_place, private, torch_version
from compile_sweep.harness.diagnostics.coverage import Expectation, forward_names, steps_of
from compile_sweep.harness.prepare import refuse_float8, refuse_memory_format
from compile_sweep.harness.source import fixes_sizes, process_config, sdpa_backends
from compile_sweep.harness.source_runtime import (
    checkpointed,
    graphed_step,
    is_of_torch,
    marked_forward,
    nested,
    use_float8,
    with_own_code,
)
from compile_sweep.schema.causes.places import is_package
from compile_sweep.schema.choices import COMPILED_OPTIMIZERS, ActivationCheckpointing
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Scope
from compile_sweep.script.apply.captured import capture
from compile_sweep.script.apply.graph_memory import copied_out, copy_gradients, wrap_call
from compile_sweep.script.apply.huggingface import autocast_experts, without_cache
from compile_sweep.script.apply.optimizer_support import SPARSE_GRADIENTS, has_fused, has_sparse_gradients
from compile_sweep.script.apply.padding import Padder, why_not_padded
from compile_sweep.script.discover import WITHOUT_REENTRANT, Discovery, Shapes, Target, changing, copies_of
from compile_sweep.script.job import ScriptError
from compile_sweep.script.monkeypatch import replaced

Call = Callable[..., Any]

_compile, _call = torch.compile, nn.Module.__call__  # torch's own functions, also while they are replaced


def compile_arguments(settings: CompileSettings, dynamic: Dynamic | None = None, *, changes: bool = False) -> dict[str, Any]:
    """Returns the keyword arguments of `torch.compile` for these settings, and for sizes that change if `changes` says so."""
    strategy = dynamic or settings.dynamic
    options: dict[str, Any] = dict(settings.options or ())
    if settings.shape_padding is not None:
        options["shape_padding"] = settings.shape_padding
    elif fixes_sizes(settings, torch_version(), changes=changes, dynamic=strategy):
        options["shape_padding"] = False
    found: dict[str, Any] = {}
    if settings.fullgraph:
        found["fullgraph"] = True
    if settings.backend is not None:
        found["backend"] = settings.backend
    if strategy in (Dynamic.STATIC, Dynamic.TRUE):
        found["dynamic"] = strategy is Dynamic.TRUE
    if settings.mode not in (None, Mode.DEFAULT):
        if not options:
            return {**found, "mode": str(settings.mode)}
        options = {**torch._inductor.list_mode_options(str(settings.mode)), **options}
    return {**found, "options": options} if options else found


UNTIL_EXIT = ExitStack()  # contexts that last as long as the process; Python would close unreferenced ones immediately


def process_wide(settings: CompileSettings) -> None:
    """Applies the settings' process-wide part: the limit of graphs, the precision of products, the attention kernel.

    It stays in force, because the process is the script's.
    """
    if settings.scope is not Scope.EAGER:
        from compile_sweep.harness.toolchain import compile_whole_files  # loads the compiler

        compile_whole_files()
    set_global_state(settings)
    if settings.activation_checkpointing is ActivationCheckpointing.OFF:
        _keep_activations()


def set_global_state(settings: CompileSettings) -> None:
    """Sets what a script may set itself as it begins, such as `torch.backends.cuda.enable_cudnn_sdp(True)`.

    Call it again before the first step to apply: what was set last counts.
    """
    for name, value in process_config(settings, torch_version()).items():
        setattr(*config_place(name), value)
    if settings.sdpa_kernel is not None:
        kernels = [getattr(SDPBackend, name) for name in sdpa_backends(settings.sdpa_kernel)]
        UNTIL_EXIT.enter_context(sdpa_kernel(kernels, set_priority=True))
    if settings.matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.matmul_precision)


_KERNEL_FLAGS = {
    "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "mem_efficient", "CUDNN_ATTENTION": "cudnn", "MATH": "math",
}  # fmt: skip
"""Members of `SDPBackend`, and what `torch.backends.cuda` calls them."""


def overridden(settings: CompileSettings) -> Iterator[str]:
    """Yields a sentence for each setting that something else is set for by now, as by the script within its loop."""
    changed = [(name, value) for name, value in settings.config.items() if getattr(*config_place(name)) != value]
    if settings.matmul_precision not in (None, torch.get_float32_matmul_precision()):
        changed.append(("matmul_precision", settings.matmul_precision))
    if settings.sdpa_kernel is not None:
        chosen = set(sdpa_backends(settings.sdpa_kernel))
        if {name for name, flag in _KERNEL_FLAGS.items() if getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()} != chosen:
            changed.append(("sdpa_kernel", settings.sdpa_kernel))
    for name, value in changed:
        yield f"{name}={value} has no effect, because the script sets something else in its loop; leave that out to try it"


def _keep_activations() -> None:
    """Has `torch.utils.checkpoint` keep activations, also in compiled code, which calls it while it is traced.

    Raises:
        ScriptError: The installed torch has another implementation.
    """
    if private("torch.utils.checkpoint", WITHOUT_REENTRANT) is None:
        raise ScriptError(
            f"activation_checkpointing=off does not work with torch {torch.__version__}; leave it out, and change the script"
        )

    def keeping(_: Call) -> Call:
        def kept(*_: Any, **__: Any) -> Iterator[None]:
            yield

        return kept

    def calling_once(_: Call) -> Call:
        return lambda function, preserves_state, *args: function(*args)

    UNTIL_EXIT.enter_context(replaced(torch.utils.checkpoint, WITHOUT_REENTRANT, keeping))
    UNTIL_EXIT.enter_context(replaced(torch.utils.checkpoint.CheckpointFunction, "apply", calling_once))
    # Before torch 2.12, compiled code recomputes what is tagged.
    if (tags := private("torch._higher_order_ops.wrap", "TagActivationCheckpoint")) and hasattr(tags, "tag_nodes"):
        UNTIL_EXIT.enter_context(replaced(tags, "tag_nodes", lambda _: lambda graph, is_sac: graph))
    # The same graph is compiled otherwise, so code in torch's caches that recomputes must not fit.
    UNTIL_EXIT.enter_context(cast(Any, torch.compiler.config).patch(cache_key_tag="keeps activations"))


def compiled_forward(
    settings: CompileSettings, module: nn.Module, dims: dict[str, tuple[int, ...]], forward: Call | None = None
) -> Call:
    """Returns the module's forward, or this one, compiled; `dims` are the dimensions of its arguments that change."""
    compiled: Call = _compile(with_own_code(forward or module.forward), **compile_arguments(settings, changes=bool(dims)))
    return marked_forward(module, compiled, dims) if settings.dynamic is Dynamic.MARK and dims else compiled


def apply_to_modules(
    settings: CompileSettings,
    targets: Sequence[Target],
    block_shapes: Mapping[nn.Module, list[Shapes]],
    compiled: Callable[[CompileSettings, nn.Module, dict[str, tuple[int, ...]]], Call] = compiled_forward,
    own_compile: "OwnCompile | None" = None,
) -> None:
    """Compiles the targets or their repeated blocks before their next call; raises ScriptError if nothing can be.

    An evaluation runs eagerly unless `own_compile` says that the script compiles the module: its lengths would use up the limit
    on graphs, and CUDA graphs, under which it always runs eagerly, would overwrite outputs that it collects.
    """
    if settings.stance is not None:
        torch.compiler.set_stance(cast(Any, settings.stance))  # a literal's type is its own in some versions of torch
    every = nn.ModuleList(target.module for target in targets)
    if settings.memory_format is not None:
        refuse_memory_format(settings, every)
        for target in targets:
            for module in (target.module, *copies_of(target.module)):  # updates between different strides are slow
                cast(Any, module).to(memory_format=getattr(torch, settings.memory_format))
    if settings.float8 is not None:
        refuse_float8(settings, every, targets[0].device)
        for target in targets:
            use_float8(target.module, str(settings.float8))
    if settings.autocast_experts:
        autocast_experts(every)
    if settings.changes_blocks:
        for block in _blocks(settings, targets):
            if settings.activation_checkpointing is ActivationCheckpointing.BLOCKS:
                block.forward = MethodType(checkpointed, block)
            if settings.scope is Scope.NESTED:
                block.forward = nested(block)
    if settings.scope is not Scope.EAGER:
        chosen = compilable(targets)
        _compile_modules(settings, chosen, block_shapes, compiled, own_compile)
    else:
        chosen = [target for target in targets if not target.is_left_out]
        if settings.claims_cudagraphs:
            capture(chosen)
    if settings.claims_cudagraphs:
        for target in chosen:
            if target.outlasts:
                wrap_call(target.module, partial(copied_out, applies=torch.is_grad_enabled))  # others are copied where made
    if settings.use_cache is False:
        for target in targets:
            wrap_call(target.module, partial(without_cache, target.module, applies=partial(trains, target.module)))
    if settings.pad_to_multiple_of is not None:
        reasons = [why_not_padded(target) for target in targets if target.shapes]
        if reasons and all(reasons):
            raise ScriptError(str(reasons[0]))
        for target in targets:
            pads = Padder(target.module, settings.pad_to_multiple_of)
            wrap_call(target.module, partial(pads.around, applies=partial(trains, target.module)))


def _compile_modules(
    settings: CompileSettings,
    targets: Sequence[Target],
    block_shapes: Mapping[nn.Module, list[Shapes]],
    compiled: Callable[[CompileSettings, nn.Module, dict[str, tuple[int, ...]]], Call],
    own_compile: "OwnCompile | None",
) -> None:
    for target, module, dims in _compiled_apart(settings, targets, block_shapes):
        evaluates = own_compile is not None and own_compile.includes(module) and not settings.claims_cudagraphs
        forward, applies = compiled(settings, module, dims), (lambda: True) if evaluates else partial(trains, target.module)
        if settings.claims_cudagraphs:
            forward = copied_out(forward, applies=lambda: not torch.is_grad_enabled())
        vars(module)["_compiled_call_impl"] = calling(module, forward, applies=applies)


def compilable(targets: Sequence[Target]) -> list[Target]:
    """Returns the targets to compile; raises ScriptError if none can be."""
    found = [target for target in targets if not target.stays_eager]
    if found or any(target.is_left_out for target in targets):
        return found
    names = ", ".join(target.name for target in targets)
    raise ScriptError(
        f"the script differentiates the gradients of {names} again (create_graph=True), which compiled code cannot do; use "
        "scope=eager, whose settings of optimizer, precision, attention kernel and CUDA graphs still apply"
    )


def apply_to_losses(settings: CompileSettings, found: Discovery, until: ExitStack) -> list[str]:
    """Compiles the loss functions that the script calls outside its modules; returns a sentence on each that stays eager."""
    if not settings.compile_loss:
        return []
    arguments = compile_arguments(settings, Dynamic.AUTO if settings.dynamic is Dynamic.MARK else None)
    records_each = settings.claims_cudagraphs and not any(target.changing() for target in found.targets)
    left_out = found.losses_that_vary if records_each else set()
    modules = [module for module in found.loss_modules if module not in left_out]
    names = [name for name in found.loss_functions if name not in left_out]
    for module in modules:
        vars(module)["_compiled_call_impl"] = calling(
            module, _compile(with_own_code(module.forward), **arguments), applies=torch.is_grad_enabled
        )
    for name in names:
        until.enter_context(replaced(nn.functional, name, partial(_compiled_loss, name, arguments)))
    remarks = [
        f"{loss if isinstance(loss, str) else type(loss).__name__} stays eager: a CUDA graph would be recorded for each of "
        "the shapes that it is given, which change from step to step"
        for loss in [*found.loss_modules, *found.loss_functions]
        if loss in left_out
    ]
    if modules or names or remarks:
        return remarks
    return [
        "no loss function was found outside the modules, so compile_loss compiles nothing more; it finds modules such as "
        "nn.CrossEntropyLoss and calls such as F.cross_entropy(...)"
    ]


def _compiled_loss(name: str, arguments: Mapping[str, Any], loss: Call) -> Call:
    """Returns a replacement for a function of `torch.nn.functional`, which looks itself up by name while torch traces it."""
    compiled = _compile(loss, **arguments)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return loss(*args, **kwargs)
        before = getattr(nn.functional, name)
        setattr(nn.functional, name, loss)
        try:
            return compiled(*args, **kwargs)
        finally:
            setattr(nn.functional, name, before)

    return call


def _compiled_apart(
    settings: CompileSettings, targets: Sequence[Target], block_shapes: Mapping[nn.Module, list[Shapes]]
) -> Iterator[tuple[Target, nn.Module, dict[str, tuple[int, ...]]]]:
    """Yields modules whose forward is compiled, each with its target and the dynamic dimensions of its arguments."""
    if settings.compiles_whole:
        yield from ((target, target.module, target.changing()) for target in targets)
        return
    blocks = _blocks(settings, targets)
    yield from ((target, block, changing(block_shapes.get(block, []))) for block, target in blocks.items())


def _blocks(settings: CompileSettings, targets: Sequence[Target]) -> dict[nn.Module, Target]:
    blocks = {target.module.get_submodule(name): target for target in targets for name in target.blocks}
    if not blocks:
        several = f"each of {', '.join(target.name for target in targets)}" if targets else "the script"
        raise ScriptError(settings.without_blocks(type(targets[0].module).__name__ if len(targets) == 1 else several))
    return blocks


def trains(module: nn.Module) -> bool:
    """Tells whether a target trains while it is called, or a part of it: an evaluation has no gradients, and has called `eval()`.

    A frozen encoder within the target has no gradients, and is in evaluation mode, while the target trains.
    """
    return torch.is_grad_enabled() or module.training


def calling(module: nn.Module, forward: Call, *, applies: Callable[[], bool]) -> Call:
    """Returns a replacement for a module's call: where it applies, the given forward instead of its own, with hooks around it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not applies():
            return module._call_impl(*args, **kwargs)
        if not _has_hooks(module):
            return forward(*args, **kwargs)
        before = vars(module).get("forward")
        vars(module)["forward"] = forward
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            del vars(module)["forward"]
            if before is not None:
                vars(module)["forward"] = before

    return call


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def apply_to_optimizers(settings: CompileSettings, optimizers: Sequence[Optimizer], *, together: bool | None = None) -> list[str]:
    """Gives the optimizers the requested implementation; returns a sentence for each that does not have it.

    Args:
        together: Whether all step one after the other, the last one last; by default, whether there is only one.
    """
    missed: list[str] = []
    together = len(optimizers) == 1 if together is None else together
    for optimizer in optimizers:
        if settings.as_written:
            continue
        if settings.memory_format is not None:
            _lay_out_state(optimizer)
        if settings.optimizer in COMPILED_OPTIMIZERS and has_sparse_gradients(optimizer):
            missed.append(f"{type(optimizer).__name__} {SPARSE_GRADIENTS}")
        elif settings.optimizer in COMPILED_OPTIMIZERS:
            _compile_step(optimizer, settings, together=together, ends_step=together and optimizer is optimizers[-1])
        elif settings.optimizer is OptimizerKind.FUSED:
            if not _make_fused(optimizer):
                missed.append(f"{type(optimizer).__name__} has no fused implementation here and runs as the script has it")
        else:
            _make_foreach(optimizer)
    return missed


def _make_foreach(optimizer: Optimizer) -> None:
    """Removes a fused implementation; otherwise keeps torch's choice, which on a GPU is foreach."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"], group["foreach"] = False, True
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


def _make_fused(optimizer: Optimizer) -> bool:
    if not has_fused(optimizer):
        return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    for one, state in optimizer.state.items():  # fused kernels read the step count on the device
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = step.to(device=one.device, dtype=torch.float32)
    return True


def _lay_out_state(optimizer: Optimizer) -> None:
    """Gives state and gradients the strides of their weights, which were reordered since: fused kernels refuse others."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        state = optimizer.state.get(weight, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                state[name] = _laid_out(value, weight)
        if weight.grad is not None:
            weight.grad = _laid_out(weight.grad, weight)


def _laid_out(tensor: Tensor, weight: Tensor) -> Tensor:
    return tensor if tensor.stride() == weight.stride() else torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)


def _compile_step(optimizer: Optimizer, settings: CompileSettings, *, together: bool, ends_step: bool) -> None:
    """Compiles the code below torch's hooks, which continue to run; schedulers find the step they expect.

    Each call of a CUDA graph outside of forward and backward may overwrite what graphs returned before, such as gradients and the
    loss. If optimizers step together, the last one's step ends a training step, as torch is told; otherwise gradients are copied.

    Sizes are those of the weights, but optimizers that are not torch's may count steps in Python, which torch's default follows;
    CUDA graphs cannot.
    """
    own = type(optimizer).step
    inner = MethodType(getattr(own, "__wrapped__", own), optimizer)
    counts = not (is_of_torch(optimizer) or settings.compiles_graphs)
    arguments = {**compile_arguments(settings, Dynamic.AUTO if counts else Dynamic.STATIC), "fullgraph": False}
    compiled: Call = _compile(inner, **arguments)
    marks = settings.compiles_graphs and ends_step
    if settings.compiles_graphs:
        compiled = graphed_step(optimizer, inner, compiled)
    compiled = with_tensor_rates(optimizer, compiled)
    if marks:
        torch.compiler.cudagraph_mark_step_begin()

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        if settings.compiles_graphs and not together:
            copy_gradients(parameter for group in self.param_groups for parameter in group["params"])
        returned = compiled(*args, **kwargs)
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        return returned

    hooked = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    bound = MethodType(hooked, optimizer)
    optimizer.step = bound  # type: ignore[method-assign]


def with_tensor_rates(optimizer: Optimizer, step: Call) -> Call:
    """Returns the step with numbers that a schedule changes as tensors while it runs: rates, betas, an own optimizer's momentum.

    A compiled step is specialized to Python numbers, so a schedule would have it compiled again: at each step for SGD. Torch
    refuses tensors where `foreach=True` is given without `capturable=True`, and as SGD's momentum. Others may refuse them, too,
    so they keep each number until it changes between two steps, but for the rate of a group that has a schedule.
    """
    of_torch = is_of_torch(optimizer)
    if of_torch and any(group.get("foreach") and not group.get("capturable") for group in optimizer.param_groups):
        return step
    names = ("lr", "betas") if of_torch else ()
    tensors: dict[tuple[int, str], tuple[Tensor, ...]] = {}
    left: dict[tuple[int, str], float | tuple[float, ...]] = {}

    def stepped(*args: Any, **kwargs: Any) -> Any:
        replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        groups = optimizer.param_groups
        numbers = [(index, name) for index, group in enumerate(groups) for name in names or group if _is_number(group, name)]
        for at in numbers:
            group, name = groups[at[0]], at[1]
            number = group[name]
            parts = number if isinstance(number, tuple) else (number,)
            scheduled = name == "lr" and (of_torch or "initial_lr" in group)
            if at not in tensors and (scheduled or left.get(at, number) != number):
                tensors[at] = tuple(torch.zeros((), device=group["params"][0].device) for _ in parts)
            if at in tensors:
                filled = tuple(one.fill_(value) for one, value in zip(tensors[at], parts, strict=True))
                group[name] = filled if parts is number else filled[0]
                replaced.append((group, name, group[name], number))
        try:
            return step(*args, **kwargs)
        finally:
            for group, name, tensor, number in replaced:
                if group[name] is tensor:  # otherwise the step itself has changed it
                    group[name] = number
            left.update({(index, name): groups[index][name] for index, name in numbers})

    return stepped


def _is_number(group: Mapping[str, Any], name: str) -> bool:
    """Tells whether a group holds a float under this name, a tuple of floats, or a whole number as its rate."""
    value = group.get(name)
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, float) or (name == "lr" and isinstance(one, int)) for one in parts)


def expectation(settings: CompileSettings, found: Discovery) -> Expectation:
    """Returns what must be compiled and captured for the settings to be believed; call it before they are applied."""
    targets: dict[str, Sequence[Callable[..., Any]]] = {}
    words: list[str] = []
    if settings.scope is not Scope.EAGER:
        words.append(f"scope={settings.scope}")
        for target in found.all_compiled:
            names = target.blocks if settings.scope is Scope.REGIONAL else [""]
            prefix = f"{target.name}." if len(found.trained_and_frozen) > 1 else ""
            targets |= {f"{prefix}{name}" or target.name: [target.module.get_submodule(name).forward] for name in names}
    if settings.optimizer in COMPILED_OPTIMIZERS:
        words.append(f"optimizer={settings.optimizer}")
        targets |= {f"the step of {type(optimizer).__name__}": steps_of(optimizer) for optimizer in found.optimizers}
    forwards = forward_names(module for target in found.all_compiled for module in target.module.modules())
    return Expectation(what=", ".join(words), targets=targets, cudagraphs=settings.compiles_graphs, names=forwards)


class OwnCompile:
    """Controls what the script's own `torch.compile` and `Module.compile` do: compile, or nothing.

    If nothing, the script gets what it expects, with the same `_orig_mod` and the same keys of `state_dict`, and it runs eagerly.
    Functions that libraries compile themselves, such as attention that is only usable compiled, stay compiled.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []
        """Classes of modules that the script compiles."""
        self.functions: list[str] = []
        """Functions that the script compiles."""

    def includes(self, module: nn.Module) -> bool:
        """Tells whether the script compiles a module, its forward or a part of it."""
        compiled = {*self.modules, *(name.removesuffix(".forward") for name in self.functions)}
        return any(type(part).__name__ in compiled for part in module.modules())

    @contextmanager
    def answered(self, *, plainly: bool) -> Iterator[None]:
        """Records calls of `torch.compile`, and answers them without compiling if `plainly` says so."""

        def answering(compile_: Call) -> Call:
            def answer(model: Any = None, **options: Any) -> Any:
                if model is None:
                    return lambda decorated: answer(decorated, **options)
                if isinstance(model, nn.Module):
                    self.modules.append(type(model).__name__)
                    # Compiled modules keep this function, and the one that watches will be removed.
                    with replaced(nn.Module, "__call__", lambda _: _call):
                        return OptimizedModule(model, as_it_is) if plainly else compile_(model, **options)  # type: ignore[arg-type]
                if _is_librarys(model):
                    return compile_(model, **options)
                self.functions.append(getattr(model, "__qualname__", type(model).__name__))
                return model if plainly else compile_(model, **options)

            return answer

        def answering_in_place(compile_: Call) -> Call:
            def answer(module: nn.Module, *args: Any, **options: Any) -> None:
                self.modules.append(type(module).__name__)
                if not plainly:
                    vars(module)["_compiled_call_impl"] = _compile(module._call_impl, *args, **options)

            return answer

        with replaced(torch, "compile", answering), replaced(nn.Module, "compile", answering_in_place):
            yield


def as_it_is(function: Call) -> Call:
    """Compiles nothing; takes the place where torch stores how a module is compiled."""
    return function


def _is_librarys(function: Any) -> bool:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    if isinstance(getattr(function, "__self__", None), nn.Module | Optimizer):  # such as model.forward or optimizer.step
        return False
    return is_package(file)
