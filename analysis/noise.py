"""Trials that are kept off the front for their noise alone, and what is known of them in spite of it. Pure functions.

The interval of such a trial's step time never became narrow, mostly because its steps wait for a host that is not quiet. Nothing
is wrong with its setting, and where it is the faster one even at the low end of its interval, a person should hear of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.pareto import pareto_front
from orchestrator.records import Status

UNSTABLE = "unstable"
"""The label of such a trial."""


def accepting_unstable(df: pd.DataFrame) -> pd.DataFrame:
    """The trials, those that are unstable as if they were usable; their label stays."""
    return df.assign(status=df["status"].astype("string").mask(is_unstable(df), str(Status.OK)))


def is_unstable(df: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which rows are."""
    return (df["label"] == UNSTABLE).fillna(False).to_numpy(dtype=bool)


def fast_in_spite_of_noise(df: pd.DataFrame) -> pd.DataFrame:
    """Unstable trials that would be on the front even at the low ends of their intervals of throughput.

    Args:
        df: trials as `load` returns them.

    Returns:
        Their rows, the fastest first.
    """
    noisy = is_unstable(df)
    cautious = accepting_unstable(df).assign(samples_per_s=df["samples_per_s"].mask(noisy, df["samples_per_s_low"]))
    front = pareto_front(cautious)
    return df.loc[front.index[is_unstable(front)]].sort_values("samples_per_s", ascending=False, kind="stable")
