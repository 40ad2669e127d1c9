"""What a search may propose: a finite, ordered set of settings, whose similarity is judged by their fields."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.setting_text import flatten, format_value
from compile_sweep.schema.settings import CompileSettings

Codes = npt.NDArray[np.int32]  # one row per setting, one column per field; equal numbers in a column are equal values

Floats = npt.NDArray[np.float64]

ABSENT = ""  # value of a field that does not apply, or that is left to torch or the workload

_ORDER = ("scope", "dynamic", "mode", "padding", "group_window", "optimizer", "attention")
"""Fields that distinguish settings first; the others follow by name."""


class Candidates:
    """Settings to choose from, at least one, without duplicates, and their fields as numbers."""

    def __init__(self, settings: Sequence[CompileSettings]) -> None:
        unique = {setting.key: setting for setting in settings}
        if not unique:
            raise ConfigError("there is no setting to search; name a recipe that leaves some")
        self.settings = tuple(unique.values())
        self.keys = tuple(unique)
        self._index = {key: index for index, key in enumerate(unique)}
        rows = [_values(setting) for setting in self.settings]
        names = sorted({name for row in rows for name in row}, key=lambda name: (_place(name), name))
        self.names = tuple(name for name in names if len({row.get(name, ABSENT) for row in rows}) > 1)
        """Fields in which any two settings differ, dotted for nested ones."""
        self.values = tuple(tuple(dict.fromkeys(row.get(name, ABSENT) for row in rows)) for name in self.names)
        """Values of each such field, spelled as in a key, in order of appearance."""
        self._code_of = [{value: code for code, value in enumerate(values)} for values in self.values]
        self.likeness: tuple[Floats, ...] = tuple(map(_likeness, self.values))
        """For each such field, how similar two of its values are, by their codes: 1 for the same, 0 for unrelated ones, between
        for numbers. The last row and column are for code -1.
        """
        self.codes: Codes = np.array([self._encoded(row) for row in rows], dtype=np.int32).reshape(len(rows), len(self.names))

    def __len__(self) -> int:
        return len(self.settings)

    def index(self, key: str) -> int | None:
        """Returns the index of the setting with this key; None if it is not a candidate."""
        return self._index.get(key)

    def encode(self, setting: CompileSettings) -> Codes:
        """Returns the codes of any setting; a value that no candidate has is -1, which resembles no other."""
        return np.array(self._encoded(_values(setting)), dtype=np.int32)

    def _encoded(self, row: dict[str, str]) -> list[int]:
        return [codes.get(row.get(name, ABSENT), -1) for name, codes in zip(self.names, self._code_of, strict=True)]


class Untried:
    """Tracks which candidates were neither proposed nor recorded."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._is_left = np.ones(len(candidates), dtype=bool)

    def __len__(self) -> int:
        return int(self._is_left.sum())

    def __contains__(self, index: int) -> bool:
        return bool(self._is_left[index])

    def take(self, index: int) -> CompileSettings:
        """Returns the candidate at this index and removes it from the untried ones."""
        self._is_left[index] = False
        return self._candidates.settings[index]

    def put_back(self, index: int) -> None:
        """Makes the candidate at this index untried again."""
        self._is_left[index] = True

    def strike(self, key: str) -> None:
        """Removes the candidate with this key, if there is one."""
        if (index := self._candidates.index(key)) is not None:
            self.take(index)

    def indices(self) -> npt.NDArray[np.intp]:
        """Returns the indices of the untried candidates."""
        return np.flatnonzero(self._is_left)


_REACH = 0.3  # part of a numeric field's values over which its likeness falls to 1/e


def _likeness(values: Sequence[str]) -> Floats:
    """Returns the likeness of a field's values. Numbers are alike by how many of the field's other numbers lie between them."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    found[:-1, :-1] = np.eye(len(values))
    if numbers := ordered_numbers(values):
        codes = sorted(numbers, key=lambda code: numbers[code])
        rank = np.arange(len(codes)) / (len(codes) - 1)
        found[np.ix_(codes, codes)] = np.exp(-np.abs(rank[:, None] - rank[None, :]) / _REACH)
    return found


def ordered_numbers(values: Sequence[str]) -> dict[int, float]:
    """Returns the numbers among a field's values by their codes; empty for fewer than three, whose order says nothing."""
    numbers = {code: float(value) for code, value in enumerate(values) if _is_number(value)}
    return numbers if len(numbers) > 2 else {}


def _is_number(value: str) -> bool:
    """Tells whether a field's value, as a key spells it, is a finite number."""
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _values(setting: CompileSettings) -> dict[str, str]:
    return {name: format_value(value) for name, value in flatten(setting.fields_that_apply())}


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
