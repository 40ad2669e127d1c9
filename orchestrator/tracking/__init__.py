"""A sweep's trials in MLflow, TensorBoard or W&B as they finish; `trials.jsonl` remains the truth.

The Tune callback is in `orchestrator.tracking.callback`, because it alone needs Ray.
"""

from orchestrator.tracking.deliveries import Tracker, Tracking
from orchestrator.tracking.destinations import Destination, Service
from orchestrator.tracking.entries import LoggedTrial, entry_of

__all__ = ["Destination", "LoggedTrial", "Service", "Tracker", "Tracking", "entry_of"]
