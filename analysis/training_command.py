"""The script that a sweep measured, as its `sweep.json` says, and the command that trains it with one of the sweep's settings."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.load import load_sweep
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.record import SWEEP_FILE
from compile_sweep.schema.setting_text import with_batch_size
from compile_sweep.schema.settings import CompileSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptScript:
    """The script of a sweep."""

    path: str
    module: str | None = None
    arguments: tuple[str, ...] = ()
    folder: str = ""
    batch_argument: str | None = None  # the script's own option for its batch size

    def command(self, trial: pd.Series, sweep: str, *, current: str | None = None) -> str:
        """Returns the command that trains the script with a trial's setting.

        Args:
            sweep: The sweep's folder, as one word of a shell.
            current: Folder the command is read in; the script's path is relative if it was started there.
        """
        setting, num_workers = CompileSettings.parse(str(trial["settings_key"])), int(trial["num_workers"])
        is_within = current is not None and current == self.folder and Path(self.path).is_relative_to(current)
        given = os.path.relpath(self.path, current) if is_within else self.path
        arguments, size = self.arguments, setting.batch_size
        if size is not None and self.batch_argument is not None:
            arguments = with_batch_size(arguments, self.batch_argument, size)
        script = shlex.join([*(["-m"] if self.module else []), self.module or given, *arguments])
        launcher = "python" if num_workers == 1 else f"torchrun --nproc-per-node {num_workers}"
        if setting.as_written:
            return f"{launcher} {script}"
        ours = "compile-sweep run" if num_workers == 1 else f"{launcher} -m compile_sweep.run"
        return f"{ours} --settings {sweep}:{trial['setting_id']} {script}"


def swept_script(config: Mapping[str, Any]) -> SweptScript | None:
    """Returns the script that a configuration names; None for a workload. Raises ConfigError if it names no file."""
    job = config.get("script")
    if job is None:
        return None
    if isinstance(job, Mapping):
        path, arguments = job.get("path"), job.get("arguments", [])
        is_list = isinstance(arguments, list | tuple) and all(isinstance(word, str) for word in arguments)
        if isinstance(path, str) and is_list:
            others = {name: said for name in ("module", "folder", "batch_argument") if isinstance(said := job.get(name), str)}
            return SweptScript(path=path, arguments=tuple(arguments), **others)
    raise ConfigError(f"{SWEEP_FILE} has the script {job!r}, which names no file; put its path and arguments there")


def training_command(folder: Path, trial: pd.Series) -> str | None:
    """Returns the command that trains a sweep's script with a trial's setting; None for a sweep of a workload."""
    script = swept_script(load_sweep(folder).config)
    return None if script is None else script.command(trial, shlex.quote(str(folder)), current=os.getcwd())
