"""The charts, one a file. Each is `…_info(df)`, which decides what is shown, and `…_figure(info)`, which draws it."""

from analysis.figures.pareto_chart import ParetoInfo, ParetoPoint, pareto, pareto_figure, pareto_info

__all__ = ["ParetoInfo", "ParetoPoint", "pareto", "pareto_figure", "pareto_info"]
