"""What a sweep says at its end."""

from __future__ import annotations

import io

from rich.console import Console

from orchestrator.presenting import show_summary
from orchestrator.records import Status


def said(*remarks: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=60)
    show_summary(console, [], {Status.OK: 0, Status.FAILED: 3}, remarks=remarks)
    return out.getvalue()


def test_remarks_come_last_as_they_are() -> None:
    remark = "1 setting that was too noisy to rank [bold]would be on the front[/bold], which is said on one line."
    assert (
        said(remark)
        == f"no trial gave a usable result; the reasons are in the report\ntrials: 0 ok, 0 infeasible, 3 failed\n{remark}\n"
    )
    assert said().endswith("3 failed\n")
