"""Which setting is tried next: proposers, free of Ray, and the thin Tune searcher around them (`orchestrator.search.tune`)."""

from orchestrator.search.proposer import Proposer

__all__ = ["Proposer"]
