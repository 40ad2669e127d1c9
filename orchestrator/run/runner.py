"""The two ways to run a sweep's trials, on Ray or in local processes, behind one interface, `Runner`.

Also contains what both share: choosing the next setting, and deciding which running trials to stop.
"""

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import Label
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import RunnerKind, SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.progress import Progress, StopRequest
from orchestrator.run import sweep_folder
from orchestrator.run.session import Interrupts
from orchestrator.search.candidates import Candidates
from orchestrator.search.proposers import InOrder
from orchestrator.search.pruning import Pruning, Sighting
from orchestrator.tracking import Tracking

if TYPE_CHECKING:
    from orchestrator.search.search_run import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Trials that a stage wants to run."""

    settings: Sequence[CompileSettings]
    """What to try in order, or what `search` chooses from."""
    may_start: Callable[[CompileSettings], bool]
    """Asked before each trial; a setting that may not start is skipped."""
    alone: bool = False
    """Runs one trial at a time, with the share of cores it would have next to others, so that compile times are comparable."""
    restores: bool = False
    warm_start: bool = False
    """Trials only start from their own settings' artifacts, instead of measuring."""
    search: "Search | None" = None
    """Chooses among the settings; None to try them in order."""
    pruning: Pruning | None = None
    """Decides which trials to stop early; None to stop none."""
    ends_at: Callable[[], float] | None = None
    """Returns when trials that still run are stopped, by `time.monotonic`; None for no such time."""

    @property
    def may_stop_trials(self) -> bool:
        """Whether running trials may be stopped."""
        return self.pruning is not None or self.ends_at is not None


class Runner(Protocol):
    """Runs trials and appends their records to the sweep's folder."""

    def session(self, say: Callable[[str], object], interrupts: Interrupts) -> AbstractContextManager[None]:
        """Prepares for running trials in the block; raises SessionError if they cannot run. `say` is told of long waits."""
        ...

    def run(self, batches: Iterable[Batch]) -> None:
        """Runs the trials of batch after batch in an open session; raises SweepFolderError or SessionError.

        Asks for the next batch once no trial of the last one runs or may start. Returns when no batch is left.
        """
        ...

    def running(self) -> Sequence[Progress]:
        """Returns the progress of every running trial. Called from another thread than `run`."""
        ...


def make_runner(config: SweepConfig, environment: Environment, output: Path, tracking: Tracking) -> Runner:
    """Makes the runner that a configuration names."""
    if config.runner is RunnerKind.LOCAL:
        from orchestrator.run.local_runner import LocalRunner

        return LocalRunner(config, output, tracking)
    from orchestrator.run.ray_runner import RayRunner

    return RayRunner(config, environment, output, tracking)


def new_trial_ids(output: Path) -> Iterator[str]:
    """Yields IDs that no other trial in the folder has, numbered from the first free number on."""
    for number in count(len(list((output / sweep_folder.LOGS).iterdir())) + 1):
        yield f"{number:03d}-{uuid.uuid4().hex[:6]}"


class Proposals:
    """The settings of a batch, one by one.

    Before each proposal, the proposer sees all new records. Records are the only state: they are written before anything else
    learns that a trial ended, and a resumed sweep replays the existing ones. They end when `is_over` returns true.
    """

    def __init__(self, batch: Batch, is_over: Callable[[], bool] = lambda: False) -> None:
        self._batch, self._search, self._is_over = batch, batch.search, is_over
        self._proposer = InOrder(Candidates(batch.settings)) if batch.search is None else batch.search.proposer

    def next(self) -> CompileSettings | None:
        """Returns the next setting that may start; None if there is none."""
        for record in self._search.new_records() if self._search else ():
            self._proposer.tell(asdict(record))
        while not self._is_over() and (self._search is None or self._search.why_enough() is None):
            if (setting := self._proposer.propose()) is None or self._batch.may_start(setting):
                return setting
        return None


LOOK_EVERY_S = 0.5  # seconds between two decisions about which running trials to stop


BUDGET_SPENT = "stopped because the time budget was used up; a larger one, or --resume, tries it to its end"


class EarlyStopping:
    """Decides which running trials to stop because continuing is not worth it."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        self._fresh = records.follow(folder).fresh
        self._pruning, self._ends_at = batch.pruning, batch.ends_at
        self._stopped: set[str] = set()
        self._next_look = 0.0

    def is_due(self) -> bool:
        """Tells whether it is time to decide again; if so, schedules the next time `LOOK_EVERY_S` later."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK_EVERY_S
        return True

    def requests(self, running: Iterable[Progress]) -> Mapping[str, StopRequest]:
        """Returns requests to stop, by trial ID; each trial is asked only once."""
        if self._pruning is not None:
            for record in self._fresh():
                self._pruning.tell(asdict(record))
        is_spent = self._ends_at is not None and time.monotonic() > self._ends_at()
        found: dict[str, StopRequest] = {}
        for progress in running:
            if progress.trial_id in self._stopped:
                continue
            if is_spent:
                found[progress.trial_id] = StopRequest(label=str(Label.BUDGET_SPENT), reason=BUDGET_SPENT, bounds={})
            elif self._pruning and (stop := self._pruning.decide(_sighting(progress))) is not None:
                found[progress.trial_id] = StopRequest(label=str(stop.label), reason=stop.reason, bounds=dict(stop.bounds))
        self._stopped |= found.keys()
        return found


def _sighting(progress: Progress) -> Sighting:
    return Sighting(
        setting=CompileSettings.parse(progress.settings_key),
        phase=progress.phase,
        elapsed_s=progress.worked_s,
        in_phase_s=progress.in_phase_s,
        early=progress.early_figures,
    )


def unwritten_error(output: Path, why: str) -> str:
    """Explains that a sweep ended because a record could not be written, or took the room kept for records."""
    if not output.is_dir():
        return (
            f"{output} was removed or renamed while the sweep ran, so the sweep has ended; if it has another name now, go on "
            "with --resume and that name as --output"
        )
    what, remedy = f"a record could not be written to {output} ({why})", "put that right"
    if why == sweep_folder.ROOM_USED:
        what = f"the disk with {output} is full and {why}"
    if why in (sweep_folder.ROOM_USED, *map(os.strerror, (errno.ENOSPC, errno.EDQUOT))):
        remedy = "make room"
    return f"{what}, so the sweep has ended; what is recorded is intact: {remedy} and go on with --resume"


def plan_fields(batch: Batch) -> dict[str, Any]:
    """Returns the fields of `TrialPlan` that follow from a batch."""
    return {
        "restores": batch.restores or batch.warm_start,
        "prunes": batch.may_stop_trials,
        "warm_start": batch.warm_start,
    }
