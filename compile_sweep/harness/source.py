"""Compile settings as Python source that a person would paste into a training script.

`apply.py` executes exactly this text, so the exported code is the measured code. Pure: does not import torch.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_sweep.schema.choices import COMPILED_OPTIMIZERS, SdpaKernel, optimizer_options
from compile_sweep.schema.ddp_settings import (
    FIRST_POWERSGD_STEP,
    USUAL_POWERSGD_RANK,
    Around,
    Compression,
    DdpSettings,
    OptimizeDdp,
)
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.part_settings import settings_of_part
from compile_sweep.schema.setting_text import PART_BREAK, source_parts
from compile_sweep.schema.settings import CONFIG_MODULES, Autocast, CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope
from compile_sweep.schema.shapes import group_by_length

_DYNAMIC_ARGUMENT = {
    Dynamic.STATIC: "False",
    Dynamic.BUCKETS: "False",
    Dynamic.TRUE: "True",
}
"""Argument of `torch.compile(dynamic=...)` for each strategy; the others leave it to torch."""

_AUTOCAST_DTYPE = {Autocast.BF16: "bfloat16", Autocast.FP16: "float16", Autocast.OFF: None}

_SDPA_BACKENDS = {
    SdpaKernel.FLASH: "FLASH_ATTENTION",
    SdpaKernel.CUDNN: "CUDNN_ATTENTION",
    SdpaKernel.EFFICIENT: "EFFICIENT_ATTENTION",
    SdpaKernel.MATH: "MATH",
}

_INITIAL_SCALE = 1024.0
"""Initial scale of the gradient scaler. Torch's default, 65536, makes the first steps' gradients infinite, which skips them."""

SKIPS_WEIGHT_GUARDS = "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags"

_LEAST = 2  # lower bound of a marked dimension if only the upper one is given; torch's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the source must know about a workload, its model and the machine."""

    workload: str
    device_type: str
    """Torch's name of the device type: cpu or cuda."""
    torch_version: tuple[int, int]
    max_length: int
    """Maximum length in tokens."""
    targets: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Modules to compile separately, by dotted name, each with the dynamic dimensions of its arguments; `""` is the whole model.
    """
    autocast: str | None
    """The workload's own autocast dtype, by torch's name; None without autocast."""
    attention: str | None
    """A statement that switches `model` to the settings' attention; None to keep the model's own."""
    grad_mode: str | None = None
    """Torch's context manager for an inference-only step; None for a training step."""
    clip_grad_norm: float | None = None
    """Maximum norm of all gradients together; None for no clipping."""
    average_decay: float | None = None
    """Decay of a moving average of the weights; None for no average."""
    num_workers: int = 1
    """Number of workers that train together."""
    batch_size: int = 1
    """Samples per step and worker."""
    one_shape: bool = False
    """Whether every batch has the same shape, so that none is padded."""
    process_statements: Sequence[str] = ()
    """The workload's own process-wide settings."""
    blocks: Sequence[str] = ()
    """Dotted names of repeated blocks, if something other than compiling is done to each."""

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced over several workers."""
        return self.num_workers > 1 and self.grad_mode is None


def to_source(settings: CompileSettings, facts: Facts) -> str:
    """Returns a module that makes the step under these settings: `make_step(model, optimizer)`, or `make_step(model)`."""
    step = _make_step(settings, facts) if facts.grad_mode is None else _make_inference(settings, facts)
    wrap = [*wrapper(settings.ddp, facts.torch_version), "", ""] if facts.reduces else []
    body = [*wrap, *_compile_model(settings, facts), "", "", *step]
    text = "\n".join(body)
    fragments = list(_fragments(text))
    if settings.unbacked:
        fragments = [piece.replace("mark_dynamic(", "mark_unbacked(") for piece in fragments]
    code = PART_BREAK.join([*filter(None, ["\n".join(_batching(settings, facts))]), *fragments, text])
    settled = "\n".join(_process_wide(settings, facts))
    head = [f'"""{settings.label}: compile settings for the workload {facts.workload}.', "", f"{settings.key}", '"""']
    parts = ["\n".join(head), "\n".join(_imports(settled + code)), *filter(None, [settled]), *_constants(settings, facts)]
    return "\n\n".join(parts) + "\n\n\n" + code + "\n"


def autocast_of(settings: CompileSettings, facts: Facts) -> str | None:
    """Returns the dtype of the step's autocast, by torch's name; None without autocast."""
    return facts.autocast if settings.autocast is None else _AUTOCAST_DTYPE[settings.autocast]


_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

_IMPORTED = {
    "mark_dynamic": "from torch._dynamo import mark_dynamic",
    "mark_unbacked": "from torch._dynamo.decorators import mark_unbacked",
    "checkpoint(": "from torch.utils.checkpoint import checkpoint",
    "foreach_map(": "from torch._higher_order_ops.foreach_map import foreach_map",
    "list_mode_options": "from torch._inductor import list_mode_options",
    "maybe_warm_pool": "from torch._inductor.async_compile import maybe_warm_pool",
    "compile_tasks": "from torch._inductor.runtime import compile_tasks",
    "sdpa_kernel(": "from torch.nn.attention import SDPBackend, sdpa_kernel",
    "bf16_compress_hook": f"from {_HOOKS}.default_hooks import bf16_compress_hook",
    "fp16_compress_hook": f"from {_HOOKS}.default_hooks import fp16_compress_hook",
    "powerSGD_hook": f"from {_HOOKS}.powerSGD_hook import PowerSGDState, powerSGD_hook",
}
"""What code contains that uses a name of torch, and the import of that name."""


def _imports(code: str) -> Iterator[str]:
    yield "from __future__ import annotations"
    yield ""
    standard = {"inspect": "inspect.", "random": "random."}
    yield from (f"import {name}" for name, use in standard.items() if use in code)
    if names := [name for name in ("Callable", "Iterator", "Sequence") if re.search(rf"\b{name}\b", code)]:
        yield f"from collections.abc import {', '.join(names)}"
    if names := [name for name in ("FunctionType", "MethodType") if name in code]:
        yield f"from types import {', '.join(names)}"
    if re.search(r"\bAny\b", code):
        yield "from typing import Any"
    yield ""
    yield "import torch"
    for module in sorted(["torch._inductor.config", *CONFIG_MODULES.values()]):
        if f"{module}." in code:
            yield f"import {module}"
    yield from (line for use, line in _IMPORTED.items() if use in code)
    if re.search(r"\bDistributedDataParallel\b(?! )", code):
        yield "from torch.nn.parallel import DistributedDataParallel"


def _process_wide(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    yield from facts.process_statements
    config = process_config(settings, facts.torch_version)
    if SKIPS_WEIGHT_GUARDS in config:
        yield "# Before torch 2.12, compiled code overlooks weights that are unfrozen later, and gives them no gradients."
    yield from (f"{name} = {_quoted(value)}" for name, value in config.items())
    if settings.matmul_precision is not None:
        yield f'torch.set_float32_matmul_precision("{settings.matmul_precision}")'
    if settings.stance is not None:
        yield f'torch.compiler.set_stance("{settings.stance}")'
    if facts.reduces and settings.ddp is not None and settings.ddp.optimize_ddp is not None:
        yield f'torch._dynamo.config.optimize_ddp = "{settings.ddp.optimize_ddp}"'
        if _compiles_backward(settings, facts):
            yield "torch._dynamo.config.compiled_autograd = True  # so that the reduction is part of a graph"
    if facts.device_type == "cuda" and settings.mode is not None:
        yield "maybe_warm_pool()  # starts Inductor's compile workers now, while the model is still to be built"
    if facts.device_type == "cuda" and facts.torch_version < (2, 13) and settings.tunes:
        # A regional compile that took minutes takes less than one this way; see docs/log.md.
        yield "# Before torch 2.13, compile workers assemble kernels with another ptxas than this process, which therefore does"
        yield "# not find what they made in Triton's cache and compiles every choice of max-autotune again, one by one."
        yield "compile_tasks._set_triton_ptxas_path()"


def _constants(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    if facts.grad_mode is None:
        options = _dictionary(optimizer_options(settings.optimizer))
        yield f'OPTIMIZER_OPTIONS = {options}\n"""For the constructor of the optimizer."""'
    if settings.scope is Scope.REGIONAL:
        if settings.marks:
            groups: dict[str, tuple[list[str], Mapping[str, tuple[int, ...]]]] = {}
            for name, dims in facts.targets.items():
                groups.setdefault(repr(dims), ([], dims))[0].append(name)
            lines = [f"    **dict.fromkeys({_names(names)}, {_dictionary(dims)})," for names, dims in groups.values()]
            yield "\n".join(
                ["BLOCKS = {", *lines, "}", '"""Repeated blocks, and the dimensions of their arguments that change."""']
            )
        else:
            yield f"BLOCKS = {_names(list(facts.targets))}"
    elif facts.blocks:
        yield f"BLOCKS = {_names(facts.blocks)}"
    if settings.compiles_whole and settings.marks:
        yield f'DIMS = {_dictionary(facts.targets[""])}\n"""Dimensions of the model\'s inputs that change from batch to batch."""'


def _names(names: Sequence[str]) -> str:
    """Returns a list of dotted names as source, with runs of numbered ones as comprehensions."""
    pieces: list[str] = []
    runs: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(?<!\d)(0|[1-9]\d*)((?:\.\D.*)?)", name)  # 01 is not a number: it would be written as 1
        if match:
            runs.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            pieces.append(f'"{name}"')
    for (before, after), numbers in runs.items():
        if numbers == list(range(len(numbers))):
            pieces.append(f'*(f"{before}{{i}}{after}" for i in range({len(numbers)}))')
        else:
            pieces += [f'"{before}{number}{after}"' for number in numbers]
    return f"[{', '.join(pieces)}]"


def _batching(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    if settings.group_window is not None:
        yield f"# Batches: rows = group_by_length(row_lengths, batch_size, window={settings.group_window})"
        yield inspect.getsource(group_by_length).rstrip() + "\n\n"
    if facts.one_shape:
        return
    lengths = settings.shape_policy(facts.max_length).lengths()
    yield "def padded_length(longest: int) -> int:"
    yield '    """Tokens to pad a batch to whose longest row has `longest` tokens."""'
    yield f"    if longest > {lengths[-1]}:"
    yield f'        raise ValueError(f"{{longest}} tokens are above {lengths[-1]}, the most that was measured; sweep again")'
    if settings.padding is Padding.MAX:
        yield f"    return {facts.max_length}"
    elif settings.padding is Padding.LONGEST:
        multiple = settings.pad_multiple or 1
        longest = f"max(longest, {settings.shortest})" if settings.shortest > multiple else "longest"
        yield f"    return min({facts.max_length}, -(-{longest} // {multiple}) * {multiple})"
    else:
        yield f"    return next(bucket for bucket in {lengths} if bucket >= longest)"


def _compile_model(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    yield "def compile_model(model: torch.nn.Module) -> Any:"
    yield '    """Compiles the model, or modules inside it, and returns what to call in its place."""'
    if facts.attention or facts.blocks or settings.scope in (Scope.REGIONAL, Scope.MODULAR):
        yield "    inner = model.module if isinstance(model, DistributedDataParallel) else model"
    if facts.attention:
        yield f"    {facts.attention}"
    if facts.blocks:
        yield "    for name in BLOCKS:"
        yield "        module = inner.get_submodule(name)"
        if settings.activation_checkpointing is not None:
            yield "        module.forward = MethodType(checkpointed, module)"
        if settings.scope is Scope.NESTED:
            yield "        module.forward = nested(module)"
    if settings.compiles_whole:
        yield f"    return torch.compile(model{_arguments(settings, facts)})"
        return
    if settings.scope is Scope.REGIONAL:
        yield from _compile_blocks(settings, facts)
    elif settings.scope is Scope.MODULAR:
        yield from _compile_parts(settings, facts)
    yield "    return model"


def _compile_blocks(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    compiled = f"torch.compile(with_own_code(module.forward){_arguments(settings, facts)})"
    dims, items = (", dims", ".items()") if settings.marks else ("", "")
    yield f"    for name{dims} in BLOCKS{items}:"
    yield "        module = inner.get_submodule(name)"
    yield f"        {'compiled' if settings.marks else 'module.forward'} = {compiled}"
    if settings.marks:
        yield "        module.forward = marked_forward(module, compiled, dims) if dims else compiled"


def _compile_parts(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    short = [name.rpartition(".")[2] for name in facts.targets]
    for name, _ in settings.parts or ():
        if name not in (*facts.targets, *short):
            raise SettingsError(f"parts.{name}: the workload {facts.workload} has no such part; use {', '.join(short)}")
    for name, dims in facts.targets.items():
        part = settings_of_part(settings.parts, name)
        if part.compile is False:
            continue
        dynamic = part.dynamic or settings.dynamic
        compiled = f"torch.compile(with_own_code(module.forward){_arguments(settings, facts, part.mode, dynamic)})"
        yield f'    module = inner.get_submodule("{name}")'
        is_marked = dynamic is Dynamic.MARK and dims
        yield f"    {'compiled' if is_marked else 'module.forward'} = {compiled}"
        if is_marked:
            yield f"    module.forward = marked_forward(module, compiled, {_dictionary(dims)})"


def _make_step(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    scaled = settings.autocast is Autocast.FP16
    yield "def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:"
    yield '    """The training step: call it with the model\'s inputs by name; it returns the loss, detached.'
    yield ""
    yield "    `before_update` is called when the gradients are there and not yet used, for example to clip them."
    yield '    """'
    compiles_backward = _compiles_backward(settings, facts)
    yield from _converted(settings)
    yield f"    forward = {wrapped_and_compiled(settings.ddp) if facts.reduces else 'compile_model(model)'}"
    if compiles_backward:
        yield f"    backward = torch.compile(run_backward{_arguments(settings, facts, fullgraph=False)})"
    yield f"    update = {_update(settings, facts)}"
    if facts.average_decay is not None:
        yield f"    average = moving_average(model, {facts.average_decay})"
    if settings.keeps_gradients:
        yield "    keep_gradients(model)"
    if scaled:
        yield f'    scaler = torch.amp.GradScaler("{facts.device_type}", init_scale={_INITIAL_SCALE})'
        if settings.optimizer in COMPILED_OPTIMIZERS:
            yield "    optimizer.step = update  # the scaler calls it, unless a gradient is not finite"
    yield ""
    yield "    def step(inputs: dict[str, Any], before_update: Callable[[], None] | None = None) -> torch.Tensor:"
    if settings.memory_format is not None:
        yield f"        inputs = in_memory_format(inputs, torch.{settings.memory_format}, ndim={settings.memory_format.ndim})"
    if settings.accumulate is None:
        yield from _forward(settings, facts, "loss = forward(**inputs)")
        scaled_loss = "scaler.scale(loss)" if scaled else "loss"
        yield f"        backward({scaled_loss})" if compiles_backward else f"        {scaled_loss}.backward()"
    else:
        parts = settings.accumulate
        yield "        loss = 0.0"
        yield f"        for part in split_batch(inputs, samples={facts.batch_size}, parts={parts}):"
        for line in _forward(settings, facts, f"share = forward(**part) / {parts}", inputs="part"):
            yield f"    {line}"
        yield f"            {'scaler.scale(share)' if scaled else 'share'}.backward()"
        yield "            loss = loss + share.detach()"
    if scaled:
        yield "        scaler.unscale_(optimizer)"
    yield "        if before_update is not None:"
    yield "            before_update()"
    if facts.clip_grad_norm is not None:
        yield f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {facts.clip_grad_norm})"
    yield from ["        scaler.step(optimizer)", "        scaler.update()"] if scaled else ["        update()"]
    if facts.average_decay is not None:
        yield "        average()"
    yield f"        optimizer.zero_grad(set_to_none={not settings.keeps_gradients})"
    yield "        return loss.detach().clone()  # the next step may use the loss's memory again"
    yield ""
    yield "    return step"


def _make_inference(settings: CompileSettings, facts: Facts) -> Iterator[str]:
    yield "def make_step(model: torch.nn.Module) -> Callable[..., Any]:"
    yield '    """The inference step: call it with the model\'s inputs by name; it returns what the model does.'
    yield ""
    yield "    With CUDA graphs, the next call writes to the same memory: copy what is to last."
    yield '    """'
    yield from _converted(settings)
    yield "    forward = compile_model(model)"
    yield ""
    yield f"    @torch.{facts.grad_mode}()"
    yield "    def step(inputs: dict[str, Any]) -> Any:"
    if settings.memory_format is not None:
        yield f"        inputs = in_memory_format(inputs, torch.{settings.memory_format}, ndim={settings.memory_format.ndim})"
    yield from _forward(settings, facts, "return forward(**inputs)")
    yield ""
    yield "    return step"


def _converted(settings: CompileSettings) -> Iterator[str]:
    if settings.memory_format is not None:
        yield f"    model.to(memory_format=torch.{settings.memory_format})"
    if settings.float8 is not None:
        yield f'    use_float8(model, "{settings.float8}")'


def _forward(settings: CompileSettings, facts: Facts, statement: str, inputs: str = "inputs") -> Iterator[str]:
    """Yields the statement that calls the model, and what precedes each call."""
    if settings.compiles_whole and settings.marks:
        yield f"        mark({inputs}, DIMS{_bounds(settings, facts)})"
    if settings.claims_cudagraphs:
        yield "        torch.compiler.cudagraph_mark_step_begin()"
    yield from _within_contexts(settings, facts, statement)


def sdpa_backends(kernel: SdpaKernel) -> list[str]:
    """Returns members of `torch.nn.attention.SDPBackend`: a kernel, and those for calls that it cannot handle, in order.

    Flash attention takes no mask, for example. cuDNN's kernels, which are planned for each shape, are taken only if chosen.
    """
    others = () if kernel is SdpaKernel.MATH else (SdpaKernel.FLASH, SdpaKernel.EFFICIENT, SdpaKernel.MATH)
    return [_SDPA_BACKENDS[one] for one in dict.fromkeys((kernel, *others))]


def _within_contexts(settings: CompileSettings, facts: Facts, statement: str) -> Iterator[str]:
    """Yields the statement under autocast and the attention kernel, which apply to it alone: eager steps run in between."""
    contexts = []
    if dtype := autocast_of(settings, facts):
        contexts.append(f'torch.autocast("{facts.device_type}", dtype=torch.{dtype})')
    if settings.sdpa_kernel is not None:
        backends = ", ".join(f"SDPBackend.{name}" for name in sdpa_backends(settings.sdpa_kernel))
        contexts.append(f"sdpa_kernel([{backends}], set_priority=True)")
    if contexts:
        yield f"        with {', '.join(contexts)}:"
    yield f"        {'    ' if contexts else ''}{statement}"


def _update(settings: CompileSettings, facts: Facts) -> str:
    # Parameters never change size, so the optimizer's graph is static under every strategy.
    arguments = _arguments(settings, facts, dynamic=Dynamic.STATIC, fullgraph=False)
    if settings.optimizer is OptimizerKind.COMPILED:
        compiled = f"torch.compile(optimizer.step{arguments})"
        return f"graphed_step(optimizer, optimizer.step, {compiled})" if settings.claims_cudagraphs else compiled
    if settings.optimizer is OptimizerKind.FOREACH_MAP:
        return f"foreach_map_adam(optimizer{arguments})"
    return "optimizer.step"


def process_config(settings: CompileSettings, torch_version: tuple[int, int]) -> dict[str, Any]:
    """Returns the process-wide settings of torch by their full names, including those that this version needs.

    Before torch 2.12 a call after `requires_grad_(True)` runs the graph of frozen weights (pytorch pull request 177158), unless
    torch is told to look at each weight.
    """
    looks_at_weights = torch_version < (2, 12) and settings.scope is not Scope.EAGER
    return {**({SKIPS_WEIGHT_GUARDS: False} if looks_at_weights else {}), **settings.config}


def fixes_sizes(
    settings: CompileSettings, torch_version: tuple[int, int], *, changes: bool, dynamic: Dynamic | None = None
) -> bool:
    """Tells whether Inductor's padding of matrix products would fix sizes that change, under the settings' `dynamic` or this.

    Before torch 2.13 it compares them with other sizes of the product (docs/log.md). A marked size is then an error, and another
    one is compiled anew at each length.
    """
    dynamic = dynamic or settings.dynamic
    is_dynamic = dynamic is Dynamic.MARK or (changes and dynamic in (Dynamic.AUTO, Dynamic.TRUE))
    return is_dynamic and settings.backend is None and torch_version < (2, 13)


def _arguments(
    settings: CompileSettings,
    facts: Facts,
    mode: Mode | None = None,
    dynamic: Dynamic | None = None,
    *,
    fullgraph: bool | None = None,
) -> str:
    mode, dynamic = mode or settings.mode, dynamic or settings.dynamic
    fullgraph = settings.fullgraph if fullgraph is None else fullgraph
    options: dict[str, Any] = settings.inductor_options
    if fixes_sizes(settings, facts.torch_version, changes=not facts.one_shape, dynamic=dynamic):
        options.setdefault("shape_padding", False)
    argument = _DYNAMIC_ARGUMENT.get(dynamic) if dynamic else None
    words = []
    if fullgraph:
        words.append("fullgraph=True")
    if settings.backend is not None:
        words.append(f'backend="{settings.backend}"')
    if argument:
        words.append(f"dynamic={argument}")
    if mode not in (None, Mode.DEFAULT):
        # `torch.compile` accepts either `mode` or `options`.
        words.append(f"options={_dictionary(options, base=mode)}" if options else f'mode="{mode}"')
    elif options:
        words.append(f"options={_dictionary(options)}")
    return "".join(f", {word}" for word in words)


def _dictionary(values: Mapping[str, Any], base: Mode | None = None) -> str:
    items = [f'**list_mode_options("{base}")'] if base else []
    return "{" + ", ".join([*items, *(f'"{name}": {_quoted(value)}' for name, value in values.items())]) + "}"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"} else repr(value)


def _compiles_backward(settings: CompileSettings, facts: Facts) -> bool:
    """Tells whether the backward pass is compiled again, together with the reduction of gradients."""
    return facts.reduces and settings.ddp is not None and settings.ddp.optimize_ddp is OptimizeDdp.PYTHON_REDUCER


_WRAPPER_ARGUMENTS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "batched_grad_copy")
"""Arguments of `DistributedDataParallel`, by torch's names; `broadcast_buffers` has another name since 2.13."""


def wrapper(ddp: DdpSettings | None, torch_version: tuple[int, int]) -> Iterator[str]:
    """Yields the function that wraps the model in `DistributedDataParallel`."""
    ddp = ddp or DdpSettings()
    arguments = "".join(f", {name}={value}" for name, value in _wrapper_arguments(ddp, torch_version).items())
    yield "def distributed(model: torch.nn.Module) -> torch.nn.Module:"
    yield '    """The model inside DistributedDataParallel; itself where this process trains alone."""'
    yield "    if not torch.distributed.is_initialized():"
    yield "        return model"
    if ddp.compression is None:
        yield f"    return DistributedDataParallel(model{arguments})"
        return
    yield f"    wrapped = DistributedDataParallel(model{arguments})"
    if ddp.compression is Compression.POWERSGD:
        rank, start = ddp.powersgd_rank or USUAL_POWERSGD_RANK, ddp.powersgd_start or FIRST_POWERSGD_STEP
        yield f"    state = PowerSGDState(None, matrix_approximation_rank={rank}, start_powerSGD_iter={start})"
        yield "    wrapped.register_comm_hook(state, powerSGD_hook)"
    else:
        yield f"    wrapped.register_comm_hook(None, {ddp.compression}_compress_hook)"
    yield "    return wrapped"


def wrapped_and_compiled(ddp: DdpSettings | None) -> str:
    """Returns the expression that a step calls: `model` compiled and wrapped, in the order that the settings say.

    Torch recommends compiling the model first and wrapping it. At each compile, the compiler checks whether a wrapper's forward
    is running, so it splits graphs by bucket in either order, also in blocks and parts.
    """
    around_wrapper = ddp is not None and ddp.around is Around.WRAPPER
    return "compile_model(distributed(model))" if around_wrapper else "distributed(compile_model(model))"


def _wrapper_arguments(ddp: DdpSettings, torch_version: tuple[int, int]) -> Mapping[str, object]:
    found = {name: value for name in _WRAPPER_ARGUMENTS if (value := getattr(ddp, name)) is not None}
    if ddp.broadcast_buffers is False:
        found["broadcast_buffers" if torch_version < (2, 13) else "forward_sync_buffers"] = False
    return found


def _bounds(settings: CompileSettings, facts: Facts) -> str:
    if settings.dynamic_min is None and settings.dynamic_max is None:
        return ""
    # Always both: with only one, torch 2.11 to 2.13 raises an AssertionError (pytorch/pytorch#194091). No batch is longer than
    # the workload's maximum, and a larger bound would contradict a model with that many positions.
    return f", min={settings.dynamic_min or _LEAST}, max={settings.dynamic_max or facts.max_length}"


def _fragments(code: str) -> Iterator[str]:
    """Yields the functions of `source_runtime.py` that the code calls, directly or indirectly, in their order there."""
    named = source_parts((Path(__file__).parent / "source_runtime.py").read_text(encoding="utf-8"))
    wanted: set[str] = set()

    def want(user: str) -> None:
        for name, piece in named.items():
            if name not in wanted and re.search(rf"\b{name}\b", user):
                wanted.add(name)
                want(piece)

    want(code)
    yield from (piece for name, piece in named.items() if name in wanted)
