"""Names that the installed torch knows, and the refusal of settings with other names."""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol, get_origin

from compile_sweep.schema.choices import Mode
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import Value, format_value, is_backend_list, suggest
from compile_sweep.schema.settings import CONFIG_MODULES, CompileSettings

_OPTION_OF_LITE = "fallback_by_default"  # inductor's option that mode=lite turns on, and that came with it
ANY = "any"  # type of an option whose values torch does not check


def private(module: str, name: str) -> Any:
    """Returns a private name of torch; None if the installed torch lacks it, so that what depends on it is left out."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def outside_of_transforms() -> AbstractContextManager[object]:
    """Leaves transforms of torch.func, such as vmap, for a while: inside of them weights are wrapped and draws are refused."""
    clear = private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
    return nullcontext() if clear is None else clear()


def torch_version() -> tuple[int, int]:
    """Returns the installed torch's major and minor version."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


class InstalledTorch(Protocol):
    """Names that the installed torch knows. Each is looked up at first use, because that may load the compiler."""

    def inductor_options(self) -> Mapping[str, str]:
        """Returns the types of Inductor's options, by name; `ANY` if torch does not check them."""

    def config_options(self, module: str) -> Mapping[str, str]:
        """Returns the types of the settings in one of torch's configuration modules, such as `torch._dynamo.config`, by name."""

    def backends(self) -> Sequence[str]:
        """Returns the back-ends of `torch.compile`."""

    def ddp_arguments(self) -> Sequence[str]:
        """Returns the arguments of `DistributedDataParallel`."""


class LoadedTorch:
    """The torch of this process."""

    def inductor_options(self) -> Mapping[str, str]:
        import torch
        from torch._inductor import config

        types: dict[str, Any] = {name: config.get_type(name) for name in torch._inductor.list_options()}  # type: ignore[attr-defined]
        return {name: _type_name(kind) for name, kind in types.items()}

    def config_options(self, module: str) -> Mapping[str, str]:
        config: Any = import_module(module)
        names = [name for name in config._config if not name.startswith("_") and name != "TYPE_CHECKING"]
        return {name: _type_name(config.get_type(name)) for name in names}

    def backends(self) -> Sequence[str]:
        import torch

        return torch._dynamo.list_backends(exclude_tags=())

    def ddp_arguments(self) -> Sequence[str]:
        from torch.nn.parallel import DistributedDataParallel

        return list(inspect.signature(DistributedDataParallel.__init__).parameters)


def config_place(name: str) -> tuple[Any, str]:
    """Returns the configuration module that holds a setting, given as in `CompileSettings.config`, and its name there."""
    module, _, setting = name.rpartition(".")
    return import_module(module), setting


def _type_name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (list, dict, tuple, set):
        return str(origin.__name__)
    return ANY if origin is not None or not isinstance(kind, type) else kind.__name__  # torch does not check unions


def refuse_unknown_names(settings: CompileSettings, installed: InstalledTorch) -> None:
    """Refuses names that the installed torch does not know, and values that its options do not accept, and suggests others."""
    if settings.ddp is not None and settings.ddp.batched_grad_copy and "batched_grad_copy" not in installed.ddp_arguments():
        raise SettingsError(f"ddp.batched_grad_copy is there from torch 2.12 on, and this is {version('torch')}; leave it out")
    modes = {settings.mode, *(part.mode for _, part in settings.parts or ())}
    if Mode.LITE in modes and _OPTION_OF_LITE not in installed.inductor_options():
        raise SettingsError(f"torch {version('torch')} has no mode=lite; leave it out")
    if settings.options:
        known, where = installed.inductor_options(), "torch._inductor.list_options() names them"
        _refuse_unknown_options("inductor", settings.options, known, "Inductor has no option", where)
        _refuse_tuned_backends(settings)
    for field, module in CONFIG_MODULES.items():
        if written := getattr(settings, field):
            _refuse_unknown_options(
                field, written, installed.config_options(module), f"{module} has no setting", f"{module} has them"
            )
    backends = installed.backends() if settings.backend else ()
    if settings.backend and settings.backend not in backends:
        raise SettingsError(f"torch.compile has no backend {settings.backend!r}; {suggest(settings.backend, backends)}")


_TUNED_BACKENDS = ("ATEN", "TRITON", "CUTLASS", "CUTEDSL", "NVGEMM", "FLYDSL", "CK", "CKTILE", "CPP")
"""Back-ends that max-autotune can choose from, of torch 2.11 to 2.15, which ignores all other names without a word."""


def _refuse_tuned_backends(settings: CompileSettings) -> None:
    """Refuses back-ends for max-autotune that do not exist."""
    for name, value in settings.inductor_options.items():
        if not is_backend_list(name):
            continue
        for backend in str(value).upper().replace(" ", "").split(","):
            if backend not in _TUNED_BACKENDS:
                raise SettingsError(f"inductor.{name} has no back-end {backend!r}; {suggest(backend, _TUNED_BACKENDS)}")


def _refuse_unknown_options(
    prefix: str, written: Iterable[tuple[str, Value]], known: Mapping[str, str], missing: str, where: str
) -> None:
    """Refuses options that torch does not have, or whose values it does not accept."""
    for name, value in written:
        if name not in known:
            hint = suggest(name, list(known))
            raise SettingsError(f"{missing} {name!r}; {hint if hint.startswith('did you mean') else where}")
        _refuse_other_type(f"{prefix}.{name}", value, known[name])


_WRITTEN = {
    "bool": (bool, "use on or off"),
    "int": (int, "use a whole number"),
    "float": (float, "use a number with a point, such as 1.0"),
    "str": (str, "use text that is not a number and no switch"),
    "tuple": (tuple, "use a list such as 16/32"),
}
"""Types of options that a setting can express, and how a person writes their values."""


def _refuse_other_type(name: str, value: Value, wanted: str) -> None:
    """Refuses a value that `torch.compile` would refuse in the middle of a trial."""
    kind, able = _WRITTEN.get(wanted, (None, f"leave it out: a setting spells no {wanted}"))
    if wanted != ANY and (kind is None or not isinstance(value, kind)):
        raise SettingsError(f"{name}={format_value(value)} is not a value that torch takes there; {able}")


def import_inductor() -> None:
    """Imports what Inductor needs, without warnings, which a script may make errors: torch's modules warn of other ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("torch._inductor.compile_fx")
