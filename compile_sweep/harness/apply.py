"""Applies `CompileSettings` to a model and its optimizer; the one place that touches `torch.compile` and its configuration.

What is applied is the text that `source.py` writes, executed: the thing measured is the thing exported. Replaced forwards and
torch's process-wide configuration are put back when the block ends.

torch's process-wide state about the reduction of gradients: what settings may change of it is put back here.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, get_origin

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compile_sweep.contract.base import Batch, Workload, unwrap_ddp
from compile_sweep.harness.distributed import num_workers
from compile_sweep.harness.outputs import digest, tensors_of
from compile_sweep.harness.precision import preserve_precision
from compile_sweep.harness.source import Facts, autocast_of, to_source
from compile_sweep.schema.ddp_settings import DdpSettings
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import Scalar, format_value, suggest
from compile_sweep.schema.settings import CompileSettings, OptimizerKind, Scope

_WRAPPERS_MODULE = "torch.nn.parallel.distributed"


@contextmanager
def reducing_put_back() -> Iterator[None]:
    """Puts back what the block changes, and what `DistributedDataParallel` itself changes under optimize_ddp=python_reducer."""
    dynamo, inductor, trace_rules = torch._dynamo.config, torch._inductor.config, torch._dynamo.trace_rules
    with (
        dynamo.patch(optimize_ddp=dynamo.optimize_ddp, compiled_autograd=dynamo.compiled_autograd),
        inductor.patch(
            _fuse_ddp_communication=inductor._fuse_ddp_communication, _fuse_ddp_bucket_size=inductor._fuse_ddp_bucket_size
        ),
    ):
        was_traced = _WRAPPERS_MODULE in trace_rules.LEGACY_MOD_INLINELIST
        try:
            yield
        finally:
            if not was_traced and _WRAPPERS_MODULE in trace_rules.LEGACY_MOD_INLINELIST:
                trace_rules.LEGACY_MOD_INLINELIST.discard(_WRAPPERS_MODULE)
                trace_rules.get_legacy_mod_inlinelist.cache_clear()


@contextmanager
def reducing_as_usual() -> Iterator[None]:
    """Torch's own reducer for what is wrapped inside the block, whatever settings are in force around it.

    An eager reference is wrapped while the run under test is, and `DistributedDataParallel` asks for its reducer only then.
    """
    with torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False):
        yield


def refuse_unknown_arguments(ddp: DdpSettings | None) -> None:
    """Refuses what the installed `DistributedDataParallel` cannot do.

    Raises:
        SettingsError: it does not take the argument.
    """
    taken = inspect.signature(DistributedDataParallel.__init__).parameters
    if ddp is not None and ddp.batched_grad_copy and "batched_grad_copy" not in taken:
        raise SettingsError(f"ddp.batched_grad_copy is there from torch 2.12 on, and this is {torch.__version__}; leave it out")


class TrainStep:
    """Forward, backward and optimizer step on one batch, under some compile settings.

    Args:
        step: what `make_step` of the source returned.
        source: the text that was executed to make it.
    """

    def __init__(self, step: Callable[..., Tensor], source: str) -> None:
        self._step = step
        self.source = source

    def __call__(self, batch: Batch, *, before_update: Callable[[], None] | None = None) -> Tensor:
        """Runs one step and returns its loss, detached, in memory no later step overwrites.

        Args:
            batch: what to train on.
            before_update: called between the backward pass and the optimizer's step, when gradients are there to look at.
        """
        return self._step(dict(batch.inputs), before_update)


class InferenceStep(TrainStep):
    """Forward on one batch, without gradients, under some compile settings.

    What the model returns is in `outputs` until the next call; what a call returns is their digest, a scalar as a loss is.
    """

    outputs: Sequence[Tensor] = ()

    def __call__(self, batch: Batch, *, before_update: Callable[[], None] | None = None) -> Tensor:
        self.outputs = ()  # their memory is free for the call's own
        self.outputs = tensors_of(self._step(dict(batch.inputs)))
        return digest(self.outputs)


@contextmanager
def applied(
    settings: CompileSettings,
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> Iterator[TrainStep]:
    """A training or inference step of `model` under `settings`; nothing compiles before its first call.

    Args:
        settings: what to apply; already valid for the workload's lengths.
        workload: names the model's regions, parts and dynamic dimensions.
        model: on `device`; where there are several workers, the step puts it inside `DistributedDataParallel`.
        optimizer: over the model's parameters; None for an inference-only workload.
        device: where the step runs.

    Raises:
        SettingsError: the settings name an option, a back-end, a part or an attention that is not there, or an update that is
            not the optimizer's.
    """
    refuse_unknown_names(settings)
    if optimizer is not None:
        refuse_other_update(settings, optimizer)
    facts = _facts(settings, workload, model, device, num_workers())
    source = to_source(settings, facts)
    with ExitStack() as undo:
        if facts.process_statements:  # executed with the rest of the source, they must not outlast it
            undo.enter_context(workload.under(settings).process_settings())
        undo.enter_context(preserve_precision())
        undo.enter_context(_environment_put_back("TRITON_PTXAS_PATH"))
        undo.enter_context(torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit))
        undo.enter_context(reducing_put_back())
        undo.callback(_put_back, model, optimizer)
        with reducing_as_usual() if settings.scope is Scope.EAGER else nullcontext():
            written = undo.enter_context(_executed(source))
            if torch._dynamo.config.caching_precompile:
                written["compile_model"] = _called_where_it_runs(written["compile_model"], settings, facts)
            make_step = written["make_step"]
            made = make_step(model) if optimizer is None else make_step(model, optimizer)
        yield InferenceStep(made, source) if optimizer is None else TrainStep(made, source)


def source_for(
    settings: CompileSettings, workload: Workload, model: nn.Module, device: torch.device | str, *, num_workers: int = 1
) -> str:
    """The settings as Python for this workload's model and so many workers that train together.

    Raises:
        SettingsError: the settings name a part or an attention the workload does not have, or it has no repeated blocks.
    """
    return to_source(settings, _facts(settings, workload, model, torch.device(device), num_workers))


def _facts(settings: CompileSettings, workload: Workload, model: nn.Module, device: torch.device, num_workers: int) -> Facts:
    workload = workload.under(settings)
    inner = unwrap_ddp(model)
    names: list[str] = [""]
    if settings.scope is Scope.REGIONAL:
        names = list(workload.regions(inner))
        if not names:
            raise SettingsError(f"scope=regional: the model of {type(workload).__name__} has no repeated blocks; use scope=full")
    elif settings.scope is Scope.MODULAR:
        names = list(workload.parts())
    dtype = workload.autocast_dtype(device)
    major, minor = torch.__version__.split(".")[:2]
    return Facts(
        workload=type(workload).__name__,
        device_type=device.type,
        torch_version=(int(major), int(minor)),
        max_length=workload.max_length,
        # Finding them may take a run of the model, which only marks are worth.
        targets={name: workload.dynamic_dims(name) if settings.marks else {} for name in names},
        autocast=None if dtype is None else str(dtype).removeprefix("torch."),
        attention=None if settings.attention is None else workload.attention_statement(settings.attention),
        grad_mode=None if workload.trains else workload.grad_mode,
        average_decay=workload.average_decay if workload.trains else None,
        num_workers=num_workers,
        process_statements=tuple(workload.process_statements()),
    )


def refuse_unknown_names(settings: CompileSettings) -> None:
    """Refuses what the installed torch does not know by name, and options whose values it would not take.

    Raises:
        SettingsError: an Inductor option or a back-end; says which is meant, probably, or what the option takes.
    """
    refuse_unknown_arguments(settings.ddp)
    known = torch._inductor.list_options() if settings.options else []  # loaded when first asked: a plan without has no need
    for name, value in settings.options or ():
        if name not in known:
            raise SettingsError(f"Inductor has no option {name!r}; {_nearest_of_many(name, known)}")
        _refuse_other_type(name, value)
    backends = torch._dynamo.list_backends(exclude_tags=()) if settings.backend else []
    if settings.backend and settings.backend not in backends:
        raise SettingsError(f"torch.compile has no back-end {settings.backend!r}; {suggest(settings.backend, backends)}")


def _refuse_other_type(name: str, value: Scalar) -> None:
    """Refuses a value that `torch.compile` would refuse, which it does in the middle of a trial."""
    from torch._inductor import config

    wanted: Any = config.get_type(name)  # type: ignore[attr-defined]
    kind = get_origin(wanted)  # None of plain types; of unions, torch checks nothing either
    if kind in (list, dict, tuple, set) or (kind is None and not isinstance(value, wanted)):
        able = _WRITTEN.get(wanted, f"leave it out: a setting spells no {getattr(kind or wanted, '__name__', wanted)}")
        raise SettingsError(f"inductor.{name}={format_value(value)} is none of what Inductor takes there; {able}")


_WRITTEN = {
    bool: "use on or off",
    int: "use a whole number",
    float: "use a number with a point, such as 1.0",
    str: "use text that is no number and no switch",
}
"""How a person writes values of an option's type."""


def refuse_other_update(settings: CompileSettings, optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizer=foreach_map for an optimizer that it would replace by another.

    Raises:
        SettingsError: its own step is another formula.
    """
    if settings.optimizer is OptimizerKind.FOREACH_MAP:
        from compile_sweep.harness.source_runtime import (
            refuse_unless_plain_adam,  # loads the compiler, which a plan has no need of
        )

        try:
            refuse_unless_plain_adam(optimizer)
        except TypeError as error:
            raise SettingsError(str(error)) from None


def refuse_other_update_of(workload: Workload, settings: CompileSettings) -> None:
    """The same before there is a model, as far as that can be told.

    Raises:
        SettingsError: the step of the workload's optimizer is another formula.
    """
    if settings.optimizer is not OptimizerKind.FOREACH_MAP:
        return
    try:
        optimizer = workload.optimizer(torch.nn.Linear(1, 1), OptimizerKind.FOREACH)
    except Exception:  # one that looks for modules of the model; a trial will say
        return
    if optimizer is not None:
        refuse_other_update(settings, optimizer)


def _nearest_of_many(name: str, known: list[str]) -> str:
    hint = suggest(name, known)
    return hint if hint.startswith("did you mean") else "torch._inductor.list_options() names them"


@contextmanager
def _executed(source: str) -> Iterator[dict[str, Any]]:
    """The names of a module with this source, which can be imported while the block lasts.

    torch looks up by file and module where a function was that another process traced, so equal sources have equal names.
    """
    name = f"compile_settings_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    lines = source.splitlines(keepends=True)
    linecache.cache[f"{name}.py"] = (len(source), None, lines, f"{name}.py")  # for tracebacks and torch's logs
    module, before = ModuleType(name), sys.modules.get(name)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    sys.modules[name] = module
    try:
        yield vars(module)
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _called_where_it_runs(
    compile_model: Callable[[nn.Module], Any], settings: CompileSettings, facts: Facts
) -> Callable[[nn.Module], Any]:
    """`compile_model` under the step's own autocast and gradient mode.

    `torch.compile` loads what Dynamo traced in another process and makes its guards of tensors for the dispatch keys of that
    moment. Made outside autocast or inference mode they fail inside it, and the trace that follows does not survive what was
    loaded (pytorch/pytorch#175025; torch 2.11 to 2.13).
    """

    def called(model: nn.Module) -> Any:
        with ExitStack() as within:
            if facts.grad_mode is not None:
                within.enter_context(getattr(torch, facts.grad_mode)())
            if dtype := autocast_of(settings, facts):
                within.enter_context(torch.autocast(facts.device_type, dtype=getattr(torch, dtype)))
            return compile_model(model)

    return called


@contextmanager
def _environment_put_back(name: str) -> Iterator[None]:
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _put_back(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    for module in model.modules():
        module.__dict__.pop("forward", None)
    if optimizer is not None:
        optimizer.__dict__.pop("step", None)
