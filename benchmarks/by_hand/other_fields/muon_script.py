"""A GPT trained with Muon as the speedruns of nanoGPT do: rotary positions, normalized queries and keys, squared ReLU.

`python muon_script.py [--compile [--mode MODE]] [--fused] [--compile-muon | --torch-muon] [--steps N]`: 162 million weights,
batches of 16 × 1,024 tokens, bfloat16 autocast. The blocks' matrices go to a Muon of its own or to torch's, the rest to AdamW.
The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--vocabulary", type=int, default=50304)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-muon", action="store_true")
parser.add_argument("--torch-muon", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


def orthogonalized(update, steps=5):
    """The nearest orthogonal matrix, nearly, by Newton and Schulz's iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    if x.size(0) > x.size(1):
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.size(0) > update.size(1) else x


if args.compile_muon:
    orthogonalized = torch.compile(orthogonalized)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalized(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Rotary(nn.Module):
    def __init__(self, size):
        super().__init__()
        frequencies = 1 / 10000 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(args.length).float(), frequencies)
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, x):
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[:, : x.size(1)], self.sin[:, : x.size(1)]
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        w = args.width
        self.q, self.k, self.v, self.out = (nn.Linear(w, w, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(w, 4 * w, bias=False), nn.Linear(4 * w, w, bias=False)
        self.rotary = Rotary(w // args.heads)
        self.out.weight.data.zero_()
        self.down.weight.data.zero_()

    def forward(self, x):
        batch, length, width = x.shape
        h = norm(x)
        q, k, v = (part(h).view(batch, length, args.heads, -1) for part in (self.q, self.k, self.v))
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight.data.zero_()

    def forward(self, ids, targets):
        x = norm(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        logits = self.head(norm(x)).float()
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


model = GPT().to(device)
adam = torch.optim.AdamW(
    [{"params": [model.tokens.weight], "lr": 0.3}, {"params": [model.head.weight], "lr": 0.002}],
    betas=(0.8, 0.95),
    fused=args.fused or None,
)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0) if args.torch_muon else Muon(matrices)
optimizers = [adam, muon]
schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 250)) for o in optimizers]
if args.compile:
    model = torch.compile(model, mode=args.mode)
batches = [torch.randint(args.vocabulary, (args.batch, args.length + 1), device=device) for _ in range(8)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    data = batches[step % len(batches)]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(data[:, :-1].contiguous(), data[:, 1:].contiguous())
    loss.backward()
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    model.zero_grad(set_to_none=True)
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.1f} samples/s, {1e3 * took:.3f} ms a step")
