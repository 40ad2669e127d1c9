"""What the installed torch knows by name, and the refusal of settings that name something else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol, get_origin

from compile_sweep.schema.ddp_settings import DdpSettings
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import Value, format_value, suggest
from compile_sweep.schema.settings import CONFIG_MODULES, CompileSettings

ANY = "any"
"""Stands for the type of an option whose values torch does not check."""


class InstalledTorch(Protocol):
    """Names that the installed torch knows. Each is looked up when first asked for, because that may load the compiler."""

    def inductor_options(self) -> Mapping[str, str]:
        """Returns Inductor's options with the names of their types; `ANY` where torch checks none."""

    def config_options(self, module: str) -> Mapping[str, str]:
        """Returns the settings of one of torch's configuration modules, such as `torch._dynamo.config`, as `inductor_options`."""

    def backends(self) -> Sequence[str]:
        """Returns the back-ends of `torch.compile`."""

    def ddp_arguments(self) -> Sequence[str]:
        """Returns the arguments of `DistributedDataParallel`."""


class LoadedTorch:
    """The torch of this process."""

    def inductor_options(self) -> Mapping[str, str]:
        """Returns Inductor's options with the names of their types; `ANY` where torch checks none."""
        import torch
        from torch._inductor import config

        types: dict[str, Any] = {name: config.get_type(name) for name in torch._inductor.list_options()}  # type: ignore[attr-defined]
        return {name: _type_name(kind) for name, kind in types.items()}

    def config_options(self, module: str) -> Mapping[str, str]:
        """Returns the settings of one of torch's configuration modules, such as `torch._dynamo.config`, as `inductor_options`."""
        config = config_module(module)
        names = [name for name in config._config if not name.startswith("_") and name != "TYPE_CHECKING"]
        return {name: _type_name(config.get_type(name)) for name in names}

    def backends(self) -> Sequence[str]:
        """Returns the back-ends of `torch.compile`."""
        import torch

        return torch._dynamo.list_backends(exclude_tags=())

    def ddp_arguments(self) -> Sequence[str]:
        """Returns the arguments of `DistributedDataParallel`."""
        from torch.nn.parallel import DistributedDataParallel

        return list(inspect.signature(DistributedDataParallel.__init__).parameters)


def config_module(name: str) -> Any:
    """One of torch's configuration modules, by the names that `CONFIG_MODULES` has for them."""
    assert name in CONFIG_MODULES.values()
    return import_module(name)


def _type_name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (list, dict, tuple, set):
        return str(origin.__name__)
    return ANY if origin is not None or not isinstance(kind, type) else kind.__name__  # of unions, torch checks nothing


def refuse_unknown_names(settings: CompileSettings, installed: InstalledTorch) -> None:
    """Refuses what the installed torch does not know by name, and options whose values it would not take.

    Raises:
        SettingsError: an Inductor option, a back-end or an argument; says which is meant, probably, or what the option takes.
    """
    refuse_unknown_arguments(settings.ddp, installed)
    known = installed.inductor_options() if settings.options else {}
    for name, value in settings.options or ():
        if name not in known:
            every = "torch._inductor.list_options() names them"
            raise SettingsError(f"Inductor has no option {name!r}; {_nearest_of_many(name, list(known), every)}")
        _refuse_other_type(f"inductor.{name}", value, known[name])
    for field, module in CONFIG_MODULES.items():
        known = installed.config_options(module) if getattr(settings, field) else {}
        for name, value in getattr(settings, field) or ():
            if name not in known:
                every = f"{module} has them"
                raise SettingsError(f"{module} has no setting {name!r}; {_nearest_of_many(name, list(known), every)}")
            _refuse_other_type(f"{field}.{name}", value, known[name])
    backends = installed.backends() if settings.backend else ()
    if settings.backend and settings.backend not in backends:
        raise SettingsError(f"torch.compile has no back-end {settings.backend!r}; {suggest(settings.backend, backends)}")


def refuse_unknown_arguments(ddp: DdpSettings | None, installed: InstalledTorch) -> None:
    """Refuses what the installed `DistributedDataParallel` cannot do.

    Raises:
        SettingsError: it does not take the argument.
    """
    if ddp is not None and ddp.batched_grad_copy and "batched_grad_copy" not in installed.ddp_arguments():
        raise SettingsError(f"ddp.batched_grad_copy is there from torch 2.12 on, and this is {version('torch')}; leave it out")


_WRITTEN = {
    "bool": (bool, "use on or off"),
    "int": (int, "use a whole number"),
    "float": (float, "use a number with a point, such as 1.0"),
    "str": (str, "use text that is no number and no switch"),
    "tuple": (tuple, "use a list such as 16/32"),
}
"""Types of options whose values a setting can write, with how a person writes one."""


def _refuse_other_type(name: str, value: Value, wanted: str) -> None:
    """Refuses a value that `torch.compile` would refuse, which it does in the middle of a trial."""
    kind, able = _WRITTEN.get(wanted, (None, f"leave it out: a setting spells no {wanted}"))
    if wanted != ANY and (kind is None or not isinstance(value, kind)):
        raise SettingsError(f"{name}={format_value(value)} is not a value that torch takes there; {able}")


def _nearest_of_many(name: str, known: list[str], every: str) -> str:
    hint = suggest(name, known)
    return hint if hint.startswith("did you mean") else every
