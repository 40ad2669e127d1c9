"""What a person sees while a sweep runs: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.phases import Phase
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.visible_text import visible
from orchestrator.guard.progress import Progress

_POLL_S = 0.5
_STYLES = {Status.OK: "green", Status.INFEASIBLE: "yellow", Status.FAILED: "red", Status.STOPPED: "cyan"}
FrontOf = Callable[[Path], Sequence[str]]
"""Settings keys of a folder's present front."""


@dataclass(slots=True)
class _State:
    planned: int | None
    records: list[TrialRecord] = field(default_factory=list)
    running: Sequence[Progress] = ()
    front: Sequence[str] = ()
    stopping: bool = False


class LiveView:
    """Follows a sweep's folder and running trials from a thread of its own, between `with` and its end.

    Args:
        console: where to write; a live view if it is a terminal, otherwise a line an event.
        folder: the sweep's.
        title: the first line.
        planned: trials this sweep consists of so far, those of earlier runs included; None if nobody knows, as in a search.
        expected_s: seconds each setting, by its key, will probably take.
        front_of: finds the present front.
        stopping: whether the sweep was asked to finish.
        running: returns how far each running trial is; it may fail.
    """

    def __init__(
        self,
        *,
        console: Console,
        folder: Path,
        title: str,
        planned: int | None,
        expected_s: Mapping[str, float],
        front_of: FrontOf,
        stopping: threading.Event,
        running: Callable[[], Sequence[Progress]],
    ) -> None:
        self._console, self._folder, self._title = console, folder, title
        self._expected_s, self._front_of, self._stopping, self._running = expected_s, front_of, stopping, running
        self._fresh_trials = records.follow(folder).fresh
        self._fresh_starts = records.follow_warm_starts(folder).fresh
        self._state = _State(planned=planned, records=self._fresh_trials())
        self._fresh_starts()  # those of earlier runs, which are told of no more
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._more: SimpleQueue[tuple[Mapping[str, float], str, bool]] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="live-view", daemon=True)
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(self._rendered(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._line(self._title)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None or issubclass(kind, Exception):
            self._look()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def plan_more(self, expected_s: Mapping[str, float], why: str, *, are_trials: bool = True) -> None:
        """Adds to what the sweep runs, and says why.

        Args:
            expected_s: seconds each will probably take, by its settings' key.
            why: the line to print.
            are_trials: whether they count as trials, which warm starts do not.
        """
        self._more.put((expected_s, why, are_trials))

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_S):
            with suppress(Exception):  # a view that fails must not end what it shows
                self._look()

    def _look(self) -> None:
        state = self._state
        running_before = {progress.trial_id: progress.phase for progress in state.running}
        with suppress(Exception):  # Ray may be starting, or gone
            state.running = self._running()
        fresh = self._fresh_trials()
        if fresh:
            state.records.extend(fresh)
            state.front = self._front_of(self._folder)
        asked = self._stopping.is_set() and not state.stopping
        state.stopping = self._stopping.is_set()
        if self._live is None:
            self._tell(running_before, fresh)
        for start in self._fresh_starts():
            self._line(_start_outcome(start))
        while not self._more.empty():
            expected_s, why, are_trials = self._more.get()
            self._expected_s = {**self._expected_s, **expected_s}
            if state.planned is not None and are_trials:
                state.planned += len(expected_s)
            self._line(why)
        if self._live is not None:
            self._live.update(self._rendered())
        elif asked:
            self._line(_stopping_words(len(state.running)))

    def _tell(self, running_before: Mapping[str, str], fresh: Sequence[TrialRecord]) -> None:
        """A line for each phase that was reached and each trial that is done."""
        state = self._state
        for progress in state.running:
            if running_before.get(progress.trial_id) != progress.phase:
                self._line(f"{_label(progress.settings_key)}: {progress.phase}{self._expectation(progress)}")
        for number, record in enumerate(fresh, start=len(state.records) - len(fresh) + 1):
            self._line(f"{number}{'' if state.planned is None else f'/{state.planned}'} {outcome_of(record)}")

    def _expectation(self, progress: Progress) -> str:
        if progress.phase != Phase.STARTING:
            return ""
        return f" (expected {_duration(self._expected_s.get(progress.settings_key, 0.0))})"

    def _line(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._began:7.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def _rendered(self) -> RenderableType:
        state = self._state
        counts = {status: sum(record.status is status for record in state.records) for status in Status}
        head = Text.assemble(
            (self._title, "bold"),
            f"\n{len(state.records)}{'' if state.planned is None else f' of {state.planned}'} trials done",
            f" ({', '.join(f'{count} {status}' for status, count in counts.items() if count or status is not Status.STOPPED)}), ",
            f"{len(state.running)} running, {_duration(time.monotonic() - self._began)}",
        )
        parts: list[RenderableType] = [head]
        if state.running:
            parts.append(self._running_table())
        if state.records:
            parts.append(self._done_table())
        if state.stopping:
            parts.append(Text(_stopping_words(len(state.running)), style="bold yellow"))
        return Group(*parts)

    def _running_table(self) -> Table:
        table = Table("running", "phase", "elapsed", "expected", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for progress in self._state.running:
            expected = _duration(self._expected_s.get(progress.settings_key, 0.0))
            phase = f"{progress.phase} {_duration(progress.in_phase_s)}"
            table.add_row(escape(_label(progress.settings_key)), phase, _duration(progress.elapsed_s), expected)
        return table

    def _latest(self) -> Sequence[TrialRecord]:
        """The record of each setting that counts."""
        return list(records.standing(self._state.records).values())

    def _done_table(self) -> Table:
        table = Table("done", "samples/s", "compile s", "outcome", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for record in self._latest():
            on_front = "on the front" if record.settings_key in self._state.front else ""
            if on_front and record.contended:
                on_front += ", compiled beside others"
            outcome = on_front if record.status is Status.OK else visible(f"{record.status}: {record.label}")
            table.add_row(
                escape(_label(record.settings_key)),
                _figure(record.samples_per_s),
                _figure(record.compile_s) if record.cold_equivalent_s is None else f"≈ {_figure(record.cold_equivalent_s)}",
                Text(outcome, style="bold" if on_front else _STYLES[record.status]),
            )
        return table


def outcome_of(record: TrialRecord) -> str:
    """How an attempt ended, as a line."""
    label = _label(record.settings_key)
    again = visible(f" (at try {record.tries}; before, {record.retry_reasons[-1]})") if record.retry_reasons else ""
    if record.status is Status.OK:
        return f"ok: {label}: {_figure(record.samples_per_s)} samples/s{_noise(record)}, {_compiled(record)}{again}"
    return f"{visible(f'{record.status} ({record.label}): {label}: {record.reason}')}{again}"


def _noise(record: TrialRecord) -> str:
    if record.stable is not False or record.samples_per_s_ci95 is None:
        return ""
    low, high = record.samples_per_s_ci95
    return f" (noisy: {_figure(low)} or more)" if math.isinf(high) else f" (noisy: {_figure(low)} to {_figure(high)})"


def _compiled(record: TrialRecord) -> str:
    if record.caches is Caches.COLD:
        return f"compile {_figure(record.compile_s)} s"
    return f"warm compile {_figure(record.compile_s)} s (cold about {_figure(record.cold_equivalent_s)} s)"


def _start_outcome(start: WarmStart) -> str:
    label = _label(start.settings_key)
    if start.status is not Status.OK:
        return visible(f"warm start {start.status} ({start.label}): {label}: {start.reason}")
    restored = "" if start.restore_s is None else f"restored in {_figure(start.restore_s)} s, "
    return f"warm start: {label}: {_figure(start.warm_start_s)} s ({restored}first step {_figure(start.first_step_s)} s)"


def _stopping_words(running: int) -> str:
    trials = "the trial in flight" if running == 1 else f"the {running} trials in flight"
    return f"finishing {trials}, starting no more; Ctrl-C again stops now"


def _label(settings_key: str) -> str:
    return CompileSettings.parse(settings_key).label


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
