"""The documentation as a site, as `make docs` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_its_reference_has_the_public_names(repository: Path, tmp_path: Path) -> None:
    for module in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(module, reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in ("compile_sweep.Workload", "compile_sweep.apply", "analysis.load"):
        assert f'id="{name}"' in reference
    assert (tmp_path / "site" / "tutorial.html").exists()
