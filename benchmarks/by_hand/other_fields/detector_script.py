"""An anchor-free detector in the manner of YOLOv8: cross-stage blocks, a pyramid, task-aligned assignment, averaged weights.

`python detector_script.py [--compile [--mode MODE]] [--channels-last] [--fused] [--steps N]`: 32 images of 640 pixels, 1 to 20
boxes each, float16 autocast with scaled gradients, SGD with Nesterov's momentum. The last line is the mean step after the
first third of the steps, by this script's own clock.
"""

import argparse
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--depth", type=int, default=1)
parser.add_argument("--size", type=int, default=640)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--classes", type=int, default=80)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mode", default="default")
parser.add_argument("--fused", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
random.seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
BINS = 16


class Conv(nn.Sequential):
    def __init__(self, a, b, k=1, s=1):
        super().__init__(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b), nn.SiLU(inplace=True))


class Bottleneck(nn.Module):
    def __init__(self, c, add):
        super().__init__()
        self.a, self.b, self.add = Conv(c, c, 3), Conv(c, c, 3), add

    def forward(self, x):
        y = self.b(self.a(x))
        return x + y if self.add else y


class C2f(nn.Module):
    def __init__(self, a, b, n, add=False):
        super().__init__()
        self.c = b // 2
        self.first, self.last = Conv(a, b), Conv((2 + n) * self.c, b)
        self.m = nn.ModuleList(Bottleneck(self.c, add) for _ in range(n))

    def forward(self, x):
        y = list(self.first(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.last(torch.cat(y, 1))


class SPPF(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.first, self.last, self.pool = Conv(a, a // 2), Conv(2 * a, b), nn.MaxPool2d(5, 1, 2)

    def forward(self, x):
        y = [self.first(x)]
        y.extend(self.pool(y[-1]) for _ in range(3))
        return self.last(torch.cat(y, 1))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        w, n = args.width, args.depth
        c1, c2, c3, c4, c5 = w, 2 * w, 4 * w, 8 * w, 16 * w
        self.p2 = nn.Sequential(Conv(3, c1, 3, 2), Conv(c1, c2, 3, 2), C2f(c2, c2, n, True))
        self.p3 = nn.Sequential(Conv(c2, c3, 3, 2), C2f(c3, c3, 2 * n, True))
        self.p4 = nn.Sequential(Conv(c3, c4, 3, 2), C2f(c4, c4, 2 * n, True))
        self.p5 = nn.Sequential(Conv(c4, c5, 3, 2), C2f(c5, c5, n, True), SPPF(c5, c5))
        self.up4, self.up3 = C2f(c5 + c4, c4, n), C2f(c4 + c3, c3, n)
        self.down4, self.n4 = Conv(c3, c3, 3, 2), C2f(c3 + c4, c4, n)
        self.down5, self.n5 = Conv(c4, c4, 3, 2), C2f(c4 + c5, c5, n)
        box, cls = max(16, c3 // 4, 4 * BINS), max(c3, min(args.classes, 100))
        self.box = nn.ModuleList(
            nn.Sequential(Conv(c, box, 3), Conv(box, box, 3), nn.Conv2d(box, 4 * BINS, 1)) for c in (c3, c4, c5)
        )
        self.cls = nn.ModuleList(
            nn.Sequential(Conv(c, cls, 3), Conv(cls, cls, 3), nn.Conv2d(cls, args.classes, 1)) for c in (c3, c4, c5)
        )
        for m in self.cls:
            m[-1].bias.data.fill_(-6.0)

    def forward(self, x):
        p3 = self.p3(self.p2(x))
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        t4 = self.up4(torch.cat((F.interpolate(p5, scale_factor=2.0), p4), 1))
        o3 = self.up3(torch.cat((F.interpolate(t4, scale_factor=2.0), p3), 1))
        o4 = self.n4(torch.cat((self.down4(o3), t4), 1))
        o5 = self.n5(torch.cat((self.down5(o4), p5), 1))
        return [torch.cat((b(o), c(o)), 1) for b, c, o in zip(self.box, self.cls, (o3, o4, o5), strict=True)]


def iou(a, b, eps=1e-7):
    """Complete intersection over union of boxes x1 y1 x2 y2."""
    ax1, ay1, ax2, ay2 = a.unbind(-1)
    bx1, by1, bx2, by2 = b.unbind(-1)
    inter = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(0) * (
        torch.minimum(ay2, by2) - torch.maximum(ay1, by1)
    ).clamp(0)
    wa, ha, wb, hb = ax2 - ax1, ay2 - ay1, bx2 - bx1, by2 - by1
    value = inter / (wa * ha + wb * hb - inter + eps)
    cw, ch = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1), torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    far = ((bx1 + bx2 - ax1 - ax2) ** 2 + (by1 + by2 - ay1 - ay2) ** 2) / 4
    v = 0.405 * (torch.atan(wb / (hb + eps)) - torch.atan(wa / (ha + eps))) ** 2
    with torch.no_grad():
        alpha = v / (v - value + 1 + eps)
    return value - far / (cw**2 + ch**2 + eps) - alpha * v


class DetectionLoss:
    """What a detector's outputs cost, with targets assigned by how well classes and boxes agree."""

    def __init__(self):
        self.project = torch.arange(BINS, dtype=torch.float, device=device)
        points, strides = [], []
        for stride in (8, 16, 32):
            n = args.size // stride
            line = torch.arange(n, device=device) + 0.5
            y, x = torch.meshgrid(line, line, indexing="ij")
            points.append(torch.stack((x, y), -1).view(-1, 2))
            strides.append(torch.full((n * n, 1), float(stride), device=device))
        self.points, self.strides = torch.cat(points), torch.cat(strides)

    def preprocess(self, targets, batch):
        """Rows of image, class and box become a padded tensor of batch × most boxes × 5."""
        images = targets[:, 0]
        _, counts = images.unique(return_counts=True)
        out = torch.zeros(batch, int(counts.max()), 5, device=device)
        for j in range(batch):
            matches = images == j
            if n := int(matches.sum()):
                out[j, :n] = targets[matches, 1:]
        return out

    @torch.no_grad()
    def assign(self, scores, boxes, labels, truth, mask):
        """Returns target boxes, target scores and which points are foreground."""
        centers = self.points * self.strides
        lt, rb = truth[:, :, None, :2], truth[:, :, None, 2:]
        inside = torch.cat((centers - lt, rb - centers), -1).amin(-1) > 1e-9
        overlaps = iou(truth[:, :, None], boxes[:, None]).clamp(0)
        chosen = scores.gather(2, labels[:, None].expand(-1, scores.size(1), -1).long()).transpose(1, 2)
        metric = chosen**0.5 * overlaps**6 * inside * mask[..., None]
        top, at = metric.topk(10, dim=-1)
        positive = torch.zeros_like(metric).scatter_(-1, at, (top > 1e-9).to(metric.dtype)) * inside * mask[..., None]
        many = positive.sum(1, keepdim=True) > 1
        best = torch.zeros_like(positive).scatter_(1, overlaps.argmax(1, keepdim=True), 1.0)
        positive = torch.where(many, best, positive)
        foreground = positive.sum(1) > 0
        owner = positive.argmax(1)
        target_boxes = truth.gather(1, owner[..., None].expand(-1, -1, 4))
        target_labels = labels.gather(1, owner).long()
        target_scores = F.one_hot(target_labels, args.classes) * foreground[..., None]
        metric = metric * positive
        scale = metric.amax(-1, keepdim=True), (overlaps * positive).amax(-1, keepdim=True)
        weight = (metric * scale[1] / (scale[0] + 1e-9)).amax(1)
        return target_boxes, target_scores * weight[..., None], foreground

    def __call__(self, outputs, targets):
        batch = outputs[0].size(0)
        flat = torch.cat([o.reshape(batch, o.size(1), -1) for o in outputs], 2).permute(0, 2, 1).contiguous().float()
        distances, logits = flat.split((4 * BINS, args.classes), -1)
        rows = self.preprocess(targets, batch)
        labels, truth = rows[..., 0], rows[..., 1:]
        mask = truth.sum(-1) > 0
        reach = (distances.view(batch, -1, 4, BINS).softmax(-1) @ self.project).view(batch, -1, 4)
        boxes = torch.cat((self.points - reach[..., :2], self.points + reach[..., 2:]), -1)
        wanted, scores, foreground = self.assign(logits.detach().sigmoid(), boxes.detach() * self.strides, labels, truth, mask)
        total = scores.sum().clamp(min=1)
        cls = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum") / total
        box = dfl = flat.sum() * 0
        if foreground.any():
            weight = scores.sum(-1)[foreground]
            wanted = wanted / self.strides
            box = ((1 - iou(boxes[foreground], wanted[foreground])) * weight).sum() / total
            points = self.points.expand(batch, -1, -1)[foreground]
            sides = torch.cat((points - wanted[foreground][:, :2], wanted[foreground][:, 2:] - points), -1).clamp(0, BINS - 1.01)
            low = sides.long()
            share = low + 1 - sides
            chosen = distances[foreground].view(-1, BINS)
            dfl = F.cross_entropy(chosen, low.view(-1), reduction="none").view(low.shape) * share
            dfl = dfl + F.cross_entropy(chosen, low.view(-1) + 1, reduction="none").view(low.shape) * (1 - share)
            dfl = (dfl.mean(-1) * weight).sum() / total
        return (7.5 * box + 0.5 * cls + 1.5 * dfl) * batch


def make_batch():
    """Images in bytes, and rows of image, class and box."""
    rows = []
    for image in range(args.batch):
        for _ in range(random.randint(1, 20)):
            w, h = random.uniform(20, args.size / 2), random.uniform(20, args.size / 2)
            x, y = random.uniform(0, args.size - w), random.uniform(0, args.size - h)
            rows.append([image, random.randrange(args.classes), x, y, x + w, y + h])
    return torch.randint(256, (args.batch, 3, args.size, args.size), dtype=torch.uint8), torch.tensor(rows)


batches = [make_batch() for _ in range(6)]
if device == "cuda":
    batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
model = Detector().to(device)
if args.channels_last:
    model.to(memory_format=torch.channels_last)
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999), use_buffers=True
)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.937, nesterov=True, weight_decay=5e-4, fused=args.fused or None)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
if args.compile:
    model.compile(mode=args.mode)
criterion = DetectionLoss()


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


began = 0.0
for step in range(args.steps):
    if step == args.steps // 3:
        wait()
        began = time.perf_counter()
    images, targets = (x.to(device, non_blocking=True) for x in batches[step % len(batches)])
    images = images.float() / 255
    if args.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        loss = criterion(model(images), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    average.update_parameters(model)
wait()
took = (time.perf_counter() - began) / (args.steps - args.steps // 3)
print(f"{args.batch / took:.1f} images/s, {1e3 * took:.3f} ms a step")
