"""Runs many short trainings on the CPU, divided among processes; what each gave is added to a file as soon as it is there.

Background: thousands of checks are hours of one core. A further call with the same file does only what it lacks, so a call may
be stopped at any time, and the tasks are the same whatever their number of processes.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.output_files import make_room


def divided(path: Path, tasks: Mapping[str, tuple[Any, ...]], run: Callable[..., Any], processes: int) -> dict[str, Any]:
    """Returns what each task gave, of this call or an earlier one; a task that raised an error is told and left out.

    Args:
        path: The file of results, a line of JSON for each task.
        tasks: Arguments of each task, by a name that is its own.
        run: Returns what a task gave, as JSON can hold it. Its module cannot be `__main__`, which the processes do not import.
        processes: How many tasks run at a time, each on one core in a process of its own.
    """
    make_room(path)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {one["task"]: one["result"] for one in map(json.loads, lines) if one["task"] in tasks}
    os.environ["OMP_NUM_THREADS"] = "1"  # the kernels are small; set before torch is imported by the processes
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        futures = {pool.submit(run, *arguments): name for name, arguments in tasks.items() if name not in found}
        for number, future in enumerate(as_completed(futures), start=1):
            name = futures[future]
            if (error := future.exception()) is not None:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            found[name] = future.result()
            with path.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"task": name, "result": found[name]}) + "\n")
            print(f"{number} of {len(futures)}: {name}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return found
