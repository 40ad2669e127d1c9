"""Memory by batch size: the peak of each size that a search for the largest one tried, and what that says, in words."""

from collections.abc import Mapping


def by_size(peaks: Mapping[str, float | None]) -> list[tuple[int, float | None]]:
    """Returns a record's `batch_peak_bytes` as sizes in ascending order, each with its bytes, or None if it did not fit."""
    sizes = {int(size): peak for size, peak in peaks.items() if size.isascii() and size.isdecimal() and len(size) < 19}
    return sorted(sizes.items(), key=lambda one: one[0])


def largest_fitting(peaks: Mapping[str, float | None]) -> int | None:
    """Returns the largest size that fits; None if none does."""
    return max((size for size, peak in by_size(peaks) if peak is not None), default=None)


def largest_batch_text(peaks: Mapping[str, float | None], usual: int | None) -> str:
    """Says which batch size is the largest that fits, and how much memory each takes; `usual` is the setting's own."""
    sizes = by_size(peaks)
    largest = largest_fitting(peaks)
    if largest is None:
        return f"no batch fits, not even {_samples(sizes[0][0])}" if sizes else "no batch size was tried"
    times = f", {largest / usual:.3g} times {usual}" if usual and usual != largest else ""
    said = f"the largest batch that fits: {largest}{times}"
    if all(peak is not None for _, peak in sizes):
        said = f"a batch of {largest} fits{times}; nothing larger was tried"
    memory = ", ".join(f"{size} {'does not fit' if peak is None else f'{peak / 2**30:.2f} GiB'}" for size, peak in sizes)
    return f"{said} (memory by batch size: {memory})"


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"
