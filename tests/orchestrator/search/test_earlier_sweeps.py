from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_tables import recorded, settings_of_a_grid, write_sweep

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search import Origin, learn_from
from orchestrator.search.earlier_sweeps import best_settings

AIMS = Aims.parse(["samples_per_s:max", "compile_s:min"])
SETTINGS = settings_of_a_grid(12)
HERE = Origin(workload="captioning", size="small", environment_key="0123456789abcdef", num_workers=1, pipeline="resident")


def test_records_of_the_same_workload_and_environment_are_told(tmp_path: Path) -> None:
    folders = [
        write_sweep(tmp_path / "one", recorded(SETTINGS[:6])),
        write_sweep(
            tmp_path / "two", recorded([*SETTINGS[6:], CompileSettings.parse("scope=full,dynamic=buckets,bucket_size=32")])
        ),
    ]
    learned = learn_from(folders, HERE, AIMS)
    assert {row["settings_key"] for row in learned.records} >= {setting.key for setting in SETTINGS}
    assert learned.known_good == ()


def test_one_that_died_has_no_environment_and_is_taken_to_be_of_its_sweeps(tmp_path: Path) -> None:
    done = recorded(SETTINGS)
    folder = write_sweep(tmp_path / "sweep", [replace(done[0], status="infeasible", environment_key=None), *done[1:]])  # type: ignore[arg-type]
    assert len(learn_from([folder], HERE, AIMS).records) == len(done)


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({"workload": "mine:Mine"}, "workload mine:Mine instead of captioning"),
        ({"size": "base"}, "size base instead of small"),
        ({"environment_key": "ffff"}, "environment key ffff instead of 0123456789abcdef"),
        ({"num_workers": 2}, "num workers 2 instead of 1"),
        ({"pipeline": "real"}, "pipeline real instead of resident"),
    ],
)
def test_what_is_of_another_origin_is_refused_with_the_reason_unless_forced(
    tmp_path: Path, origin: dict[str, object], words: str
) -> None:
    folder = write_sweep(tmp_path / "sweep", recorded(SETTINGS, **origin))
    with pytest.raises(ConfigError, match=words):
        learn_from([folder], HERE, AIMS)
    forced = learn_from([folder], HERE, AIMS, force=True)
    assert forced.records == (), "its figures are none of this sweep's"
    assert forced.known_good
    assert set(forced.known_good) < set(SETTINGS)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trial records"):
        learn_from([tmp_path], HERE, AIMS)


def test_records_that_do_not_say_where_they_are_from_are_refused(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", recorded(SETTINGS, environment_key=None))
    with pytest.raises(ConfigError, match="in which environment"):
        learn_from([folder], HERE, AIMS, force=True)


def test_the_best_are_those_on_the_front_the_best_in_the_first_objective_first() -> None:
    rows = [
        {"settings_key": f"scope={scope}", "status": status, "samples_per_s": rate, "compile_s": compile_s}
        for scope, status, rate, compile_s in [
            ("eager", "ok", 500.0, 1.0),
            ("regional", "ok", 900.0, 10.0),
            ("modular", "ok", 800.0, 60.0),
            ("full", "failed", 2000.0, 5.0),
        ]
    ]
    assert [setting.scope for setting in best_settings(rows, AIMS)] == ["regional", "eager"]
