"""Whisper trained as people fine-tune it: transcripts padded to the longest of a batch, bf16 autocast, AdamW, a schedule.

`python whisper_script.py [--compile [--mode MODE]] [--fused] [--multiple N] [--no-cudnn] [--no-cache] [--steps N]`: Whisper-small
on batches of 16 spectrograms of 30 s, whose transcripts have 16 to 128 tokens. `--multiple` pads lengths to multiples of N,
`--no-cudnn` leaves out cuDNN's attention, which is planned for each shape, and `--no-cache` makes no cache of keys and values,
which training never reads. The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--frames", type=int, default=3000)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--vocabulary", type=int, default=51865)
parser.add_argument("--steps", type=int, default=180)
parser.add_argument("--multiple", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--no-cudnn", action="store_true")
parser.add_argument("--no-cache", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Speech(Dataset):
    """Spectrograms of noise, each with a transcript of its own length."""

    def __init__(self, number):
        self.lengths = torch.randint(args.length // 8, args.length + 1, (number,)).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, place):
        drawn = torch.Generator().manual_seed(place)
        tokens = torch.randint(5, args.vocabulary, (self.lengths[place],), generator=drawn)
        return torch.randn(80, args.frames, generator=drawn), tokens


def collate(rows):
    features, texts = zip(*rows, strict=True)
    longest = -(-max(map(len, texts)) // args.multiple) * args.multiple
    labels = torch.full((len(texts), longest), -100)
    for row, text in enumerate(texts):
        labels[row, : len(text)] = text
    return {"input_features": torch.stack(features), "labels": labels}


config = WhisperConfig(
    vocab_size=args.vocabulary,
    d_model=args.width,
    encoder_layers=args.layers,
    decoder_layers=args.layers,
    encoder_attention_heads=args.heads,
    decoder_attention_heads=args.heads,
    encoder_ffn_dim=4 * args.width,
    decoder_ffn_dim=4 * args.width,
    max_source_positions=args.frames // 2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
    use_cache=not args.no_cache,
)
model = WhisperForConditionalGeneration(config).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=args.fused or None)
schedule = get_linear_schedule_with_warmup(optimizer, 10, args.steps)
if args.compile:
    model.compile(mode=args.mode)
workers = 8 if device == "cuda" else 0
loader = DataLoader(
    Speech(args.batch * args.steps),
    args.batch,
    shuffle=True,
    collate_fn=collate,
    drop_last=True,
    num_workers=workers,
    pin_memory=True,
)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step, batch in enumerate(loader):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
