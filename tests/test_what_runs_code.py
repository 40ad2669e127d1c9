"""Every place in the project that can turn data into running code, by name: a new one must be considered here first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("analysis", "compile_sweep", "orchestrator", "workloads")

RUNS = {
    "eval", "exec", "compile", "__import__", "import_module", "pickle.load", "pickle.loads", "cloudpickle.loads", "dill.loads",
    "marshal.loads", "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load", "joblib.load", "os.system",
    "os.popen", "runpy.run_path", "runpy.run_module", "read_pickle", "shelve.open", "shell=True",
}  # fmt: skip

ALLOWED = {
    ("analysis/__init__.py", "import_module"): "its own rooms, when a name of them is first asked for",
    ("compile_sweep/__init__.py", "import_module"): "the same",
    ("orchestrator/cli.py", "import_module"): "the module of one of its commands, by a name that stands in the file",
    ("compile_sweep/script/winner.py", "import_module"): "Lightning, by one of its two names",
    (
        "compile_sweep/contract/installed_torch.py",
        "import_module",
    ): "torch's configuration modules, by names that stand in the source",
    ("compile_sweep/contract/workload_names.py", "import_module"): "the workload that the command line names",
    (
        "compile_sweep/harness/compile_cache/bundles.py",
        "pickle.loads",
    ): "entries that this process compiled, or that were verified before",
    ("compile_sweep/harness/apply.py", "compile"): "the source of settings, which `source.py` wrote",
    ("compile_sweep/harness/apply.py", "exec"): "the same",
    ("compile_sweep/script/main_module.py", "compile"): "the training script that the command line names",
    ("compile_sweep/script/main_module.py", "exec"): "the same",
    ("orchestrator/run/fork_server.py", "exec"): "import statements that the training script begins with",
    ("compile_sweep/script/numerics.py", "torch.load"): "with weights_only, which unpickles tensors and nothing else",
    ("compile_sweep/harness/numerics/reference_store.py", "torch.load"): "the same",
}
"""File and call, and where its data comes from."""


def calls(source: str) -> Iterator[str]:
    """Yields each call that turns data into code, by its name in `RUNS`; `torch.compile` and `re.compile` do not."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if any(
            word.arg == "shell" and not (isinstance(word.value, ast.Constant) and not word.value.value) for word in node.keywords
        ):
            yield "shell=True"
        if name in RUNS:
            yield name
        elif isinstance(node.func, ast.Attribute) and node.func.attr in RUNS - {"compile", "eval", "exec"}:
            yield node.func.attr


@pytest.mark.slow
def test_data_becomes_code_only_where_it_is_known_to(repository: Path) -> None:
    found = {
        (str(path.relative_to(repository)), call)
        for package in PACKAGES
        for path in (repository / package).rglob("*.py")
        for call in calls(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("import pickle\npickle.loads(x)", "pickle.loads"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("importlib.import_module(name)", "import_module"),
        ("subprocess.run(words, shell=True)", "shell=True"),
        ("subprocess.run(words, shell=chosen)", "shell=True"),
        ("pd.read_pickle(path)", "read_pickle"),
        ("eval(text)", "eval"),
    ],
)
def test_a_planted_call_is_found(source: str, call: str) -> None:
    assert list(calls(source)) == [call]


@pytest.mark.parametrize(
    "source", ["torch.compile(model)", "re.compile('x')", "model.eval()", "subprocess.run(words, shell=False)"]
)
def test_what_only_looks_like_one_is_not(source: str) -> None:
    assert list(calls(source)) == []
