"""An image classifier: DataLoader workers, mixup, label smoothing, an average of the weights, channels_last, autocast."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
np.random.seed(0)


class Images(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 12, 12, generator=generator), index % 5


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for width in (8, 16):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def mixup(x, y, alpha=0.2):
    share = np.random.beta(alpha, alpha)
    order = torch.randperm(x.size(0))
    return share * x + (1 - share) * x[order], y, y[order], share


def main():
    model = ConvNet().to(memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10_000)
    loader = DataLoader(Images(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True)
    for epoch in range(200):
        for images, labels in loader:
            images = images.to(memory_format=torch.channels_last)
            mixed, first, second, share = mixup(images, labels)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(mixed)
                loss = share * criterion(logits, first) + (1 - share) * criterion(logits, second)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters()):
                    kept.lerp_(now, 0.01)


if __name__ == "__main__":
    main()
