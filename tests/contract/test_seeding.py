"""Seeding: the same draws as torch's own, at less cost."""

from __future__ import annotations

import random
import traceback

import numpy as np
import pytest
import torch

from compile_sweep.contract.seeding import seed_all


def test_the_draws_are_torchs_and_no_stack_is_formatted_for_devices_that_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(traceback, "format_stack", lambda *_: formatted.append("a stack") or [])
        seed_all(3)
    assert len(formatted) <= torch.backends.cuda.is_built()  # where CUDA has not been used yet
    drawn = torch.rand(4), np.random.rand(4).tolist(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    assert torch.equal(drawn[0], torch.rand(4))
    assert drawn[1:] == (np.random.rand(4).tolist(), random.random())
