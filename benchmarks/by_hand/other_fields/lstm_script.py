"""A word-level language model with LSTMs: hidden states carried from window to window, tied weights, clipping, SGD.

`python lstm_script.py [--compile [--mode MODE] | --graph] [--fused] [--steps N]`; `--graph` captures the whole step.
The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--vocabulary", type=int, default=33278)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--graph", action="store_true", help="capture the whole step by hand")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(args.vocabulary, args.width)
        self.rnn = nn.LSTM(args.width, args.width, args.layers, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(args.width, args.vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids, hidden):
        embedded = self.drop(self.encoder(ids))
        output, hidden = self.rnn(embedded, hidden)
        return self.decoder(self.drop(output)), hidden


def detached(hidden):
    return tuple(state.detach() for state in hidden)


model = Model().to(device).train()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=args.fused or None)
if args.compile:
    model.compile(mode=args.mode)
text = torch.randint(args.vocabulary, (args.batch, args.length * 40 + 1), device=device)
hidden = tuple(torch.zeros(args.layers, args.batch, args.width, device=device) for _ in range(2))


def train_step(ids, targets, hidden):
    model.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=not args.graph):
        logits, hidden = model(ids, detached(hidden))
        loss = F.cross_entropy(logits.reshape(-1, args.vocabulary).float(), targets.reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    return hidden


if args.graph:
    fixed_ids, fixed_targets = torch.zeros(2, args.batch, args.length, dtype=torch.long, device=device)
    fixed_hidden = tuple(torch.zeros_like(state) for state in hidden)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(fixed_ids, fixed_targets, fixed_hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for state, new in zip(fixed_hidden, train_step(fixed_ids, fixed_targets, fixed_hidden), strict=True):
            state.copy_(new.detach())


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    at = (step % 40) * args.length
    if at == 0:
        hidden = tuple(torch.zeros_like(state) for state in hidden)
    ids, targets = text[:, at : at + args.length], text[:, at + 1 : at + args.length + 1]
    if args.graph:
        fixed_ids.copy_(ids)
        fixed_targets.copy_(targets)
        if at == 0:
            for state in fixed_hidden:
                state.zero_()
        graph.replay()
    else:
        hidden = train_step(ids, targets, hidden)
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
