"""Runs scripts in this process, like a trial's process, and restores what they change."""

from __future__ import annotations

import pickle
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_servers import forked_servers as forked_servers
from graphs_on_cpu import recorder as recorder
from sweep_folders import make_sweep as make_sweep
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness.protocol import Protocol
from compile_sweep.harness.source_runtime import OWN_CODE
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.apply.in_place import UNTIL_EXIT
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.run_one import run_script
from compile_sweep.script.session import Kind, Session

SCRIPTS = Path(__file__).parent / "scripts"
SHORT = {
    "compared_steps": 3,
    "min_passes": 2,
    "max_passes": 2,
    "min_window_s": 0.0,
    "cpu_window_s": 0.0,
    "remedy_patience_s": 60.0,  # so that all figures of a run are there, even if it fell back
}

Run = Callable[..., tuple[Session, BaseException | None]]


@pytest.fixture(autouse=True)
def _forked(forked_servers: None) -> None:
    """Spares what runs in this process the imports of its runs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A person's folder with the scripts and their input files."""
    made = tmp_path / "person"
    shutil.copytree(SCRIPTS, made)
    (made / "data").mkdir()
    generator = random.Random(0)
    (made / "data" / "train.bin").write_bytes(struct.pack("<4000H", *(generator.randrange(30) for _ in range(4000))))
    (made / "data" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 30}))
    return made


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs one of the scripts under settings until it is measured."""
    kept = sys.modules["__main__"], sys.argv[:], sys.path[:], torch.get_num_threads()
    configs = [(config, config.get_config_copy()) for config in (dynamo_config, functorch_config, inductor_config)]
    torch.set_num_threads(1)

    def ran(
        script: str, settings: str, *arguments: str, kind: Kind = Kind.MEASURED, forward_seed: int = 0, **protocol: Any
    ) -> tuple[Session, BaseException | None]:
        monkeypatch.chdir(folder)
        torch._dynamo.reset()
        OWN_CODE.clear()  # code is equal in two scripts that only differ in their files
        job = ScriptJob.of(script, arguments, folder=str(folder))
        seed_all(job.seed)  # as a run in a process of its own
        given = Protocol(**{**SHORT, **protocol})
        session = Session(CompileSettings.parse(settings), kind=kind, protocol=given, forward_seed=forward_seed)
        return session, run_script(session, job.path, job, folder.parent)

    yield ran
    sys.modules["__main__"], sys.argv[:], sys.path[:] = kept[:3]
    torch.set_num_threads(kept[3])
    for config, before in configs:  # a run has its process to itself, and leaves its settings
        for name, value in config.get_config_copy().items():
            if value != before[name]:
                setattr(config, name, before[name])
    UNTIL_EXIT.close()
