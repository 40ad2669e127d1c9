"""A translation model of torch's own nn.Transformer: batches of 8,000 words that are alike in length, smoothed labels, warm-up.

`python translation_script.py [--compile [--mode MODE]] [--dynamic] [--fused] [--steps N]`: width 512, six and six layers, tied
weights, bfloat16 autocast; each batch has another number of sentences and another length. The last line is the throughput
after the first third of the steps, by this script's own clock.
"""

import argparse
import math
import random
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--words", type=int, default=8000)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--longest", type=int, default=120)
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
random.seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
PAD = 1


class Positions(nn.Module):
    def __init__(self, width, longest=512):
        super().__init__()
        at = torch.arange(longest)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("table", table)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(1)])


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width, padding_idx=PAD)
        nn.init.normal_(self.words.weight, std=args.width**-0.5)
        self.positions = Positions(args.width)
        self.transformer = nn.Transformer(
            args.width, args.heads, args.layers, args.layers, 4 * args.width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.generator = nn.Linear(args.width, args.vocabulary, bias=False)
        self.generator.weight = self.words.weight

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        hidden = self.transformer(
            self.positions(self.words(source) * args.width**0.5),
            self.positions(self.words(target) * args.width**0.5),
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
        )
        return self.generator(hidden)


def make_batches(n):
    """Sentences sorted by length, cut where a batch has enough words, in random order."""
    lengths = sorted(min(args.longest, max(3, int(random.lognormvariate(3.1, 0.6)))) for _ in range(n * args.words // 25))
    batches, batch = [], []
    for length in lengths:
        batch.append((length, max(3, int(length * random.uniform(0.8, 1.2)))))
        if len(batch) * max(max(pair) for pair in batch) > args.words:
            batches.append(batch)
            batch = []
    random.shuffle(batches)
    return [
        tuple(
            nn.utils.rnn.pad_sequence(
                [torch.randint(4, args.vocabulary, (pair[side],)) for pair in batch], batch_first=True, padding_value=PAD
            )
            for side in (0, 1)
        )
        for batch in batches
    ]


batches = make_batches(60)
model = Translator().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=args.fused or None)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: args.width**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
)
criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
if args.compile:
    model.compile(mode=args.mode, dynamic=args.dynamic or None)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began, words = 0.0, 0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began, words = time.perf_counter(), 0
    source, target = (x.to(device, non_blocking=True) for x in batches[step % len(batches)])
    words += target.numel()
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(source, target[:, :-1])
        loss = criterion(logits.reshape(-1, args.vocabulary), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
wait()
took = time.perf_counter() - began
print(f"{words / took:.0f} words/s, {1e3 * took / (args.steps - args.steps // 3):.3f} ms a step")
