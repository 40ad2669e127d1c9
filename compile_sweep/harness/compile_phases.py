"""Where compile seconds go: Dynamo, AOTAutograd, Inductor, autotuning, kernel compilation, CUDA-graph capture.

Background: torch times its own compilation in nested spans (`torch._dynamo.utils.dynamo_timed`), but the results do not add up:
`get_compilation_metrics()` holds 64 entries, its columns contain one another, and later work, such as a lazily compiled
backward, autotuning at a kernel's first call or a captured graph, is counted elsewhere. So the beginning and end of each span are
read (from torch's chromium event logger, the same in 2.11 and 2.13), and every moment is charged once, to the innermost
span with a known phase.

Output: seconds per phase that add up to `compile_s`; time outside all spans is `other`. With a version of torch without that
logger, or with other span names, detail is lost to the enclosing phase or to `other`, and nothing fails.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, wraps
from typing import Any

import torch
from torch._dynamo import utils as dynamo

from compile_sweep.contract.installed_torch import private


class CompilePhase(StrEnum):
    """A part of compile time."""

    DYNAMO = "dynamo"
    """Tracing bytecode, building and checking guards."""
    AOT_AUTOGRAD = "aot_autograd"
    """Tracing forward and backward, and splitting them."""
    INDUCTOR = "inductor"
    """Graph passes, lowering, scheduling and writing code."""
    AUTOTUNING = "autotuning"
    """Running candidate kernels to choose among them."""
    KERNEL_COMPILATION = "kernel_compilation"
    """Compiling and loading kernels; for compilers in other processes, the time spent waiting for them."""
    CUDAGRAPH_CAPTURE = "cudagraph_capture"
    """Running each graph once before capture, with memory from the graphs' own pool, and capturing it."""
    OTHER = "other"
    """The rest of what torch times: loading CUDA's libraries, the first launch of a kernel, a foreign back-end."""


_SPANS: tuple[tuple[str, CompilePhase], ...] = (
    (r"backend_compile", CompilePhase.OTHER),  # a back-end's time outside the spans below; Inductor has next to none
    (r"dynamo|entire_frame_compile|compile_attempt_\d+|bytecode_.*|build_guards|gc|pgo\..*", CompilePhase.DYNAMO),
    (r"create_aot_dispatcher_function|aot_.*|AOTAutogradCache.*|entire_backward_compile", CompilePhase.AOT_AUTOGRAD),
    (r"min_cut_rematerialization_partition", CompilePhase.AOT_AUTOGRAD),
    (r"inductor_.*|compile_fx.*|fx_codegen_and_compile|code_gen|_recursive_.*_passes", CompilePhase.INDUCTOR),
    (r"GraphLowering.*|Scheduler.*|\w*Wrapper\w*\.generate|TritonBundler.*|additional_fake_tensor_prop", CompilePhase.INDUCTOR),
    (r"compile_file|async_compile\..*|.*_precompil\w*|PyCodeCache.*|reload_kernel_in_parent", CompilePhase.KERNEL_COMPILATION),
    (r"StaticAutotunerFuture.*|aoti_.*", CompilePhase.KERNEL_COMPILATION),
    (r".*autotun(e|ing)|.*benchmark.*|.*do_bench|.*coordinate_descent.*", CompilePhase.AUTOTUNING),
    (r"cudagraphify.*|CUDAGraph.*", CompilePhase.CUDAGRAPH_CAPTURE),
)
"""Patterns of torch's span names and their phases; the first match counts. Other spans belong to the one around them."""

_GRAPH_MANAGER_STEPS = ("run_eager", "record_function")
"""Methods of torch's `CUDAGraphTreeManager` to record as spans, too: torch's own span covers only the capture, a third of the
cost of 32 lengths on an H200 (docs/log.md).
"""


@cache
def _phase_of(span: str) -> CompilePhase | None:
    return next((phase for pattern, phase in _SPANS if re.fullmatch(pattern, span)), None)


@dataclass(slots=True)
class PhaseClock:
    """Charges each moment to the phase of the innermost open span.

    The thread that made the clock takes precedence: while it is inside a span, spans of other threads are compilers that work for
    it. Otherwise the spans of another thread count: on CUDA, backward graphs compile and capture in autograd's own thread.
    """

    seconds: dict[CompilePhase, float] = field(default_factory=lambda: dict.fromkeys(CompilePhase, 0.0))
    _first: int = field(default_factory=threading.get_ident)
    _open: dict[int, list[tuple[str, CompilePhase]]] = field(default_factory=dict)
    _charged_to: float = field(default_factory=time.perf_counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, span: str) -> None:
        """Opens a span in this thread."""
        with self._lock:
            self._charge()
            spans = self._open.setdefault(threading.get_ident(), [])
            spans.append((span, _phase_of(span) or (spans[-1][1] if spans else CompilePhase.OTHER)))

    def end(self, span: str) -> None:
        """Closes a span of this thread, and those inside it that an exception left open."""
        with self._lock:
            self._charge()
            spans = self._open.get(threading.get_ident(), [])
            if any(name == span for name, _ in spans):
                while spans.pop()[0] != span:
                    pass
            if not spans:
                self._open.pop(threading.get_ident(), None)

    def _charge(self) -> None:
        now = time.perf_counter()
        spans = self._open.get(self._first) or next(iter(self._open.values()), None)
        if spans:
            self.seconds[spans[-1][1]] += now - self._charged_to
        self._charged_to = now

    def split(self, compile_s: float) -> dict[str, float]:
        """Returns the seconds of each phase, which add up to `compile_s`; time outside all spans is `other`.

        If spans claim more than `compile_s`, which is itself an estimate (the clock's time less typical steps), all are scaled
        down.
        """
        claimed = sum(self.seconds.values())
        scale = min(1.0, compile_s / claimed) if claimed > 0 else 1.0
        parts = {str(phase): seconds * scale for phase, seconds in self.seconds.items()}
        parts[CompilePhase.OTHER] += max(0.0, compile_s - claimed)
        return parts


@contextmanager
def record_phases() -> Iterator[PhaseClock]:
    """Charges every compile inside the block to its phases."""
    clock = PhaseClock()
    find_logger = getattr(dynamo, "get_chromium_event_logger", None)
    logger: Any = find_logger() if find_logger is not None else None
    begin, end = (getattr(logger, name, None) for name in ("log_event_start", "log_event_end"))
    if begin is None or end is None:
        yield clock
        return

    def begun(event_name: str, *args: Any, **kwargs: Any) -> Any:
        clock.begin(event_name)
        return begin(event_name, *args, **kwargs)

    def ended(event_name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(event_name, *args, **kwargs)
        finally:
            clock.end(event_name)

    logger.log_event_start, logger.log_event_end = begun, ended
    try:
        with _timing_graph_manager(clock):
            yield clock
    finally:
        del logger.log_event_start, logger.log_event_end  # uncovers the class's own methods again


@contextmanager
def _timing_graph_manager(clock: PhaseClock) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    manager = private("torch._inductor.cudagraph_trees", "CUDAGraphTreeManager")
    with ExitStack() as undo:
        for name in _GRAPH_MANAGER_STEPS:
            if (method := getattr(manager, name, None)) is not None:
                undo.callback(setattr, manager, name, method)
                setattr(manager, name, _as_span(clock, f"CUDAGraphTreeManager.{name}", method))
        yield


def _as_span(clock: PhaseClock, span: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.begin(span)
        try:
            return method(*args, **kwargs)
        finally:
            clock.end(span)

    return timed
