"""A potential of molecules as SchNet (Schütt et al., 2017): energies, and forces, which are the gradients of energies.

`python forces_script.py [--fused] [--graph] [--steps N]`; `--graph` captures the whole step by hand.
All atoms of a molecule are neighbors. The last line is the mean step after the first third of the steps, by this
script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--molecules", type=int, default=32)
parser.add_argument("--atoms", type=int, default=21)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--waves", type=int, default=50)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--graph", action="store_true", help="capture the whole step by hand")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def softplus(x):
    return F.softplus(x) - 0.6931471805599453


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.filter = nn.ModuleList([nn.Linear(args.waves, width), nn.Linear(width, width)])
        self.inner, self.outer, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h, waves, near):
        weights = self.filter[1](softplus(self.filter[0](waves))) * near[..., None]
        mixed = torch.einsum("bijw,bjw->biw", weights, self.inner(h))
        return h + self.last(softplus(self.outer(mixed)))


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, args.width)
        self.layers = nn.ModuleList(Interaction() for _ in range(args.layers))
        self.energy = nn.ModuleList([nn.Linear(args.width, args.width // 2), nn.Linear(args.width // 2, 1)])
        self.register_buffer("centers", torch.linspace(0, 5, args.waves))
        self.register_buffer("others", 1 - torch.eye(args.atoms))

    def forward(self, kinds, positions):
        apart = positions[:, :, None] - positions[:, None, :]
        distances = (apart.square().sum(-1) + 1e-6).sqrt()
        waves = torch.exp(-10 * (distances[..., None] - self.centers).square())
        near = self.others * 0.5 * (torch.cos(distances.clamp(max=5) * torch.pi / 5) + 1)
        h = self.embedding(kinds)
        for layer in self.layers:
            h = layer(h, waves, near)
        return self.energy[1](softplus(self.energy[0](h))).sum((1, 2))


net = Potential().to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=args.fused or None, capturable=args.graph)


def train_step(kinds, positions, energies, forces):
    optimizer.zero_grad()
    positions = positions.detach().requires_grad_()
    found = net(kinds, positions)
    (slope,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
    loss = 0.01 * (found - energies).square().mean() + (forces + slope).square().mean()
    loss.backward()
    optimizer.step()
    return loss


batches = [
    (
        torch.randint(20, (args.molecules, args.atoms), device=device),
        2 * torch.randn(args.molecules, args.atoms, 3, device=device),
        torch.randn(args.molecules, device=device),
        torch.randn(args.molecules, args.atoms, 3, device=device),
    )
    for _ in range(16)
]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


if args.graph:
    fixed = [one.clone() for one in batches[0]]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(*fixed)
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        train_step(*fixed)

began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    if args.graph:
        for place, one in zip(fixed, batches[step % 16], strict=True):
            place.copy_(one)
        graph.replay()
    else:
        train_step(*batches[step % 16])
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
