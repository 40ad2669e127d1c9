"""Settings of one part of a model with scope=modular: what differs from the settings of the whole."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from compile_sweep.schema.choices import WITHOUT_CUDAGRAPHS, Dynamic, Mode, Scope
from compile_sweep.schema.ddp_settings import DdpSettings
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.setting_text import as_mapping, check_name, given_fields, parse_choice, parse_switch, suggest, truncate


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """How one part is compiled. None takes the setting of the whole; SettingsError for fields that cannot be combined."""

    mode: Mode | None = None
    dynamic: Dynamic | None = None
    compile: bool | None = None
    """False runs the part eagerly; None compiles it."""

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("dynamic", Dynamic)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_choice(f"parts.….{name}", kind, value))
        if self.compile is not None:
            object.__setattr__(self, "compile", None if parse_switch("parts.….compile", self.compile) else False)
        if self.compile is False and (self.mode or self.dynamic):
            raise SettingsError("a part with compile=off is not compiled; leave out its mode and dynamic")
        _refuse_symbolic_graphs("", self.mode, self.dynamic)

    def check_against_whole(self, name: str, scope: Scope, mode: Mode | None, dynamic: Dynamic | None) -> None:
        """Refuses a part that contradicts the settings of the whole, from which it takes what it leaves out."""
        if scope is not Scope.MODULAR and self.compile is not False:
            raise SettingsError(
                f"parts act only with scope=modular, not scope={scope}; leave them out, except for a script's module with "
                "compile=off"
            )
        if self.compile is not False:
            _refuse_symbolic_graphs(f"parts.{name}: ", self.mode or mode, self.dynamic or dynamic)

    @property
    def label(self) -> str:
        """Short description for a person."""
        return "eager" if self.compile is False else " ".join(filter(None, (self.mode, self.dynamic)))


def _refuse_symbolic_graphs(where: str, mode: Mode | None, dynamic: Dynamic | None) -> None:
    if dynamic is Dynamic.TRUE and mode in WITHOUT_CUDAGRAPHS:
        raise SettingsError(f"{where}dynamic=true and CUDA graphs exclude each other in a part too; use dynamic=mark or static")


def parse_parts(values: Any) -> tuple[tuple[str, PartSettings], ...] | None:
    """Returns parts that differ from the whole, by name, from mappings or dotted names (`encoder.mode`); None for none."""
    names = [f.name for f in fields(PartSettings)]
    found: dict[str, dict[str, Any]] = {}
    for name, value in as_mapping("parts", values).items():
        if isinstance(value, PartSettings):
            found.setdefault(str(name), {}).update(given_fields(value))
        elif isinstance(value, Mapping):
            found.setdefault(str(name), {}).update(value)
        else:
            part, dot, field = str(name).rpartition(".")
            if not dot or field not in names:
                raise SettingsError(
                    f"parts.{truncate(name)} is not a setting of a part; {suggest(field, names)}, as in parts.encoder.mode"
                )
            found.setdefault(part, {})[field] = value
    parts = []
    for name, taken in sorted(found.items()):
        check_name("parts", name)
        for field in taken:
            if field not in names:
                raise SettingsError(f"parts.{name}.{truncate(field)} is not a setting of a part; {suggest(str(field), names)}")
        if (part_settings := PartSettings(**taken)) != PartSettings():
            parts.append((name, part_settings))
    return tuple(parts) or None


def left_out(name: str) -> str | None:
    """Returns the setting that leaves the part of this name eager, as a key spells it; None if a key cannot spell the name."""
    spelled = f"parts.{name}.compile=off"
    return spelled if left_out_in(spelled) else None


def left_out_in(text: str) -> str | None:
    """Returns the first setting in a text that leaves a part eager, or several joined by commas; None if there is none."""
    one = r"parts\.[\w.-]+\.compile=off"
    found = re.search(rf"\b{one}(,{one})*(?!\S)", text)
    return found[0] if found else None


def settings_of_part(parts: Sequence[tuple[str, PartSettings]] | None, module: str) -> PartSettings:
    """Returns the settings of a module that is a part, found by its dotted name or by the last component of it."""
    by_name = dict(parts or ())
    return by_name.get(module) or by_name.get(module.rpartition(".")[2]) or PartSettings()


def to_json_value(value: Any) -> Any:
    """Converts a setting's value for JSON."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, DdpSettings):
        return given_fields(value)
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {name: given_fields(item) if isinstance(item, PartSettings) else item for name, item in value}
    return list(value) if isinstance(value, tuple) else value
