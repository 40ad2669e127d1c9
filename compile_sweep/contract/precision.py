"""How precisely float32 is computed, by torch's newer attributes, which follow its older functions.

Since torch 2.9 the precision is an attribute of each back-end and kind of operation
(`torch.backends.cuda.matmul.fp32_precision`). If that was used, `torch.get_float32_matmul_precision` and
`torch.backends.cudnn.allow_tf32` may raise (torch 2.11 to 2.13), in a process that otherwise trains correctly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_NAMED = {"tf32": "high", "bf16": "medium"}
"""Names that the older functions use for a product's precision; anything else is highest."""


def matmul_precision() -> str:
    """Returns the precision of matrix products by torch's names (highest, high, medium); the lower one of GPU and CPU."""
    found = {_NAMED.get(value) for name, value in fp32_precisions().items() if name.endswith("matmul")}
    return next((name for name in ("medium", "high") if name in found), "highest")


def convolutions_allow_tf32() -> bool:
    """Tells whether cuDNN may compute convolutions in TF32."""
    return fp32_precisions()["cuda.conv"] == "tf32"


def fp32_precision_overrides() -> Mapping[str, str] | None:
    """Returns `fp32_precisions` if the older functions do not express all of it; otherwise None."""
    found = fp32_precisions()
    try:
        torch.get_float32_matmul_precision()
        _ = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # both interfaces were used, which torch rejects
        return found
    return None if {found["mkldnn.conv"], found["mkldnn.rnn"]} == {"none"} else found


def fp32_precisions() -> dict[str, str]:
    """Returns ieee, tf32, bf16, or none if unset, by back-end and kind of operation."""
    return {name: str(of.fp32_precision) for name, of in _places().items()}


def use_full_precision() -> None:
    """Disables TF32 and bfloat16 in float32 products, convolutions and recurrent layers, until set otherwise."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for of in _places().values():
        if of.fp32_precision in _NAMED:  # set for the back-end or globally
            of.fp32_precision = "ieee"


@contextmanager
def preserve_precision() -> Iterator[None]:
    """Restores the precision of float32 after the block."""
    matmul, cudnn, before = matmul_precision(), convolutions_allow_tf32(), fp32_precisions()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        for name, of in _places().items():
            if of.fp32_precision != before[name]:
                of.fp32_precision = "none"  # inherits the value of the back-end or the global one
            if of.fp32_precision != before[name]:
                of.fp32_precision = before[name]


@contextmanager
def full_precision() -> Iterator[None]:
    """Disables TF32 and bfloat16 in float32 operations for the block."""
    with preserve_precision():
        use_full_precision()
        yield


def _places() -> dict[str, Any]:
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    return {
        "cuda.matmul": torch.backends.cuda.matmul, "cuda.conv": cudnn.conv, "cuda.rnn": cudnn.rnn,
        "mkldnn.matmul": mkldnn.matmul, "mkldnn.conv": mkldnn.conv, "mkldnn.rnn": mkldnn.rnn,
    }  # fmt: skip
