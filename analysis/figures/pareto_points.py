"""Decides which trials the front's chart shows, and where."""

import math
from typing import Any, NamedTuple

import pandas as pd

from analysis.choose.pareto import is_noisy_trial, knee, pareto_front, standing
from analysis.choose.uncertainty import uncertain_front
from analysis.figures.front_axes import DEFAULT_GAIN, DEFAULT_PRICE, GAINS, PRICES, FrontAxis, front_objectives
from analysis.formatting import number, upper_end
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import Scope

MOST_POINTS = 1000
"""Number of points that a browser can draw at once; with more trials, the front and the fastest of the others are shown."""

TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class ParetoPoint(NamedTuple):
    """One trial in the chart."""

    trial: pd.Series
    """Its row of the frame. Text is unescaped, as in the record."""
    scope: Scope
    status: Status
    x: float
    """Measured price, in the axis's unit."""
    shown_x: float
    """Price at which it is drawn: at least a logarithmic axis's floor."""
    y: float
    y_low: float | None
    y_high: float | None
    on_front: bool
    is_knee: bool
    front_probability: float | None
    """Fraction of draws from the intervals in which it is on the front; None if it cannot be, or almost never is."""
    equal_to: str | None
    """Label of the trial it cannot be told apart from; None if it leads a group or is alone."""

    @property
    def trial_id(self) -> str:
        """The trial's ID."""
        return str(self.trial["trial_id"])

    @property
    def is_noisy(self) -> bool:
        """Whether the front uses the low end of its interval."""
        return is_noisy_trial(self.trial)

    @property
    def assured_y(self) -> float:
        """The gain that the front uses."""
        return self.y - self.below if self.is_noisy else self.y

    @property
    def above(self) -> float:
        """How far the interval extends above the gain; 0 without an interval, or if it is unbounded."""
        return 0.0 if self.y_high is None or math.isinf(self.y_high) else max(0.0, self.y_high - self.y)

    @property
    def below(self) -> float:
        """How far the interval extends below the gain; 0 without an interval."""
        return 0.0 if self.y_low is None else max(0.0, self.y - self.y_low)


class ParetoInfo(NamedTuple):
    """Contents of the chart."""

    points: list[ParetoPoint]
    """Trials with figures for both axes, including those that are not ok."""
    front: list[ParetoPoint]
    """Trials on the front over these two axes, ascending in price."""
    gain: FrontAxis
    price: FrontAxis
    ties: list[list[ParetoPoint]]
    """Groups of trials on the front, or possibly on it, that cannot be told apart, each led by its most probable member."""
    floor: float
    """Lower prices are negligible and drawn here: a logarithmic axis has no zero for eager."""
    num_left_out: int
    """Number of trials that are not shown because there are too many to draw."""


def pareto_info(
    df: pd.DataFrame, *, gain: str = DEFAULT_GAIN, price: str = DEFAULT_PRICE, attempts: pd.DataFrame | None = None
) -> ParetoInfo:
    """Computes what to show of the trials that `load` returned.

    Args:
        df: The trials.
        gain: Vertical axis, a name in `GAINS`.
        price: Horizontal axis, a name in `PRICES`.
        attempts: Result of `load` with `all_attempts`, to see how settings scatter between runs.
    """
    over, along = GAINS[gain], PRICES[price]
    trials = standing(df)
    objectives = front_objectives(gain, price)
    front = pareto_front(trials, objectives)
    knee_row = knee(front) if (gain, price) == (DEFAULT_GAIN, DEFAULT_PRICE) else None
    with_figures = trials.dropna(subset=[over.column, along.column])
    shown = with_figures.assign(_front=with_figures.index.isin(front.index))
    shown = shown.sort_values(["_front", over.column], ascending=False, kind="stable").head(MOST_POINTS).sort_index()
    floor = _floor(with_figures, along)
    possible = uncertain_front(shown, objectives, attempts=df if attempts is None else attempts).trials
    leaders = _leaders(possible)
    points: dict[Any, ParetoPoint] = {}
    for index, row in shown.iterrows():
        leader = leaders.get(index, index)
        points[index] = _point(
            row, over, along, floor, on_front=index in front.index, is_knee=knee_row is not None and knee_row.name == index,
            front_probability=number(possible.at[index, "front_probability"]) if index in possible.index else None,
            equal_to=None if leader == index else str(shown.at[leader, "setting_name"]),
        )  # fmt: skip
    groups = [
        [leader, *(one for one, led_by in leaders.items() if led_by == leader != one)]
        for leader in dict.fromkeys(leaders.values())
    ]
    return ParetoInfo(
        points=list(points.values()),
        front=[points[index] for index in front.index if index in points],
        gain=over,
        price=along,
        ties=[[points[index] for index in group] for group in groups if len(group) > 1],
        floor=floor,
        num_left_out=len(with_figures) - len(points),
    )


def _leaders(possible: pd.DataFrame) -> dict[Any, Any]:
    """Returns, by index of each trial that is or may be on the front, the index of its group's leader."""
    at = dict(zip(possible["settings_key"], possible.index, strict=True))
    rows = zip(possible.index, possible["settings_key"], possible["equal_to"], strict=True)
    return {index: index if own == equal else at[equal] for index, own, equal in rows}


def _point(
    row: pd.Series, gain: FrontAxis, price: FrontAxis, floor: float, *, on_front: bool, is_knee: bool,
    front_probability: float | None, equal_to: str | None,
) -> ParetoPoint:  # fmt: skip
    y, x = float(row[gain.column]) / gain.divisor, float(row[price.column]) / price.divisor
    rate = number(row["samples_per_s"])
    scale = y / rate if rate else None  # the interval is of the same passes
    ends = number(row["samples_per_s_low"]), upper_end(row["samples_per_s_high"])
    low, high = (None if scale is None or end is None else scale * end for end in ends)
    return ParetoPoint(
        trial=row,
        scope=Scope(row["scope"]),
        status=Status(row["status"]),
        x=x,
        shown_x=max(x, floor) if price.is_logarithmic else x,
        y=y,
        y_low=low,
        y_high=high,
        on_front=on_front,
        is_knee=is_knee,
        front_probability=front_probability,
        equal_to=equal_to,
    )


def _floor(df: pd.DataFrame, price: FrontAxis) -> float:
    """Returns a tick a decade or more below the lowest price, so that eager's near-zero price does not stretch the axis."""
    if not price.is_logarithmic:
        return 0.0
    compiled = df[df["scope"] != Scope.EAGER][price.column].dropna()
    room = 0.1 * float(compiled.min()) if len(compiled) else 0.0
    return max((tick for tick in TICKS_S if tick <= room), default=TICKS_S[0])
