"""Node classification on one large graph by graph attention: a softmax over each node's neighbors by scatter, dropout, Adam.

`python graph_attention_script.py [--compile [--mode MODE]] [--fused] [--steps N]`; the last line is the mean step after the first
third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=100_000)
parser.add_argument("--edges", type=int, default=1_000_000)
parser.add_argument("--features", type=int, default=128)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--classes", type=int, default=40)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class GraphAttention(nn.Module):
    def __init__(self, inputs, width, heads):
        super().__init__()
        self.width, self.heads = width, heads
        self.project = nn.Linear(inputs, heads * width, bias=False)
        self.of_source, self.of_target = (
            nn.Parameter(torch.randn(heads, width) * 0.1),
            nn.Parameter(torch.randn(heads, width) * 0.1),
        )
        self.bias = nn.Parameter(torch.zeros(heads * width))

    def forward(self, x, edges):
        source, target = edges
        x = self.project(F.dropout(x, 0.3, self.training)).view(-1, self.heads, self.width)
        score = F.leaky_relu((x * self.of_source).sum(-1)[source] + (x * self.of_target).sum(-1)[target], 0.2)
        largest = score.new_full((len(x), self.heads), -torch.inf).scatter_reduce(
            0, target[:, None].expand_as(score), score, "amax"
        )
        weight = (score - largest[target]).exp()
        total = torch.zeros_like(largest).index_add(0, target, weight)
        weight = F.dropout(weight / (total[target] + 1e-9), 0.3, self.training)
        return torch.zeros_like(x).index_add(0, target, x[source] * weight[..., None]).flatten(1) + self.bias


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width * args.heads
        self.layers = nn.ModuleList(
            GraphAttention(width if number else args.features, args.width, args.heads) for number in range(args.layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(args.layers))
        self.head = nn.Linear(width, args.classes)

    def forward(self, x, edges):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.elu(norm(layer(x, edges)))
        return self.head(x)


nodes = torch.arange(args.nodes)
edges = torch.cat([torch.randint(args.nodes, (2, args.edges)), torch.stack([nodes, nodes])], 1).to(device)
x, labels = torch.randn(args.nodes, args.features, device=device), torch.randint(args.classes, (args.nodes,), device=device)
train_mask = torch.rand(args.nodes, device=device) < 0.5
model = Network().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=5e-4, fused=args.fused or None)
if args.compile:
    model.compile(mode=args.mode)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(x, edges)
    loss = F.cross_entropy(out[train_mask], labels[train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    found = model(x, edges).argmax(-1)
    return (found == labels)[~train_mask].float().mean().item()


began = 0.0
for epoch in range(args.steps):
    if epoch == args.steps // 3:
        began = time.perf_counter()
    loss, accuracy = train(), test()
    if epoch % 20 == 0:
        print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.4f}")
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
