"""A distillation as people write it: a frozen teacher, a student, bf16 autocast, SGD with momentum, one cycle of rates.

`python distill_script.py [--compile [--mode MODE] [--only-student]] [--fused] [--channels-last] [--steps N]`: transformers'
ResNet-18 learns from a ResNet-50 on batches of 128 images of 224 pixels. The last line is the mean step after the first third of
the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--pixels", type=int, default=224)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--only-student", action="store_true")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layout = torch.channels_last if args.channels_last else torch.contiguous_format


def resnet(depths, layer_type, expansion):
    widths = [expansion * args.width * 2**stage for stage in range(4)]
    config = ResNetConfig(
        embedding_size=args.width, hidden_sizes=widths, depths=depths, layer_type=layer_type, num_labels=args.classes
    )
    return ResNetForImageClassification(config).to(device, memory_format=layout)


teacher = resnet([3, 4, 6, 3], "bottleneck", 4).eval()
student = resnet([2, 2, 2, 2], "basic", 1).train()
optimizer = torch.optim.SGD(
    student.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=args.fused or None
)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=args.steps)
if args.compile:
    for model in [student] if args.only_student else [student, teacher]:
        model.compile(mode=args.mode)
batches = [
    (
        torch.randn(args.batch, 3, args.pixels, args.pixels, device=device).to(memory_format=layout),
        torch.randint(args.classes, (args.batch,), device=device),
    )
    for _ in range(6)
]
temperature = 4.0


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    images, labels = batches[step % len(batches)]
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.no_grad():
            expected = teacher(pixel_values=images).logits.clone()  # CUDA graphs may overwrite it
        logits = student(pixel_values=images).logits
        soft = nn.functional.kl_div(
            nn.functional.log_softmax(logits / temperature, dim=1),
            nn.functional.log_softmax(expected / temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        loss = 0.3 * nn.functional.cross_entropy(logits, labels) + 0.7 * temperature**2 * soft
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
