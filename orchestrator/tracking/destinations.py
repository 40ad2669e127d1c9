"""Where trials are logged to besides the sweep's folder, as `--log-to` spells it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator.config import HIDDEN, shown
from orchestrator.errors import ConfigError


class Service(StrEnum):
    """What takes them."""

    MLFLOW = "mlflow"
    """A tracking server's or database's URI, or a folder, which then holds an SQLite store and its artifacts."""
    TENSORBOARD = "tensorboard"
    """A folder of event files."""
    WANDB = "wandb"
    """A project, or ENTITY/PROJECT."""


_PROJECT = re.compile(r"([\w.-]+/)?[\w.-]+")
_LIKE = "mlflow:http://HOST:5000, mlflow:DIR, tensorboard:DIR or wandb:PROJECT"


@dataclass(frozen=True, slots=True)
class Destination:
    """One place that trials are logged to."""

    service: Service
    where: str
    """A URI, an absolute folder, or a project. It may hold a password; `str` hides it."""

    @classmethod
    def parse(cls, text: str) -> Destination:
        """The place that `SERVICE:WHERE` names.

        Raises:
            ConfigError: it names none.
        """
        name, colon, where = text.strip().partition(":")
        if name not in list(Service) or not colon or not where.strip():
            raise ConfigError(f"--log-to {shown(text)!r} names no place; write it like {_LIKE}")
        if HIDDEN in where:
            raise ConfigError(f"the password of --log-to {shown(text)} was not written down; give --log-to again")
        service, where = Service(name), where.strip()
        if service is Service.WANDB:
            if not _PROJECT.fullmatch(where):
                raise ConfigError(f"--log-to {shown(text)} is no W&B project; write wandb:PROJECT or wandb:ENTITY/PROJECT")
        elif "://" not in where and not where.startswith("databricks"):
            try:
                where = str(Path(where).expanduser().absolute())
            except RuntimeError:
                raise ConfigError(f"--log-to {shown(text)} is no folder, for no user is called so; name another") from None
        elif service is Service.TENSORBOARD:
            raise ConfigError(f"--log-to {shown(text)} is no folder, and TensorBoard's event files go to one")
        return cls(service, where)

    @property
    def spelled(self) -> str:
        """What `parse` reads back, password and all."""
        return f"{self.service}:{self.where}"

    def __str__(self) -> str:
        return shown(self.spelled)
