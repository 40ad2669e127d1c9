"""What a script and a setting both set for the whole process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Restores what these scripts set for the whole process."""
    before = torch.get_float32_matmul_precision(), torch._dynamo.config.recompile_limit
    yield
    torch.set_float32_matmul_precision(before[0])
    torch._dynamo.config.recompile_limit = before[1]


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
    session, error = run(
        "sets_them.py", "scope=full,dynamic=auto,backend=aot_eager,sdpa_kernel=flash,matmul_precision=high,recompile_limit=7"
    )
    assert error is session.error is None
    assert vars(sys.modules["__main__"])["seen"] == [False, "high", 7]


def test_a_script_that_sets_something_else_within_its_loop_is_told_that_settings_have_no_effect(run: Run, folder: Path) -> None:
    (folder / "sets_again.py").write_text(
        "import torch\n"
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4000):\n"
        "    torch.set_float32_matmul_precision('medium')\n"
        "    with sdpa_kernel(SDPBackend.MATH):\n"
        "        loss = model(torch.randn(4, 8)).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("sets_again.py", "scope=eager,sdpa_kernel=efficient,matmul_precision=high")
    same, _ = run("sets_again.py", "scope=eager,sdpa_kernel=math")
    assert error is session.error is None
    assert [sentence.split(",")[0] for sentence in session.missed] == [
        "matmul_precision=high has no effect",
        "sdpa_kernel=efficient has no effect",
    ]
    assert same.missed == []
