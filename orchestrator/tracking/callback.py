"""The Tune callback through which finished trials reach the trackers.

Tune's own callbacks for MLflow, W&B and TensorBoard log a trial's configuration and what it reported. Here the one says how to
run it and the other only that it ended; what was measured is in its record, which is durable before Tune hears of it.
"""

from __future__ import annotations

from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from orchestrator.tracking.deliveries import Tracking


class LogTrials(Callback):
    """Has every trial logged once it has ended, however it did. Stands after what records trials that died.

    Args:
        tracking: where to.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Logs what was recorded since."""
        self._tracking.catch_up()

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Likewise, where the trial's own process died."""
        self._tracking.catch_up()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles callbacks to resume with them, which nobody does here."""
        return {}
