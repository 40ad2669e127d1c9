"""The captioning source's own best recipe as a plain hand-written loop, and how much faster other settings are beside it.

Background: "Maximizing AI/ML Model Performance with PyTorch Compilation" ends its dynamic table with the whole model compiled,
its changing length marked, padding to a multiple of 8, captions in random order, bf16 autocast, an explicit loss and Adam with a
compiled step; max-autotune gave it 5 % more. `recipe_step` writes that out with torch alone, on the workload's model and batches.
Every contestant is a fresh process of this script: the recipe, the same loop in eager mode, and each `--beside`, which runs
through `harness.apply.applied`. They build at once and warm up one after another, alone on the device, with empty caches,
over every length they can meet. Then passes over the same captions take turns, ABAB, so that a clock that drifts is the same for
all.

Output: steps/s and samples/s of each, their ratio to the recipe with a 95 % interval over the rounds, and all of it as JSON.

    python -m benchmarks.recipes.source_recipe --output recipe.json --beside scope=full,dynamic=mark,optimizer=fused
    python -m benchmarks.recipes.source_recipe --output recipe.json --size tiny --rounds 2     # a dry run on a CPU

What has not warmed up within `--budget-s` is left out. If that is the recipe, with max-autotune say, `--caches FOLDER` keeps what
was compiled for another run.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.utils import counters
from torch._inductor import list_mode_options
from torch._inductor.runtime import compile_tasks

from compile_sweep.contract.base import Batch
from compile_sweep.harness.apply import applied
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToLongest, ShapePolicy
from orchestrator.environment import fingerprint
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.run.sweep_folder import write_json
from workloads.captioning import Captioning

RECIPE, EAGER = "the source's recipe by hand", "eager by hand"
PAD_MULTIPLE = 8
TIMING_S = 100.0  # seconds of the budget that are reserved for the rounds

_T975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""97.5 % quantiles of Student's t by degrees of freedom."""

Step = Callable[[Batch], Tensor]  # trains on a batch and returns its loss

Say = Callable[[str], None]


def recipe_step(model: nn.Module, learning_rate: float, mode: str, device: torch.device) -> Step:
    """Returns the source's training step."""
    options: dict[str, Any] = dict(list_mode_options(mode))
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        options["shape_padding"] = False  # otherwise a marked length fails at 64 tokens (docs/log.md)
        if mode == "max-autotune":
            compile_tasks._set_triton_ptxas_path()  # otherwise each choice is compiled twice, the second time sequentially
    forward = torch.compile(model, options=options or None)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    update = torch.compile(optimizer.step)

    def step(batch: Batch) -> Tensor:
        for name in ("decoder_input_ids", "decoder_attention_mask", "labels"):
            mark_dynamic(batch.inputs[name], 1)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: Tensor = forward(**batch.inputs)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach().clone()  # a CUDA graph reuses its memory

    return step


def eager_step(model: nn.Module, learning_rate: float, device: torch.device) -> Step:
    """Returns the training step without the compiler."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: Tensor = model(**batch.inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Instructions for one process."""

    name: str
    """`RECIPE`, `EAGER`, or settings as `CompileSettings.key` spells them."""
    mode: str
    """Mode of the recipe."""
    size: str
    device: str


@dataclass(slots=True, kw_only=True)
class Contestant:
    """A process and its reports."""

    label: str
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    facts: dict[str, Any] = field(default_factory=dict)
    passes_ms: list[float] = field(default_factory=list)  # milliseconds of each pass over the pool
    left_out: str | None = None  # why it is no longer used

    @property
    def rates(self) -> list[float]:
        """Samples per second of each pass."""
        return [1e3 * self.facts["samples"] / pass_ms for pass_ms in self.passes_ms]


class LeftOut(Exception):
    """A contestant failed or was not done in time."""


def compete(job: Job, pipe: Connection) -> None:
    """Runs in a process: builds, and then warms up or times a pass on request."""
    os.setpgrp()  # so that its children end with it
    device = torch.device(job.device)
    workload = Captioning(job.size, 0)
    try:
        with _built(job, workload, device) as (step, policy, visits):
            pool = workload.pool(policy, rank=0, device=device)
            built = {"mean_length": statistics.fmean(batch.length for batch in pool), "batch_size": workload.batch_size}
            pipe.send(("built", {**built, "samples": sum(batch.samples for batch in pool)}))
            while word := pipe.recv():  # None at the end
                if word == "warm":
                    batches = _every_length(workload, policy, pool, device)
                    pipe.send((word, _warm_up(step, [pool[0], *batches * visits], pipe, device)))
                else:
                    pipe.send((word, _timed(step, pool, device)))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"))
        raise


@contextlib.contextmanager
def _built(job: Job, workload: Captioning, device: torch.device) -> Iterator[tuple[Step, ShapePolicy, int]]:
    """Yields the step, the padding policy, and how often a length must occur until nothing is left to compile or capture."""
    torch.manual_seed(workload.seed)
    if job.name in (RECIPE, EAGER):
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gives NaN here (docs/log.md)
        model = workload.build_model().to(device)
        policy = PadToLongest(max_length=workload.max_length, multiple=PAD_MULTIPLE)
        if job.name == EAGER:
            yield eager_step(model, workload.learning_rate, device), policy, 2
        else:
            yield recipe_step(model, workload.learning_rate, job.mode, device), policy, 3 if job.mode == "max-autotune" else 2
        return
    settings = CompileSettings.parse(job.name)
    with workload.process_settings():
        model = workload.build_model().to(device)
        optimizer = workload.optimizer(model, settings.optimizer)
        with applied(prepare(workload, settings, device), model, optimizer) as step:
            yield step, settings.shape_policy(workload.max_length), 3 if settings.claims_cudagraphs else 2


def _every_length(workload: Captioning, policy: ShapePolicy, pool: Sequence[Batch], device: torch.device) -> list[Batch]:
    by_length = {batch.length: batch for batch in pool}
    for length in policy.lengths():
        if length not in by_length:
            by_length[length] = workload.batch_of_length(length, rank=0, device=device)
    return [by_length[length] for length in policy.lengths()]


def _warm_up(step: Step, batches: Sequence[Batch], pipe: Connection, device: torch.device) -> dict[str, Any]:
    """Steps on these batches; the compiler takes the first one's length as typical."""
    began = told = time.perf_counter()
    first_step_s = 0.0
    for index, batch in enumerate(batches):
        float(step(batch))  # waits for the device
        now = time.perf_counter()
        first_step_s = first_step_s or now - began
        if now - told > 5:
            pipe.send(("progress", f"{index + 1} of {len(batches)} steps, at {batch.length} tokens, after {now - began:.0f} s"))
            told = now
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    warmup_s = time.perf_counter() - began
    return {"first_step_s": first_step_s, "warmup_s": warmup_s, "graphs": counters["stats"]["unique_graphs"]}


def _timed(step: Step, pool: Sequence[Batch], device: torch.device) -> dict[str, Any]:
    """Times one pass, after a step that is not timed."""
    cuda = device.type == "cuda"
    step(pool[-1])
    losses = []
    marks: list[Any] = [_mark() if cuda else time.perf_counter()]
    for batch in pool:
        losses.append(step(batch))
        marks.append(_mark() if cuda else time.perf_counter())
    loss = torch.stack(losses).float()
    if cuda:
        torch.cuda.synchronize()
    step_ms = [before.elapsed_time(after) if cuda else 1e3 * (after - before) for before, after in pairwise(marks)]
    return {
        "pass_ms": math.fsum(step_ms),
        "median_step_ms": statistics.median(step_ms),
        "mean_loss": float(loss.mean()) if loss.isfinite().all() else None,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
    }


def _mark() -> Any:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def main() -> int:
    """Runs the command; returns its exit code: 1 if there is nothing to compare with."""
    options, settings = _options()
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = {RECIPE: f"{RECIPE}, {options.mode}", EAGER: EAGER, **{one.key: one.label for one in settings}}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with contextlib.ExitStack() as running:
        caches = (
            options.caches.resolve()
            if options.caches
            else Path(running.enter_context(tempfile.TemporaryDirectory(prefix="compile-sweep-recipe-")))
        )
        contestants = [
            running.enter_context(_process(Job(name=name, mode=options.mode, size=options.size, device=device), label, folder))
            for (name, label), folder in zip(
                names.items(), (caches / f"{options.mode}-{i}" for i in range(len(names))), strict=True
            )
        ]
        _run(contestants, options, began, lambda text: print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True))
        found = [{"name": name, **_found(one, contestants[0])} for name, one in zip(names, contestants, strict=True)]
    write_json(options.output, {"environment": fingerprint().to_dict(), "mode": options.mode, "contestants": found})
    print("", *map(_line, found), sep="\n")
    return 0 if contestants[0].passes_ms else 1


def _options() -> tuple[argparse.Namespace, list[CompileSettings]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes.source_recipe", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--mode", choices=("default", "max-autotune"), default="default", help="of the recipe")
    parser.add_argument("--beside", action="append", default=[], metavar="SPELLED", help="settings to run beside it; repeatable")
    parser.add_argument("--size", choices=Captioning.sizes, default=Captioning.sizes[0])
    parser.add_argument("--rounds", type=int, choices=range(2, len(_T975) + 1), default=4, help="passes of each, in turn")
    parser.add_argument("--budget-s", type=float, default=460.0, help="seconds in all")
    parser.add_argument("--caches", type=Path, help="a folder that keeps what is compiled; warm-ups are then not cold")
    options = parser.parse_args()
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder")
    try:
        settings = [CompileSettings.parse(text) for text in options.beside]
        for one in settings:
            one.validate_for(Captioning(options.size, 0).max_length)
    except SettingsError as error:
        parser.error(str(error))
    return options, settings


def _run(contestants: Sequence[Contestant], options: argparse.Namespace, began: float, say: Say) -> None:
    """Warms all up, one after another, and times them in turn; stores the results in each."""
    warm_until = began + max(options.budget_s - TIMING_S, options.budget_s / 2)
    for one in contestants:
        with _left_out(one, say):
            one.facts |= _answer(one, None, warm_until, say)
            say(f"{one.label}: built, mean length {one.facts['mean_length']:.1f}")
    for one in contestants:
        with _left_out(one, say):
            one.facts |= _answer(one, "warm", warm_until, say)
            say(f"{one.label}: warm after {one.facts['warmup_s']:.1f} s")
    for number in range(1, options.rounds + 1):
        for one in contestants:
            with _left_out(one, say):
                told = _answer(one, "timed", began + options.budget_s, say)
                one.passes_ms.append(told.pop("pass_ms"))
                one.facts |= told
                say(f"round {number}: {one.label}: {one.rates[-1]:.1f} samples/s")
    for one in contestants:
        if one.left_out is None:
            one.pipe.send(None)
            one.process.join(10)


@contextlib.contextmanager
def _left_out(one: Contestant, say: Say) -> Iterator[None]:
    """Ends a contestant that fails inside, and records why; does nothing for one that failed before."""
    try:
        yield
    except LeftOut as why:
        if one.left_out is None:
            one.left_out = str(why)
            say(f"{one.label}: left out: {why}")
            _end(one.process)


def _answer(one: Contestant, word: str | None, until: float, say: Say) -> dict[str, Any]:
    """Returns the process's answer to the word; without a word, its next message.

    Raises:
        LeftOut: It failed, now or earlier, or took too long.
    """
    if one.left_out is not None:
        raise LeftOut(one.left_out)
    try:
        if word is not None:
            one.pipe.send(word)
        while one.pipe.poll(max(0.0, until - time.monotonic())):
            kind, told = one.pipe.recv()
            if kind == "failed":
                raise LeftOut(told)
            if kind != "progress":
                answer: dict[str, Any] = told
                return answer
            say(f"{one.label}: {told}")
    except (EOFError, OSError):
        raise LeftOut("its process ended") from None
    raise LeftOut(f"not {word or 'built'} within the budget")


@contextlib.contextmanager
def _process(job: Job, label: str, caches: Path) -> Iterator[Contestant]:
    """Yields a new process with compile caches of its own; ends it and its children with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=compete, args=(job, there))
    # Set here for that process to inherit: torch may read them on import.
    os.environ.update(compile_cache_env(caches))
    process.start()
    there.close()
    try:
        yield Contestant(label=label, process=process, pipe=here)
    finally:
        _end(process)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not lead a group yet
    process.join()


def _found(one: Contestant, recipe: Contestant) -> dict[str, Any]:
    """Returns a contestant's entry in the JSON."""
    values: dict[str, Any] = {"label": one.label, "left_out": one.left_out, **one.facts, "passes_ms": one.passes_ms}
    if one.passes_ms:
        rate = 1e3 * one.facts["samples"] / statistics.fmean(one.passes_ms)
        values |= {"samples_per_s": rate, "steps_per_s": rate / one.facts["batch_size"]}
    # Passes of one round are close in time, so that a clock that drifts cancels.
    logs = [math.log(ours / theirs) for ours, theirs in zip(one.rates, recipe.rates, strict=False)]
    if one is not recipe and len(logs) > 1:
        mean, half = statistics.fmean(logs), _T975[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
        values |= {"over_recipe": math.exp(mean), "over_recipe_ci95": [math.exp(mean - half), math.exp(mean + half)]}
    return values


def _line(one: dict[str, Any]) -> str:
    if not one["passes_ms"]:
        return f"{one['label']}: left out: {one['left_out']}"
    words = [f"{one['steps_per_s']:.2f} steps/s", f"{one['samples_per_s']:.1f} samples/s", f"length {one['mean_length']:.1f}"]
    words += [f"{one['graphs']} graphs", f"warm-up {one['warmup_s']:.1f} s"]
    if one["mean_loss"] is None:
        words.append("a loss is not finite")
    if "over_recipe" in one:
        low, high = one["over_recipe_ci95"]
        words.append(f"{one['over_recipe']:.3f}× the recipe [{low:.3f}, {high:.3f}]")
    return f"{one['label']}: {', '.join(words)}"


if __name__ == "__main__":
    sys.exit(main())
