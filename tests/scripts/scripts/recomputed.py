"""A stack of layers whose activations are recomputed in the backward pass, the first one by the older implementation."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Layer(nn.Module):
    calls = 0

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            Layer.calls += 1
        return x + torch.tanh(self.drop(self.mix(x)))


class Net(nn.Module):
    calls = 0

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            Net.calls += 1
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=number == 0)
        return self.head(x)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
while True:
    x = torch.randn(16, 32, requires_grad=True)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
