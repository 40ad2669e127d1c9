"""Short names of the settings of one sweep: an id for each, and a few words on how it differs from what is run today.

The ids are A1, A2, … in the order in which settings were first recorded. Records are only ever appended, so an id holds while the
sweep grows and after it is resumed. `DIR:A7` names a setting wherever its text would do.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from compile_sweep.schema import record as records
from compile_sweep.schema.choices import Mode, Scope
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.setting_text import BATCH_SIZE, describe
from compile_sweep.schema.settings import CompileSettings

LONGEST = 72  # characters of a difference, so that it fits a line of 80 with its id; what does not fit is counted

_ID = re.compile(r"A[1-9]\d{0,8}")


def setting_ids(settings_keys: Iterable[str]) -> dict[str, str]:
    """The id of each setting, by its key, in the order in which the sweep first recorded it."""
    return {key: f"A{number}" for number, key in enumerate(dict.fromkeys(settings_keys), start=1)}


def difference(settings: CompileSettings, baseline: CompileSettings | None = None) -> str:
    """How settings differ from the baseline, in at most about `LONGEST` characters.

    What both say, and torch's default mode, go without saying; what only the baseline says is given as `no …`.
    """
    said = _step_first(describe(settings))
    if settings == baseline or settings.as_written:
        return _fitting(list(said.values()))
    ours = {} if baseline is None else describe(baseline)
    if said.get("mode") == Mode.DEFAULT:
        del said["mode"]
    words = [word for name, word in said.items() if name == "scope" or ours.get(name) != word]
    if baseline is not None and not baseline.as_written:
        usual = {"optimizer": f"{settings.optimizer} optimizer", "padding": f"pad to {settings.padding}"}
        gone = [name for name in ours if name not in describe(settings)]
        if settings.scope is not Scope.EAGER:  # how compiled code pads follows from how it meets lengths
            usual["padding"] = ""
        words += [word for name in gone if (word := usual.get(name, f"no {ours[name]}"))]
    return _fitting(words)


def _step_first(said: Mapping[str, str]) -> dict[str, str]:
    """Puts what changes the meaning of a step right behind the scope, so that it is never among the words that do not fit."""
    first = ("scope", BATCH_SIZE, "accumulate")
    return {name: said[name] for name in first if name in said} | dict(said)


def _fitting(words: list[str]) -> str:
    """As many of the words as fit, at least the first, and how many more there are."""
    kept = words[:1]
    for word in words[1:]:
        if len(", ".join([*kept, word])) > LONGEST:
            break
        kept.append(word)
    left_out = len(words) - len(kept)
    return ", ".join([*kept, *([f"+{left_out}"] if left_out else [])])


def setting_names(settings_keys: Iterable[str], baseline_key: str | None = None) -> dict[str, str]:
    """Id and difference of each setting, such as `A7 full, mark, fused optimizer`, by its key."""
    baseline = None if baseline_key is None else CompileSettings.parse(baseline_key)
    ids = setting_ids(settings_keys)
    return {key: f"{own} {difference(CompileSettings.parse(key), baseline)}" for key, own in ids.items()}


def find_setting(ids: Mapping[str, str], name: str) -> str | None:
    """The key of the setting with this id; None if `name` is not an id. Raises ConfigError if no setting has it."""
    return _setting_of(ids, name) if _ID.fullmatch(name) else None


def _setting_of(ids: Mapping[str, str], name: str) -> str:
    if (key := next((key for key, own in ids.items() if own == name), None)) is None:
        most = f"its settings are A1 to A{len(ids)}" if ids else "it has no record yet"
        raise ConfigError(f"the sweep has no setting {name}; {most}")
    return key


def is_name(text: str) -> bool:
    """Whether text may be `DIR:A7`."""
    folder, _, name = text.rpartition(":")
    return bool(folder and _ID.fullmatch(name))


def resolve_name(text: str) -> str:
    """Text that spells settings, with `DIR:A7` replaced by the key of that setting of the sweep in DIR, which must exist."""
    folder, _, name = text.rpartition(":")
    if not is_name(text) and (not folder or not Path(folder).is_dir() or Path(text).exists()):
        return text
    if not Path(folder).is_dir():
        raise ConfigError(f"{text!r} names setting {name} of the sweep in {folder}, and there is no such folder")
    return _setting_of(setting_ids(one.settings_key for one in records.read(Path(folder))), name)
