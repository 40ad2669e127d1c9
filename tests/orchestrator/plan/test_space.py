"""The search space: its candidates, their order, and what is left out for which reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_workloads import Toy

from compile_sweep.contract.from_model import WorkloadFromModel
from compile_sweep.describe import describe, foreach_map_refusal
from compile_sweep.schema.setting_text import parse_pairs
from compile_sweep.schema.settings import Attention, CompileSettings, Mode, OptimizerKind, Scope
from orchestrator.plan.space import Candidate, Target, choose, every_candidate, unsupported, varied
from workloads.captioning import Captioning

GPU = Target(max_length=256, has_gpu=True)
CPU = Target(max_length=64, has_gpu=False)
CANDIDATES = list(every_candidate(bucket_sizes=(1, 8, 32, 64, 300), pad_multiples=(1, 8, 300)))


def test_eager_baselines_come_first_and_the_rest_keeps_its_order() -> None:
    chosen = choose([{"scope": "modular"}, {"scope": "eager"}, {"scope": "full"}, {"scope": "eager", "padding": "longest"}], GPU)
    assert [s.label for s in chosen.settings] == [
        "eager",
        "eager, pad to longest ×8",
        "modular, default, static",
        "full, default, static",
    ]


def test_two_spellings_are_tried_once() -> None:
    chosen = choose([{"mode": "default", "cudagraphs": "on"}, {"mode": "reduce-overhead"}, {"cudagraphs": True}], GPU)
    assert [s.key for s in chosen.settings] == [CompileSettings.parse("mode=reduce-overhead").key]
    assert chosen.excluded == ()


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ({"dynamic": "true", "cudagraphs": "on"}, "dynamic=true"),
        ({"dynamic": "buckets", "bucket_size": 8}, "recompile limit of 8"),
        ({"dynamic": "mark", "pad_multiple": 300}, "above the workload's 256 tokens"),
        ({"scoop": "full"}, "did you mean scope"),
        ({"num_buckets": 3}, "says how long its rows are"),
        ({"inductor.epilogue_fusoin": "on"}, "did you mean epilogue_fusion?"),
        ({"backend": "inductorr"}, "did you mean inductor?"),
        ({"inductor.epilogue_fusion": "3"}, "inductor.epilogue_fusion=3 is not a value that torch takes there; use on or off"),
        ({"inductor.epilogue_fusion": "1"}, "use on or off"),
        ({"inductor.max_autotune_gemm_backends": "7"}, "use text that is not a number"),
        ({"inductor.max_pointwise_cat_inputs": "many"}, "use a whole number"),
        ({"inductor.cpu_gpu_bw": "50"}, "use a number with a point"),
        ({"inductor.autotune_lookup_table": "on"}, "leave it out: a setting spells no dict"),
    ],
)
def test_what_cannot_work_is_excluded_with_the_reason(candidate: Candidate, reason: str) -> None:
    chosen = choose([candidate, {"scope": "full"}], GPU)
    assert [s.label for s in chosen.settings] == ["full, default, static"]
    (excluded,) = chosen.excluded
    assert excluded.candidate == ",".join(f"{name}={value}" for name, value in candidate.items())
    assert reason in excluded.reason


def test_a_machine_without_a_gpu_is_not_asked_for_cuda_graphs() -> None:
    chosen = choose([{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"mode": "max-autotune-no-cudagraphs"}], CPU)
    assert [s.mode for s in chosen.settings] == ["max-autotune-no-cudagraphs"]
    assert [e.candidate for e in chosen.excluded] == ["mode=reduce-overhead", "mode=max-autotune"]
    assert all("GPU" in e.reason for e in chosen.excluded)
    assert unsupported(CompileSettings.parse("cudagraphs=on"), GPU) is None


@given(
    candidates=st.lists(st.sampled_from(CANDIDATES), max_size=60),
    target=st.builds(Target, max_length=st.integers(1, 400), has_gpu=st.booleans()),
)
@settings(deadline=None)
def test_nothing_is_proposed_that_cannot_work_and_nothing_is_lost(candidates: list[Candidate], target: Target) -> None:
    chosen = choose(candidates, target)
    assert len(set(chosen.settings)) == len(chosen.settings)
    for setting in chosen.settings:
        setting.validate_for(target.max_length)
        assert target.has_gpu or not setting.cudagraphs
    is_eager = [setting.scope is Scope.EAGER for setting in chosen.settings]
    assert is_eager == sorted(is_eager, reverse=True)
    left_out = {excluded.candidate for excluded in chosen.excluded}
    for candidate in candidates:
        text = ",".join(f"{name}={value}" for name, value in candidate.items())
        if text not in left_out:
            setting = CompileSettings.from_dict(candidate)
            short = setting.for_lengths_below_the_multiple(target.max_length)
            assert (setting.for_one_shape() if target.max_length == 1 else short) in chosen.settings
    assert all(excluded.reason for excluded in chosen.excluded)


def test_lengths_below_the_usual_multiple_are_padded_to_the_longest_row_alone() -> None:
    short = Target(max_length=6, min_length=3, has_gpu=False)
    chosen = choose([{"scope": "full", "dynamic": "mark"}, {"scope": "full", "dynamic": "mark", "pad_multiple": 7}], short)
    assert [setting.pad_multiple for setting in chosen.settings] == [1]
    assert "pad_multiple=7 is above the workload's 6 tokens" in chosen.excluded[0].reason


def test_the_full_grid_proposes_each_candidate_once() -> None:
    candidates = [tuple(sorted(candidate.items())) for candidate in every_candidate((32, 64), (8,))]
    assert len(candidates) == len(set(candidates))
    # foreach_map is none of the grid's
    # eager: 3 optimizers × (max, longest); compiled: 3 scopes × 4 modes × 3 optimizers × (static, auto, mark, true, 2 buckets)
    assert len(candidates) == 3 * 2 + 3 * 4 * 3 * 6


def test_iterators_of_sizes_are_not_used_up_by_the_first_combination() -> None:
    assert list(every_candidate(iter((32,)), iter((8,)))) == list(every_candidate((32,), (8,)))


CAPTIONING = Target.of(describe(Captioning("base", 0)), has_gpu=True)


def test_a_number_of_buckets_becomes_the_best_ones_for_the_workloads_lengths() -> None:
    plain, grouped = (
        choose([{"num_buckets": 4, "group_window": window}], CAPTIONING).settings[0].buckets or () for window in (1, 100)
    )
    assert len(plain) == len(grouped) == 4
    assert plain[-1] == grouped[-1] == 256
    assert grouped[0] <= 24 < 56 <= plain[0]  # grouped, most batches are short; mixed, half of them contain a long caption


def test_a_number_of_buckets_beside_the_buckets_themselves_is_excluded() -> None:
    (excluded,) = choose([{"num_buckets": 4, "bucket_size": 32, "dynamic": "buckets"}], CAPTIONING).excluded
    assert "leave one out" in excluded.reason


def test_what_the_workload_lacks_is_excluded() -> None:
    chosen = choose([{"scope": "modular", "parts.encodr.mode": "default"}, {"attention": "flex"}], CAPTIONING)
    assert [setting.attention for setting in chosen.settings] == [Attention.FLEX]
    (excluded,) = chosen.excluded
    assert excluded.reason == "the workload has no part 'encodr'; use one of encoder, decoder, loss"
    other = Target(max_length=256, has_gpu=True, attentions=())
    assert "its own only" in (unsupported(CompileSettings.parse("attention=sdpa"), other) or "")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(torch.optim.AdamW, lr=1e-3), "plain Adam's update, and this optimizer is AdamW with weight_decay; use"),
        (partial(torch.optim.SGD, lr=1e-3), "this optimizer is SGD; use optimizer=compiled"),
        (partial(torch.optim.Adam, lr=1e-3), None),
    ],
)
def test_foreach_map_is_excluded_for_an_optimizer_that_it_would_replace(
    make: Callable[..., torch.optim.Optimizer], reason: str | None
) -> None:
    workload = WorkloadFromModel(
        partial(torch.nn.Linear, 2, 2), lambda number: {"x": torch.ones(1, 2)}, lambda model, batch: model(batch["x"]).sum(),
        optimizer_fn=make,
    )  # fmt: skip
    candidates: list[Candidate] = [{"optimizer": "compiled"}, {"optimizer": "foreach_map"}]
    made = workload()
    refusal = partial(foreach_map_refusal, made)
    chosen = choose(candidates, Target.of(describe(made), has_gpu=False, foreach_map_refusal=refusal))
    assert len(chosen.settings) == (2 if reason is None else 1)
    assert [reason in excluded.reason for excluded in chosen.excluded if reason] == ([] if reason is None else [True])


@pytest.mark.parametrize(
    "options",
    [
        "epilogue_fusion=off",
        "max_autotune_gemm_backends=ATEN",
        "max_autotune_gemm_backends=ATEN/TRITON",
        "max_pointwise_cat_inputs=4",
        "cpu_gpu_bw=50.0",
        "triton.cudagraph_trees=on",
    ],
)
def test_options_of_the_right_type_are_torchs_own(options: str) -> None:
    (chosen,) = choose([{"mode": "max-autotune", **dict([f"inductor.{options}".split("=")])}], GPU).settings
    torch._TorchCompileInductorWrapper("default", None, None).apply_options(chosen.inductor_options)


def test_a_back_end_that_torch_would_ignore_is_excluded() -> None:
    (excluded,) = choose([{"mode": "max-autotune", "inductor.max_autotune_gemm_backends": "ATEN/TRITN"}], GPU).excluded
    assert excluded.reason == "inductor.max_autotune_gemm_backends has no back-end 'TRITN'; did you mean TRITON?"


class ByName(Toy):
    """Its optimizer looks up a module of its model."""

    def optimizer(self, model: torch.nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer | None:
        return super().optimizer(model.get_submodule("body"), kind)


def test_an_optimizer_that_needs_the_model_itself_is_left_to_the_trial() -> None:
    assert foreach_map_refusal(ByName("only", 0)) is None


def test_any_field_can_be_an_axis() -> None:
    found = list(varied([{"scope": "full"}, {"scope": "regional"}], {"group_window": [1, 10], "autocast": ["bf16", "off"]}))
    assert len(found) == 8
    assert found[1] == {"scope": "full", "group_window": 1, "autocast": "off"}
    assert len(choose(found, CAPTIONING).settings) == 8


SIZED = Target(max_length=64, has_gpu=False, workload="Sized", batch_size=8, options={"batch_size": int})


def test_a_batch_size_varies_by_name_and_the_workloads_own_has_no_key_of_its_own() -> None:
    chosen = choose(varied([{"scope": "eager"}], {"batch_size": ["4", "8", "16"]}), SIZED)
    assert [(s.batch_size, s.label) for s in chosen.settings] == [
        (4, "eager, batch_size=4"), (None, "eager"), (16, "eager, batch_size=16"),
    ]  # fmt: skip
    assert chosen.settings[0] == CompileSettings.parse("scope=eager,workload.batch_size=4")


@pytest.mark.parametrize(
    ("target", "candidate", "reason"),
    [
        (CPU, {"batch_size": "4"}, "the workload workload takes no batch size; give its batch function an argument batch_size"),
        (SIZED, {"batch_size": "0"}, "workload.batch_size=0 is not a number of them"),
        (SIZED, {"batch_size": "4", "workload.batch_size": "8"}, "batch_size is short for workload.batch_size"),
        (SIZED, {"accumulate": "3"}, "accumulate=3 does not split 8 samples evenly"),
        (SIZED, {"accumulate": "4", "batch_size": "6"}, "accumulate=4 does not split 6 samples evenly"),
        (replace(SIZED, num_workers=2), {"accumulate": "4"}, "use one worker per trial"),
        (replace(SIZED, unpadded_reason="a graph"), {"dynamic": "auto", "accumulate": "4"}, "may not be split \\(a graph\\)"),
        (replace(SIZED, has_own_step=True), {"scope": "modular", "accumulate": "4"}, "let that step accumulate"),
        (replace(SIZED, trains=False), {"accumulate": "4"}, "has no gradients; leave accumulate out"),
        (replace(CPU, is_script=True), {"batch_size": "4"}, "name that with --batch-arg"),
        (replace(CPU, is_script=True), {"accumulate": "4"}, "the script accumulates its own gradients"),
    ],
)
def test_batches_that_cannot_be_had_are_refused_in_one_sentence(target: Target, candidate: Candidate, reason: str) -> None:
    chosen = choose([candidate], target)
    assert chosen.settings == ()
    assert re.search(reason, chosen.excluded[0].reason), chosen.excluded[0].reason


def test_buckets_are_of_the_batches_that_a_setting_has() -> None:
    lengths = tuple([8] * 15 + [64])
    target = replace(SIZED, row_lengths=lengths, options={"batch_size": int})
    of_eight, of_one = choose([{"num_buckets": 2}, {"num_buckets": 2, "batch_size": 1}], target).settings
    assert (of_eight.buckets, of_one.buckets) == ((8, 64), (8, 64))


def test_mode_lite_is_refused_where_torch_does_not_have_it() -> None:
    class Older:
        def inductor_options(self) -> Mapping[str, str]:
            return {"epilogue_fusion": "bool"}

    chosen = choose([{"mode": "lite"}], replace(CPU, torch=Older()))
    assert re.search(r"torch \S+ has no mode=lite; leave it out", chosen.excluded[0].reason)
    assert choose([{"mode": "lite"}], CPU).settings
    assert Mode.LITE not in {candidate.get("mode") for candidate in CANDIDATES}


@pytest.mark.parametrize(
    "text", ["scope=full", "scope=full,dynamic=auto", "scope=regional,dynamic=mark", "scope=full,dynamic=true"]
)
def test_a_script_takes_the_whole_key_that_its_records_name_a_setting_by(text: str) -> None:
    script, setting = replace(CPU, is_script=True), CompileSettings.parse(text)
    assert "padding=" in setting.key
    chosen = choose([dict(parse_pairs(setting.key))], script)
    assert ([one.key for one in chosen.settings], chosen.excluded) == ([setting.key], ())
    other = "8" if setting.pad_multiple != 8 else "16"
    (left_out,) = choose([{"scope": "eager", "padding": "longest", "pad_multiple": other}], script).excluded
    assert "the script pads its own batches" in left_out.reason
