"""The charts, one a file. Each is `…_info(df)`, which decides what is shown, and `…_figure(info)`, which draws it."""

from analysis.figures.compile_phases import (
    CompileBar,
    CompilePhasesInfo,
    compile_phases_figure,
    compile_phases_info,
)
from analysis.figures.pareto_chart import ParetoInfo, ParetoPoint, pareto, pareto_figure, pareto_info

__all__ = [
    "CompileBar",
    "CompilePhasesInfo",
    "ParetoInfo",
    "ParetoPoint",
    "compile_phases_figure",
    "compile_phases_info",
    "pareto",
    "pareto_figure",
    "pareto_info",
]
