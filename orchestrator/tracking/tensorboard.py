"""Trials as TensorBoard's event files: a folder for the sweep, in it one for each trial, with its figures and step times.

The setting and the figures are also written as TensorBoard's hyperparameters, whose tab compares trials.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.tracking.base import LoggedTrial


class EventFiles:
    """The event files of one sweep.

    Args:
        where: an absolute folder; it and the sweep's below it are made with the first trial.
        output: the sweep's folder, whose name its event files' folder gets.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        OSError: nothing can be written there.
    """

    def __init__(self, where: str, output: Path) -> None:
        import tensorboardX  # noqa: F401  # told of now instead of with the first trial

        self._folder = Path(where, output.absolute().name)
        there = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise NotADirectoryError(f"{there} is not a folder that can be written to")

    def log(self, entry: LoggedTrial) -> None:
        """One folder with the trial's events."""
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        began = None if entry.began_at is None else entry.began_at.timestamp()
        with SummaryWriter(str(self._folder / entry.trial_id)) as writer:
            events: Any = writer.file_writer
            for summary in hparams(dict(entry.params), dict(entry.metrics)):
                events.add_summary(summary, walltime=began)
            for name, value in entry.metrics.items():
                writer.add_scalar(name, value, 0, walltime=began)
            for name, values in entry.series.items():
                for step, value in enumerate(values):
                    writer.add_scalar(f"series/{name}", value, step, walltime=began)
            for name, words in {**entry.tags, "setting": entry.source or ""}.items():
                if words:
                    writer.add_text(name, _preformatted(words), 0, walltime=began)

    def close(self, report: Path | None) -> None:
        """Nothing: TensorBoard shows no pages of others."""


def _preformatted(words: str) -> str:
    """As Markdown that leaves it as it is."""
    return "\n".join(f"    {line}" for line in words.splitlines())
