"""The contract of everything that proposes settings."""

from __future__ import annotations

from typing import Protocol

from orchestrator.objectives import Record
from workloads.settings import CompileSettings


class Proposer(Protocol):
    """Says what to try next, and learns from what became of it.

    Several proposals may be out at once, and results may come in any order. No setting is proposed twice, whatever became of
    it, nor one that was told of before it could be. With the same seed, candidates and results, proposals are the same.
    """

    def propose(self) -> CompileSettings | None:
        """The next setting; None if there is none left."""
        ...

    def tell(self, record: Record) -> None:
        """Learns from a finished attempt.

        Args:
            record: fields of a `TrialRecord`, as `dataclasses.asdict` gives them; `settings_key`, `status` and `wall_s` are
                needed, figures that were not reached may be missing. Failures and stopped trials are told as well. A setting
                that was never proposed, such as one from an earlier sweep, counts as tried from then on.
        """
        ...
