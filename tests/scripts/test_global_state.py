"""What a script and a setting both set for the whole process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow


def test_settings_hold_whatever_a_script_sets_before_its_first_step(run: Run, folder: Path) -> None:
    (folder / "sets_them.py").write_text(
        "import torch, torch._dynamo\n"
        "torch.backends.cuda.enable_cudnn_sdp(True)\n"
        "torch.set_float32_matmul_precision('medium')\n"
        "torch._dynamo.config.recompile_limit = 99\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "seen = []\n"
        "for _ in range(4000):\n"
        "    model(torch.randn(4, 8)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    limit, precision = torch._dynamo.config.recompile_limit, torch.get_float32_matmul_precision()\n"
        "    seen[:] = torch.backends.cuda.cudnn_sdp_enabled(), precision, limit\n"
    )
    before = torch.get_float32_matmul_precision(), torch._dynamo.config.recompile_limit
    try:
        session, error = run(
            "sets_them.py", "scope=full,dynamic=auto,backend=aot_eager,sdpa_kernel=flash,matmul_precision=high,recompile_limit=7"
        )
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch._dynamo.config.recompile_limit = before[1]
    assert error is session.error is None
    assert vars(sys.modules["__main__"])["seen"] == [False, "high", 7]
