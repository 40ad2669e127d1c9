"""The thin Tune searcher around a proposer: the only part of the search that knows Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, cast

from ray.tune.search import Searcher

from orchestrator.assignment import Assignment, TrialPlan
from orchestrator.records import TrialRecord
from orchestrator.search.proposer import Proposer
from workloads.settings import CompileSettings


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
        new_records: those appended to the folder since it was last called; a proposer that learns nothing needs none.
        enough: asked before each proposal whether the search has ended; the proposer knows all new records then.
    """

    def __init__(
        self,
        proposer: Proposer,
        plan: TrialPlan,
        new_trial_id: Callable[[], str],
        may_start: Callable[[CompileSettings], bool],
        new_records: Callable[[], Iterable[TrialRecord]] = lambda: (),
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
