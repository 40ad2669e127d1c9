"""The workload's own input pipeline: copies batches to the device during the steps, and measures how long steps wait for them.

Background: prepared batches on the device time only the compute. A job's steps also wait for data if the loader is slower
than the device, and then no compile setting helps. So real passes are timed as well as resident ones. The stream is endless: a
restarted loader has workers to start and queues to fill, which a job meets once per epoch.

Output: milliseconds of each step of the real passes, including the wait.
"""

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
    """Parses the name of a pipeline; raises WorkloadError for another name."""
    if name not in list(Pipeline):
        raise WorkloadError(f"pipeline={name} does not exist; use one of {', '.join(Pipeline)}")
    return Pipeline(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPasses:
    """Passes over the loader's batches."""

    step_ms: list[list[float]]  # milliseconds of each step of each pass, including the wait for its batch
    samples: int  # number of samples in all passes
    tokens: int  # number of useful tokens in all passes

    def throughput(self) -> Throughput:
        """The rate at which the loader's samples were trained on."""
        passes = len(self.step_ms)
        return throughput(self.step_ms, samples=self.samples / passes, tokens=self.tokens / passes)


def real_passes(
    step: Step, workload: Workload, policy: ShapePolicy, *, steps: int, passes: int, rank: int, device: torch.device
) -> RealPasses:
    """Times passes over the loader's next batches, after one untimed pass.

    The untimed pass consumes what the loader had ready before the first step; otherwise a slow loader would seem fast enough.

    Raises:
        WorkloadError: The workload has no loader, or an empty one.
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
    """Yields the batches on the device; on CUDA, a separate stream copies each during the previous step.

    The next batch is requested from the loader before the current one is yielded, because its copy must be in progress by then. A
    fast loader has it ready; a slow one sets the pace either way.
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
    """Makes the current stream wait for the batch, whose memory is not reused before that stream is done with it."""
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
