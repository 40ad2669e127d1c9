"""LoRA by hand: a frozen model with small trained matrices beside some of its layers."""

import torch
from torch import nn

torch.manual_seed(0)


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.down.T) @ self.up.T


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


model = nn.Sequential(*(Layer(32) for _ in range(3)), nn.Linear(32, 4)).requires_grad_(False)
for layer in list(model)[:3]:
    layer.mix = LoRA(layer.mix)
trained = [weights for weights in model.parameters() if weights.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
while True:
    x = torch.randn(16, 32)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
