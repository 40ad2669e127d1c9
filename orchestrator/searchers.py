"""Tune searchers: which setting is tried next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ray.tune.search import Searcher

from orchestrator.assignment import Assignment, TrialPlan
from workloads.settings import CompileSettings


class PlannedSearcher(Searcher):
    """Proposes the planned settings in order.

    The records are the only state that counts, so there is none to save or restore: a resumed sweep plans what is left.

    Args:
        settings: what to try.
        plan: what all trials have in common.
        new_trial_id: makes an identifier no other attempt of the folder has.
        may_start: asked before each trial; whoever says no ends it for this setting, for example because the time budget
            would not suffice.
    """

    def __init__(
        self,
        settings: Sequence[CompileSettings],
        plan: TrialPlan,
        new_trial_id: Callable[[], str],
        may_start: Callable[[CompileSettings], bool],
    ) -> None:
        super().__init__()
        self._waiting = list(settings)
        self._plan = plan
        self._new_trial_id = new_trial_id
        self._may_start = may_start

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next setting that may start, or that there is none."""
        while self._waiting:
            setting = self._waiting.pop(0)
            if self._may_start(setting):
                return Assignment(plan=self._plan, trial_id=self._new_trial_id(), settings_key=setting.key).to_dict()
        return cast("dict[str, Any]", Searcher.FINISHED)  # a string, which Tune tells apart; its types do not

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The plan does not depend on results."""

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles a searcher to resume with it, which nobody does here; what it holds need not pickle."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""
