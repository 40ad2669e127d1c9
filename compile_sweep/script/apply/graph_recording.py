"""Records what a call computes, and its gradients, as CUDA graphs."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

Run = Callable[[], Sequence[Tensor]]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which calls are captured, for which libraries keep memory of their own."""
    return torch.cuda.Stream(device)


def on_side_stream(device: torch.device, function: Callable[[], Any]) -> Any:
    """Runs a function twice on the stream on which calls are captured; the current stream waits for it.

    The first run may wait for the GPU, as cuDNN does where its dropout begins; a capture follows the second.

    Raises:
        RuntimeError: The second run waits for the GPU, too, which a capture does not allow.
    """
    if device.type != "cuda":
        return function()
    torch.cuda.empty_cache()  # memory that is kept for one stream is of no use to another
    stream, current = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        function()
        with _waiting_is_an_error():
            found = function()
    current.wait_stream(stream)
    return found


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """Has torch raise an error in the block where something waits for the GPU."""

    def set_mode(mode: int | str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not see all that waits
            torch.cuda.set_sync_debug_mode(mode)

    before = torch.cuda.get_sync_debug_mode()
    set_mode("error")
    try:
        yield
    finally:
        set_mode(before)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns numbers that differ once tensors were changed in place."""
    return [0 if one.is_inference() else one._version for one in tensors]


def generator_state(device: torch.device) -> Tensor | None:
    """Returns where a GPU's random numbers are; None for a CPU, whose no captured call draws."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_generator_state(device: torch.device, state: Tensor | None) -> None:
    """Puts a GPU's random numbers where they were."""
    if state is not None:
        torch.cuda.set_rng_state(state, device)


_is_recording = False


def is_recording() -> bool:
    """Tells whether a call is being captured, of which the calls of parts, which other modules may share, belong to it."""
    return _is_recording


@contextmanager
def recording() -> Iterator[None]:
    """Has no part's call captured by itself in the block."""
    global _is_recording
    before, _is_recording = _is_recording, True
    try:
        yield
    finally:
        _is_recording = before


@contextmanager
def distributions_not_validated() -> Iterator[None]:
    """Has `torch.distributions` not validate its arguments in the block, for which it waits for the GPU.

    A call of `torch.compile` turns that off for the rest of the process.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


class GraphRecorder:
    """Captures CUDA graphs of functions that ran before on the same stream."""

    def new_pool(self) -> Any:
        """Returns a pool of memory for graphs."""
        return torch.cuda.graph_pool_handle()

    def record(self, run: Run, device: torch.device, pool: Any) -> tuple[Any, list[Tensor]]:
        """Captures a function; returns its graph and the memory of its results."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local"):
            outputs = run()
        return graph, [one.detach() for one in outputs]  # without the autograd graph

    def record_gradients(
        self, run: Callable[[], Sequence[Tensor | None]], device: torch.device, pool: Any
    ) -> tuple[Any, list[Tensor | None]]:
        """Captures a function that computes gradients; returns its graph and their memory."""
        found: list[bool] = []

        def without_none() -> list[Tensor]:
            gradients = run()
            found[:] = [one is not None for one in gradients]
            return [one for one in gradients if one is not None]

        graph, memory = GraphRecorder.record(self, without_none, device, pool)
        return graph, spread(memory, found)


def spread(found: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Returns gradients in the places where they are needed, and None in the others."""
    rest = iter(found)
    return [next(rest) if is_needed else None for is_needed in needed]


def apart(gradients: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns gradients that share no memory: two parameters' gradients may be one tensor, which clipping would change twice."""
    used = {one.untyped_storage().data_ptr() for one in others}
    found: list[Tensor | None] = []
    for one in gradients:
        if one is not None:
            one = one.clone() if one.untyped_storage().data_ptr() in used else one
            used.add(one.untyped_storage().data_ptr())
        found.append(one)
    return found
