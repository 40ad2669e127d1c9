"""The charts, one per file. `…_info(df)` decides what is shown; `…_figure` draws that, or the trials themselves."""

from analysis.figures.attribution_chart import effects_figure, effects_info, region_prices_info
from analysis.figures.break_even_chart import BreakEvenInfo, break_even_data, break_even_figure, break_even_info
from analysis.figures.cache_hits import cache_figure, cache_info
from analysis.figures.compile_phases import compile_phases_figure, compile_phases_info
from analysis.figures.front_axes import GAINS, PRICES, FrontAxis, axes_with_figures
from analysis.figures.memory import batch_memory_figure, batch_memory_info, memory_figure, memory_info
from analysis.figures.parallel_coordinates import parallel_figure, parallel_info
from analysis.figures.pareto_chart import pareto_figure
from analysis.figures.pareto_points import ParetoInfo, ParetoPoint, pareto_info
from analysis.figures.plotly_script import plotly_script
from analysis.figures.step_times import step_times_figure, step_times_info
from analysis.figures.timeline import Span, timeline_figure, timeline_info

__all__ = [
    "GAINS",
    "PRICES",
    "BreakEvenInfo",
    "FrontAxis",
    "ParetoInfo",
    "ParetoPoint",
    "Span",
    "axes_with_figures",
    "batch_memory_figure",
    "batch_memory_info",
    "break_even_data",
    "break_even_figure",
    "break_even_info",
    "cache_figure",
    "cache_info",
    "compile_phases_figure",
    "compile_phases_info",
    "effects_figure",
    "effects_info",
    "memory_figure",
    "memory_info",
    "parallel_figure",
    "parallel_info",
    "pareto_figure",
    "pareto_info",
    "plotly_script",
    "region_prices_info",
    "step_times_figure",
    "step_times_info",
    "timeline_figure",
    "timeline_info",
]
