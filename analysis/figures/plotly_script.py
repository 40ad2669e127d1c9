"""Plotly's own script, for a page that needs no network."""

from __future__ import annotations

from plotly.offline import get_plotlyjs


def plotly_script() -> str:
    """The source of plotly.js that goes with the figures of this room."""
    return str(get_plotlyjs())
