"""What a `best.py` imports from this package, and what it spells out."""

from __future__ import annotations

import ast
from importlib import import_module

import pandas as pd
import pytest
import torch

from analysis.best_script import best_script
from compile_sweep.contract.base import load_workload
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings


def source_of(workload: str, spelled: str) -> str:
    built = load_workload(workload)("tiny", 0)
    return prepare(built, CompileSettings.parse(spelled), torch.device("cpu")).source(built.build_model())


def script_of(source: str) -> str:
    figures = dict.fromkeys(("samples_per_s", "samples_per_s_low", "samples_per_s_high"), 100.0)
    told = {"source": source, "workload": "layers", "size": "tiny", "settings_key": "scope=eager", "pipeline": "resident"}
    return best_script(pd.Series({**told, "num_workers": 1, "device": "cpu", **figures}), seed=0)


@pytest.mark.parametrize(
    ("workload", "spelled", "imported"),
    [
        ("layers", "scope=full", ""),
        ("layers", "scope=regional", "from compile_sweep.harness.source_runtime import with_own_code\n"),
        ("captioning", "scope=full,dynamic=mark", "from compile_sweep.harness.source_runtime import mark\n"),
        ("captioning", "scope=full,group_window=100", "from compile_sweep.schema.shapes import group_by_length\n"),
        (
            "captioning",
            "scope=regional,dynamic=mark",
            "from compile_sweep.harness.source_runtime import marked_forward, with_own_code\n",
        ),
    ],
)
def test_a_setting_is_some_sixty_lines_that_import_the_rest(workload: str, spelled: str, imported: str) -> None:
    script = script_of(source_of(workload, spelled))
    code = [line for line in script.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert 30 < len(code) <= 60
    assert imported in script
    assert script.count("from compile_sweep.") == 1 + bool(imported)
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            assert all(hasattr(import_module(str(node.module)), name.name) for name in node.names)


def test_every_import_of_a_best_script_is_used() -> None:
    script = script_of(source_of("captioning", "scope=regional,dynamic=mark"))
    for name in ("inspect", "FunctionType", "MethodType", "mark_dynamic"):
        assert name not in script


def test_a_record_whose_functions_were_others_keeps_them() -> None:
    source = source_of("layers", "scope=regional")
    older = source.replace("torch tells code objects apart by identity", "an earlier comment")
    assert older != source
    assert script_of(older).startswith(older.rstrip())
    assert "source_runtime" not in script_of(older)


@pytest.mark.slow
@pytest.mark.parametrize("spelled", ["scope=full,backend=aot_eager", "scope=regional,backend=aot_eager"])
def test_a_best_script_takes_the_steps_of_its_source(spelled: str) -> None:
    workload = load_workload("layers")("tiny", 0)
    source = source_of("layers", spelled)
    losses = []
    for text in (source, script_of(source)):
        namespace: dict[str, object] = {"__name__": "best"}
        exec(compile(text, "best.py", "exec"), namespace)
        torch.manual_seed(0)
        model = workload.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = namespace["make_step"](model, optimizer)  # type: ignore[operator]
        batch = workload.pool(workload.shape_policy(CompileSettings.parse(spelled)), rank=0, device=torch.device("cpu"))[0]
        losses.append([float(step(dict(batch.inputs))) for _ in range(2)])
    assert losses[0] == losses[1]
