"""A language model of selective state spaces, as Mamba, whose scan is a loop over the words in Python; bf16 autocast.

`python state_space_script.py [--compile [--mode MODE]] [--fused] [--steps N]`; the last line is the mean step after the first
third of the steps, by this script's own clock.
"""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--state", type=int, default=16)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Mamba(nn.Module):
    def __init__(self, width, state):
        super().__init__()
        inner = 2 * width
        self.rank, self.state = math.ceil(width / 16), state
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.to_scan = nn.Linear(inner, self.rank + 2 * state, bias=False)
        self.to_step = nn.Linear(self.rank, inner)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, width, bias=False)

    def scan(self, x):
        step, into, out = self.to_scan(x).split([self.rank, self.state, self.state], -1)
        step = F.softplus(self.to_step(step)).float()
        decay = torch.exp(step[..., None] * -torch.exp(self.log_decay))
        given = step[..., None] * into[:, :, None].float() * x[..., None].float()
        state, found = torch.zeros_like(given[:, 0]), []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + given[:, at]
            found.append((state * out[:, at, None].float()).sum(-1))
        return torch.stack(found, 1) + x * self.skip

    def forward(self, x):
        x, gate = self.enter(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return self.leave(self.scan(x) * F.silu(gate))


class Block(nn.Module):
    def __init__(self, width, state):
        super().__init__()
        self.norm, self.mixer = RMSNorm(width), Mamba(width, state)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.state) for _ in range(args.layers))
        self.norm, self.head = RMSNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=args.fused or None)
if args.compile:
    model.compile(mode=args.mode)
data = torch.randint(args.vocabulary, (1_000_000,))


def batch():
    starts = torch.randint(len(data) - args.length - 1, (args.batch,))
    rows = torch.stack([data[at : at + args.length + 1] for at in starts])
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    words, following = batch()
    with torch.autocast(device, dtype=torch.bfloat16):
        found = model(words)
        loss = F.cross_entropy(found.flatten(0, 1), following.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
