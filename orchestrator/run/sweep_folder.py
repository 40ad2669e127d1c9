"""The sweep's folder: created for a new sweep, or reopened for a resumed one.

`sweep.json` holds the configuration and environment of the latest run, a digest of the script, and when and from which commit
each earlier run started. The stored configuration of a resumed sweep is validated before use, since anybody may have written it.

Settings during which a sweep died are counted, so that none crashes a host at every resume. A trial that ends its own process is
recorded. But one that ends what would record it (the driver, Ray's raylet, the host) leaves no record and would run first after a
resume. So before a trial's first attempt, a line is durably written to `starts.jsonl`. If a sweep did not end properly, each
start without a record counts; a setting with two of them is recorded as failed and skipped.
"""

import ast
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from compile_sweep.schema import journal, record, redact
from compile_sweep.schema.errors import ConfigError, RecordsError, SessionError, SettingsError, SweepFolderError
from compile_sweep.schema.outcome import Label
from compile_sweep.schema.setting_text import quote_value
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob
from orchestrator.config import IDENTITY, Device, SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.log_bounds import bound_logs

SCHEMA_VERSION = 2
LOGS = "logs"
TRAIN_STATE = ".train-"  # prefix of folders with a running trial's Ray Train state; a killed driver leaves them behind
STARTS_FILE = "starts.jsonl"
ROOM_FILE = ".room-for-records"  # file that takes up the room that records need if the disk fills up during the sweep
ROOM_BYTES = 1 << 20
ROOM_USED = "the room kept for records has been used"
"""Why no further trial should start although every record was written."""
MAX_ENDS = 2
"""How many times a sweep may die while a setting runs. The first time may be chance: a power failure, or a job's time limit."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Creates the folder and locks it until the block or this process ends; raises SweepFolderError if another driver has it.

    A new folder in which no sweep could be begun is removed.
    """
    is_new = not folder.exists()
    try:
        with _locked(folder):
            yield
    except SweepFolderError:
        if is_new and not (folder / record.SWEEP_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    _make_writable(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepFolderError(f"a sweep is running in {folder}; wait until it has ended, or name another --output") from None
        except OSError:
            pass  # a file system that cannot lock folders
        yield
    finally:
        os.close(descriptor)


def begin(folder: Path, config: SweepConfig, environment: Environment, commit: str | None) -> list[record.TrialRecord]:
    """Creates a new sweep's folder and returns its records, none yet; raises SweepFolderError if it holds a sweep."""
    refuse(folder, config, environment, to_resume=False)
    _make_writable(folder)
    with _in_a_sentence(folder):
        _keep_room(folder)
        write_json(folder / record.SWEEP_FILE, _described(config, environment, commit, runs=[]))
        # Second: without sweep.json, the folder would look like a sweep that cannot be resumed.
        (folder / record.TRIALS_FILE).touch()
        journal.sync_folder(folder)
        journal.sync_folder(folder.absolute().parent)
    return []


def resume(folder: Path, config: SweepConfig, environment: Environment, commit: str | None) -> list[record.TrialRecord]:
    """Reopens the folder and returns its records; begins it if it holds no sweep. Raises SweepFolderError for another sweep."""
    if not _holds(folder, record.SWEEP_FILE):
        return begin(folder, config, environment, commit)
    done = refuse(folder, config, environment, to_resume=True)
    _make_writable(folder)
    before = read_sweep(folder)
    for left_behind in folder.glob(f"{TRAIN_STATE}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    recorded = {trial.trial_id for trial in done} | {start.trial_id for start in record.read_warm_starts(folder)}
    for logs in (folder / LOGS).iterdir():
        if logs.name not in recorded:  # the driver died with the trial, before it could remove the folder
            bound_logs(logs)
            redact.redact_logs(logs)
    runs = [*before.get("runs", []), {"started_at": before["started_at"], "commit": before["environment"].get("commit")}]
    with _in_a_sentence(folder):
        described = _described(config, environment, commit, runs)
        described["cluster"] |= before.get("cluster") is True
        _keep_room(folder)
        write_json(folder / record.SWEEP_FILE, described)
    return done


def put_back(folder: Path, description: bytes) -> list[str]:
    """Writes `sweep.json` again if the folder was moved or removed while its sweep ran; returns a sentence about that, if so."""
    if (folder / record.SWEEP_FILE).exists():
        return []
    with _in_a_sentence(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / record.SWEEP_FILE, json.loads(description))
        (folder / record.TRIALS_FILE).touch()
    return [f"{folder} was moved or removed while the sweep ran; only what was recorded since then is in it now"]


def refuse(folder: Path, config: SweepConfig, environment: Environment, *, to_resume: bool) -> list[record.TrialRecord]:
    """Raises the error that `begin` or `resume` would raise, without writing; returns the folder's records."""
    if not (to_resume and _holds(folder, record.SWEEP_FILE)):
        if _holds(folder, record.SWEEP_FILE) or _holds(folder, record.TRIALS_FILE):
            raise SweepFolderError(f"{folder} holds a sweep already; add --resume to go on with it, or name another --output")
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "Permission denied" if there.is_dir() else "Not a directory"
            raise SweepFolderError(f"{folder} cannot be written ({why}); name another --output")
        return []
    before = read_sweep(folder)
    for name in IDENTITY:
        mine, theirs = config.to_dict()[name], before["config"].get(name)
        refuse_other(folder, name, theirs if redact.is_redacted(mine, theirs) else mine, theirs)
    for name in environment.decisive:
        theirs, mine = before["environment"].get(name), getattr(environment, name)
        if theirs != mine and not (name == "cpu" and only_drives(config, environment)):
            raise SweepFolderError(
                f"{folder} was measured with {name} {theirs}, and this is {mine}; their figures cannot be compared, "
                "so name another --output"
            )
    records = record.read(folder)
    theirs, job = before.get("script_code"), config.script
    measured = any(one.samples_per_s is not None for one in records)  # a script that failed so far may be mended
    if measured and job is not None and theirs is not None and theirs != _script_code(config):
        raise SweepFolderError(
            f"{job['path']} was changed since the sweep in {folder} began; figures of two versions cannot be compared, so "
            "undo the change or name another --output"
        )
    return records


def _script_code(config: SweepConfig) -> str | None:
    """Returns a digest of what the script does, comments and layout aside; None for a workload, or if it cannot be read."""
    if config.script is None:
        return None
    try:
        code = ast.dump(ast.parse(Path(config.script["path"]).read_bytes()))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    return hashlib.sha256(code.encode()).hexdigest()


def refuse_other(folder: Path, name: str, mine: Any, theirs: Any) -> None:
    """Raises SweepFolderError if this field of `IDENTITY` is another one in the folder's sweep."""
    mine, theirs = map(_without_missing, (mine, theirs))
    if mine != theirs:
        mine = redact.redact_json(mine)  # as it would be stored
        if isinstance(mine, dict) and isinstance(theirs, dict):  # such as a script with its arguments: says only what differs
            member = next(key for key in sorted({*theirs, *mine}) if mine.get(key) != theirs.get(key))
            return refuse_other(folder, f"{name}'s {member.replace('_', ' ')}", *(side.get(member) for side in (mine, theirs)))
        verb = "are" if isinstance(theirs, list) else "is"
        mine, theirs = (shlex.join(map(str, side)) if isinstance(side, list) else side for side in (mine, theirs))
        raise SweepFolderError(
            f"{folder} holds another sweep: its {name} {verb} {theirs!r}, not {mine!r}; name another --output or use its {name}"
        )


def _without_missing(value: Any) -> Any:
    """Returns the value without the null members of an object, which a sweep of an older version may not have written."""
    return {name: member for name, member in value.items() if member is not None} if isinstance(value, dict) else value


def only_drives(config: SweepConfig, environment: Environment) -> bool:
    """Tells whether this host measures nothing itself, as the head of a cluster whose GPUs are on other hosts."""
    return config.device is Device.CUDA and environment.gpu is None


def read_sweep(folder: Path) -> dict[str, Any]:
    """Reads `sweep.json`; raises RecordsError if it is damaged or of another version."""
    path = folder / record.SWEEP_FILE
    try:
        values = json.loads(journal.read_regular(path).decode("utf-8"))
        if not isinstance(values, dict):
            raise TypeError("it is not a JSON object")
        if (version := values.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"schema version {version!r}, and this version reads {SCHEMA_VERSION}")
        for name, kind in (("config", dict), ("environment", dict), ("environment_key", str), ("started_at", str)):
            if not isinstance(values.get(name), kind):
                raise TypeError(f"{name} is {quote_value(values[name]) if name in values else 'missing'}")
        if not _are_runs(runs := values.get("runs", [])):
            raise TypeError(f"runs is {quote_value(runs)}, and not a list of objects that hold text or null")
        if not _is_text_or_null(commit := values["environment"].get("commit")):
            raise TypeError(f"commit is {quote_value(commit)}")
    except OSError as error:
        raise RecordsError(f"{path} cannot be read ({error.strerror}); name another --output") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordsError(f"{path} is not a sweep this version wrote ({error}); name another --output") from None
    return dict(values)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON file atomically, without secrets."""
    write_durably(path, (json.dumps(redact.redact_json(values), indent=2, allow_nan=False) + "\n").encode())


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file that others may read, atomically; it is on the disk on return."""
    with journal.written_whole(path) as unfinished, unfinished.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        unfinished.chmod(0o644)
    journal.sync_folder(path.parent)


def now(seconds_ago: float = 0.0) -> str:
    """Returns the time in ISO 8601 with its UTC offset, to the second."""
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")


def _are_runs(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(run, dict) and all(map(_is_text_or_null, run.values())) for run in value)


def _is_text_or_null(value: object) -> bool:
    return value is None or isinstance(value, str)


def _described(config: SweepConfig, environment: Environment, commit: str | None, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "config": config.to_dict(),
        "seed": config.seed,
        "environment": {**environment.to_dict(), "commit": commit},
        "environment_key": environment.key,
        "script_code": _script_code(config),
        "cluster": bool(os.environ.get("RAY_ADDRESS")),
        "started_at": now(),
        "planned": [] if config.search.searcher else [setting.key for setting in config.settings],
        "runs": runs,
    }


def _keep_room(folder: Path) -> None:
    """Takes up the room that records need, unless that has been done."""
    path = folder / ROOM_FILE
    if path.is_file() and path.stat().st_size == ROOM_BYTES:
        return
    try:
        with path.open("wb") as file:
            file.write(os.urandom(ROOM_BYTES))  # some file systems store no block for zeros
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def give_room(folder: Path) -> bool:
    """Gives records the room that was kept for them; returns whether there was any."""
    try:
        (folder / ROOM_FILE).unlink()
    except OSError:
        return False
    return True


def _holds(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError as error:  # the folder is not accessible, or the name is too long
        raise SweepFolderError(f"{folder} cannot be read ({error.strerror}); name another --output") from None


def _make_writable(folder: Path) -> None:
    with _in_a_sentence(folder):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _in_a_sentence(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SweepFolderError(f"{folder} cannot be written ({error.strerror}); name another --output") from None


def stored_config(output: Path) -> SweepConfig | None:
    """Reads the configuration from `sweep.json`; None if there is none. Raises RecordsError if no version of ours wrote it."""
    path = output / record.SWEEP_FILE
    try:
        if not path.exists():
            return None
    except OSError as error:  # the folder is not accessible, or the name is too long
        raise RecordsError(f"{path} cannot be read ({error.strerror}); name another --output") from None
    try:
        config = SweepConfig.from_dict(read_sweep(output)["config"])
        if config.script is not None:
            ScriptJob.from_dict(config.script)
        return config
    except (TypeError, ConfigError, SettingsError) as error:
        raise RecordsError(f"{path} is not a sweep this version wrote ({error}); name another --output") from None


def note_start(folder: Path, trial_id: str, settings_key: str) -> None:
    """Counts a trial that is about to start. If the log cannot be written, the trial still runs, uncounted."""
    with suppress(OSError, RecordsError):
        if trial_id not in _starts(folder):
            journal.append(folder / STARTS_FILE, json.dumps({"trial_id": trial_id, "settings_key": settings_key}))


@contextmanager
def withdrawn_if_ended_in_order(folder: Path) -> Iterator[None]:
    """Withdraws the counted starts if the sweep ends by itself or is stopped; keeps them if what runs the trials failed.

    Also gives up the room that was kept for records.
    """
    try:
        yield
    except SessionError:
        raise
    except BaseException:
        _withdraw(folder, _starts(folder))
        raise
    else:
        _withdraw(folder, _starts(folder))
    finally:
        give_room(folder)


def record_poison(folder: Path, config: SweepConfig) -> list[str]:
    """Records each setting during which the sweep died too often, so that it is skipped; returns a sentence for each."""
    recorded = {trial.trial_id for trial in record.read(folder)}
    ends: dict[str, list[str]] = {}
    for trial_id, key in _starts(folder).items():
        if trial_id not in recorded:
            ends.setdefault(key, []).append(trial_id)
    said = []
    for key, trial_ids in ends.items():
        if len(trial_ids) < MAX_ENDS:
            continue
        settings = CompileSettings.parse(key)
        reason = (
            f"the sweep or its host died {len(trial_ids)} times while this setting ran, so it is not run again; "
            "to try it once more, remove this line, or name it with --settings in a new folder"
        )
        record.append(
            folder,
            record.TrialRecord(
                trial_id=trial_ids[-1],
                settings=settings.to_dict(),
                settings_key=settings.key,
                status=Label.SWEEP_DIED.status,
                label=Label.SWEEP_DIED,
                reason=reason,
                workload=config.workload,
                size=config.size,
                num_workers=config.workers_per_trial,
                started_at=now(),
            ),
        )
        _withdraw(folder, trial_ids[:-1])
        said.append(f"{settings.label}: {reason}")
    return said


def _starts(folder: Path) -> dict[str, str]:
    """Returns the settings key of each start that was not withdrawn, by trial ID."""
    found: dict[str, str] = {}
    for line in journal.read(folder / STARTS_FILE, _parsed, "start"):
        if line.get("withdrawn"):
            found.pop(line["trial_id"], None)
        else:
            found[line["trial_id"]] = line["settings_key"]
    return found


def _withdraw(folder: Path, trial_ids: Iterable[str]) -> None:
    with suppress(OSError, RecordsError):
        for trial_id in trial_ids:
            journal.append(folder / STARTS_FILE, json.dumps({"trial_id": trial_id, "withdrawn": True}))


def _parsed(line: str) -> dict[str, str]:
    try:
        values = json.loads(journal.unsealed(line))
        if not isinstance(values["trial_id"], str) or not (values.get("withdrawn") or isinstance(values["settings_key"], str)):
            raise TypeError("trial_id or settings_key is not text")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordsError(f"not a start ({error})") from None
    return dict(values)
