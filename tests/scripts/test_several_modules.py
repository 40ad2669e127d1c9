"""Scripts that train several modules, of which settings or torch may leave some eager."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.source_runtime import marked_forward
from compile_sweep.schema.causes.errors import GRAPHS_MEMORY
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


GENERATOR_FIRST = """
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (generator, critic)]
for step in range(400):
    real, noise = torch.randn(32, 4, device=device), torch.randn(32, 8, device=device)
    made = generator(noise)
    loss = nn.functional.softplus(-critic(made)).mean()
    loss.backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    loss = nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(made.detach())).mean()
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
"""

CARRIED = """
import torch
from torch import nn

torch.manual_seed(0)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x, state):
        state = torch.tanh(self.mix(torch.cat([x, state], 1)))
        return self.out(state), state


model, state = Cell(), torch.zeros(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(400):
    scores, state = model(torch.randn(16, 4), state.detach()KEPT)
    loss = scores.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


TWO_OF_EACH = """
import torch
from torch import nn

g_ab, g_ba = (nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2))
d_a, d_b = (nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(2))
g_optimizer = torch.optim.Adam([*g_ab.parameters(), *g_ba.parameters()], 1e-3)
d_optimizers = [torch.optim.Adam(critic.parameters(), 1e-3) for critic in (d_a, d_b)]
for step in range(400):
    a, b = torch.randn(2, 32, 4)
    g_optimizer.zero_grad()
    made_a, made_b = g_ba(b), g_ab(a)
    (nn.functional.softplus(-d_a(made_a)).mean() + nn.functional.softplus(-d_b(made_b)).mean()).backward()
    g_optimizer.step()
    for critic, optimizer, real, made in zip((d_a, d_b), d_optimizers, (a, b), (made_a, made_b)):
        optimizer.zero_grad()
        seen = torch.cat([real, made.detach()])
        nn.functional.softplus(critic(seen)).mean().backward()
        optimizer.step()
"""

KEPT_IN_A_POOL = """
import torch
from torch import nn

model, pool = nn.Linear(4, 4), []
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(400):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    made = model(x)
    loss = made.square().mean() + (made - sum(pool[-5:])).square().mean()
    loss.backward()
    optimizer.step()
    pool.append(KEPT)
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (TWO_OF_EACH, {"g_ab": True, "g_ba": True, "d_a": False, "d_b": False}),
        (KEPT_IN_A_POOL.replace("KEPT", "made.detach().split(8)[0].mean(0)"), {"model": False}),
        (KEPT_IN_A_POOL.replace("KEPT", "made.detach()[:1]"), {"model": True}),
        (GENERATOR_FIRST, {"generator": True, "critic": False}),
        (CARRIED.replace("KEPT", ""), {"model": True}),
        (CARRIED.replace("state.detach()KEPT", "torch.zeros(16, 4)"), {"model": False}),
    ],
    ids=["two of each", "a copy in a pool", "a view in a pool", "generator first", "state carried on", "state anew"],
)
def test_what_is_read_after_the_backward_pass_is_found(script: str, expected: dict[str, bool], run: Run, folder: Path) -> None:
    (folder / "kept.py").write_text(script)
    session, error = run("kept.py", "scope=eager")
    assert error is session.error is None
    assert {target.name: target.outlasts for target in session.found.targets} == expected


FROZEN_BY_TURNS = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (generator, critic)]
for step in range(400):
    real, noise = torch.randn(32, 4, device=device), torch.randn(32, 8, device=device)
    critic.requires_grad_(False)
    optimizers[0].zero_grad()
    made = generator(noise)
    nn.functional.softplus(critic(real).detach() - critic(made)).mean().backward()
    optimizers[0].step()
    critic.requires_grad_(True)
    optimizers[1].zero_grad()
    judged = critic(real)
    assert judged.requires_grad
    nn.functional.softplus(critic(made.detach()) - judged).mean().backward()
    optimizers[1].step()
"""

UNFROZEN = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(400):
    if step == 12:
        model[0].requires_grad_(True)
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    assert (model[0].weight.grad is not None) == (step >= 12)
    optimizer.step()
"""


@pytest.mark.parametrize("script", [FROZEN_BY_TURNS, UNFROZEN], ids=["by turns", "later"])
def test_weights_that_are_unfrozen_get_gradients(script: str, run: Run, folder: Path) -> None:
    """Torch 2.11 runs the graph of frozen weights on, so a critic that the generator's step had frozen learned nothing."""
    (folder / "unfrozen.py").write_text(script)
    session, error = run("unfrozen.py", AOT)
    assert error is session.error is None


@pytest.mark.gpu
def test_a_critic_that_is_frozen_by_turns_trains_under_cuda_graphs(run: Run, folder: Path) -> None:
    (folder / "unfrozen.py").write_text(FROZEN_BY_TURNS)
    session, error = run("unfrozen.py", "scope=full,mode=reduce-overhead")
    assert error is session.error is None


@pytest.mark.gpu
def test_a_critic_reads_what_the_generator_made_before_its_step_under_cuda_graphs(run: Run, folder: Path) -> None:
    """On an H200, super-resolution as ESRGAN trains it ended in torch's error, as everything whose generator steps first."""
    (folder / "kept.py").write_text(GENERATOR_FIRST)
    session, error = run("kept.py", "scope=full,mode=reduce-overhead")
    assert error is session.error is None
    assert session_results.measurement(session).cudagraph_skips == 0


MATRICES_APART = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
matrices = [weights for weights in model.parameters() if weights.ndim == 2]
others = [weights for weights in model.parameters() if weights.ndim != 2]
optimizers = [torch.optim.AdamW(others, 1e-3), torch.optim.Muon(matrices, 1e-3)]
schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1, (step + 1) / 100)) for one in optimizers]
outputs = None
for step in range(400):
    x = torch.randn(16, 32, device=device)
    outputs = model(x)
    loss = (outputs - x).square().mean()
    loss.backward()
    for optimizer, schedule in zip(optimizers, schedules):
        optimizer.step()
        schedule.step()
    assert outputs.isfinite().all() and loss.isfinite()
    model.zero_grad(set_to_none=True)
"""


def test_optimizers_that_step_together_are_known_from_those_that_take_turns(run: Run, folder: Path) -> None:
    for script, together in ((MATRICES_APART, True), (GENERATOR_FIRST, False)):
        (folder / "kept.py").write_text(script)
        session, error = run("kept.py", "scope=eager")
        assert error is session.error is None
        assert session.found.steps_together is together


@pytest.mark.gpu
def test_what_a_forward_returned_is_read_after_two_optimizers_have_stepped_in_cuda_graphs(run: Run, folder: Path) -> None:
    """On an H200, Muon's compiled step after AdamW's overwrote the loss."""
    (folder / "kept.py").write_text(MATRICES_APART)
    session, error = run("kept.py", "scope=full,mode=reduce-overhead,optimizer=compiled")
    assert error is session.error is None
    assert session_results.measurement(session).cudagraph_skips == 0


SIAMESE = """
import torch
from torch import nn

encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
projector = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
head = nn.Linear(4, 3)
optimizer = torch.optim.SGD([*encoder.parameters(), *projector.parameters(), *head.parameters()], lr=0.01)
while True:
    one, other = encoder(torch.randn(16, 8)), encoder(torch.randn(16, 8))
    loss = (projector(one) - other).square().mean() + head(one).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_modules_of_torch_share_no_limit_of_graphs(run: Run, folder: Path) -> None:
    """Torch compiles all of its own within one function: three kinds took three of its eight graphs, as recompiles."""
    (folder / "siamese.py").write_text(SIAMESE)
    session, error = run("siamese.py", AOT)
    assert error is session.error is None
    figures = session_results.measurement(session)
    assert (figures.graphs, figures.recompile_reasons, figures.fallbacks) == (3, [], [])


def test_of_many_tensors_that_change_the_first_few_are_named() -> None:
    assert session_results._named_dimensions({"ids": (0, 1), "labels": (1,)}) == "ids 0/1, labels 1"
    tables = {f"ids.{number}": (0,) for number in range(26)}
    assert session_results._named_dimensions(tables) == "ids.0 0, ids.1 0, ids.2 0, ids.3 0 and 22 other tensors"


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


@pytest.mark.parametrize(
    ("named", "spared"), [("Critic", "parts.critic.compile=off"), ("Linear", None), ("Other", None)], ids=["one", "both", "none"]
)
def test_an_error_of_overwritten_memory_names_the_module_whose_results_were(named: str, spared: str | None) -> None:
    class Critic(nn.Sequential):
        """A critic of a class of its own."""

    modules = {"critic": Critic(nn.Linear(3, 2)), "actor": nn.Sequential(nn.Linear(3, 2))}
    Critic.__qualname__ = "Critic"
    found = Discovery(targets=[Target(called=module, module=module, name=name) for name, module in modules.items()])
    session: Any = SimpleNamespace(settings=CompileSettings.parse("scope=full"), found=found)
    text = f"Error: accessing tensor {GRAPHS_MEMORY} by a subsequent run. Stack trace: File x.py, line 83, in forward@{named}\n"
    assert session_results.spares_culprit(session, RuntimeError(text)) == spared


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
    assert any(
        line.startswith("module critic") and "not compiled by any setting" in line for line in session_results.findings(session)
    )
    alone = PENALTY.partition("    (-critic")[0].replace("(critic, generator)", "(critic,)")
    (folder / "alone.py").write_text(alone)
    session, error = run("alone.py", AOT)
    assert "differentiates the gradients of critic again (create_graph=True)" in str(error or session.error)
    assert run("alone.py", "scope=eager,optimizer=fused")[1] is None


@pytest.mark.parametrize("wrapped", ["Wrapper(field)", "Wrapper(Wrapper(field))"])
def test_what_wrappers_made_anew_for_each_step_hold_is_compiled(run: Run, folder: Path, wrapped: str) -> None:
    """As torchdiffeq's odeint wraps the function that it solves: nothing was compiled, and each wrapper was told as a module."""
    (folder / "solves.py").write_text(
        "import torch\n"
        "class Wrapper(torch.nn.Module):\n"
        "    def __init__(self, inner):\n"
        "        super().__init__()\n"
        "        self.inner = inner\n"
        "    def forward(self, x):\n"
        "        return self.inner(x)\n"
        "field = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))\n"
        "optimizer = torch.optim.SGD(field.parameters(), lr=0.1)\n"
        "for _ in range(4000):\n"
        "    y, solved = torch.randn(16, 4, requires_grad=True), WRAPPED\n"
        "    for _ in range(3):\n"
        "        y = y + 0.1 * solved(y)\n"
        "    y.square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n".replace("WRAPPED", wrapped)
    )
    session, error = run("solves.py", AOT)
    assert error is session.error is None
    assert [(target.name, target.called is target.module) for target in session.found.targets] == [("field", True)]
    assert session.found.micro_steps == 3
    figures = session_results.measurement(session)
    assert (figures.graphs, figures.fallbacks) == (1, [])


def test_of_several_modules_the_one_that_is_called_more_than_once_a_step_is_named(run: Run, folder: Path) -> None:
    """As in soft actor-critic, whose actor acts, and learns in every other step: "the model" was none of its three."""
    (folder / "acts.py").write_text(
        "import torch\n"
        "actor, critic = torch.nn.Linear(4, 2), torch.nn.Linear(6, 1)\n"
        "optimizers = [torch.optim.Adam(one.parameters()) for one in (critic, actor)]\n"
        "for _ in range(3000):\n"
        "    x = torch.randn(8, 4)\n"
        "    actor(x[:1]).detach()\n"
        "    for _ in range(2):\n"
        "        critic(torch.cat([x, torch.randn(8, 2)], 1)).square().mean().backward()\n"
        "    optimizers[0].step()\n"
        "    critic(torch.cat([x, actor(x)], 1)).mean().backward()\n"
        "    optimizers[1].step()\n"
        "    [one.zero_grad() for one in optimizers]\n"
    )
    session, error = run("acts.py", "scope=eager,optimizer=fused")
    assert error is session.error is None
    (told,) = [line for line in session_results.findings(session) if "times for each step" in line]
    assert told.startswith("actor is called 2 times for each step")


SHARES_ITS_INPUT = """
import torch
class Critic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 1)
    def forward(self, x, action):
        return self.inner(torch.cat([x, action], 1))
actor, critic, target = torch.nn.Linear(4, 2), Critic(), Critic()
optimizers = [torch.optim.Adam(one.parameters()) for one in (critic, actor)]
kept = torch.randn(64, 6)
for _ in range(3000):
    actor(torch.randn(1, 4)).detach()
    x, y, action = torch.randn(8, 4), torch.randn(8, 4), kept[:8, :2]
    with torch.no_grad():
        aim = target(y, actor(y))
    (critic(x, action) - aim).square().mean().backward()
    optimizers[0].step()
    proposed = actor(x)
    critic(x, action).mean().backward()
    (proposed.square().mean() - critic(x, proposed).mean()).backward()
    optimizers[1].step()
    assert not any(name.startswith("_dynamo_dynamic") for name in vars(x)), vars(x)
    [one.zero_grad() for one in optimizers]
"""


def test_a_batch_that_is_marked_for_one_module_is_not_for_the_next_that_is_given_it(run: Run, folder: Path) -> None:
    """As in soft actor-critic: the critic, whose batches do not change, was refused what the actor's call had marked."""
    (folder / "shares.py").write_text(SHARES_ITS_INPUT)
    session, error = run("shares.py", "scope=full,dynamic=mark,backend=aot_eager")
    assert error is session.error is None
    assert [target.name for target in session.found.targets if target.changing()] == ["actor"]
    assert session_results.measurement(session).fallbacks == []


def test_a_mark_of_the_script_itself_stays() -> None:
    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 1)
    seen: list[set[int]] = []
    marked_forward(nn.Identity(), lambda x: seen.append({*vars(x)["_dynamo_dynamic_indices"]}), {"input": (0,)})(x)
    assert seen == [{0, 1}]
    assert vars(x)["_dynamo_dynamic_indices"] == {1}


FLOW = """
import torch
class Coupling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 8)
    def forward(self, x):
        scale, shift = self.inner(x).tanh().chunk(2, 1)
        return x * scale.exp() + shift, scale.sum(1)
class Flow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.nn.ModuleList(Coupling() for _ in range(4))
    def log_prob(self, x):
        total = 0
        for step in self.steps:
            x, more = step(x)
            total = total + more
        return total - x.square().sum(1)
    def forward(self, x):
        return self.log_prob(x)
class Loop:
    def __init__(self):
        self.flow = Flow()
        self.optimizer = torch.optim.Adam(self.flow.parameters())
    def fit(self):
        for _ in range(3000):
            self.optimizer.zero_grad()
            (-self.flow.log_prob(torch.randn(8, 4)).mean()).backward()
            self.optimizer.step()
loop = Loop()
loop.fit()
"""
AT_ONCE = "modules flow.steps.0 to flow.steps.3: 4 of Coupling, 40 parameters each, no repeated blocks, batches of one shape"
CALLS_PARTS = "the script trains by calling 4 parts of Flow, not Flow itself"


def test_parts_of_a_model_that_is_only_called_by_a_method_are_told_at_once(run: Run, folder: Path) -> None:
    """A flow of 32 steps had 32 lines, and none said that torch.compile sees only the steps."""
    (folder / "flow.py").write_text(FLOW)
    session, error = run("flow.py", "scope=eager,optimizer=fused")
    assert error is session.error is None
    told = session_results.findings(session)
    assert [line.partition(" in the first")[0] for line in told if "Coupling" in line] == [AT_ONCE]
    assert [line.partition(", as where")[0] for line in told if "parts of" in line] == [CALLS_PARTS]


def test_a_model_that_is_called_itself_or_trained_by_turns_is_not_told_to_be_called(run: Run, folder: Path) -> None:
    (folder / "whole.py").write_text(FLOW.replace("self.flow.log_prob(", "self.flow("))
    (folder / "turns.py").write_text(
        "import torch\n"
        "class Both(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)\n"
        "both = Both()\n"
        "optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (both.one, both.two)]\n"
        "for _ in range(3000):\n"
        "    for part, optimizer in zip((both.one, both.two), optimizers):\n"
        "        part(torch.randn(8, 4)).square().mean().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    for script in ("whole.py", "turns.py"):
        session, error = run(script, "scope=eager,optimizer=fused")
        assert error is session.error is None
        assert not [line for line in session_results.findings(session) if "parts of" in line]
