"""What a person sees while a sweep runs: a live view on a terminal, plain lines elsewhere."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import Phase, Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.short_names import difference, setting_ids, setting_names
from compile_sweep.schema.visible_text import ratio_text, visible
from orchestrator.guard.progress import Progress
from orchestrator.view.printed import say

_POLL_S = 0.5
_STYLES = {Status.OK: "green", Status.INFEASIBLE: "yellow", Status.FAILED: "red", Status.STOPPED: "cyan"}
FrontOf = Callable[[Path], Sequence[str]]  # returns the settings keys of a folder's current front
BaselineOf = Callable[[Path], str | None]
"""Returns the settings key of what is run today, given a folder's records; None before it is measured."""


_NUM_BEST, _NUM_LAST = 5, 3
_LEAST_RUNNING = 3
_MOST_CHARS = 112
"""Width of the live view on a wider terminal, where figures would be far from the names they belong to."""
_ECHO = "^C^C"
"""What a terminal writes behind the view's last line at Ctrl-C; on a line without room for it, it would move the view."""
_OTHER_LINES = 19  # number of lines of the live view besides those of running trials, and one to spare


@dataclass(slots=True)
class State:
    """What the live view shows."""

    planned: int | None  # number of trials in the sweep; None if it is not known
    records: list[TrialRecord] = field(default_factory=list)
    running: Sequence[Progress] = ()
    front: Sequence[str] = ()
    baseline: str | None = None  # settings key of what is run today; None before it is measured
    stopping: bool = False


class LiveView:
    """Follows a sweep's folder and running trials from a thread of its own while the `with` block lasts.

    Args:
        console: Where to print; a live view if it is a terminal, otherwise one line per event.
        planned: Number of trials in the sweep so far, including those of earlier runs; None if it is not known, as in a search.
        running: Returns the progress of each running trial; may fail.
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
        baseline_of: BaselineOf,
        stopping: threading.Event,
        running: Callable[[], Sequence[Progress]],
    ) -> None:
        self._console, self._folder, self._title = console, folder, title
        self._expected_s, self._stopping, self._running = expected_s, stopping, running
        self._front_of, self._baseline_of = front_of, baseline_of
        self._fresh_trials = records.follow(folder).fresh
        self._fresh_starts = records.follow_warm_starts(folder).fresh
        self._state = State(planned=planned, records=self._fresh_trials())
        self._fresh_starts()  # skips those of earlier runs, which are not reported again
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._more: SimpleQueue[tuple[Mapping[str, float], str | None, bool]] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="live-view", daemon=True)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._rendered(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._line(self._title)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None:
            self._look()
        elif issubclass(kind, Exception):
            with suppress(Exception):  # what ended the sweep is what is to be said
                self._look()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def plan_more(self, expected_s: Mapping[str, float], why: str, *, are_trials: bool = True) -> None:
        """Adds to what the sweep runs, and says why."""
        self._more.put((expected_s, why, are_trials))

    def expect(self, expected_s: Mapping[str, float]) -> None:
        """Replaces the expected seconds of trials by what is known now."""
        self._more.put((expected_s, None, False))

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_S):
            with suppress(Exception):  # a failing view must not end the sweep
                self._look()

    def _look(self) -> None:
        state = self._state
        why_more = self._take_more()  # before records are read, because what is planned follows from them
        running_before = {progress.trial_id: progress.phase for progress in state.running}
        with suppress(Exception):  # Ray may be starting, or gone
            state.running = self._running()
        fresh = self._fresh_trials()
        if fresh:
            state.records.extend(fresh)
            state.front, state.baseline = self._front_of(self._folder), self._baseline_of(self._folder)
        asked = self._stopping.is_set() and not state.stopping
        state.stopping = self._stopping.is_set()
        self._tell(running_before, fresh)
        for why in why_more:
            self._line(why)
        for start in self._fresh_starts():
            self._line(_start_outcome(start))
        if self._live is not None:
            self._live.update(self._rendered())
        elif asked:
            self._line(_stopping_words(len(state.running)))

    def _take_more(self) -> list[str]:
        """Adds what is newly planned; returns the reasons."""
        found = []
        while not self._more.empty():
            expected_s, why, are_trials = self._more.get()
            self._expected_s = {**self._expected_s, **expected_s}
            if self._state.planned is not None and are_trials:
                self._state.planned += len(expected_s)
            if why is not None:
                found.append(why)
        return found

    def _tell(self, running_before: Mapping[str, str], fresh: Sequence[TrialRecord]) -> None:
        """Prints a line for each phase that was reached and each trial that is done; a live view keeps only what went wrong."""
        state, is_live = self._state, self._live is not None
        for progress in () if is_live else state.running:
            if running_before.get(progress.trial_id) != progress.phase:
                self._line(f"{_label(progress.settings_key)}: {progress.phase}{self._expectation(progress)}")
        ids = setting_ids(record.settings_key for record in state.records)
        for number, record in enumerate(fresh, start=len(state.records) - len(fresh) + 1):
            planned = "" if state.planned is None else f"/{state.planned}"
            if not is_live or record.status in (Status.FAILED, Status.INFEASIBLE):
                self._line(f"{number}{planned} {outcome_of(record, ids[record.settings_key])}")

    def _expectation(self, progress: Progress) -> str:
        if progress.phase != Phase.STARTING:
            return ""
        return f" (expected {_duration(self._expected_s.get(progress.settings_key, 0.0))})"

    def _line(self, text: str) -> None:
        say(self._console, f"[{time.monotonic() - self._began:7.1f} s] {text}")

    def _rendered(self) -> RenderableType:
        elapsed_s = time.monotonic() - self._began
        return screen(self._state, title=self._title, elapsed_s=elapsed_s, expected_s=self._expected_s, size=self._console.size)


def screen(
    state: State, *, title: str, elapsed_s: float, expected_s: Mapping[str, float], size: ConsoleDimensions
) -> RenderableType:
    """Renders the live view within the terminal's height: what Ctrl-C does, progress, running trials, best and latest results."""
    names = setting_names((record.settings_key for record in state.records), state.baseline)
    parts: list[RenderableType] = [
        _message(state),
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"),
        _progress(state, elapsed_s, expected_s),
    ]
    if state.running:
        most = max(_LEAST_RUNNING, size.height - _OTHER_LINES)
        parts += ["", _running_table(state.running[:most], len(state.running) - most, expected_s, names, state.baseline)]
    latest = list(records.standing(state.records).values())
    usable = [record for record in latest if record.status is Status.OK and record.samples_per_s is not None]
    if best := sorted(usable, key=lambda record: -(record.samples_per_s or 0.0))[:_NUM_BEST]:
        parts += ["", _best_table(best, state, latest, names)]
    if state.records:
        parts += ["", _last_table(state.records[: -_NUM_LAST - 1 : -1], names)]
    return Constrain(Group(*parts), min(size.width - len(_ECHO), _MOST_CHARS))


def _message(state: State) -> Text:
    if state.stopping:
        return Text(_stopping_words(len(state.running)), style="bold yellow", overflow="fold")
    return Text("Ctrl-C finishes running trials and the report; a second one stops now", style="dim", overflow="fold")


def _progress(state: State, elapsed_s: float, expected_s: Mapping[str, float]) -> Table:
    """Renders the progress bar, how many trials are done and how they ended, and the remaining time."""
    counts = {status: sum(record.status is status for record in state.records) for status in Status}
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    done = len(state.records)
    words = f"{done} done" if state.planned is None else f"{done} of {state.planned} done"
    left_s = _left_s(state, expected_s)
    left = "" if state.planned is None or left_s is None else f", about {_duration(left_s)} left"
    line = f"{words}{f' ({ended})' if ended else ''}, {_duration(elapsed_s)}{left}"
    grid = Table.grid(padding=(0, 1))
    if state.planned:
        grid.add_row(ProgressBar(total=state.planned, completed=min(done, state.planned), width=16), line)
    else:
        grid.add_row(line)
    return grid


def _left_s(state: State, expected_s: Mapping[str, float]) -> float | None:
    """Estimates the seconds until everything planned is done, at the pace of the trials so far; None without an estimate."""
    done = {record.settings_key: record.wall_s or 0.0 for record in state.records}
    running = {progress.settings_key: progress.elapsed_s for progress in state.running}
    open_s = sum(max(0.0, seconds - running.get(key, 0.0)) for key, seconds in expected_s.items() if key not in done)
    known = [(done[key], seconds) for key, seconds in expected_s.items() if key in done and done[key] > 0]
    pace = sum(took for took, _ in known) / sum(seconds for _, seconds in known) if any(seconds for _, seconds in known) else 1.0
    return open_s * pace / max(1, len(running)) if expected_s else None


def _running_table(
    running: Sequence[Progress],
    num_more: int,
    expected_s: Mapping[str, float],
    names: Mapping[str, str],
    baseline_key: str | None,
) -> Table:
    """The running trials; a setting has an id once it has a record."""
    baseline = None if baseline_key is None else CompileSettings.parse(baseline_key)
    table = _table("running", "phase", "elapsed", "expected")
    for progress in running:
        phase = f"{progress.phase} {_duration(progress.in_phase_s)}"
        expected = _duration(expected_s.get(progress.settings_key, 0.0))
        name = names.get(progress.settings_key) or difference(CompileSettings.parse(progress.settings_key), baseline)
        table.add_row(escape(name), phase, _duration(progress.elapsed_s), expected)
    if num_more > 0:
        table.add_row(f"and {num_more} more")
    return table


def _best_table(best: Sequence[TrialRecord], state: State, latest: Sequence[TrialRecord], names: Mapping[str, str]) -> Table:
    """Renders the best settings so far, with each one's gain over what is run today."""
    today = next((record for record in latest if record.settings_key == state.baseline), None)
    table = _table("best so far", "samples/s", "gain (95%)", "compile s", "")
    for record in best:
        on_front = record.settings_key in state.front
        compiled = _figure(record.compile_s) if record.cold_equivalent_s is None else f"≈ {_figure(record.cold_equivalent_s)}"
        remark = "front, disturbed" if on_front and record.contended else "front" if on_front else ""
        gain = "today" if record is today else _gain(record, today)
        name = Text(names[record.settings_key], style="bold" if on_front else "")
        table.add_row(name, _figure(record.samples_per_s), gain, compiled, remark)
    return table


def _gain(record: TrialRecord, today: TrialRecord | None) -> str:
    if today is None or not record.samples_per_s or not today.samples_per_s:
        return "–"
    gain = f"{ratio_text(record.samples_per_s / today.samples_per_s)}×"
    if record.samples_per_s_ci95 is None or today.samples_per_s_ci95 is None:
        return gain
    (low, high), (base_low, base_high) = record.samples_per_s_ci95, today.samples_per_s_ci95
    if not (base_low > 0 and math.isfinite(high)):
        return gain
    return f"{gain} ({ratio_text(low / base_high)}–{ratio_text(high / base_low)})"


def _last_table(finished: Sequence[TrialRecord], names: Mapping[str, str]) -> Table:
    table = _table("finished last", "outcome")
    for record in finished:
        is_ok = record.status is Status.OK
        outcome = f"{_figure(record.samples_per_s)} samples/s" if is_ok else visible(f"{record.status}: {record.label}")
        table.add_row(Text(names[record.settings_key]), Text(outcome, style=_STYLES[record.status]))
    return table


def _table(name: str, *figures: str) -> Table:
    """Returns a table whose first column takes the space that the figures leave."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
    for figure in figures:
        table.add_column(figure, no_wrap=True)
    return table


def outcome_of(record: TrialRecord, setting_id: str) -> str:
    """Describes how an attempt ended, in one line."""
    label = f"{setting_id} {_label(record.settings_key)}"
    again = visible(f" (on try {record.tries}; before that, {record.retry_reasons[-1]})") if record.retry_reasons else ""
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
