"""Recipes: the candidates of each, by machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from compile_sweep.contract.base import load_workload
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.describe import describe
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.script.job import ScriptJob
from orchestrator.plan.recipes import RECIPES, find_recipe
from orchestrator.plan.scripts import script_facts
from orchestrator.plan.space import Target, choose, padded_length


@cache
def facts_of(name: str, size: str = "tiny") -> WorkloadFacts:
    """Returns facts about a built-in workload, which take up to half a second to find."""
    return describe(load_workload(name)(size, 0))


BASE_ON_GPU = Target.of(facts_of("captioning", "base"), has_gpu=True)
TINY_ON_CPU = Target.of(facts_of("captioning"), has_gpu=False)
TARGETS = [BASE_ON_GPU, TINY_ON_CPU]


def settings_of(recipe: str, target: Target) -> list[CompileSettings]:
    """Returns the settings that the recipe's candidates become."""
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
    target = Target.of(facts_of(workload), has_gpu=has_gpu)
    chosen = choose(find_recipe(recipe)(target), target)
    assert chosen.excluded == ()
    assert len(chosen.settings) >= fewest
    assert chosen.settings[0].scope is Scope.EAGER
    assert {setting.scope for setting in chosen.settings} >= {Scope.EAGER, Scope.FULL}


def test_inference_varies_each_cause_alone_eager_and_compiled() -> None:
    target = Target.of(facts_of("gpt2-inference"), has_gpu=True)
    chosen = settings_of("inference", target)
    causes = ["weights=bf16", "grad_mode=no_grad", "cast_cache=kept,workload.grad_mode=no_grad", "batch_size=1", "batch_size=16"]
    for cause in (*(f"workload.{cause}" for cause in causes), "autocast=off", "attention=eager"):
        for scope in ("eager", "full"):
            assert CompileSettings.parse(f"scope={scope},{cause}") in chosen
    for compiled in ("workload.weights=frozen", "dynamic=true", "dynamic=mark", "mode=reduce-overhead,workload.weights=frozen"):
        assert CompileSettings.parse(f"scope=full,{compiled}") in chosen


@pytest.mark.parametrize("has_gpu", [True, False])
def test_generation_compiles_the_parts_and_leaves_the_loop_to_python(has_gpu: bool) -> None:
    chosen = settings_of("generation", Target.of(facts_of("decoder", "base"), has_gpu=has_gpu))
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
    alone, together = (settings_of(recipe, Target.of(facts_of(workload), has_gpu=True, num_workers=count)) for count in (1, 2))
    assert set(together) - set(alone) == {CompileSettings.parse(f"{words},{UNSPLIT}") for words in again}
    assert set(alone) < set(together)


def test_workloads_that_only_infer_have_no_reduction_to_vary() -> None:
    target = Target.of(facts_of("gpt2-inference"), has_gpu=True, num_workers=2)
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


def fields_of(found: list[CompileSettings]) -> set[str]:
    """Returns names of the fields that any of them sets."""
    return {name for setting in found for name in setting.fields_that_apply()}


@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_tries_the_levers_that_fit_the_model_and_the_machine(has_gpu: bool) -> None:
    images, text = (settings_of("auto", Target.of(facts_of(name), has_gpu=has_gpu)) for name in ("resnet", "gpt2"))
    for found in (images, text):
        assert found[0] == CompileSettings.parse("scope=eager")
        assert any(setting.claims_cudagraphs for setting in found) is has_gpu
        assert {"fused", "compiled"} <= {setting.optimizer for setting in found}
    assert "memory_format" in fields_of(images) - fields_of(text)
    assert ("sdpa_kernel" in fields_of(text)) is has_gpu
    assert "sdpa_kernel" not in fields_of(images)
    assert {setting.dynamic for setting in images} == {None, "auto"}
    assert {setting.dynamic for setting in text} == {None, "static"}, "all rows are of full length"


def test_auto_crosses_inductors_options_that_gain_with_each_other_where_there_are_convolutions() -> None:
    images, text = (settings_of("auto", Target.of(facts_of(name), has_gpu=True)) for name in ("resnet", "gpt2"))
    gaining = {"combo_kernels", "max_autotune_pointwise", "coordinate_descent_tuning"}
    crossed = {frozenset(gaining & setting.inductor_options.keys()) for setting in images if setting.mode == "reduce-overhead"}
    assert len(crossed) == 2 ** len(gaining)
    assert not any((gaining - {"coordinate_descent_tuning"}) & setting.inductor_options.keys() for setting in text)


@pytest.mark.parametrize("target", TARGETS)
def test_auto_tries_dynamic_shapes_where_lengths_differ(target: Target) -> None:
    found = settings_of("auto", target)
    assert {"static", "auto", "mark", "buckets"} <= {setting.dynamic for setting in found}
    assert {"group_window", "attention"} <= fields_of(found)
    lengths = {padded_length(setting, target) for setting in found}
    assert max(lengths) == target.max_length > 2 * min(lengths)


def test_auto_compiles_blocks_apart_only_where_there_are_any() -> None:
    facts = facts_of("layers")
    for has_blocks, scopes in ((True, {"eager", "full", "regional"}), (False, {"eager", "full"})):
        target = Target.of(replace(facts, has_blocks=has_blocks), has_gpu=True)
        assert {setting.scope for setting in settings_of("auto", target)} == scopes
    unlike = Target.of(replace(facts, has_blocks=True, regional_share=1.5), has_gpu=True)
    assert {setting.scope for setting in settings_of("auto", unlike)} == {"eager", "full", "regional"}


def test_auto_raises_matmul_precision_only_where_a_step_is_float32() -> None:
    facts = facts_of("layers")
    assert facts.autocasts
    for autocasts in (True, False):
        found = settings_of("auto", Target.of(replace(facts, autocasts=autocasts), has_gpu=True))
        assert ("matmul_precision" in fields_of(found)) is not autocasts


def test_auto_begins_with_a_script_as_it_is_and_reads_what_it_mentions(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from torch import nn\nnn.Conv2d; nn.ModuleList")
    (tmp_path / "train.py").write_text("import torch\nfrom model import Net\nwith torch.autocast('cuda'): ...")
    facts = script_facts(ScriptJob.of("train.py", folder=str(tmp_path)))
    assert (facts.memory_format, facts.has_attention, facts.has_blocks) == ("channels_last", False, None)
    assert not facts.autocasts, "an option for it may be off; the first trial tells"
    found = settings_of("auto", Target.of(facts, has_gpu=True))
    assert found[0].as_written
    assert "compile_loss" in fields_of(found)
    assert choose(find_recipe("auto")(Target.of(facts, has_gpu=True)), Target.of(facts, has_gpu=True)).excluded == ()


@pytest.mark.parametrize(
    ("text", "arguments", "is_tried"),
    [
        ("model.gradient_checkpointing_enable()", [], True),
        ("from torch.utils.checkpoint import checkpoint", [], True),
        ("Trainer(...)", ["--gradient_checkpointing", "True"], True),
        ("torch.save(model.state_dict(), 'checkpoint.pt')", ["--checkpoint", "last.pt"], False),
    ],
)
def test_auto_tries_to_keep_the_activations_of_a_script_that_recomputes(
    tmp_path: Path, text: str, arguments: list[str], is_tried: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    facts = script_facts(ScriptJob.of("train.py", arguments, folder=str(tmp_path)))
    found = settings_of("auto", Target.of(facts, has_gpu=True))
    assert any(setting.activation_checkpointing == "off" for setting in found) is is_tried


@pytest.mark.parametrize(("library", "is_tried"), [("transformers", True), ("torch", False)])
def test_auto_leaves_out_caches_of_keys_and_values_of_models_of_transformers(
    tmp_path: Path, library: str, is_tried: bool
) -> None:
    (tmp_path / "train.py").write_text(f"import {library}")
    found = settings_of("auto", Target.of(script_facts(ScriptJob.of("train.py", (), folder=str(tmp_path))), has_gpu=True))
    assert {setting.use_cache for setting in found} == ({None, False} if is_tried else {None})
    assert not any(setting.use_cache is False for setting in settings_of("auto", BASE_ON_GPU))


@pytest.mark.parametrize(
    ("text", "is_tried"),
    [
        ("from transformers import MixtralForCausalLM", True),
        ("from transformers import AutoModel\nmodel = AutoModel.from_config(qwen3_moe)", True),
        ("from transformers import GPT2LMHeadModel", False),
        ("from my_moe import Experts", False),
    ],
)
def test_auto_casts_the_experts_of_a_script_that_may_have_some_of_transformers(tmp_path: Path, text: str, is_tried: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    found = settings_of("auto", Target.of(script_facts(ScriptJob.of("train.py", (), folder=str(tmp_path))), has_gpu=True))
    assert {setting.autocast_experts for setting in found} == ({None, True} if is_tried else {None})


@pytest.mark.parametrize(
    ("text", "is_tried"), [("import transformers", True), ("model(ids, attention_mask=mask)", True), ("import torch", False)]
)
def test_auto_pads_the_texts_of_a_script_that_may_have_some(tmp_path: Path, text: str, is_tried: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    found = settings_of("auto", Target.of(script_facts(ScriptJob.of("train.py", (), folder=str(tmp_path))), has_gpu=True))
    assert {setting.pad_to_multiple_of for setting in found} == ({None, 64} if is_tried else {None})
    assert not any(setting.pad_to_multiple_of for setting in settings_of("auto", BASE_ON_GPU))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("nn.Conv3d(1, 8, 3)", "channels_last_3d"),
        ("UNet(spatial_dims=3, in_channels=1)", "channels_last_3d"),
        ("torchvision.models.video.r3d_18()", "channels_last_3d"),
        ("nn.Conv3d if volumes else nn.Conv2d", "channels_last"),
        ("nn.Linear(8, 8)", None),
    ],
)
def test_a_script_of_volumes_is_tried_in_the_memory_format_of_volumes(tmp_path: Path, text: str, layout: str | None) -> None:
    (tmp_path / "train.py").write_text(text)
    assert script_facts(ScriptJob.of("train.py", folder=str(tmp_path))).memory_format == layout


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("quickstrat", r"no recipe is called 'quickstrat'; did you mean quickstart\?"),
        (
            "zzz",
            "no recipe is called 'zzz'; use one of auto, quickstart, captioning, regional, modes, inference, generation, vision, "
            "grid",
        ),
        ("train.py", "'train.py'; a training script is named by its option: --script train.py"),
        ("gpt2", "'gpt2'; a workload is named by its option: --workload gpt2"),
        ("mine.training:Reviews", "a workload is named by its option: --workload mine.training:Reviews"),
    ],
)
def test_an_unknown_recipe_is_refused_with_what_there_is(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_recipe(name)
