"""Settings of workers that train together, `ddp.NAME=value`: how `DistributedDataParallel` reduces gradients. Pure values.

Names are torch's own where torch has one. A field at None keeps torch's choice. `DdpSettings` checks what holds on any machine;
`check_ddp_workers` adds what depends on the number of workers and on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from compile_sweep.schema.choices import Scope
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import (
    Values,
    format_value,
    given_fields,
    parse_choice,
    parse_switch,
    parser,
    suggest,
    truncate,
)

USUAL_POWERSGD_RANK = 1
FIRST_POWERSGD_STEP = 2
"""torch lets PowerSGD compress from this step on: before it, the buckets are not yet in their final order."""


class Compression(StrEnum):
    """The form in which gradients are sent between workers: torch's communication hooks."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    POWERSGD = "powersgd"
    """Two thin matrices for each gradient matrix (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression")."""


class OptimizeDdp(StrEnum):
    """`torch._dynamo.config.optimize_ddp`: how the compiler handles the gradients' reduction."""

    DDP_OPTIMIZER = "ddp_optimizer"
    """Splits each graph where a gradient bucket is full, so that it is reduced while the backward continues."""
    PYTHON_REDUCER = "python_reducer"
    """Compiles the reduction into the backward with compiled autograd. Experimental in torch."""
    NO_OPTIMIZATION = "no_optimization"
    """One graph, whose gradients are all ready at its end; nothing is reduced earlier."""


class Around(StrEnum):
    """What scope=full passes to `torch.compile`."""

    MODEL = "model"
    """The model, which `DistributedDataParallel` then wraps, so that the wrapper breaks no graph."""
    WRAPPER = "wrapper"
    """`DistributedDataParallel` itself, whose forward Dynamo runs in pieces."""


_ALIASES = {"on": "ddp_optimizer", "True": "ddp_optimizer", "true": "ddp_optimizer",
            "off": "no_optimization", "False": "no_optimization", "false": "no_optimization"}  # fmt: skip
"""`optimize_ddp` also accepts a bool in torch."""

_DEAD_MODE = "python_reducer_without_compiled_forward"

_C_REDUCERS = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "batched_grad_copy")
"""Options of `DistributedDataParallel`'s own reducer, which python_reducer replaces."""


def _parse_optimize_ddp(name: str, value: object) -> OptimizeDdp:
    if value == _DEAD_MODE:
        raise SettingsError(f"torch accepts {_DEAD_MODE} and ignores it; use python_reducer or no_optimization")
    mode: OptimizeDdp = parse_choice(name, OptimizeDdp, _ALIASES.get(str(value), value))
    return mode


def _setting(values: Values, torch_default: object = None) -> Any:
    """Declares a field by its values, as `parser` takes them, and by torch's default, which is stored as None."""
    return field(default=None, metadata={"parse": parser(values), "torch_default": torch_default})


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings:
    """How gradients are reduced. None keeps torch's choice; SettingsError for fields that cannot be combined."""

    bucket_cap_mb: int | None = _setting("MiB")
    """MiB of gradients reduced together. By default torch takes 25, and 1 for the first bucket."""
    compression: Compression | None = _setting(Compression, Compression.NONE)
    powersgd_rank: int | None = _setting("ranks", USUAL_POWERSGD_RANK)
    """Columns of each PowerSGD matrix."""
    powersgd_start: int | None = _setting("steps", FIRST_POWERSGD_STEP)
    """The first step that PowerSGD compresses; earlier steps reduce gradients uncompressed."""
    optimize_ddp: OptimizeDdp | None = _setting(_parse_optimize_ddp, OptimizeDdp.DDP_OPTIMIZER)
    around: Around | None = _setting(Around, Around.MODEL)
    gradient_as_bucket_view: bool | None = _setting(parse_switch, torch_default=False)
    """Make gradients views of the buckets, which saves a copy and its memory."""
    static_graph: bool | None = _setting(parse_switch, torch_default=False)
    """Promise that the same parameters get gradients in every step."""
    find_unused_parameters: bool | None = _setting(parse_switch, torch_default=False)
    """Search each step for parameters that get no gradient."""
    batched_grad_copy: bool | None = _setting(parse_switch, torch_default=False)
    """Copy gradients into their bucket with one kernel instead of one each. Needs torch 2.12."""
    broadcast_buffers: bool | None = _setting(parse_switch, torch_default=True)
    """Off lets each worker keep its own buffers, such as running statistics, instead of worker 0's before each forward."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if (value := getattr(self, one.name)) is not None:
                self._set(one.name, one.metadata["parse"](name=f"ddp.{one.name}", value=value))
        self._check()
        for one in fields(self):
            if getattr(self, one.name) == one.metadata["torch_default"]:
                self._set(one.name, None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the value is frozen for everyone else

    def _check(self) -> None:
        for name in ("powersgd_rank", "powersgd_start"):
            if getattr(self, name) is not None and self.compression is not Compression.POWERSGD:
                raise SettingsError(f"ddp.{name} belongs to PowerSGD; set ddp.compression=powersgd, or leave ddp.{name} out")
        if self.powersgd_start is not None and self.powersgd_start < FIRST_POWERSGD_STEP:
            raise SettingsError(
                f"ddp.powersgd_start={self.powersgd_start} is before the buckets have their final order; "
                f"use {FIRST_POWERSGD_STEP} or more"
            )
        if self.static_graph and self.find_unused_parameters:
            raise SettingsError(
                "ddp.static_graph finds unused parameters once, in the first step; leave ddp.find_unused_parameters out, or "
                "ddp.static_graph if they change from step to step"
            )
        if self.optimize_ddp is OptimizeDdp.PYTHON_REDUCER:
            for name in _C_REDUCERS:
                if getattr(self, name):
                    raise SettingsError(
                        f"ddp.{name} is for torch's own reducer, which optimize_ddp=python_reducer replaces; leave out one"
                    )
            if self.compression is Compression.POWERSGD:
                raise SettingsError(
                    "ddp.compression=powersgd compresses buckets, and optimize_ddp=python_reducer has none; use fp16 or bf16"
                )

    @property
    def label(self) -> str:
        """Short description for a person."""
        return ", ".join(f"{name.replace('_', ' ')} {format_value(value)}" for name, value in given_fields(self).items())

    def for_eager(self) -> DdpSettings | None:
        """Returns the same reduction without the compiler's options; None if only torch's defaults are left."""
        return _or_none(replace(self, optimize_ddp=None, around=None))

    def exact(self) -> DdpSettings | None:
        """Returns the same reduction in full precision. PowerSGD stays: it is a different update, not a rounded one."""
        return self if self.compression is Compression.POWERSGD else _or_none(replace(self, compression=None))


def parse_ddp(value: Any) -> DdpSettings | None:
    """Parses settings from a mapping of fields; None if they only state torch's defaults."""
    if value is None or isinstance(value, DdpSettings):
        return None if value is None else _or_none(value)
    if not isinstance(value, Mapping):
        raise SettingsError(f"ddp={truncate(value)} is not a mapping of settings; write it like ddp.bucket_cap_mb=100")
    names = [f.name for f in fields(DdpSettings)]
    for name in value:
        if name not in names:
            raise SettingsError(f"ddp.{name} is not a setting; {suggest(str(name), names)}")
    return _or_none(DdpSettings(**{str(name): one for name, one in value.items()}))


def check_ddp_with_scope(ddp: DdpSettings, scope: Scope, *, fullgraph: bool | None, static_gradients: bool | None) -> None:
    """Refuses DDP settings that contradict the other fields of the same settings."""
    for name in ("optimize_ddp", "around"):
        if scope is Scope.EAGER and getattr(ddp, name) is not None:
            raise SettingsError(f"ddp.{name} controls the compiler, and scope=eager compiles nothing; leave it out")
    if ddp.around is Around.WRAPPER:
        if scope not in (Scope.FULL, Scope.NESTED):
            raise SettingsError(f"ddp.around=wrapper compiles the whole model, scope={scope} only parts of it; use scope=full")
        if fullgraph:
            raise SettingsError(
                "fullgraph=on cannot hold across DistributedDataParallel, whose forward breaks the graph so that gradients can "
                "be reduced; leave out ddp.around=wrapper or fullgraph"
            )
        if ddp.optimize_ddp is OptimizeDdp.PYTHON_REDUCER:
            raise SettingsError("optimize_ddp=python_reducer leaves the wrapper empty; leave ddp.around=wrapper out")
    if static_gradients and ddp.gradient_as_bucket_view:
        raise SettingsError(
            "ddp.gradient_as_bucket_view already keeps gradients at fixed addresses in the buckets, so that the tensors of "
            "static_gradients would not be used; leave one of them out"
        )
    if ddp.optimize_ddp is OptimizeDdp.PYTHON_REDUCER and static_gradients:
        raise SettingsError(
            "optimize_ddp=python_reducer compiles the backward again and decides where gradients are; leave static_gradients out"
        )


_NEEDS_NCCL = (Compression.BF16, Compression.POWERSGD)
"""torch's bfloat16 hook rejects gloo. PowerSGD's hook sends several messages per bucket, the later ones from callbacks, which
gloo runs on its own threads: messages of two buckets got mixed up, and the process was aborted."""


def check_ddp_workers(
    ddp: DdpSettings | None, num_workers: int, *, workload: str, trains: bool = True, has_gpu: bool = True
) -> None:
    """Refuses DDP settings for one worker, for inference, or for a backend other than NCCL where they need it."""
    if ddp is None:
        return
    name, value = next(iter(given_fields(ddp).items()))
    word = f"ddp.{name}={format_value(value)}"
    if not trains:
        raise SettingsError(f"the workload {workload} only infers and has no gradients to reduce; leave {word} out")
    if num_workers == 1:
        raise SettingsError(f"{word} needs several workers, and there is one; add --workers-per-trial 2 or more, or leave it out")
    if ddp.compression in _NEEDS_NCCL and not has_gpu:
        raise SettingsError(f"ddp.compression={ddp.compression} needs NCCL, and NCCL needs GPUs; use fp16")


def _or_none(ddp: DdpSettings) -> DdpSettings | None:
    return None if ddp == DdpSettings() else ddp
