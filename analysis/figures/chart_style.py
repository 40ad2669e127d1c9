"""The style of charts: size, fonts, colors, symbols, legends."""

import html
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pandas as pd
import plotly.graph_objects as go

from compile_sweep.schema.settings import Scope

Info = TypeVar("Info")
Further = ParamSpec("Further")

WIDTH_PX, HEIGHT_PX = 1200, 700  # size that charts and their labels are laid out for

SCOPE_COLORS = defaultdict(
    lambda: "#CC79A7",
    {Scope.EAGER: "#767676", Scope.FULL: "#0072B2", Scope.REGIONAL: "#D55E00", Scope.MODULAR: "#009E73", Scope.NESTED: "#4499D0"},
)
"""Okabe and Ito's palette, distinguishable with any color vision; contrast is 3:1 or more on white and on near-black."""

SCOPE_SYMBOLS = defaultdict(
    lambda: "star",
    {Scope.EAGER: "x", Scope.FULL: "diamond", Scope.REGIONAL: "circle", Scope.MODULAR: "square", Scope.NESTED: "triangle-up"},
)
"""Distinguish scopes without colors."""

PHASE_COLORS = {
    "dynamo": "#0072B2",
    "aot_autograd": "#4499D0",
    "inductor": "#009E73",
    "autotuning": "#C48600",
    "kernel_compilation": "#D55E00",
    "cudagraph_capture": "#B8649A",
    "other": "#767676",
}
"""Colors by the phase's name in `COMPILE_PHASES`. Okabe and Ito's palette, with its light colors darkened for 3:1 contrast on
white.
"""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Of lines with one scope, which have one color."""

LINE_COLOR = "#8a8a8a"
PAPER = "#ffffff"
INK = "#1f2328"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_TITLE_PX = 34


def base_layout(title: str | None = None) -> go.Layout:
    """Returns a chart's layout in light colors, with the legend in rows above the plot."""
    axis = {
        "gridcolor": "rgba(128,128,128,0.18)",
        "linecolor": LINE_COLOR,
        "tickcolor": LINE_COLOR,
        "ticks": "outside",
        "zeroline": False,
        "showline": True,
        "title": {"standoff": 12},
    }
    return go.Layout(
        template="none",
        width=WIDTH_PX,
        height=HEIGHT_PX,
        margin={"l": 84, "r": 24, "t": 48 + (_TITLE_PX if title else 0), "b": 64},
        title=_title(title) if title else None,
        font={"family": _FONT, "size": 13, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        xaxis=axis,
        yaxis={**axis, "tickformat": ",~r"},
        legend={
            "maxheight": 1,  # of the chart's height; by default a legend scrolls above half of it
            "orientation": "h",
            "x": 0.0,
            "xanchor": "left",
            "y": 1.005,
            "yanchor": "bottom",
            "font": {"size": 13},
            "bgcolor": "rgba(0,0,0,0)",
            "title": {"text": "scope&nbsp;&nbsp;"},
        },
        hoverlabel={"align": "left", "bgcolor": PAPER, "font": {"size": 13, "color": INK, "family": _FONT}},
        hovermode="closest",
        hoverdistance=30,
    )


def legend_entry(name: str, color: str, symbol: str, *, group: str | None = None) -> go.Scatter:
    """Returns a line of a legend; a click on it hides the traces of its group."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        name=name,
        legendgroup=group,
        hoverinfo="skip",
        marker={"color": color, "symbol": symbol, "size": 11, "line": {"width": 2 if symbol.endswith("open") else 0}},
    )


def empty_note(words: str) -> dict[str, Any]:
    """Returns the annotation of a chart that has nothing to show."""
    centred = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    return {"text": html.escape(words, quote=False), "showarrow": False, "font": {"size": 16}, **centred}


def or_trials(
    info_of: Callable[[pd.DataFrame], Info],
) -> Callable[[Callable[Concatenate[Info, Further], go.Figure]], Callable[Concatenate[Info | pd.DataFrame, Further], go.Figure]]:
    """Makes a chart's function also accept trials, as `analysis.load` returns them, in place of its info."""

    def taking_both(
        draw: Callable[Concatenate[Info, Further], go.Figure],
    ) -> Callable[Concatenate[Info | pd.DataFrame, Further], go.Figure]:
        @wraps(draw)
        def drawn(info: Info | pd.DataFrame, /, *args: Further.args, **kwargs: Further.kwargs) -> go.Figure:
            return draw(info_of(info) if isinstance(info, pd.DataFrame) else info, *args, **kwargs)

        return drawn

    return taking_both


def empty_figure(words: str) -> go.Figure:
    """Returns a low chart without axes that says why it is empty."""
    chart = go.Figure(layout=base_layout())
    chart.update_layout(xaxis_visible=False, yaxis_visible=False, height=160)
    chart.add_annotation(empty_note(words))
    return chart


def _title(title: str) -> dict[str, Any]:
    at = {"x": 0.0, "xref": "paper", "xanchor": "left", "y": 0.975, "yanchor": "top"}
    return {"text": html.escape(title, quote=False), "font": {"size": 19}, **at}
