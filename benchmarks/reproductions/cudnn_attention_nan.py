"""cuDNN's attention backward on Hopper gives NaN in the gradient of the queries (pytorch issue 196678).

Background: seen with torch 2.11.0+cu130 and cuDNN 9.19 on an H200, in eager mode as in compiled code. It takes an explicit mask,
a length S with S % 128 == 64, and one query row whose log-sum-exp is below about -88. The forward, and the gradients of keys
and values, stay finite.
Output: for masked lengths up to 256 those at which the gradient is not finite, with cuDNN attention on and off; and from which
log-sum-exp on.

    python benchmarks/reproductions/cudnn_attention_nan.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

BATCH, HEADS, HEAD_DIM = 8, 12, 64


def query_gradient_is_finite(length: int, log_sum_exp: float, cudnn: bool) -> bool:
    """Tells whether the gradient is finite for one attention, forward and backward, whose first row has the given log-sum-exp."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    shape = (BATCH, HEADS, length, HEAD_DIM)
    query, key, value = (0.1 * torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    query[..., 0], key[..., 0], query[:, :, 0] = 0, 0, 0
    query[:, :, 0, 0], key[:, :, 0, 0] = 8, log_sum_exp  # row 0 attends to key 0 only; 8 cancels the scale 1/sqrt(64)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril().expand(BATCH, 1, length, length)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    scaled_dot_product_attention(query, key, value, attn_mask=mask).backward(torch.randn_like(value))
    assert query.grad is not None
    return bool(query.grad.isfinite().all())


def main() -> None:
    """Prints the lengths and values that fail."""
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    for cudnn in (True, False):
        bad = [length for length in range(8, 257, 8) if not query_gradient_is_finite(length, -120.0, cudnn)]
        print(f"cuDNN attention {'on' if cudnn else 'off'}: not finite at lengths {bad}")
    levels = (-60.0, -80.0, -88.0, -90.0, -100.0)
    bad_levels = [level for level in levels if not query_gradient_is_finite(64, level, True)]
    print(f"cuDNN attention on, length 64: not finite at log-sum-exp {bad_levels} of {list(levels)}")


if __name__ == "__main__":
    main()
