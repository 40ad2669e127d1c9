"""A network that solves Burgers' equation (Raissi et al., 2019): second derivatives of its output, a boundary, a start, Adam.

`python equation_script.py [--graph] [--fused] [--steps N]`; `--graph` captures the whole step by hand.
Points are drawn anew in each step. The last line is the mean step after the first third of the steps, by this script's own
clock.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--points", type=int, default=10_000)
parser.add_argument("--edge", type=int, default=400)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--graph", action="store_true", help="capture the whole step by hand")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
VISCOSITY = 0.01 / torch.pi


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [2] + [args.width] * args.layers
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.last = nn.Linear(args.width, 1)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.last(h)


net = Network().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=args.fused or None, capturable=args.graph)


def gradient(u, x):
    return torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]


def train_step(x, t, edge_x, edge_t, edge_u):
    optimizer.zero_grad()
    x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
    u = net(x, t)
    u_t, u_x = gradient(u, t), gradient(u, x)
    residual = u_t + u * u_x - VISCOSITY * gradient(u_x, x)
    loss = residual.square().mean() + (net(edge_x, edge_t) - edge_u).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def batch():
    x, t = 2 * torch.rand(args.points, 1, device=device) - 1, torch.rand(args.points, 1, device=device)
    start = 2 * torch.rand(args.edge, 1, device=device) - 1
    side = torch.randint(2, (args.edge, 1), device=device) * 2.0 - 1
    edge_x, edge_t = torch.cat([start, side]), torch.cat([torch.zeros_like(start), torch.rand(args.edge, 1, device=device)])
    return x, t, edge_x, edge_t, torch.cat([-torch.sin(torch.pi * start), torch.zeros_like(side)])


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


if args.graph:
    fixed = batch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(*fixed)
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        fixed_loss = train_step(*fixed)

began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    if args.graph:
        torch._foreach_copy_(list(fixed), list(batch()))
        graph.replay()
        loss = fixed_loss
    else:
        loss = train_step(*batch())
    if step % 500 == 0:
        print(f"step {step}: loss {loss.item():.5f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
