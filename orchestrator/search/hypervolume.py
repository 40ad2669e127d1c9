"""Computes how much more of the space of losses a front is expected to dominate with one more setting.

The box below the reference point is cut into cells along the front's own coordinates, so that a cell is dominated as a whole or
not at all. The gain of a point is then a sum over cells of a product of lengths, one per objective. Since objectives are assumed
to be independent, its expectation is the same sum with expected lengths (the grid form of expected hypervolume improvement:
Emmerich, Deutz and Klinkenberg, "Hypervolume-based expected improvement", CEC 2011).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from compile_sweep.schema.pareto import Losses, hypervolume

Floats = npt.NDArray[np.float64]

_MAX_CELLS = 60_000
"""Maximum number of cells; evenly spaced points represent a front that is too large. Allows 38 points with three objectives."""


class Cells:
    """The box below a reference point, cut along a front of losses that do not dominate each other."""

    def __init__(self, front: Sequence[Losses], reference: Losses) -> None:
        self._reference = np.asarray(reference, dtype=np.float64)
        points = np.asarray(front, dtype=np.float64).reshape(len(front), len(reference))
        points = points[(points < self._reference).all(axis=1)]
        most = int(_MAX_CELLS ** (1 / len(reference))) - 1
        if len(points) > most:
            by_first = points[np.argsort(points[:, 0])]
            points = by_first[np.linspace(0, len(points) - 1, most).round().astype(int)]
        self._points = points
        self.edges = [np.append(np.sort(points[:, axis]), top) for axis, top in enumerate(self._reference)]
        """Where cells meet along each objective, ascending; the lowest cell has no lower end."""
        self.is_dominated = np.zeros([len(points) + 1] * len(reference), dtype=bool)
        for point in points:
            # The cell at i lies between edges i-1 and i, so those above an edge begin one further.
            lowest = [int(np.searchsorted(edges, value)) + 1 for edges, value in zip(self.edges, point, strict=True)]
            self.is_dominated[tuple(slice(start, None) for start in lowest)] = True

    def volume(self) -> float:
        """The volume that the front dominates; for a large front, that of its representative points."""
        return hypervolume([tuple(point) for point in self._points.tolist()], tuple(self._reference.tolist()))

    def expected_gains(self, draws: Sequence[Floats], weights: Floats) -> Floats:
        """Returns what each setting would add to the volume, from each objective's (setting, draw) and the draws' probability."""
        gains: Floats = (~self.is_dominated).astype(np.float64)[None]
        for edges, drawn in zip(self.edges, draws, strict=True):
            below = np.maximum(edges[None, :, None] - drawn[:, None, :], 0.0) @ weights  # (setting, edge)
            lengths = np.diff(below, axis=1, prepend=0.0)
            if gains.shape[0] == 1 and len(lengths) != 1:
                gains = np.tensordot(lengths, gains[0], axes=(1, 0))
            else:
                gains = np.einsum("si,si...->s...", lengths, gains)
        return gains
