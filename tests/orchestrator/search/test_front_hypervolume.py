from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from compile_sweep.schema.pareto import front, hypervolume
from orchestrator.search.hypervolume import Cells


def counted(points: list[tuple[float, ...]], size: int) -> int:
    """Returns the hypervolume of integer points below (size, …, size), by counting unit cells."""
    dimensions = len(points[0])
    return sum(any(all(p <= c for p, c in zip(point, cell, strict=True)) for point in points)
               for cell in product(range(size), repeat=dimensions))  # fmt: skip


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_the_volume_is_what_counting_cells_gives(dimensions: int) -> None:
    chance = np.random.default_rng(dimensions)
    for count in (1, 2, 5, 9):
        points = [tuple(map(float, point)) for point in chance.integers(0, 7, (count, dimensions))]
        assert hypervolume(front(points), (6.0,) * dimensions) == pytest.approx(counted(points, 6))


@pytest.mark.parametrize(("dimensions", "count", "size"), [(3, 80, 14), (4, 60, 9), (5, 25, 6)])
def test_the_volume_of_a_large_front_is_exact_and_only_grows(dimensions: int, count: int, size: int) -> None:
    chance = np.random.default_rng(0)
    directions = np.abs(chance.normal(size=(count, dimensions)))
    spread = np.floor(size * (1 - directions / np.linalg.norm(directions, axis=1, keepdims=True)))
    points = [tuple(map(float, point)) for point in spread]
    reference = (float(size),) * dimensions
    volumes = [hypervolume(points[: upto + 1], reference) for upto in range(count)]
    assert volumes == sorted(volumes)
    cells = np.stack(np.meshgrid(*[np.arange(size)] * dimensions, indexing="ij"), axis=-1)
    covered = np.any([(np.array(point) <= cells).all(axis=-1) for point in points], axis=0).sum()
    assert volumes[-1] == covered
    assert hypervolume(points[::-1], reference) == volumes[-1]
    assert len(front(points)) > 15


def test_an_empty_front_and_points_beyond_the_reference_have_no_volume() -> None:
    assert hypervolume([], (1.0, 1.0)) == 0.0
    assert hypervolume([(2.0, 0.0)], (1.0, 1.0)) == 0.0


def test_a_certain_points_gain_is_the_volume_it_adds() -> None:
    chance = np.random.default_rng(0)
    points = front([tuple(point) for point in chance.random((6, 3))])
    reference = (1.0, 1.0, 1.0)
    asked = chance.random((20, 3))
    gains = Cells(points, reference).expected_gains([asked[:, [axis]] for axis in range(3)], np.ones(1))
    before = hypervolume(points, reference)
    for point, gain in zip(asked, gains, strict=True):
        assert gain == pytest.approx(hypervolume(front([*points, tuple(point)]), reference) - before)


def test_an_expected_gain_is_the_mean_over_independent_draws() -> None:
    points, reference = [(0.2, 0.7), (0.6, 0.3)], (1.0, 1.0)
    first, second = np.array([[0.1, 0.5]]), np.array([[0.2, 0.9]])
    (gain,) = Cells(points, reference).expected_gains([first, second], np.array([0.25, 0.75]))
    by_hand = sum(
        p * q * (hypervolume(front([*points, (a, b)]), reference) - hypervolume(points, reference))
        for a, p in zip(first[0], (0.25, 0.75), strict=True)
        for b, q in zip(second[0], (0.25, 0.75), strict=True)
    )
    assert gain == pytest.approx(by_hand)


def test_a_front_of_thousands_keeps_its_cells_few() -> None:
    along = np.linspace(0, 1, 3000)
    cells = Cells([(float(x), float(1 - x), 0.5) for x in along], (1.1, 1.1, 1.1))
    assert cells.is_dominated.size <= 60_000
    assert cells.volume() == pytest.approx(0.6 * (1.21 - 0.5), rel=0.05)
