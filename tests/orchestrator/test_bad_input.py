"""The command on bad input: one sentence, exit code 2, nothing lost and nothing started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from begun_sweeps import SETTINGS, contents

from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, TrialRecord, append
from orchestrator import sweep
from orchestrator.config import CachePolicy, Device, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.run import sweep_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_starts", "no_gpu")]


FIRST_LINE = r"(reading workload \S+ …\n)?"
"""What the command may have printed before it detects the mistake."""


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns what the command prints on stderr, which must be one sentence and its only effect."""
    before = contents(Path.cwd())
    assert sweep.main(words) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(FIRST_LINE, captured.out)
    assert captured.err.startswith("error: ")
    assert captured.err.endswith("\n")
    assert len(captured.err.splitlines()) == 1
    assert contents(Path.cwd()) == before
    return captured.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["quickstrat"], "no recipe is called 'quickstrat'; did you mean quickstart?"),
        (["--num-trails", "3"], "no option or argument '--num-trails'; did you mean --num-trials?"),
        (["--num-trials", "many"], "--num-trials cannot be 'many'"),
        (["--device", "cuda"], "--device cuda needs a GPU, and none is visible"),
        (["--device", "tpu"], "--device cannot be 'tpu'; use one of cpu, cuda"),
        (["--num-trials", "0"], "--num-trials 0 is too few; use 1 or more"),
        (["--num-trials", "-3"], "--num-trials -3 is too few; use 1 or more"),
        (["--max-concurrent", "-1"], "--max-concurrent -1 is too few"),
        (["--workers-per-trial", "0"], "--workers-per-trial 0 is too few"),
        (["grid", "--effort", "quick"], "--effort quick is for recipe auto, and this sweep tries grid; leave it out"),
        (["--searcher", "gain", "--effort", "quick"], "--effort quick is for recipe auto, and this sweep tries grid"),
        (["--settings", "scope=full", "--effort", "quick"], "this sweep tries settings of its own; leave it out"),
        (
            ["--effort", "quick", "--num-trials", "3"],
            "--effort quick and --num-trials both say when to end; leave one of them out",
        ),
        (["--effort", "thorough", "--time-budget-s", "9"], "--effort thorough and --time-budget-s both say when to end"),
        (["auto", "--effort", "standard", "--gpu-budget-s", "9"], "--effort standard and --gpu-budget-s both say when to end"),
        (["--runner", "local", "--workers-per-trial", "2"], "--runner local has one worker per trial"),
        (["--runner", "local", "--max-concurrent", "2"], "--runner local runs one trial at a time"),
        (["--max-concurrent", str(2**63)], f"--max-concurrent {2**63} is too many; use 10000 or fewer"),
        (["--workers-per-trial", str(10**400)], "is too many; use 10000 or fewer"),
        (["--source", "scope=eager", "--workers-per-trial", "10001"], "--workers-per-trial 10001 is too many"),
        (["--time-budget-s", "0"], "--time-budget-s 0 is not a time"),
        (["--compile-deadline-s", "-1"], "--compile-deadline-s -1 is not a time"),
        (["--compile-deadline-s", "nan"], "--compile-deadline-s nan is not a time"),
        (["--compile-deadline-s", "inf"], "--compile-deadline-s inf"),
        (["--compile-deadline-s", "600", "--trial-deadline-s", "60"], "--trial-deadline-s 60 is below"),
        (["--size", "huge"], "Captioning has no size 'huge'; use one of base, tiny"),
        (["--workload", "captionin"], "no workload is called 'captionin'; did you mean captioning?"),
        (["--workload", "translation"], "no workload is called 'translation'; use one of captioning"),
        (["--workload", "no_such_module:Workload"], "importing no_such_module failed: ModuleNotFoundError"),
        (["--workload", "workloads.captioning:Translation"], "workloads.captioning has no class Translation; use Captioning"),
        (["--workload", "pathlib:Path"], "Path in pathlib is not a subclass of compile_sweep.Workload"),
        (["--settings"], "--settings has no value; give one or more, or leave it out"),
        (["--settings", "--num-trials", "3"], "--settings has no value; give one or more, or leave it out"),
        (["--settings", ""], "--settings '' is not a setting; write it like scope=regional,dynamic=auto"),
        (
            ["--settings", "scope=regionl"],
            "scope=regionl is not a value of scope; did you mean regional?",
        ),
        (["--settings", "dynamic=true,cudagraphs=on"], "dynamic=true makes every size symbolic"),
        (["--settings", "dynamic=buckets,bucket_size=1"], "above torch's recompile limit of 8"),
        (["captioning", "--settings", "scope=full"], "--settings replaces a recipe's settings"),
        (["--settings", "num_buckets=none"], "--settings num_buckets=none: num_buckets=none is not a number of buckets"),
        (["--pipeline", "imaginary"], "--pipeline cannot be 'imaginary'; use one of real, resident"),
        (["--pipeline", "real", "--workload", "toy_workloads:Toy"], "--pipeline real needs a loader, and Toy has none"),
        (["--largest-batch"], "--largest-batch needs a GPU: without one, what takes too much memory is killed by the system"),
        (
            ["--largest-batch", "--dry-run", "--device", "cuda", "--workload", "toy_workloads:Toy"],
            "the workload Toy takes no batch size",
        ),
        (["--largest-batch", "--workers-per-trial", "2"], "--largest-batch has one worker per trial"),
        (["--starts", "warm"], "--starts cannot be 'warm'; use one of auto, cold, shared"),
        (["--starts", "shared", "--cache-store", "none"], "--starts shared shares artifacts, and --cache-store none keeps none"),
        (["--cache-store", "redis://localhost:6379"], "--cache-store redis://localhost:6379 is read while a trial compiles"),
        (["--cache-store", "ftp://host/cache"], "no artifacts can be kept at ftp://host/cache"),
        (["--cache-store", ""], "--cache-store '' is not a place; name a folder or a URI, or none"),
        (["--cache-store", "~nobody-at-all/x"], "no artifacts can be kept at ~nobody-at-all/x: there is no such user"),
        (["--storage", "~nobody-at-all/x"], "no results can be kept at ~nobody-at-all/x: there is no such user"),
        (["--log-to", "tensorboard:~nobody-at-all/x"], "is not a folder: there is no such user; name another"),
        (["--output=~nobody-at-all/x"], "--output ~nobody-at-all/x is not a folder: there is no such user; name another"),
        (
            ["--searcher", "gain", "--learn-from=~nobody-at-all/x"],
            "--learn-from ~nobody-at-all/x is not a folder: there is no such user",
        ),
        (["--output=-x"], "--output '-x' begins with a dash or has control characters; name another"),
        (["--output", "a\nb"], r"--output 'a\nb' begins with a dash or has control characters; name another"),
        (["--output", "a\0b"], r"'a\x00b' is not UTF-8 text"),
        (
            ["--script", "train.py", "--batch-size", "16"],
            "'--batch-size'; did you mean --batch-arg? A script's own arguments follow after --, as in -- --batch-size",
        ),
        (["--dynamic=auto"], "'--dynamic=auto'; dynamic is a setting: write --settings dynamic=VALUE, or --vary dynamic=VALUES"),
        (["--batch-size", "8"], "'--batch-size'; batch_size is a setting: write --settings batch_size=VALUE"),
        (
            ["--script", "train.py", "--scope", "full"],
            "--vary scope=VALUES to try several. A script's own arguments follow after --, as in -- --scope",
        ),
        (["--script", "train.py", "--XY=1"], "'--XY=1'; a script's own arguments follow after --, as in -- --XY=1"),
        (["--script", "train.py", "--XY", "1", "--", "2"], "no option or argument '--XY'; see"),
        (["--output", "caf\udce9"], r"'caf\udce9' is not UTF-8 text; encode it as UTF-8, and rename the file"),
        (["--output", "x" * 300, "--resume"], "/sweep.json cannot be read (File name too long); name another --output"),
        (["--searcher", "gain", "--learn-from", "x" * 300], "/trials.jsonl cannot be read (File name too long)"),
        (["captioning", "--explain", "scope=full"], "--explain looks at one setting and runs no sweep; leave out captioning"),
        (["--explain", "scope=full", "--settings", "scope=eager"], "runs no sweep; leave out --settings"),
        (["--explain", "scope=full", "--time-budget-s", "5"], "runs no sweep; leave out --time-budget-s"),
        (["--explain", "scope=ful"], "--explain scope=ful: scope=ful is not a value of scope; did you mean full?"),
        (["--explain", "mode=reduce-overhead"], "--explain mode=reduce-overhead: CUDA graphs need a GPU, and none is visible"),
        (["--explain", "scope"], "'scope' is not a setting; write field=value"),
        (["--source", "scope=full", "--resume"], "--source looks at one setting and runs no sweep; leave out --resume"),
        (["--source", "scope=modular,parts.encodr.mode=default"], "no part 'encodr'; use one of encoder, decoder, loss"),
        (["--seed", "-1"], "--seed -1 is not a seed; use a whole number from 0 to 4294967295"),
        (["--source", "scope=eager", "--seed", "-1"], "--seed -1 is not a seed; use a whole number from 0 to 4294967295"),
        (["--source", "scope=eager", "--seed", "9" * 30], f"--seed {'9' * 30} is not a seed; use a whole number"),
        (["--explain", "scope=eager", "--seed", "9" * 30], f"--seed {'9' * 30} is not a seed; use a whole number"),
        (["--vary", "group_window"], "--vary group_window is not a field with values; write it like group_window=1,100"),
        (["--vary", "autocast=bf16", "autocast=off"], "--vary autocast is given twice; give all its values at once"),
        (["--vary", "autocats=bf16"], "no setting is called 'autocats'; did you mean autocast?"),
        (["--resume"], "--resume needs to know which sweep; name its folder with --output"),
        (
            ["--resume", "--storage", "s3://bucket"],
            "--storage s3://bucket does not say what the sweep's folder is called; name it",
        ),
        (["--resume", "--storage", ".."], "--storage .. does not say what the sweep's folder is called; name it with --output"),
        (["--searcher", "gian"], "--searcher cannot be 'gian'; use one of gain, gp, grid"),
        (["--searcher", "gain", "--num-trials", "0"], "--num-trials 0 is too few; use 1 or more"),
        (
            ["--objective", "samples_per_sec:max"],
            "no numeric field of a record is called 'samples_per_sec'; did you mean samples_per_s?",
        ),
        (["--objective", "samples_per_s"], "does not say which way is better; write samples_per_s:max or samples_per_s:min"),
        (["--objective", "compile_s:min", "--objective", "compile_s:min"], "the objective compile_s is given twice"),
        (["--objective", "warm_start_s:min"], "warm_start_s is known only at the end of a sweep"),
        (["--constraint", "compile_s=120"], "constraint 'compile_s=120' is not a bound; write it like compile_s<=120"),
        (["--constraint", "compile_s<=120", "--constraint", "graphs<=1GiB"], "'GiB' is not a unit of graphs"),
        (["--stop", "soon"], '--stop "soon" is not a rule; write it like "front stable for 6 trials"'),
        (["--gpu-budget-s", "0"], "--gpu-budget-s 0 is not a time"),
        (["--searcher", "gain", "--gpu-budget-s", "nan"], "--gpu-budget-s nan is not a time"),
        (["--searcher", "gain", "--learn-from", "nowhere"], "nowhere holds no trial records; name a folder that a sweep wrote"),
        (["quickstart", "--learn-from", "nowhere"], "--learn-from teaches a searcher; name one with --searcher"),
        (
            ["--searcher", "gain", "--learn-anyway"],
            "--learn-anyway says how to learn from other sweeps; name them with --learn-from",
        ),
        (["--prune", "maybe"], "--prune cannot be 'maybe'; use one of auto, off, on"),
        (["--explain", "scope=full", "--searcher", "gain"], "runs no sweep; leave out --searcher"),
    ],
)
def test_a_mistake_in_the_words_is_named_and_makes_no_folder(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *words)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("folder", ["/tmp/a b", "/tmp/it's", "/tmp/a\\b"])
@pytest.mark.parametrize("words", [["--dry-run"], ["--explain", "scope=full"], []])
def test_temporary_files_where_nothing_compiles_are_refused_before_anything_starts(
    folder: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    said = refused(capsys, *words)
    assert f"temporary files go to {folder!r}" in said
    assert "set TMPDIR to another folder" in said
    assert sweep.main(["--list"]) == 0


def test_a_clusters_hosts_have_temporary_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/a b")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert sweep.main(["--dry-run", "--device", "cpu", "--size", "tiny"]) == 0


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("NoBatch", ["--dry-run"], "the batch function failed on batch 0: FileNotFoundError: /data/train.bin"),
        ("NoBatch", ["--source", "scope=full"], "the batch function failed on batch 0: FileNotFoundError: /data/train.bin"),
        ("NoBatch", ["--explain", "scope=full"], "the batch function failed on batch 0: FileNotFoundError: /data/train.bin"),
        ("NoModel", ["--source", "scope=full"], "the model function failed: FileNotFoundError: /data/train.bin"),
        ("NoBatches", ["--dry-run"], "num_batches=0 of WorkloadFromModel is not a whole number of 1 or more"),
    ],
)
def test_a_workload_whose_functions_fail_is_said_with_why(
    name: str, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing_workloads.py").write_text(
        "import torch\n"
        "from compile_sweep import WorkloadFromModel\n"
        "def missing(*number):\n"
        "    raise FileNotFoundError('/data/train.bin')\n"
        "def batch(number):\n"
        "    return {'x': torch.ones(2, 3)}\n"
        "NoBatch = WorkloadFromModel(lambda: torch.nn.Linear(3, 3), missing)\n"
        "NoModel = WorkloadFromModel(missing, batch)\n"
        "NoBatches = WorkloadFromModel(lambda: torch.nn.Linear(3, 3), batch, num_batches=0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing_workloads", raising=False)
    assert refused(capsys, "--workload", f"failing_workloads:{name}", "--device", "cpu", *words) == f"error: {said}\n"


@pytest.mark.parametrize("words", [["--dry-run"], ["--source", "scope=eager"], ["--explain", "scope=eager"]])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def __init__(self, size, seed): raise OSError('no data')", "building the workload failed: OSError: no data"),
        ("def __init__(self, size, seed): raise SystemExit('no data')", "building the workload failed: SystemExit: no data"),
        ("def row_lengths(self): raise OSError('no rows')", "building the workload failed: OSError: no rows"),
        ("sizes = ()", "workload 'failing:Mine': Mine has no sizes; name one or more, like sizes = ('base', 'tiny')"),
    ],
)
def test_a_workload_class_that_fails_is_said_with_why(
    body: str, said: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing.py").write_text(f"from toy_workloads import Toy\nclass Mine(Toy):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    assert refused(capsys, "--workload", "failing:Mine", "--device", "cpu", *words) == f"error: {said}\n"


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("lacks_a_module", "import no_such_module_either", "ModuleNotFoundError: No module named 'no_such_module_either'"),
        ("raises_at_length", "raise RuntimeError('first\\nsecond\\nthird')", "RuntimeError: first"),
        ("has_no_grammar", "class Workload:\n", "has_no_grammar"),
        ("exits", "import sys\nsys.exit(1)", "exits"),
    ],
)
def test_a_workload_that_does_not_import_is_named_with_why(
    name: str, source: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path(f"{name}.py").write_text(source)
    assert reason in refused(capsys, "--workload", f"{name}:Mine")


@pytest.mark.parametrize("words", [[], ["--seed", "3"], ["captioning"]])
def test_a_folder_that_holds_a_sweep_is_not_overwritten(
    theirs: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(theirs)
    assert f"{theirs} holds a sweep already; add --resume" in refused(capsys, "--output", str(theirs), *words)
    assert contents(theirs) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seed", "3"], "holds another sweep: its seed is 0, not 3"),
        (["--size", "base"], "holds another sweep: its size is 'tiny', not 'base'"),
        (["--workload", "toy_workloads:Toy"], "not 'toy_workloads:Toy'; name another --output or use its workload"),
        (["--num-trials", "0"], "--num-trials 0 is too few"),
        (["quickstrat"], "no recipe is called 'quickstrat'"),
    ],
)
def test_another_sweep_is_not_taken_up(theirs: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(theirs)
    assert sentence in refused(capsys, "--resume", "--output", str(theirs), *words)
    assert contents(theirs) == before


def test_a_sweep_that_is_running_is_not_taken_up_beside_itself(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sweep_folder.held(theirs):
        complaint = refused(capsys, "--resume", "--output", str(theirs))
    assert f"a sweep is running in {theirs}; wait until it has ended" in complaint


def test_a_damaged_last_record_stops_a_resume_and_is_kept(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (theirs / TRIALS_FILE).open("a") as log:
        log.write('{"schema_version": 1, "trial_id": "002\n')
    before = contents(theirs)
    sentence = refused(capsys, "--resume", "--output", str(theirs))
    assert f"{theirs / TRIALS_FILE} line 2 is not a trial record" in sentence
    assert "the line before it is intact" in sentence
    assert contents(theirs) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 1, "config": {"settings": [7]}}'])
def test_a_damaged_description_stops_a_resume_and_is_kept(theirs: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / SWEEP_FILE).write_text(text)
    before = contents(theirs)
    assert f"{theirs / SWEEP_FILE} is not a sweep this version wrote" in refused(capsys, "--resume", "--output", str(theirs))
    assert contents(theirs) == before


def test_a_seed_of_a_description_is_held_to_the_same(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = json.loads((theirs / SWEEP_FILE).read_text())
    (theirs / SWEEP_FILE).write_text(json.dumps({**described, "config": {**described["config"], "seed": 10**30}}))
    assert f"--seed {10**30} is not a seed" in refused(capsys, "--resume", "--output", str(theirs))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "cannot be written (Not a directory)" in refused(capsys, "--output", str(tmp_path / "file" / "sweep"))
    assert "and there is none" in refused(capsys, "--output", str(tmp_path / "file" / "sweep"), "--resume")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_store_that_trials_are_to_begin_with_is_asked_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "config" / "compile-sweep" / "cache.key"
    key.parent.mkdir(parents=True)
    key.write_text("ab" * 32)
    key.chmod(0o644)
    monkeypatch.delenv("COMPILE_SWEEP_CACHE_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert "can be read by others, who could sign with it: chmod 600 it" in refused(capsys, "--starts", "shared")


def test_a_cache_whose_password_was_not_written_down_has_to_be_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "redis://:secret@localhost:1"
    config = SweepConfig(
        recipe="quickstart",
        workload="captioning",
        size="tiny",
        settings=SETTINGS,
        cache=address,
        caches=CachePolicy.AUTO,
        device=Device.CPU,
    )
    sweep_folder.begin(tmp_path / "mine", config, fingerprint(), None)
    assert "the password of redis://***@localhost:1 was not written down" in refused(
        capsys, "--resume", "--output", str(tmp_path / "mine")
    )


def test_what_another_environment_measured_is_learnt_from_only_if_that_is_said(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SETTINGS[1]
    elsewhere = TrialRecord(
        trial_id="002-b",
        settings=full.to_dict(),
        settings_key=full.key,
        status=Status.OK,
        samples_per_s=5.0,
        workload="captioning",
        size="tiny",
        environment_key="another",
    )
    (earlier := theirs.parent / "earlier").mkdir()
    append(earlier, elsewhere)
    complaint = refused(capsys, "--searcher", "gain", "--size", "tiny", "--learn-from", str(earlier))
    assert "environment key another instead of" in complaint
    assert "add --learn-anyway to try its best settings first" in complaint


def in_a_process(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a person would."""
    environment = {**os.environ, "PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "orchestrator.sweep", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_records_that_are_a_folder_stop_a_resume(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / TRIALS_FILE).unlink()
    (theirs / TRIALS_FILE).mkdir()
    before = contents(theirs)
    assert f"{theirs / TRIALS_FILE} cannot be read (Is a directory)" in refused(capsys, "--resume", "--output", str(theirs))
    assert contents(theirs) == before


@pytest.mark.parametrize("option", ["--storage", "--cache-store"])
@pytest.mark.parametrize(("place", "at"), [("file", "file"), ("file/below", "file"), ("loop", "loop")])
def test_what_is_to_be_a_folder_and_cannot_is_refused_before_a_sweep(
    option: str, place: str, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("mine")
    Path("loop").symlink_to("loop")
    said = refused(capsys, option, place)
    assert f"{Path.cwd() / place} cannot be used: " in said
    assert str(Path.cwd() / at) in said.partition("cannot be used")[2]
    assert not Path("results").exists()


def test_a_storage_below_a_file_is_refused_before_a_sweep_is_taken_up(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("mine")
    before = contents(theirs)
    said = refused(capsys, "--resume", "--output", str(theirs), "--storage", "file/below")
    assert f"{Path.cwd()}/file is not a folder" in said
    assert contents(theirs) == before


def test_a_process_ends_with_code_2_and_one_line(repository: Path) -> None:
    Path("my_workloads.py").write_text("raise RuntimeError('the data set is not there')\n")
    done = in_a_process(repository, "--workload", "my_workloads:Mine")
    sentence = "error: workload 'my_workloads:Mine': importing my_workloads failed: RuntimeError: the data set is not there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "reading workload my_workloads:Mine …\n", sentence)
    assert [path.name for path in Path.cwd().iterdir()] == ["my_workloads.py"]


def test_a_process_that_meets_damaged_records_changes_nothing(repository: Path, theirs: Path) -> None:
    with (theirs / TRIALS_FILE).open("a") as log:
        log.write("garbage\n")
    described = (theirs / SWEEP_FILE).read_text()
    (theirs / SWEEP_FILE).write_text(described.replace("captioning", "layers"))  # which is read without transformers
    before = contents(theirs)
    done = in_a_process(repository, "--resume", "--output", str(theirs))
    assert (done.returncode, done.stdout) == (2, "reading workload layers …\n")
    assert len(done.stderr.splitlines()) == 1
    assert "line 2 is not a trial record" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(theirs) == before
    assert json.loads(before[SWEEP_FILE])["config"]["size"] == "tiny"
