"""Swin-T of timm as image classifiers are trained: mixup, label smoothing, clipping, a schedule, and averaged weights.

`python swin_script.py [--compile [--mode MODE]] [--fused] [--bf16] [--steps N]`: batches of 128 images of 224 pixels in GPU
memory, stochastic depth, float16 autocast with a gradient scaler. The last line is the mean step after the first third of the
steps, by this script's own clock.
"""

import argparse
import copy
import time

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = timm.create_model(args.model, num_classes=1000, drop_path_rate=0.2).to(device).train()
average = copy.deepcopy(model).eval().requires_grad_(False)
decay, no_decay = [], []
for name, p in model.named_parameters():
    (no_decay if p.ndim <= 1 or "relative_position" in name else decay).append(p)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=5e-4, fused=args.fused or None
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
half = torch.bfloat16 if args.bf16 or device == "cpu" else torch.float16
scaler = torch.amp.GradScaler(device, enabled=half is torch.float16)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)
criterion = SoftTargetCrossEntropy()
if args.compile:
    model.compile(mode=args.mode)
images = [torch.randn(args.batch, 3, args.size, args.size, device=device) for _ in range(4)]
labels = [torch.randint(1000, (args.batch,), device=device) for _ in range(4)]


def wait():
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    x, y = mixup(images[step % 4].clone(), labels[step % 4])
    with torch.autocast(device, dtype=half):
        loss = criterion(model(x), y.to(device))
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.001)
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.1f} images/s, {1e3 * took:.3f} ms a step")
