"""`mark_dynamic` fails at the length that equals the head dimension (torch 2.11, CUDA).

Background: Inductor's `pad_mm` decides whether padding a matrix product pays by comparing its sizes. Before torch 2.13 it
compares symbols, which adds guards: of the two products of an attention, one then holds only for lengths of at least the head
dimension and the other only for lengths of at most that, so the marked length is specialised and the mark is violated
(`ConstraintViolationError`). 197 keys, no multiple of 8, make the products candidates for padding.
Output: for each length whether it compiled, with Inductor's `shape_padding` on (its default) and off.

    python benchmarks/reproductions/mark_dynamic_length.py
"""

import torch
from torch import Tensor
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

HEADS, HEAD_DIM, KEYS = 24, 64, 197
LENGTHS = (72, 64, 160, 32, 64)


def scores(query: Tensor, key: Tensor) -> Tensor:
    """Computes half an attention, reduced to a scalar."""
    return (query @ key.transpose(1, 2)).float().square().sum()


def try_lengths(shape_padding: bool) -> list[str]:
    """Returns the result for each length, in order, with one compiled function."""
    torch._dynamo.reset()
    compiled = torch.compile(scores, options={"shape_padding": shape_padding})
    outcomes = []
    for length in LENGTHS:
        query, key = (
            torch.randn(HEADS, rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for rows in (length, KEYS)
        )
        torch._dynamo.mark_dynamic(query, 1)
        try:
            compiled(query, key).backward()
            outcomes.append(f"{length} ok")
        except (ConstraintViolationError, UserError) as error:
            outcomes.append(f"{length} {type(error).__name__}: {str(error).splitlines()[0]}")
    return outcomes


def main() -> None:
    """Prints the results of both runs."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for shape_padding in (True, False):
        print(f"shape_padding={shape_padding}:", *try_lengths(shape_padding), sep="\n  ")


if __name__ == "__main__":
    main()
