"""Translation by a recurrent encoder and a decoder that attends, whose GRU cell runs in a Python loop over the words.

`python recurrent_translation_script.py [--compile [--mode MODE] | --graph] [--fused] [--steps N]`; `--graph` captures forward and
backward. The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--length", type=int, default=40)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--vocabulary", type=int, default=16000)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--graph", action="store_true", help="capture forward and backward by hand")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(2 * width, width), nn.Linear(width, 1)

    def forward(self, state, keys, memory, mask):
        scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(-1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class Translator(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.start = nn.Linear(2 * width, width)
        self.attention = Attention(width)
        self.cell = nn.GRUCell(3 * width, width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source, target, mask):
        memory, _ = self.encoder(self.drop(self.source(source)))
        keys = self.attention.key(memory)
        state = torch.tanh(self.start(memory.mean(1)))
        words = self.drop(self.target(target))
        states = []
        for position in range(words.shape[1]):
            context = self.attention(state, keys, memory, mask)
            state = self.cell(torch.cat([words[:, position], context], -1), state)
            states.append(state)
        return self.out(self.drop(torch.stack(states, 1)))


model = Translator(args.vocabulary, args.width).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=args.fused or None)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
call = model
if args.compile:
    model.compile(mode=args.mode)


def batch(step):
    generator = torch.Generator().manual_seed(step % 20)
    source, target = torch.randint(4, args.vocabulary, (2, args.batch, args.length), generator=generator)
    lengths = torch.randint(args.length // 2, args.length + 1, (args.batch, 1), generator=generator)
    mask = torch.arange(args.length).unsqueeze(0) >= lengths
    return [one.to(device, non_blocking=True) for one in (source, target, mask)]


if args.graph:
    source, target, mask = batch(0)
    call = torch.cuda.make_graphed_callables(model, (source, target[:, :-1].contiguous(), mask))


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    source, target, mask = batch(step)
    logits = call(source, target[:, :-1].contiguous(), mask)
    loss = F.cross_entropy(logits.reshape(-1, args.vocabulary), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
