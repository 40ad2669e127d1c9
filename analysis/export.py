"""`python -m analysis.export DIR --steps 1M`: a sweep's results in other forms, next to it.

`best.py` is the setting that `analysis.recommend` recommends for the job, as a program; `best.json` says how a run of it went.
For a script there is no `best.py`, but the command that trains it with the setting. `trials.csv`, `trials.parquet` and
`trials.md` are the trials as a table.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from analysis.best_script import BEST_FILE, Outcome, Rerun, best_script, rerun
from analysis.choose.break_even import USUAL_STEPS, Job
from analysis.choose.pareto import standing
from analysis.command_line import amount, count, say
from analysis.formatting import number, text
from analysis.load import load, load_for_analysis, load_sweep
from analysis.page.page import RERUN_FILE
from analysis.recommend import JobOptions, job_of, recommend, sentences
from analysis.report import renew_report
from analysis.table import markdown_table
from analysis.training_command import swept_script, training_command
from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.errors import ConfigError, SweepFolderError
from compile_sweep.schema.journal import written_whole
from compile_sweep.schema.objectives import Constraint
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import SWEEP_FILE
from compile_sweep.schema.short_names import find_setting, setting_ids
from compile_sweep.schema.visible_text import spreadsheet_cell

PROG = "python -m analysis.export"

_EVERY_STEP = ("step_ms", "eager_step_ms")  # columns too long for a spreadsheet cell

_FORMS: Mapping[str, Callable[[pd.DataFrame, Path], None]] = {
    "csv": lambda df, path: to_csv(df, path),
    "parquet": lambda df, path: to_parquet(df, path),
    "md": lambda df, path: _write(path, markdown_table(df)),
}


class Form(StrEnum):
    """Output formats."""

    BEST = "best"
    CSV = "csv"
    PARQUET = "parquet"
    MD = "md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(JobOptions):
    """Write a sweep's results in other forms, and best.py."""

    only: tuple[Form, ...] = tuple(Form)
    """Which forms to write; by default all of them."""
    chosen: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="SETTING")] = None
    """The setting for best.py instead of the recommended one: its id, such as A7, or its key."""
    setting: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """Another way to give SETTING."""
    no_rerun: Flag = False
    """Write best.py without running it first; the file says so."""
    timeout_s: Annotated[str | None, tyro.conf.arg(metavar="S")] = None
    """Seconds after which the run is abandoned; by default 4 times what the trial took, plus 10 min."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to write; by default the sweep's folder."""


def to_csv(df: pd.DataFrame, path: Path) -> None:
    """Writes every trial and column except single steps as CSV: lists and mappings are JSON in a cell, missing values are empty.

    Text that a spreadsheet would interpret as a formula is prefixed with an apostrophe.
    """
    plain = _plain(df.drop(columns=list(_EVERY_STEP)), also=list)
    for name in plain.select_dtypes(["string", "object", "category"]):
        plain[name] = [spreadsheet_cell(cell) if isinstance(cell, str) else cell for cell in plain[name]]
    plain.to_csv(path, index=False)


def to_parquet(df: pd.DataFrame, path: Path) -> None:
    """Writes every trial and column as Parquet; mappings are JSON, because their fields differ between trials."""
    _plain(df).to_parquet(path, index=False)


def _command(told: Options) -> int:
    folder, into = told.folder, told.output or told.folder
    timeout_s = None if told.timeout_s is None else amount(told.timeout_s)
    if told.chosen is not None and told.setting is not None:
        raise ConfigError(f"both {told.chosen} and --setting {told.setting} name the setting; leave one of them out")
    job, bounds = _asked(told)  # before anything is written
    df = load(folder)
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepFolderError(
            f"{into} is not a folder and cannot become one ({error.strerror}); name another --output"
        ) from None
    failed = False
    for form in (name for name in _FORMS if name in told.only):
        path = into / f"trials.{form}"
        _write_whole(path, lambda temporary, form=form: _FORMS[form](df, temporary))  # type: ignore[misc]
        print(path)
    if Form.BEST in told.only and swept_script(load_sweep(folder).config) is not None:
        chosen, why, _ = _chosen(told, job, bounds)
        say(*why, f"A script needs no {BEST_FILE}. To train with this setting:")
        print(training_command(folder, chosen))
    elif Form.BEST in told.only:
        chosen, why, chosen_for = _chosen(told, job, bounds)
        came = export_best(
            folder, chosen, into, run_it=not told.no_rerun, timeout_s=timeout_s, because=why, job=chosen_for, say=_progress()
        )
        say(*why, came.sentence)
        if failed := came.outcome is Outcome.FAILED:
            print(f"{BEST_FILE} is not offered")
        else:
            print(into / BEST_FILE)
        if into.resolve() == folder.resolve():
            renew_report(folder)
    return 1 if failed else 0


def export_best(
    folder: Path,
    trial: pd.Series,
    into: Path,
    *,
    run_it: bool = True,
    timeout_s: float | None = None,
    because: Sequence[str] = (),
    job: Job | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Rerun:
    """Writes `best.py` for a trial's setting after running it in a fresh process, and `best.json` with the result.

    A program that fails is not offered: an earlier `best.py` is removed, and `best.json` says why.

    Args:
        run_it: False to offer the program without running it.
        because: Sentences that say why this setting was chosen.

    Raises:
        ConfigError: The record has no source, or the seed in `sweep.json` is not valid.
        SweepFolderError: The folder is not writable.
    """
    seed = _seed(folder)
    came = Rerun(Outcome.NOT_RUN, "Not run again before it was written.", {})
    if run_it:
        say(f"running {BEST_FILE} once more in a fresh process before offering it; --no-rerun skips this")
        came = rerun(trial, best_script(trial, seed=seed), timeout_s=timeout_s, say=say)
    script = best_script(trial, seed=seed, remarks=[*because, came.sentence])
    recorded = {name: number(trial[name]) for name in ("samples_per_s", "samples_per_s_low", "samples_per_s_high")}
    told = {
        "settings_key": str(trial["settings_key"]),
        "setting_id": str(trial["setting_id"]),
        "settings_label": str(trial["settings_label"]),
        "device": text(trial["device"]),
        "recorded": recorded,
        "outcome": str(came.outcome),
        "sentence": came.sentence,
        "rerun": came.came,
        "because": list(because),
        "job": None if job is None else asdict(job),
    }
    if came.outcome is Outcome.FAILED:
        (into / BEST_FILE).unlink(missing_ok=True)
    else:
        _write_whole(into / BEST_FILE, lambda path: _write(path, script))
    _write_whole(into / RERUN_FILE, lambda path: _write(path, json.dumps(told, indent=2, ensure_ascii=False) + "\n"))
    return came


def _progress() -> Callable[[str], None]:
    """Prints lines as they come, each with the seconds since this was called; not on stdout, which has the results."""
    began = time.monotonic()
    return lambda line: print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)


def _asked(told: Options) -> tuple[Job, list[Constraint]]:
    lengths = [count(words) for words in told.steps or [str(USUAL_STEPS)]]
    if len(lengths) > 1:
        raise ConfigError("best.py is for one job; give one length with --steps")
    return job_of(told, lengths[0]), [Constraint.parse(words) for words in told.constraint]


def _chosen(told: Options, job: Job, bounds: Sequence[Constraint]) -> tuple[pd.Series, list[str], Job | None]:
    df, attempts = load_for_analysis(told.folder)
    if (name := told.chosen or told.setting) is not None:
        trial = _asked_for(df, find_setting(setting_ids(attempts["settings_key"]), name) or name)
        return trial, [f"The requested setting: “{trial['setting_name']}”."], None
    found_best = recommend(df, job, constraints=bounds, attempts=attempts)
    return found_best.trial, sentences(found_best), job


def _seed(folder: Path) -> int:
    seed = load_sweep(folder).config.get("seed")
    if seed is not None and type(seed) is not int:
        raise ConfigError(
            f"{folder / SWEEP_FILE} has the seed {seed!r}, which is not a whole number; put the sweep's own seed there"
        )
    return seed or 0


def _asked_for(df: pd.DataFrame, key: str) -> pd.Series:
    counted = standing(df)
    named = counted[counted["settings_key"] == key]
    usable = named[named["status"] == Status.OK]
    if not usable.empty:
        return usable.iloc[-1]
    if named.empty:
        why = "it was never recorded; copy the key from its table or report"
    else:
        trial = named.iloc[-1]
        why = f"its {trial['caches']} trial is {trial['status']}, {text(trial['label']) or 'for no known reason'}; choose another"
    raise ConfigError(f"the sweep has no usable trial of the setting {key!r}: {why}")


def _plain(df: pd.DataFrame, *, also: type = dict) -> pd.DataFrame:
    """Returns the frame with mappings, and the columns in `also`, as JSON text."""

    def written(value: Any) -> Any:
        if isinstance(value, dict | also):
            return json.dumps(value, ensure_ascii=False)
        return value

    mixed = [name for name in df.columns if df[name].dtype == "object"]
    return df.assign(**{name: df[name].map(written, na_action="ignore") for name in mixed})


def _write(path: Path, contents: str) -> None:
    path.write_text(contents, encoding="utf-8", errors="replace")


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    try:
        with written_whole(path) as unfinished:
            write(unfinished)
    except OSError as error:
        why = error.strerror or error  # errors of pandas have no errno
        raise SweepFolderError(f"{path} cannot be written ({why}); name a folder that can with --output") from None


main = command_line.main_of(Options, _command, PROG)

if __name__ == "__main__":
    sys.exit(main())
