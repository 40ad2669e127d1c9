"""Help, plans, sources, complaints and results are what they were; see `golden.py` for how to change them on purpose."""

from __future__ import annotations

import pytest
from command_lines import BAD_INPUT, ON_CPU, ON_GPU
from golden import check, run


@pytest.mark.usefixtures("here", "no_gpu")
@pytest.mark.parametrize("name", ON_CPU)
def test_what_is_printed_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, "\n".join(run(line, capsys) for line in ON_CPU[name]))


@pytest.mark.usefixtures("here", "one_gpu")
@pytest.mark.parametrize("name", ON_GPU)
def test_what_is_printed_with_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, "\n".join(run(line, capsys) for line in ON_GPU[name]))


@pytest.mark.usefixtures("results", "no_gpu")
@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_is_refused_and_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, "\n".join(run(line, capsys) for line in BAD_INPUT[name]))
