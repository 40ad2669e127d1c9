"""`CompileSettings`: spellings, keys, refusals."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.schema.errors import CompileSweepError, SettingsError
from compile_sweep.schema.settings import RECOMPILE_LIMIT, CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope
from compile_sweep.schema.shapes import PadToBuckets, PadToLongest, PadToMax
from orchestrator.plan.recipes import captioning
from orchestrator.plan.space import GRID_OPTIMIZERS, Target, choose, every_candidate

FIELDS: dict[str, tuple[Any, ...]] = {
    "scope": tuple(Scope),
    "mode": (None, *(mode for mode in Mode if mode is not Mode.LITE)),  # which no recipe tries
    "cudagraphs": (None, False, True),
    "dynamic": (None, *Dynamic),
    "padding": (None, *Padding),
    "pad_multiple": (None, 1, 8, 16),
    "bucket_size": (None, 32, 64),
    "optimizer": tuple(OptimizerKind),
}


@pytest.fixture(scope="module")
def spellings() -> list[tuple[dict[str, Any], CompileSettings]]:
    """Returns every valid combination of the fields' values, None included, with the resulting settings."""
    accepted = []
    for combination in product(*FIELDS.values()):
        values = dict(zip(FIELDS, combination, strict=True))
        try:
            accepted.append((values, CompileSettings(**values)))
        except SettingsError:
            continue
    return accepted


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("mode=default,cudagraphs=on", "mode=reduce-overhead"),
        ("cudagraphs=on", "mode=reduce-overhead"),
        ("mode=reduce-overhead,cudagraphs=on", "mode=reduce-overhead"),
        ("mode=default,cudagraphs=off", "mode=default"),
        ("cudagraphs=off", "mode=default"),
        ("mode=max-autotune,cudagraphs=off", "mode=max-autotune-no-cudagraphs"),
        ("mode=max-autotune,cudagraphs=on", "mode=max-autotune"),
        ("mode=max-autotune-no-cudagraphs,cudagraphs=off", "mode=max-autotune-no-cudagraphs"),
        ("", "scope=full,mode=default,dynamic=static,padding=max,optimizer=foreach"),
        ("dynamic=auto", "dynamic=auto,padding=longest,pad_multiple=8"),
        ("dynamic=buckets", "dynamic=buckets,padding=buckets,bucket_size=32"),
        ("scope=eager,cudagraphs=off", "scope=eager"),
        ("scope=eager,padding=longest", "scope=eager,padding=longest,pad_multiple=8"),
        (" optimizer = fused , scope = modular ,", "scope=modular,optimizer=fused"),
        ("cudagraphs=true", "cudagraphs=on"),
        ("dynamic=mark,pad_multiple=016", "dynamic=mark,pad_multiple=16"),
    ],
)
def test_two_spellings_of_one_setting_are_one_value(spelling: str, canonical: str) -> None:
    one, other = CompileSettings.parse(spelling), CompileSettings.parse(canonical)
    assert one == other
    assert one.key == other.key
    assert len({one, other}) == 1


@pytest.mark.parametrize(
    ("mode", "cudagraphs"),
    [
        (Mode.DEFAULT, False),
        (Mode.REDUCE_OVERHEAD, True),
        (Mode.MAX_AUTOTUNE, True),
        (Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS, False),
    ],
)
def test_a_mode_says_whether_cuda_graphs_are_used(mode: Mode, cudagraphs: bool) -> None:
    assert CompileSettings(mode=mode).cudagraphs is cudagraphs


@pytest.mark.slow
def test_after_construction_mode_and_cudagraphs_agree_whatever_the_spelling(
    spellings: list[tuple[dict[str, Any], CompileSettings]],
) -> None:
    for values, made in spellings:
        if made.scope is Scope.EAGER:
            assert made.mode is made.dynamic is made.bucket_size is None, values
            assert made.cudagraphs is (values["cudagraphs"] or None), values
        else:
            assert made.cudagraphs is (made.mode in (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)), values
            assert values["cudagraphs"] in (None, made.cudagraphs), values


def test_a_key_is_read_back_as_the_same_value(spellings: list[tuple[dict[str, Any], CompileSettings]]) -> None:
    distinct = {made for _, made in spellings}
    assert len(distinct) > 500
    for made in distinct:
        assert CompileSettings.parse(made.key) == made, made


def test_no_field_that_was_given_is_changed_in_silence(spellings: list[tuple[dict[str, Any], CompileSettings]]) -> None:
    for values, made in spellings:
        for name, asked in values.items():
            taken = getattr(made, name)
            moved_by_cudagraphs = name == "mode" and values["cudagraphs"] is not None
            off_where_there_is_none = name == "cudagraphs" and made.scope is Scope.EAGER
            assert asked is None or asked == taken or moved_by_cudagraphs or off_where_there_is_none, (values, name)


def test_settings_are_equal_exactly_where_their_keys_are(spellings: list[tuple[dict[str, Any], CompileSettings]]) -> None:
    made = {settings for _, settings in spellings}
    assert len({settings.key for settings in made}) == len(made) == len({(settings, settings.key) for settings in made})


def test_a_dictionary_is_read_back_as_the_same_value(spellings: list[tuple[dict[str, Any], CompileSettings]]) -> None:
    for made in {made for _, made in spellings}:
        assert CompileSettings.from_dict(made.to_dict()) == made, made


def test_the_grid_of_the_same_sizes_is_every_setting_there_is(
    spellings: list[tuple[dict[str, Any], CompileSettings]],
) -> None:
    target = Target(max_length=256, has_gpu=True)
    space = choose(every_candidate(bucket_sizes=(32, 64), pad_multiples=(1, 8, 16)), target).settings
    in_grid = {made for _, made in spellings if made.optimizer in GRID_OPTIMIZERS and made.scope != "nested"}
    assert set(space) == {made for made in in_grid if made.compiles_graphs or not made.claims_cudagraphs}


def test_settings_are_frozen_hashable_and_cross_processes() -> None:
    made = CompileSettings(dynamic=Dynamic.MARK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.scope = Scope.EAGER  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made
    assert hash(copy) == hash(made)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dynamic=true,cudagraphs=on", ["dynamic=true", "CUDA graph", "fixed sizes"]),
        ("dynamic=true,mode=reduce-overhead", ["dynamic=true", "CUDA graph"]),
        ("dynamic=true,mode=max-autotune", ["dynamic=true", "CUDA graph"]),
        ("bucket_size=32", ["bucket_size", "dynamic=buckets", "dynamic=static"]),
        ("dynamic=auto,bucket_size=32", ["bucket_size", "dynamic=buckets", "dynamic=auto"]),
        ("pad_multiple=8", ["pad_multiple", "padding=longest", "padding=max"]),
        ("dynamic=buckets,pad_multiple=8", ["pad_multiple", "padding=longest", "padding=buckets"]),
        ("scope=eager,pad_multiple=8", ["pad_multiple", "padding=longest"]),
        ("mode=reduce-overhead,cudagraphs=off", ["mode=reduce-overhead", "cudagraphs=off", "mode=default"]),
        (
            "mode=max-autotune-no-cudagraphs,cudagraphs=on",
            ["mode=max-autotune-no-cudagraphs", "cudagraphs=on", "mode=max-autotune"],
        ),
        ("scope=eager,mode=default", ["scope=eager", "mode"]),
        ("scope=eager,dynamic=static", ["scope=eager", "dynamic"]),
        ("scope=eager,bucket_size=32", ["scope=eager", "bucket_size"]),
        ("scope=eager,as_written=on,cudagraphs=on", ["as_written", "scope=eager"]),
        ("scope=eager,padding=buckets", ["eager", "padding"]),
        ("dynamic=static,padding=longest", ["dynamic=static", "padding=longest"]),
        ("dynamic=static,padding=buckets", ["dynamic=static", "padding=buckets"]),
        ("dynamic=mark,padding=max", ["dynamic=mark", "padding=max"]),
        ("dynamic=true,padding=buckets", ["dynamic=true", "padding=buckets"]),
        ("dynamic=buckets,padding=longest", ["dynamic=buckets", "padding=longest"]),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_fields_named(text: str, named: list[str]) -> None:
    with pytest.raises(SettingsError) as refusal:
        CompileSettings.parse(text)
    assert "\n" not in str(refusal.value)
    for words in named:
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("scop=full", r"no setting is called 'scop'; did you mean scope\?"),
        ("bucketsize=32", r"no setting is called 'bucketsize'; did you mean bucket_size\?"),
        ("colour=red", "no setting is called 'colour'; use one of scope, mode"),
        ("scope=regionl", r"scope=regionl is not a value of scope; did you mean regional\?"),
        ("mode=max-autotun", r"mode=max-autotun is not a value of mode; did you mean max-autotune\?"),
        ("dynamic=True", r"dynamic=True is not a value of dynamic; did you mean true\?"),
        ("padding=7", "padding=7 is not a value of padding; use one of max, longest, buckets"),
        ("optimizer=adam", "optimizer=adam is not a value of optimizer; use one of foreach, fused, compiled"),
        ("cudagraphs=yes", "cudagraphs=yes is neither on nor off"),
        ("scope=full,mode=default,scope=regional", "'scope' is given twice"),
        ("scope=full, scope =full", "'scope' is given twice"),
        ("full", "'full' is not a setting; write field=value"),
    ],
)
def test_text_that_is_no_setting_is_refused_with_what_would_be(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        CompileSettings.parse(text)


@pytest.mark.parametrize("tokens", [0, -8, 8.0, 2.5, True, "0", "-8", "8.0", "eight", "", "²", "٨"])
@pytest.mark.parametrize(("field", "others"), [("pad_multiple", {"dynamic": "mark"}), ("bucket_size", {"dynamic": "buckets"})])
def test_tokens_are_whole_and_positive(field: str, others: dict[str, str], tokens: object) -> None:
    with pytest.raises(SettingsError, match=f"{field}=.*1 or more"):
        CompileSettings.from_dict({**others, field: tokens})


def test_a_refusal_is_the_projects_error_and_a_value_error() -> None:
    assert issubclass(SettingsError, CompileSweepError)
    assert issubclass(SettingsError, ValueError)


@given(text=st.text(max_size=60) | st.from_regex(r"(scope|mode|dynamic|bucket_size|colour)=[a-z0-9 ,=-]{0,20}", fullmatch=True))
@settings(deadline=None)
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    try:
        made = CompileSettings.parse(text)
    except SettingsError:
        return
    assert CompileSettings.parse(made.key) == made


@settings(deadline=None)
@given(max_length=st.integers(2, 4096), bucket_size=st.integers(1, 4096))
def test_more_buckets_than_the_recompile_limit_are_refused_with_a_size_that_works(max_length: int, bucket_size: int) -> None:
    buckets = -(-max_length // bucket_size)
    made = CompileSettings(dynamic=Dynamic.BUCKETS, bucket_size=bucket_size)
    assert made.num_graphs(max_length) == buckets
    if buckets <= RECOMPILE_LIMIT and bucket_size <= max_length:
        made.validate_for(max_length)
        return
    with pytest.raises(SettingsError, match=f"bucket_size={bucket_size}") as refusal:
        made.validate_for(max_length)
    if buckets > RECOMPILE_LIMIT:
        assert f"{buckets} graphs" in str(refusal.value)
        assert f"limit of {RECOMPILE_LIMIT}" in str(refusal.value)
        suggested = int(str(refusal.value).partition("; use ")[2].partition(" ")[0])
        dataclasses.replace(made, bucket_size=suggested).validate_for(max_length)
    else:
        assert "padding=max" not in str(refusal.value)  # dynamic=buckets refuses it


@pytest.mark.parametrize("text", ["scope=eager,padding=longest,pad_multiple=64", "dynamic=mark,pad_multiple=64"])
def test_a_multiple_above_the_longest_sequence_is_refused(text: str) -> None:
    made = CompileSettings.parse(text)
    made.validate_for(64)
    with pytest.raises(SettingsError, match="pad_multiple=64 is above the workload's 63 tokens"):
        made.validate_for(63)


@pytest.mark.parametrize(
    ("text", "graphs"),
    [
        ("scope=eager", 0),
        ("scope=eager,padding=longest", 0),
        ("scope=full", 1),
        ("dynamic=mark", 1),
        ("dynamic=true", 1),
        ("dynamic=auto", 2),
        ("dynamic=buckets,bucket_size=32", 8),
        ("dynamic=buckets,bucket_size=100", 3),
        ("dynamic=buckets,bucket_size=256", 1),
    ],
)
def test_graphs_expected_of_256_tokens(text: str, graphs: int) -> None:
    assert CompileSettings.parse(text).num_graphs(256) == graphs


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("scope=full", PadToMax(max_length=256)),
        ("scope=eager,padding=longest,pad_multiple=1", PadToLongest(max_length=256, multiple=1)),
        ("dynamic=true", PadToLongest(max_length=256, multiple=8)),
        ("dynamic=buckets,bucket_size=100", PadToBuckets(buckets=(100, 200, 256))),
    ],
)
def test_settings_say_how_batches_are_padded(text: str, policy: object) -> None:
    assert CompileSettings.parse(text).shape_policy(256) == policy


def test_labels_are_short_and_tell_the_recipes_settings_apart() -> None:
    target = Target(max_length=256, has_gpu=True)
    labels = [made.label for made in choose(captioning(target), target).settings]
    assert len(set(labels)) == len(labels) >= 10
    assert max(map(len, labels)) <= 120


def test_labels_tell_all_settings_apart(spellings: list[tuple[dict[str, Any], CompileSettings]]) -> None:
    made = {settings for _, settings in spellings}
    assert len({settings.label for settings in made}) == len(made)
