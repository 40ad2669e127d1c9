"""A training loop of your own with the winner of a sweep of `examples.bring_your_own:Texts`.

Run it in the folder of that sweep's `best.py`: `python -m examples.plain_loop`.
"""

from __future__ import annotations

import torch
from best import OPTIMIZER_OPTIONS, make_step, padded_length  # written by the sweep

from compile_sweep.contract.model_and_loss import ModelAndLoss, model_loss
from examples.bring_your_own import Texts, gpt2, texts


def main(steps: int = 20) -> list[float]:
    """Trains and returns the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = ModelAndLoss(gpt2(), model_loss).to(device)  # what the sweep compiled: the model with its loss
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **OPTIMIZER_OPTIONS)
    step = make_step(model, optimizer)
    pad = Texts().padded
    losses = []
    for number in range(steps):
        batch = pad(texts(number), padded_length)  # like a collator: to the lengths that were measured, and no others
        loss = step({name: tensor.to(device) for name, tensor in batch.items()}, before_update=lambda: clip(model))
        losses.append(float(loss))
    return losses


def clip(model: torch.nn.Module) -> None:
    """Clips gradients between the backward pass and the update."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


if __name__ == "__main__":
    print(", ".join(f"{loss:.3f}" for loss in main()))
