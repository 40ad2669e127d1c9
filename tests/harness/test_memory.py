"""Memory figures: CUDA graphs' pools, and whether a second model fits."""

from __future__ import annotations

import pytest
import torch

from compile_sweep.harness import memory
from compile_sweep.harness.memory import private_pools

CPU = torch.device("cpu")


def segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, object]:
    return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}


def test_only_this_devices_private_segments_are_added_up() -> None:
    segments = [segment(0, (0, 0), 100, 90), segment(0, (0, 1), 40, 10), segment(0, (3, 0), 5, 5), segment(1, (0, 1), 7, 7)]
    pools = private_pools(segments, 0)
    assert (pools.held, pools.in_tensors) == (45, 15)


def test_a_cpu_has_one_figure_and_room() -> None:
    memory.reset_peaks(CPU)
    found = memory.read_peaks(CPU)
    assert found.in_use_bytes > 50e6  # torch alone
    assert (found.tensors_bytes, found.reserved_bytes, found.cudagraph_pool_bytes) == (None, None, None)
    assert memory.has_room(2**60, CPU)


@pytest.mark.gpu
def test_what_a_captured_graph_works_in_counts_though_the_allocator_calls_it_free() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.ones(1 << 20, device=device)
    graph, result = torch.cuda.CUDAGraph(), torch.zeros_like(source)
    with torch.cuda.graph(graph):
        result.copy_(source.repeat(64).sum())  # 256 MiB that are freed when capture ends
    memory.reset_peaks(device)
    before = torch.cuda.memory_allocated(device)
    graph.replay()
    torch.cuda.synchronize()
    found = memory.read_peaks(device)
    assert found.tensors_bytes is not None
    assert found.cudagraph_pool_bytes is not None
    assert found.tensors_bytes < before + 2**20
    assert found.cudagraph_pool_bytes >= 256 << 20
    assert found.in_use_bytes >= before + (256 << 20)


@pytest.mark.gpu
def test_a_device_has_room_for_little_and_none_for_more_than_it_has() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    del kept  # the allocator keeps it, and can give it to a second model
    free, total = torch.cuda.mem_get_info(device)
    assert memory.has_room(100 << 20, device)
    assert not memory.has_room(total, device)
    assert memory.has_room(int((free + (1 << 30) - memory._MARGIN_BYTES) / memory._REFERENCE_FACTOR), device)
