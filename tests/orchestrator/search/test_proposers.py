"""The contract of every proposer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from recorded_tables import TARGET, recorded, rows_of, settings_of_a_grid

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search import Candidates, Proposer, Searcher, make_proposer
from orchestrator.search.lever_search import LeverSearch
from orchestrator.search.optuna_proposer import Asking

SETTINGS = settings_of_a_grid(12)
ROWS = rows_of(recorded(SETTINGS))
AIMS = Aims.parse([], ["peak_memory_bytes<=20GiB"])
GOOD = CompileSettings(scope=Scope.REGIONAL, dynamic="auto")  # type: ignore[arg-type]

Make = Callable[..., Proposer]


@pytest.fixture(params=[pytest.param(s, marks=[pytest.mark.slow] if s is Searcher.GP else []) for s in Searcher])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param is Searcher.GP:
        pytest.importorskip("scipy")

    def made(seed: int = 0, settings: list[CompileSettings] = SETTINGS) -> Proposer:
        return make_proposer(request.param, Candidates(settings), AIMS, TARGET, seed=seed)

    return made


def searched(proposer: Proposer, at_once: int = 1, seed: int = 0) -> list[str]:
    """Returns keys in the order they were proposed, with results coming back in any order."""
    order, chance = [], random.Random(seed)
    under_way: list[str] = []
    while True:
        while len(under_way) < at_once and (setting := proposer.propose()) is not None:
            order.append(setting.key)
            under_way.append(setting.key)
        if not under_way:
            return order
        proposer.tell(ROWS[under_way.pop(chance.randrange(len(under_way)))])


@pytest.mark.parametrize("at_once", [1, 4])
def test_every_candidate_is_proposed_once_and_then_none(make: Make, at_once: int) -> None:
    proposer = make()
    order = searched(proposer, at_once)
    assert len(order) == len(set(order))
    assert set(order) <= set(ROWS) if isinstance(proposer, LeverSearch) else set(order) == set(ROWS)
    assert proposer.propose() is None


def test_the_same_seed_proposes_the_same(make: Make) -> None:
    assert searched(make(seed=3)) == searched(make(seed=3))


def test_what_was_told_of_before_is_not_proposed(make: Make) -> None:
    proposer = make()
    elsewhere = recorded([CompileSettings.parse("scope=full,autocast=fp16")])
    for row in [*list(ROWS.values())[:10], *rows_of(elsewhere).values()]:
        proposer.tell(row)
    left, order = set(list(ROWS)[10:]), searched(proposer)
    assert set(order) <= left if isinstance(proposer, LeverSearch) else sorted(order) == sorted(left)


def test_a_search_in_which_everything_fails_still_tries_everything(make: Make) -> None:
    proposer = make()
    proposed = []
    while (setting := proposer.propose()) is not None:
        proposed.append(setting.key)
        proposer.tell({"settings_key": setting.key, "status": "infeasible", "label": "out-of-memory", "wall_s": 5.0})
    assert set(proposed) <= set(ROWS) if isinstance(proposer, LeverSearch) else sorted(proposed) == sorted(ROWS)


def test_one_candidate_is_a_search_too(make: Make) -> None:
    assert searched(make(settings=SETTINGS[:1])) == [SETTINGS[0].key]


@pytest.mark.parametrize("searcher", [Searcher.RANDOM, Searcher.TPE, Searcher.NSGA2, Searcher.GAIN])
def test_another_seed_searches_otherwise(searcher: Searcher) -> None:
    orders = {tuple(searched(make_proposer(searcher, Candidates(SETTINGS), AIMS, TARGET, seed=seed))) for seed in range(4)}
    assert len(orders) > 1


def test_a_grid_keeps_the_order_of_its_candidates() -> None:
    assert searched(make_proposer(Searcher.GRID, Candidates(SETTINGS), AIMS, TARGET)) == list(ROWS)


def test_a_region_that_runs_out_of_memory_is_left_alone() -> None:
    settings = settings_of_a_grid(64, seed=1)
    rows = rows_of(recorded(settings, seed=1))
    for key, row in rows.items():
        if CompileSettings.parse(key).scope is Scope.FULL:
            rows[key] = {**row, "status": "infeasible", "label": "out-of-memory", "samples_per_s": None, "compile_s": None}
    proposed: list[Any] = []
    for seed in range(5):
        proposer = make_proposer(Searcher.GAIN, Candidates(settings), Aims.parse(), TARGET, seed=seed)
        for _ in range(28):
            setting = proposer.propose()
            assert setting is not None
            proposed.append(rows[setting.key]["label"])
            proposer.tell(rows[setting.key])
    share = sum(row["label"] == "out-of-memory" for row in rows.values()) / len(rows)
    assert proposed.count("out-of-memory") / len(proposed) < 0.6 * share


def test_optuna_is_told_failures_and_broken_constraints_as_violations() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    class Watched(optuna.samplers.RandomSampler):
        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            seen[state.name] = (*seen.get(state.name, ()), (tuple(trial.constraints.values()), values))

    proposer = Asking(Candidates(SETTINGS), AIMS, lambda seed: Watched(seed=seed))
    ok = next(row for row in ROWS.values() if row["status"] == "ok")
    figures = {name: ok[name] for name in ("samples_per_s", "compile_s")}
    for told in (
        {**figures, "status": "ok", "peak_memory_bytes": 10 * 2**30},
        {**figures, "status": "ok", "peak_memory_bytes": 40 * 2**30},
        {"status": "infeasible", "label": "out-of-memory"},
    ):
        setting = proposer.propose()
        assert setting is not None
        proposer.tell({**told, "settings_key": setting.key, "wall_s": 1.0})
    (_, good), (_, large), (_, worst) = seen["COMPLETE"]
    assert [violations for violations, _ in seen["COMPLETE"]] == [(0.0, -0.5), (0.0, 1.0), (1.0, 1.0)]
    assert good == [-figures["samples_per_s"], figures["compile_s"], 10 * 2**30]
    assert worst == large, "one without figures is no better than the worst so far"


def test_repeats_among_candidates_are_one_and_none_at_all_is_refused() -> None:
    candidates = Candidates([GOOD, CompileSettings.parse(GOOD.key), SETTINGS[0]])
    assert len(candidates) == 2
    with pytest.raises(ConfigError, match="no setting to search"):
        Candidates([])


def test_fields_that_never_differ_are_no_fields_and_unknown_values_are_like_no_other() -> None:
    candidates = Candidates([CompileSettings.parse("scope=full"), CompileSettings.parse("scope=regional")])
    assert candidates.names == ("scope",)
    assert candidates.encode(CompileSettings.parse("scope=modular")).tolist() == [-1]
