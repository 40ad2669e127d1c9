"""Starts a setting until nothing is left to compile, and then stops: the cost that a training job pays at each restart.

Background: the job's process is new, and its compile caches hold what an earlier one left. The batches are those of the warm-up
that `measure.py` times, so the two are comparable; there is no steady window, no eager reference and no check.

Output: seconds for building model and optimizer, for the first step, and for the whole warm-up including its steps.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness.apply import applied
from compile_sweep.harness.compile_phases import record_phases
from compile_sweep.harness.measure import warm_up_batches
from compile_sweep.harness.prepare import Prepared
from compile_sweep.harness.protocol import Protocol
from compile_sweep.harness.steady import synchronize
from compile_sweep.schema.outcome import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start; units are in the names."""

    device: str
    load_s: float  # seconds for building the model and its optimizer and applying the settings
    first_step_s: float  # seconds of the first step, a part of `warmup_s`
    warmup_s: float
    warmup_steps: int
    compile_phases_s: dict[str, float]  # seconds by phase, which add up to `warmup_s`; steps are in `other`

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values, which cross processes without this module."""
        return asdict(self)


def restart(
    prepared: Prepared,
    *,
    rank: int = 0,
    protocol: Protocol | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> Start:
    """Starts one setting in this process, which should be fresh."""
    workload, device = prepared.workload, prepared.device
    with workload.process_settings():
        on_phase(Phase.BUILDING)
        pool = workload.pool(prepared.policy, rank=rank, device=device)
        batches = warm_up_batches(prepared, pool, rank=rank, protocol=protocol or Protocol())
        synchronize(device)
        began = time.perf_counter()
        model = workload.build_model().to(device)  # builds it as a job does; a trial's models are copies of one
        optimizer = prepared.optimizer(model)
        seed_all(workload.seed)
        with applied(prepared, model, optimizer) as step:
            synchronize(device)
            loaded = time.perf_counter()
            on_phase(Phase.WARMING_UP)
            with record_phases() as phases:
                started = time.perf_counter()
                step(batches[0])
                synchronize(device)
                first_step_s = time.perf_counter() - started
                for batch in batches[1:]:
                    step(batch)
                synchronize(device)
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
