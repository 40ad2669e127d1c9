"""Speech recognition by a Conformer with CTC: log-mel frames of utterances of many lengths, SpecAugment, bf16 autocast, clipping.

`python conformer_script.py [--compile [--mode MODE]] [--fused] [--steps N]`; the last line is the mean step after the first
third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--mels", type=int, default=80)
parser.add_argument("--vocabulary", type=int, default=1000)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--shortest", type=int, default=400)
parser.add_argument("--longest", type=int, default=1600)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class FeedForward(nn.Sequential):
    def __init__(self, width):
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )


class Convolution(nn.Module):
    def __init__(self, width, kernel=31):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.project = nn.Conv1d(width, width, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, padding):
        x = F.glu(self.expand(self.norm(x).transpose(1, 2)), dim=1)
        x = x.masked_fill(padding[:, None], 0)
        return self.drop(self.project(F.silu(self.batch_norm(self.depthwise(x)))).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.project, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.drop(self.project(x.transpose(1, 2).reshape(b, t, w)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before, self.after = FeedForward(width), FeedForward(width)
        self.attention, self.convolution = Attention(width, heads), Convolution(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, padding, mask):
        x = x + 0.5 * self.before(x)
        x = x + self.attention(x, mask)
        x = x + self.convolution(x, padding)
        return self.norm(x + 0.5 * self.after(x))


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        w = args.width
        self.subsample = nn.Sequential(nn.Conv2d(1, w, 3, 2, 1), nn.ReLU(), nn.Conv2d(w, w, 3, 2, 1), nn.ReLU())
        self.enter = nn.Linear(w * (args.mels // 4), w)
        self.blocks = nn.ModuleList(Block(w, args.heads) for _ in range(args.layers))
        self.leave = nn.Linear(w, args.vocabulary)

    def forward(self, frames, lengths):
        x = self.subsample(frames[:, None]).transpose(1, 2).flatten(2)
        lengths = (lengths + 3) // 4
        padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        mask = ~padding[:, None, None]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, padding, mask)
        return self.leave(x).log_softmax(-1), lengths


class Utterances(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(args.shortest, args.longest + 1, (), generator=generator))
        words = torch.randint(1, args.vocabulary, (length // 40,), generator=generator)
        return torch.randn(length, args.mels, generator=generator), words


def collate(items):
    frames = nn.utils.rnn.pad_sequence([one for one, _ in items], batch_first=True)
    words = nn.utils.rnn.pad_sequence([one for _, one in items], batch_first=True)
    return frames, torch.tensor([len(one) for one, _ in items]), words, torch.tensor([len(one) for _, one in items])


def spec_augment(frames):
    frames = frames.clone()
    for _ in range(2):
        at = int(torch.randint(args.mels - 15, ()))
        frames[:, :, at : at + int(torch.randint(1, 15, ()))] = 0
    return frames


model = Conformer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=1e-2, fused=args.fused or None)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 1000, (1000 / (step + 1)) ** 0.5))
if args.compile:
    model.compile(mode=args.mode)
loader = torch.utils.data.DataLoader(
    Utterances(),
    args.batch,
    shuffle=True,
    num_workers=4 if device == "cuda" else 0,
    collate_fn=collate,
    pin_memory=device == "cuda",
)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step, (frames, frame_lengths, words, word_lengths) in enumerate(loader):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    if step == args.steps:
        break
    frames, frame_lengths = frames.to(device, non_blocking=True), frame_lengths.to(device, non_blocking=True)
    words, word_lengths = words.to(device, non_blocking=True), word_lengths.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found, lengths = model(spec_augment(frames), frame_lengths)
    loss = F.ctc_loss(found.float().transpose(0, 1), words, lengths, word_lengths, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
