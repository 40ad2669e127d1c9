"""Compares two recorded sweeps over the same settings: one with cold trials, and one whose trials shared what they compiled.

Background: a warm trial's record estimates what a cold one would have taken, `cold_equivalent_s`; the cold sweep says what it
took. GPU-seconds are the trials' `wall_s` times their workers, including worker start and publishing, once per setting: for
the cold sweep its cold trial, for the shared one the trial that ran first, and separately what `--starts auto` measured again.
The first trials of the shared sweep find nothing and are cold as well; they count all the same.

Output: the estimate's error for each setting, and for its warm start if there was one; GPU-seconds of both, and where they went;
the two fronts, and by how much a setting on one of them misses the other; bytes published, and those new to the store.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

import analysis
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.record import Caches, WarmStart
from orchestrator.run.sweep_folder import write_json

ERROR_GOAL = 0.10  # goal for the error of `cold_equivalent_s`, in either direction
SAVED_GOAL = 0.40  # goal for the fraction of GPU-seconds saved

_OF_BOTH = ("trial_id", "status", "label", "caches", "compile_s", "warm_compile_s", "wall_s", "cores", "contended")
_OF_SHARED = ("cache_saved_s", "cold_equivalent_s", "restore_s", "cache_restored", "cache_hits", "cache_misses", "cache_refused")

Row = dict[str, Any]  # A trial's figures by column; None for missing ones


def compare(output: Path, cold: Path, shared: Path) -> list[Table | str]:
    """Writes the JSON; returns its contents as tables and sentences.

    Args:
        output: The file.
        cold: Folder of a sweep with `--starts cold`.
        shared: Folder of a sweep with `--starts shared` or `auto`.

    Raises:
        ConfigError: The two have no setting in common.
        RecordsError: A folder is not a sweep's.
    """
    found = compared(cold, shared)
    write_json(output, found)
    return [_errors(found), *_sentences(found)]


def compared(cold: Path, shared: Path) -> Row:
    """Returns all comparisons of the two sweeps, as plain values."""
    frames = analysis.load(cold), analysis.load(shared)
    ours, theirs = (_by_key(frame) for frame in frames)
    pairs = [(_cold_of(ours[key]), *_first_and_again(theirs[key])) for key in ours if key in theirs and _has_cold(ours[key])]
    if not pairs:
        raise ConfigError(
            f"{cold} has no cold trial of a setting that {shared} has a trial of; give two sweeps over the same settings"
        )
    started = [start for folder in (cold, shared) for start in records.read_warm_starts(folder)]
    starts = {(start.settings_key, start.num_workers): start for start in started}
    settings = [
        _setting(before, after, starts.get((before["settings_key"], before["num_workers"]))) for before, after, _ in pairs
    ]
    keys = [before["settings_key"] for before, _, _ in pairs]
    return {
        "cold": _described(cold),
        "shared": _described(shared),
        "same_environment": analysis.load_sweep(cold).environment_key == analysis.load_sweep(shared).environment_key,
        "settings": settings,
        "errors": _summed_errors(settings),
        "gpu_s": _gpu_seconds(pairs),
        "fronts": _fronts(*(frame[frame["settings_key"].isin(keys)] for frame in frames)),
        "bytes": {"cold": _published(cold), "shared": _published(shared)},
    }


def short_by(rate: float, compile_s: float, others: Sequence[tuple[float, float]]) -> float:
    """Returns the relative improvement, in one figure, that would put a setting on the front of these; 0 if it is on it.

    Args:
        rate: Samples per second of the setting.
        compile_s: Compile time of the setting.
        others: Both figures of each other setting.
    """
    ahead = [
        (theirs / rate - 1, 1 - seconds / compile_s) for theirs, seconds in others if theirs >= rate and seconds <= compile_s
    ]
    return max((min(gaps) for gaps in ahead), default=0.0)  # against each of them, either figure suffices


def _by_key(frame: pd.DataFrame) -> dict[tuple[str, int], list[Row]]:
    """Returns the trials of each setting and number of workers: one, or a cold one and a warm one."""
    found: dict[tuple[str, int], list[Row]] = {}
    for values in frame.to_dict("records"):
        row = {str(name): _plain(value) for name, value in values.items()}
        found.setdefault((row["settings_key"], row["num_workers"]), []).append(row)
    return found


def _plain(value: Any) -> Any:
    return None if pd.api.types.is_scalar(value) and pd.isna(value) else value


def _has_cold(rows: Sequence[Row]) -> bool:
    return any(row["caches"] == Caches.COLD for row in rows)


def _cold_of(rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row["caches"] == Caches.COLD)


def _first_and_again(rows: Sequence[Row]) -> tuple[Row, Row | None]:
    """Returns, for a shared sweep, a setting's first trial, and its later cold measurement if there was one."""
    warm = next((row for row in rows if row["caches"] == Caches.WARM), None)
    if warm is None:
        return rows[0], None
    return warm, next((row for row in rows if row["caches"] == Caches.COLD), None)


def _setting(cold: Row, shared: Row, start: WarmStart | None) -> Row:
    equivalent_s, cold_s = shared["cold_equivalent_s"], cold["compile_s"]
    return {
        "settings_key": cold["settings_key"],
        "label": cold["settings_label"],
        "cold": {name: cold[name] for name in _OF_BOTH},
        "shared": {name: shared[name] for name in (*_OF_BOTH, *_OF_SHARED)},
        "error": equivalent_s / cold_s - 1 if equivalent_s is not None and cold_s else None,
        "start_error": _start_error(cold, start),
    }


def _start_error(cold: Row, start: WarmStart | None) -> float | None:
    """Returns the error of the estimate by a setting's warm start, relative to the cold trial's warm-up."""
    if start is None or start.warmup_s is None or start.cache_saved_s is None or not cold["warmup_s"]:
        return None
    return float((start.warmup_s + start.cache_saved_s) / cold["warmup_s"] - 1)


def _summed_errors(settings: Sequence[Row]) -> Row:
    errors = [abs(one["error"]) for one in settings if one["error"] is not None]
    return {
        "settings": len(errors),
        "goal": ERROR_GOAL,
        "within_goal": sum(error <= ERROR_GOAL for error in errors),
        "median": statistics.median(errors) if errors else None,
        "worst": max(errors, default=None),
    }


def _gpu_seconds(pairs: Sequence[tuple[Row, Row, Row | None]]) -> Row:
    def saved(chosen: Sequence[tuple[Row, Row, Row | None]]) -> Row:
        before = sum(map(_gpu_s, (cold for cold, _, _ in chosen)))
        after = sum(map(_gpu_s, (shared for _, shared, _ in chosen)))
        again = sum(_gpu_s(row) for _, _, row in chosen if row is not None)
        return {
            "settings": len(chosen),
            "cold": before,
            "shared": after,
            "front_again_cold": again,
            "saved_share": 1 - after / before if before else None,
            "saved_share_with_front_cold": 1 - (after + again) / before if before and again else None,
            "cold_by_part": _parts([cold for cold, _, _ in chosen]),
            "shared_by_part": _parts([shared for _, shared, _ in chosen]),
            "share_if_compiling_were_free": _total([cold for cold, _, _ in chosen], _compile_s) / before if before else None,
        }

    measured = [pair for pair in pairs if _compile_s(pair[0]) is not None and _compile_s(pair[1]) is not None]
    return {"goal": SAVED_GOAL, "all": saved(pairs), "measured_in_both": saved(measured)}


def _parts(rows: Sequence[Row]) -> Row:
    """Returns where the seconds went; the rest is worker start, building, the steady window, the check."""
    parts = {
        "compile": _total(rows, _compile_s),
        "restore": _total(rows, lambda row: row["restore_s"]),
        "publish": _total(rows, lambda row: row["publish_s"]),
    }
    return {**parts, "rest": sum(map(_gpu_s, rows)) - sum(parts.values())}


def _total(rows: Sequence[Row], seconds: Callable[[Row], float | None]) -> float:
    return sum((seconds(row) or 0.0) * int(row["num_workers"]) for row in rows)


def _gpu_s(row: Row) -> float:
    return float(row["wall_s"]) * int(row["num_workers"])


def _compile_s(row: Row) -> float | None:
    seconds: float | None = row["warm_compile_s"] if row["caches"] == Caches.WARM else row["compile_s"]
    return seconds


def _fronts(cold: pd.DataFrame, shared: pd.DataFrame) -> Row:
    """Compares the front measured by the cold sweep with the one expected by the shared sweep: why and how far they differ."""
    ours, theirs = analysis.pareto_front(cold), analysis.expected_front(shared)
    in_ours, in_theirs = list(ours["settings_key"]), list(theirs["settings_key"])
    return {
        "cold": in_ours,
        "shared": in_theirs,
        "same": set(in_ours) == set(in_theirs),
        "only_in_cold": [_absence(key, shared, theirs) for key in in_ours if key not in in_theirs],
        "only_in_shared": [_absence(key, cold, ours) for key in in_theirs if key not in in_ours],
    }


def _absence(key: str, frame: pd.DataFrame, front: pd.DataFrame) -> Row:
    """Says why a setting is not on a sweep's front."""
    rows = [{str(name): _plain(value) for name, value in row.items()} for row in frame.to_dict("records")]
    mine = [row for row in rows if row["settings_key"] == key]
    row = next((row for row in mine if row["caches"] == Caches.COLD), mine[0])
    rate, compile_s = row["samples_per_s"], _expected_s(row)
    found: Row = {
        "settings_key": key,
        "label": row["settings_label"],
        "status": row["status"],
        "why": row["label"],
        "short_by": None,
    }
    if row["status"] == "ok" and rate and compile_s:
        members = [{str(name): _plain(value) for name, value in member.items()} for member in front.to_dict("records")]
        found["short_by"] = short_by(rate, compile_s, [(m["samples_per_s"], _expected_s(m) or 0.0) for m in members])
    return found


def _expected_s(row: Row) -> float | None:
    seconds: float | None = row["cold_equivalent_s"] if row["compile_s"] is None else row["compile_s"]
    return seconds


def _published(folder: Path) -> Row:
    """Returns published bytes over all attempts of a sweep, before and after deduplication."""
    done = records.read(folder)
    made, new = (sum(getattr(record, name) or 0 for record in done) for name in ("cache_made_bytes", "cache_new_bytes"))
    return {
        "trials": sum(record.cache_made is not None for record in done),
        "artifacts": sum(record.cache_made or 0 for record in done),
        "made_bytes": made,
        "new_bytes": new,
        "new_share": new / made if made else None,
    }


def _described(folder: Path) -> Row:
    """Describes a whole sweep, and its total cost including repeated attempts and warm starts."""
    sweep = analysis.load_sweep(folder)
    done, starts = records.read(folder), records.read_warm_starts(folder)
    return {
        "what": sweep.what,
        "environment": dict(sweep.environment),
        "attempts": len(done),
        "attempts_gpu_s": sum(record.wall_s * record.num_workers for record in done),
        "warm_starts": len(starts),
        "warm_starts_gpu_s": sum(start.wall_s * start.num_workers for start in starts),
    }


def _errors(found: Row) -> Table:
    table = Table(box=None)
    for title in (
        "setting",
        "cold s",
        "warm s",
        "saved s",
        "cold equivalent s",
        "error",
        "of its warm start",
        "hits",
        "misses",
        "wall s, cold",
        "shared",
    ):
        table.add_column(title, justify="left" if title == "setting" else "right")
    for one in found["settings"]:
        cold, shared = one["cold"], one["shared"]
        table.add_row(
            one["label"],
            *(_seconds(value) for value in (cold["compile_s"], shared["warm_compile_s"], shared["cache_saved_s"])),
            _seconds(shared["cold_equivalent_s"]),
            *("–" if one[name] is None else f"{one[name]:+.1%}" for name in ("error", "start_error")),
            *("–" if shared[name] is None else str(shared[name]) for name in ("cache_hits", "cache_misses")),
            *(_seconds(value) for value in (cold["wall_s"], shared["wall_s"])),
        )
    return table


def _sentences(found: Row) -> list[str]:
    errors, gpu, fronts = found["errors"], found["gpu_s"], found["fronts"]
    said = [] if found["same_environment"] else ["the two ran in different environments: their figures cannot be compared"]
    if errors["settings"]:
        said.append(
            f"estimate: {errors['within_goal']} of {errors['settings']} settings within {errors['goal']:.0%}; "
            f"median error {errors['median']:.1%}, worst {errors['worst']:.1%}"
        )
    for name, title in (("all", "settings of both"), ("measured_in_both", "of these measured in both")):
        one = gpu[name]
        if one["saved_share"] is None:
            continue
        again = one["saved_share_with_front_cold"]
        said.append(
            f"{one['settings']} {title}: {one['cold']:.0f} GPU-seconds cold, {one['shared']:.0f} shared, "
            f"{one['saved_share']:.1%} saved"
            + ("" if again is None else f" ({again:.1%} with the front measured again cold)")
            + f"; goal {gpu['goal']:.0%}; {one['share_if_compiling_were_free']:.1%} if compiling were free"
        )
        said += [f"  {sweep}: {_spelled(one[f'{sweep}_by_part'])}" for sweep in ("cold", "shared")]
    said.append(
        f"fronts: {'the same' if fronts['same'] else 'not the same'}, {len(fronts['cold'])} and {len(fronts['shared'])} settings"
    )
    for side, other in (("cold", "shared"), ("shared", "cold")):
        for one in fronts[f"only_in_{side}"]:
            why = one["why"] or ("it is not measured there" if one["short_by"] is None else f"short by {one['short_by']:.1%}")
            said.append(f"  only on the front of {side}: {one['label']} ({other}: {why})")
    for sweep, one in found["bytes"].items():
        if one["made_bytes"]:
            said.append(
                f"{sweep}: {one['trials']} trials published {one['made_bytes'] / 1e6:.1f} MB in {one['artifacts']} artifacts, "
                f"{one['new_bytes'] / 1e6:.1f} MB of them new to the store ({one['new_share']:.0%})"
            )
    return said


def _spelled(parts: Row) -> str:
    return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
