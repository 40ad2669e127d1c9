"""What a plan reads of a script's code before it runs."""

from pathlib import Path

import pytest

from compile_sweep.script.job import ScriptError, ScriptJob
from orchestrator.plan.recipes import RECIPES
from orchestrator.plan.script_code import MOST_MODULES, read_code
from orchestrator.plan.scripts import script_facts
from orchestrator.plan.space import Target, choose


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def job(folder: Path, script: str = "train.py") -> ScriptJob:
    return ScriptJob.of(script, folder=str(folder))


@pytest.mark.parametrize(
    "imports",
    [
        "from asr.loop import main",
        "import asr.loop as loop, os",
        "from asr import loop",
        "from asr import (loop)",
        "def late():\n    from asr.loop import main  # once it is needed",
    ],
)
def test_modules_in_packages_are_read_through_relative_imports(imports: str, tmp_path: Path) -> None:
    """A script of two lines that calls its package was held for one without blocks, and refused `scope=regional`."""
    write(
        tmp_path,
        train=imports,
        asr__in____init__="",
        asr__in__loop="import torch\nfrom .model import (\n    Conformer,\n)\nfrom ..other import thing",
        asr__in__model="from . import layers",
        asr__in__layers="import numpy as np\nclass Layers(nn.ModuleList): ...",
        apart="import unseen",
    )
    found = read_code(job(tmp_path))
    assert "class layers(nn.modulelist)" in found.text
    assert found.packages - {"os"} == {"torch", "numpy"}
    facts = script_facts(job(tmp_path))
    assert facts.has_blocks is None
    target = Target.of(facts, has_gpu=False)
    assert "scope=regional,dynamic=auto" in {
        f"scope={one['scope']},dynamic={one.get('dynamic')}" for one in RECIPES["quickstart"](target)
    }


def test_modules_of_the_working_directory_are_read_as_with_pythonpath(tmp_path: Path) -> None:
    write(tmp_path, tools__in__train="from model import Net", model="nn.Sequential")
    assert "nn.sequential" in read_code(job(tmp_path, "tools/train.py")).text


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("import torch\nimport numpy as np, json", False),
        ("import segmentation_models_pytorch as smp", None),
        ("import timm", None),
    ],
)
def test_a_package_that_may_make_models_may_make_ones_with_blocks(text: str, known: bool | None, tmp_path: Path) -> None:
    write(tmp_path, train=text)
    assert script_facts(job(tmp_path)).has_blocks is known


def test_a_guess_from_the_text_refuses_no_setting_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, train="import torch")
    target = Target.of(script_facts(job(tmp_path)), has_gpu=False)
    assert choose([{"scope": "regional", "dynamic": "auto"}], target).excluded == ()


def test_imports_in_a_circle_end_and_so_does_a_long_chain(tmp_path: Path) -> None:
    write(tmp_path, train="import a0\nimport train", **{f"a{at}": f"import a{at + 1}, a{at}  # mark{at}." for at in range(100)})
    text = read_code(job(tmp_path)).text
    assert f"mark{MOST_MODULES - 2}." in text
    assert f"mark{MOST_MODULES - 1}." not in text


def test_a_script_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    write(tmp_path, train="")
    made = job(tmp_path)
    (tmp_path / "train.py").unlink()
    with pytest.raises(ScriptError, match="cannot be read"):
        read_code(made)
