"""BERT trained as people fine-tune it: masked words, texts padded to the longest of a batch, bf16 autocast, AdamW, clipping.

`python bert_script.py [--compile [--mode MODE] [--dynamic]] [--fused] [--multiple N] [--no-cudnn] [--steps N]`: BERT-base on
batches of 32 texts of 32 to 256 tokens. `--multiple` pads lengths to multiples of N, and `--no-cudnn` leaves out cuDNN's
attention, which is planned for each shape. The last line is the mean step after the first third of the steps, by this script's
own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--vocabulary", type=int, default=30522)
parser.add_argument("--steps", type=int, default=180)
parser.add_argument("--multiple", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--no-cudnn", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Texts(Dataset):
    def __init__(self, number):
        lengths = torch.randint(args.length // 8, args.length + 1, (number,))
        self.texts = [torch.randint(5, args.vocabulary, (int(length),)) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, place):
        return self.texts[place]


def collate(texts):
    longest = -(-max(map(len, texts)) // args.multiple) * args.multiple
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    hidden = (torch.rand(ids.shape) < 0.15) & (mask == 1)
    return {"input_ids": ids.masked_fill(hidden, 3), "attention_mask": mask, "labels": ids.masked_fill(~hidden, -100)}


config = BertConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    intermediate_size=4 * args.width,
)
model = BertForMaskedLM(config).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=args.fused or None)
schedule = get_linear_schedule_with_warmup(optimizer, 10, args.steps)
if args.compile:
    model.compile(mode=args.mode, dynamic=args.dynamic or None)
loader = DataLoader(Texts(args.batch * args.steps), args.batch, shuffle=True, collate_fn=collate, drop_last=True)


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
