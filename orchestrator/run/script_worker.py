"""A person's script in a trial's worker: measured in processes of its own, which the worker starts, watches and ends.

Workers that train together start a process each; these find each other as under torchrun, at an address that worker 0 names anew
for every run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_sweep.schema.phases import Phase
from compile_sweep.script.job import ScriptError, ScriptJob
from orchestrator.guard import scratch_folders
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run.trial_spec import Assignment

REFERENCES = "script"
"""Folder of a sweep that holds what eager runs of its script did."""


def measure_script(
    assignment: Assignment,
    *,
    rank: int,
    cpus: Sequence[int],
    device: Any,
    on_phase: Callable[[Phase], None],
    on_early: Callable[[dict[str, float]], None],
) -> dict[str, Any]:
    """Measures the plan's script under the assignment's settings; returns figures of a record.

    Raises:
        ScriptError: it gave none; says what to do.
    """
    from compile_sweep.harness.distributed import agreed, by_rank
    from compile_sweep.script.trial import RunFailed, ScriptTrial  # in workers alone, because it needs torch

    plan = assignment.plan
    assert plan.script is not None
    base = scratch_folders.attempt_folder(os.environ[ATTEMPT_MARKER]) / f"script-{rank}"
    base.mkdir(parents=True)
    folder = Path(plan.folder)
    several = plan.num_workers > 1

    def rendezvous() -> Mapping[str, str]:
        if not several:
            return {}
        address, port = by_rank(_free_port())[0]
        return {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.num_workers),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(rank)),
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(plan.num_workers)),
        }

    trial = ScriptTrial(
        job=ScriptJob.from_dict(plan.script),
        settings=assignment.settings,
        base=base,
        references=(folder if folder.is_dir() else base) / REFERENCES,
        environment={"OMP_NUM_THREADS": str(len(cpus)), **({} if plan.use_gpu else {"CUDA_VISIBLE_DEVICES": ""})},
        is_first=rank == 0,
        rendezvous=rendezvous,
        agree=lambda decision: agreed(decision, device),
        on_phase=on_phase,
        on_early=on_early,
    )
    try:
        return trial.run()
    except RunFailed as error:
        raise ScriptError(error.sentence, from_compiler=error.from_compiler) from None


def _free_port() -> tuple[str, int]:
    """This host's address as other workers see it, and a port that is free there."""
    import ray

    address = str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
    with socket.socket() as found:
        found.bind((address, 0))
        return address, int(found.getsockname()[1])
