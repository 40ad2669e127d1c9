"""What the compiler did: graphs, graph breaks and recompiles with reasons, limits hit, CUDA graphs skipped.

torch counts some of this and only logs the rest: `counters["graph_break"]` misses data-dependent branches, and nothing counts
a hit recompile limit, after which a function silently runs eagerly. So the loggers are read, and the counters where they
suffice.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch._dynamo.utils import counters
from torch._logging._internal import set_logs

_GRAPH_BREAKS = "torch._dynamo.symbolic_convert.__graph_breaks"
_RECOMPILES = "torch._dynamo.guards.__recompiles"
_FRAMES = "torch._dynamo.convert_frame"
_CUDAGRAPHS = "torch._inductor.cudagraph_utils.__cudagraphs"
_REASON_LENGTH = 500
"""Characters kept of one reason; torch appends whole stack traces."""


@dataclass(slots=True, kw_only=True)
class Diagnostics:
    """Filled while `watching` is open."""

    graphs: int = 0
    graph_break_reasons: list[str] = field(default_factory=list)
    recompile_reasons: list[str] = field(default_factory=list)
    recompile_limit_hits: list[str] = field(default_factory=list)
    cudagraph_skip_reasons: list[str] = field(default_factory=list)
    cudagraph_skips: int = 0


class _Collector(logging.Handler):
    """Sorts torch's log records into a `Diagnostics`."""

    def __init__(self, into: Diagnostics) -> None:
        super().__init__(level=logging.DEBUG)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        if record.name == _GRAPH_BREAKS:
            self._add_break(_first_lines(text))
        elif record.name == _RECOMPILES:
            self._into.recompile_reasons.append(_first_lines(text))
        elif record.name == _FRAMES and re.search(r"hit config\.\w*recompile_limit", text):
            self._into.recompile_limit_hits.append(_first_lines(text))
        elif record.name == _CUDAGRAPHS and record.levelno >= logging.WARNING:
            self._into.cudagraph_skip_reasons.append(_first_lines(text))

    def _add_break(self, reason: str) -> None:
        """Keeps one reason a place: torch reports it again for each frame around it, and at every recompile."""
        if _place(reason) not in map(_place, self._into.graph_break_reasons):
            self._into.graph_break_reasons.append(reason)


@contextmanager
def watching() -> Iterator[Diagnostics]:
    """Collects diagnostics of every compile inside the block, and restores torch's logging afterwards."""
    diagnostics = Diagnostics()
    collector = _Collector(diagnostics)
    loggers = [logging.getLogger(name) for name in (_GRAPH_BREAKS, _RECOMPILES, _FRAMES, _CUDAGRAPHS)]
    graphs_before = counters["stats"]["unique_graphs"]
    skips_before = counters["inductor"]["cudagraph_skips"]
    set_logs(graph_breaks=True, recompiles=True)
    for logger in loggers:
        logger.addHandler(collector)
    try:
        yield diagnostics
    finally:
        for logger in loggers:
            logger.removeHandler(collector)
        set_logs()
        diagnostics.graphs = counters["stats"]["unique_graphs"] - graphs_before
        diagnostics.cudagraph_skips = counters["inductor"]["cudagraph_skips"] - skips_before


def _place(reason: str) -> str:
    found = re.search(r"in user code at (\S+)", reason)
    return found.group(1) if found else reason


def _first_lines(text: str) -> str:
    for folder in sorted(filter(None, {*sys.path, os.getcwd()}), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")  # a record says which module, not where this machine keeps it
    return text[:_REASON_LENGTH] + ("…" if len(text) > _REASON_LENGTH else "")
