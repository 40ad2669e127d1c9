"""What a script's first steps show of its losses, its batches and its optimizer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_sweep.schema.causes.remedies import OF_THE_LOSS, remedy_of
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import session_results
from compile_sweep.script.apply.in_place import apply_to_losses
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

AOT = "scope=full,dynamic=auto,backend=aot_eager"

AS_IT_IS = "scope=eager,as_written=on"


def test_a_loss_whose_shapes_keep_changing_is_left_out_of_cuda_graphs(run: Run, folder: Path) -> None:
    """A detector's loss of the points with an object ran at half of eager's speed on an H200: a CUDA graph for each number."""
    (folder / "chosen.py").write_text(
        "import torch\n"
        "from torch.nn import functional as F\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4000):\n"
        "    scores = model(torch.randn(16, 8))\n"
        "    chosen = torch.arange(16) < 4 + step % 12\n"
        "    loss = F.mse_loss(scores[chosen], scores[chosen].detach() + 1) + F.l1_loss(scores, torch.zeros(16, 8))\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("chosen.py", f"{AOT},compile_loss=on")
    assert error is session.error is None
    assert session.found.loss_functions == ["mse_loss", "l1_loss"]
    assert session.missed == []
    before = nn.functional.mse_loss, nn.functional.l1_loss
    with ExitStack() as until:
        settings = CompileSettings.parse("scope=full,mode=reduce-overhead,compile_loss=on")
        (told,) = apply_to_losses(settings, session.found, until)
        assert told.startswith("mse_loss stays eager")
        assert [nn.functional.mse_loss is before[0], nn.functional.l1_loss is before[1]] == [True, False]


@pytest.mark.parametrize(("size", "told"), [("8 + 8 * (step // 12)", True), ("8 + 8 * (step % 9 == 8)", False), ("8", False)])
def test_batches_that_grow_as_training_goes_on_are_told(size: str, told: bool, run: Run, folder: Path) -> None:
    """Settings whose timing began later were measured with larger pictures, and called slower without a reason."""
    (folder / "grows.py").write_text(
        "import torch\n"
        "model = torch.nn.Conv2d(3, 4, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4000):\n"
        f"    size = min(64, {size})\n"
        "    model(torch.randn(2, 3, size, size)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("grows.py", "scope=eager")
    assert error is session.error is None
    found = [one for one in session_results.findings(session) if "as training goes on" in one]
    assert bool(found) is told
    assert not told or "2 × 3 × 8 × 8, then 2 × 3 × 16 × 16" in found[0]


def test_the_first_call_of_a_lazy_module_is_no_training(run: Run, folder: Path) -> None:
    (folder / "lazy.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.ReLU(), torch.nn.LazyLinear(1))\n"
        "model(torch.randn(2, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(16, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("lazy.py", AOT)
    assert error is session.error is None
    (target,) = session.found.targets
    assert not target.draws
    assert not target.changing()


def test_steps_that_a_gradient_scaler_skips_are_no_accumulation(run: Run, folder: Path) -> None:
    (folder / "scaled.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-15)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**96)\n"
        "for step in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    scaler.scale(1e12 * model(torch.randn(16, 8)).square().mean()).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    )
    session, error = run("scaled.py", "scope=eager")
    assert error is session.error is None
    assert session.found.num_skipped > 2
    assert session.found.micro_steps == 1


MINES = """
import torch
class HardTriplets(torch.nn.Module):
    def forward(self, x, labels):
        apart, same, hardest = torch.cdist(x, x), labels == labels[:, None], []
        for i in range(len(x)):
            hardest.append(apart[i][same[i]].max() - apart[i][~same[i]].min())
        return torch.stack(hardest).relu().mean()
model, criterion = torch.nn.Linear(8, 8), HardTriplets()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4000):
    loss = criterion(model(torch.randn(8, 8)), torch.arange(8) // 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_that_runs_eagerly_is_left_out_before_anything_else_is_tried(run: Run, folder: Path) -> None:
    """The search tried the loss again with sizes that depend on data, which compiled for 120 s, and the model never alone."""
    (folder / "mines.py").write_text(MINES)
    session, error = run("mines.py", f"{AOT},compile_loss=on", remedy_patience_s=0.0)
    assert error is None
    reason = str(session.error)
    assert "HardTriplets" in reason
    assert "capture_dynamic_output_shape_ops" in reason
    assert OF_THE_LOSS in reason
    assert "may mend it" not in reason
    record = {"label": "silent-fallback", "reason": reason}
    assert remedy_of(record) is None
    assert remedy_of(record | {"reason": reason.replace(OF_THE_LOSS, "")}) == "dynamo.capture_dynamic_output_shape_ops=on"
    session, error = run("mines.py", AOT)
    assert error is session.error is None
    assert session_results.measurement(session).fallbacks == []


def test_slices_that_make_a_backward_pass_slow_are_told_and_what_is_advised_makes_it_faster(run: Run, folder: Path) -> None:
    """A plain Mamba on an H200 spent more than half of its step on the zeros of such slices."""
    lines = (
        "import torch\n"
        "class Scan(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.decay = torch.nn.Parameter(torch.full((16,), 0.5))\n"
        "    def forward(self, x):\n"
        "        x, state = x * self.decay, torch.zeros(16)\n"
        "        for part in PARTS:\n"
        "            state = 0.5 * state + part\n"
        "        return state\n"
        "model = Scan()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "x = torch.randn(4, 128, 64, 16)\n"
        "for step in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    model(x).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    took, told = [], []
    for parts in ("(x[:, at] for at in range(128))", "x.unbind(1)"):
        (folder / "scans.py").write_text(lines.replace("PARTS", parts))
        session, error = run("scans.py", AS_IT_IS)
        assert error is session.error is None
        took.append(session_results.measurement(session).step_ms_median)
        told.append("takes 128 slices of one tensor" in " ".join(session_results.findings(session)))
    assert told == [True, False]
    assert took[0] > 2 * took[1]


@pytest.mark.parametrize(("words", "is_told"), [(100, False), (1000, True)])
def test_a_loop_of_thousands_of_operators_is_told(words: int, is_told: bool, run: Run, folder: Path) -> None:
    (folder / "loops.py").write_text(
        "import sys, torch\n"
        "class Scan(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.decay = torch.nn.Parameter(torch.full((4,), 0.5))\n"
        "    def forward(self, x):\n"
        "        state = torch.zeros(4)\n"
        "        for word in x:\n"
        "            state = self.decay * state + word\n"
        "            state = state.tanh()\n"
        "        return state\n"
        "model = Scan()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(int(sys.argv[1]), 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("loops.py", AS_IT_IS, str(words))
    assert error is session.error is None
    assert session_results.model_facts(session)["num_operators"] == 3 * words
    said = " ".join(session_results.findings(session))
    assert ("a forward of model has 3,000 operators" in said) is is_told
    assert "captures it in seconds" not in said, "on a CPU there are no CUDA graphs"


@pytest.mark.parametrize("fused", [True, False])
def test_optimizers_that_are_fused_already_are_known(fused: bool, run: Run, folder: Path) -> None:
    (folder / "fused.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        f"optimizer = torch.optim.AdamW(model.parameters(), fused={fused})\n"
        "for step in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("fused.py", AS_IT_IS)
    assert error is session.error is None
    assert session_results.model_facts(session)["is_fused"] is fused


@pytest.mark.parametrize(("shape", "samples"), [("(at, 4)", 4.0), ("(4, at)", 4.0)])
def test_samples_are_told_from_lengths_that_come_first(shape: str, samples: float, run: Run, folder: Path) -> None:
    (folder / "texts_first.py").write_text(
        "import random, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = torch.nn.Embedding(50, 8)\n"
        "        self.layer = torch.nn.LSTM(8, 8)\n"
        "    def forward(self, words):\n"
        "        return self.layer(self.embed(words))[0]\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4000):\n"
        "    at = 5 + step % 7\n"
        "    optimizer.zero_grad()\n"
        f"    model(torch.randint(50, {shape})).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("texts_first.py", AS_IT_IS)
    assert error is session.error is None
    found, tokens = session.step_size()
    assert found == samples
    assert 4 * 5 < tokens < 4 * 11


LOW_PRECISION = """
import torch
{line}
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)).to(dtype=torch.{dtype})
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(3000):
    optimizer.zero_grad()
    net(torch.randn(8, 4, dtype=torch.{dtype})).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "dtype", "settings", "is_lower"),
    [
        ("AMP = 'bf16'  # an option that is off", "float32", AS_IT_IS, False),
        ("torch.set_float32_matmul_precision('high')", "float32", AS_IT_IS, True),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "float32", AS_IT_IS, True),
        ("", "bfloat16", AS_IT_IS, True),
        ("", "float32", "scope=eager,matmul_precision=high", False),
    ],
)
def test_a_script_tells_whether_its_products_have_low_precision_anyway(
    line: str, dtype: str, settings: str, is_lower: bool, run: Run, folder: Path
) -> None:
    (folder / "low.py").write_text(LOW_PRECISION.format(line=line, dtype=dtype))
    try:
        session, error = run("low.py", settings)
        found = session_results.model_facts(session)["autocasts"]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert error is session.error is None
    assert found is is_lower
