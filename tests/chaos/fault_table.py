"""The table of faults in docs/reliability.md: what happened in a run of this suite, one row per fault."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.environment import fingerprint

BEGIN, END = "<!-- faults: written by make chaos -->", "<!-- end of faults -->"
HEAD = "| fault | how it is injected | outcome | tries | s until the next trial is at work |\n|---|---|---|---|---|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault."""

    name: str
    how: str
    outcome: str
    tries: int
    """Attempts at the affected trial, or at the sweep."""
    recovery_s: float | None
    """Seconds from the fault until the next worker is at work; None if nothing has to recover."""

    def written(self) -> str:
        recovery = "–" if self.recovery_s is None else f"{self.recovery_s:.1f}"
        return f"| {self.name} | {self.how} | {self.outcome} | {self.tries} | {recovery} |\n"


@dataclass(slots=True)
class FaultTable:
    """Rows reported by the tests; rows of a file that no test reported again stay unchanged."""

    rows: dict[str, Row] = field(default_factory=dict)

    def tell(self, row: Row) -> None:
        self.rows[row.name] = row

    def write(self, path: Path) -> None:
        """Rewrites the table between the marks of the file."""
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        table, _, after = rest.partition(END)
        lines = {
            line.split("|")[1].strip(): line + "\n" for line in table.splitlines() if line.startswith("| ") and "---" not in line
        }
        lines.pop("fault", None)
        lines |= {name: row.written() for name, row in self.rows.items()}
        table = f"{HEAD}{''.join(lines.values())}"
        path.write_text(f"{before}{BEGIN}\n\n{_machine()}\n\n{table}\n{END}{after}", encoding="utf-8")


def _machine() -> str:
    """Returns the machine that the latest rows were written on."""
    here = fingerprint()
    gpus = f"{here.num_gpus} × {here.gpu}" if here.gpu else "no GPU"
    return f"Latest rows: {here.cores} CPU cores with {os.getloadavg()[1]:.0f} processes to run at a time, {gpus}."


def described(record: dict[str, object]) -> str:
    """Describes a trial's outcome, from its record."""
    if record["label"] is None:
        return "measured" if record["tries"] == 1 else "measured at the next try"
    return f"`{record['label']}` ({record['status']}), last phase {record['phase']}"
