"""In a repository with packages called `analysis` or `workloads`, the sweep finds its own and a script finds the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = """
import torch
from analysis import WIDTH

model = torch.nn.Linear(4, WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


MODEL = """
from functools import partial

import torch
from analysis import WIDTH
from compile_sweep import WorkloadFromModel
from utils import WIDTH as INPUTS


def batch(number):
    return {"x": torch.randn(4, INPUTS)}


def loss(model, batch):
    return model(batch["x"]).square().mean()


Mine = WorkloadFromModel(partial(torch.nn.Linear, INPUTS, WIDTH), batch, loss)
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    for package in ("analysis", "workloads", "utils"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("WIDTH = 3\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "workloads" / "mine.py").write_text(MODEL)
    return tmp_path


def run(folder: Path, repository: Path, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a module in a user's folder, with this project as if installed instead of in the current folder."""
    environment = os.environ | {"PYTHONPATH": str(repository), "NO_COLOR": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
def test_a_plan_is_made_in_a_repository_with_an_analysis_of_its_own(theirs: Path, repository: Path) -> None:
    planned = run(theirs, repository, "orchestrator.sweep", "--script", "train.py", "--dry-run", timeout_s=120)
    assert planned.returncode == 0, planned.stderr
    assert "as the script has it" in planned.stdout


@pytest.mark.slow
def test_a_script_trains_with_a_winner_in_a_repository_with_packages_of_the_same_names(theirs: Path, repository: Path) -> None:
    (theirs / "orchestrator").mkdir()
    (theirs / "orchestrator" / "__init__.py").touch()
    (theirs / "orchestrator" / "mine.py").write_text("print('theirs')")
    (theirs / "train.py").write_text("import analysis, orchestrator.mine, workloads\nassert analysis.WIDTH == workloads.WIDTH\n")
    program = "import sys; sys.path.pop(0); from orchestrator.__main__ import main; sys.path.insert(0, ''); sys.exit(main())"
    command = [sys.executable, "-c", program, "run", "--settings", "scope=eager", "train.py"]
    trained = subprocess.run(
        command, cwd=theirs, env=os.environ | {"PYTHONPATH": str(repository)}, capture_output=True, text=True
    )
    assert (trained.returncode, trained.stdout) == (0, "theirs\n"), trained.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [["orchestrator.sweep", "--dry-run"], ["orchestrator.check", "--backend", "aot_eager"]])
def test_files_named_like_the_packages_it_needs_hide_none_of_them(theirs: Path, repository: Path, words: list[str]) -> None:
    _add_files_named_like_packages(theirs)
    planned = run(theirs, repository, *words, "--script", "train.py", timeout_s=120)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.slow
def test_a_file_named_like_a_package_does_not_hide_it_from_the_report(tmp_path: Path, repository: Path) -> None:
    _add_files_named_like_packages(tmp_path)
    done = run(tmp_path, repository, "analysis.report", "--help", timeout_s=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly("runs a whole sweep; other tests plan one and check a script beside these files")
@pytest.mark.ray
@pytest.mark.slow
def test_files_named_like_the_packages_that_ray_needs_hide_none_of_them(theirs: Path, repository: Path) -> None:
    _add_files_named_like_packages(theirs)
    words = ["--script", "train.py", "--settings", "scope=eager,as_written=on", "--no-confirm", "--output", "swept"]
    swept = run(theirs, repository, "orchestrator.sweep", *words, timeout_s=400)
    assert "trials: 1 ok" in swept.stdout, swept.stdout + swept.stderr


def _add_files_named_like_packages(folder: Path) -> None:
    for name in ("fsspec", "optuna", "pandas", "plotly", "psutil", "pyarrow", "rich", "tyro"):
        (folder / f"{name}.py").touch()


@pytest.mark.nightly("runs a whole sweep; other tests plan the script, and sweep with an installed wheel in the same repository")
@pytest.mark.slow
def test_a_script_is_swept_in_a_repository_with_packages_of_the_same_names(theirs: Path, repository: Path) -> None:
    settings = ["--settings", "scope=eager,as_written=on", "scope=full,dynamic=auto,backend=aot_eager"]
    words = ["--runner", "local", "--script", "train.py", "--no-warm-start", "--no-confirm", "--output", "swept", *settings]
    swept = run(theirs, repository, "orchestrator.sweep", *words, timeout_s=400)
    assert swept.returncode == 0, swept.stderr
    assert "trials: 2 ok" in swept.stdout
    assert (theirs / "swept" / "report.html").is_file()


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The programs of an environment in which this project is installed from its wheel, in addition to this one's packages."""
    made = tmp_path_factory.mktemp("environment")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", made, repository], check=True, timeout=120)
    venv.create(made / "venv", with_pip=False)
    python = made / "venv" / "bin" / "python"
    (wheel,) = made.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", *offline, wheel], check=True, timeout=120)
    (site,) = (made / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    return python.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param("local", marks=pytest.mark.nightly("builds a wheel and sweeps; `make test` only plans there")),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.nightly("repeats the local case with Ray")]),
    ],
)
def test_an_installed_wheel_works_in_a_repository_with_packages_of_the_same_names(
    theirs: Path, installed: Path, runner: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NO_COLOR": "1"}

    def command(program: str, *words: str) -> str:
        done = subprocess.run(
            [installed / program, *words], cwd=theirs, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    settings = ["--settings", "scope=eager", "scope=full,backend=aot_eager"]
    swept = command(
        "compile-sweep", "sweep", "--runner", runner, "--workload", "workloads.mine:Mine", *settings, "--no-warm-start",
        "--no-confirm", "--cache-store", "none", "--output", "swept",
    )  # fmt: skip
    assert "trials: 2 ok" in swept
    report = theirs / "swept" / "report.html"
    report.unlink()
    assert command("compile-sweep", "report", "swept") == "swept/report.html\n"
    assert report.is_file()
    assert "backend aot_eager" in command("compile-sweep", "table", "swept")
    command("compile-sweep", "export", "swept", "--only", "best", "--no-rerun")
    assert json.loads(command("python", "swept/best.py", "--passes", "2").splitlines()[-1])["finite"]
    checked = command("compile-sweep", "check", "workloads.mine:Mine", "--scopes", "full", "--backend", "aot_eager")
    assert "works" in checked
    assert "torch.compile" in command(
        "compile-sweep", "sweep", "--workload", "layers", "--source", "scope=full"
    )  # a built-in one
