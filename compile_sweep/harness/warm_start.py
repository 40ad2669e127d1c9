"""Starting a setting until it compiles no more, and no further: what a training job pays each time that it is restarted.

Background: the job's process is new and its compile caches hold what an earlier one left. The batches are those of the warm-up
that `measure.py` times, so the two can be compared; there is no steady window, no eager reference and no check.

Output: seconds to build model and optimizer, of the first step, and of the whole warm-up with what its steps themselves take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness.apply import applied
from compile_sweep.harness.compile_phases import record_phases
from compile_sweep.harness.measure import warm_up_batches
from compile_sweep.harness.measurement import Protocol
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.outcome import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start; units are in the names."""

    device: str
    load_s: float
    """Building the model and its optimizer and applying the settings."""
    first_step_s: float
    """Of `warmup_s`."""
    warmup_s: float
    warmup_steps: int
    compile_phases_s: dict[str, float]
    """Adds up to `warmup_s`; steps are in other."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that cross processes without this module."""
        return asdict(self)


def restart(
    prepared: Prepared,
    *,
    rank: int = 0,
    protocol: Protocol | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> Start:
    """Starts one setting in this process, which should be fresh.

    Args:
        prepared: the setting, on its workload.
        rank: this worker's; the default process group must exist where there are several.
        protocol: how long to warm up.
        on_phase: told when a phase begins.

    Raises:
        SettingsError: the model has nothing of what the settings compile.
    """
    workload, device = prepared.workload, prepared.device
    with workload.process_settings():
        on_phase(Phase.BUILDING)
        pool = workload.pool(prepared.policy, rank=rank, device=device)
        batches = warm_up_batches(prepared, pool, rank=rank, protocol=protocol or Protocol())
        _synchronize(device)
        began = time.perf_counter()
        model = workload.build_model().to(device)  # as a job does; a trial's models are copies of one
        optimizer = prepared.optimizer(model)
        seed_all(workload.seed)
        with applied(prepared, model, optimizer) as step:
            _synchronize(device)
            loaded = time.perf_counter()
            on_phase(Phase.WARMING_UP)
            with record_phases() as phases:
                started = time.perf_counter()
                step(batches[0])
                _synchronize(device)
                first_step_s = time.perf_counter() - started
                for batch in batches[1:]:
                    step(batch)
                _synchronize(device)
                warmup_s = time.perf_counter() - started
    on_phase(Phase.DONE)
    return Start(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        load_s=loaded - began,
        first_step_s=first_step_s,
        warmup_s=warmup_s,
        warmup_steps=len(batches),
        compile_phases_s=phases.split(warmup_s),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
