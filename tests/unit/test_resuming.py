"""A sweep taken up again: what it began with holds unless something else is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator import folder, presenting, sweep
from orchestrator.config import SearchConfig, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.search.named import Searcher
from workloads.settings import CompileSettings


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins a sweep with some fields and returns the configuration with which `--resume` and these words go on."""
    planned: list[SweepConfig] = []
    monkeypatch.setattr(presenting, "show_plan", lambda console, config, *others: planned.append(config))

    def again(fields: dict[str, Any], *words: str) -> SweepConfig:
        settings = (CompileSettings.parse("scope=eager"), CompileSettings.parse("scope=full"))
        config = SweepConfig(**{"recipe": "given", "workload": "captioning", "size": "tiny", "settings": settings, **fields})
        output = tmp_path / str(len(planned))
        folder.begin(output, config, fingerprint(), None)
        assert sweep.main(["--dry-run", "--resume", "--output", str(output), *words]) == 0
        return planned[-1]

    return again


@pytest.mark.parametrize(
    ("words", "expected_s"),
    [
        ((), 3000.0),
        (("--trial-deadline-s", "2000"), 2000.0),
        (("--compile-deadline-s", "5000"), 5300.0),  # the one it had would leave compiling less
    ],
)
def test_a_trial_may_take_as_long_as_it_might_before(resumed: Any, words: tuple[str, ...], expected_s: float) -> None:
    assert resumed({"compile_deadline_s": 700.0, "trial_deadline_s": 3000.0}, *words).trial_deadline_s == expected_s


def test_a_search_learns_from_what_it_was_forced_to(resumed: Any) -> None:
    search = SearchConfig(searcher=Searcher.GAIN, learn_from=("/elsewhere",), learn_anyway=True, num_trials=5)
    found = resumed({"search": search}).search
    assert (found.learn_from, found.learn_anyway, found.num_trials) == (("/elsewhere",), True, 5)
    assert resumed({"search": search}, "--num-trials", "7").search.num_trials == 7


def test_whether_the_end_is_left_out_is_said_to_each_run(resumed: Any) -> None:
    config = resumed({"confirm": False, "warm_starts": False})
    assert (config.confirm, config.warm_starts) == (True, True)
