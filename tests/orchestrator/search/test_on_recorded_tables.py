"""The claims of docs/search.md about searches and early stopping, on the recorded tables."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from samples import REPOSITORY

from compile_sweep.schema.objectives import Aims
from orchestrator.search import Outlook, Searcher, predictions
from orchestrator.search.gain_search import designed
from orchestrator.search.pruning import patience_with
from orchestrator.search.tables import read_table
from orchestrator.simulate import Ground, replays

TABLES = REPOSITORY / "benchmarks" / "tables"
NAMES = ("captioning-base-h200", "captioning-tiny-cpu")


@pytest.fixture(params=NAMES)
def ground(request: pytest.FixtureRequest) -> Ground:
    return Ground(read_table(TABLES / request.param), Aims.parse())


def test_a_search_needs_less_than_a_quarter_of_the_grid_and_than_chance(ground: Ground) -> None:
    def share(searcher: Searcher, seeds: int) -> float:
        return statistics.median(replay.share_to(0.98) for replay in replays(ground, searcher, seeds, enough=0.98))

    assert share(Searcher.GAIN, 5) < 0.25 < share(Searcher.RANDOM, 9)


def test_six_trials_tell_what_others_will_take_because_there_is_a_guess(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ground.table
    guessed_s = Outlook(table.candidates, Aims.parse(), table.facts).guessed_s

    def off_by() -> float:
        outlook = Outlook(table.candidates, Aims.parse(), table.facts)
        six = list(designed(table.candidates, guessed_s))
        for place in six:
            outlook.tell(table.rows[table.candidates.keys[place]])
        others = np.array([place for place in range(len(table.rows)) if place not in six])
        took = np.array([table.rows[table.candidates.keys[place]]["wall_s"] for place in others])
        return float(np.exp(np.sqrt(np.mean(np.log(outlook.expected(others).wall_s / took) ** 2))))

    with_guess = off_by()
    monkeypatch.setattr(predictions, "guessed_compile_s", lambda setting, facts: 1e-9)
    assert with_guess < 1.8
    assert with_guess < 0.9 * off_by()


def test_with_four_objectives_no_search_finds_more_than_there_is() -> None:
    aims = Aims.parse(("samples_per_s:max", "compile_s:min", "peak_memory_bytes:min", "first_step_s:min"))
    for run in replays(Ground(read_table(TABLES / "captioning-base-h200"), aims), Searcher.RANDOM, 3):
        volumes = [step.volume for step in run.steps]
        assert volumes == sorted(volumes)
        assert volumes[-1] == 1


@pytest.mark.slow
def test_early_stopping_saves_half_and_loses_next_to_nothing(ground: Ground) -> None:
    runs = replays(ground, Searcher.GAIN, 4, prune=ground.pruning(patience_with(Searcher.GAIN)))
    ends = [replay.steps[-1] for replay in runs]
    assert statistics.median(end.gpu_s for end in ends) < 0.5 * runs[0].grid_gpu_s
    assert min(end.volume for end in ends) > 0.98


def test_in_a_lists_own_order_it_is_more_patient(ground: Ground) -> None:
    (run,) = replays(ground, Searcher.GRID, 1, prune=ground.pruning(patience_with(Searcher.GRID)))
    assert run.steps[-1].gpu_s < 0.95 * run.grid_gpu_s
    assert run.steps[-1].volume > 0.98
    assert patience_with(None) == patience_with(Searcher.GRID)
