"""Modes and CUDA graphs: two ways to say one thing, settled here."""

from __future__ import annotations

from workloads.errors import SettingsError
from workloads.vocabulary import Mode

WITH_CUDAGRAPHS = {
    Mode.DEFAULT: Mode.REDUCE_OVERHEAD,
    Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS: Mode.MAX_AUTOTUNE,
}
"""The mode that is another one with CUDA graphs (`torch._inductor.list_mode_options`)."""

WITHOUT_CUDAGRAPHS = {graphed: plain for plain, graphed in WITH_CUDAGRAPHS.items()}


def settled(given: Mode | None, cudagraphs: bool | None) -> tuple[Mode, bool]:
    """The mode and whether it uses CUDA graphs, from whichever of the two a person named.

    Raises:
        SettingsError: they contradict each other.
    """
    mode = given or Mode.DEFAULT
    if cudagraphs is None:
        return mode, mode in WITHOUT_CUDAGRAPHS
    if cudagraphs and mode in WITH_CUDAGRAPHS:
        if given is Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS:
            raise SettingsError("mode=max-autotune-no-cudagraphs contradicts cudagraphs=on; say mode=max-autotune")
        return WITH_CUDAGRAPHS[mode], True
    if not cudagraphs and mode in WITHOUT_CUDAGRAPHS:
        if mode is Mode.REDUCE_OVERHEAD:
            raise SettingsError("mode=reduce-overhead is CUDA graphs and contradicts cudagraphs=off; say mode=default")
        return WITHOUT_CUDAGRAPHS[mode], False
    return mode, cudagraphs
