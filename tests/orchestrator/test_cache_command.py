"""`python -m orchestrator.cache`, on a real store in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cache_samples import FACTS, artifact, manifest

from compile_sweep.harness.compile_cache.transfer import make_bundle, torch_configuration
from compile_sweep.schema.settings import CompileSettings
from orchestrator import cache
from orchestrator.artifacts import ArtifactStore, SigningKey, open_store, trial_facts
from orchestrator.artifacts.signing import KEY_VARIABLE
from workloads.layers import Layers

Command = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two trials' artifacts, in a folder."""
    monkeypatch.setenv(KEY_VARIABLE, key.secret.hex())
    monkeypatch.setenv("COLUMNS", "200")
    store = open_store(str(tmp_path / "cache"))
    first = store.publish(
        manifest(), [artifact("a", b"a" * 1_000_000), artifact("both", b"s" * 500_000, kind="triton", cost_s=0.0)]
    )
    store.publish(
        manifest(maker="002-b", settings_key="scope=full,mode=max-autotune"),
        [artifact("b", b"b" * 2_000_000), artifact("both", b"s" * 500_000, kind="triton", cost_s=0.0)],
    )
    store.note_hits({first.manifest.id: 7})
    return tmp_path / "cache"


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command on the store; returns what it prints."""

    def run(*words: str, code: int = 0) -> str:
        assert cache.main([*words, "--cache-store", str(folder)]) == code
        said = capsys.readouterr()
        if code == 2:
            assert said.out == ""
            assert said.err.startswith("error: ")
            assert len(said.err.splitlines()) == 1
        return said.out + said.err

    return run


def contents(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").rglob("*") if path.is_file()]


def test_list_says_who_made_what_and_how_often_it_was_hit(command: Command) -> None:
    said = command("list")
    ((first, below),) = [pair for pair in pairwise(said.splitlines()) if "001-a" in pair[0]]
    assert first.split()[-3:] == ["2", "1.5", "7"]
    assert below.startswith("  captioning tiny: ")
    assert "2 manifests; 3.5 MB, 4.0 MB if each kept its own" in said
    assert "removed 1 manifest and" in command("gc", "--max-gb", "0.003")
    assert ": 1 manifest; " in command("list")


def test_list_fits_a_terminal_of_80_columns_without_breaking_words(command: Command, folder: Path) -> None:
    key = "scope=full,dynamic=auto,optimizer=fused,inductor.coordinate_descent_tuning=on,inductor.combo_kernels=on"
    open_store(str(folder)).publish(
        manifest(workload="my_package.training:Reviews", maker="017-93c1d0", settings_key=key), [artifact("c")]
    )
    lines = command("list").splitlines()
    at = next(number for number, line in enumerate(lines) if "017-93c1d0" in line)
    assert all(len(line) <= 80 for line in lines[: at + 1])
    assert lines[at].index("017-93c1d0") == lines[0].index("made by")
    assert "my_package.training:Reviews tiny: full" in lines[at + 1]
    assert "…" not in lines[at + 1]


def test_list_shows_names_as_they_are(command: Command, folder: Path) -> None:
    open_store(str(folder)).publish(manifest(workload="odd[/]name", maker=":smile: [red]3"), [artifact("c")])
    said = command("list")
    assert "odd[/]name" in said
    assert ":smile: [red]3" in said


def test_a_store_is_found_below_home(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert cache.main(["list", "--cache-store=~/cache"]) == 0  # no shell expands it there, and a sweep expands it itself
    assert "2 manifests" in capsys.readouterr().out


def test_a_key_file_that_is_named_goes_before_the_variable(command: Command, tmp_path: Path) -> None:
    assert command("list", "--key-file", str(tmp_path / "another.key"), code=1).count("another key") == 2


def test_show_says_under_which_facts_and_of_which_kinds(command: Command) -> None:
    said = command("show", "002-b")
    assert all(f"{name}: {value}" in said for name, value in FACTS.items())
    assert "inductor: 1, 2.00 MB, 1.5 s to compile" in said
    assert "triton: 1, 0.50 MB\n" in said


def test_a_manifest_is_found_by_the_beginning_of_its_id(command: Command, folder: Path) -> None:
    (first, _) = open_store(str(folder)).manifests().manifests
    assert "001-a" in command("show", first.id[:10])


def test_verify_names_what_is_damaged_and_removes_it(command: Command, folder: Path) -> None:
    assert "2 manifests and 3 contents are as they were published" in command("verify")
    hurt = folder / "blobs" / hashlib.sha256(b"b" * 2_000_000).hexdigest()[:2] / hashlib.sha256(b"b" * 2_000_000).hexdigest()
    hurt.write_bytes(b"c" + hurt.read_bytes()[1:])
    said = command("verify", code=1)
    assert "refused: " in said
    assert "is damaged" in said
    assert not hurt.exists()


def test_verify_removes_foreign_manifests_only_when_told_to(command: Command, folder: Path) -> None:
    ArtifactStore(open_store(str(folder))._shelf, SigningKey(b"f" * 32)).publish(manifest(maker="them"), [artifact("x", b"x")])
    assert "another key" in command("verify", code=1)
    assert "removed 1 manifest" in command("verify", "--remove", code=1)
    assert "another key" not in command("verify")


def test_gc_by_size_keeps_what_was_used_last(command: Command, folder: Path) -> None:
    said = command("gc", "--max-gb", "0.0021")
    assert "removed 1 manifest and 1 contents" in said
    assert "001-a" in command("list")  # hit after the other was made
    assert sum(path.stat().st_size for path in contents(folder)) == 1_500_000


def test_gc_with_bounds_beyond_any_store_removes_nothing(command: Command, folder: Path) -> None:
    assert "removed 0 manifests and 0 contents" in command("gc", "--max-gb", "1e300", "--max-age-days", "1e300")
    assert len(contents(folder)) == 3


def test_gc_by_age_removes_what_is_old(command: Command, folder: Path) -> None:
    assert "removed 0 manifests" in command("gc", "--max-age-days", "1")
    assert "removed 2 manifests" in command("gc", "--max-age-days", "0")
    assert contents(folder) == []


def test_explain_compares_trials_files_and_the_nearest(command: Command, folder: Path, tmp_path: Path) -> None:
    assert "settings.mode" in command("explain", "001-a", "002-b")
    assert "settings.mode" in command("explain", "001-a")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**FACTS, "gpu": "NVIDIA B200"}))
    assert "gpu: NVIDIA H200 | NVIDIA B200" in command("explain", "001-a", str(other))
    facts = {**FACTS, "torch": "2.10.0"}  # which no installation has
    open_store(str(folder)).publish(manifest(maker="004-d", facts=facts), [artifact("d")])
    assert "because torch differs" in command("explain", "004-d", "here")


def test_here_is_as_a_trial_of_the_same_workload_has_it(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captioning, for example, disables cuDNN's attention on a GPU, and trials are compared as they compile."""
    settings = Layers.process_settings

    @contextmanager
    def precise(workload: Layers) -> Iterator[None]:
        with settings(workload):
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("medium")
            yield
            torch.set_float32_matmul_precision(before)

    monkeypatch.setattr(Layers, "process_settings", precise)
    with Layers(Layers.sizes[0], 0).process_settings():
        facts = trial_facts(torch_configuration(), CompileSettings.parse("scope=full"), use_gpu=False)
    open_store(str(folder)).publish(manifest(maker="003-c", workload="layers", facts=facts), [artifact("c")])
    assert "003-c and here do not differ" in command("explain", "003-c", "here")
    assert "here and 003-c do not differ" in command("explain", "here", "003-c")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("show", "999"), "holds nothing of '999'"),
        (("show", ""), "holds nothing of ''"),
        (("gc", "--max-gb", "-1"), "is not a bound"),
        (("gc", "--max-gb", "nan"), "is not a bound"),
        (("gc", "--max-age-days", "many"), "--max-age-days"),
        (("list", "--colour"), "--colour"),
        (("frobnicate",), "no command 'frobnicate'"),
        (("import", "never-there.bin"), "cannot be read"),
        (("import", "never-there.bin", "--settings", "scope=half"), "scope"),
        (("explain", "here"), "name what to compare it with"),
        (("explain", "never-there.json", "001-a"), "not a JSON object"),
        (("export", "001-a", "no/such/folder/file"), "cannot be written"),
        (("export", "001-a", ""), ". cannot be written"),
        (("export", "001-a", "a\0b"), "is not UTF-8 text"),
    ],
)
def test_a_mistake_is_one_sentence(command: Command, words: tuple[str, ...], part: str) -> None:
    assert part in command(*words, code=2)


def test_an_export_where_a_folder_is_leaves_nothing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    assert "there cannot be written (Is a directory)" in command("export", "001-a", str(tmp_path / "there"), code=2)
    assert sorted(tmp_path.iterdir()) == before


def test_facts_that_cannot_be_printed_are_none(command: Command, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"torch": "\\ud800"}')
    assert "not a JSON object" in command("explain", str(tmp_path / "odd.json"), "001-a", code=2)


@pytest.mark.parametrize(
    ("location", "part"),
    [
        ("x" * 300, "no folder"),
        ("no/such/folder", "no folder"),
        ("ftp://host/x", "no artifacts can be kept at"),
        ("redis://host:6379", "Inductor's"),
        ("", "no"),
    ],
)
def test_a_place_that_is_none_is_one_sentence(
    location: str, part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache.main(["list", "--cache-store", location]) == 2
    assert part in capsys.readouterr().err


def test_no_command_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main([]) == 2
    assert "a command is missing" in capsys.readouterr().err
    assert cache.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("list", "show", "verify", "gc", "export", "import", "explain"))


def test_an_import_for_no_workload_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(make_bundle([artifact("a/b.best_config", kind="autotune")]))
    assert "no workload is called 'capshuning'" in command("import", str(tmp_path / "file"), "--workload", "capshuning", code=2)
    assert "has no size 'huge'" in command("import", str(tmp_path / "file"), "--size", "huge", code=2)


def test_a_file_that_is_no_bundle_is_not_imported(command: Command, tmp_path: Path) -> None:
    for content in (b"", b"not a bundle", os.urandom(1000)):
        (tmp_path / "file").write_bytes(content)
        assert "holds no artifacts" in command("import", str(tmp_path / "file"), code=2)


MODEL = """
import torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
torch.compile(model)(torch.randn(4, 8)).sum().backward()
"""
TRIAL = """
import sys
from orchestrator.artifacts import Manifest, environment_facts, open_store
from compile_sweep.harness.compile_cache.torch_state import torch_configuration
from compile_sweep.harness.compile_cache.transfer import CacheFolders, gather_artifacts
facts = environment_facts(torch_configuration())
manifest = Manifest(facts=facts, workload="toy", size="", settings_key="scope=full", maker="trial")
open_store(sys.argv[1]).publish(manifest, gather_artifacts(CacheFolders.of_process()))
"""
PRODUCTION = """
import sys
print(dict(counters["aot_autograd"]), sorted({"compile_sweep", "orchestrator", "workloads", "ray"} & sys.modules.keys()))
"""


def fresh(code: str, *words: str, caches: Path) -> str:
    """Returns the output of a process with empty caches of its own."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    run = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **folders},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.nightly("compiles in two processes; the tests above read the export")
@pytest.mark.slow
def test_a_production_job_restores_an_export_with_the_three_lines(command: Command, folder: Path, tmp_path: Path) -> None:
    fresh(MODEL + TRIAL, str(folder), caches=tmp_path / "1")
    said = command("export", "trial", str(tmp_path / "toy.bin"))
    comment, *lines = said.splitlines()
    assert hashlib.sha256((tmp_path / "toy.bin").read_bytes()).hexdigest() in comment
    assert len(lines) == 3
    printed = fresh("\n".join(lines) + MODEL + PRODUCTION, caches=tmp_path / "2")
    assert "'autograd_cache_hit': 1" in printed
    assert "miss" not in printed
    assert "[]" in printed  # nothing of this project is there

    command("import", str(tmp_path / "toy.bin"), "--workload", "toy_workloads:Toy")
    assert "import of toy.bin" in command("list")
