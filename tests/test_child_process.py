"""What a process imports first is not scanned again and again."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest

from compile_sweep.child_process import importing


def test_what_is_imported_before_torch_is_there_is_exempt_from_collections_even_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = gc.get_freeze_count()
    made: list[list[int]] = []
    with contextlib.suppress(ImportError), importing():
        made += [[one] for one in range(1000)]
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_what_is_left_of_a_first_workload_can_be_collected_when_a_second_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = gc.get_freeze_count()
    with importing():
        made = [[one] for one in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() < before + len(made)
