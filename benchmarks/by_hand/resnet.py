"""ResNet-50 as a person would tune it by hand: what a sweep of the workload `resnet` has to find.

Background: on one H100 a ResNet-50 of timm trained 2,147 images/s eagerly, 3,684 with one line of channels_last, and 5,444
compiled with CUDA graphs too. The default recipe found 3,254, because it tried no memory format.

Output: a line of JSON for each way: images/s by the median of steps timed with CUDA events, and seconds to the first step's end.

    python -m benchmarks.by_hand.resnet [--batch-size 128] [--only NAME]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

import torch
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification

WAYS: dict[str, dict[str, object]] = {
    "eager": {},
    "eager, channels_last": {"channels_last": True},
    "compiled, channels_last": {"channels_last": True, "compile": {}},
    "compiled with CUDA graphs, channels_last": {"channels_last": True, "compile": {"mode": "reduce-overhead"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--only", choices=WAYS)
    options = parser.parse_args()
    for name, way in WAYS.items():
        if options.only in (None, name):
            torch._dynamo.reset()
            print(json.dumps({"way": name, "card": torch.cuda.get_device_name(), **measure(options.batch_size, way)}), flush=True)


def measure(batch_size: int, way: dict[str, object], warm_up: int = 20, timed: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).cuda().train()
    images = torch.randn(batch_size, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (batch_size,), device="cuda")
    if way.get("channels_last"):
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=True)

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(pixel_values=images).logits.float(), labels)

    forward = loss_of if "compile" not in way else torch.compile(loss_of, **way["compile"])  # type: ignore[arg-type]

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.monotonic()
    step()
    torch.cuda.synchronize()
    first_step_s = time.monotonic() - began
    for _ in range(warm_up):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    step_ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {"images_per_s": round(1000 * batch_size / step_ms, 1), "first_step_s": round(first_step_s, 1)}


if __name__ == "__main__":
    main()
