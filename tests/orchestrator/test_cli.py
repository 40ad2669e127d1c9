"""`compile-sweep COMMAND …`: every command by one name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import compile_sweep
from orchestrator import cli, sweep
from orchestrator.plan.recipes import RECIPES


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_own_help_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main([name, "--help"]) == 0
    except SystemExit as stop:
        assert stop.code in (0, None)  # noqa: PT017
    assert f"usage: compile-sweep {name} " in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE) == list(cli.COMMANDS)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_that_cannot_be_written_is_one_sentence(word: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "orchestrator.cli", word], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: the output cannot be written (No space left on device)")


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["sweep", "--version"], ["report", "--version"]])
def test_the_version_is_the_packages(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        sys.exit(cli.main(words))
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"compile-sweep {compile_sweep.__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["reprot", "results"], "no command is called 'reprot'; did you mean report?"),
        (["quickstart"], "no command is called 'quickstart'; use one of sweep, check"),
        (["sweep", "--bogus"], "no option or argument '--bogus'; see compile-sweep sweep --help"),
        (["check", "--bogus"], "no option or argument '--bogus'; see compile-sweep check --help"),
        (["check", "captioning", "--output=x"], "no option or argument '--output=x'; it is an option of compile-sweep sweep"),
        (
            ["check", "--script", "train.py", "--workers-per-trial", "2"],
            "no option or argument '--workers-per-trial'; it is an option of compile-sweep sweep. A script's own arguments "
            "follow after --, as in -- --workers-per-trial",
        ),
        (["explain"], "SETTING is missing; see compile-sweep explain --help"),
        (["explain", "scope=ful"], "--explain scope=ful: scope=ful is not a value of scope; did you mean full?"),
        (["report"], "DIR is missing; see compile-sweep report --help"),
        (["compare", "nowhere"], "B is missing; see compile-sweep compare --help"),
        (["cache", "show"], "ID is missing; see compile-sweep cache show --help"),
        (["run", "train.py"], "--settings is missing; see compile-sweep run --help"),
        (["run", "--settings", "scope=full", "nowhere.py"], "error: nowhere.py: there is no such file"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert sentence in printed.err


def test_the_installed_command_is_this_one_and_types_are_installed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["compile-sweep"].partition(":")
    monkeypatch.setattr(cli, "main", lambda: 77)
    assert getattr(import_module(module), function)() == 77
    assert (repository / "compile_sweep" / "py.typed").is_file()


def test_help_and_versions_load_neither_torch_nor_pandas(repository: Path) -> None:
    code = "import sys; from orchestrator.cli import main; main(['--help']); main(['--version']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "pandas", "ray", "plotly", "transformers"}.intersection(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [
        ["--vary", "group_window=1,10", "modes"],
        ["--searcher", "gain", "--objective", "samples_per_s:max", "modes"],
        ["--constraint", "compile_s<=60", "peak_memory_bytes<=40GiB", "modes"],
        ["--log-to", "tensorboard:there", "modes"],
    ],
)
@pytest.mark.usefixtures("nothing_starts", "no_gpu")
def test_an_option_of_several_values_leaves_the_recipe_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([*words, "--size", "tiny", "--workload", "layers", "--dry-run"]) == 0
    assert "recipe modes: layers (tiny)" in capsys.readouterr().out


def test_no_recipe_looks_like_a_value_of_such_an_option() -> None:
    assert not [name for name in RECIPES if set(name) & set("=:<>/")]


@pytest.mark.usefixtures("nothing_starts", "no_gpu")
def test_a_sweep_that_is_not_there_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--resume", "--output", "nowhere"]) == 2
    assert "--resume continues the sweep in nowhere, and there is none; name its folder" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_ctrl_c_before_the_commands_are_imported_shows_no_traceback(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "orchestrator.cli":
                raise KeyboardInterrupt

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["compile-sweep"].partition(":")
    monkeypatch.delitem(sys.modules, "orchestrator.cli")
    monkeypatch.setattr(sys, "meta_path", [Pressed(), *sys.meta_path])
    assert getattr(import_module(module), function)() == 130
    assert capsys.readouterr().err == "stopped\n"
