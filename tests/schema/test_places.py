"""Whose source file a path of a stack is."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from compile_sweep.schema.causes import places

ROOT = Path(places.__file__).parents[3]


@pytest.mark.parametrize(
    "path",
    [
        "/home/ada/train.py",
        "/home/ada/compile_sweep_tests/model.py",
        "/home/ada/lib/python3/model.py",
        "/home/ada/orchestrator/model.py",
        f"{ROOT}/workloads/gpt2.py",
    ],
)
def test_what_a_person_wrote_is_their_own(path: str) -> None:
    assert not places.is_installed(path)
    place = places.place_in_own_code([("/home/ada/before.py", 1), (path, 7), (os.__file__, 3)])
    assert place == f"{os.path.basename(path)}:7"


@pytest.mark.parametrize(
    "path",
    [
        os.__file__,
        "<frozen importlib._bootstrap>",
        "<string>",
        f"{sysconfig.get_path('purelib')}/torch/nn/functional.py",
        "/opt/other/lib/python3.12/site-packages/torch/nn/functional.py",
        "/usr/lib/python3/dist-packages/timm/models.py",
        f"{ROOT}/compile_sweep/harness/measure.py",
        f"{ROOT}/orchestrator/run/worker.py",
    ],
)
def test_what_was_installed_or_measures_is_not(path: str) -> None:
    assert places.is_installed(path) or places.is_harness(path)
    assert places.place_in_own_code([(path, 7)]) == ""
    assert places.place_in_own_code([("/home/ada/train.py", 2), (path, 7)]) == "train.py:2"
