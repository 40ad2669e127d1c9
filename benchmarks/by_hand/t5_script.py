"""T5 trained as people fine-tune it: pairs of texts padded to the longest of a batch, bf16 autocast, AdamW, clipping, a schedule.

`python t5_script.py [--compile [--mode MODE] [--dynamic] [--blocks]] [--fused] [--multiple N] [--no-cudnn] [--no-cache]
[--steps N]`: T5-base on batches of 16 texts of 32 to 256 tokens, whose answers have 16 to 128. `--multiple` pads lengths to
multiples of N, `--no-cudnn` leaves out cuDNN's attention, which is planned for each shape, and `--no-cache` makes no cache of
keys and values, which training never reads. The last line is the mean step after the first third of the steps, by this script's
own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--vocabulary", type=int, default=32128)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--multiple", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--blocks", action="store_true")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--no-cudnn", action="store_true")
parser.add_argument("--no-cache", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Pairs(Dataset):
    def __init__(self, number):
        asked = torch.randint(args.length // 8, args.length + 1, (number,))
        answered = torch.randint(args.length // 16, args.length // 2 + 1, (number,))
        pairs = zip(asked.tolist(), answered.tolist(), strict=True)
        self.pairs = [tuple(torch.randint(2, args.vocabulary, (length,)) for length in pair) for pair in pairs]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, place):
        return self.pairs[place]


def padded(texts, value):
    longest = -(-max(map(len, texts)) // args.multiple) * args.multiple
    rows = torch.full((len(texts), longest), value, dtype=torch.long)
    for row, text in enumerate(texts):
        rows[row, : len(text)] = text
    return rows


def collate(pairs):
    questions, answers = zip(*pairs, strict=True)
    ids = padded(questions, 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded(answers, -100)}


config = T5Config(
    vocab_size=args.vocabulary,
    d_model=args.width,
    d_kv=args.width // args.heads,
    d_ff=4 * args.width,
    num_layers=args.layers,
    num_heads=args.heads,
    decoder_start_token_id=0,
    use_cache=not args.no_cache,
)
model = T5ForConditionalGeneration(config).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=args.fused or None)
schedule = get_linear_schedule_with_warmup(optimizer, 10, args.steps)
if args.compile:
    for part in [*model.encoder.block, *model.decoder.block] if args.blocks else [model]:
        part.compile(mode=args.mode, dynamic=args.dynamic or None)
loader = DataLoader(Pairs(args.batch * args.steps), args.batch, shuffle=True, collate_fn=collate, drop_last=True)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step, batch in enumerate(loader):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
