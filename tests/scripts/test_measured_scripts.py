"""Scripts as people write them, measured unchanged: what is discovered, what a step is, and messages for unsuitable scripts."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from compile_sweep.script import session_results
from compile_sweep.script.session import Kind
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

AOT = "scope=full,dynamic=auto,backend=aot_eager"


def test_a_plain_loop_is_found_with_its_accumulation(run: Run) -> None:
    session, error = run("plain_loop.py", AOT)
    assert error is None
    (target,) = session.found.targets
    assert (target.name, target.blocks, target.draws) == ("model", ["blocks.0", "blocks.1", "blocks.2"], False)
    assert [type(one).__name__ for one in session.found.optimizers] == ["AdamW"]
    assert session.found.micro_steps == 2
    assert session.step_size() == (64.0, 64.0)
    figures = session_results.measurement(session)
    assert figures.graphs >= 1
    assert figures.fallbacks == figures.recompile_limit_hits == []
    assert figures.samples_per_s == pytest.approx(64e3 * figures.steady_steps / sum(figures.step_ms), rel=0.01)


def test_blocks_are_compiled_in_place_and_no_hook_of_ours_is_left(run: Run) -> None:
    session, error = run("plain_loop.py", "scope=regional,dynamic=auto,backend=aot_eager")
    assert error is None
    assert session_results.measurement(session).fallbacks == []
    model = session.found.targets[0].module
    assert next(iter(model.state_dict())) == "first.weight"
    assert type(model).__name__ == "Net"
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not _global_optimizer_post_hooks


@pytest.mark.parametrize(("script", "loss"), [("lora.py", "cross_entropy"), ("loss_module.py", "MSELoss")])
def test_loss_functions_are_compiled_if_the_settings_say_so(script: str, loss: str, run: Run, folder: Path) -> None:
    (folder / "loss_module.py").write_text(
        "import torch\n"
        "class Mean(torch.nn.Module):\n"
        "    def forward(self, loss):\n"
        "        return loss.detach().mean()\n"
        "model, loss_of, metric = torch.nn.Linear(8, 8), torch.nn.MSELoss(), Mean()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4000):\n"
        "    x = torch.randn(4, 8)\n"
        "    optimizer.zero_grad()\n"
        "    loss = loss_of(model(x), x)\n"
        "    metric(loss)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    before = nn.functional.cross_entropy
    without, _ = run(script, AOT)
    session, error = run(script, f"{AOT},compile_loss=on")
    assert error is session.error is None
    assert session.found.loss_functions + [type(module).__name__ for module in session.found.loss_modules] == [loss]
    assert session_results.measurement(session).graphs == session_results.measurement(without).graphs + 1
    assert nn.functional.cross_entropy is before


def test_blocks_recomputed_in_the_backward_pass_are_no_modules_of_their_own(run: Run, folder: Path) -> None:
    (folder / "checkpointed.py").write_text(
        "import torch\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)\n"
        "    def forward(self, x):\n"
        "        return self.last(checkpoint(self.first, x, use_reentrant=False).relu())\n"
        "nets = [Net()]\n"
        "optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)\n"
        "for _ in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    nets[0](torch.randn(4, 8)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("checkpointed.py", AOT)
    assert error is session.error is None
    assert [target.name for target in session.found.targets] == ["Net"]
    assert session_results.measurement(session).fallbacks == []


def test_a_module_that_is_only_called_by_parts_is_found_by_parts(run: Run, folder: Path) -> None:
    (folder / "parts.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.encoder, self.decoder = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)\n"
        "    def loss(self, x):\n"
        "        return (self.decoder(self.encoder(x).relu()) - x).square().mean()\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    model.loss(torch.randn(4, 8)).backward()\n"
        "    optimizer.step()\n"
    )
    session, error = run("parts.py", AOT)
    assert error is session.error is None
    assert [target.name for target in session.found.targets] == ["model.encoder", "model.decoder"]
    assert session_results.measurement(session).graphs == 2


def test_a_loss_that_is_part_of_the_model_is_said_to_be_compiled_with_it(run: Run) -> None:
    session, error = run("char_lm.py", f"{AOT},compile_loss=on")
    assert error is session.error is None
    assert session.missed[0].startswith("no loss function was found outside the modules")


def test_convolutions_are_ordered_as_settings_say(run: Run) -> None:
    session, error = run("gan.py", "scope=eager,memory_format=channels_last")
    assert error is None
    assert session.error is None
    weights = session.found.targets[0].module.get_parameter("main.0.weight")
    assert weights.is_contiguous(memory_format=torch.channels_last)


def test_blocks_of_a_script_are_nested_in_one_graph_and_recomputed(run: Run) -> None:
    losses = []
    changed = "scope=nested,backend=aot_eager,activation_checkpointing=blocks"
    for settings, kind in ((changed, Kind.MEASURED), ("scope=eager", Kind.EAGER)):
        session, error = run("char_lm.py", settings, "--eval_interval=1000", kind=kind)  # one in between is a graph more
        assert error is session.error is None
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
        if kind is Kind.MEASURED:
            assert session_results.measurement(session).graphs == 1
            assert "forward" in vars(session.found.targets[0].module.get_submodule("h.0"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_script_that_compiles_itself_keeps_its_names_and_runs_eagerly_under_eager(run: Run) -> None:
    session, error = run("char_lm.py", "scope=eager")
    assert error is None
    (target,) = session.found.targets
    assert (target.name, target.draws) == ("model", True)
    assert next(iter(target.called.state_dict())) == "_orig_mod.wte.weight"
    assert session.own_compile.modules == ["GPT"]
    figures = session_results.measurement(session)
    assert figures.graphs == 0
    assert figures.tokens_per_s == pytest.approx(32 * figures.samples_per_s)
    assert "the script calls torch.compile itself, on GPT" in session_results.findings(session)


def test_a_forward_that_draws_is_seen_and_data_stay_the_same_whatever_it_draws(run: Run) -> None:
    losses = []
    for settings, kind in ((AOT, Kind.MEASURED), ("scope=eager", Kind.EAGER)):
        session, error = run("vae.py", settings, "--epochs", "300", kind=kind)
        assert error is None
        assert session.found.targets[0].draws
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_clock_is_the_scripts_own(run: Run, folder: Path) -> None:
    (folder / "clocked.py").write_text(
        "import time, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "times = []\n"
        "while True:\n"
        "    model(torch.randn(64, 64)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    times.append(time.perf_counter())\n"
    )
    session, error = run("clocked.py", "scope=eager")
    assert error is None
    assert session.stream is not None
    # The last step ended the script before it looked at its clock.
    ours = [one.ms for one in session.stream.times[-session.stream.pass_steps : -1]]
    times = vars(sys.modules["__main__"])["times"][-len(ours) - 1 :]
    own = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
    # A pause of the process at the first or last step, between the two clocks, is in only one of them.
    assert sum(ours) == pytest.approx(sum(own), abs=2 * max(*ours, *own))
    # On a busy machine, medians of equal clocks differ: half of the steps hold a pause many times as long as a step.
    assert sum(one == pytest.approx(other, rel=0.1) for one, other in zip(ours, own, strict=True)) > 0.5 * len(ours)


@pytest.mark.parametrize(
    ("script", "module", "optimizer", "samples"),
    [
        ("classifier.py", "ConvNet", "SGD", 32),
        pytest.param(
            "trainer.py",
            "GPT2LMHeadModel",
            "AdamW",
            8,
            marks=pytest.mark.nightly("test_examples.py also trains with the Trainer"),
        ),
        pytest.param(
            *("lightning_module.py", "Classifier", "AdamW", 32),
            marks=pytest.mark.filterwarnings(
                "ignore:.*LeafSpec:FutureWarning", "ignore:.*num_workers", "ignore:.*logging interval"
            ),
        ),
        ("accelerated.py", "Sequential", "AdamW", 32),
        ("packed_rnn.py", "Tagger", "RMSprop", 8),
        ("lora.py", "Sequential", "AdamW", 16),
        ("graph_network.py", "GraphNet", "Adam", None),
        ("reinforce.py", "ActorCritic", "Adam", None),
        ("two_workers.py", "Net", "AdamW", 8),
        ("spawned.py", "Sequential", "AdamW", 8),
    ],
)
def test_scripts_of_many_kinds_run_unchanged(run: Run, script: str, module: str, optimizer: str, samples: int | None) -> None:
    if script == "lightning_module.py":
        pytest.importorskip("lightning")  # a host with a GPU may lack it
    session, error = run(script, AOT)
    assert error is None, error
    assert session.error is None
    (target,) = session.found.targets
    assert type(target.module).__name__ == module
    assert [type(one).__name__ for one in session.found.optimizers] == [optimizer]
    figures = session_results.measurement(session)
    assert figures.graphs >= 1
    assert [text for text in figures.fallbacks if "RNN, GRU, or LSTM" not in text] == []  # which torch does not compile
    if samples is not None:
        assert session.step_size()[0] == samples


FUNCTIONAL = """
import torch
from torch.func import functional_call, grad, grad_and_value
m = torch.nn.Linear(2, 1)
p = {name: w.detach() for name, w in m.named_parameters()}
def loss(p):
    return functional_call(m, p, (torch.ones(4, 2),)).square().mean()
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('hello')\n", "without a training step"),
        ("print('no GPU')\n", "if those are right, see whether the end of its output says why"),
        ("import sys\nsys.exit(2)\n", "exit code 2 after 0 steps; it may not know one of its arguments"),
        ("input('which? ')\n", "asks on standard input"),
        ("import json, sys\njson.load(sys.stdin)\n", "; it read standard input, which is empty"),
        ("import sys\nfor line in sys.stdin:\n    print(line)\n", "; it read standard input, which is empty"),
        (
            "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n",
            "a trial has 1 worker; sweep with --workers-per-trial 2",
        ),
        ("from torch.multiprocessing import start_processes\nstart_processes(print, nprocs=2)\n", "or have the script start 1"),
        ("import subprocess\nsubprocess.run(['torchrun', '--nproc-per-node', '2', 'x.py'])\n", "its training with torchrun"),
        ("import os\nos.system('python -m torch.distributed.run x.py')\n", "with python -m torch.distributed.run"),
        ("import subprocess\nsubprocess.run('true', shell=True)\n", "without a training step"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, 'none.py'])\n", "but ran none.py"),
        ("import sys\nsys.exit('no data at /data')\n", "after 0 steps with the message 'no data at /data'"),
        (
            "import torch\nw = torch.nn.Parameter(torch.ones(3))\nfor _ in range(5):\n    (w * 2).sum().backward()\n",
            "compile_sweep.steps(loader)",
        ),
        (
            "import torch\nm = torch.nn.Linear(2, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            "for _ in range(8):\n    m(torch.ones(4, 2)).sum().backward()\n    o.step()\n",
            "ended after 8 steps",
        ),
        (f"{FUNCTIONAL}while True:\n    g = torch.autograd.grad(m(p['weight']).sum(), m.weight)\n", "steps(loader)"),
        ("import os\nassert not os.system('stty size | grep -q 80')\nraise SystemExit('wide')\n", "with the message 'wide'"),
        (f"{FUNCTIONAL}while True:\n    g = grad(loss)(p)\n", "takes its gradients by torch.func"),
        (f"{FUNCTIONAL}for _ in range(3):\n    g = grad_and_value(loss)(p)\n", "mark its steps: for batch in"),
        (
            f"{FUNCTIONAL}o = torch.optim.SGD(m.parameters(), lr=0.1)\nwhile True:\n    g = grad(loss)(p)\n"
            "    for name, w in m.named_parameters():\n        w.grad = g[name]\n    o.step()\n",
            "takes its gradients by torch.func",
        ),
        (
            "import torch\nm = torch.nn.Linear(2, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            "while True:\n    m.forward(torch.ones(4, 2)).sum().backward()\n    o.step()\n",
            "call the model itself",
        ),
        pytest.param(
            "import threading, torch\nm = torch.nn.Linear(2, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            "def train():\n    while True:\n        m(torch.ones(4, 2)).sum().backward()\n        o.step()\n"
            "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n",
            "trains in a thread that it starts",
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
        ),
    ],
)
def test_a_script_that_cannot_be_measured_is_told_what_to_do(run: Run, folder: Path, text: str, said: str) -> None:
    (folder / "odd.py").write_text(text)
    session, error = run("odd.py", "scope=eager")
    assert said in str(error or session.error)


FORKED = """
import torch
import torch.multiprocessing as mp

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

def fork():
    process = mp.get_context("fork").Process(target=train, args=(torch.nn.Linear(8, 1),))
    process.start()
    process.join()

"""


def test_a_script_that_trains_in_forked_processes_is_told_without_waiting_for_them(run: Run, folder: Path) -> None:
    (folder / "forks.py").write_text(FORKED.replace("STEPS", "10**9") + "fork()\n")
    _, error = run("forks.py", "scope=eager")
    assert "never trains in its own process" in str(error)


def test_gradients_within_a_loss_are_not_taken_for_training_by_torch_func(run: Run, folder: Path) -> None:
    (folder / "inner.py").write_text(
        f"{FUNCTIONAL}o = torch.optim.SGD(m.parameters(), lr=0.1)\nslope = grad(lambda x: m(x).sum())\nfor _ in range(3000):\n"
        "    o.zero_grad()\n    (m(torch.randn(4, 2)).mean() + slope(torch.randn(4, 2)).square().mean()).backward()\n"
        "    o.step()\n"
    )
    session, error = run("inner.py", "scope=eager")
    assert error is session.error is None


def test_a_process_that_a_training_script_forks_trains_without_being_measured(run: Run, folder: Path) -> None:
    text = (
        FORKED.replace("STEPS", "30") + "model = torch.nn.Linear(8, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    loop = "for step in range(3000):\n    model(torch.randn(4, 8)).square().mean().backward()\n    optimizer.step()\n"
    (folder / "forks_later.py").write_text(f"{text}{loop}    if step in (1, 20):\n        fork()\n")
    session, error = run("forks_later.py", "scope=eager")
    assert error is session.error is None
    assert session.processes.number == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_torchscript_made_is_refused_before_it_is_compiled(run: Run, folder: Path) -> None:
    (folder / "scripted.py").write_text(
        "import torch\nmodel = torch.jit.script(torch.nn.Linear(8, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3000):\n    model(torch.randn(4, 8)).square().mean().backward()\n    optimizer.step()\n"
    )
    session, _ = run("scripted.py", AOT)
    assert "torch.jit.ScriptModule" in str(session.error)


LOOP = """
for step in range(3000):
    optimizer.zero_grad()
    STEP
    optimizer.step()
"""

NET = """
import torch
from torch import Tensor, nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4)
    def forward(self, x):
        return self.last(self.drop(self.first(x)).relu())
    def training_step(self, x):
        return self(x).square().mean()
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
"""


CALL = "model(torch.randn(4, 8)).square().mean().backward()"

EVALUATES = "model(torch.randn(4, 8)).sum().backward()\n    with torch.no_grad():\n        model.eval()(torch.ones(4, 8))"

CLOSURE = "def closure():\n    loss = model(torch.ones(4, 8)).square().mean() + 1\n    loss.backward()\n    return loss\n"

FABRIC = """
class _FabricModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._forward_module = module
    def forward(self, x):
        output = self._forward_module(x)
        output.register_hook(lambda gradient: print(end="") if gradient.sum().item() else None)
        return output
"""

WAYS = {
    "a method other than forward": NET + LOOP.replace("STEP", "model.training_step(torch.randn(4, 8)).backward()"),
    "three forwards": NET
    + LOOP.replace("STEP", "nn.functional.triplet_margin_loss(*(model(torch.randn(4, 8)) for _ in range(3))).backward()"),
    "a compiled function around the loss": NET
    + "@torch.compile\ndef loss_of(x):\n    return model(x).square().mean()\n"
    + LOOP.replace("STEP", "loss_of(torch.randn(4, 8)).backward()"),
    "an evaluation in each step": NET + LOOP.replace("STEP", EVALUATES),
    "tied weights": NET.replace("8, 4)", "8, 8)") + "model.last.weight = model.first.weight\n" + LOOP.replace("STEP", CALL),
    "a closure": NET + CLOSURE + LOOP.replace("STEP", "pass").replace("step()", "step(closure)"),
    "another working directory": "import os\nos.makedirs('outputs/run')\nos.chdir('outputs/run')\nassert os.stat(__file__)\n"
    + NET
    + LOOP.replace("STEP", CALL),
    "a model that moves after its optimizer is made": NET
    + "model.to('cpu').double()\n"
    + LOOP.replace("STEP", CALL.replace("4, 8)", "4, 8).double()")),
    "Lightning Fabric's wrapper": NET.replace("model = Net()", FABRIC + "model = _FabricModule(Net())")
    + LOOP.replace("STEP", CALL),
    "a scheduler": NET
    + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    + LOOP.replace("STEP", CALL)
    + "    scheduler.step()\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_one_module_is_compiled_however_the_script_is_written(run: Run, folder: Path, way: str) -> None:
    (folder / "written.py").write_text(WAYS[way])
    session, error = run("written.py", AOT)
    assert error is session.error is None
    assert [(target.name, type(target.module).__name__) for target in session.found.targets] == [("model", "Net")]
    figures = session_results.measurement(session)
    assert figures.graphs >= 1
    assert figures.fallbacks == []


STAGES = """
import torch

def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

"""


def test_an_optimizer_that_is_made_anew_for_a_second_stage_takes_over(run: Run, folder: Path) -> None:
    (folder / "stages.py").write_text(
        f"{STAGES}model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))\n"
        "train(model, torch.optim.SGD(model[1].parameters(), lr=0.1), 12)\n"
        "train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 3000)\n"
    )
    session, error = run("stages.py", "scope=eager,optimizer=fused")
    assert error is session.error is None
    assert [type(one).__name__ for one in session.found.optimizers] == ["SGD", "AdamW"]
    assert session.found.optimizers[1].param_groups[0]["fused"]
    assert not _global_optimizer_post_hooks


def test_models_that_are_trained_one_after_another_are_told_apart(run: Run, folder: Path) -> None:
    (folder / "folds.py").write_text(
        f"{STAGES}for _ in range(4):\n    model = torch.nn.Linear(8, 1)\n"
        "    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 15)\n"
    )
    _, error = run("folds.py", "scope=eager")
    assert "trained one model for 15 steps and then others for 45" in str(error)


def test_an_error_in_applying_is_not_the_scripts_to_catch(run: Run, folder: Path) -> None:
    (folder / "catches.py").write_text(
        "import torch\nm = torch.nn.Linear(2, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for _ in range(50):\n    try:\n        m(torch.ones(4, 2)).sum().backward()\n        o.step()\n"
        "    except Exception:\n        pass\n"
    )
    session, error = run("catches.py", "scope=regional,dynamic=auto")
    assert error is None
    assert "no repeated blocks" in str(session.error)


OWN_UPDATE = """
import torch
import compile_sweep
m = torch.nn.Linear(4, 1)
for x in {batches}:
    m(x).square().mean().backward()
    with torch.no_grad():
        for p in m.parameters():
            p -= 0.01 * p.grad
            p.grad = None
"""


@pytest.mark.parametrize("marks", [True, False])
def test_without_an_optimizer_steps_are_those_that_a_script_marks_or_its_backward_passes(
    marks: bool, run: Run, folder: Path
) -> None:
    batches = "(torch.ones(8, 4) for _ in range(2000))"
    (folder / "own_update.py").write_text(OWN_UPDATE.format(batches=f"compile_sweep.steps{batches}" if marks else batches))
    session, error = run("own_update.py", AOT)
    assert error is session.error is None
    assert (session.found.marked, session.found.steps_by_backward) == (True, not marks)
    assert session.step_size()[0] == 8
    assert session.trajectory is not None
    assert session.trajectory.losses[0] > session.trajectory.losses[-1]
    assert session_results.measurement(session).graphs >= 1
    facts = session_results.model_facts(session)
    assert (facts["has_optimizer"], facts["is_fused"]) == (False, False)
    assert session.found.micro_steps == 1
    assert any("each backward pass counts as a step" in line for line in session_results.findings(session)) is not marks


def test_a_loop_by_hand_without_a_module_is_told_so(run: Run, folder: Path) -> None:
    (folder / "endless.py").write_text(
        "import torch\nw = torch.ones(3, requires_grad=True)\nwhile True:\n    w.sum().backward()\n"
    )
    session, error = run("endless.py", "scope=eager")
    assert error is None
    assert "call the model itself" in str(session.error)


@pytest.mark.parametrize("settings", ["scope=eager,as_written=on", AOT])
def test_a_script_may_compile_functions_that_step(settings: str, run: Run, folder: Path) -> None:
    (folder / "compiled_step.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    pass\n"
        "model = Net(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer.step = torch.compile(optimizer.step, backend='eager')\n"
        "@torch.compile(backend='eager')\n"
        "def train(x):\n"
        "    loss = (model(x) - x).square().mean()\n"
        "    loss.backward()\n"
        "for _ in range(4000):\n"
        "    optimizer.zero_grad()\n"
        "    train(torch.randn(4, 8))\n"
        "    optimizer.step()\n"
    )
    session, error = run("compiled_step.py", settings)
    assert error is session.error is None
    assert session.own_compile.functions == ["SGD.step", "train"]
    assert session.restarts == 0
    assert session.step_size() == (4.0, 4.0)
    assert session.trajectory is not None
    assert len(session.trajectory.losses) == 3


def test_a_network_that_is_frozen_for_a_while_is_no_loss_and_equal_optimizers_are_counted(run: Run, folder: Path) -> None:
    (folder / "frozen.py").write_text(
        "import torch\n"
        "made, judge = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)\n"
        "optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (made, judge)]\n"
        "for _ in range(4000):\n"
        "    judge.requires_grad_(False)\n"
        "    judge(made(torch.randn(4, 4))).mean().backward()\n"
        "    optimizers[0].step()\n"
        "    judge.requires_grad_(True)\n"
        "    judge(made(torch.randn(4, 4)).detach()).square().mean().backward()\n"
        "    optimizers[1].step()\n"
    )
    session, error = run("frozen.py", f"{AOT},compile_loss=on")
    assert error is session.error is None
    assert session.found.loss_modules == []
    assert "optimizer SGD, 2 of them" in session_results.findings(session)
