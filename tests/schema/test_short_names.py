"""Ids hold while a sweep grows, and a difference from the baseline says what differs and is short."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.short_names import LONGEST, difference, find_setting, resolve_name, setting_ids, setting_names

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def of(text: str) -> CompileSettings:
    return CompileSettings.parse(text)


def test_ids_follow_the_first_record_and_hold_while_the_sweep_grows() -> None:
    keys = ["b", "a", "b", "c", "a"]
    assert setting_ids(keys) == {"b": "A1", "a": "A2", "c": "A3"}
    assert setting_ids(keys) == {key: own for key, own in setting_ids([*keys, "a", "d"]).items() if key != "d"}


@pytest.mark.parametrize(
    ("settings", "baseline", "words"),
    [
        ("scope=full", "scope=eager", "full, static"),
        (
            "scope=full,mode=reduce-overhead,optimizer=fused,batch_size=64",
            "scope=eager",
            "full, batch_size=64, reduce-overhead, static, fused optimizer",
        ),
        ("scope=eager,optimizer=fused", "scope=eager,padding=longest", "eager, fused optimizer, pad to max"),
        ("scope=full,dynamic=mark", "scope=eager,padding=longest", "full, mark"),
        ("scope=full,optimizer=fused", "scope=eager,optimizer=fused", "full, static"),
        ("scope=full", "scope=eager,optimizer=fused", "full, static, foreach optimizer"),
        ("scope=full", "scope=eager,group_window=100", "full, static, no grouped 100"),
        ("scope=eager,optimizer=fused", "scope=eager,optimizer=fused", "eager, fused optimizer"),
        ("scope=eager,as_written=on", "scope=eager,as_written=on", "as the script has it"),
        ("scope=full,optimizer=fused", "scope=eager,as_written=on", "full, static, fused optimizer"),
        ("scope=full,workload.mode=x,dynamic=true", None, "full, dynamic=true, mode=x"),
    ],
)
def test_a_difference_says_what_the_baseline_does_not(settings: str, baseline: str | None, words: str) -> None:
    assert difference(of(settings), None if baseline is None else of(baseline)) == words


def test_a_long_difference_is_cut_at_a_word_and_counts_the_rest() -> None:
    more = "attention=unmasked,fullgraph=on,inductor.coordinate_descent_tuning=off"
    words = difference(of(f"scope=regional,mode=max-autotune,optimizer=fused,{more}"), of("scope=eager"))
    assert words == "regional, max-autotune, static, fused optimizer, fullgraph, +2"
    assert all(len(difference(of(f"scope=full,workload.{'x' * n}=y"))) <= LONGEST + 5 for n in range(1, 40))


def test_a_setting_is_found_by_its_id_in_a_folder() -> None:
    folder = RESULTS / "h100-gpt2-levers"
    keys = resolve_name(f"{folder}:A1"), resolve_name(f"{folder}:A3")
    assert [of(key).scope for key in keys] == ["eager", "full"]
    assert resolve_name("scope=full,dynamic=auto") == "scope=full,dynamic=auto"
    with pytest.raises(ConfigError, match="no setting A99; its settings are A1 to A9"):
        resolve_name(f"{folder}:A99")
    with pytest.raises(ConfigError, match="no setting Z9; its settings are A1 to A9"):
        resolve_name(f"{folder}:Z9")
    with pytest.raises(ConfigError, match="there is no such folder"):
        resolve_name("nowhere:A1")
    assert find_setting({}, "scope=full") is None
    assert setting_names(keys, keys[0])[keys[1]] == "A2 full, static"
