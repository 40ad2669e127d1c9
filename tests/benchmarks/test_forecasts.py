"""What a search promises of another hour, beside what an hour more of the recorded tables gains."""

from __future__ import annotations

import statistics

from benchmarks.search.forecasts import promised_and_gained, shares
from benchmarks.search.same_start import ROOT, TABLES
from compile_sweep.schema.objectives import Aims
from orchestrator.search.tables import read_table


def test_promises_are_neither_twice_nor_half_of_what_comes_true_in_the_median() -> None:
    aims, found = Aims.parse(["samples_per_s:max"]), []
    for name in TABLES:
        pairs = list(promised_and_gained(read_table(ROOT / name), aims))
        assert pairs[0][0] > 0
        assert pairs[-1][1] == 0, "nothing comes after the last trial"
        found += shares(pairs)
    assert 0.5 < statistics.median(found) < 2
