"""A VQ-GAN: an autoencoder with a codebook, a perceptual loss, and a critic of patches with an adaptive weight.

`python vqgan_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`. The weight of the critic's loss
is the ratio of two gradients of the decoder's last layer, so each step goes through part of the graph twice more.
The last line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--codes", type=int, default=1024)
parser.add_argument("--size", type=int, default=128)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--critic-width", type=int, default=64)
parser.add_argument("--perceptual-width", type=int, default=64)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-critic", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layout = torch.channels_last if args.channels_last else torch.contiguous_format


def norm(channels):
    return nn.GroupNorm(min(32, channels), channels, eps=1e-6)


class ResidualBlock(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.conv1 = norm(before), nn.Conv2d(before, after, 3, 1, 1)
        self.norm2, self.conv2 = norm(after), nn.Conv2d(after, after, 3, 1, 1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv, self.out = norm(channels), nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
        return x + self.out(mixed.transpose(1, 2).reshape(b, c, h, w))


class Up(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def encoder(w):
    layers = [nn.Conv2d(3, w, 3, 1, 1)]
    for before, after in ((w, w), (w, 2 * w), (2 * w, 2 * w), (2 * w, 4 * w)):
        layers += [ResidualBlock(before, after), ResidualBlock(after, after)]
        layers += [nn.Conv2d(after, after, 3, 2, 1)]
    layers += [ResidualBlock(4 * w, 4 * w), Attention(4 * w), ResidualBlock(4 * w, 4 * w)]
    return nn.Sequential(*layers, norm(4 * w), nn.SiLU(), nn.Conv2d(4 * w, 256, 3, 1, 1))


def decoder(w):
    layers = [nn.Conv2d(256, 4 * w, 3, 1, 1), ResidualBlock(4 * w, 4 * w), Attention(4 * w), ResidualBlock(4 * w, 4 * w)]
    for before, after in ((4 * w, 4 * w), (4 * w, 2 * w), (2 * w, 2 * w), (2 * w, w)):
        layers += [Up(before), ResidualBlock(before, after), ResidualBlock(after, after)]
    return nn.Sequential(*layers, norm(w), nn.SiLU(), nn.Conv2d(w, 3, 3, 1, 1))


class Quantizer(nn.Module):
    def __init__(self, codes, width=256):
        super().__init__()
        self.codes = nn.Embedding(codes, width)
        nn.init.uniform_(self.codes.weight, -1 / codes, 1 / codes)

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1)
        with torch.autocast(z.device.type, enabled=False):
            vectors = flat.reshape(-1, flat.size(-1)).float()
            table = self.codes.weight
            distances = vectors.square().sum(1, keepdim=True) + table.square().sum(1) - 2 * vectors @ table.t()
            near = self.codes(distances.argmin(1)).view(flat.shape)
            loss = F.mse_loss(near.detach(), flat.float()) * 0.25 + F.mse_loss(near, flat.detach().float())
        straight = flat + (near - flat).detach()
        return straight.permute(0, 3, 1, 2), loss


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = encoder(args.width), Quantizer(args.codes), decoder(args.width)

    def forward(self, images):
        quantized, loss = self.quantizer(self.encoder(images))
        return self.decoder(quantized), loss

    @property
    def last_layer(self):
        return self.decoder[-1].weight


class Perceptual(nn.Module):
    """Distances between features of VGG-16's kind, frozen."""

    def __init__(self):
        super().__init__()
        self.stages, before = nn.ModuleList(), 3
        for number, (after, convolutions) in enumerate(((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))):
            after *= args.perceptual_width
            layers = [nn.MaxPool2d(2)] if number else []
            for _ in range(convolutions):
                layers += [nn.Conv2d(before, after, 3, 1, 1), nn.ReLU()]
                before = after
            self.stages.append(nn.Sequential(*layers))
        self.requires_grad_(False)

    def forward(self, x, y):
        total = 0.0
        for stage in self.stages:
            x, y = stage(x), stage(y)
            total = total + (F.normalize(x, dim=1) - F.normalize(y, dim=1)).square().mean((1, 2, 3), keepdim=True)
        return total


def critic(w):
    layers = [nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2)]
    for before, after, stride in ((w, 2 * w, 2), (2 * w, 4 * w, 2), (4 * w, 8 * w, 1)):
        layers += [nn.Conv2d(before, after, 4, stride, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8 * w, 1, 4, 1, 1))


model = Autoencoder().to(device, memory_format=layout)
perceptual = Perceptual().to(device, memory_format=layout).eval()
discriminator = critic(args.critic_width).to(device, memory_format=layout)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.5, 0.9), fused=args.fused or None)
critic_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-4, betas=(0.5, 0.9), fused=args.fused or None)
if args.compile:
    torch._functorch.config.donated_buffer = False
    model.compile(mode=args.mode)
    perceptual.compile(mode=args.mode)
if args.compile_critic:
    discriminator.compile(mode=args.mode)
images = [torch.rand(args.batch, 3, args.size, args.size, device=device).mul_(2).sub_(1) for _ in range(8)]
images = [batch.contiguous(memory_format=layout) for batch in images]


def adaptive_weight(reconstruction_loss, critic_loss):
    (of_reconstruction,) = torch.autograd.grad(reconstruction_loss, model.last_layer, retain_graph=True)
    (of_critic,) = torch.autograd.grad(critic_loss, model.last_layer, retain_graph=True)
    return (of_reconstruction.norm() / (of_critic.norm() + 1e-4)).clamp(0.0, 1e4).detach()


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    real = images[step % len(images)]
    with torch.autocast(device, dtype=torch.bfloat16):
        made, codebook_loss = model(real)
        likeness = ((real - made).abs() + perceptual(real, made)).mean()
        critic_loss = -discriminator(made).mean()
    loss = likeness + 0.8 * adaptive_weight(likeness, critic_loss) * critic_loss + codebook_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.autocast(device, dtype=torch.bfloat16):
        of_real, of_made = discriminator(real), discriminator(made.detach())
        d_loss = 0.5 * (F.relu(1 - of_real).mean() + F.relu(1 + of_made).mean())
    critic_optimizer.zero_grad()
    d_loss.backward()
    critic_optimizer.step()
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
