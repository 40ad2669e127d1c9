"""What a reader should know of one trial's figures before trusting them, in a word or two each."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.formatting import number, percent
from analysis.pareto import is_noisy_trial

CLOCK_DRIFT_LIMIT = 0.02
"""Share by which the clock may change within a trial before that is worth saying: several times a good interval's width."""

UNMOVED_WIDTH = 0.01
"""Width of a step's interval over the step below which the trial itself did not drift, whatever its eager reference did: eager
steps wait for a host that CUDA graphs need not wait for."""

DISAGREEMENT_LIMIT = 0.05
"""Share by which a speed-up over eager in another trial may differ from the one over eager in the same trial, likewise."""

REAL_PIPELINE = "real"


class Remark(NamedTuple):
    """A remark, and what it means."""

    text: str
    meaning: str


def remarks(trial: pd.Series) -> list[Remark]:
    """What is unusual about how the trial was measured; none if nothing is.

    Args:
        trial: a row of the frame `load` returns.
    """
    found = []
    if is_noisy_trial(trial):
        median, low, high = (number(trial[f"step_ms_median{end}"]) for end in ("", "_low", "_high"))
        width = "" if not median or low is None or high is None else f" ± {percent((high - low) / 2 / median)}"
        found.append(
            Remark(f"noisy{width}", "the interval of its step time never became narrow enough; fronts go by its worse end")
        )
    if outliers := int(number(trial["outliers"]) or 0):
        words = f"{outliers} outlier{'s' if outliers > 1 else ''}"
        found.append(Remark(words, "timed steps over 1.5 times their batch's median; they are kept in every figure"))
    if number(trial["contended"]):
        pressure = (
            "" if number(trial["cpu_pressure"]) is None else f" ({percent(trial['cpu_pressure'])} of it waiting for a core)"
        )
        found.append(Remark("contended", f"other trials held up its compile{pressure}: compile times are too long"))
    if has_drifted(trial):
        found.append(
            Remark(
                f"drift {percent(trial['clock_drift'])}", "the same eager steps took that much longer at one time than at another"
            )
        )
    if trial["pipeline"] is not pd.NA and trial["pipeline"] == REAL_PIPELINE:
        waits = "" if number(trial["data_wait_share"]) is None else f", {percent(trial['data_wait_share'])} waiting"
        found.append(
            Remark(
                f"real pipeline{waits}",
                "throughput is with batches from the workload's loader, step times are with prepared ones",
            )
        )
    return found


def has_drifted(trial: pd.Series) -> bool:
    """Whether the machine's speed changed under the trial by more than is worth saying."""
    drift = number(trial["clock_drift"])
    median, low, high = (number(trial[f"step_ms_median{end}"]) for end in ("", "_low", "_high"))
    moved = median is None or low is None or high is None or (high - low) / median > UNMOVED_WIDTH
    return drift is not None and drift > CLOCK_DRIFT_LIMIT and moved
