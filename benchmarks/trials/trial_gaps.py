"""Time that a sweep spends between its trials: seconds from the end of one trial to `building` of the next.

Background: of a trial's cost, only compiling, timing and checking are useful. What comes before `building` (starting
processes, importing torch and the workload) and after `done` (publishing, ending processes, writing the record) is overhead.

Output: a line for each trial with its gap to the previous one on the same slot, and the median gap. The gap begins when the log
of the earlier trial says `done` or, if that trial died, when its record is written.

    python -m benchmarks.trials.trial_gaps --runner local --workload layers --size tiny --settings scope=eager scope=full
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

_POLL_S = 0.02
_PHASE = re.compile(r"^\S+ (building|done)$", re.MULTILINE)


@dataclass(slots=True)
class SeenTrial:
    """When each event of a trial was first seen, in seconds of the monotonic clock."""

    at: dict[str, float] = field(default_factory=dict)  # time by event: building, done, recorded

    @property
    def ended(self) -> float | None:
        """When it was done or, if it died, recorded."""
        return self.at.get("done", self.at.get("recorded"))


def watched(arguments: list[str], folder: Path) -> tuple[dict[str, SeenTrial], int]:
    """Runs a sweep, and returns the events of its trials, by trial ID, and the command's exit code.

    Args:
        arguments: Words of the sweep's command line.
        folder: An empty folder for the sweep.
    """
    seen: dict[str, SeenTrial] = {}
    sweep = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.sweep", *arguments, "--output", str(folder)], stdout=subprocess.DEVNULL
    )
    while True:
        has_ended, now = sweep.poll() is not None, time.monotonic()
        for log in folder.glob("logs/*/worker-0.log"):
            trial = seen.setdefault(log.parent.name, SeenTrial())
            for phase in _PHASE.findall(log.read_text(encoding="utf-8", errors="replace")):
                trial.at.setdefault(phase, now)
        records = folder / "trials.jsonl"
        whole, _, _ = records.read_text(encoding="utf-8").rpartition("\n") if records.exists() else ("", "", "")
        for line in whole.splitlines():
            seen.setdefault(json.loads(line)["trial_id"], SeenTrial()).at.setdefault("recorded", now)
        if has_ended:
            return seen, sweep.returncode
        time.sleep(_POLL_S)


def gaps(seen: dict[str, SeenTrial]) -> dict[str, float]:
    """Returns the seconds before each trial's `building`, by trial ID; a trial follows the latest one without a successor."""
    found: dict[str, float] = {}
    ended = sorted((trial.ended, name) for name, trial in seen.items() if trial.ended is not None)
    for name, trial in sorted(seen.items(), key=lambda item: item[1].at.get("building", float("inf"))):
        before = [one for one in ended if one[0] <= trial.at.get("building", 0.0)]
        if before:
            found[name] = trial.at["building"] - before[-1][0]
            ended.remove(before[-1])
    return found


def main() -> int:
    """Runs the sweep that the command line describes."""
    with tempfile.TemporaryDirectory(prefix="trial-gaps-") as folder:
        seen, code = watched(sys.argv[1:], Path(folder) / "sweep")
    found = gaps(seen)
    for name, gap_s in found.items():
        print(f"{name}  {gap_s:6.2f} s")
    if found:
        print(f"median of {len(found)}: {statistics.median(found.values()):.2f} s, at most {max(found.values()):.2f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
