"""What the compiler did: graphs, graph breaks and recompiles with reasons, limits hit, fallbacks, CUDA graphs skipped, hints.

Torch counts some of this and only logs the rest. `counters["graph_break"]` misses data-dependent branches; nothing counts a
recompile limit that was hit, after which a function silently runs eagerly; and a graph without any part fit for CUDA graphs
silently runs without. So the loggers are read, and counters where they suffice. Loggers and messages are those of torch 2.11
to 2.15.
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import le
from types import CodeType
from typing import Any

from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.virtualized import V

from compile_sweep.contract.installed_torch import private
from compile_sweep.harness.diagnostics import torch_logs
from compile_sweep.harness.diagnostics.coverage import Expectation
from compile_sweep.schema.causes.breaks import cause_of_break

MAX_FINDINGS = 100  # maximum number of different findings of one kind that are kept; a longer list would help nobody

_ARTIFACTS = ("graph_breaks", "recompiles", "perf_hints")
_NO_CUDAGRAPH = "no CUDA graph was recorded"


_NODES = "torch._inductor.scheduler.__cudagraphs"
"""Logger that reports every node outside CUDA graphs with each line of its stack. Without CUDA graphs this means 40,000 useless
records for a model of 200 million parameters; torch's own handler would write them all, which would inflate compile time.
"""


@dataclass(slots=True, kw_only=True)
class Diagnostics:
    """Filled while `capture_diagnostics` is open; complete when it has ended. No text contains a path of this machine."""

    graphs: int = 0
    graph_break_reasons: list[str] = field(default_factory=list)
    """One per break: the user's line and what breaks there; then, on lines of their own, the code and torch's advice."""
    recompile_reasons: list[str] = field(default_factory=list)
    """One per recompile, including repeated ones: the function and the guard that failed."""
    recompile_limit_hits: list[str] = field(default_factory=list)
    cudagraph_skip_reasons: list[str] = field(default_factory=list)
    cudagraph_skips: int = 0
    perf_hints: list[str] = field(default_factory=list)
    """What torch reports would be faster."""
    fallbacks: list[str] = field(default_factory=list)
    """A sentence for each thing that should be compiled but runs eagerly, apart from recompile limits that were hit."""

    @property
    def tells_more_than_speed(self) -> bool:
        """Whether a trial is worth its end, however slow it is.

        It is if something that should be compiled runs eagerly, which makes the setting unusable, or if an option is known that
        mends a graph break.
        """
        mended = (cause.remedy for text in self.graph_break_reasons if (cause := cause_of_break(text)) is not None)
        return bool(self.recompile_limit_hits or self.fallbacks) or any(mended)


@contextmanager
def capture_diagnostics(
    expected: Expectation | None = None, on_fallback: Callable[[Diagnostics], None] = lambda found: None
) -> Iterator[Diagnostics]:
    """Collects diagnostics of every compile inside the block, and restores torch's logging afterwards.

    Args:
        expected: What should be compiled.
        on_fallback: Called with every message of torch's once something runs eagerly that should be compiled. A `BaseException`
            that it raises ends the compile.
    """
    diagnostics = Diagnostics()
    reader = _Reader(diagnostics, expected.names if expected is not None else None)
    converted: set[CodeType] = set()
    graphs_before = counters["stats"]["unique_graphs"]
    skips_before = counters["inductor"]["cudagraph_skips"]
    with ExitStack() as undo:
        sources = reader.sources()
        if expected is not None and not expected.cudagraphs:
            del sources[_NODES]
        for name, (level, read) in sources.items():
            logger = logging.getLogger(name)
            listener = _Listener(read, lambda: on_fallback(diagnostics) if diagnostics.fallbacks else None)
            if logger.name == _NODES:
                undo.callback(setattr, logger, "propagate", logger.propagate)
                logger.propagate = logger.isEnabledFor(logging.DEBUG)  # then the user asked for these records
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(min(level, logger.getEffectiveLevel()))
            _enable(logger, undo)
            logger.addHandler(listener)
            undo.callback(logger.removeHandler, listener)
        # Torch checks this, not the logger, to decide whether to log recompiles.
        logged: set[str] = getattr(private("torch._logging._internal", "log_state"), "artifact_names", set())
        for artifact in set(_ARTIFACTS) - logged:
            logged.add(artifact)
            undo.callback(logged.discard, artifact)
        if (register_hook := private("torch._dynamo.convert_frame", "register_bytecode_hook")) is not None:
            undo.callback(register_hook(lambda code, _: converted.add(code)).remove)
        _listen_to_warnings(reader.python_warning, undo)
        yield diagnostics
    reader.finish()
    diagnostics.graphs = counters["stats"]["unique_graphs"] - graphs_before
    diagnostics.cudagraph_skips = counters["inductor"]["cudagraph_skips"] - skips_before
    if expected is not None:
        if register_hook is not None:  # else it is not known what was converted
            diagnostics.fallbacks += expected.missed(converted, diagnostics.graphs)
        if not expected.cudagraphs:  # torch gives this hint with or without CUDA graphs
            diagnostics.perf_hints = [hint for hint in diagnostics.perf_hints if not hint.startswith("Grad tensors")]
        if expected.cudagraphs and not reader.cudagraphs_recorded and not diagnostics.cudagraph_skips:
            diagnostics.cudagraph_skips = 1
            diagnostics.cudagraph_skip_reasons.append("; ".join([_NO_CUDAGRAPH, *reader.outside_cudagraphs[:1]]))


class _Reader:
    """Sorts torch's log records into a `Diagnostics`."""

    def __init__(self, into: Diagnostics, names: Mapping[str, str] | None = None) -> None:
        self._into = into
        self._names = names or {}
        self._breaks: set[tuple[str, str]] = set()
        self._outside: list[str] = []
        self.outside_cudagraphs: list[str] = []
        self.cudagraphs_recorded = False

    def sources(self) -> dict[str, tuple[int, Callable[[logging.LogRecord], None]]]:
        """Returns the loggers to listen to, by name: the lowest level that each must log, and who reads its records."""
        return {
            "torch._dynamo.symbolic_convert.__graph_breaks": (logging.DEBUG, self._graph_break),
            "torch._dynamo.convert_frame.__graph_breaks": (logging.DEBUG, self._graph_break),
            "torch._dynamo.guards.__recompiles": (logging.DEBUG, self._recompile),
            "torch._dynamo.guards.__recompiles_verbose": (logging.DEBUG, self._recompile),
            "torch._dynamo.convert_frame": (logging.INFO, self._frame),
            "torch._inductor.cudagraph_utils.__cudagraphs": (logging.WARNING, self._cudagraph),
            "torch._inductor.cudagraph_trees.__cudagraphs": (logging.INFO, self._recording),
            _NODES: (logging.DEBUG, self._partition),
            "torch._dynamo.variables.optimizer.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor.compile_fx.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor.graph.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor.codegen.simd.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor.codegen.triton.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor.fx_passes.fuse_attention.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor.kernel.flex.interval_mask_packing.__perf_hints": (logging.DEBUG, self._hint),
            "torch._inductor": (logging.WARNING, self._inductor),
        }

    def python_warning(self, text: str, path: str) -> None:
        """Reads a Python warning, such as the one about TensorFloat32, which is not in torch's log records."""
        if torch_logs.is_inductor_file(path):
            _add(self._into.perf_hints, torch_logs.parse_hint(text, *_lowered_node()))

    def finish(self) -> None:
        """Flushes a record that a further one could have continued."""
        if self._outside:
            _add(self.outside_cudagraphs, found := torch_logs.parse_outside_cudagraphs("\n".join(self._outside)))
            _add(self._into.perf_hints, found)
            self._outside = []

    def _graph_break(self, record: logging.LogRecord) -> None:
        found = torch_logs.parse_graph_break(_text(record), torch_logs.broken_function(sys.exc_info()[1]))
        if found.key not in self._breaks:  # torch reports it again for each frame around it, and at every recompile
            self._breaks.add(found.key)
            _add(self._into.graph_break_reasons, found.text)

    def _recompile(self, record: logging.LogRecord) -> None:
        self._into.recompile_reasons.append(self._renamed(torch_logs.parse_recompile(_text(record))))

    def _frame(self, record: logging.LogRecord) -> None:
        text = _text(record)
        if hit := torch_logs.parse_recompile_limit(text):
            _add(self._into.recompile_limit_hits, self._renamed(hit))
        elif fallback := torch_logs.parse_not_converted(text, record.exc_info[1] if record.exc_info else None):
            _add(self._into.fallbacks, fallback)

    def _renamed(self, text: str) -> str:
        """Returns the text with the function at its beginning named by whether several modules share it."""
        name = text[: text.find(")") + 1]
        return (self._names.get(name) or self._resumed(name) or name) + text[len(name) :]

    def _resumed(self, name: str) -> str | None:
        """Returns the name of what follows a graph break in the only module of its class; None for other functions."""
        if (after := re.fullmatch(r"(.+) of (.+)( from line \d+ on \((.+):\d+\))", name)) is None:
            return None
        whole = f"{after[2]}.{after[1]}"
        is_only = any(known.startswith(f"{whole} ({after[4]}:") for known in self._names.values())
        return f"{whole}{after[3]}" if is_only else None

    def _cudagraph(self, record: logging.LogRecord) -> None:
        text = _text(record)
        if record.levelno < logging.WARNING:
            return
        if "distinct sizes" in text:  # many sizes are still captured, one CUDA graph each
            _add(self._into.perf_hints, torch_logs.parse_hint(text))
        else:
            _add(self._into.cudagraph_skip_reasons, torch_logs.parse_cudagraph_skip(text))

    def _recording(self, record: logging.LogRecord) -> None:
        self.cudagraphs_recorded |= "Recording cudagraph" in _text(record)

    def _partition(self, record: logging.LogRecord) -> None:
        """Reads a node that splits a graph: a line with the reason, then its stack, one record per line."""
        text = _text(record)
        if "reason=" in text and "cudagraphs is disabled" not in text:
            self.finish()
            self._outside = [text]
        elif self._outside and text.startswith(" " * 9):
            self._outside.append(text)
        else:
            self.finish()

    def _hint(self, record: logging.LogRecord) -> None:
        _add(self._into.perf_hints, torch_logs.parse_hint(_text(record), *_lowered_node()))

    def _inductor(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and ".__" not in record.name:
            self._hint(record)


class _Listener(logging.Handler):
    """Passes records to a reader; an error in the reader must not end a compile."""

    def __init__(self, read: Callable[[logging.LogRecord], None], then: Callable[[], None]) -> None:
        super().__init__(level=logging.DEBUG)
        self._read, self._then = read, then

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._read(record)
            self._then()
        except Exception:
            self.handleError(record)


def _enable(logger: logging.Logger, undo: ExitStack) -> None:
    """Makes a logger log although it, or all below a level, were switched off, as `logging.config` does by default."""
    undo.callback(setattr, logger, "disabled", logger.disabled)
    logger.disabled = False
    undo.callback(vars(logger).pop, "isEnabledFor", None)
    vars(logger)["isEnabledFor"] = partial(le, logger.level)


def _listen_to_warnings(read: Callable[[str, str], None], undo: ExitStack) -> None:
    show = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> None:
        read(str(message), filename)
        show(message, category, filename, *rest, **named)

    undo.callback(setattr, warnings, "showwarning", show)
    setattr(warnings, "showwarning", shown)  # noqa: B010 - as it was, and mypy wants the very signature


def _lowered_node() -> tuple[str, bool]:
    """Returns the stack of the model code that Inductor is lowering, and whether it has complex numbers; else empty."""
    node = getattr(V.graph, "current_node", None)
    if node is None:
        return "", False
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return node.meta.get("stack_trace") or "", any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _text(record: logging.LogRecord) -> str:
    if isinstance(record.msg, tuple):  # torch 2.11 to 2.13 have one call with a comma too many
        record.msg = " ".join(record.msg)
    return record.getMessage().strip("\n")


def _add(findings: list[str], text: str) -> None:
    if text not in findings and len(findings) < MAX_FINDINGS:
        findings.append(text)
