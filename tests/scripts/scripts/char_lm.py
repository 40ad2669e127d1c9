"""A character language model that reads a memory-mapped file, compiles itself and sets the learning rate in every step."""

import math
import os
import pickle
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

batch_size, block_size, layers, heads, width = 8, 32, 2, 2, 32
max_iters, eval_interval, dropout = 2000, 50, 0.1
compile_model = True
for argument in sys.argv[1:]:  # --max_iters=100
    name, value = argument.lstrip("-").split("=")
    globals()[name] = type(globals()[name])(value) if name != "compile_model" else value == "True"

with open("data/meta.pkl", "rb") as file:
    vocabulary = pickle.load(file)["vocab_size"]
torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"


def get_batch():
    data = np.memmap(os.path.join("data", "train.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in self.attn(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


model = GPT().to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
other = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
scaler = torch.amp.GradScaler(device, enabled=False)
raw_model = model
if compile_model:
    print("compiling the model...")
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


x, y = get_batch()
iteration = 0
while iteration <= max_iters:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (iteration + 1) / 20) * 0.5 * (1 + math.cos(math.pi * iteration / max_iters))
    if iteration % eval_interval == 0:
        print(f"step {iteration}: loss {estimate_loss():.4f}")
        os.makedirs("out", exist_ok=True)
        torch.save({"model": raw_model.state_dict(), "iteration": iteration}, os.path.join("out", "ckpt.pt"))
    for micro in range(2):
        _, loss = model(x, y)
        x, y = get_batch()
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
