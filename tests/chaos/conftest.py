"""How much of the chaos suite runs, with which seed, and where its table is written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena import Arenas, temporary_folder
from fault_table import FaultTable


def pytest_addoption(parser: pytest.Parser) -> None:
    """Registered if tests/chaos is named on the command line, as in `make chaos`; otherwise the defaults below apply."""
    group = parser.getgroup("chaos")
    group.addoption("--chaos", choices=["short", "full"], default="short", help="short: what `make test` runs; full: all of it")
    group.addoption("--chaos-seed", type=int, default=None, help="of the random part; by default another each time, printed")
    group.addoption("--chaos-rounds", type=int, default=3, help="sweeps of the random part")
    group.addoption("--write-reliability", default=None, metavar="FILE", help="rewrite the table of faults in this file")


@pytest.fixture(scope="session")
def is_full(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--nightly") or pytestconfig.getoption("--chaos", default="short") == "full")


@pytest.fixture
def only_in_full(is_full: bool) -> None:
    """Skips what takes too long for every run."""
    if not is_full:
        pytest.skip("part of `make nightly` and `make chaos`")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    chosen = pytestconfig.getoption("--chaos-seed", default=None)
    return int(chosen) if chosen is not None else random.SystemRandom().randrange(1_000_000)


@pytest.fixture(scope="session")
def rounds(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--chaos-rounds", default=3))


@pytest.fixture(scope="session")
def temporary() -> Iterator[Path]:
    yield from temporary_folder()


@pytest.fixture
def arenas(tmp_path: Path, temporary: Path) -> Iterator[Arenas]:
    made = Arenas(tmp_path, temporary)
    yield made
    made.close()


@pytest.fixture(scope="session")
def fault_table(pytestconfig: pytest.Config) -> Iterator[FaultTable]:
    """Writes what the tests report about their faults to the file named on the command line."""
    table = FaultTable()
    yield table
    if target := pytestconfig.getoption("--write-reliability", default=None):
        table.write(Path(target))
