"""Detection as a set, as DETR: a ResNet and a transformer, objects matched on the CPU by the Hungarian algorithm, bf16 autocast.

`python set_detection_script.py [--compile [--mode MODE]] [--fused] [--channels-last] [--steps N]`; the last line is the mean step
after the first third of the steps, by this script's own clock.
"""

import argparse
import time

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=512)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--channels", type=int, default=64)
parser.add_argument("--depths", type=int, nargs=4, default=[3, 4, 6, 3])
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES, QUERIES = 91, 100


class FrozenNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((n,), value))

    def forward(self, x):
        scale = self.weight * (self.var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.mean * scale)[:, None, None]


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            FrozenNorm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            FrozenNorm(width),
            nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False),
            FrozenNorm(outside),
        )
        self.skip = nn.Identity()
        if stride > 1 or inside != outside:
            self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), FrozenNorm(outside))

    def forward(self, x):
        return F.relu(self.body(x) * 0.5 + self.skip(x))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        w = args.channels
        self.stem = nn.Sequential(nn.Conv2d(3, w, 7, 2, 3, bias=False), FrozenNorm(w), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        layers, inside = [], w
        for number, depth in enumerate(args.depths):
            for place in range(depth):
                layers.append(Bottleneck(inside, w * 2**number, 2 if place == 0 and number else 1))
                inside = 4 * w * 2**number
        self.layers, self.outside = nn.Sequential(*layers), inside

    def forward(self, x):
        return self.layers(self.stem(x))


class Detr(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.project = nn.Conv2d(self.backbone.outside, args.width, 1)
        self.transformer = nn.Transformer(args.width, 8, args.layers, args.layers, 8 * args.width, 0.1, batch_first=True)
        self.queries = nn.Parameter(torch.randn(QUERIES, args.width))
        self.position = nn.Parameter(torch.randn((args.size // 32) ** 2, args.width) * 0.02)
        self.classes = nn.Linear(args.width, CLASSES + 1)
        self.boxes = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 4))

    def forward(self, images):
        features = self.project(self.backbone(images)).flatten(2).transpose(1, 2) + self.position
        found = self.transformer(features, self.queries.expand(len(images), -1, -1))
        return {"logits": self.classes(found), "boxes": self.boxes(found).sigmoid()}


def corners(boxes):
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


def area(box):
    return (box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1)


def generalized_iou(a, b):
    a, b = corners(a)[:, None], corners(b)[None]
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    outer = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = area(a) + area(b) - inner
    return inner / (union + 1e-6) - (outer - union) / (outer + 1e-6)


@torch.no_grad()
def match(found, targets):
    chances = found["logits"].float().flatten(0, 1).softmax(-1)
    boxes = found["boxes"].float().flatten(0, 1)
    labels, wanted = torch.cat([one["labels"] for one in targets]), torch.cat([one["boxes"] for one in targets])
    cost = 5 * torch.cdist(boxes, wanted, p=1) - chances[:, labels] - 2 * generalized_iou(boxes, wanted)
    cost = cost.view(len(targets), QUERIES, -1).cpu()
    sizes = [len(one["labels"]) for one in targets]
    return [linear_sum_assignment(one[number]) for number, one in enumerate(cost.split(sizes, -1))]


def criterion(found, targets):
    pairs = match(found, targets)
    images = torch.cat([torch.full((len(rows),), number) for number, (rows, _) in enumerate(pairs)]).to(device)
    rows = torch.cat([torch.as_tensor(rows) for rows, _ in pairs]).to(device)
    columns = [torch.as_tensor(columns, device=device) for _, columns in pairs]
    labels = torch.cat([one["labels"][places] for one, places in zip(targets, columns, strict=True)])
    wanted = torch.cat([one["boxes"][places] for one, places in zip(targets, columns, strict=True)])
    classes = torch.full(found["logits"].shape[:2], CLASSES, device=device)
    classes[images, rows] = labels
    weights = torch.ones(CLASSES + 1, device=device)
    weights[-1] = 0.1
    boxes = found["boxes"][images, rows].float()
    loss = F.cross_entropy(found["logits"].float().transpose(1, 2), classes, weights)
    loss = loss + 5 * F.l1_loss(boxes, wanted, reduction="sum") / len(labels)
    return loss + 2 * (1 - generalized_iou(boxes, wanted).diagonal()).mean()


def targets_of(step):
    generator = torch.Generator().manual_seed(step % 16)
    made = []
    for _ in range(args.batch):
        n = int(torch.randint(1, 15, (1,), generator=generator))
        boxes = torch.cat(
            [torch.rand(n, 2, generator=generator) * 0.6 + 0.2, torch.rand(n, 2, generator=generator) * 0.3 + 0.05], 1
        )
        made.append({"labels": torch.randint(CLASSES, (n,), generator=generator).to(device), "boxes": boxes.to(device)})
    return made


model = Detr().to(device)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
backbone = [one for name, one in model.named_parameters() if name.startswith("backbone")]
others = [one for name, one in model.named_parameters() if not name.startswith("backbone")]
optimizer = torch.optim.AdamW(
    [{"params": others}, {"params": backbone, "lr": 1e-5}], lr=1e-4, weight_decay=1e-4, fused=args.fused or None
)
if args.compile:
    model.compile(mode=args.mode)
pictures = [torch.randn(args.batch, 3, args.size, args.size, device=device) for _ in range(4)]


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    images = pictures[step % 4]
    if args.channels_last:
        images = images.to(memory_format=torch.channels_last)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = model(images)
    loss = criterion(found, targets_of(step))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
wait()
print(f"{1e3 * (time.perf_counter() - began) / (args.steps - args.steps // 3):.4f} ms a step")
