"""Scripts that train several modules, of which settings or torch may leave some eager."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.schema.causes.remedies import remedy_of
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import session_results
from compile_sweep.script.discover import Discovery, Target
from compile_sweep.script.session import Session
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

AOT = "scope=full,dynamic=auto,backend=aot_eager"


def test_both_models_of_a_gan_are_compiled(run: Run) -> None:
    session, error = run("gan.py", AOT)
    assert error is None
    assert [target.name for target in session.found.targets] == ["netD", "netG"]
    assert session.found.primary.name == "netG"
    assert session.step_size()[0] == 16
    assert session_results.measurement(session).graphs >= 2


def test_a_module_that_is_left_out_stays_eager(run: Run) -> None:
    session, error = run("gan.py", f"{AOT},parts.netD.compile=off")
    assert error is session.error is None
    assert [target.name for target in session.found.compiled] == ["netG"]
    figures = session_results.measurement(session)
    assert (figures.graphs, figures.fallbacks) == (1, [])
    assert "netG (Generator). Before" in session_results.source(session)
    for names, told in ((("net",), "trains no module called net; parts may name netD, netG"), (("netD", "netG"), "all modules")):
        parts = ",".join(f"parts.{name}.compile=off" for name in names)
        session, error = run("gan.py", f"{AOT},{parts}")
        assert error is None
        assert told in str(session.error)


CAPTIONER = """
import torch
from torch import Tensor, nn

torch.manual_seed(0)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, features, captions):
        return self.out(self.lstm(torch.cat((features[:, None], self.embed(captions)), 1))[0])


encoder, decoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), Decoder()
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
for _ in range(3000):
    captions = torch.randint(20, (4, 6))
    scores = decoder(encoder(torch.randn(4, 3, 8, 8)), captions[:, :-1])
    nn.functional.cross_entropy(scores.flatten(0, 1), captions.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_one_of_several_modules_cannot_have_is_no_obstacle_for_the_others(run: Run, folder: Path) -> None:
    (folder / "captioner.py").write_text(CAPTIONER)
    session, error = run("captioner.py", "scope=eager,memory_format=channels_last")
    assert error is session.error is None
    assert encoder_weight(session).is_contiguous(memory_format=torch.channels_last)
    session, error = run("captioner.py", AOT)
    assert error is session.error is None
    figures = session_results.measurement(session)
    if torch_version() >= (2, 15):  # breaks at the LSTM, and compiles what is around it
        assert (figures.fallbacks, len(figures.graph_break_reasons), figures.graphs) == ([], 1, 3)
        return
    record = {"label": "silent-fallback", "fallbacks": figures.fallbacks, "findings": session_results.findings(session)}
    assert figures.fallbacks
    spared = remedy_of(record)
    assert spared == "parts.decoder.compile=off"
    session, error = run("captioner.py", f"{AOT},{spared}")
    assert error is session.error is None
    assert session_results.measurement(session).fallbacks == []


def encoder_weight(session: Session) -> Tensor:
    return next(target for target in session.found.targets if target.name == "encoder").module.get_parameter("0.weight")


RAISING = "def raise_if_compiled():\n    if torch.compiler.is_compiling():\n        raise ArithmeticError\n\n\n"


def test_an_error_of_compiled_code_names_the_module_to_leave_out(run: Run, folder: Path) -> None:
    text = (folder / "gan.py").read_text()
    text = text.replace("return self.main(input).view(-1)", "raise_if_compiled()\n        return self.main(input).view(-1)")
    (folder / "fails.py").write_text(text.replace("class Generator", f"{RAISING}class Generator"))
    session, error = run("fails.py", f"{AOT},fullgraph=on")
    assert isinstance(error, Exception)
    assert session.error is None
    spared = session_results.spares_culprit(session, error)
    assert spared == "parts.netD.compile=off"
    assert session_results.spares_culprit(session, ArithmeticError("another")) is None
    session, error = run("fails.py", f"{AOT},fullgraph=on,{spared}")
    assert error is session.error is None


@pytest.mark.parametrize(("calls", "spared"), [((2, 1), "parts.critic.compile=off"), ((1, 1), None)])
def test_an_error_of_a_tensor_changed_in_place_names_the_module_that_holds_it(calls: tuple[int, int], spared: str | None) -> None:
    """As of a buffer of `spectral_norm`, which each call of the module changes, so that it is called more than once."""
    modules = {"critic": nn.BatchNorm1d(3), "actor": nn.BatchNorm1d(3)}
    targets = [
        Target(called=module, module=module, name=name, calls=number)
        for (name, module), number in zip(modules.items(), calls, strict=True)
    ]
    found = Discovery(targets=targets)
    session: Any = SimpleNamespace(settings=CompileSettings.parse("scope=full"), found=found)
    buffers = [cast(Tensor, module.running_mean) for module in modules.values()]
    loss = (torch.ones(3, requires_grad=True) * buffers[0]).sum()
    for buffer in buffers:
        buffer.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        loss.backward()
    assert session_results.spares_culprit(session, raised.value) == spared
    buffers[1].add_(1)
    assert session_results.spares_culprit(session, raised.value) == "parts.critic.compile=off"


PENALTY = """
import torch
critic, generator = torch.nn.Linear(8, 1), torch.nn.Linear(4, 8)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, generator)]
for _ in range(3000):
    x = torch.randn(4, 8, requires_grad=True)
    score = critic(x).square().sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (score + slope.square().mean()).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    (-critic(generator(torch.randn(4, 4))).mean()).backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
"""


def test_a_module_whose_gradients_are_differentiated_again_stays_eager(run: Run, folder: Path) -> None:
    (folder / "penalty.py").write_text(PENALTY)
    session, error = run("penalty.py", AOT)
    assert error is session.error is None
    assert [target.name for target in session.found.targets] == ["critic", "generator"]
    assert [target.name for target in session.found.compiled] == ["generator"]
    figures = session_results.measurement(session)
    assert figures.graphs == 1
    assert figures.fallbacks == []
    assert any(line.startswith("module critic") and "always run eagerly" in line for line in session_results.findings(session))
    alone = PENALTY.partition("    (-critic")[0].replace("(critic, generator)", "(critic,)")
    (folder / "alone.py").write_text(alone)
    session, error = run("alone.py", AOT)
    assert "differentiates the gradients of critic again (create_graph=True)" in str(error or session.error)
    assert run("alone.py", "scope=eager,optimizer=fused")[1] is None
