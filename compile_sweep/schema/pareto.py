"""Pareto dominance, fronts and hypervolumes of losses, for searches and analyses alike. Pure values."""

from collections.abc import Iterable, Sequence

Losses = tuple[float, ...]
"""One number per objective, lower is better: the figure, or its negative where more is better."""


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tells whether the first losses are nowhere worse than the others and better in at least one objective."""
    return tuple(one) != tuple(other) and all(a <= b for a, b in zip(one, other, strict=True))


def front(points: Iterable[Losses]) -> list[Losses]:
    """Returns the points that no other point dominates, each once, in their given order."""
    found: list[Losses] = []
    for point in points:
        found = extended(found, point)
    return found


def extended(found: list[Losses], point: Losses) -> list[Losses]:
    """Returns the front after adding a point, without the points it dominates; the same list if the point changes nothing."""
    if any(all(a <= b for a, b in zip(other, point, strict=True)) for other in found):
        return found
    return [other for other in found if not dominates(point, other)] + [point]


def dominated(points: Sequence[Losses]) -> list[bool]:
    """Tells, for each point, whether another one dominates it. Equal points do not dominate each other."""
    # In ascending order a point can only be dominated by an earlier one, so the front never shrinks while it is built.
    best = set(front(sorted(points)))
    return [point not in best for point in points]


def reference_point(points: Sequence[Losses]) -> Losses:
    """Returns a hypervolume's reference point: a tenth of the points' range worse than the worst, in each objective."""
    if not points:
        raise ValueError("a reference point needs points")
    worst = [max(values) for values in zip(*points, strict=True)]
    best = [min(values) for values in zip(*points, strict=True)]
    return tuple(w + 0.1 * ((w - b) or abs(w) or 1.0) for w, b in zip(worst, best, strict=True))


def hypervolume(points: Iterable[Losses], reference: Losses) -> float:
    """Computes the volume dominated by the points and bounded by the reference point; exact, for any number of points.

    The volume is the sum over slices along the last loss, each the volume of the other losses times its thickness.
    """
    inside = [point for point in points if all(loss < worst for loss, worst in zip(point, reference, strict=True))]
    if len(reference) == 1 or not inside:
        return max((reference[0] - loss for (loss, *_) in inside), default=0.0)
    # Sorting by all losses makes the rounding, and so the result, independent of the order of the points.
    ordered = sorted(inside, key=lambda point: point[::-1])
    volume, slice_volume, found = 0.0, 0.0, list[Losses]()
    for point, upper in zip(ordered, [*(later[-1] for later in ordered[1:]), reference[-1]], strict=True):
        if (grown := extended(found, point[:-1])) is not found:
            found, slice_volume = grown, hypervolume(grown, reference[:-1])
        volume += slice_volume * (upper - point[-1])
    return volume
