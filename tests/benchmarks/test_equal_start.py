"""Searchers at equal start: public tables as recorded ones, the community's score, and the baseline of trees."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.methodology_score import Space, score
from benchmarks.search.public_tables import read_csv_table
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings

LINES = ["block,unroll,pad,time_ms,compile_s,total_s"] + [
    f"{block},{unroll},{pad},{'' if block == 16 else 100 / block + unroll + pad},{1 + unroll / 10},{2 + pad}"
    for block in (16, 32, 64, 128, 256)
    for unroll in (1, 2, 4, 8)
    for pad in (0, 1)
]


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.csv"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def test_a_public_table_is_one_of_settings_with_numbers_in_order(kernels: Path, tmp_path: Path) -> None:
    table = read_csv_table(kernels)
    assert (len(table.rows), table.gpu_s) == (40, 100.0)
    assert table.candidates.names == ("workload.block", "workload.pad", "workload.unroll")
    assert not np.array_equal(table.candidates.likeness[0], np.diag([1.0] * 5 + [0.0]))
    assert sum(row["status"] == "infeasible" for row in table.rows.values()) == 8
    with pytest.raises(RecordsError, match="time_ms, compile_s, total_s"):
        read_csv_table(_written(tmp_path / "other.csv", "a,b\n1,2\n"))


def test_the_score_of_random_search_is_about_0_and_of_the_optimum_at_once_1() -> None:
    values = np.random.default_rng(0).lognormal(size=400)
    trials = [(1.0, float(value)) for value in values]
    space = Space.of([*trials, (1.0, None)])
    assert score(space, [[(0.0, float(values.min()))]]) == pytest.approx(1.0)
    shuffled = np.random.default_rng(1)
    searches = [[trials[place] for place in shuffled.permutation(400)] for _ in range(300)]
    assert score(space, searches) == pytest.approx(0.0, abs=0.1)
    assert score(space, [sorted(trials, key=lambda trial: -(trial[1] or 0.0))]) < -1


def test_the_baseline_of_trees_prefers_what_is_better_and_quick(kernels: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, of the extra bench")
    from benchmarks.search.lfbo import Lfbo

    table = read_csv_table(kernels)
    aims = Aims.parse(["samples_per_s:max"])
    proposer = Lfbo(table.candidates, aims, seed=0)
    found = []
    while (setting := proposer.propose()) is not None:
        found.append(setting.key)
        proposer.tell(table.rows[setting.key])
    assert sorted(found) == sorted(table.rows)
    by_speed = sorted(found, key=lambda key: table.rows[key]["samples_per_s"] or 0.0)
    failing, best = (statistics.mean(map(found.index, keys)) for keys in (by_speed[:8], by_speed[-8:]))
    assert best < failing - 5


def test_the_trees_tell_all_values_of_every_field_apart(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, of the extra bench")
    from benchmarks.search.lfbo import features
    from orchestrator.search.candidates import Candidates

    settings = [f"scope=full,workload.group_window={size}" if size else "scope=full" for size in ("", 20, 100)]
    rows = features(Candidates([CompileSettings.parse(one) for one in settings]))
    assert len({tuple(row) for row in rows}) == 3


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
