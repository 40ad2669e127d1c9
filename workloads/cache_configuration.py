"""What of torch's state makes compile-cache artifacts invalid or wrong in another process."""

from __future__ import annotations

import torch


def configuration() -> dict[str, str]:
    """Each such component by name."""
    return {"float32 matmul precision": torch.get_float32_matmul_precision()}
