"""One setting on one workload, resolved once; measuring, warm starts, explanations and exports all use the result.

Everything that follows from the two is decided here: which modules a scope compiles, what batches are padded to, what the source
must contain, and whether the installed torch supports the settings at all.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import nn

from compile_sweep.contract.base import Workload, unwrap_ddp
from compile_sweep.contract.installed_torch import LoadedTorch, import_inductor, refuse_unknown_names, torch_version
from compile_sweep.contract.options import check_accumulation, refused_kernel
from compile_sweep.harness import distributed
from compile_sweep.harness.source import Facts, to_source
from compile_sweep.schema.ddp_settings import check_ddp_workers
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.part_settings import settings_of_part
from compile_sweep.schema.settings import CompileSettings, OptimizerKind, Scope
from compile_sweep.schema.shapes import ShapePolicy

Dimensions = Mapping[str, tuple[int, ...]]
"""Dimensions that change from batch to batch, by the name of a forward's argument."""


def modules_of_scope(settings: CompileSettings, workload: Workload, model: nn.Module) -> Sequence[str]:
    """Returns dotted names of the modules that the settings' scope compiles; `""` is the whole model."""
    if settings.scope is Scope.EAGER:
        return []
    if settings.compiles_whole:
        return [""]
    if settings.scope is Scope.MODULAR:
        return workload.parts()
    return repeated_blocks(settings, workload, model)


def repeated_blocks(settings: CompileSettings, workload: Workload, model: nn.Module) -> Sequence[str]:
    """Returns dotted names of the model's repeated blocks; raises SettingsError if the model has none."""
    blocks = workload.regions(unwrap_ddp(model))
    if not blocks:
        raise SettingsError(settings.without_blocks(f"the model of {type(workload).__name__}"))
    return blocks


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """What follows from one setting and one workload; made by `prepare`."""

    settings: CompileSettings
    workload: Workload  # the workload in the form that the settings require
    device: torch.device
    num_workers: int  # number of workers that train together
    policy: ShapePolicy  # how batches are made and padded
    _modules: Mapping[str, Dimensions] | None = field(default=None, init=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Returns the workload's optimizer; None for inference. SettingsError if another would replace its update."""
        optimizer = self.workload.optimizer(model, self.settings.optimizer)
        if optimizer is not None:
            refuse_other_update(self.settings, optimizer)
        return optimizer

    def modules(self, model: nn.Module) -> Mapping[str, Dimensions]:
        """Returns the modules of the settings' scope by dotted name, with the dynamic dimensions of their arguments.

        They are looked up in the first model only, because every model of a workload has the same ones.

        Raises:
            SettingsError: The model has no such modules.
        """
        if self._modules is None:
            names = modules_of_scope(self.settings, self.workload, model)
            # Finding the dimensions may require running the model, which only marks are worth.
            self._modules = {name: self.workload.dynamic_dims(name) if self.settings.marks else {} for name in names}
        return self._modules

    def compiled_apart(self, model: nn.Module) -> list[str]:
        """Lists the modules that are compiled one by one, without those that the settings leave eager."""
        self.modules(model)
        return self.targets

    @property
    def targets(self) -> list[str]:
        """Names of the modules that are compiled one by one, once a model was inspected; empty before."""
        parts, names = self.settings.parts, self._modules or {}
        return [name for name in names if name and settings_of_part(parts, name).compile is not False]

    def facts(self, model: nn.Module) -> Facts:
        """Returns what the source must know; raises SettingsError if the settings name what the workload lacks."""
        workload = self.workload
        refuse_memory_format(self.settings, model)
        refuse_float8(self.settings, model, self.device)
        dtype = workload.autocast_dtype(self.device)
        return Facts(
            workload=type(workload).__name__,
            device_type=self.device.type,
            torch_version=torch_version(),
            max_length=workload.max_length,
            one_shape=workload.has_one_shape,
            batch_size=workload.batch_size,
            targets=self.modules(model),
            autocast=None if dtype is None else str(dtype).removeprefix("torch."),
            attention=None if self.settings.attention is None else workload.attention_statement(self.settings.attention),
            grad_mode=None if workload.trains else workload.grad_mode,
            clip_grad_norm=workload.clip_grad_norm if workload.trains else None,
            average_decay=workload.average_decay if workload.trains else None,
            num_workers=self.num_workers,
            process_statements=tuple(workload.process_statements()),
            blocks=tuple(repeated_blocks(self.settings, workload, model)) if self.settings.changes_blocks else (),
        )

    def source(self, model: nn.Module) -> str:
        """Returns the settings as Python for this workload's model; this text is executed for measuring."""
        return to_source(self.settings, self.facts(model))

    def with_settings(self, settings: CompileSettings) -> Self:
        """Returns the workload under other settings, such as those of an eager reference, without validating them."""
        policy = self.workload.shape_policy(settings)
        return replace(self, settings=settings, policy=policy)

    def compiling(self, modules: Sequence[str]) -> Self:
        """Returns the same settings with only these modules compiled, one by one, and all others eager."""
        prepared = self.with_settings(replace(self.settings, scope=Scope.MODULAR, parts=None))
        prepared._modules = {name: {} for name in modules}
        return prepared

    def eager_counterpart(self) -> Self:
        """Returns the eager run that a run under these settings is compared with."""
        return self.with_settings(self.settings.eager_counterpart())


def prepare(
    workload: Workload, settings: CompileSettings, device: torch.device | str, *, num_workers: int | None = None
) -> Prepared:
    """Resolves a setting on a workload, for the process group's workers by default; SettingsError if it cannot work."""
    if settings.scope is not Scope.EAGER:
        import_inductor()
    device = torch.device(device)
    num_workers = distributed.num_workers() if num_workers is None else num_workers
    workload = workload.under(settings)
    name = type(workload).__name__
    check_ddp_workers(settings.ddp, num_workers, workload=name, trains=workload.trains, has_gpu=device.type == "cuda")
    if workload.has_own_step and num_workers > 1:
        raise SettingsError(
            f"the workload {name} has a step of its own, whose gradients are there before those of several workers could be "
            "averaged; use one worker per trial"
        )
    check_accumulation(
        name,
        settings,
        batch_size=workload.batch_size,
        num_workers=num_workers,
        unpadded_reason=workload.unpadded_reason if settings.accumulate else None,
    )
    refuse_unknown_names(settings, LoadedTorch())
    if (reason := refused_kernel(settings.sdpa_kernel, device.type)) is not None:
        raise SettingsError(reason)
    policy = workload.shape_policy(settings)
    return Prepared(settings=settings, workload=workload, device=device, num_workers=num_workers, policy=policy)


def refuse_memory_format(settings: CompileSettings, model: nn.Module) -> None:
    """Refuses a memory format that would not change the model, because no weights have its number of dimensions."""
    layout = settings.memory_format
    if layout is not None and not any(parameter.ndim == layout.ndim for parameter in model.parameters()):
        raise SettingsError(
            f"memory_format={layout} reorders convolutions with {layout.ndim}-D weights, and the model has none; leave it out"
        )


def refuse_float8(settings: CompileSettings, model: nn.Module, device: torch.device) -> None:
    """Refuses float8 where torchao or the device cannot compute it, or the model has no layer for it."""
    if settings.float8 is None:
        return
    from compile_sweep.harness.source_runtime import suits_float8  # loads the compiler

    asked = f"float8={settings.float8}"
    if importlib.util.find_spec("torchao") is None:
        raise SettingsError(f"{asked} needs torchao, which is not installed; run pip install torchao")
    if device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY):
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise SettingsError(
            f"{asked} needs a GPU that multiplies in float8 (H100, L40, RTX 40 or newer), and this is {what}; leave it out"
        )
    if not any(suits_float8(module) for module in model.modules()):
        raise SettingsError(
            f"{asked} replaces linear layers whose widths are multiples of 16, and the model has none that are plain nn.Linear "
            "layers without hooks; leave it out"
        )


_FLOAT8_CAPABILITY = (8, 9)  # CUDA compute capability


def refuse_other_update(settings: CompileSettings, optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizer=foreach_map for an optimizer that it would replace by a different formula."""
    if settings.optimizer is OptimizerKind.FOREACH_MAP:
        # Loads the compiler, which most plans do not need.
        from compile_sweep.harness.source_runtime import refuse_unless_plain_adam

        try:
            refuse_unless_plain_adam(optimizer)
        except TypeError as error:
            raise SettingsError(str(error)) from None


def refuse_other_update_of(workload: Workload) -> None:
    """Refuses optimizer=foreach_map for a workload before there is a model, as far as possible."""
    try:
        optimizer = workload.optimizer(torch.nn.Linear(1, 1), OptimizerKind.FOREACH)
    except Exception:  # an optimizer that needs the model's modules; a trial will find out
        return
    if optimizer is not None:
        refuse_other_update(CompileSettings(optimizer=OptimizerKind.FOREACH_MAP), optimizer)
