"""docs/testing.md lists what runs only at night, with the reason, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PAGE = Path("docs", "testing.md")


def marking(tests: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yields each file of tests that says `mark.nightly`, with its syntax tree."""
    for path in sorted(tests.rglob("test_*.py")):
        if "mark.nightly" in (text := path.read_text(encoding="utf-8")):
            yield path, ast.parse(text)


def reasons(tests: Path) -> Iterator[tuple[str, str]]:
    """Yields the file and the reason of each `pytest.mark.nightly(...)`."""
    for path, tree in marking(tests):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr="nightly"), args=[ast.Constant(value=str(reason))]):
                    yield path.name, reason


def test_each_is_listed_with_its_reason(repository: Path) -> None:
    expected = {f"| `{name}` | {reason} |" for name, reason in reasons(repository / "tests")}
    listed = {line for line in (repository / PAGE).read_text(encoding="utf-8").splitlines() if line.startswith("| `test_")}
    assert expected == listed


def test_none_goes_without_a_reason(repository: Path) -> None:
    bare = [
        f"{path.name}:{node.lineno}"
        for path, tree in marking(repository / "tests")
        for parent in ast.walk(tree)
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.Attribute) and node.attr == "nightly" and not isinstance(parent, ast.Call)
    ]
    assert bare == []
