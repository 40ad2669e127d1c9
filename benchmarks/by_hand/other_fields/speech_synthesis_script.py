"""Speech synthesis as FastSpeech 2 does it: phonemes of several lengths, durations that stretch them to frames, mel spectrograms.

`python speech_synthesis_script.py [--compile [--dynamic] [--mode MODE]] [--fused] [--steps N]`. Batches hold utterances of
similar length, padded to the longest. The last line is the mean step after the first third, by this script's own clock.
"""

import argparse
import itertools
import random
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--batch", type=int, default=48)
parser.add_argument("--shortest", type=int, default=40)
parser.add_argument("--longest", type=int, default=150)
parser.add_argument("--batches", type=int, default=40)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
random.seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
MELS, PHONEMES = 80, 78


class Block(nn.Module):
    """Attention and two convolutions over time."""

    def __init__(self, width):
        super().__init__()
        self.heads = args.heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv1, self.conv2 = nn.Conv1d(width, 4 * width, 9, padding=4), nn.Conv1d(4 * width, width, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm1(x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, w))))
        h = self.conv2(F.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm2(x + self.drop(h)) * mask[..., None]


class Stack(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.register_buffer("positions", self.table(2048, width), persistent=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    @staticmethod
    def table(length, width):
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)

    def forward(self, x, mask):
        x = (x + self.positions[: x.size(1)]) * mask[..., None]
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Predictor(nn.Module):
    """One number a phoneme or frame."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(width, 256, 3, padding=1), nn.Conv1d(256, 256, 3, padding=1)
        self.norm1, self.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
        self.out, self.drop = nn.Linear(256, 1), nn.Dropout(0.5)

    def forward(self, x, mask):
        x = self.drop(self.norm1(F.relu(self.conv1(x.transpose(1, 2))).transpose(1, 2)))
        x = self.drop(self.norm2(F.relu(self.conv2(x.transpose(1, 2))).transpose(1, 2)))
        return self.out(x).squeeze(-1) * mask


class LengthRegulator(nn.Module):
    """Repeats each phoneme for as many frames as it lasts."""

    def forward(self, x, durations):
        return pad_sequence([row.repeat_interleave(lasts, 0) for row, lasts in zip(x, durations, strict=True)], batch_first=True)


class Postnet(nn.Module):
    def __init__(self, channels=512):
        super().__init__()
        sizes = [MELS, channels, channels, channels, channels, MELS]
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b)) for a, b in itertools.pairwise(sizes)
        )

    def forward(self, mel):
        x = mel.transpose(1, 2)
        for number, conv in enumerate(self.convs):
            x = conv(x)
            x = F.dropout(torch.tanh(x) if number < len(self.convs) - 1 else x, 0.5, self.training)
        return x.transpose(1, 2)


class FastSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        w = args.width
        self.phonemes = nn.Embedding(PHONEMES, w, padding_idx=0)
        self.encoder, self.decoder = Stack(w, args.layers), Stack(w, args.layers)
        self.duration, self.pitch, self.energy = Predictor(w), Predictor(w), Predictor(w)
        self.pitch_bins, self.energy_bins = nn.Embedding(256, w), nn.Embedding(256, w)
        self.regulator = LengthRegulator()
        self.to_mel, self.postnet = nn.Linear(w, MELS), Postnet()

    def forward(self, phonemes, durations, pitch, energy, frame_mask):
        mask = phonemes != 0
        x = self.encoder(self.phonemes(phonemes), mask)
        log_durations, pitches, energies = self.duration(x, mask), self.pitch(x, mask), self.energy(x, mask)
        x = x + self.pitch_bins((pitch * 255).long()) + self.energy_bins((energy * 255).long())
        x = self.regulator(x, durations)
        x = self.decoder(x, frame_mask)
        mel = self.to_mel(x)
        return mel, mel + self.postnet(mel), log_durations, pitches, energies


def utterance(length):
    durations = torch.randint(3, 10, (length,))
    return {
        "phonemes": torch.randint(1, PHONEMES, (length,)),
        "durations": durations,
        "pitch": torch.rand(length),
        "energy": torch.rand(length),
        "mel": torch.randn(int(durations.sum()), MELS),
    }


def collate(utterances):
    batch = {key: pad_sequence([u[key] for u in utterances], batch_first=True) for key in utterances[0]}
    frames = torch.tensor([len(u["mel"]) for u in utterances])
    batch["frame_mask"] = torch.arange(int(frames.max()))[None] < frames[:, None]
    return batch


class Loss(nn.Module):
    def forward(self, outputs, batch):
        mel, refined, log_durations, pitches, energies = outputs
        text, frames = batch["phonemes"] != 0, batch["frame_mask"]
        target = batch["mel"]
        spectral = (mel - target).abs()[frames].mean() + (refined - target).abs()[frames].mean()
        wanted = torch.log(batch["durations"].float() + 1)
        return (
            spectral
            + F.mse_loss(log_durations[text].float(), wanted[text])
            + F.mse_loss(pitches[text].float(), batch["pitch"][text])
            + F.mse_loss(energies[text].float(), batch["energy"][text])
        )


lengths = [random.randint(args.shortest, args.longest) for _ in range(args.batches)]
batches = []
for length in lengths:
    utterances = [utterance(max(2, length - random.randint(0, 8))) for _ in range(args.batch)]
    batches.append({key: value.pin_memory() if device == "cuda" else value for key, value in collate(utterances).items()})

model, criterion = FastSpeech().to(device), Loss()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=args.fused or None)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: args.width**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
)
if args.compile:
    for part in (model.encoder, model.decoder, model.postnet, model.duration, model.pitch, model.energy):
        part.compile(mode=args.mode, dynamic=args.dynamic or None)


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    batch = {key: value.to(device, non_blocking=True) for key, value in batches[step % len(batches)].items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        outputs = model(batch["phonemes"], batch["durations"], batch["pitch"], batch["energy"], batch["frame_mask"])
        loss = criterion(outputs, batch)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
