"""Trials as TensorBoard event files: a folder per sweep and in it one per trial, with its figures and step times.

The setting and the figures are also written as hyperparameters, which TensorBoard's HPARAMS tab compares.
"""

import os
from pathlib import Path
from typing import Any

from orchestrator.tracking.base import LoggedTrial


class EventFiles:
    """The event files of one sweep, in a subfolder of an absolute folder; both are created with the first trial."""

    def __init__(self, where: str, output: Path) -> None:
        import tensorboardX  # noqa: F401  # told of now instead of with the first trial

        self._folder = Path(where, output.absolute().name)
        there = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise NotADirectoryError(f"{there} is not a folder that can be written to")

    def log(self, entry: LoggedTrial) -> None:
        """Writes a trial's events to a folder of its own."""
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
                    writer.add_text(name, "\n".join(f"    {line}" for line in words.splitlines()), 0, walltime=began)

    def close(self, report: Path | None) -> None:
        """Does nothing: TensorBoard cannot show an HTML report."""
