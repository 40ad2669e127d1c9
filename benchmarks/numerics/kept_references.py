"""What keeping a sweep's eager runs saves of each trial: `python -m benchmarks.numerics.kept_references [WORKLOAD]`.

Background: a trial compares its first steps with eager runs, of which only one depends on the trial. Trials of a few settings are
measured in turn with an empty store, so that each makes all runs itself, and with one that the first trial filled. Output: for
each, the seconds of the check and of the whole trial, wall time and CPU time; on a busy machine only the latter can be compared.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.measure import measure
from compile_sweep.harness.numerics.reference_store import ReferenceStore
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.protocol import Protocol
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings

SETTINGS = ("scope=eager", "scope=full,backend=aot_eager", "scope=regional,backend=aot_eager")
"""Settings that share the batches of one padding, and so one set of eager runs."""


class Clock:
    """Wall and CPU seconds since a phase began."""

    def __init__(self) -> None:
        self.began: dict[Phase, tuple[float, float]] = {}

    def __call__(self, phase: Phase) -> None:
        self.began[phase] = time.perf_counter(), time.process_time()

    def seconds(self, first: Phase) -> tuple[float, float]:
        """Returns wall and CPU seconds from the beginning of a phase to the end of the trial."""
        start, end = self.began[first], self.began[Phase.DONE]
        return end[0] - start[0], end[1] - start[1]


def timed(workload_name: str, spelled: str, store: ReferenceStore, protocol: Protocol) -> tuple[Clock, str]:
    """Measures one trial; returns its times and what the check of its numbers said."""
    torch._dynamo.reset()
    kind, clock = load_workload(workload_name), Clock()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepared = prepare(kind(kind.sizes[0 if device == "cuda" else -1], 0), CompileSettings.parse(spelled), device)
    found = measure(prepared, protocol=protocol, store=store, on_phase=clock)
    return clock, str(found.numerics["status"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="captioning")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="what to measure; all must pad alike")
    parser.add_argument("--rounds", type=int, default=2, help="how often each setting is measured both ways")
    parser.add_argument("--window-s", type=float, default=2.0, help="seconds of timed steps of a trial")
    options = parser.parse_args()
    protocol = Protocol(min_passes=2, max_passes=2, min_window_s=options.window_s, cpu_window_s=options.window_s)
    with tempfile.TemporaryDirectory() as folder:
        kept = ReferenceStore(folder=Path(folder) / "kept")
        stores: dict[str, Callable[[int], ReferenceStore]] = {
            "own": lambda number: ReferenceStore(folder=Path(folder) / f"own-{number}"),
            "kept": lambda number: kept,
        }
        timed(options.workload, options.settings[0], kept, protocol)  # warms the process up, and fills the store
        for row in ("| setting | eager runs | check, s (CPU s) | trial, s (CPU s) | numbers |", "|---|---|--:|--:|---|"):
            print(row, flush=True)
        number = 0
        for spelled in options.settings:
            for name, store in stores.items():
                clocks = []
                for _ in range(options.rounds):
                    number += 1
                    clock, status = timed(options.workload, spelled, store(number), protocol)
                    clocks.append(clock)
                check, whole = (
                    [statistics.median(times) for times in zip(*(clock.seconds(phase) for clock in clocks), strict=True)]
                    for phase in (Phase.CHECKING, Phase.BUILDING)
                )
                cells = (f"{wall:.1f} ({cpu:.1f})" for wall, cpu in (check, whole))
                print(f"| {spelled} | {name} | {' | '.join(cells)} | {status} |", flush=True)


if __name__ == "__main__":
    main()
