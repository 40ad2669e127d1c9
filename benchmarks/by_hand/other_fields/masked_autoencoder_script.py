"""A masked autoencoder: a ViT-B/16 that sees a random quarter of the patches, and a decoder that predicts the others.

`python masked_autoencoder_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: batches of 128 images in GPU memory,
timm's blocks, bfloat16 autocast. The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from timm.models.vision_transformer import Block, PatchEmbed
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--decoder-depth", type=int, default=8)
parser.add_argument("--decoder-width", type=int, default=512)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Autoencoder(nn.Module):
    """Encoder, decoder, and the loss of what was masked."""

    def __init__(self):
        super().__init__()
        self.embed = PatchEmbed(args.size, 16, 3, args.width)
        n = self.embed.num_patches
        self.cls = nn.Parameter(torch.zeros(1, 1, args.width))
        self.position = nn.Parameter(torch.randn(1, n + 1, args.width) * 0.02, requires_grad=False)
        self.blocks = nn.ModuleList(Block(args.width, args.width // 64, qkv_bias=True) for _ in range(args.depth))
        self.norm = nn.LayerNorm(args.width)
        self.decoder_embed = nn.Linear(args.width, args.decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, args.decoder_width))
        self.decoder_position = nn.Parameter(torch.randn(1, n + 1, args.decoder_width) * 0.02, requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            Block(args.decoder_width, args.decoder_width // 32, qkv_bias=True) for _ in range(args.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(args.decoder_width)
        self.predict = nn.Linear(args.decoder_width, 16 * 16 * 3)

    def patches(self, images):
        b, _, h, _ = images.shape
        k = h // 16
        return images.reshape(b, 3, k, 16, k, 16).permute(0, 2, 4, 3, 5, 1).reshape(b, k * k, 16 * 16 * 3)

    def forward(self, images, ratio=0.75):
        x = self.embed(images) + self.position[:, 1:]
        b, n, d = x.shape
        keep = int(n * (1 - ratio))
        noise = torch.rand(b, n, device=x.device)
        order = noise.argsort(1)
        back = order.argsort(1)
        x = torch.gather(x, 1, order[:, :keep, None].expand(-1, -1, d))
        mask = torch.ones(b, n, device=x.device)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, back)
        x = torch.cat([(self.cls + self.position[:, :1]).expand(b, -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        full = torch.cat([x[:, 1:], self.mask_token.repeat(b, n - keep, 1)], 1)
        full = torch.gather(full, 1, back[..., None].expand(-1, -1, full.shape[2]))
        x = torch.cat([x[:, :1], full], 1) + self.decoder_position
        for block in self.decoder_blocks:
            x = block(x)
        guess = self.predict(self.decoder_norm(x))[:, 1:]
        target = self.patches(images)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((guess - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum(), guess, mask


model = Autoencoder().to(device).train()
optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=args.fused or None
)
if args.compile:
    model.compile(mode=args.mode)
images = [torch.randn(args.batch, 3, args.size, args.size, device=device) for _ in range(4)]


def wait():
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 * min(1.0, (step + 1) / 40)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss, _, _ = model(images[step % 4])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.1f} images/s, {1e3 * took:.3f} ms a step")
