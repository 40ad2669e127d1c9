"""What each choice is worth: the effect of changing only it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.choose.attribution import PARTS, USUAL, Difference, Effect, effects, region_prices
from analysis.figures.chart_style import LINE_COLOR, SCOPE_COLORS, or_trials
from analysis.figures.setting_rows import BAR, RowName, row_hover, rows_figure
from analysis.formatting import figure, whole
from compile_sweep.schema.settings import Scope

_MOST_EFFECTS = 14
_MOST_TRIALS = 600  # maximum number of trials to compute effects from; of more, evenly spaced ones are used
_GAIN_COLOR, _LOSS_COLOR = SCOPE_COLORS[Scope.FULL], SCOPE_COLORS[Scope.REGIONAL]


class EffectsInfo(NamedTuple):
    """Contents of the chart of single changes."""

    effects: list[Effect]
    num_left_out: int


def effects_info(df: pd.DataFrame, attempts: pd.DataFrame | None = None) -> EffectsInfo:
    """Computes the effects of single changes in the trials that `load` returned."""
    return _largest(effects(_sample(df), attempts=attempts))


def region_prices_info(df: pd.DataFrame, attempts: pd.DataFrame | None = None) -> EffectsInfo:
    """Computes what compiling a part of the model, or its optimizer, gained and cost in modular trials that `load` returned."""
    return _largest(region_prices(_sample(df), attempts=attempts))


@or_trials(effects_info)
def effects_figure(info: EffectsInfo) -> go.Figure:
    """Draws the change of throughput in percent to the right, with its 95% interval, and a row per change."""
    chart = rows_figure(
        [RowName(_change(one), _in_short(one), on_front=False) for one in info.effects],
        x_title="change of throughput, all else equal (%)",
        nothing="No two trials differ in one field only.",
        has_legend=False,
    )
    if not info.effects:
        return chart
    chart.add_vline(x=0, line={"color": LINE_COLOR, "width": 1})
    chart.update_xaxes(range=_shown_percent([one.rate for one in info.effects]))
    chart.add_trace(
        go.Bar(
            orientation="h",
            x=[100 * one.rate.value for one in info.effects],
            y=list(range(len(info.effects))),
            width=BAR,
            marker={"color": [_GAIN_COLOR if one.rate.value >= 0 else _LOSS_COLOR for one in info.effects]},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [100 * (one.rate.high - one.rate.value) for one in info.effects],
                "arrayminus": [100 * (one.rate.value - one.rate.low) for one in info.effects],
                "thickness": 1.4,
                "width": 4,
                "color": LINE_COLOR,
            },
            hovertext=[_hover(one) for one in info.effects],
            hoverinfo="text",
        )
    )
    return chart


def _shown_percent(changes: Sequence[Difference]) -> tuple[float, float]:
    """Returns the axis's ends, which include every interval, but always leave a third of the axis to the bars."""
    least, most = (100 * pick(0.0, *(one.value for one in changes)) for pick in (min, max))
    reach = most - least or 1.0
    low = max(least - reach, min(least, *(100 * one.low for one in changes)))
    high = min(most + reach, max(most, *(100 * one.high for one in changes)))
    room = 0.05 * (high - low)
    return low - room, high + room


def _largest(found: Sequence[Effect]) -> EffectsInfo:
    """Keeps the effects that fit, given with the largest first."""
    shown = found[:_MOST_EFFECTS]
    return EffectsInfo(sorted(shown, key=lambda one: -one.rate.value), len(found) - len(shown))


def _sample(df: pd.DataFrame) -> pd.DataFrame:
    return df.iloc[:: math.ceil(len(df) / _MOST_TRIALS)] if len(df) > _MOST_TRIALS else df


def _change(effect: Effect) -> str:
    """Returns the field with its value before and after; a value that is not set is said in words."""
    usual = "compiled" if effect.name.startswith(PARTS) else "not set"
    before, after = (usual if value == USUAL else value for value in (effect.before, effect.after))
    return f"{effect.name}: {before} → {after}"


def _in_short(effect: Effect) -> str:
    words = f"{100 * effect.rate.value:+.1f}%".replace("-", "−")
    if effect.compile_s is not None:
        words += f", {effect.compile_s.value:+.1f} s compile".replace("-", "−")
    return words


def _hover(effect: Effect) -> str:
    lines = [
        _change(effect),
        f"throughput {_between(effect.rate, 100, '%')}",
        *([] if effect.step_ms is None else [f"step {_between(effect.step_ms, 1, 'ms')}"]),
        *([] if effect.compile_s is None else [f"cold compile {_between(effect.compile_s, 1, 's')}"]),
        f"mean of {effect.pairs} pair{'' if effect.pairs == 1 else 's'} of trials",
    ]
    if effect.steps_to_pay is not None:
        lines.append(f"paid back after {whole(effect.steps_to_pay)} steps")
    return row_hover(lines)


def _between(change: Difference, factor: float, unit: str) -> str:
    value, low, high = (f"{'−' if end < 0 else '+'}{figure(abs(factor * end))}" for end in change)
    return f"{value} {unit} (95%: {low} to {high})"
