"""Tests the direction of imports and the size of files that the design depends on, and the tree in docs/architecture.md."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = ("analysis", "compile_sweep", "orchestrator", "workloads")
MAX_LINES = 600

NAMES_NOTHING = re.compile(r"(^|_)(utils?|helpers?|manager|common|misc)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Modules that only some other modules may import."""

    name: str
    targets: tuple[str, ...]
    """Modules that the rule protects, including their submodules."""
    is_free: Callable[[str], bool]
    """Tells whether a module may import them, or is not subject to the rule."""
    exempt: tuple[str, ...] = ()
    """Submodules of the targets that anything may import."""

    def forbids(self, importer: str, imported: str) -> bool:
        is_target = _within(imported, *self.targets) and not _within(imported, *self.exempt)
        return is_target and not self.is_free(importer)


def _within(module: str, *roots: str) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


RULES = (
    Rule(
        name="the schema imports nothing else of this project",
        targets=("orchestrator", "analysis", "workloads", "compile_sweep"),
        exempt=("compile_sweep.schema",),
        is_free=lambda importer: not _within(importer, "compile_sweep.schema"),
    ),
    Rule(
        name="the contract imports neither the harness nor what runs scripts",
        targets=("compile_sweep.harness", "compile_sweep.script"),
        is_free=lambda importer: not _within(importer, "compile_sweep.contract"),
    ),
    Rule(
        name="the harness imports nothing that runs scripts",
        targets=("compile_sweep.script",),
        is_free=lambda importer: not _within(importer, "compile_sweep.harness"),
    ),
    Rule(
        name="compile_sweep and workloads import neither orchestrator nor analysis",
        targets=("orchestrator", "analysis"),
        is_free=lambda importer: not _within(importer, "compile_sweep", "workloads"),
    ),
    Rule(
        name="built-in workloads are imported by name only",
        targets=("workloads",),
        is_free=lambda importer: not _within(importer, "compile_sweep", "orchestrator", "analysis"),
    ),
    Rule(
        name="analysis takes from this project only compile_sweep.schema and how command lines are read",
        targets=("orchestrator", "compile_sweep"),
        exempt=("compile_sweep.schema", "compile_sweep.command_line"),
        is_free=lambda importer: not _within(importer, "analysis"),
    ),
    Rule(
        name="orchestrator imports analysis only in sweep",
        targets=("analysis",),
        is_free=lambda importer: importer == "orchestrator.sweep" or not _within(importer, "orchestrator"),
    ),
    Rule(
        name="what an installed wheel lacks is imported nowhere",
        targets=("benchmarks", "examples", "tests"),
        is_free=lambda importer: False,
    ),
    Rule(
        name="ray is imported only in orchestrator",
        targets=("ray",),
        is_free=lambda importer: _within(importer, "orchestrator"),
    ),
    Rule(
        name="torch and transformers are imported only in compile_sweep, workloads and the train worker",
        targets=("torch", "transformers"),
        is_free=lambda importer: (
            _within(importer, "compile_sweep.contract", "compile_sweep.harness", "compile_sweep.script", "workloads")
            or importer == "orchestrator.run.worker"
        ),
    ),
    Rule(
        name="plotly is imported only in the figures, the report and its picture",
        targets=("plotly",),
        is_free=lambda importer: _within(importer, "analysis.figures", "analysis.report", "analysis.picture"),
    ),
    Rule(
        name="trackers' libraries are imported only in orchestrator.tracking",
        targets=("mlflow", "tensorboardX", "wandb"),
        is_free=lambda importer: _within(importer, "orchestrator.tracking"),
    ),
    Rule(
        name="optuna is imported only in the search",
        targets=("optuna",),
        is_free=lambda importer: _within(importer, "orchestrator.search"),
    ),
)


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yields line and full name of every import in a module's source, including those for type checking and in functions.

    `from a import b` gives `a.b`, since `b` may be a module. A literal name passed to `import_module` counts.
    """
    parts = module.split(".")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                above = parts[: len(parts) - level + is_package] if level else []
                prefix = ".".join([*above, *([base] if base else [])])
                yield from ((node.lineno, f"{prefix}.{alias.name}".removesuffix(".*")) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Returns one sentence for each import of a module that a rule forbids."""
    return [
        f"{module}, line {line}, imports {imported}: {rule.name}"
        for line, imported in imports_of(source, module, is_package=is_package)
        for rule in RULES
        if rule.forbids(module, imported)
    ]


def sources(repository: Path) -> list[Path]:
    """Returns every Python file of the packages."""
    return sorted(path for package in PACKAGES for path in (repository / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """Returns the dotted name of the module in a file, which is given relative to the root."""
    names = path.with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_imports_run_one_way(repository: Path) -> None:
    found = [
        sentence
        for path in sources(repository)
        for sentence in violations(
            path.read_text(encoding="utf-8"), module_of(path.relative_to(repository)), is_package=path.name == "__init__.py"
        )
    ]
    assert not found, "\n".join(found)


def test_no_file_outgrows_its_room(repository: Path) -> None:
    lengths = {str(p.relative_to(repository)): len(p.read_text(encoding="utf-8").splitlines()) for p in sources(repository)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_every_file_is_named_for_a_thing(repository: Path) -> None:
    assert not [str(p.relative_to(repository)) for p in sources(repository) if NAMES_NOTHING.search(p.stem)]


def tree(repository: Path) -> str:
    """Returns every module with the first line of its docstring, as a table per folder."""
    tables: dict[str, list[str]] = {}
    for path in sources(repository):
        says = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        folder = str(path.parent.relative_to(repository))
        heading = tables.setdefault(folder, [f"| `{folder}/` | |", "|---|---|"])
        if path.name == "__init__.py":
            heading[0] = f"| `{folder}/` | {says} |"
        elif not says.startswith("Moved to"):
            heading.append(f"| `{path.name}` | {says} |")
    return "\n\n".join("\n".join(rows) for rows in tables.values())


def test_every_module_is_in_the_tree_of_the_docs(repository: Path) -> None:
    page = repository / "docs" / "architecture.md"
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- tree")
    mark, _, rest = rest.partition("\n")
    written, end, after = rest.partition("<!-- end of tree")
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(f"{before}{start}{mark}\n\n{tree(repository)}\n\n{end}{after}", encoding="utf-8")
        return
    names = re.compile(r"^\| (`[^`]+`)", re.MULTILINE)  # a module's description may change without the page
    assert names.findall(written) == names.findall(tree(repository)), "UPDATE_GOLDEN=1 writes the tree again"


def loaded_by(code: str, names: set[str], repository: Path) -> list[str]:
    """Returns which of these modules a new process has imported after running the code."""
    code += f"\nimport sys; print(*sorted({names} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout.split()


def test_reading_results_starts_neither_torch_nor_ray(repository: Path) -> None:
    assert loaded_by("import analysis", {"torch", "ray", "transformers", "optuna"}, repository) == []


@pytest.mark.slow
def test_what_a_trainers_controller_unpickles_starts_no_torch(repository: Path) -> None:
    code = (
        "import pickle\n"
        "from orchestrator.run.worker_group import train_loop\n"
        "from orchestrator.run.worker_group import GroupConfig\n"
        "config = pickle.loads(pickle.dumps(GroupConfig(backend='gloo')))\n"
        "config.backend_cls(), config.train_func_context"
    )
    assert loaded_by(code, {"torch", "transformers"}, repository) == []


@pytest.mark.slow
def test_the_process_of_a_trial_starts_no_torch(repository: Path) -> None:
    code = "import orchestrator.run.trial\nfrom orchestrator.guard.watchdog import parse_crash_report\nparse_crash_report('')"
    assert loaded_by(code, {"torch", "transformers"}, repository) == []


@pytest.mark.slow
def test_a_plan_loads_no_compiler_where_neither_settings_nor_the_models_library_do(repository: Path) -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from compile_sweep.describe import answer_or_error\n"
        "from orchestrator.plan.describer import Describer\n"
        "from orchestrator.sweep import main\n"
        "Describer.start = lambda describer: sys.path.append('tests')\n"
        "Describer._answered = lambda describer, question: answer_or_error(json.loads(question))\n"  # not in another process
        "for workload in ('layers', 'toy_workloads:Toy'):\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        assert main(['modes', '--workload', workload, '--dry-run']) == 0\n"
        "assert 'torch' in sys.modules"
    )
    assert loaded_by(code, {"torch._dynamo", "torch._inductor"}, repository) == []


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("compile_sweep.schema.record", "import compile_sweep.harness.measure", "the schema imports nothing"),
        ("compile_sweep.contract.base", "import orchestrator.config", "compile_sweep and workloads import neither"),
        ("workloads.captioning", "from analysis import load", "compile_sweep and workloads import neither"),
        (
            "workloads.gpt2",
            "if TYPE_CHECKING:\n    from orchestrator import config",
            "compile_sweep and workloads import neither",
        ),
        ("orchestrator.check", "from workloads.gpt2 import Gpt2", "by name only"),
        ("compile_sweep.contract.base", "import workloads.gpt2", "by name only"),
        ("analysis.load", "from orchestrator.sweep import main", "only compile_sweep.schema"),
        ("analysis.load", "import orchestrator", "only compile_sweep.schema"),
        ("analysis.load", "from compile_sweep.harness.measure import Measurement", "only compile_sweep.schema"),
        ("orchestrator.run.trial", "def run():\n    import analysis.report", "only in sweep"),
        ("analysis.report", "import ray", "ray is imported only"),
        ("compile_sweep.harness.measure", "from ray import train", "ray is imported only"),
        ("orchestrator.run.trial", "import torch.distributed as dist", "torch and transformers"),
        ("orchestrator.run.worker_pool", "import torch", "torch and transformers"),
        ("compile_sweep.schema.settings", "import torch", "torch and transformers"),
        ("analysis.load", "from transformers import GPT2Config", "torch and transformers"),
        ("analysis.figures.timeline", "from benchmarks.host_queue import read_jobs", "an installed wheel lacks"),
        ("analysis.load", "import plotly.graph_objects as go", "plotly is imported only"),
        ("orchestrator.view.live", "importlib.import_module('plotly')", "plotly is imported only"),
        ("orchestrator.sweep", "import mlflow", "trackers' libraries"),
        ("orchestrator.plan.space", "from optuna.distributions import FloatDistribution", "optuna is imported only"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str, rule: str) -> None:
    found = violations(source, module)
    assert len(found) == 1
    assert rule in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "analysis.load",
            "from compile_sweep.schema.record import read\nfrom compile_sweep.schema.settings import CompileSettings",
        ),
        ("orchestrator.sweep", "from analysis.report import write_report"),
        ("orchestrator.run.worker", "import torch\nfrom compile_sweep.harness import measure"),
        ("orchestrator.search.optuna_proposer", "import optuna"),
        ("orchestrator.tracking.mlflow", "from mlflow.entities import Metric"),
        ("analysis.figures.pareto", "import plotly.graph_objects as go\nfrom . import palette"),
        ("analysis.report", "import plotly.io"),
        ("compile_sweep.harness.apply", "import torch, torch._dynamo\nfrom transformers import GPT2Config"),
        ("workloads.gpt2", "from compile_sweep import Workload"),
        ("workloads.rayleigh", "import torchmetrics, raytracing"),
    ],
)
def test_what_the_design_allows_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize(
    ("source", "is_package", "imported"),
    [
        ("from . import pareto", False, "analysis.figures.pareto"),
        ("from . import pareto", True, "analysis.figures.scatter.pareto"),
        ("from ..load import load", False, "analysis.load.load"),
        ("from compile_sweep.schema.record import *", False, "compile_sweep.schema.record"),
    ],
)
def test_relative_and_star_imports_resolve(source: str, is_package: bool, imported: str) -> None:
    assert [name for _, name in imports_of(source, "analysis.figures.scatter", is_package=is_package)] == [imported]


@pytest.mark.parametrize("stem", ["utils", "cache_utils", "helpers", "manager", "trial_manager"])
def test_a_name_that_names_nothing_is_found(stem: str) -> None:
    assert NAMES_NOTHING.search(stem)


def test_no_two_test_files_have_one_name(repository: Path) -> None:
    names = [path.name for path in (repository / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))  # pytest imports them by it
