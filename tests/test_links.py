"""Every link in the documentation has a target: the file exists, and so does the heading of an anchor; files named are there."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
]
PAGES = sorted(path for path in FILES if path.suffix == ".md")
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
SOURCE = re.compile(r"`([\w./-]+\.(?:py|js|css|html|yaml|sh|toml))`")
NAMES_OTHERS = {"scripts.md", "tutorial.md", "workloads.md"}
"""Pages that name files of other projects, or those that a reader writes."""
TELLS_HISTORY = {"decisions.md", "log.md", "results.md"}
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as GitHub makes them: equal ones are numbered."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = next(number for number in range(100) if (f"{name}-{number}" if number else name) not in found)
        found.add(f"{name}-{number}" if number else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_files_that_pages_on_this_repository_name_exist() -> None:
    names = {path.name for path in FILES}
    named = {
        (page.name, file)
        for page in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md"))
        if page.name not in NAMES_OTHERS | TELLS_HISTORY
        for file in SOURCE.findall(page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(page, file) for page, file in named if Path(file).name not in names | {"NAME.py"}} == set()
