"""Contrastive training of images and texts as people write it: two encoders, fp16 autocast with a GradScaler, AdamW, a schedule.

`python clip_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: a ViT-S/16 and a text transformer of 12 layers and width
384 on batches of 256 pairs. Each encoder is compiled separately, as it is called separately. The last line is the mean step after
the first third of the steps, by this script's own clock.
"""

import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--pixels", type=int, default=224)
parser.add_argument("--length", type=int, default=77)
parser.add_argument("--vocabulary", type=int, default=49408)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width, heads, mask=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), QuickGELU(), nn.Linear(4 * width, width))
        self.attn_mask = mask

    def attention(self, x):
        mask = self.attn_mask.to(dtype=x.dtype, device=x.device) if self.attn_mask is not None else None
        return self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    def __init__(self, pixels, patch, width, layers, heads, out):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        scale = width**-0.5
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(scale * torch.randn((pixels // patch) ** 2 + 1, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(width, heads) for _ in range(layers)])
        self.proj = nn.Parameter(scale * torch.randn(width, out))

    def forward(self, x):
        x = self.conv1(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        first = self.class_embedding.to(x.dtype) + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.cat([first, x], dim=1) + self.positional_embedding.to(x.dtype)
        x = self.resblocks(self.ln_pre(x))
        return self.ln_post(x[:, 0, :]) @ self.proj


class TextTransformer(nn.Module):
    def __init__(self, vocabulary, length, width, layers, heads, out):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(length, width))
        mask = torch.full((length, length), float("-inf")).triu_(1)
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(width, heads, mask) for _ in range(layers)])
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, out))

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.resblocks(x))
        return x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)] @ self.text_projection


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = VisionTransformer(args.pixels, 16, args.width, args.layers, args.heads, 512)
        self.text = TextTransformer(args.vocabulary, args.length, args.width, args.layers, args.heads, 512)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


def clip_loss(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(logits.shape[0], device=logits.device, dtype=torch.long)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
model = CLIP().to(device)
exclude = [p for n, p in model.named_parameters() if p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n]
excluded = {id(p) for p in exclude}
optimizer = torch.optim.AdamW(
    [
        {"params": exclude, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if id(p) not in excluded], "weight_decay": 0.2},
    ],
    lr=5e-4,
    betas=(0.9, 0.98),
    eps=1e-6,
    fused=args.fused or None,
)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
trained = torch.compile(model, mode=args.mode) if args.compile else model
images = [torch.randn(args.batch, 3, args.pixels, args.pixels, device=device) for _ in range(4)]
texts = [torch.randint(args.vocabulary, (args.batch, args.length), device=device) for _ in range(4)]


def assign_learning_rate(step):
    warmup, total = 10, 10 * args.steps
    decayed = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
    lr = 5e-4 * ((step + 1) / warmup if step < warmup else decayed)
    for group in optimizer.param_groups:
        group["lr"] = lr


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    assign_learning_rate(step)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=half):
        loss = clip_loss(*trained(images[step % 4], texts[step % 4]))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
