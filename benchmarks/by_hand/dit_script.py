"""A diffusion transformer trained as people write it: adaptive layer norms, bf16 autocast, AdamW, an average of the weights.

`python dit_script.py [--compile [--mode MODE]] [--fused] [--foreach-average] [--steps N]`: a DiT of 12 layers and width 384 on
batches of 128 latents of 4 × 32 × 32 in patches of 2, with classes dropped at random for guidance. The last line is the mean step
after the first third of the steps, by this script's own clock.
"""

import argparse
import copy
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--pixels", type=int, default=32)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--foreach-average", action="store_true")
args = parser.parse_args()


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, width, frequencies=256):
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t):
        half = self.frequencies // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half).to(device=t.device)
        angles = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))


class LabelEmbedder(nn.Module):
    def __init__(self, classes, width, dropout=0.1):
        super().__init__()
        self.table = nn.Embedding(classes + 1, width)
        self.classes = classes
        self.dropout = dropout

    def forward(self, labels, train):
        if train and self.dropout > 0:
            dropped = torch.rand(labels.shape[0], device=labels.device) < self.dropout
            labels = torch.where(dropped, self.classes, labels)
        return self.table(labels)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiT(nn.Module):
    def __init__(self, pixels, patch, channels, width, layers, heads, classes):
        super().__init__()
        self.patch, self.side = patch, pixels // patch
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.time = TimestepEmbedder(width)
        self.label = LabelEmbedder(classes, width)
        self.position = nn.Parameter(torch.zeros(1, self.side**2, width), requires_grad=False)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch * patch * channels)
        nn.init.normal_(self.position, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.modulation[-1].weight)
            nn.init.zeros_(block.modulation[-1].bias)

    def forward(self, x, t, y):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        c = self.time(t) + self.label(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        x = x.reshape(len(x), self.side, self.side, self.patch, self.patch, -1)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), -1, self.side * self.patch, self.side * self.patch)


class Diffusion:
    def __init__(self, steps=1000, device="cpu"):
        self.steps = steps
        betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
        self.alphas = torch.cumprod(1 - betas, dim=0).float().to(device)

    def training_loss(self, model, x, t, y):
        noise = torch.randn_like(x)
        a = self.alphas[t][:, None, None, None]
        predicted = model(a.sqrt() * x + (1 - a).sqrt() * noise, t, y)
        return ((predicted.float() - noise) ** 2).mean(dim=[1, 2, 3])


@torch.no_grad()
def update_average(average, model, decay=0.9999):
    if args.foreach_average:
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        return
    parameters = dict(model.named_parameters())
    for name, parameter in average.named_parameters():
        parameter.mul_(decay).add_(parameters[name].data, alpha=1 - decay)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    model = DiT(args.pixels, 2, 4, args.width, args.layers, args.heads, args.classes).to(device)
    average = copy.deepcopy(model)
    for parameter in average.parameters():
        parameter.requires_grad_(False)
    average.eval()
    diffusion = Diffusion(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=args.fused or None)
    update_average(average, model, decay=0)
    compiled = torch.compile(model, mode=args.mode) if args.compile else model
    compiled.train()
    latents = torch.randn(8 * args.batch, 4, args.pixels, args.pixels, device=device)
    classes = torch.randint(args.classes, (8 * args.batch,), device=device)

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    began, running = 0.0, 0.0
    for step in range(args.steps):
        if step == args.steps // 3:
            wait()
            began = time.perf_counter()
        place = step % 8 * args.batch
        x, y = latents[place : place + args.batch], classes[place : place + args.batch]
        t = torch.randint(0, diffusion.steps, (x.shape[0],), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = diffusion.training_loss(compiled, x, t, y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_average(average, model)
        running += loss.item()
    wait()
    print(f"loss {running / args.steps:.4f}")
    print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")


if __name__ == "__main__":
    main()
