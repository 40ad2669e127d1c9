"""Kernels that read back what they have just stored: found in code as Inductor writes it, and nothing else is."""

from __future__ import annotations

import pytest

from compile_sweep.harness.diagnostics.unsynchronized import unsynchronized_kernels

ONE_LOOP = """
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_2 + 384*x3), r0_mask & xmask, other=0.0)
        tl.store(out_ptr2 + (r0_2 + 384*x3), tmp0, r0_mask & xmask)
"""
READS_BACK = """
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp41 = tl.load(out_ptr2 + (r0_2 + 384*x3), r0_mask & xmask, other=0.0)
        tl.store(out_ptr4 + (r0_2 + 384*x1 + 98304*x0), tmp41, r0_mask & xmask)
"""
READS_ANOTHER = READS_BACK.replace("tl.load(out_ptr2", "tl.load(in_ptr1")
IN_PLACE = """
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask)
    tl.store(in_out_ptr0 + (x0), tmp0 + 1, xmask)
"""


def module_of(**bodies: str) -> str:
    """Returns a module as Inductor writes it, with kernels of these bodies."""
    head = "@triton.jit\ndef {0}(in_ptr0, out_ptr2, out_ptr4, xnumel, r0_numel):"
    return "\n".join(
        f"{name} = async_compile.triton('{name}', '''{head.format(name)}{body}''', device_str='cuda')"
        for name, body in bodies.items()
    )


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        (ONE_LOOP + READS_BACK, True),
        (ONE_LOOP + "    tl.debug_barrier()\n" + READS_BACK, False),
        (ONE_LOOP + READS_ANOTHER, False),
        (READS_BACK + ONE_LOOP, False),
        (IN_PLACE, False),
        (IN_PLACE + IN_PLACE, True),
    ],
)
def test_a_kernel_is_found_if_it_reads_back_without_a_barrier(body: str, is_found: bool) -> None:
    found = unsynchronized_kernels(module_of(triton_poi_0=IN_PLACE, triton_red_1=body, triton_red_2=READS_ANOTHER))
    assert found == ["triton_red_1"] * is_found
