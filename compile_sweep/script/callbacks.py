"""Callbacks that apply a sweep's winner in Hugging Face's Trainer and in Lightning."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.winner import Applier


def trainer_callback(settings: CompileSettings | str | Path) -> Any:
    """Returns a callback for `transformers.Trainer(callbacks=[...])`.

    Args:
        settings: A sweep's folder, a JSON file, text or the settings themselves.
    """
    from transformers import TrainerCallback

    applier = Applier(settings)

    class ApplySettings(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            applier.begin()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            applier.end()

    return ApplySettings()


def lightning_callback(settings: CompileSettings | str | Path) -> Any:
    """Returns a callback for `lightning.Trainer(callbacks=[...])`; takes the arguments of `trainer_callback`."""
    try:
        callbacks: Any = import_module("lightning.pytorch.callbacks")
    except ModuleNotFoundError:
        callbacks = import_module("pytorch_lightning.callbacks")

    applier = Applier(settings)

    class ApplySettings(callbacks.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            applier.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            applier.end()

    return ApplySettings()
