"""A fault in one trial affects no other: a setting, a worker or a compiler that breaks, in every way and phase."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from arena import Arena, Arenas, setting
from fault_table import FaultTable, Row, described

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COMPILE_DEADLINE_S = "20"
TRIAL_DEADLINE_S = "150"
"""Long enough for sound trials that share their cores with much else."""

USUAL = ("--cache-store", "none")
LONG = ("--compile-deadline-s", COMPILE_DEADLINE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFault:
    """A fault, and its expected outcome."""

    name: str
    multiple: int
    kind: str
    phase: str
    label: str | None
    """None if it is measured in the end."""
    tries: int = 1
    how: str
    times: int = 1_000
    further: str = "scope=eager"

    @property
    def plan(self) -> dict[str, Any]:
        return {"kind": self.kind, "phase": self.phase, "times": self.times}

    @property
    def setting(self) -> str:
        return setting(self.multiple, self.further)


EXCEPTION = TrialFault(
    name="exception", multiple=2, kind="exception", phase="building", label="exception", how="the workload raises while building"
)
SEGFAULT = TrialFault(
    name="SIGSEGV", multiple=3, kind="segfault", phase="steady", label="crashed", how="reads address 0 between timed steps"
)
KILLED_ONCE = TrialFault(
    name="SIGKILL of a worker",
    multiple=4,
    kind="kill",
    phase="warming-up",
    times=1,
    label=None,
    tries=2,
    how="once, while warming up",
)
EXITS = TrialFault(
    name="os._exit",
    multiple=5,
    kind="exit",
    phase="eager-runs",
    label="worker-died",
    tries=2,
    how="`os._exit(3)` in an eager run that numbers are compared with, at every try",
)
NO_MEMORY = TrialFault(
    name="no host memory for a tensor",
    multiple=6,
    kind="address-space",
    phase="building",
    label="out-of-memory",
    how="allocates 8 GiB under a limit of 1 GiB (RLIMIT_AS)",
)
ABORTS = TrialFault(
    name="abort",
    multiple=7,
    kind="abort",
    phase="warming-up",
    label="crashed",
    how="`abort()`, like an uncaught C++ exception",
)
STUCK_COMPILER = TrialFault(
    name="compile that never ends",
    multiple=9,
    kind="stuck",
    phase="never",
    label="compile-deadline",
    how=f"a backend that is stuck in C, holds the GIL and has a child process; deadline {COMPILE_DEADLINE_S} s",
    further="scope=full,dynamic=auto,backend=chaos_stuck",
)
SHORT = (KILLED_ONCE, STUCK_COMPILER)
"""One fault that is retried and one that only a deadline ends; test_local_runner.py covers those that end an attempt by
themselves.
"""

TOGETHER = (EXCEPTION, SEGFAULT, *SHORT, EXITS, NO_MEMORY, ABORTS)

HANGING_STEP = TrialFault(
    name="step that hangs",
    multiple=10,
    kind="hang",
    phase="steady",
    label="trial-deadline",
    how=f"sleeps in a timed step, with a child process; deadline {TRIAL_DEADLINE_S} s",
)
STOPPED_WORKER = TrialFault(
    name="worker that stops reporting",
    multiple=11,
    kind="stop",
    phase="steady",
    label="trial-deadline",
    how=f"SIGSTOP between timed steps, deadline {TRIAL_DEADLINE_S} s: the trial kills it 15 s later",
)
DISK_FULL_ONCE = TrialFault(
    name="full disk, for a moment",
    multiple=12,
    kind="disk",
    phase="building",
    times=1,
    label=None,
    tries=2,
    how="writes 64 MiB to a disk of 1 MiB, once",
)
DISK_FULL = TrialFault(
    name="full disk, for good",
    multiple=13,
    kind="disk",
    phase="building",
    label="disk-full",
    tries=3,
    how="writes 64 MiB to a disk of 1 MiB, at every try",
)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A control group (v1) of 256 MiB, in which the kernel's out-of-memory killer soon acts."""
    own = next((line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
    folder = Path(f"/sys/fs/cgroup/memory{own}/chaos-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(1 << 28))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here ({error.strerror})")
    yield folder
    with suppress(OSError):
        for straggler in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(straggler)
        folder.rmdir()


def check(arenas: Arenas, fault: TrialFault, fault_table: FaultTable, *words: str, **further: Any) -> dict[str, Any]:
    """Runs a sweep in which this happens to the second of three trials."""
    arena = arenas({fault.multiple: fault.plan}, **further)
    done = arena.sweep(*USUAL, *LONG, *words, "--settings", setting(0), fault.setting, setting(1))
    assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=3, measured={0, 1})
    record = arena.record(fault.multiple)
    verify(fault, record)
    fault_table.tell(
        Row(
            name=fault.name,
            how=fault.how,
            outcome=described(record),
            tries=record["tries"],
            recovery_s=arena.recovery_s(fault.multiple if fault.phase != "never" else -1),
        )
    )
    return record


def verify(fault: TrialFault, record: dict[str, Any]) -> None:
    """Checks that it is labeled with its last phase, and was tried as often as it should be."""
    if fault.label is None:
        assert record["status"] == "ok", record
    else:
        phase = "warming-up" if fault.phase == "never" else fault.phase
        assert (record["label"], record["phase"]) == (fault.label, phase), record
    assert (record["tries"], len(record["retry_reasons"])) == (fault.tries, fault.tries - 1), record


def sweep_with(faults: Sequence[TrialFault], arena: Arena, *words: str) -> None:
    """Runs a sweep in which these happen one after the other, followed by a sound trial."""
    settings = [*(fault.setting for fault in faults), setting(1)]
    done = arena.sweep(*USUAL, *words, "--settings", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=len(settings), measured={1})
    for fault in faults:
        verify(fault, arena.record(fault.multiple))
    logs = [(arena.output / "logs" / record["trial_id"] / "worker-0.log").read_text() for record in arena.records()]
    assert sum("Fatal Python error: Segmentation fault" in log for log in logs) == (SEGFAULT in faults)
    assert sum("Timeout (0:00:" in log for log in logs) == (STUCK_COMPILER in faults)


def test_faults_of_local_trials_one_after_the_other_cost_no_other_trial(arenas: Arenas) -> None:
    # A warm-up without a compiler takes a tenth of a second, so this deadline is generous, too.
    sweep_with(SHORT, arenas({fault.multiple: fault.plan for fault in SHORT}), "--runner", "local", "--compile-deadline-s", "8")


@pytest.mark.ray
@pytest.mark.usefixtures("only_in_full")
def test_faults_of_trials_one_after_the_other_cost_no_other_trial(arenas: Arenas, fault_table: FaultTable) -> None:
    arena = arenas({fault.multiple: fault.plan for fault in TOGETHER})
    sweep_with(TOGETHER, arena, *LONG)
    for fault in TOGETHER:
        record = arena.record(fault.multiple)
        recovery_s = arena.recovery_s(fault.multiple if fault.phase != "never" else -1)
        row = Row(name=fault.name, how=fault.how, outcome=described(record), tries=record["tries"], recovery_s=recovery_s)
        fault_table.tell(row)


@pytest.mark.ray
@pytest.mark.usefixtures("only_in_full")
@pytest.mark.parametrize("fault", TOGETHER, ids=lambda fault: fault.name)
def test_each_fault_alone(arenas: Arenas, fault_table: FaultTable, fault: TrialFault) -> None:
    check(arenas, fault, fault_table)


@pytest.mark.ray
@pytest.mark.usefixtures("only_in_full")
@pytest.mark.parametrize("fault", [HANGING_STEP, STOPPED_WORKER], ids=lambda fault: fault.name)
def test_what_hangs_is_ended_by_the_trials_deadline(arenas: Arenas, fault_table: FaultTable, fault: TrialFault) -> None:
    check(arenas, fault, fault_table, "--trial-deadline-s", TRIAL_DEADLINE_S)


@pytest.mark.ray
@pytest.mark.usefixtures("only_in_full")
@pytest.mark.parametrize("fault", [DISK_FULL_ONCE, DISK_FULL], ids=lambda fault: fault.name)
def test_a_full_disk_is_tried_again(arenas: Arenas, fault_table: FaultTable, fault: TrialFault, tiny_disk: Path) -> None:
    check(arenas, fault, fault_table, further={"tiny": str(tiny_disk)})


@pytest.mark.ray
@pytest.mark.usefixtures("only_in_full")
def test_the_kernels_out_of_memory_killer_is_told_from_other_kills(
    arenas: Arenas, fault_table: FaultTable, small_cgroup: Path
) -> None:
    fault = TrialFault(
        name="the kernel's out-of-memory killer",
        multiple=14,
        kind="cgroup",
        phase="building",
        label="out-of-memory",
        how="a worker outgrows a control group of 256 MiB",
    )
    record = check(arenas, fault, fault_table, further={"cgroup": str(small_cgroup)})
    assert "the kernel ended a worker" in record["reason"]


@pytest.mark.ray
@pytest.mark.usefixtures("only_in_full")
def test_a_dead_worker_of_two_is_the_one_that_is_named(arenas: Arenas, fault_table: FaultTable) -> None:
    arena = arenas({2: {"kind": "kill", "phase": "building", "rank": 1}})
    done = arena.sweep(*USUAL, *LONG, "--workers-per-trial", "2", "--settings", setting(0), setting(2), setting(1))
    assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=3, measured={0, 1})
    record = arena.record(2)
    assert (record["label"], record["tries"]) == ("worker-died", 2), record
    outcome = described(record)
    how = "SIGKILL of the second while building, at every try"
    fault_table.tell(
        Row(name="one worker of two", how=how, outcome=outcome, tries=record["tries"], recovery_s=arena.recovery_s(2))
    )
