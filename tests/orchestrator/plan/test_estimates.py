"""Estimated durations: a prior, then what similar trials in the folder took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.estimates import expected_s, recording_s
from orchestrator.plan.space import Target, choose, every_candidate


def took(text: str, wall_s: float, compile_s: float | None = None) -> TrialRecord:
    """A trial's record with these settings."""
    made = CompileSettings.parse(text)
    return TrialRecord(
        trial_id=text, settings=made.to_dict(), settings_key=made.key, status=Status.OK, wall_s=wall_s, compile_s=compile_s
    )


FACTS = WorkloadFacts(max_length=256)


def prior(text: str) -> float:
    return expected_s(CompileSettings.parse(text), FACTS, [])


GUESSED_REGION_S = prior("scope=regional") - prior("scope=eager") + 1.0  # eager is expected to spend a second


def test_buckets_that_no_batch_fills_are_no_graphs() -> None:
    buckets = CompileSettings.parse("dynamic=buckets,bucket_size=32")
    assert (buckets.num_graphs(256), buckets.num_graphs(256, 65)) == (8, 6)
    assert expected_s(buckets, replace(FACTS, min_length=65), []) < expected_s(buckets, FACTS, [])
    candidate = {"dynamic": "buckets", "bucket_size": 16}
    assert choose([candidate], Target(max_length=256, has_gpu=True)).excluded
    assert not choose([candidate], Target(max_length=256, min_length=129, has_gpu=True)).excluded


def test_what_compiles_more_is_expected_to_take_longer() -> None:
    assert 0 < prior("scope=eager") < prior("scope=regional") < prior("scope=full")
    assert prior("scope=full") < prior("scope=full,dynamic=auto") < prior("scope=full,dynamic=buckets,bucket_size=32")
    assert prior("scope=full") < prior("scope=full,mode=max-autotune")
    assert prior("scope=full,dynamic=mark") < prior("scope=full,dynamic=true")
    assert prior("scope=regional,optimizer=fused") < prior("scope=regional,optimizer=compiled")
    assert prior("scope=regional,optimizer=fused") < prior("scope=regional,optimizer=foreach_map")
    assert prior("scope=modular") < prior("scope=modular,parts.encoder.mode=max-autotune")
    assert prior("mode=max-autotune") == prior("mode=max-autotune-no-cudagraphs")


def test_regions_take_as_long_as_they_differ() -> None:
    regional = CompileSettings.parse("scope=regional")
    alike, usual, unlike = (expected_s(regional, replace(FACTS, regional_share=share), []) for share in (0.2, None, 1.5))
    assert alike < usual < prior("scope=full") < unlike


def test_a_small_model_compiles_faster_and_a_scripts_size_is_taken_from_its_first_trial() -> None:
    settings = CompileSettings.parse("scope=full,optimizer=compiled")
    unknown, large, small = (expected_s(settings, replace(FACTS, num_weights=count), []) for count in (None, 500, 12))
    assert small < unknown == large
    of_eager = replace(took("scope=eager", 20.0, 0.0), model_facts={"num_weights": 12, "regional_share": None})
    assert expected_s(settings, FACTS, [of_eager]) == small
    said_nothing = replace(of_eager, model_facts={"num_weights": "?"})
    assert expected_s(settings, FACTS, [said_nothing]) == unknown


def test_dynamic_auto_takes_a_second_compile_unless_a_scripts_batches_do_not_change() -> None:
    one, both = (prior(f"scope=full,dynamic={text}") - prior("scope=eager") for text in ("mark", "auto"))
    assert both == pytest.approx(2 * one)
    of_eager = took("scope=eager", 20.0, 0.0)
    changing, alike = (replace(of_eager, model_facts={"batches_change": changes}) for changes in (True, False))
    auto, mark = (CompileSettings.parse(f"scope=full,dynamic={text}") for text in ("auto", "mark"))
    assert expected_s(auto, FACTS, [alike]) == expected_s(mark, FACTS, [alike]) < expected_s(auto, FACTS, [changing])


def test_texts_that_are_padded_take_one_graph_and_marked_lengths_a_larger_one() -> None:
    # A BERT on an H200: 26 s padded, 40 marked, and 150 as it is, on an H100 (docs/results.md).
    changing = replace(took("scope=eager", 20.0, 0.0), model_facts={"batches_change": True})
    words = ("auto,pad_to_multiple_of=64", "mark,pad_to_multiple_of=64", "auto")
    padded, marked, as_it_is = (
        expected_s(CompileSettings.parse(f"scope=full,dynamic={text}"), FACTS, [changing]) for text in words
    )
    assert padded < marked < as_it_is
    alike = replace(changing, model_facts={"batches_change": False})
    assert padded == expected_s(CompileSettings.parse("scope=full,dynamic=auto"), FACTS, [alike])


def test_six_graphs_take_longer_than_one_and_less_than_six_times_as_long() -> None:
    dynamic = ("static", "buckets,buckets=8/16/24/32/64/256")
    one, six = (prior(f"scope=full,dynamic={text}") - prior("scope=eager") for text in dynamic)
    assert 2 * one < six < 4 * one


def test_what_a_trial_takes_beside_compiling_is_learnt_from_the_first_that_ended() -> None:
    done = [took("scope=eager", 90.0, 1.0)]
    compiling = prior("scope=full") - prior("scope=eager")
    assert expected_s(CompileSettings.parse("scope=full"), FACTS, done) == pytest.approx(90.0 + compiling)
    more = [*done, took("scope=regional", 70.0, 10.0), took("scope=regional,dynamic=mark", 500.0, None)]
    assert expected_s(CompileSettings.parse("scope=full"), FACTS, more) == pytest.approx(
        (89.0 + 60.0) / 2 + (1.0 + compiling) * 10 / GUESSED_REGION_S
    ), "it compiled a region in 10 s"


def test_imports_and_eager_runs_of_the_first_trial_are_not_expected_again() -> None:
    # ConvNeXt on an H200: after 97 s of eager training, no other trial seemed to fit into 200 s.
    phases_s = {"starting": 30.0, "building": 14.0, "steady": 2.0, "eager-runs": 51.0}
    eager = CompileSettings.parse("scope=eager")
    done = [replace(took("scope=eager", 97.0, 0.0), phases_s=phases_s)]
    assert expected_s(eager, FACTS, done) == pytest.approx(21.0)
    compiling = prior("scope=full") - prior("scope=eager") + 1.0
    assert expected_s(CompileSettings.parse("scope=full"), FACTS, done) == pytest.approx(21.0 + compiling)


def test_seconds_of_recording_cuda_graphs_say_nothing_about_compiling() -> None:
    graphed = "scope=regional,mode=reduce-overhead"
    # Captioning on an H200: 67 of 97 s recorded graphs; before, `full` was expected to take four times too long.
    done = [replace(took(graphed, 150.0, 97.0), compile_phases_s={"inductor": 30.0, "cudagraph_capture": 67.0})]
    compiling = prior("scope=full") - prior("scope=eager") + 1.0
    rest = 150.0 - 97.0
    assert expected_s(CompileSettings.parse("scope=full"), FACTS, done) == pytest.approx(rest + compiling * 30 / GUESSED_REGION_S)
    of_any_scope = rest + compiling * 30 / GUESSED_REGION_S + 67.0
    assert expected_s(CompileSettings.parse("scope=full,mode=reduce-overhead"), FACTS, done) == pytest.approx(of_any_scope)
    full = replace(took("scope=full,mode=reduce-overhead,dynamic=auto", 150.0, 97.0), compile_phases_s={"cudagraph_capture": 9.0})
    asked = CompileSettings.parse("scope=full,mode=reduce-overhead,dynamic=buckets,bucket_size=64")
    assert recording_s(asked, [(CompileSettings.parse(one.settings_key), one.compile_phases_s) for one in (*done, full)]) == 9.0


def test_every_setting_of_the_grid_has_a_prior() -> None:
    target = Target(max_length=256, has_gpu=True)
    chosen = choose(every_candidate(bucket_sizes=(32, 64), pad_multiples=(8,)), target).settings
    assert all(expected_s(setting, FACTS, []) > 0 for setting in chosen)


def test_like_trials_of_the_folder_replace_the_prior_by_their_median() -> None:
    done = [took("scope=full", 30.0), took("scope=full,optimizer=fused", 50.0), took("scope=full,dynamic=mark", 900.0)]
    assert expected_s(CompileSettings.parse("scope=full,autocast=fp16"), FACTS, done) == 50.0


@pytest.mark.parametrize(
    "other",
    [
        "scope=regional",
        "scope=full,mode=max-autotune",
        "scope=full,dynamic=auto",
        "scope=full,dynamic=buckets,bucket_size=32",
        "scope=full,optimizer=compiled",
        "scope=full,optimizer=foreach_map",
        "scope=full,inductor.max_autotune_gemm=on",
    ],
)
def test_trials_that_compile_something_else_say_nothing(other: str) -> None:
    assert expected_s(CompileSettings.parse("scope=full"), FACTS, [took(other, 1.0)]) == prior("scope=full")


def test_a_cold_trial_also_takes_what_like_ones_had_restored() -> None:
    warm = replace(took("scope=full", 40.0, 6.0), caches=Caches.WARM, cold_equivalent_s=300.0)
    asked = CompileSettings.parse("scope=full,optimizer=fused")
    assert expected_s(asked, FACTS, [warm]) == 40.0
    assert expected_s(asked, FACTS, [warm], cold=True) == 334.0
    assert expected_s(asked, FACTS, [took("scope=full", 330.0, 300.0)], cold=True) == 330.0


def test_a_setting_that_ran_before_is_expected_to_take_as_long_again() -> None:
    done = [took("scope=eager", 60.0), took("scope=eager,sdpa_kernel=efficient", 20.0), took("scope=eager,optimizer=fused", 20.0)]
    assert expected_s(CompileSettings.parse("scope=eager"), FACTS, done) == 60.0
    assert expected_s(CompileSettings.parse("scope=eager,sdpa_kernel=math"), FACTS, done) == 20.0


def test_thousands_of_operators_decide_how_long_compiling_takes() -> None:
    settings = CompileSettings.parse("scope=full")
    few, many = (expected_s(settings, replace(FACTS, num_operators=number), []) for number in (500, 6_000))
    assert few == prior("scope=full") < many
    of_eager = replace(took("scope=eager", 20.0, 0.0), model_facts={"num_operators": 6_000})
    assert expected_s(settings, FACTS, [of_eager]) == many
