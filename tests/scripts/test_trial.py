"""A whole trial of a script, in processes of its own."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.transfer import CacheFolders, CacheUsage, gather_artifacts, restore_artifacts
from compile_sweep.schema.causes.places import place_of
from compile_sweep.schema.causes.remedies import remedy_of
from compile_sweep.schema.outcome import Death, Label, Phase, Verdict, judge_death, judge_measurement
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import numerics, trial
from compile_sweep.script.job import SEE_OUTPUT, ScriptError, ScriptJob
from compile_sweep.script.run_one import print_from_script, run_script
from compile_sweep.script.session import Session
from compile_sweep.script.session_results import measurement, other_batch_size
from compile_sweep.script.trial import BUNDLE, RunFailed, ScriptTrial, StartRun
from orchestrator.run.fork_server import ForkedScriptRun, ForkServer, Setup, script_order
from tests.scripts.conftest import SHORT, Run

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def starts(forked_servers: None) -> Iterator[list[StartRun]]:
    """Start runs in forks of processes that have imported torch, as a sweep does, side by side."""
    setup = Setup(workload=None, python_path="", use_gpu=False, runs_scripts=True)
    with ExitStack() as ending:
        servers = [ForkServer(setup, os.environ | ENVIRONMENT) for _ in range(2)]
        for server in servers:
            ending.callback(server.close)
        yield [partial(_forked, server) for server in servers]


def _forked(server: ForkServer, run: Path, folder: str, environment: Mapping[str, str], log: Path | None) -> ForkedScriptRun:
    return ForkedScriptRun(server, script_order(run, folder, environment, log, marker="test"))


@pytest.mark.nightly("one worker behaves as two do; `make test` measures two, with their files, phases and references")
@pytest.mark.slow
def test_a_trial_measures_judges_and_leaves_the_persons_folder_as_it_was(folder: Path, tmp_path: Path) -> None:
    before = files_of(folder)
    phases: list[Phase] = []
    trial = ScriptTrial(
        job=ScriptJob.of("plain_loop.py", ["--width", "32"], folder=str(folder)),
        settings=CompileSettings.parse("scope=full,dynamic=auto,backend=aot_eager"),
        base=tmp_path / "trial",
        references=tmp_path / "references",
        protocol=SHORT,
        environment=ENVIRONMENT,
        on_phase=phases.append,
    )
    trial.base.mkdir()
    found = trial.run()
    assert found["numerics"]["status"] == "ok"
    assert found["numerics"]["gradient_check"]["outcome"] == "ok"
    assert found["pipeline"] == "script"
    assert found["findings"][0].startswith("module model: Net")
    assert phases == [Phase.BUILDING, Phase.WARMING_UP, Phase.STEADY, Phase.CHECKING, Phase.EAGER_RUNS, Phase.DONE]
    assert sorted(path.name for path in trial.references.iterdir()) == ["again-0", "eager-0", "lock", "perturbed-0"]
    assert list(trial.base.iterdir()) == []
    assert files_of(folder) == before


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("from_compiler", "said"), [(True, "the compiler raised RuntimeError: .*take its first"), (False, "script")]
)
def test_an_error_of_the_compilers_is_told_as_that_with_what_helps(from_compiler: bool, said: str) -> None:
    text = "torch.compile with aot_autograd does not currently support double backward"
    assert re.search(said, RunFailed("builtins.RuntimeError", text, from_compiler).sentence)


BREAKS_IN_A_LOOP = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        for _ in range(2):
            x = self.first(x)
            {}
        return self.last(x)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4000):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_run_ends_when_what_falls_back_compiles_for_long(patience_s: float, run: Run, folder: Path) -> None:
    (folder / "falls_back.py").write_text(BREAKS_IN_A_LOOP.format("torch._dynamo.graph_break()"))
    session, error = run("falls_back.py", "scope=full,dynamic=auto,backend=aot_eager", fallback_patience_s=patience_s)
    assert error is None
    if patience_s:
        assert session.error is None
        verdict = judge_measurement(measurement(session).to_dict() | {"numerics": {"status": "ok"}}, claims_cudagraphs=False)
    else:
        assert session.stream is None
        verdict = judged(session.error)
    assert verdict.label is Label.SILENT_FALLBACK
    assert verdict.reason is not None
    assert "falls_back.py" in verdict.reason
    assert ("of compiling and warming up" in verdict.reason) is not bool(patience_s)


def judged(error: BaseException | None) -> Verdict:
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    seconds = {"in_phase_s": 1.0, "elapsed_s": 1.0, "compile_deadline_s": 60.0, "trial_deadline_s": 90.0}
    return judge_death(Death(phase="warming-up", error_type=name, error_text=str(error), **seconds))


@pytest.mark.slow
def test_a_run_ends_at_once_where_a_setting_is_known_that_may_mend_what_falls_back(run: Run, folder: Path) -> None:
    (folder / "reads_values.py").write_text(BREAKS_IN_A_LOOP.format("x = x / max(1.0, x.detach().abs().max().item())"))
    settings, remedy = "scope=full,dynamic=auto,backend=aot_eager", "dynamo.capture_scalar_outputs=on"
    session, error = run("reads_values.py", settings, remedy_patience_s=0.0)
    assert error is None
    assert session.stream is None
    assert str(session.error).endswith(f"s of compiling and warming up, because {remedy} may mend it")
    verdict = judged(session.error)
    record = {"label": verdict.label, "reason": verdict.reason}
    assert verdict.label is Label.SILENT_FALLBACK
    assert remedy_of(record) == remedy
    assert remedy_of(record, tried=[remedy]) is None
    session, error = run("reads_values.py", f"{settings},{remedy}", remedy_patience_s=0.0)
    assert error is session.error is None
    assert measurement(session).fallbacks == []


def test_a_run_that_fell_back_is_told_apart_and_in_its_own_words() -> None:
    failed = RunFailed("compile_sweep.script.job.FellBackError", "torch did not compile all that it should")
    assert failed.fell_back
    assert failed.sentence == "torch did not compile all that it should"
    assert not RunFailed("compile_sweep.script.job.ScriptError", "no module").fell_back


def test_an_error_of_the_scripts_says_where_and_its_output_is_kept_only_where_it_helps() -> None:
    raised = RunFailed("builtins.AssertionError", "", output=["Traceback"], at="train.py:3")
    assert (raised.sentence, raised.output) == ("the script raised AssertionError at train.py:3", ["Traceback"])
    ours = "compile_sweep.script.job.ScriptError"
    assert RunFailed(ours, "the script spawns", output=["loading"]).output == ()
    assert RunFailed(ours, f"exit code 2; {SEE_OUTPUT}", output=["usage: …"]).output == ["usage: …"]
    *printed, advice = RunFailed("builtins.RuntimeError", "no autograd formula was registered", output=["Traceback"]).output
    assert printed == ["Traceback"]
    assert advice.startswith("→ an operator of torch.library has no backward")


@pytest.mark.parametrize(
    "text",
    [
        "assert False, 'bad batch'\n",
        "def f(:\n",
        "import torch; x = torch.ones(1, requires_grad=True).exp(); x.backward(); x.backward(); assert True\n",
    ],
)
def test_a_traceback_begins_in_the_script_and_has_none_of_our_frames(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "odd.py").write_text(text)
    job = ScriptJob.of("odd.py", folder=str(folder))
    session = Session(CompileSettings.parse("scope=eager"))
    kept = sys.modules["__main__"], sys.argv[:], sys.path[:]
    try:
        error = run_script(session, job.path, job, folder.parent)
    finally:
        sys.modules["__main__"], sys.argv[:], sys.path[:] = kept
    assert error is not None
    assert place_of(error) == ("odd.py:1" if "assert" in text else "")
    print_from_script(error, {str(folder): "/home/me/project"})
    printed = capsys.readouterr().err
    assert "compile_sweep" not in printed
    assert 'File "/home/me/project/odd.py", line 1' in printed


@pytest.mark.slow
def test_a_script_that_fails_says_why(folder: Path, tmp_path: Path) -> None:
    trial = ScriptTrial(
        job=ScriptJob.of("plain_loop.py", ["--wrong"], folder=str(folder)),
        settings=CompileSettings(scope="eager"),  # type: ignore[arg-type]
        base=tmp_path,
        references=tmp_path / "references",
        environment=ENVIRONMENT,
    )
    with pytest.raises(RunFailed, match="exit code 2 after 0 steps"):
        trial.run()


SPAWNING = """
import multiprocessing as mp
import torch

def train(rank):
    model = torch.nn.Linear(8, 1)
    while True:
        model(torch.randn(4, 8)).square().mean().backward()

if __name__ == "__main__":
    CALL
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("mp.get_context('fork').Pool(1).map(train, [0])", "with multiprocessing, a worker of a pool, where"),
        pytest.param(
            "p = mp.get_context('spawn').Process(target=train, args=(0,)); p.start(); p.join()",
            "multiprocessing, which runs train,",
            marks=pytest.mark.nightly("another process that imports torch; `make test` forks one"),
        ),
    ],
)
def test_a_script_that_trains_in_processes_of_its_own_is_told_at_their_first_step(
    call: str, said: str, folder: Path, tmp_path: Path, starts: list[StartRun]
) -> None:
    (folder / "spawning.py").write_text(SPAWNING.replace("CALL", call))
    (tmp_path / "run").mkdir()
    trial = ScriptTrial(
        job=ScriptJob.of("spawning.py", folder=str(folder)),
        settings=CompileSettings.parse("scope=full"),
        base=tmp_path,
        references=tmp_path / "references",
        environment=ENVIRONMENT,
        start=starts[0],
        shows_output=False,
    )
    with pytest.raises(RunFailed, match=said) as error:
        trial.run_once(tmp_path / "run")
    assert "write it for torchrun" in error.value.sentence
    assert error.value.output == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "settings", "gradients"),
    [
        ("two_workers.py", "scope=full,dynamic=auto", "ok"),
        pytest.param(
            "fsdp.py",
            "scope=regional,dynamic=auto",
            "skipped",
            marks=pytest.mark.nightly("compiles in two more processes; `make test` measures DDP"),
        ),
        pytest.param(
            "fsdp.py",
            "scope=full,dynamic=auto",
            "skipped",
            marks=pytest.mark.nightly("compiles in two more processes; a test of recorded text covers its advice"),
        ),
    ],
)
def test_two_workers_step_together_and_are_measured_as_one(
    script: str,
    settings: str,
    gradients: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starts: list[StartRun],
) -> None:
    # One eager run takes the place of three, for each is two more processes; the test above makes all of them.
    monkeypatch.setattr(numerics, "EAGER_RUNS", {"eager": numerics.EAGER_RUNS["eager"]})
    references = tmp_path / "references"
    references.mkdir()
    for name in ("again-0", "perturbed-0"):
        (references / name).symlink_to("eager-0")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    together, answers = Barrier(2), [False, False]
    before = files_of(folder)
    phases: tuple[list[Phase], list[Phase]] = ([], [])

    def agreed(rank: int, answer: bool) -> bool:
        answers[rank] = answer
        together.wait(300)
        first_answer = answers[0]
        together.wait(300)
        return first_answer

    def measured(rank: int) -> dict[str, Any]:
        trial = ScriptTrial(
            job=ScriptJob.of(script, folder=str(folder)),
            settings=CompileSettings.parse(f"{settings},backend=aot_eager"),
            base=tmp_path / f"trial-{rank}",
            references=references,
            protocol=SHORT,
            environment=ENVIRONMENT,
            start=starts[rank],
            is_first=rank == 0,
            agree=lambda answer: agreed(rank, answer),
            on_phase=phases[rank].append,
            rendezvous=lambda: {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
        )
        trial.base.mkdir()
        found = trial.run()
        assert list(trial.base.iterdir()) == []
        return found

    with ThreadPoolExecutor(2) as workers:
        first, second = workers.map(measured, range(2))
    assert first["numerics"]["status"] == "ok"
    assert first["numerics"]["gradient_check"]["outcome"] == gradients
    assert first["samples_per_s"] == second["samples_per_s"]
    assert len(first["compile_s_by_rank"]) == 2
    assert first["graphs"] >= 1
    assert first["pipeline"] == "script"
    assert first["findings"][0].startswith("module model: ")
    assert phases == ([Phase.BUILDING, Phase.WARMING_UP, Phase.STEADY, Phase.CHECKING, Phase.EAGER_RUNS, Phase.DONE],) * 2
    assert (references / "eager-0").exists()
    assert files_of(folder) == before
    if script == "fsdp.py":
        verdict = judge_measurement(first, claims_cudagraphs=False)
        assert ("which compiles its blocks inside their hooks" in str(verdict.reason)) is settings.startswith("scope=full")


@pytest.mark.nightly("compiles with Inductor in a process of its own; test_sharing.py shows what the worker does with the result")
@pytest.mark.slow
def test_what_a_script_compiled_is_hit_by_the_next_trial_with_other_folders(folder: Path, tmp_path: Path) -> None:
    artifacts: list[Artifact] = []
    uses = []
    for name in ("first", "second"):
        folders = CacheFolders(inductor=tmp_path / name / "inductor", triton=tmp_path / name / "triton")
        restore_artifacts(artifacts, folders)
        trial = ScriptTrial(
            job=ScriptJob.of("vae.py", ["--batch-size", "8"], folder=str(folder)),
            settings=CompileSettings.parse("scope=full,dynamic=auto"),
            base=tmp_path / name / "trial",
            references=tmp_path / "references",
            protocol=SHORT,
            environment={
                **ENVIRONMENT,
                "TORCHINDUCTOR_CACHE_DIR": str(folders.inductor),
                "TRITON_CACHE_DIR": str(folders.triton),
            },
            watches=artifacts,
        )
        run = trial.base / "run"
        run.mkdir(parents=True)
        use = CacheUsage.from_dict(trial.run_once(run)["cache_use"])
        artifacts = gather_artifacts(folders, use, artifacts, (run / BUNDLE).read_bytes())
        uses.append(use)
    assert sum(uses[0].misses.values()) > 0
    assert sum(uses[1].hits.values()) > 0
    assert uses[1].misses == {}
    assert uses[1].saved_s > 0


@pytest.mark.slow
def test_a_script_gets_its_batch_size_by_its_own_option(folder: Path, tmp_path: Path, starts: list[StartRun]) -> None:
    trial = ScriptTrial(
        job=ScriptJob.of("vae.py", ["--batch-size", "8"], folder=str(folder), batch_argument="--batch-size"),
        settings=CompileSettings.parse("scope=eager,as_written=on,batch_size=16"),
        base=tmp_path / "trial",
        references=tmp_path / "references",
        protocol=SHORT,
        environment=ENVIRONMENT,
        start=starts[0],
    )
    run = trial.base / "run"
    run.mkdir(parents=True)
    found = trial.run_once(run)["measurement"]
    assert found["samples_per_s"] * fmean(found["step_ms"]) / 1e3 == pytest.approx(16, rel=1e-3)


@pytest.mark.parametrize(
    ("option", "before", "after"),
    [
        ("--batch-size", ["--batch-size", "8", "--lr", "1"], ["--lr", "1", "--batch-size", "16"]),
        ("--batch-size", ["--batch-size=8"], ["--batch-size", "16"]),
        ("--batch_size=", ["config.py", "--batch_size=8"], ["config.py", "--batch_size=16"]),
        ("train.batch=", [], ["train.batch=16"]),
    ],
)
def test_a_batch_size_takes_the_place_of_the_scripts_own(folder: Path, option: str, before: list[str], after: list[str]) -> None:
    job = ScriptJob.of("vae.py", before, folder=str(folder), batch_argument=option)
    assert list(job.under(CompileSettings.parse("batch_size=16")).arguments) == after
    assert job.under(CompileSettings()) is job
    with pytest.raises(ScriptError, match="name that with --batch-arg"):
        replace(job, batch_argument=None).under(CompileSettings.parse("batch_size=16"))


@pytest.mark.parametrize(("sizes", "is_right"), [([16, 16, 9], True), ([32, 32], True), ([8, 8, 8], False), ([0, 0], False)])
def test_a_batch_size_that_a_script_does_not_follow_is_an_error(sizes: list[int], is_right: bool) -> None:
    settings = CompileSettings.parse("batch_size=16")
    session: Any = SimpleNamespace(settings=settings, sizes=[(size, size) for size in sizes])
    assert (other_batch_size(session) is None) is is_right


@pytest.mark.parametrize(
    ("losses", "eager", "num_skipped"),
    [
        ([1.0, math.nan, 0.9], [1.0, math.inf, math.nan, 0.9], 1),
        ([1.0, math.nan, 0.9], [1.0, 0.9], 0),
        ([1.0, math.nan, math.nan], [1.0, math.nan, 0.9], 0),
        ([1.0, math.nan, 0.9], [1.0, math.nan], 0),
        ([1.0, 0.9], [1.0, math.nan, 0.9], 0),
    ],
)
def test_losses_that_are_not_finite_are_the_scripts_own_if_eager_training_goes_on_after_some_too(
    losses: list[float], eager: list[float], num_skipped: int, tmp_path: Path
) -> None:
    mark, as_it_is = tmp_path / trial.SKIPS, CompileSettings.parse("scope=eager,as_written=on")
    assert not trial._skipped_by_itself(eager, as_it_is, mark, has_compiled=True)
    trial._skipped_by_itself(eager, as_it_is, mark, has_compiled=False)
    assert trial._skipped_by_itself(losses, CompileSettings.parse("scope=full"), mark, has_compiled=True) == num_skipped


class _Told:
    """Stands for runs that end at once, with an outcome that says what to keep of the script as it is."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.protocols: list[dict[str, Any]] = []

    def __call__(self, assignment: Path, folder: str, environment: Mapping[str, str], log: Path | None) -> trial.Running:
        self.protocols.append(json.loads(assignment.read_text())["protocol"])
        assignment.with_name("outcome").write_text(json.dumps({"as_it_is": self.kept}))
        return cast(trial.Running, SimpleNamespace(poll=lambda: 0, end=lambda: None))


def test_steps_are_counted_and_sized_as_those_of_the_script_as_it_is(folder: Path, tmp_path: Path) -> None:
    runs = _Told()

    def measure(settings: str) -> dict[str, Any]:
        base = tmp_path / str(len(runs.protocols))
        (base / "run").mkdir(parents=True)
        ScriptTrial(
            job=ScriptJob.of("plain_loop.py", folder=str(folder)),
            settings=CompileSettings.parse(settings),
            base=base,
            references=tmp_path / "references",
            protocol={"min_passes": 3},
            start=runs,
        ).run_once(base / "run")
        return runs.protocols[-1]

    assert measure("scope=eager,as_written=on") == {"min_passes": 3}, "no step counted"
    runs.kept = {"counts_new_shapes": False, "mean_step": [4.0, 60.0, 240.0]}
    assert measure("scope=full") == {"min_passes": 3}, "a compiled setting decides nothing"
    assert measure("scope=eager,as_written=on") == {"min_passes": 3}
    assert measure("scope=full") == {"min_passes": 3, **runs.kept}
