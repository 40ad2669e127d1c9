"""Fields of `CompileSettings` that keep torch's own choice unless a person says otherwise."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Scope

VALUES: dict[str, list[Any]] = {
    "scope": list(Scope),
    "mode": [None, *Mode],
    "dynamic": [None, *Dynamic],
    "optimizer": list(OptimizerKind),
    "fullgraph": [None, True, False],
    "backend": [None, "inductor", "aot_eager", "cudagraphs"],
    "shape_padding": [None, True, False],
    "parts": [None, {"encoder": {"mode": "max-autotune"}, "loss": {"compile": False}}, {"decoder": {"dynamic": "mark"}}],
    "static_gradients": [None, True, False],
    "unbacked": [None, True, False],
    "accumulate": [None, 1, 4],
    "dynamic_min": [None, 16],
    "dynamic_max": [None, 256],
    "recompile_limit": [None, 8, 32],
    "buckets": [None, [16, 64, 256], (256,)],
    "group_window": [None, 1, 100],
    "matmul_precision": [None, "highest", "high"],
    "autocast": [None, "bf16", "fp16", "off"],
    "attention": [None, "sdpa", "eager", "flex", "unmasked"],
    "stance": [None, "eager_then_compile"],
    "activation_memory_budget": [None, 1.0, 0.25],
    "activation_checkpointing": [None, "blocks", "off"],
    "dynamo": [None, {"specialize_float": True}],
    "compiler": [None, {"sizes": [16, 32]}, {"name": "1/2/x"}],
    "options": [None, {}, {"coordinate_descent_tuning": True, "max_autotune_gemm_backends": "ATEN,TRITON"}, {"b": 1.5}],
}


@pytest.mark.slow
@given(values=st.fixed_dictionaries({name: st.sampled_from(options) for name, options in VALUES.items()}))
@settings(deadline=None)
def test_what_is_accepted_is_read_back_equal_from_key_dictionary_and_pickle(values: dict[str, Any]) -> None:
    try:
        made = CompileSettings(**values)
    except SettingsError:
        return
    assert CompileSettings.parse(made.key) == made
    assert CompileSettings.from_dict(made.to_dict()) == made
    assert CompileSettings.from_dict(made.fields_that_apply()) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(CompileSettings.parse(made.key)) == hash(made)
    assert made.label
    assert made.eager_counterpart().scope is Scope.EAGER


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("backend=inductor", ""),
        ("fullgraph=off,static_gradients=off,recompile_limit=8,group_window=1,matmul_precision=highest", ""),
        ("dynamic=buckets,buckets=016/64/256", "dynamic=buckets,buckets=16/64/256"),
        ("scope=modular,parts.encoder.compile=on", "scope=modular"),
        ("inductor.epilogue_fusion=false", "inductor.epilogue_fusion=off"),
        ("inductor.b=1,inductor.a=x", "inductor.a=x,inductor.b=1"),
        ("scope=eager,shape_padding=off", "scope=eager"),
    ],
)
def test_what_is_usual_anyway_is_the_same_setting(spelling: str, canonical: str) -> None:
    one, other = CompileSettings.parse(spelling), CompileSettings.parse(canonical)
    assert (one, one.key) == (other, other.key)


@pytest.mark.parametrize(
    ("spelling", "named"),
    [
        ("scope=eager,fullgraph=on", ["scope=eager", "fullgraph"]),
        ("scope=eager,inductor.epilogue_fusion=on", ["scope=eager", "options"]),
        ("scope=eager,static_gradients=on", ["static_gradients", "nothing is"]),
        ("scope=eager,recompile_limit=9", ["recompile_limit"]),
        ("scope=full,parts.encoder.mode=default", ["parts", "scope=modular"]),
        ("scope=modular,backend=aot_eager,parts.encoder.mode=default", ["a part's mode", "backend=aot_eager"]),
        ("scope=modular,parts.encoder.mood=default", ["parts.encoder.mood", "did you mean mode"]),
        ("scope=modular,parts.encoder=x", ["parts.encoder", "as in parts.encoder.mode"]),
        ("scope=modular,parts.encoder.compile=off,parts.encoder.mode=default", ["compile=off", "leave out its mode"]),
        ("scope=modular,parts.encoder.dynamic=true,parts.encoder.mode=reduce-overhead", ["dynamic=true", "CUDA graphs"]),
        ("scope=modular,mode=reduce-overhead,parts.encoder.dynamic=true", ["parts.encoder", "dynamic=true", "CUDA graphs"]),
        ("scope=modular,cudagraphs=on,parts.encoder.dynamic=true", ["parts.encoder", "dynamic=true", "CUDA graphs"]),
        ("scope=modular,dynamic=true,parts.encoder.mode=max-autotune", ["parts.encoder", "dynamic=true", "CUDA graphs"]),
        ("backend=aot_eager,mode=max-autotune", ["mode", "backend=aot_eager"]),
        ("backend=aot_eager,cudagraphs=on", ["backend=aot_eager", "leave cudagraphs out"]),
        ("backend=cudagraphs,cudagraphs=off", ["backend=cudagraphs", "always uses CUDA graphs"]),
        ("backend=cudagraphs,dynamic=true", ["dynamic=true", "fixed sizes"]),
        ("inductor.triton.cudagraphs=on", ["inductor.triton.cudagraphs", "use cudagraphs"]),
        ("inductor.max_autotune=on", ["inductor.max_autotune", "use mode"]),
        ("inductor.freezing=on", ["inductor.freezing", "use workload.weights=frozen"]),
        ("dynamic_min=8", ["dynamic_min", "dynamic=mark"]),
        ("dynamic=mark,dynamic_min=64,dynamic_max=64", ["dynamic_min=64", "below dynamic_max=64"]),
        ("scope=regional,dynamic=mark,dynamic_min=8", ["dynamic_min", "scope=regional", "use scope=full"]),
        ("scope=modular,parts.encoder.dynamic=mark,dynamic_max=512", ["dynamic_max", "scope=modular", "use scope=full"]),
        ("dynamic=mark,dynamic_max=2", ["dynamic_max=2", "above 2"]),
        ("buckets=32/64", ["buckets", "dynamic=buckets"]),
        ("dynamic=buckets,buckets=64/32", ["buckets=64/32", "ascend"]),
        ("dynamic=buckets,buckets=a/b", ["a is not a number of tokens"]),
        ("dynamic=buckets,buckets=32/64,bucket_size=32", ["bucket_size and buckets"]),
        ("dynamic=auto,unbacked=on", ["unbacked", "dynamic=mark"]),
        ("scope=eager,unbacked=on", ["scope=eager", "unbacked"]),
        ("mode=lite,cudagraphs=on", ["mode=lite has no variant with CUDA graphs"]),
        ("dynamic=mark,stance=eager_then_compile", ["stance", "dynamic=auto"]),
        ("scope=eager,stance=eager_then_compile", ["scope=eager", "stance"]),
        ("autocast=fp8", ["autocast=fp8", "bf16, fp16, off"]),
        ("attention=flash", ["attention=flash", "unmasked"]),
        ("group_window=0", ["group_window=0", "number of batches"]),
        ("recompile_limit=many", ["recompile_limit=many", "number of graphs"]),
        ("scoop.encoder=1", ["no setting is called 'scoop.encoder'"]),
        ("mode.x=1", ["no setting is called 'mode.x'"]),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(spelling: str, named: list[str]) -> None:
    with pytest.raises(SettingsError) as refusal:
        CompileSettings.parse(spelling)
    assert all(name in str(refusal.value) for name in named), str(refusal.value)


@pytest.mark.parametrize(
    ("spelling", "named"),
    [
        ("dynamic=mark,dynamic_min=300", "dynamic_min=300 is above the workload's 256 tokens"),
        ("dynamic=mark,dynamic_max=128", "dynamic_max=128 is below the workload's 256 tokens"),
        ("dynamic=buckets,buckets=32/128", "buckets=32/128 must end with the workload's 256 tokens"),
        ("dynamic=buckets,bucket_size=16", "set recompile_limit=16"),
    ],
)
def test_what_does_not_fit_the_workload_is_refused(spelling: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        CompileSettings.parse(spelling).validate_for(256)


def test_a_raised_recompile_limit_allows_as_many_buckets() -> None:
    made = CompileSettings.parse("dynamic=buckets,bucket_size=16,recompile_limit=16")
    made.validate_for(256)
    assert made.num_graphs(256) == 16


def test_a_comma_in_an_option_survives_the_key() -> None:
    made = CompileSettings(options={"max_autotune_gemm_backends": "ATEN,TRITON"})  # type: ignore[arg-type]
    assert "ATEN%2CTRITON" in made.key
    assert dict(CompileSettings.parse(made.key).options or ()) == {"max_autotune_gemm_backends": "ATEN,TRITON"}


def test_a_list_of_back_ends_is_written_like_other_lists_and_handed_to_torch_with_commas() -> None:
    made = CompileSettings.parse("mode=max-autotune,inductor.max_autotune_gemm_backends=ATEN/TRITON")
    assert made.inductor_options == {"max_autotune_gemm_backends": "ATEN,TRITON"}
    assert made.key.endswith("inductor.max_autotune_gemm_backends=ATEN/TRITON")


def test_a_label_shows_an_option_so_that_it_is_understood() -> None:
    made = CompileSettings.parse(
        "inductor.auto_chunker.enable=on,compiler.dynamic_sources=L%5B'ids'%5D,inductor.triton.max_tiles=3"
    )
    assert made.label.endswith("auto_chunker.enable=on, max_tiles=3, dynamic_sources=L['ids']")


@pytest.mark.parametrize(
    ("spelling", "claims"),
    [
        ("mode=reduce-overhead", True),
        ("scope=modular,parts.encoder.mode=reduce-overhead", True),
        ("backend=cudagraphs", True),
        ("scope=modular,parts.encoder.mode=default", False),
        ("scope=eager", False),
    ],
)
def test_cuda_graphs_of_a_part_or_a_back_end_are_claimed_too(spelling: str, claims: bool) -> None:
    assert CompileSettings.parse(spelling).claims_cudagraphs is claims


def test_the_eager_twin_has_the_precision_and_not_the_attention() -> None:
    twin = CompileSettings.parse("autocast=off,matmul_precision=high,attention=flex,group_window=9").eager_counterpart()
    assert twin == CompileSettings.parse("scope=eager,autocast=off,matmul_precision=high")


@pytest.mark.parametrize(
    "spelling",
    [
        "scope=modular,mode=reduce-overhead,parts.encoder.dynamic=true,parts.encoder.mode=default",
        "scope=modular,dynamic=true,parts.encoder.mode=reduce-overhead,parts.encoder.dynamic=mark",
        "scope=modular,dynamic=true,parts.encoder.compile=off",
    ],
)
def test_a_part_may_say_what_goes_with_its_own_mode(spelling: str) -> None:
    assert CompileSettings.parse(CompileSettings.parse(spelling).key) == CompileSettings.parse(spelling)


@pytest.mark.parametrize("field", ["options", "workload"])
def test_values_that_python_takes_for_equal_are_different_settings_as_their_keys_are(field: str) -> None:
    values = (1, True, 1.0, 0, False, 0.0, -0.0)
    made = {CompileSettings(**{field: {"x": value}}) for value in values}  # type: ignore[arg-type]
    assert len(made) == len({settings.key for settings in made}) == len(values)
    assert {CompileSettings.parse(settings.key) for settings in made} == made
    assert CompileSettings() != "scope=full"


def test_the_batch_size_is_set_beside_other_options_of_the_workload() -> None:
    settings = CompileSettings.parse("scope=full,workload.norm=sync")
    sized = settings.with_batch_size(8)
    assert sized == CompileSettings.parse("scope=full,workload.batch_size=8,workload.norm=sync")
    assert sized.batch_size == 8
    assert sized.with_batch_size(None) == settings
    assert settings.with_batch_size(8).with_batch_size(4).batch_size == 4
    assert CompileSettings.parse("batch_size=8").with_batch_size(None).workload is None
