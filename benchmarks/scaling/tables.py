"""Tables of `benchmarks.scaling` from recorded trials: efficiency by number of workers, and one GPU versus many. Pure.

Efficiency is samples per second and worker with N workers, relative to the same setting, without its `ddp.…`, with one worker.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from compile_sweep.schema.settings import CompileSettings

Row = Mapping[str, Any]  # A trial's figures by column; None for missing ones
WALL_GOAL_OF_FOUR = 3.6  # goal for how many times faster four GPUs finish a sweep
COMPILE_GOAL = 0.05  # goal for the relative difference between compile times side by side and alone


def of_workers(trials: Mapping[int, Sequence[Row]]) -> tuple[Table, dict[str, Any]]:
    """Returns a table and plain values of the trials with each number of workers."""
    rows = [_scaled(count, row, trials) for count in sorted(trials) for row in trials[count]]
    columns = (
        "setting",
        "workers",
        "samples/s",
        "a worker",
        "steps/s",
        "efficiency",
        "over eager",
        "compile s",
        "peak GiB",
        "status",
    )
    table = Table(*columns, box=None)
    for row in sorted(rows, key=lambda row: (row["without_ddp"], row["settings_label"], row["num_workers"])):
        table.add_row(
            row["settings_label"],
            str(row["num_workers"]),
            _figure(row["samples_per_s"], "{:.1f}"),
            _figure(row["samples_per_s_per_worker"], "{:.1f}"),
            _figure(row["steps_per_s"], "{:.2f}"),
            _figure(row["efficiency"], "{:.1%}"),
            _figure(row["over_eager"], "{:.2f}×"),
            _figure(row["compile_s"], "{:.1f}"),
            _figure(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**30, "{:.1f}"),
            row["label"] or ("noisy" if row["stable"] is False else row["status"]),
        )
    return table, {"trials": rows}


def _scaled(count: int, row: Row, trials: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    bare = _without_ddp(row)
    alone = next((one for one in trials.get(1, ()) if one["settings_key"] == bare and _is_sure(one)), None)
    eager = [_per_worker(one) for one in trials[count] if one["scope"] == "eager" and _is_sure(one)]
    rate = _per_worker(row)
    step_ms = row["step_ms_median"]
    return {
        **_kept(row),
        "num_workers": count,
        "without_ddp": bare,
        "samples_per_s_per_worker": rate,
        "steps_per_s": 1e3 / step_ms if step_ms else None,
        "efficiency": _over(rate, _per_worker(alone) if alone else None),
        "over_eager": _over(rate, max(filter(None, eager), default=None)),
        "compile_over_alone": _over(row["compile_s"], alone["compile_s"] if alone else None),
    }


_KEPT = (
    "settings_key", "settings_label", "status", "label", "stable", "samples_per_s", "samples_per_s_low", "samples_per_s_high",
    "compile_s", "compile_s_by_rank", "step_ms_median", "peak_memory_bytes", "peak_memory_bytes_by_rank", "speedup_eager",
    "numerics_status", "trial_id", "cores", "wall_s",
)  # fmt: skip


def _is_sure(row: Row) -> bool:
    """Tells whether other trials may be compared with it."""
    return row["status"] == "ok" and row["stable"] is not False


def _without_ddp(row: Row) -> str:
    return replace(CompileSettings.parse(str(row["settings_key"])), ddp=None).key


def _per_worker(row: Row) -> float | None:
    rate = row["samples_per_s"]
    return None if rate is None else float(rate) / int(row["num_workers"])


def of_sweeps(
    one: tuple[Sequence[Row], Sequence[float]], many: tuple[Sequence[Row], Sequence[float]], *, at_once: int, num_settings: int
) -> tuple[Table, dict[str, Any]]:
    """Returns a table and plain values that compare a sweep on one GPU with one on many, given each one's trials and wall times.

    Wall times are compared only if both sweeps are complete.
    """
    alone = {row["settings_key"]: row for row in one[0]}
    pairs = [(alone[row["settings_key"]], row) for row in many[0] if row["settings_key"] in alone]
    ratios = {
        before["settings_key"]: after["compile_s"] / before["compile_s"]
        for before, after in pairs
        if before["compile_s"] and after["compile_s"] and before["scope"] != "eager"
    }
    done = [len(one[0]), len(many[0])]
    walls = [sum(one[1]), sum(many[1])]
    whole = done == [num_settings] * 2
    speedup = walls[0] / walls[1] if whole and walls[1] else None
    goal = WALL_GOAL_OF_FOUR / 4 * at_once
    table = Table("setting", "compile s alone", f"{at_once} at once", "ratio", "trial s alone", f"{at_once} at once", box=None)
    for before, after in pairs:
        table.add_row(
            before["settings_label"],
            _figure(before["compile_s"], "{:.1f}"),
            _figure(after["compile_s"], "{:.1f}"),
            _figure(ratios.get(before["settings_key"]), "{:.2f}×"),
            _figure(before["wall_s"], "{:.0f}"),
            _figure(after["wall_s"], "{:.0f}"),
        )
    faster = _figure(speedup, "{:.2f}× faster")
    table.add_row("the whole sweep", "", "", faster, _figure(walls[0], "{:.0f}"), _figure(walls[1], "{:.0f}"))
    return table, {
        "at_once": at_once,
        "settings": num_settings,
        "done": {"one": done[0], "all": done[1]},
        "wall_s": {"one": walls[0], "all": walls[1]},
        "runs": {"one": len(one[1]), "all": len(many[1])},
        "speedup": speedup,
        "speedup_goal": goal,
        "compile_ratio": ratios,
        "compile_ratio_median": statistics.median(ratios.values()) if ratios else None,
        "compile_within_goal": all(abs(ratio - 1) <= COMPILE_GOAL for ratio in ratios.values()) if ratios else None,
        "contended": [row["settings_key"] for row in many[0] if row["contended"]],
        "trials": {"one": [_kept(row) for row in one[0]], "all": [_kept(row) for row in many[0]]},
    }


def _kept(row: Row) -> dict[str, Any]:
    return {column: row[column] for column in _KEPT}


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
