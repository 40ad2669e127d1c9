"""Recipes: what each would like to try, on which machine."""

from __future__ import annotations

import pytest

from compile_sweep.contract.base import load_workload
from compile_sweep.describe import describe
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.plan.recipes import RECIPES, find_recipe
from orchestrator.plan.space import Target, choose
from workloads.captioning import Captioning

BASE_ON_GPU = Target.of(describe(Captioning("base", 0)), has_gpu=True)
TINY_ON_CPU = Target.of(describe(Captioning("tiny", 0)), has_gpu=False)
TARGETS = [BASE_ON_GPU, TINY_ON_CPU]


def settings_of(recipe: str, target: Target) -> list[CompileSettings]:
    """What the recipe leaves to try."""
    return list(choose(find_recipe(recipe)(target), target).settings)


@pytest.mark.parametrize("target", TARGETS)
def test_quickstart_is_at_most_six_settings_none_of_them_wasted(target: Target) -> None:
    chosen = choose(find_recipe("quickstart")(target), target)
    assert 4 <= len(chosen.settings) <= 6
    assert chosen.excluded == ()
    assert {Scope.EAGER, Scope.FULL, Scope.REGIONAL} <= {setting.scope for setting in chosen.settings}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("recipe", ["quickstart", "captioning", "grid"])
def test_every_recipe_over_lengths_begins_with_both_eager_baselines(recipe: str, target: Target) -> None:
    found = settings_of(recipe, target)
    eager = [setting for setting in found if setting.scope is Scope.EAGER]
    assert found[: len(eager)] == eager
    assert {CompileSettings.parse("scope=eager"), CompileSettings.parse("scope=eager,padding=longest")} <= set(eager)


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(
    ("recipe", "workload", "fewest"),
    [
        ("regional", "layers-inference", 3),
        ("modes", "gpt2", 3),
        ("modes", "gpt2-inference", 3),
        ("inference", "gpt2-inference", 16),
        ("inference", "layers-inference", 6),
        ("vision", "segmentation", 9),
        ("vision", "detection", 9),
    ],
)
def test_recipes_of_other_workloads_try_all_they_name(recipe: str, workload: str, fewest: int, has_gpu: bool) -> None:
    target = Target.of(describe(load_workload(workload)("tiny", 0)), has_gpu=has_gpu)
    chosen = choose(find_recipe(recipe)(target), target)
    assert chosen.excluded == ()
    assert len(chosen.settings) >= fewest
    assert chosen.settings[0].scope is Scope.EAGER
    assert {setting.scope for setting in chosen.settings} >= {Scope.EAGER, Scope.FULL}


def test_inference_varies_each_cause_alone_eager_and_compiled() -> None:
    target = Target.of(describe(load_workload("gpt2-inference")("tiny", 0)), has_gpu=True)
    chosen = settings_of("inference", target)
    causes = ["weights=bf16", "grad_mode=no_grad", "cast_cache=kept,workload.grad_mode=no_grad", "batch_size=1", "batch_size=16"]
    for cause in (*(f"workload.{cause}" for cause in causes), "autocast=off", "attention=eager"):
        for scope in ("eager", "full"):
            assert CompileSettings.parse(f"scope={scope},{cause}") in chosen
    for compiled in ("workload.weights=frozen", "dynamic=true", "dynamic=mark", "mode=reduce-overhead,workload.weights=frozen"):
        assert CompileSettings.parse(f"scope=full,{compiled}") in chosen


@pytest.mark.parametrize("has_gpu", [True, False])
def test_generation_compiles_the_parts_and_leaves_the_loop_to_python(has_gpu: bool) -> None:
    chosen = settings_of("generation", Target.of(describe(load_workload("decoder")("base", 0)), has_gpu=has_gpu))
    assert {setting.scope for setting in chosen} == {Scope.EAGER, Scope.MODULAR}
    for varied in (
        "workload.weights=bf16",
        "workload.batch_size=1,workload.weights=bf16",
        "workload.batch_size=512,workload.weights=bf16",
    ):
        assert CompileSettings.parse(f"scope=modular,{varied}") in chosen
        assert (CompileSettings.parse(f"scope=modular,mode=reduce-overhead,{varied}") in chosen) is has_gpu


UNSPLIT = "ddp.optimize_ddp=no_optimization"


@pytest.mark.parametrize(
    ("recipe", "workload", "again"),
    [
        ("quickstart", "captioning", ["scope=full"]),
        ("captioning", "captioning", ["scope=full,optimizer=fused", "scope=full,mode=reduce-overhead"]),
        ("modes", "gpt2", ["scope=full"]),
        ("vision", "segmentation", ["scope=full"]),
    ],
)
def test_with_several_workers_recipes_try_whole_graphs_beside_split_ones(recipe: str, workload: str, again: list[str]) -> None:
    loaded = load_workload(workload)("tiny", 0)
    alone, together = (settings_of(recipe, Target.of(describe(loaded), has_gpu=True, num_workers=count)) for count in (1, 2))
    assert set(together) - set(alone) == {CompileSettings.parse(f"{words},{UNSPLIT}") for words in again}
    assert set(alone) < set(together)


def test_workloads_that_only_infer_have_no_reduction_to_vary() -> None:
    target = Target.of(describe(load_workload("gpt2-inference")("tiny", 0)), has_gpu=True, num_workers=2)
    chosen = choose(find_recipe("modes")(target), target)
    assert chosen.excluded == ()
    assert all(setting.ddp is None for setting in chosen.settings)


def test_every_recipe_has_a_line_that_says_what_it_is() -> None:
    assert all((recipe.__doc__ or "").strip() for recipe in RECIPES.values())


@pytest.mark.parametrize(
    "wanted",
    [
        "scope=eager,padding=max",
        "scope=eager,padding=longest",
        "scope=full,mode=default",
        "scope=full,mode=reduce-overhead",
        "scope=full,optimizer=fused",
        "scope=regional,dynamic=static",
        "scope=regional,dynamic=auto",
        "scope=regional,dynamic=mark",
        "scope=full,dynamic=buckets,bucket_size=32,optimizer=compiled",
        "scope=modular",
        "scope=full,dynamic=mark,optimizer=compiled",
        "scope=full,dynamic=true",
        "scope=full,mode=max-autotune,optimizer=compiled,inductor.coordinate_descent_tuning=off",
        "scope=eager,padding=longest,group_window=100",
        "scope=modular,dynamic=mark,parts.encoder.mode=max-autotune,inductor.coordinate_descent_tuning=off",
    ],
)
def test_captioning_holds_the_sources_table(wanted: str) -> None:
    assert CompileSettings.parse(wanted) in settings_of("captioning", BASE_ON_GPU)


def test_captioning_on_a_gpu_leaves_nothing_out() -> None:
    assert choose(find_recipe("captioning")(BASE_ON_GPU), BASE_ON_GPU).excluded == ()


def test_captioning_on_a_cpu_leaves_out_only_what_needs_a_gpu() -> None:
    chosen = choose(find_recipe("captioning")(TINY_ON_CPU), TINY_ON_CPU)
    assert {excluded.reason for excluded in chosen.excluded} == {"CUDA graphs need a GPU, and none is visible"}
    assert len(chosen.settings) >= 10


@pytest.mark.parametrize("max_length", [64, 100, 250, 256, 1000])
def test_captioning_leaves_nothing_out_whatever_the_longest_sequence(max_length: int) -> None:
    target = Target(max_length=max_length, has_gpu=True, row_lengths=tuple(range(1, max_length + 1)))
    assert choose(find_recipe("captioning")(target), target).excluded == ()


def test_grid_holds_whatever_the_other_recipes_hold_in_the_fields_it_varies() -> None:
    grid = set(settings_of("grid", BASE_ON_GPU))
    varied = {"scope", "mode", "cudagraphs", "dynamic", "padding", "pad_multiple", "bucket_size", "optimizer"}
    others = {*settings_of("captioning", BASE_ON_GPU), *settings_of("quickstart", BASE_ON_GPU)}
    plain = {setting for setting in others if setting.fields_that_apply().keys() <= varied}
    assert len(plain) >= 18
    assert plain <= grid


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("quickstrat", r"no recipe is called 'quickstrat'; did you mean quickstart\?"),
        (
            "zzz",
            "no recipe is called 'zzz'; use one of quickstart, captioning, regional, modes, inference, generation, vision, grid",
        ),
    ],
)
def test_an_unknown_recipe_is_refused_with_what_there_is(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_recipe(name)
