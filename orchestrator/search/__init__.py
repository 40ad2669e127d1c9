"""Which setting is tried next: proposers, free of Ray, and the thin Tune searcher around them (`orchestrator.run.tuning`)."""

from orchestrator.search.candidates import Candidates
from orchestrator.search.earlier_sweeps import Learned, Origin, learn_from
from orchestrator.search.predictions import Left, Outlook
from orchestrator.search.proposers import Proposer, Searcher, make_proposer
from orchestrator.search.stopping import Budget, Spending, StableFront

__all__ = [
    "Budget",
    "Candidates",
    "Learned",
    "Left",
    "Origin",
    "Outlook",
    "Proposer",
    "Searcher",
    "Spending",
    "StableFront",
    "learn_from",
    "make_proposer",
]
