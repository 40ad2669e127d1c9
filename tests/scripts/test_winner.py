"""A sweep's winner applied: to an unchanged script, and by hand."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sweep_folders import MakeSweep, trial
from torch import nn
from torch._dynamo.utils import counters

import compile_sweep
from compile_sweep.run import main
from compile_sweep.schema.errors import CompileSweepError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.apply.in_place import OwnCompile, apply_to_modules, apply_to_optimizers
from compile_sweep.script.discover import Target
from compile_sweep.script.job import ScriptError, ScriptJob, needs_launcher
from compile_sweep.script.main_module import run_as_main
from compile_sweep.script.run_one import not_found
from compile_sweep.script.winner import Applier, settings_of
from orchestrator.plan.library_arguments import accelerate_plugin, equivalents, training_arguments

ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


SHOW_KERNELS = """
cuda = torch.backends.cuda
print(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled())
"""


WARNS_OF_NOTHING = """
import warnings
warnings.simplefilter("error")
import torch
from compile_sweep import apply
model = torch.nn.Linear(2, 2)
apply(model, settings="scope=full,dynamic=static")
import torch._inductor.compile_fx
"""


@pytest.mark.slow
def test_a_script_that_makes_warnings_errors_gets_none_of_torchs_own_imports(tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(WARNS_OF_NOTHING)
    run = trained(tmp_path, "strict.py")
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_script_trains_with_settings_applied_and_its_checkpoints_keep_their_keys(folder: Path) -> None:
    settings = "scope=regional,dynamic=auto,optimizer=fused,sdpa_kernel=flash,backend=aot_eager"
    (folder / "best.json").write_text(json.dumps({"settings": settings}))
    script = folder / "char_lm.py"
    script.write_text(f"import torch\ntorch.backends.cuda.enable_cudnn_sdp(True)\n{script.read_text()}{SHOW_KERNELS}")
    words = ["char_lm.py", "--max_iters=8", "--eval_interval=8", "--compile_model=True"]
    run = trained(folder, "-m", "compile_sweep.run", "--settings", "best.json", *words)
    assert run.returncode == 0, run.stderr
    assert "regional" in run.stderr
    assert "applied to model (GPT)" in run.stderr
    assert "step 8: loss" in run.stdout
    assert run.stdout.split()[-4:] == ["True", "True", "False", "True"], "a kernel stays in force for the whole script"
    kept = torch.load(folder / "out" / "ckpt.pt")
    assert kept["iteration"] == 8
    assert next(iter(kept["model"])) == "wte.weight"


def test_a_winner_that_is_not_there_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["--settings", "nowhere", "vae.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --settings nowhere: there is no such folder or file")
    assert "Traceback" not in error


def test_settings_behind_the_script_are_not_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vae.py", "--width", "32", "--settings=scope=full"]) == 2
    assert "--settings stands after vae.py, whose own arguments follow it; put --settings before it" in capsys.readouterr().err
    assert main(["vae.py", "--width", "32"]) == 2
    assert "--settings is missing" in capsys.readouterr().err


def test_a_mistake_in_the_words_is_told_before_torch_is_loaded(folder: Path) -> None:
    code = "import sys; from compile_sweep.run import main; main(['train.py']); print('torch' in sys.modules)"
    run = trained(folder, "-c", code)
    assert "--settings is missing" in run.stderr
    assert run.stdout.split() == ["False"]


@pytest.mark.slow
def test_a_script_that_spawns_its_ranks_is_started_once_for_each(folder: Path) -> None:
    frozen = "import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    (folder / "spawns.py").write_text(f"{frozen}import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n")
    run = trained(folder, "-m", "compile_sweep.run", "--settings", AS_WRITTEN, "spawns.py")
    assert run.returncode == 2
    assert run.stdout.split() == ["True", "True"], "collections do not scan torch"
    assert "start this command once for each: torchrun --nproc-per-node 2 -m compile_sweep.run" in run.stderr


AS_WRITTEN = "scope=eager,as_written=on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("throughput", "compile_s", "chosen"),
    [(1000, 60, "scope=regional,dynamic=auto"), (480, 60, AS_WRITTEN), (1000, 1e6, AS_WRITTEN)],
    ids=["gains", "no gain", "never pays for its compile"],
)
def test_of_a_folder_the_verdict_is_applied_and_not_the_fastest(
    throughput: float, compile_s: float, chosen: str, make_sweep: MakeSweep
) -> None:
    found = make_sweep([trial(AS_WRITTEN, 500, 0.1), trial("scope=regional,dynamic=auto", throughput, compile_s)])
    assert settings_of(found) == CompileSettings.parse(chosen)


def test_what_is_said_while_a_progress_bar_is_shown_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applier = Applier("scope=eager,optimizer=fused")
    applier.begin()
    try:
        for _ in tqdm(range(9), mininterval=0.0):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    finally:
        applier.end()
    (line,) = [line for line in re.split(r"[\r\n]", capsys.readouterr().err) if "fused optimizer" in line]
    assert line.startswith("compile_sweep: ")
    assert line.endswith("applied to model (Linear)")


@pytest.mark.slow
def test_a_winner_is_applied_to_a_loop_without_an_optimizer_of_torchs() -> None:
    model = torch.nn.Linear(4, 1)
    said: list[str] = []
    applier = Applier("scope=full,backend=aot_eager", say=said.append)
    applier.begin()
    try:
        for _ in range(30):
            model(torch.ones(2, 4)).sum().backward()
    finally:
        applier.end()
    assert applier.is_applied
    assert "_compiled_call_impl" in vars(model)
    assert [line.endswith("applied to model (Linear)") for line in said] == [True]


def test_a_model_that_the_settings_cannot_compile_is_not_said_to_be_compiled_next() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    applier = Applier("scope=regional,optimizer=fused", say=said.append)
    applier.begin()
    try:
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    finally:
        applier.end()
    assert said[0].startswith("no module is compiled: scope=regional: Linear has no repeated blocks")
    assert said[-1].endswith("fused optimizer, applied to the optimizers alone")


def test_a_folder_without_a_usable_trial_is_one_sentence(make_sweep: MakeSweep) -> None:
    with pytest.raises(CompileSweepError, match="no trial with a usable figure"):
        settings_of(make_sweep([trial(AS_WRITTEN, status=Status.FAILED)]))


LIGHTNING = """
import lightning, torch, compile_sweep
from lightning_module import Classifier
from torch.utils.data import DataLoader, TensorDataset
batches = DataLoader(TensorDataset(torch.randn(128, 16), torch.randint(4, (128,))), batch_size=16)
trainer = lightning.Trainer(max_steps=8, accelerator="cpu", callbacks=[compile_sweep.lightning_callback(SETTINGS)])
trainer.fit(model := Classifier(), batches)
"""

TRAINER = """
import torch, compile_sweep
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16))
rows = [{"input_ids": (ids := torch.randint(50, (8,))), "labels": ids} for _ in range(64)]
arguments = TrainingArguments("out", max_steps=8, per_device_train_batch_size=8, report_to=[], use_cpu=True)
Trainer(model, arguments, train_dataset=rows, callbacks=[compile_sweep.trainer_callback(SETTINGS)]).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "model"),
    [
        (TRAINER, "GPT2LMHeadModel"),
        pytest.param(LIGHTNING, "Classifier", marks=pytest.mark.nightly("same as the Trainer, whose callback does the same")),
    ],
)
def test_a_callback_applies_a_winner_inside_a_trainer(
    program: str, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning" if "lightning" in program else "accelerate")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    exec(program.replace("SETTINGS", '"scope=full,dynamic=auto,backend=aot_eager,optimizer=fused"'), {})
    assert re.search(rf"applied to .*\({model}\)", capsys.readouterr().err)
    assert counters["stats"]["unique_graphs"] > before


def test_a_callback_does_nothing_in_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_sweep.script.winner.current", object)
    said: list[str] = []
    applier, before = Applier("scope=full,backend=aot_eager", say=said.append), nn.Module.__call__
    applier.begin()
    assert nn.Module.__call__ is before
    applier.end()
    assert said == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_by_hand_a_model_is_compiled_in_place_and_its_copies_are_not() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    keys, x = list(model.state_dict()), torch.randn(3, 4)
    expected, before = model(x), counters["stats"]["unique_graphs"]
    applied = compile_sweep.apply(model, optimizer, "scope=full,dynamic=auto,backend=aot_eager,optimizer=fused")
    assert (applied.modules, applied.optimizers) == (("Net",), ("AdamW",))
    assert optimizer.param_groups[0]["fused"]
    assert torch.allclose(model(x), expected)
    assert counters["stats"]["unique_graphs"] == before + 1
    assert (type(model), list(model.state_dict())) == (Net, keys)
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.layer.weight.zero_()
        average.layer.bias.zero_()
    assert not average(x).any()
    assert model(x).any()


def test_by_hand_a_module_that_settings_leave_out_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    critic, actor = Net(), Net()
    monkeypatch.setattr(sys.modules["__main__"], "critic", critic, raising=False)
    settings = "scope=full,dynamic=auto,backend=aot_eager,parts.critic.compile=off"
    assert compile_sweep.apply(critic, None, settings).modules == ()
    assert vars(critic).get("_compiled_call_impl") is None
    assert compile_sweep.apply(actor, None, settings).modules == ("Net",)
    assert vars(actor)["_compiled_call_impl"] is not None


@pytest.mark.parametrize("compiles_itself", [False, True])
def test_evaluations_are_compiled_only_if_the_script_compiles_its_model(compiles_itself: bool) -> None:
    model, own = Net(), OwnCompile()
    if compiles_itself:
        with own.answered(plainly=True):
            torch.compile(model)
    settings = CompileSettings.parse("scope=full,dynamic=static,backend=aot_eager")
    apply_to_modules(settings, [Target(called=model, module=model, name="model")], {}, own_compile=own)
    before = counters["stats"]["unique_graphs"]
    model(torch.randn(8, 4))
    model.eval()
    for length in [3] if compiles_itself else range(1, 20):
        with torch.no_grad():
            model(torch.randn(length, 4))
    assert counters["stats"]["unique_graphs"] - before == 1 + compiles_itself
    model.train()
    with torch.no_grad():  # as a generator in the step of its discriminator
        model(torch.randn(8, 4))
    model(torch.randn(8, 4))
    assert counters["stats"]["unique_graphs"] - before == 2 + compiles_itself


def test_by_hand_marks_wait_until_two_lengths_were_seen() -> None:
    model = Net()
    compile_sweep.apply(model, settings="scope=full,dynamic=mark,backend=aot_eager")
    before = counters["stats"]["unique_graphs"]
    model(torch.randn(8, 4))
    model(torch.randn(9, 4))
    assert counters["stats"]["unique_graphs"] == before
    for length in (10, 11, 8):
        model(torch.randn(length, 4))
    assert counters["stats"]["unique_graphs"] == before + 1


def test_by_hand_marks_come_with_all_else_that_a_setting_says() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    compile_sweep.apply(model, settings="scope=full,dynamic=mark,memory_format=channels_last,backend=aot_eager")
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("lengths", "padding"), [((8, 9, 10), [False]), ((8, 8, 8, 8), [None])])
def test_by_hand_lengths_that_change_go_without_padded_products_before_torch_2_13(
    lengths: tuple[int, ...], padding: list[bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool | None] = []

    def compile_(forward: Any, options: Mapping[str, Any] | None = None) -> Any:
        asked.append((options or {}).get("shape_padding"))
        return forward

    for place in ("apply.in_place", "winner"):
        monkeypatch.setattr(f"compile_sweep.script.{place}.torch_version", lambda: (2, 12))
    monkeypatch.setattr("compile_sweep.script.apply.in_place._compile", compile_)
    model = Net()
    compile_sweep.apply(model, settings="scope=full,dynamic=auto")
    for length in lengths:
        model(torch.randn(length, 4))
    assert asked == padding


def test_steps_do_nothing_outside_a_sweep() -> None:
    assert list(compile_sweep.steps([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scope=full,dynamic=buckets", "the script pads its own"),
        ("scope=modular", "use full or regional"),
        ("scope=full,autocast=bf16", "chooses its own autocast"),
        ("nonsense=1", "nonsense"),
    ],
)
def test_settings_that_no_script_takes_are_refused(text: str, said: str) -> None:
    with pytest.raises(CompileSweepError, match=said):
        settings_of(text)


@pytest.mark.parametrize(
    ("text", "trainer", "plugin"),
    [
        ("scope=full,dynamic=auto", "torch_compile=True", 'backend="inductor"'),
        (
            "scope=full,dynamic=auto,mode=reduce-overhead,optimizer=fused",
            'torch_compile=True, torch_compile_mode="reduce-overhead", optim="adamw_torch_fused"',
            None,
        ),
        ("scope=eager,optimizer=fused,matmul_precision=high", 'optim="adamw_torch_fused", tf32=True', None),
        ("scope=regional,dynamic=true", None, 'backend="inductor", dynamic=True, use_regional_compilation=True'),
        ("scope=full,dynamic=static,fullgraph=on", None, 'backend="inductor", fullgraph=True, dynamic=False'),
        ("scope=full,dynamic=auto,memory_format=channels_last", None, None),
        ("scope=full,dynamic=auto,activation_checkpointing=off", "torch_compile=True, gradient_checkpointing=False", None),
        ("scope=full,dynamic=auto,activation_checkpointing=blocks", None, None),
        ("scope=eager,as_written=on", None, None),
        ("scope=eager,cudagraphs=on,optimizer=fused", None, None),
    ],
)
def test_what_libraries_call_a_setting_is_named_where_they_have_all_of_it(
    text: str, trainer: str | None, plugin: str | None
) -> None:
    settings = CompileSettings.parse(text)
    assert training_arguments(settings) == trainer
    assert accelerate_plugin(settings) == (plugin and f"dynamo_plugin=TorchDynamoPlugin({plugin})")


def test_only_libraries_that_a_script_trains_with_are_named() -> None:
    settings = CompileSettings.parse("scope=full,dynamic=auto")
    assert dict(equivalents(settings, "args = trainingarguments(...)")) == {"TrainingArguments": "torch_compile=True"}
    assert dict(equivalents(settings, "model(x).backward()")) == {}
    pads, trainer = replace(settings, pad_to_multiple_of=64), "trainer(args=trainingarguments(...))"
    assert dict(equivalents(pads, trainer)) == {}
    assert dict(equivalents(pads, f"datacollatorwithpadding; {trainer}"))["the data collator"] == "pad_to_multiple_of=64"
    assert "Accelerator" in dict(equivalents(settings, "from accelerate import accelerator\naccelerator = accelerator()"))
    assert dict(equivalents(settings, "device = torch.accelerator.current_accelerator()")) == {}


def test_a_file_with_relative_imports_runs_as_a_module_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "rates.py").write_text("RATE = 3\n")
    (inner / "train.py").write_text("from ..rates import RATE\nseen = RATE, __package__, __name__\n")
    kept = sys.modules["__main__"]
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    try:
        run_as_main(str(inner / "train.py"), ())
        assert vars(sys.modules["__main__"])["seen"] == (3, "outer.inner", "__main__")
    finally:
        sys.modules["__main__"] = kept


def test_a_module_runs_as_python_m_would_run_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ours" / "inner").mkdir(parents=True)
    (folder / "ours" / "rates.py").write_text("RATE = 3\n")
    seen = "from ours.rates import RATE\nimport vae_data\nseen = RATE, __package__, __name__\n"
    (folder / "vae_data.py").touch()
    (folder / "ours" / "inner" / "train.py").write_text(seen)
    (folder / "ours" / "__main__.py").write_text(seen)
    kept = sys.modules["__main__"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    try:
        for name, package in (("ours.inner.train", "ours.inner"), ("ours", "ours")):
            job = ScriptJob.of(name)
            assert ScriptJob.of(job.given) == job
            run_as_main(job.path, (), module=job.module)
            assert vars(sys.modules["__main__"])["seen"] == (3, package, "__main__")
    finally:
        sys.modules["__main__"] = kept
    found = not_found(ModuleNotFoundError("no", name="ours.rates"), ScriptJob.of("ours/inner/train.py"))
    assert "name the script as a module, ours.inner.train instead of ours/inner/train.py" in str(found)
    assert not_found(ModuleNotFoundError("no", name="elsewhere"), ScriptJob.of("ours/inner/train.py")) is None
    with pytest.raises(ScriptError, match="as for python -m, a module"):
        ScriptJob.of("ours.nothing")


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ('rank = int(os.environ["LOCAL_RANK"])', True),
        ('dist.init_process_group("nccl")', True),
        ('ddp = int(os.environ.get("RANK", -1)) != -1\nif ddp:\n    init_process_group("nccl")\n    os.environ["RANK"]', False),
        ('if "RANK" in os.environ:\n    rank = os.environ["RANK"]', False),
        ('dist.init_process_group("gloo", rank=rank, world_size=2)\nmp.spawn(main, nprocs=2)', False),
        ("model(x).backward()", False),
    ],
)
def test_a_script_that_runs_under_torchrun_alone_is_known_by_its_text(text: str, needs: bool) -> None:
    assert needs_launcher(text) is needs


def test_an_average_of_reordered_weights_is_reordered_too() -> None:
    # Otherwise each update of the average is a slow kernel for each weight, between different strides.
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1))
    average = torch.optim.swa_utils.AveragedModel(model)
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    apply_to_modules(CompileSettings.parse("scope=eager,memory_format=channels_last"), [Target(called=model, module=model)], {})
    for weight, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
        assert weight.stride() == averaged.stride()
    assert not other[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_reordered_weights_take_the_state_of_their_optimizer_along() -> None:
    # The first steps of a script run before settings are applied. Fused AdamW on a GPU then refused the state's strides: "params,
    # grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout".
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    apply_to_optimizers(CompileSettings.parse("scope=eager,optimizer=fused,memory_format=channels_last"), [optimizer])
    for weight, average in zip(model.parameters(), before, strict=True):
        state = optimizer.state[weight]
        assert weight.grad is not None
        assert {weight.stride()} == {weight.grad.stride(), state["exp_avg"].stride(), state["exp_avg_sq"].stride()}
        torch.testing.assert_close(state["exp_avg"], average)
    assert optimizer.param_groups[0]["fused"]


def test_a_setting_that_changes_nothing_is_said_to() -> None:
    said: list[str] = []
    applier = Applier(AS_WRITTEN, say=said.append)
    applier.begin()
    applier.end()
    assert said == ["as the script has it, nothing is changed"]


class Flow(nn.Sequential):
    """A model that may be called by a method alone."""

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x)
        return -x.square().sum(1)


@pytest.mark.parametrize("by_method", [True, False])
def test_a_model_that_trains_without_being_called_is_told_that_it_is_not_compiled(by_method: bool) -> None:
    """Nothing of a flow was compiled, and nothing said so."""
    model = Flow(nn.Linear(4, 4), nn.Linear(4, 4))
    compile_sweep.apply(model, torch.optim.SGD(model.parameters(), lr=0.1), "scope=full,backend=aot_eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(8, 4)
            (model.log_prob(x) if by_method else model(x)).mean().backward()
    told = [str(one.message) for one in said if "trains without being called" in str(one.message)]
    assert [line.partition(" trains")[0] for line in told] == (["Flow"] if by_method else [])
    assert not model[0].weight._post_accumulate_grad_hooks or by_method
