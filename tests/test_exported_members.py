"""Every public name is exported once, from the `__init__` of its package."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType

import pytest

TOP = ("analysis", "compile_sweep", "orchestrator", "workloads")


def exporting_packages() -> list[str]:
    """Returns the packages, and their subpackages, that export anything."""
    below = [
        found.name
        for name in TOP
        for found in walk_packages(import_module(name).__path__, prefix=f"{name}.")
        if found.ispkg and hasattr(import_module(found.name), "__all__")
    ]
    return [*TOP, *below]


def in_order(names: list[str]) -> list[str]:
    """Sorts constants, then classes, then the rest, each by name with numbers as numbers, like ruff's RUF022."""

    def kind(name: str) -> int:
        return 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2

    def natural(name: str) -> list[tuple[int, str]]:
        return [(int(digits or 0), word) for word, digits in re.findall(r"(\D+)(\d*)|$", name)]

    return sorted(names, key=lambda name: (kind(name), natural(name)))


@pytest.mark.parametrize("name", TOP)
def test_a_package_says_what_it_exports(name: str) -> None:
    assert hasattr(import_module(name), "__all__"), f"{name}/__init__.py has no __all__"


@pytest.mark.parametrize("name", exporting_packages())
def test_exports_resolve_and_are_in_order(name: str) -> None:
    package = import_module(name)
    exported = list(getattr(package, "__all__", []))
    assert [missing for missing in exported if not hasattr(package, missing)] == []
    assert exported == in_order(exported)
    assert [private for private in exported if private.startswith("_")] == []


def test_nothing_is_exported_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name in exporting_packages():
        for exported in getattr(import_module(name), "__all__", []):
            # A submodule may have a name that another package exports: they are different things.
            if not isinstance(getattr(import_module(name), exported, None), ModuleType):
                homes[exported].append(name)
    assert {name: packages for name, packages in homes.items() if len(packages) > 1} == {}
