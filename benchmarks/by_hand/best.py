"""The best that an expert writes by hand, lever by lever.

The jobs are those of the workloads `gpt2` (small), `resnet` (resnet50), `segmentation` (b0) and `captioning` (base), and the
scripts beside this one and in `frozen_networks`, which have the levers as options.

Background: a sweep of ten minutes is worth its time only if it finds what an expert would have found. Each way below is plain
torch, on the same model, batches, autocast and optimizer as the workload, and uses the levers that a sweep has: CUDA graphs,
fused and compiled optimizers, memory format, attention kernels, tuning. `benchmarks.recipes.ten_minutes` runs both on one
machine.

Output: a line of JSON for each way: samples/s over the timed steps, and seconds to the end of the first step. A way runs in a
process of its own, so that nothing compiled is left over from the one before.

    python -m benchmarks.by_hand.best JOB [--way NAME ...] [--tiny]
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from compile_sweep.contract.base import load_workload
from compile_sweep.schema.settings import CompileSettings

Batch = dict[str, Tensor]
Way = Mapping[str, Any]
"""`compile`: arguments of `torch.compile` for model and loss; `optimizer`: fused or compiled; `channels_last`; `cudnn`;
`one_graph`: forward, backward and optimizer as one CUDA graph for each shape; `batches`: settings that say how captions are
batched and attended to."""

GRAPHS = {"mode": "reduce-overhead"}
TUNED = {"options": {"max_autotune": True, "triton.cudagraphs": True}}  # without the coordinate descent of mode=max-autotune
COMPILED: Mapping[str, Way] = {
    "compiled, fused": {"compile": {}, "optimizer": "fused"},
    "CUDA graphs, fused": {"compile": GRAPHS, "optimizer": "fused"},
    "CUDA graphs, compiled optimizer": {"compile": GRAPHS, "optimizer": "compiled"},
    "CUDA graphs, fused, tuned": {"compile": TUNED, "optimizer": "fused"},
    "whole step in one CUDA graph, fused": {"compile": {}, "optimizer": "fused", "one_graph": True},
}
# Its guards create more graphs (docs/log.md).
ONE_GRAPH = {"options": {"triton.mix_order_reduction": False, "shape_padding": False}}
GROUPED = "scope=eager,padding=longest,group_window=100,attention=unmasked"
_OF_SCRIPTS: Mapping[str, Way] = {
    "eager": {},
    "eager, fused": {"words": ["--fused"]},
    "compiled, fused": {"words": ["--compile", "--fused"]},
    "CUDA graphs, fused": {"words": ["--compile", "--fused", "--mode", "reduce-overhead"]},
}
_OF_IMAGES: Mapping[str, Way] = {
    "eager": {},
    "eager, fused, channels_last": {"words": ["--fused", "--channels-last"]},
    "compiled, fused": {"words": ["--compile", "--fused"]},
    "compiled, fused, channels_last": {"words": ["--compile", "--fused", "--channels-last"]},
    "CUDA graphs, fused": {"words": ["--compile", "--fused", "--mode", "reduce-overhead"]},
    "CUDA graphs, fused, channels_last": {
        "words": ["--compile", "--fused", "--channels-last", "--mode", "reduce-overhead"],
    },
    "CUDA graphs, fused, channels_last, tuned": {
        "words": ["--compile", "--fused", "--channels-last", "--mode", "max-autotune"],
    },
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
    "segmentation": {
        "eager": {},
        "eager, channels_last, fused": {"optimizer": "fused", "channels_last": True},
        **COMPILED,
        **{f"{name}, channels_last": {**way, "channels_last": True} for name, way in COMPILED.items()},
    },
    "captioning": {
        "eager": {},
        "eager, fused, grouped, unmasked": {"optimizer": "fused", "batches": GROUPED},
        "compiled, fused, grouped, unmasked": {"compile": ONE_GRAPH, "optimizer": "fused", "batches": GROUPED},
        "CUDA graphs, fused, grouped, unmasked": {
            "compile": {"options": {**ONE_GRAPH["options"], "triton.cudagraphs": True}},
            "optimizer": "fused",
            "batches": GROUPED,
        },
        "whole step in one CUDA graph, fused, grouped, unmasked": {
            "compile": ONE_GRAPH,
            "optimizer": "fused",
            "batches": GROUPED,
            "one_graph": True,
        },
    },
    "gpt2_script": {
        **_OF_SCRIPTS,
        "CUDA graphs, fused, tuned": {"words": ["--compile", "--fused", "--mode", "max-autotune"]},
    },
    "clip_script": _OF_SCRIPTS,
    "dit_script": {
        **_OF_SCRIPTS,
        "CUDA graphs, fused, foreach average": {
            "words": ["--compile", "--fused", "--mode", "reduce-overhead", "--foreach-average"],
        },
    },
    "lora_script": {
        "eager": {},
        "eager, fused": {"words": ["--fused"]},
        "compiled blocks, fused": {"words": ["--compile", "--blocks", "--fused"]},
        "compiled, fused": {"words": ["--compile", "--fused"]},
        "CUDA graphs, fused": {"words": ["--compile", "--fused", "--mode", "reduce-overhead", "--keep-gradients"]},
        "compiled, fused, nothing recomputed": {"words": ["--compile", "--fused", "--no-checkpointing"]},
        "blocks with CUDA graphs, fused, nothing recomputed": {
            "words": ["--compile", "--blocks", "--fused", "--mode", "reduce-overhead", "--keep-gradients", "--no-checkpointing"],
        },
    },
    "convnext_script": _OF_IMAGES,
    "unet_script": _OF_IMAGES,
    "unet3d_script": _OF_IMAGES,
    "trainer_script": _OF_SCRIPTS,
    "tabular_script": {
        **_OF_SCRIPTS,
        "CUDA graphs, compiled optimizer": {"words": ["--compile", "--mode", "reduce-overhead", "--compile-step"]},
    },
    "bert_script": {
        "eager": {},
        "eager, fused": {"words": ["--fused"]},
        "compiled, fused": {"words": ["--compile", "--fused"]},
        "compiled, dynamic, fused": {"words": ["--compile", "--dynamic", "--fused"]},
        "compiled, multiples of 64, fused": {"words": ["--compile", "--multiple", "64", "--fused"]},
        "CUDA graphs, multiples of 64, fused": {
            "words": ["--compile", "--mode", "reduce-overhead", "--multiple", "64", "--fused"],
        },
        "eager, fused, no cuDNN attention": {"words": ["--fused", "--no-cudnn"]},
        "compiled, dynamic, fused, no cuDNN attention": {"words": ["--compile", "--dynamic", "--fused", "--no-cudnn"]},
        "CUDA graphs, multiples of 64, fused, no cuDNN attention": {
            "words": ["--compile", "--mode", "reduce-overhead", "--multiple", "64", "--fused", "--no-cudnn"],
        },
    },
    "t5_script": {
        "eager": {},
        "eager, fused, no cuDNN attention": {"words": ["--fused", "--no-cudnn"]},
        "compiled, dynamic, fused, no cuDNN attention, no cache": {
            "words": ["--compile", "--dynamic", "--fused", "--no-cudnn", "--no-cache"],
        },
        "compiled, multiples of 64, fused, no cuDNN attention, no cache": {
            "words": ["--compile", "--multiple", "64", "--fused", "--no-cudnn", "--no-cache"],
        },
        "CUDA graphs, multiples of 64, fused, no cuDNN attention, no cache": {
            "words": ["--compile", "--mode", "reduce-overhead", "--multiple", "64", "--fused", "--no-cudnn", "--no-cache"],
        },
        "compiled blocks, dynamic, fused, no cuDNN attention": {
            "words": ["--compile", "--blocks", "--dynamic", "--fused", "--no-cudnn"],
        },
    },
    "whisper_script": {
        "eager": {},
        "eager, fused, no cuDNN attention": {"words": ["--fused", "--no-cudnn"]},
        "compiled, multiples of 64, fused, no cache": {"words": ["--compile", "--multiple", "64", "--fused", "--no-cache"]},
        "CUDA graphs, multiples of 64, fused, no cache": {
            "words": ["--compile", "--mode", "reduce-overhead", "--multiple", "64", "--fused", "--no-cache"],
        },
    },
    "moe_script": {
        **_OF_SCRIPTS,
        "compiled blocks, fused": {"words": ["--compile", "--blocks", "--fused"]},
        "compiled blocks, fused, experts cast": {"words": ["--compile", "--blocks", "--fused", "--experts-by", "cast"]},
        "CUDA graphs, fused, experts cast": {
            "words": ["--compile", "--fused", "--mode", "reduce-overhead", "--experts-by", "cast"]
        },
    },
    "distill_script": {
        **_OF_IMAGES,
        "student with CUDA graphs, fused, channels_last": {
            "words": ["--compile", "--fused", "--channels-last", "--mode", "reduce-overhead", "--only-student"],
        },
    },
    "dino_script": _OF_SCRIPTS,
    "dpo_script": {
        "eager": {},
        "eager, fused, no cuDNN attention": {"words": ["--fused", "--no-cudnn"]},
        "compiled, multiples of 64, fused": {"words": ["--compile", "--multiple", "64", "--fused"]},
        "CUDA graphs, multiples of 64, fused": {
            "words": ["--compile", "--mode", "reduce-overhead", "--multiple", "64", "--fused"],
        },
    },
    "vlm_script": {
        "eager": {},
        "eager, fused, no cuDNN attention": {"words": ["--fused", "--no-cudnn"]},
        "compiled, fused, no cuDNN attention": {"words": ["--compile", "--fused", "--no-cudnn"]},
        "CUDA graphs, multiples of 64, fused": {
            "words": ["--compile", "--mode", "reduce-overhead", "--multiple", "64", "--fused"],
        },
    },
    "gan_script": {
        **_OF_IMAGES,
        "generator compiled, fused, channels_last": {"words": ["--compile", "--only-generator", "--fused", "--channels-last"]},
        "generator with CUDA graphs, fused, channels_last": {
            "words": ["--compile", "--only-generator", "--fused", "--channels-last", "--mode", "reduce-overhead"],
        },
    },
    "llama_script": {
        "eager": {},
        "eager, fused": {"words": ["--fused"]},
        "compiled, fused": {"words": ["--compile", "--fused"]},
        "CUDA graphs, fused": {"words": ["--compile", "--fused", "--mode", "reduce-overhead", "--keep-gradients"]},
        "CUDA graphs, fused, tuned": {"words": ["--compile", "--fused", "--mode", "max-autotune", "--keep-gradients"]},
    },
}
_TINY_LANGUAGE = {"layers": 2, "heads": 2, "width": 32, "length": 32, "batch": 2, "vocabulary": 128, "steps": 9}
SCRIPTS: Mapping[str, tuple[int, int, Mapping[str, int]]] = {
    "gpt2_script": (16, 2, _TINY_LANGUAGE),
    "convnext_script": (128, 2, {"width": 8, "depth": 1, "pixels": 64, "batch": 2, "classes": 5, "steps": 9}),
    "llama_script": (16, 4, _TINY_LANGUAGE),
    "unet_script": (64, 2, {"width": 16, "pixels": 16, "batch": 2, "steps": 9}),
    "unet3d_script": (2, 2, {"width": 4, "levels": 3, "voxels": 16, "batch": 2, "steps": 9}),
    "trainer_script": (
        64,
        2,
        {"layers": 2, "heads": 2, "width": 32, "pixels": 32, "batch": 2, "classes": 5, "steps": 9},
    ),
    "tabular_script": (2048, 16, {"categories": 3, "entries": 20, "width": 4, "batch": 16, "steps": 9}),
    "bert_script": (32, 2, _TINY_LANGUAGE),
    "t5_script": (16, 2, _TINY_LANGUAGE),
    "whisper_script": (16, 2, {**_TINY_LANGUAGE, "frames": 64}),
    "moe_script": (4, 2, _TINY_LANGUAGE),
    "distill_script": (128, 2, {"width": 4, "pixels": 32, "batch": 2, "classes": 10, "steps": 9}),
    "dino_script": (32, 2, {"layers": 2, "heads": 2, "width": 32, "batch": 2, "prototypes": 64, "steps": 9}),
    "dpo_script": (16, 4, _TINY_LANGUAGE),
    "vlm_script": (16, 2, {**_TINY_LANGUAGE, "pixels": 32}),
    "gan_script": (128, 2, {"width": 4, "pixels": 32, "batch": 2, "steps": 9}),
    "clip_script": (256, 2, {**_TINY_LANGUAGE, "pixels": 32}),
    "dit_script": (128, 2, {"layers": 2, "heads": 2, "width": 32, "pixels": 8, "batch": 2, "classes": 5, "steps": 9}),
    "lora_script": (16, 8, {**_TINY_LANGUAGE, "heads": 4}),
}
"""Samples of a step of each script beside this file, those with a tiny model, and the words for that."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    batches: Sequence[Batch]
    make_optimizer: Callable[..., torch.optim.Optimizer]
    changing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Dimensions that change between batches, by tensor."""


def gpt2(device: torch.device, way: Way, *, tiny: bool) -> Job:
    """Returns GPT-2 small on 20 batches of 4 × 256 random tokens, trained by Adam, like the workload."""
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


def resnet(device: torch.device, way: Way, *, tiny: bool) -> Job:
    """Returns ResNet-50 on 6 batches of 128 random images of 224 pixels, trained by SGD with momentum, like the workload."""
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


def segmentation(device: torch.device, way: Way, *, tiny: bool) -> Job:
    """Returns SegFormer b0 on 10 batches of 8 random images of 512 × 1024 pixels, trained by Adam, like the workload."""
    return _of_workload("segmentation", "tiny" if tiny else "b0", device, way)


def captioning(device: torch.device, way: Way, *, tiny: bool) -> Job:
    """Returns the captioning model on the workload's captions, trained by Adam; padded to the longest if `batches` says so."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gives NaN here (docs/log.md)
    return _of_workload("captioning", "tiny" if tiny else "base", device, way)


def _of_workload(name: str, size: str, device: torch.device, way: Way) -> Job:
    """Returns a workload's own model and batches, whose forward is the loss."""
    workload = load_workload(name)(size, 0)
    settings = CompileSettings.parse(str(way.get("batches", "scope=eager")))
    pool = workload.pool(settings.shape_policy(workload.max_length, workload.min_length), rank=0, device=device)
    model = workload.build_model().to(device)
    if settings.attention is not None:
        exec(cleandoc(workload.attention_statement(settings.attention)), {"torch": torch, "inner": model})

    def make_optimizer(**options: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=workload.learning_rate, **options)

    changing = workload.dynamic_dims("") if "batches" in way else {}
    return Job(model, lambda batch: model(**batch), [dict(batch.inputs) for batch in pool], make_optimizer, changing)


JOBS = {"gpt2": gpt2, "resnet": resnet, "segmentation": segmentation, "captioning": captioning}


def step_of(job: Job, way: Way, device: torch.device) -> Callable[[Batch], None]:
    """Returns a function that trains one step in this way."""
    fused = way.get("optimizer") == "fused"
    optimizer = job.make_optimizer(**({"fused": True} if fused else {"foreach": True}))
    for group in optimizer.param_groups:
        if "capturable" in group:  # SGD has nothing on the host
            group["capturable"] = device.type == "cuda" and bool(way.get("one_graph"))
    loss_of = torch.compile(job.loss, **way["compile"]) if "compile" in way else job.loss
    update = torch.compile(optimizer.step) if way.get("optimizer") == "compiled" else optimizer.step

    def step(batch: Batch) -> None:
        for name, dims in job.changing.items():
            for dim in dims:
                torch._dynamo.mark_dynamic(batch[name], dim)
        if "compile" in way and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(batch)
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)

    return captured(step, job.batches) if device.type == "cuda" and way.get("one_graph") else step


def captured(step: Callable[[Batch], None], batches: Sequence[Batch]) -> Callable[[Batch], None]:
    """Returns the step as CUDA graphs in one pool of memory, one for each shape, longest first.

    Args:
        step: Trains on a batch.
        batches: Batches that have every shape.
    """
    shapes = {_shape(batch): batch for batch in batches}
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = {}
    for shape in sorted(shapes, reverse=True):
        inputs = {name: tensor.clone() for name, tensor in shapes[shape].items()}
        with torch.cuda.stream(stream):  # gradients remember the stream they were made on, so warm-up and capture share it
            for _ in range(3):
                step(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            step(inputs)
        graphs[shape] = graph, inputs

    def replay(batch: Batch) -> None:
        graph, inputs = graphs[_shape(batch)]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor)
        graph.replay()

    return replay


def _shape(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in batch.values())


def measure(job: Job, way: Way, device: torch.device, *, least_s: float) -> dict[str, float]:
    """Returns samples/s over whole passes through the batches, and seconds to the end of the first step.

    Args:
        job: What to train.
        way: How to train it.
        device: The device to train on.
        least_s: Minimum seconds of timed steps, after a warm-up that visits each batch three times.
    """
    batches = list(job.batches)
    if way.get("channels_last"):
        job.model.to(memory_format=torch.channels_last)
        batches = [{name: in_channels_last(tensor) for name, tensor in batch.items()} for batch in batches]
    rows = sum(len(next(iter(batch.values()))) for batch in batches) / len(batches)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if way.get("cudnn") else nullcontext():
        began = time.perf_counter()
        step = step_of(replace(job, batches=batches), way, device)
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
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_alone(name: str, way: str, *, tiny: bool, least_s: float) -> None:
    """Measures one way in this process and prints its line."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = measure(JOBS[name](device, WAYS[name][way], tiny=tiny), WAYS[name][way], device, least_s=least_s)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"job": name, "way": way, "card": card, "torch": torch.__version__, **figures}), flush=True)


def run_script(name: str, way: str, *, tiny: bool) -> int:
    """Runs a script as a user would, prints the line with its result, and returns its exit code."""
    samples, tiny_samples, size = SCRIPTS[name]
    words = [*WAYS[name][way].get("words", ()), *(f"--{option}={value}" for option, value in size.items() if tiny)]
    (script,) = Path(__file__).parent.rglob(f"{name}.py")
    run = subprocess.run([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True, check=False)
    if found := re.search(r"([\d.]+) ms a step", run.stdout):
        samples_per_s = round((tiny_samples if tiny else samples) * 1e3 / float(found[1]), 1)
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        told = {"job": name, "way": way, "card": card, "torch": torch.__version__, "samples_per_s": samples_per_s}
        print(json.dumps(told), flush=True)
    return run.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=WAYS)
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
        if options.job in SCRIPTS:
            failed += run_script(options.job, way, tiny=options.tiny) != 0
            continue
        words = [sys.executable, "-m", "benchmarks.by_hand.best", options.job, "--way", way, "--here"]
        words += ["--least-s", str(options.least_s), *(["--tiny"] if options.tiny else [])]
        failed += subprocess.run(words, check=False).returncode != 0
    return 1 if failed == len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
