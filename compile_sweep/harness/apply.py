"""Applies `CompileSettings` to a model and its optimizer; the one place that touches `torch.compile` and its configuration.

What is applied is the text that `source.py` writes, executed: the code that is measured is the code that is exported. Replaced
forwards and torch's process-wide configuration, including that of gradient reduction, are restored when the block ends.
"""

import hashlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Batch
from compile_sweep.contract.installed_torch import config_place
from compile_sweep.contract.precision import preserve_precision
from compile_sweep.harness.outputs import digest, tensors_of
from compile_sweep.harness.prepare import Prepared
from compile_sweep.harness.source import Facts, autocast_of, process_config, to_source
from compile_sweep.schema.causes.places import SOURCE_PREFIX
from compile_sweep.schema.settings import CompileSettings, Scope

_WRAPPERS_MODULE = "torch.nn.parallel.distributed"


@contextmanager
def reducing_put_back() -> Iterator[None]:
    """Restores the state of gradient reduction after the block, including what optimize_ddp=python_reducer changes."""
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
    """Uses torch's own reducer for models that are wrapped inside the block, whatever settings are in force around it.

    An eager reference is wrapped during the run under test, and `DistributedDataParallel` looks up its reducer when it wraps.
    """
    with torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False):
        yield


class TrainStep:
    """Forward, backward and optimizer step on one batch, under some compile settings."""

    def __init__(self, step: Callable[..., Tensor], source: str, schedule: Any = None) -> None:
        self._step = step
        self._schedule = schedule
        self.source = source

    def __call__(self, batch: Batch, *, before_update: Callable[[], None] | None = None) -> Tensor:
        """Runs one step; returns its loss, detached, in memory no later step overwrites. `before_update` may read gradients."""
        loss = self._step(dict(batch.inputs), before_update)
        if self._schedule is not None:
            self._schedule.step()
        return loss

    def forward_and_backward(self, batch: Batch) -> float:
        """Runs a step up to its update and returns the loss; gradients are kept, and the optimizer does not run."""
        try:
            self._step(dict(batch.inputs), _stop_before_update)
        except _BeforeUpdate as stopped:
            return _loss_of_stopped(stopped.__traceback__)
        raise AssertionError("the step did not say that its gradients are there")


class _BeforeUpdate(Exception):
    """Ends a step before its update."""


def _stop_before_update() -> None:
    raise _BeforeUpdate


def _loss_of_stopped(traceback: TracebackType | None) -> float:
    """Returns the loss of a stopped step from its frame; a loss scaler in it is reset so that it forgets the gradients."""
    while traceback is not None:
        found = traceback.tb_frame.f_locals
        if os.path.basename(traceback.tb_frame.f_code.co_filename).startswith(SOURCE_PREFIX) and "loss" in found:
            if (scaler := found.get("scaler")) is not None:
                before = scaler.state_dict()
                scaler.update()  # otherwise the next step could not unscale its own gradients
                scaler.load_state_dict(before)
            return float(found["loss"].detach())
        traceback = traceback.tb_next
    raise AssertionError("the step has no loss")


class InferenceStep(TrainStep):
    """A forward pass on one batch, without gradients, under some compile settings.

    The model's outputs are in `outputs` until the next call. A call returns their digest, a scalar like a loss.
    """

    outputs: Sequence[Tensor] = ()

    def __call__(self, batch: Batch, *, before_update: Callable[[], None] | None = None) -> Tensor:
        self.outputs = ()  # frees their memory for this call
        self.outputs = tensors_of(self._step(dict(batch.inputs)))
        return digest(self.outputs)


@contextmanager
def applied(prepared: Prepared, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[TrainStep]:
    """Yields a training or inference step of `model` under the prepared settings; nothing compiles before its first call.

    Args:
        prepared: The settings, on the model's workload.
        model: A model on the prepared device; with several workers, the step wraps it in `DistributedDataParallel`.
        optimizer: Optimizer over the model's parameters; None for an inference-only workload.

    Raises:
        SettingsError: The settings name a part or an attention implementation that does not exist.
    """
    settings, facts = prepared.settings, prepared.facts(model)
    source = to_source(settings, facts)
    with ExitStack() as undo:
        if facts.process_statements:  # these statements run with the rest of the source, but must not outlast it
            undo.enter_context(prepared.workload.process_settings())
        undo.enter_context(preserve_precision())
        undo.enter_context(_environment_put_back("TRITON_PTXAS_PATH"))
        for name in process_config(settings, facts.torch_version):
            config, setting = config_place(name)
            undo.enter_context(config.patch({setting: getattr(config, setting)}))  # puts it back
        undo.enter_context(reducing_put_back())
        if settings.stance is not None:
            undo.callback(torch.compiler.set_stance, "default")
        undo.callback(_put_back, model, optimizer)
        with reducing_as_usual() if settings.scope is Scope.EAGER else nullcontext():
            written = undo.enter_context(_executed(source))
            if torch._dynamo.config.caching_precompile:
                written["compile_model"] = _called_where_it_runs(written["compile_model"], settings, facts)
            make_step = written["make_step"]
            made = make_step(model) if optimizer is None else make_step(model, optimizer)
        schedule = None if optimizer is None else prepared.workload.schedule(optimizer)
        yield InferenceStep(made, source) if optimizer is None else TrainStep(made, source, schedule)


@contextmanager
def _executed(source: str) -> Iterator[dict[str, Any]]:
    """Yields the namespace of a module with this source, which can be imported while the block lasts.

    Torch looks up a function that another process traced by file and module, so equal sources get equal names.
    """
    name = f"{SOURCE_PREFIX}{hashlib.sha256(source.encode()).hexdigest()[:16]}"
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
    """Returns `compile_model` wrapped to run under the step's own autocast and gradient mode.

    `torch.compile` loads traces that Dynamo made in another process and builds their tensor guards for the dispatch keys of that
    moment. Guards built outside autocast or inference mode fail inside it, and the new trace does not survive the one that was
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
