"""DINO as people write it: a student learns from its moving average on two large and six small crops of each image.

`python dino_script.py [--compile [--mode MODE]] [--fused] [--steps N]`: a ViT-S/16 with stochastic depth and 16,384 prototypes,
batches of 32 images in GPU memory, float16 autocast with a gradient scaler, a center that the loss keeps in a buffer. The last
line is the mean step after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--prototypes", type=int, default=16384)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
LARGE, SMALL = 224, 96


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.p)
        return x / (1 - self.p) * kept


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        width = args.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = DropPath(drop)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, args.heads, c // args.heads).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)))
        return x + self.drop(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, drop_path):
        super().__init__()
        width = args.width
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (LARGE // 16) ** 2, width))
        drops = torch.linspace(0, drop_path, args.layers).tolist()
        self.blocks = nn.ModuleList([Block(drop) for drop in drops])
        self.norm = nn.LayerNorm(width)

    def at_size(self, patches, w, h):
        if patches == self.positions.shape[1] - 1 and w == h:
            return self.positions
        first, grid = self.positions[:, :1], self.positions[:, 1:]
        side = int(grid.shape[1] ** 0.5)
        grid = F.interpolate(grid.reshape(1, side, side, -1).permute(0, 3, 1, 2), size=(w // 16, h // 16), mode="bicubic")
        return torch.cat([first, grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)

    def forward(self, images):
        w, h = images.shape[-2:]
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.at_size(x.shape[1], w, h)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(args.width, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(256, args.prototypes, bias=False))

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


class Network(nn.Module):
    def __init__(self, drop_path=0.0):
        super().__init__()
        self.backbone = VisionTransformer(drop_path)
        self.head = Head()

    def forward(self, crops):
        outputs = []
        for size in (LARGE, SMALL):
            same = [crop for crop in crops if crop.shape[-1] == size]
            if same:
                outputs.append(self.backbone(torch.cat(same)))
        return self.head(torch.cat(outputs))


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, args.prototypes))

    def forward(self, student, teacher):
        views = (student / 0.1).chunk(8)
        wanted = F.softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0, 0
        for i, want in enumerate(wanted):
            for j, view in enumerate(views):
                if i == j:
                    continue
                total = total + torch.sum(-want * F.log_softmax(view, dim=-1), dim=-1).mean()
                terms += 1
        self.update(teacher)
        return total / terms

    @torch.no_grad()
    def update(self, teacher):
        self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1


student, teacher = Network(drop_path=0.1).to(device), Network().to(device)
teacher.load_state_dict(student.state_dict())
teacher.requires_grad_(False)
criterion = Loss().to(device)
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, fused=args.fused or None)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
if args.compile:
    student.compile(mode=args.mode)
    teacher.compile(mode=args.mode)
data = [
    [torch.randn(args.batch, 3, LARGE, LARGE, device=device) for _ in range(2)]
    + [torch.randn(args.batch, 3, SMALL, SMALL, device=device) for _ in range(6)]
    for _ in range(4)
]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = 5e-4 * min(1.0, (step + 1) / 10)
    crops = data[step % len(data)]
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        with torch.no_grad():
            wanted = teacher(crops[:2])
        loss = criterion(student(crops), wanted)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(student.parameters(), 3.0)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        momentum = 0.996
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.mul_(momentum).add_(theirs, alpha=1 - momentum)
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
