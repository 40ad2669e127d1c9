"""The workload's own input pipeline: batches brought to the device beside the steps, and the share of time steps wait for them.

Background: prepared batches on the device time the compute alone. A job's steps also wait for their data when the loader makes
batches more slowly than the device uses them up, and then no compile setting helps. So real passes are timed beside resident
ones. The stream is endless: a loader that begins anew has workers to start and queues to fill, which a job meets once an epoch.

Output: milliseconds of each step of the real passes, waiting included.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.harness.steady import Step, Throughput, throughput, timed
from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.shapes import ShapePolicy


def parse_pipeline(name: str) -> Pipeline:
    """The pipeline of that name.

    Raises:
        WorkloadError: there is none.
    """
    if name not in list(Pipeline):
        raise WorkloadError(f"pipeline={name} is none of {', '.join(Pipeline)}")
    return Pipeline(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPasses:
    """Passes over what the loader gives."""

    step_ms: list[list[float]]
    """Of each step of each pass, waiting for its batch included."""
    samples: int
    """In all passes together."""
    tokens: int
    """Useful ones."""

    def throughput(self) -> Throughput:
        """The rate at which the loader's samples were trained on."""
        passes = len(self.step_ms)
        return throughput(self.step_ms, samples=self.samples / passes, tokens=self.tokens / passes)


def real_passes(
    step: Step, workload: Workload, policy: ShapePolicy, *, steps: int, passes: int, rank: int, device: torch.device
) -> RealPasses:
    """Times passes over the loader's next batches, after one pass untimed.

    The untimed pass uses up what the loader had ready before the first step; a loader that cannot keep pace would else look as
    if it could.

    Args:
        step: trains on a batch.
        workload: has the loader.
        policy: how it batches and pads.
        steps: of a pass.
        passes: to time.
        rank: this worker's.
        device: where the steps run.

    Raises:
        WorkloadError: the workload has no loader, or an empty one.
    """
    samples = tokens = 0

    def counted(batch: Batch) -> Tensor:
        nonlocal samples, tokens
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        return step(batch)

    with closing(prefetch_to_device(_endless(workload, policy, rank), device)) as stream:
        timed(step, islice(stream, steps), [], device)
        step_ms = [timed(counted, islice(stream, steps), [], device) for _ in range(passes)]
    return RealPasses(step_ms=step_ms, samples=samples, tokens=tokens)


def prefetch_to_device(batches: Iterable[Batch], device: torch.device) -> Generator[Batch]:
    """The same batches on the device; on CUDA each is copied by a stream of its own while the step before it runs.

    The next batch is asked of the loader before this one is handed out, because its copy must be under way by then. A loader
    that keeps pace has it ready; one that does not sets the pace either way.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(side):
            copied = batch.to(device)
            arrived = side.record_event()
        if ahead is not None:
            yield _taken_over(*ahead)
        ahead = copied, arrived
    if ahead is not None:
        yield _taken_over(*ahead)


def _taken_over(batch: Batch, arrived: torch.cuda.Event) -> Batch:
    """The batch, once the current stream has waited for it; its memory is not used again before that stream is done with it."""
    stream = torch.cuda.current_stream()
    stream.wait_event(arrived)
    for tensor in batch.inputs.values():
        tensor.record_stream(stream)
    return batch


def _endless(workload: Workload, policy: ShapePolicy, rank: int) -> Generator[Batch]:
    loader = workload.loader(policy, rank=rank)
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise WorkloadError(f"the loader of {type(workload).__name__} gives no batches; it should give them without end")
