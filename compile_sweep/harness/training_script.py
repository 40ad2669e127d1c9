"""What a `best.py` does besides holding its settings: builds the workload, trains in this process, and reports the speed."""

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from compile_sweep.contract.base import Batch, Workload, load_workload
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness.outputs import digest, tensors_of
from compile_sweep.harness.pipeline import real_passes
from compile_sweep.harness.steady import throughput, timed
from compile_sweep.schema.settings import CompileSettings

OTHER_DEVICE = 3  # exit code where the device is not the one that was asked for


def train(
    make_step: Callable[..., Callable[..., torch.Tensor]],
    *,
    workload: str,
    size: str,
    seed: int,
    settings: str,
    pipeline: str,
    passes: int,
    device: torch.device,
) -> dict[str, Any]:
    """Warms up on every padded length, then steps through the workload's batches pass by pass; returns how fast that was."""
    chosen = CompileSettings.parse(settings)
    trained = load_workload(workload)(size, seed).under(chosen)
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    figures: dict[str, Any] = {"device": device_name(device), "workers": workers, "rank": rank, "torch": torch.__version__}
    with trained.process_settings():
        if workers > 1:
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        figures |= _trained(make_step, trained, chosen, seed, pipeline, passes, device, rank, workers)
        if workers > 1:
            gc.collect()  # the model goes before the group: ending gloo's with the last reference to it can deadlock (torch 2.13)
            torch.distributed.destroy_process_group()
    return figures


def _trained(
    make_step: Callable[..., Callable[..., torch.Tensor]],
    trained: Workload,
    chosen: CompileSettings,
    seed: int,
    pipeline: str,
    passes: int,
    device: torch.device,
    rank: int,
    workers: int,
) -> dict[str, Any]:
    policy = trained.shape_policy(chosen)
    model = trained.build_model().to(device)
    if workers > 1 and trained.trains and "distributed" not in make_step.__globals__:  # measured with one worker
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = trained.optimizer(model, chosen.optimizer)
    seed_all(seed)
    run = make_step(model) if optimizer is None else make_step(model, optimizer)

    schedule = None if optimizer is None else trained.schedule(optimizer)

    def step(batch: Batch) -> torch.Tensor:
        found = run(dict(batch.inputs))
        if schedule is not None:
            schedule.step()
        return digest(tensors_of(found)) if optimizer is None else found

    pool = trained.pool(policy, rank=rank, device=device)
    every_length = [batch for length in policy.lengths() for batch in trained.batches_of_length(length, rank=rank, device=device)]
    visits = 3 if chosen.claims_cudagraphs else 2  # torch captures a CUDA graph on the second visit of a length
    tell("compiling and warming up", rank)
    began = time.perf_counter()
    timed(step, [*pool, *every_length * visits], [], device)
    warmup_s = time.perf_counter() - began

    losses: list[torch.Tensor] = []
    tell(f"warm after {warmup_s:.1f} s; timing {passes} passes of {len(pool)} steps", rank)
    passes_ms = [timed(step, pool, losses, device) for _ in range(passes)]
    samples, tokens = (float(sum(getattr(batch, unit) for batch in pool)) for unit in ("samples", "tokens"))
    rate = throughput(passes_ms, samples=samples * workers, tokens=tokens * workers)
    if pipeline == "real":
        fed = real_passes(step, trained, policy, steps=len(pool), passes=passes, rank=rank, device=device)
        rate = throughput(fed.step_ms, samples=fed.samples * workers / passes, tokens=fed.tokens * workers / passes)
    low, high = rate.ci95
    wrong = torch.isnan if optimizer is None else lambda loss: ~torch.isfinite(loss)  # outputs may be infinite by right
    return {
        "warmup_s": warmup_s,
        "samples_per_s": rate.samples_per_s,
        "samples_per_s_ci95": [low, high if math.isfinite(high) else None],
        "finite": not any(bool(wrong(loss).any()) for loss in losses),
    }


def _one_or_more(word: str) -> int:
    """A number on the command line; argparse makes the error its one sentence, with exit code 2."""
    if word.isascii() and word.isdecimal() and int(word) >= 1:
        return int(word)
    raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of 1 or more")


def tell(words: str, rank: int) -> None:
    """Says how far this is, while it runs."""
    if rank == 0:
        print(f"progress: {words}", file=sys.stderr, flush=True)


def device_name(device: torch.device) -> str:
    """As records name it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main(make_step: Callable[..., Callable[..., torch.Tensor]], **run: Any) -> int:
    """The command: prints what `train` returns as JSON; returns 1 if a loss is not finite, 3 on another device."""
    options = argparse.ArgumentParser(description="Trains by the settings in this file and prints how fast that is.")
    options.add_argument("--passes", type=_one_or_more, default=5, help="timed passes over the workload's batches")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--expect-device", metavar="NAME", help=f"exit with {OTHER_DEVICE} on another one")
    told = options.parse_args()
    if told.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return OTHER_DEVICE
    if told.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            print(f"worker {index} has no GPU here: there are {torch.cuda.device_count()}", file=sys.stderr)
            return OTHER_DEVICE
        torch.cuda.set_device(index)
    device = torch.device("cuda", torch.cuda.current_device()) if told.device == "cuda" else torch.device("cpu")
    if told.expect_device not in (None, device_name(device)):
        print(f"this device is {device_name(device)}, not {told.expect_device}", file=sys.stderr)
        return OTHER_DEVICE
    came = train(make_step, passes=told.passes, device=device, **run)
    if came["rank"] == 0:
        print(json.dumps(came))
    return 0 if came["finite"] else 1
