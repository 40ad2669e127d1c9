"""Starts a process for each rank with torch.multiprocessing.spawn, as PyTorch's tutorials on DistributedDataParallel do."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(rank, world_size, steps):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        torch.manual_seed(rank)
        model = DDP(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(steps):
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(1, 4000), nprocs=1, join=True)
