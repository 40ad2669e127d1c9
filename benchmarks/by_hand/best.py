"""The best that an expert writes by hand, lever by lever, for the jobs of the workloads `gpt2` (small) and `resnet` (resnet50).

Background: a sweep of ten minutes is worth its time only if it finds what an expert would have found. Each way below is plain
torch, on the same model, batches, autocast and optimizer as the workload, and uses the levers that a sweep has: CUDA graphs,
fused and compiled optimizers, memory format, attention kernels, tuning. `benchmarks.ten_minutes` runs both on one machine.

Output: a line of JSON for each way: samples/s over the timed steps, and seconds to the end of the first step. A way runs in a
process of its own, so that nothing compiled is left over from the one before.

    python -m benchmarks.by_hand.best gpt2 [--way NAME ...] [--tiny]
    python -m benchmarks.by_hand.best resnet [--way NAME ...] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

Batch = dict[str, Tensor]
Way = Mapping[str, Any]
"""`compile`: arguments of `torch.compile` for model and loss; `optimizer`: fused or compiled; `channels_last`; `cudnn`."""

GRAPHS = {"mode": "reduce-overhead"}
TUNED = {"options": {"max_autotune": True, "triton.cudagraphs": True}}  # without the coordinate descent of mode=max-autotune
COMPILED: Mapping[str, Way] = {
    "compiled, fused": {"compile": {}, "optimizer": "fused"},
    "CUDA graphs, fused": {"compile": GRAPHS, "optimizer": "fused"},
    "CUDA graphs, compiled optimizer": {"compile": GRAPHS, "optimizer": "compiled"},
    "CUDA graphs, fused, tuned": {"compile": TUNED, "optimizer": "fused"},
}
WAYS: Mapping[str, Mapping[str, Way]] = {
    "gpt2": {
        "eager": {},
        "eager, fused": {"optimizer": "fused"},
        **COMPILED,
        "CUDA graphs, fused, cuDNN attention": {"compile": GRAPHS, "optimizer": "fused", "cudnn": True},
    },
    "resnet": {
        "eager": {},
        "eager, channels_last, fused": {"optimizer": "fused", "channels_last": True},
        "CUDA graphs, fused, contiguous": COMPILED["CUDA graphs, fused"],
        **{f"{name}, channels_last": {**way, "channels_last": True} for name, way in COMPILED.items()},
    },
}


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    batches: Sequence[Batch]
    make_optimizer: Callable[..., torch.optim.Optimizer]


def gpt2(device: torch.device, *, tiny: bool) -> Job:
    """Returns GPT-2 small on 20 batches of 4 × 256 random tokens, trained by Adam, as the workload."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, vocabulary, rows, length = (2, 64, 2, 128, 2, 32) if tiny else (12, 768, 12, 50257, 4, 256)
    shape = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **shape)).to(device).train()
    drawn = [torch.randint(vocabulary, (rows, length + 1), device=device) for _ in range(20)]
    batches = [{"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()} for ids in drawn]

    def loss(batch: Batch) -> Tensor:
        logits = model(input_ids=batch["ids"], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    return Job(model, loss, batches, lambda **options: torch.optim.Adam(model.parameters(), lr=1e-4, **options))


def resnet(device: torch.device, *, tiny: bool) -> Job:
    """Returns ResNet-50 on 6 batches of 128 random images of 224 pixels, trained by SGD with momentum, as the workload."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"layer_type": "basic", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "num_labels": 5}
    model = ResNetForImageClassification(ResNetConfig(**(small if tiny else {"num_labels": 1000}))).to(device).train()
    rows, pixels, classes = (4, 32, 5) if tiny else (128, 224, 1000)
    batches = [
        {
            "images": torch.randn(rows, 3, pixels, pixels, device=device),
            "labels": torch.randint(classes, (rows,), device=device),
        }
        for _ in range(6)
    ]

    def loss(batch: Batch) -> Tensor:
        return cross_entropy(model(pixel_values=batch["images"]).logits.float(), batch["labels"])

    recipe = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    return Job(model, loss, batches, lambda **options: torch.optim.SGD(model.parameters(), **recipe, **options))


JOBS = {"gpt2": gpt2, "resnet": resnet}


def step_of(job: Job, way: Way, device: torch.device) -> Callable[[Batch], None]:
    """Returns a function that trains one step in this way."""
    fused = way.get("optimizer") == "fused"
    optimizer = job.make_optimizer(**({"fused": True} if fused else {"foreach": True}))
    loss_of = torch.compile(job.loss, **way["compile"]) if "compile" in way else job.loss
    update = torch.compile(optimizer.step) if way.get("optimizer") == "compiled" else optimizer.step

    def step(batch: Batch) -> None:
        if "compile" in way and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(batch)
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(job: Job, way: Way, device: torch.device, *, least_s: float) -> dict[str, float]:
    """Returns samples/s over whole passes through the batches, and seconds to the end of the first step.

    Args:
        job: what is trained.
        way: how.
        device: on what.
        least_s: time steps for at least this long, after warming up for as long as it takes to see each batch three times.
    """
    batches = list(job.batches)
    if way.get("channels_last"):
        job.model.to(memory_format=torch.channels_last)
        batches = [{name: in_channels_last(tensor) for name, tensor in batch.items()} for batch in batches]
    rows = len(next(iter(batches[0].values())))
    step = step_of(job, way, device)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if way.get("cudnn") else nullcontext():
        began = time.perf_counter()
        step(batches[0])
        wait(device)
        first_step_s = time.perf_counter() - began
        for batch in batches * 3:
            step(batch)
        wait(device)
        began, num_steps = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - began) < least_s:
            for batch in batches:
                step(batch)
            wait(device)
            num_steps += len(batches)
        elapsed_s = time.perf_counter() - began
    return {"samples_per_s": round(rows * num_steps / elapsed_s, 1), "first_step_s": round(first_step_s, 1)}


def in_channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def wait(device: torch.device) -> None:
    """Waits until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_alone(name: str, way: str, *, tiny: bool, least_s: float) -> None:
    """Measures one way in this process and prints its line."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = measure(JOBS[name](device, tiny=tiny), WAYS[name][way], device, least_s=least_s)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"job": name, "way": way, "card": card, "torch": torch.__version__, **figures}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--way", nargs="*", help="names of ways; by default all of them")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, to try this program")
    parser.add_argument("--least-s", type=float, default=4.0, help="seconds that steps are timed for")
    parser.add_argument("--here", action="store_true", help="measure the one way in this process")
    options = parser.parse_args()
    chosen = options.way or list(WAYS[options.job])
    if unknown := sorted(set(chosen) - WAYS[options.job].keys()):
        parser.error(f"no way is called {unknown[0]!r}; use one of {'; '.join(WAYS[options.job])}")
    if options.here:
        run_alone(options.job, chosen[0], tiny=options.tiny, least_s=options.least_s)
        return 0
    failed = 0
    for way in chosen:
        words = [sys.executable, "-m", "benchmarks.by_hand.best", options.job, "--way", way, "--here"]
        words += ["--least-s", str(options.least_s), *(["--tiny"] if options.tiny else [])]
        failed += subprocess.run(words, check=False).returncode != 0
    return 1 if failed == len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
