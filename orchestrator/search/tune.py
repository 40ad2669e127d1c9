"""The thin Tune searcher around a proposer, and the reader of new records that teaches it. The only part that knows Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ray.tune.search import Searcher

from orchestrator.assignment import Assignment, TrialPlan
from orchestrator.errors import RecordsError
from orchestrator.records import TRIALS_FILE, TrialRecord
from orchestrator.search.proposer import Proposer
from workloads.settings import CompileSettings


class NewRecords:
    """Reads what was appended to a sweep's log of trials since the last time.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / TRIALS_FILE
        self._read = 0

    def __call__(self) -> list[TrialRecord]:
        """The records that are new, in order; a line that is still being written waits for the next time.

        Raises:
            RecordsError: a line is no record.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._read)
            whole, _, _ = log.read().rpartition(b"\n")
        if not whole:
            return []
        self._read += len(whole) + 1
        try:
            return [TrialRecord.from_json(line.decode("utf-8", "replace")) for line in whole.split(b"\n")]
        except RecordsError as error:
            raise RecordsError(f"{self._path}: {error}") from None


class ProposingSearcher(Searcher):
    """Has a proposer say what Tune tries next.

    Before each proposal the proposer is told of every record that is new. Records are the only state that counts: they are
    written before Tune hears of a trial, by whoever outlives it, so there is nothing to hear from Tune, to save or to restore,
    and a resumed sweep tells the proposer of what is there already.

    Args:
        proposer: at its beginning.
        plan: what all trials have in common.
        new_trial_id: makes an identifier no other attempt of the folder has.
        may_start: asked of each proposal; one that may not start is passed over.
        new_records: those appended since it was last called.
        enough: asked before each proposal whether the search has ended; the proposer knows all new records then.
    """

    def __init__(
        self,
        proposer: Proposer,
        plan: TrialPlan,
        new_trial_id: Callable[[], str],
        may_start: Callable[[CompileSettings], bool],
        new_records: Callable[[], Iterable[TrialRecord]],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._proposer = proposer
        self._plan = plan
        self._new_trial_id = new_trial_id
        self._may_start = may_start
        self._new_records = new_records
        self._enough = enough

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The proposer's next setting that may start, or that there is none."""
        for record in self._new_records():
            self._proposer.tell(asdict(record))
        while not self._enough() and (setting := self._proposer.propose()) is not None:
            if self._may_start(setting):
                return Assignment(plan=self._plan, trial_id=self._new_trial_id(), settings_key=setting.key).to_dict()
        return cast("dict[str, Any]", Searcher.FINISHED)  # a string, which Tune tells apart; its types do not

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Its record is read before the next proposal."""

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles a searcher to resume with it, which nobody does here; what it holds need not pickle."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""
