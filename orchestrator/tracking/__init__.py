"""A sweep's trials in MLflow, TensorBoard or W&B as they finish; `trials.jsonl` remains the truth.

The Tune callback is in `orchestrator.run.tuning`, because it alone needs Ray.
"""

from orchestrator.tracking.base import Destination, LoggedTrial, Service, entry_of
from orchestrator.tracking.delivery import Tracking

__all__ = ["Destination", "LoggedTrial", "Service", "Tracking", "entry_of"]
