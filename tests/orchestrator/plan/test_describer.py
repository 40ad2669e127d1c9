"""A fresh process provides facts about a workload for a plan; the driver imports neither torch nor the user's code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import is_running, wait_until

from compile_sweep.contract.base import load_workload
from compile_sweep.contract.installed_torch import LoadedTorch
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.contract.workload_names import BUILT_IN
from compile_sweep.describe import describe
from compile_sweep.schema.errors import WorkloadError
from orchestrator.plan.describer import DEADLINE_S, Describer

FIRST_LINE_S = 2.0
"""Seconds within which the command must say what it does."""


@pytest.fixture(autouse=True)
def describes_in_this_process() -> None:
    """Disables the shared fixture, because these tests are about the other process."""


@pytest.fixture(scope="module")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for modules of the user's, each under a name of its own."""
    return tmp_path_factory.mktemp("users")


@pytest.fixture(scope="module")
def shared(users_folder: Path) -> Iterator[Describer]:
    """A describer that imports the user's code from that folder; its process imports torch only once for several tests."""
    with Describer(with_current_folder=True) as made:
        yield made


@pytest.fixture
def describer(shared: Describer, users_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Describer:
    """The shared describer, in its folder, where it starts another process if the last one has ended."""
    monkeypatch.chdir(users_folder)
    monkeypatch.setattr(shared, "deadline_s", DEADLINE_S)
    return shared


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_facts_survive_json(name: str) -> None:
    facts = describe(load_workload(name)("tiny", 0), "somewhere")
    assert WorkloadFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


@pytest.mark.slow
def test_a_fresh_process_answers_as_this_one_would(describer: Describer, repository: Path) -> None:
    facts = describer.facts("layers", None, 0, has_gpu=False)
    assert facts == describe(load_workload("layers")("tiny", 0), str(repository / "workloads"))
    assert describer.inductor_options() == LoadedTorch().inductor_options()
    # Without those that other tests have registered here.
    own = {name for name in LoadedTorch().backends() if not name.startswith("toy_")}
    assert set(describer.backends()) == own
    assert list(describer.ddp_arguments()) == list(LoadedTorch().ddp_arguments())


@pytest.mark.slow
def test_code_that_prints_and_reads_leaves_the_answer_alone(describer: Describer) -> None:
    code = "print('{}')\nprint(repr(open(0).read()))\nfrom compile_sweep import Workload as Mine\nMine.sizes = ('one',)\n"
    Path("chatty.py").write_text(code)
    with pytest.raises(WorkloadError, match="building the workload failed: TypeError: Can't instantiate abstract class"):
        describer.facts("chatty:Mine", None, 0, has_gpu=False)


@pytest.mark.slow
def test_a_process_that_is_forked_by_an_import_gives_no_second_answer(describer: Describer) -> None:
    code = "import os\nfrom toy_workloads import Toy as Mine\nif os.fork(): os.wait()\n"
    Path("forks.py").write_text(code)
    facts = describer.facts("forks:Mine", None, 0, has_gpu=False)
    assert facts.workload == "Toy"
    assert describer.facts("toy_workloads:Toy", None, 0, has_gpu=False) == facts
    assert describer._unread == b""


@pytest.mark.slow
def test_code_that_does_not_end_is_a_sentence_and_is_ended(
    describer: Describer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orchestrator.plan.describer.PATIENCE_S", 1.0)
    Path("waits.py").write_text("import subprocess\nprint('connecting', flush=True)\nsubprocess.run(['sleep', '4321'])\n")
    assert describer.backends(), "it has started and imported torch, however long that takes here"
    describer.deadline_s = 5.0
    with pytest.raises(WorkloadError, match=r"looks at waits:Mine had no answer after 5 s; importing it.*: connecting"):
        describer.facts("waits:Mine", None, 0, has_gpu=False)
    assert describer._process is None, "the next question starts another process"
    assert capsys.readouterr().err.startswith("after 1 s, waits:Mine is still being imported"), "a person knows what it waits for"


@pytest.mark.slow
def test_what_an_import_leaves_running_in_a_session_of_its_own_ends_with_the_process(describer: Describer) -> None:
    Path("leaves.py").write_text(
        "import subprocess\nsubprocess.Popen(['setsid', 'sh', '-c', 'echo $$ > pid; exec sleep 4321'])\nraise OSError('no')\n"
    )
    with pytest.raises(WorkloadError, match="importing leaves failed: OSError"):
        describer.facts("leaves:Mine", None, 0, has_gpu=False)
    wait_until(lambda: Path("pid").exists() and Path("pid").read_text().endswith("\n"), 60.0)
    left = int(Path("pid").read_text())
    assert is_running(left)
    describer.close()
    wait_until(lambda: not is_running(left), 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "end"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal SIGKILL")])
def test_code_that_ends_the_process_is_a_sentence(describer: Describer, code: str, end: str) -> None:
    module = f"ends_{len(code)}"
    Path(f"{module}.py").write_text(f"import os\nprint('nothing to train on', flush=True)\n{code}\n")
    said = f"the process that looks at {module}:Mine ended with {end} before it had an answer: nothing to train on"
    with pytest.raises(WorkloadError, match=said):
        describer.facts(f"{module}:Mine", None, 0, has_gpu=False)


@pytest.mark.slow
def test_code_that_hangs_ends_with_a_killed_command(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nopen('pid', 'w').write(f'{os.getpid()} ')\ntime.sleep(4321)\n")
    words = [sys.executable, "-m", "orchestrator.sweep", "--workload", "waits:Mine", "--dry-run"]
    with subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(repository)}) as command:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" "), 100.0)
        command.kill()
    hanging = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(hanging), 30.0)


@pytest.mark.slow
def test_a_plan_is_made_without_torch_or_the_users_code_in_the_driver(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from toy_workloads import Toy as Mine\n")
    code = (
        "import sys; from orchestrator.sweep import main; "
        "assert main(['captioning', '--dry-run', '--workload', 'mine:Mine', '--vary', 'inductor.max_fusion_size=8']) == 0; "
        "print(sorted({'mine', 'ray', 'torch', 'toy_workloads', 'transformers'} & sys.modules.keys()))"
    )
    path = os.pathsep.join((str(repository), str(repository / "tests")))
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.alone
@pytest.mark.slow
def test_the_first_line_comes_at_once(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.sweep", "--size", "tiny", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    began = time.monotonic()
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, waited_s = process.stdout.readline(), time.monotonic() - began
        process.kill()  # the plan takes seconds, and other tests read it
        used = os.wait4(process.pid, 0)[2]
    assert first == "reading workload captioning …\n"
    assert min(waited_s, used.ru_utime + used.ru_stime) < FIRST_LINE_S, "it waits for a core where others are at work"
