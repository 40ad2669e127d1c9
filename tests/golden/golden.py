"""Golden files: what the commands printed and wrote when the files in `files/` were last updated.

`UPDATE_GOLDEN=1 python -m pytest tests/golden` updates them; the changes are then in the diff, for a reviewer to judge.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from difflib import unified_diff
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from orchestrator.environment import fingerprint

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"
UPDATES = os.environ.get("UPDATE_GOLDEN") == "1"

COMMANDS = {
    "sweep": "orchestrator.sweep",
    "check": "orchestrator.check",
    "cache": "orchestrator.cache",
    "simulate": "orchestrator.simulate",
    "report": "analysis.report",
    "table": "analysis.table",
    "recommend": "analysis.recommend",
    "compare": "analysis.compare",
    "export": "analysis.export",
    "picture": "analysis.picture",
    **{f"benchmarks.{name}": f"benchmarks.{name}.__main__" for name in ("cache", "scaling", "search")},
    **{
        f"benchmarks.{name}": f"benchmarks.{name}"
        for name in (
            "host_queue", "levers.variations", "recipes.regional_recipe", "recipes.source_tables", "search.live_search",
            "search.make_table", "trials.contention", "trials.workers_on_one_gpu",
        )
    },
}  # fmt: skip
"""Module that `python -m` runs for each command."""

UNSTEADY: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"[ \t]+$", ""),
    (r"(--processes INT +\(default: )\d+", r"\1<cores>"),
    (r"Expected one of \((.*?)\)", lambda found: f"Expected one of {', '.join(sorted(found[1].split(', ')))}"),  # it is a set
    (r"(% +[\d.]+ +)[\d,]+$", r"\1<sweeps/min>"),  # a table of simulate
)
"""Patterns of what differs between runs or machines, and their replacements."""


def check(name: str, text: str) -> None:
    """Fails unless the golden file of this name holds this text; with UPDATE_GOLDEN=1, writes it there."""
    path = FILES / name
    if UPDATES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path.relative_to(REPOSITORY)} is missing; write it with UPDATE_GOLDEN=1"
    was = path.read_text(encoding="utf-8")
    changes = "\n".join(unified_diff(was.splitlines(), text.splitlines(), name, "now", lineterm=""))
    assert not changes, changes


def run(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command in this process; returns its line, exit code and output in the form of a golden file."""
    name, *words = shlex.split(line)
    main = import_module(COMMANDS[name]).main
    before = sys.argv
    sys.argv = [name, *words]
    capsys.readouterr()
    try:
        code = main(words) if inspect.signature(main).parameters else main()
    except SystemExit as stop:  # --help
        code = stop.code or 0
    finally:
        sys.argv = before
    printed = capsys.readouterr()
    parts = (f"$ {line}", f"exit code {code}", printed.out, printed.err and f"stderr: {printed.err}")
    return normalized("\n".join(part.rstrip("\n") for part in parts if part) + "\n")


def normalized(text: str) -> str:
    """Removes what depends on the machine or the time."""
    for folder, name in ((str(Path.cwd()), "<here>"), (str(REPOSITORY), "<repository>")):
        text = text.replace(folder, name)
    for pattern, stands_for in UNSTEADY:
        text = re.sub(pattern, stands_for, text, flags=re.MULTILINE)
    return text


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Makes NVML find one GPU called `name`, or none; undone with the monkeypatch except for a cache of `fingerprint`."""
    fingerprint.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if name is None:

        def fail() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", fail)
        return
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "the only one",
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096),
        "nvmlSystemGetCudaDriverVersion_v2": 13000,
        "nvmlSystemGetDriverVersion": "580.65.06",
    }
    for function, answer in answers.items():
        monkeypatch.setattr(pynvml, function, lambda *_, answer=answer: answer)
