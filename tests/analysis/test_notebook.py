"""The executed notebook in examples/ still runs, and what it printed is what it prints now."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository)
    notebook = json.loads((repository / "examples" / "read_a_sweep.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    printed = 0
    for cell in (cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        code = "".join(cell["source"])
        exec(code, names)
        said = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        assert capsys.readouterr().out == said
        printed += bool(said)
        is_figure = any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in cell["outputs"])
        if is_figure:
            shown = eval(compile(ast.Expression(ast.parse(code).body[-1].value), "cell", "eval"), names)  # type: ignore[attr-defined]
            assert len(shown.data) > 1
    assert printed == 2
