"""Networks that a script calls in every step and does not train: compiled like those that it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.script import session_results
from compile_sweep.script.apply.frozen import apply_to_discovered
from compile_sweep.script.apply.in_place import OwnCompile
from compile_sweep.script.discover import Discovery, Target
from compile_sweep.script.job import ScriptError
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

AOT = "scope=full,dynamic=auto,backend=aot_eager"

DISTILLATION = """
import sys

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Metric(Net):
    pass


student, teacher, metric = Net(4), Net(8).eval(), Metric(4).eval()
metric.requires_grad_(False)
if "gradients" in sys.argv:  # without them, torch.no_grad() says that it is not trained
    teacher.requires_grad_(False)
if "fails" in sys.argv:

    class Failing(nn.ReLU):
        def forward(self, x):
            if torch.compiler.is_compiling():
                raise ArithmeticError
            return super().forward(x)

    teacher.layers[1][1] = Failing()
optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
for step in range(3000):
    images = torch.randn(4, 3, 8, 8)
    if "gradients" in sys.argv:
        loss = (teacher(images + student(images).mean()) - teacher(images)).square().mean()
    else:
        with torch.no_grad():
            expected = teacher(images)
        loss = nn.functional.mse_loss(student(images), expected)
    if step % 2 == 0:
        metric(images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("words", [[], ["gradients"]])
def test_a_teacher_is_compiled_beside_its_student(run: Run, folder: Path, words: list[str]) -> None:
    (folder / "distillation.py").write_text(DISTILLATION)
    losses = []
    for settings in ("scope=eager,as_written=on", AOT, AOT.replace("full", "regional"), f"{AOT},parts.teacher.compile=off"):
        session, error = run("distillation.py", settings, *words)
        assert error is session.error is None
        found = session.found
        assert [target.name for target in found.targets] == ["student"]
        assert [target.name for target in found.frozen] == ["teacher"], "the metric is not called in every step"
        assert found.loss_modules == []
        assert any(text.startswith("module teacher: Net of") for text in session_results.findings(session))
        figures = session_results.measurement(session)
        if "as_written" not in settings:
            assert figures.fallbacks == []
            teachers = len(["without gradients", *words])  # its calls with and without gradients have graphs of their own
            assert figures.graphs == (1 if "off" in settings else 1 + teachers)
            compiled = "student (Net), teacher (Net). Before"
            assert (compiled in session_results.source(session)) is ("off" not in settings)
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


FROZEN_ENCODER = """
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(self.norm(x)).relu()


class Seeing(Block):
    pass


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*[Seeing() for _ in range(3)]).eval().requires_grad_(False)
        self.decoder = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x):
        with torch.no_grad():
            seen = self.encoder(x)
        return self.decoder(seen).square().mean()


model = Captioner()
model.encoder.eval()
optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.05)
for step in range(3000):
    loss = model(torch.randn(4, 8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_blocks_of_a_frozen_encoder_in_a_model_are_compiled_though_they_run_without_gradients(run: Run, folder: Path) -> None:
    (folder / "captioner.py").write_text(FROZEN_ENCODER)
    losses = []
    for settings in ("scope=eager,as_written=on", "scope=regional,dynamic=auto,backend=aot_eager"):
        session, error = run("captioner.py", settings)
        assert error is session.error is None
        figures = session_results.measurement(session)
        assert figures.fallbacks == []
        assert figures.graphs == (0 if "as_written" in settings else 3), "the decoder's first block has inputs without gradients"
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_teacher_takes_the_memory_format(run: Run, folder: Path) -> None:
    (folder / "distillation.py").write_text(DISTILLATION)
    session, error = run("distillation.py", "scope=eager,memory_format=channels_last")
    assert error is session.error is None
    teacher = vars(sys.modules["__main__"])["teacher"]
    assert teacher.stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_an_error_of_a_compiled_teacher_names_it(run: Run, folder: Path) -> None:
    (folder / "distillation.py").write_text(DISTILLATION)
    session, error = run("distillation.py", f"{AOT},fullgraph=on", "fails")
    assert isinstance(error, Exception)
    spared = session_results.spares_culprit(session, error)
    assert spared == "parts.teacher.compile=off"
    session, error = run("distillation.py", f"{AOT},fullgraph=on,{spared}", "fails")
    assert error is session.error is None


TEXTS = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)


def gpt(width):
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=width, n_layer=2, n_head=2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config)


teacher, student = gpt(16).eval(), gpt(8)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
seen, caches = [], []
teacher.transformer.register_forward_hook(lambda module, args, out: caches.append(out.past_key_values is not None))
teacher.transformer.wte.register_forward_hook(lambda module, args, out: seen.append(out.size(1)))
for step in range(3000):
    ids = torch.randint(50, (2, 9 + step % 5))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        expected = teacher(input_ids=ids, attention_mask=mask).logits
    difference = student(input_ids=ids, attention_mask=mask).logits - expected
    (difference.square().mean(-1) * mask).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_teacher_of_texts_is_padded_and_makes_no_cache_like_its_student(run: Run, folder: Path) -> None:
    (folder / "texts_of_two.py").write_text(TEXTS)
    losses = []
    for settings in ("scope=eager,as_written=on", "scope=eager,pad_to_multiple_of=16,use_cache=off"):
        session, error = run("texts_of_two.py", settings)
        assert error is session.error is None
        script = vars(sys.modules["__main__"])
        changed = "pad_to" in settings
        assert script["caches"][0]
        assert script["caches"][-1] is not changed
        assert (set(script["seen"][-5:]) == {16}) is changed
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_where_nothing_that_is_trained_can_be_compiled_its_teacher_is_left_alone() -> None:
    student, teacher = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    twice = Target(student, student, "student", differentiated_twice=True)
    found = Discovery(targets=[twice], frozen=[Target(teacher, teacher, "teacher")])
    with pytest.raises(ScriptError, match="differentiates the gradients of student again"):
        apply_to_discovered(CompileSettings.parse("scope=full,dynamic=auto"), found, OwnCompile())
    assert "_compiled_call_impl" not in vars(teacher)


def test_modules_without_repeated_blocks_are_named_as_the_script_does() -> None:
    actor, critic = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1))
    found = Discovery(targets=[Target(actor, actor, "agent.actor"), Target(critic, critic, "agent.critic")])
    with pytest.raises(ScriptError, match=r"^scope=regional: each of agent\.actor, agent\.critic has no repeated blocks; use"):
        apply_to_discovered(CompileSettings.parse("scope=regional,dynamic=auto"), found, OwnCompile())


@pytest.mark.gpu
@pytest.mark.parametrize("scope", [Scope.FULL, Scope.REGIONAL])
def test_what_a_teacher_returns_outlasts_the_next_cuda_graph(scope: Scope) -> None:
    from torch._dynamo.utils import counters

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    torch.manual_seed(0)
    student, teacher, eager = (nn.Sequential(*(block() for _ in range(3))).cuda() for _ in range(3))
    eager.load_state_dict(teacher.requires_grad_(False).state_dict())
    settings = CompileSettings.parse(f"scope={scope},mode=reduce-overhead,dynamic=auto")
    found = Discovery(targets=[Target(student, student, "student")], frozen=[Target(teacher, teacher, "teacher")])
    counters.clear()
    apply_to_discovered(settings, found, OwnCompile())
    for _ in range(8):
        x = torch.randn(4, 16, device="cuda")
        with torch.no_grad():
            expected = teacher(x)
        difference = student(x) - expected
        student.zero_grad()  # after the forward, as with optimizer.zero_grad() right before loss.backward()
        difference.square().mean().backward()
        torch.testing.assert_close(expected, eager(x))
    assert counters["inductor"]["cudagraph_skips"] == 0
