"""`SweepConfig`: what it refuses, and what a folder stores of it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile_sweep import command_line
from compile_sweep.command_line import UsageError
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import (
    EACH_RUN,
    IDENTITY,
    LONGEST_DEADLINE_S,
    CachePolicy,
    Device,
    Excluded,
    SearchConfig,
    SweepCommand,
    SweepConfig,
)
from orchestrator.search import Searcher

EAGER = CompileSettings.parse("scope=eager")


def config(**fields: Any) -> SweepConfig:
    """A sweep of one setting, with these fields changed."""
    usual: dict[str, Any] = {"recipe": "quickstart", "workload": "captioning", "size": "tiny", "device": Device.CPU}
    return SweepConfig(**{**usual, "settings": (EAGER,), **fields})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"workers_per_trial": 0}, "--workers-per-trial 0 is too few; use 1 or more"),
        ({"max_concurrent": -1}, "--max-concurrent -1 is too few; use 0 or more"),
        ({"workers_per_trial": 10_001}, "--workers-per-trial 10001 is too many; use 10000 or fewer"),
        ({"max_concurrent": 2**64}, f"--max-concurrent {2**64} is too many; use 10000 or fewer"),
        ({"time_budget_s": 0.0}, "--time-budget-s 0 is not a time"),
        ({"time_budget_s": -5.0}, "--time-budget-s -5 is not a time"),
        ({"compile_deadline_s": 0.0}, "--compile-deadline-s 0 is not a time"),
        ({"trial_deadline_s": math.nan}, "--trial-deadline-s nan is not a time"),
        ({"trial_deadline_s": 1e10}, "--trial-deadline-s 1e+10 is too long; use 2592000 (30 days) or less"),
        ({"compile_deadline_s": 1e300, "trial_deadline_s": 1e300}, "--compile-deadline-s 1e+300 is too long"),
        ({"compile_deadline_s": 900.0, "trial_deadline_s": 600.0}, "--trial-deadline-s 600 is below --compile-deadline-s 900"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_option(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(**fields)
    assert complaint in str(refusal.value)


def test_earlier_names_of_options_are_accepted_and_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    told = command_line.parse(SweepCommand, "sweep", ["--caches", "shared", "--cache=/store"]).sweep
    assert (told.caches, told.cache) == (CachePolicy.SHARED, "/store")
    with pytest.raises(UsageError, match="--starts cannot be 'warm'"):
        command_line.parse(SweepCommand, "sweep", ["--caches", "warm"])
    with pytest.raises(UsageError, match="--cache-store has no value"):
        command_line.parse(SweepCommand, "sweep", ["--cache"])
    with pytest.raises(SystemExit):
        command_line.parse(SweepCommand, "sweep", ["--help-all"])
    printed = capsys.readouterr().out
    assert "--cache-store" in printed
    assert "--caches" not in printed


def test_the_longest_deadline_can_be_armed() -> None:
    longest = config(compile_deadline_s=float(LONGEST_DEADLINE_S), trial_deadline_s=float(LONGEST_DEADLINE_S))
    deadline_s = longest.trial_deadline_s
    code = (
        f"import sys; from orchestrator.guard import watchdog as w; w.set_deadline({deadline_s}, sys.stderr); w.clear_deadline()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("caches", [CachePolicy.SHARED, CachePolicy.AUTO])
def test_sharing_needs_something_that_keeps_artifacts(caches: CachePolicy) -> None:
    with pytest.raises(ConfigError, match=f"--starts {caches} shares artifacts, and --cache-store none keeps none"):
        config(caches=caches, cache=None)
    assert config(caches=caches, cache="/cache").caches is caches


def test_a_remote_cache_that_compilers_read_leaves_no_trial_cold() -> None:
    with pytest.raises(ConfigError, match=r"--cache-store redis://h:1 is read while a trial compiles.*--starts shared, or auto"):
        config(cache="redis://h:1")
    assert config(cache="redis://h:1", caches=CachePolicy.AUTO).cache == "redis://h:1"


@pytest.mark.parametrize("cache", [None, "redis://h:1"])
def test_what_was_traced_is_kept_only_where_something_keeps_it(cache: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"--precompile keeps what was traced, which --cache-store {cache or 'none'} does not"):
        config(precompile=True, cache=cache, **({"caches": CachePolicy.AUTO} if cache else {}))
    assert config(precompile=True, cache="/cache").precompile


@pytest.mark.parametrize("cache", ["redis://:secret@h:1", "redis://me:secret@h:1/0", "s3://me:secret@bucket/x"])
def test_a_password_is_never_written_down(cache: str) -> None:
    values = config(cache=cache, caches=CachePolicy.SHARED).to_dict()
    assert "secret" not in json.dumps(values)
    assert "***@" in values["cache"]


@pytest.mark.parametrize("name", ["time_budget_s", "compile_deadline_s", "trial_deadline_s"])
def test_no_time_is_endless_because_json_has_no_infinity(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} inf"):
        config(**{"trial_deadline_s": math.inf, name: math.inf} if name == "compile_deadline_s" else {name: math.inf})


def test_a_config_is_plain_json_from_which_its_settings_can_be_read() -> None:
    settings = (EAGER, CompileSettings.parse("dynamic=buckets,optimizer=fused,inductor.max_fusion_size=32"))
    values = config(settings=settings, excluded=(Excluded(candidate="a=b", reason="no"),), time_budget_s=60.0).to_dict()
    again = json.loads(json.dumps(values, allow_nan=False))
    assert again == {**values, "excluded": list(values["excluded"])}
    assert tuple(map(CompileSettings.parse, again["settings"])) == settings
    assert again["excluded"] == [{"candidate": "a=b", "reason": "no"}]
    assert again["time_budget_s"] == 60.0
    assert (again["device"], again["pipeline"], again["confirm"]) == ("cpu", "resident", True)
    assert (again["cache"], again["caches"], again["warm_starts"]) == ("auto", "cold", True)


def test_a_config_is_read_back_from_what_a_folder_keeps_of_it() -> None:
    search = SearchConfig(searcher=Searcher.GAIN, constraints=("compile_s<=120",), num_trials=3, prune=True)
    original = config(settings=(EAGER,), excluded=(Excluded(candidate="a=b", reason="no"),), device=Device.CUDA, search=search)
    assert SweepConfig.from_dict(json.loads(json.dumps(original.to_dict()))) == original


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"seed": True}, "seed is True"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"compile_deadline_s": 10**400}, "compile_deadline_s is 1"),
        ({"settings": "scope=full"}, "settings is 'scope=full'"),
        ({"search": {"learn_from": [1]}}, "learn_from is 1"),
        ({"search": []}, r"search is \[\]"),
    ],
)
def test_a_value_of_another_kind_is_named(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        SweepConfig.from_dict({**config().to_dict(), **fields})


def test_every_published_sweep_can_be_taken_up_again(repository: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (repository / "docs" / "results").rglob("sweep.json")]
    published = [described["config"] for described in map(json.loads, texts) if "config" in described]
    assert len(published) > 20
    for kept in published:
        before = SweepConfig.from_dict(kept)
        again = before.to_resume()
        assert before.settings
        assert again.settings == ()
        assert all(getattr(again, name) == getattr(SweepConfig(), name) for name in EACH_RUN)
        assert (again.workload, again.size, again.device) == (before.workload, before.size, before.device)


def test_what_identifies_a_sweep_is_among_what_is_kept_of_it() -> None:
    assert set(IDENTITY) <= config().to_dict().keys()


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="--seed"):
        config(seed=seed)
