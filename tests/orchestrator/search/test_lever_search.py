"""The searcher of recipe `auto`: the baseline, what won elsewhere, then one lever more; on tables with known gains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import REPOSITORY

from compile_sweep.contract.workload_facts import SCRIPT_FACTS, WorkloadFacts
from compile_sweep.schema.causes.errors import GRAPHS_MEMORY, GRAPHS_POOL
from compile_sweep.schema.choices import OptimizerKind
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search.candidates import Candidates
from orchestrator.search.lever_prior import LeverGain, Prior, shipped_prior
from orchestrator.search.lever_search import LeverSearch, Step
from orchestrator.search.levers import changed, levers_of
from orchestrator.search.tables import read_table

SPEED = Aims.parse(["samples_per_s:max"])
SETTINGS = [
    CompileSettings.parse(f"scope={scope},optimizer={optimizer}{layout}{mode}")
    for scope in ("eager", "full", "regional")
    for mode in ("", ",mode=reduce-overhead")
    for optimizer in ("foreach", "fused")
    for layout in ("", ",memory_format=channels_last")
    if not (scope == "eager" and mode)
]
GAINS = {
    "scope=full": 0.4,
    "scope=regional": 0.2,
    "cudagraphs=on": 0.3,
    "optimizer=fused": 0.05,
    "memory_format=channels_last": 0.3,
}


def elsewhere(gains: Mapping[str, float]) -> Prior:
    """A prior in which each lever gained this much on two workloads."""
    own = {"size": "base", "device": "cuda", "pairs": 3, "failed": 0}
    return Prior(
        LeverGain(lever=lever, compiled=not lever.startswith("scope"), workload=workload, log_gain=worth, **own)  # type: ignore[arg-type]
        for lever, worth in gains.items()
        for workload in ("one", "another")
    )


def row(setting: CompileSettings, gains: Mapping[str, float], broken: str | None = None) -> dict[str, Any]:
    """Returns the record of a setting whose levers gain this much; one with the broken lever fails."""
    pulled = [f"{name}={value}" for name, value in levers_of(setting).items()]
    compile_s = {"eager": 1.0, "regional": 20.0, "full": 60.0}[setting.scope]
    common = {"settings_key": setting.key, "wall_s": 20.0 + compile_s}
    if broken in pulled:
        return {**common, "status": "infeasible", "label": "compile-error"}
    speed = 100 * math.exp(sum(gains.get(lever, 0.0) for lever in pulled))
    return {**common, "status": "ok", "samples_per_s": speed, "compile_s": compile_s}


def search(prior: Prior, **options: Any) -> LeverSearch:
    return LeverSearch(Candidates(SETTINGS), SPEED, WorkloadFacts(max_length=1), prior=prior, **options)


def tell_first(searching: LeverSearch, model: Mapping[str, Any]) -> None:
    """Tells a search the result of its first setting, with facts about the model."""
    first = searching.next_step()
    assert first is not None
    searching.tell({**row(first.setting, GAINS), "model_facts": model})


def run(searching: LeverSearch, gains: Mapping[str, float], broken: str | None = None) -> list[Step]:
    """Returns the steps of a whole search."""
    steps = []
    while (step := searching.next_step()) is not None:
        steps.append(step)
        searching.tell(row(step.setting, gains, broken))
    return steps


def test_what_a_lever_gains_in_eager_training_says_little_about_compiled_training() -> None:
    # A UNet on an H100: channels_last gained less in eager training than on a ResNet, and no compiled setting had it.
    eager, compiled = {"scope=full": 0.25, "memory_format=channels_last": 0.26, "optimizer=fused": 0.08}, {
        "cudagraphs=on": 0.5, "memory_format=channels_last": 0.06, "optimizer=fused": 0.08,
    }  # fmt: skip
    own = {"size": "base", "device": "cuda", "pairs": 3, "failed": 0}
    prior = Prior(
        LeverGain(lever=lever, compiled=is_compiled, workload=workload, log_gain=worth, **own)  # type: ignore[arg-type]
        for is_compiled, gains in ((False, eager), (True, compiled))
        for lever, worth in gains.items()
        for workload in ("one", "another")
    )
    settings = [setting for setting in SETTINGS if setting.scope != "regional"]
    search = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=prior)
    for speed in (469.3, 520.0):
        step = search.next_step()
        assert step is not None
        assert step.setting.scope == "eager"
        search.tell({"settings_key": step.setting.key, "status": "ok", "samples_per_s": speed, "compile_s": 1.0, "wall_s": 15.0})
    assert step.setting.memory_format == "channels_last"
    step = search.next_step()
    assert step is not None
    assert (step.setting.scope, step.setting.memory_format) == ("full", "channels_last")


def test_a_capture_which_takes_seconds_is_tried_soon_where_a_compiled_setting_is_the_best() -> None:
    """The best of a policy optimization on an H200 came seventh, as a compiled setting was the best until then."""
    fused = CompileSettings.parse("scope=eager,cudagraphs=on,optimizer=fused")
    searching = LeverSearch(Candidates([*SETTINGS, fused]), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    little = {"scope=full": 0.02, "scope=regional": 0.02, "cudagraphs=on": 0.02, "optimizer=fused": 0.02}
    seen = [step.setting for step in run(searching, little)]
    assert seen[1].scope != "eager"
    assert fused in seen[:4]


def test_cuda_graphs_that_cannot_be_captured_in_eager_training_may_still_work_compiled() -> None:
    captured, graphed = (CompileSettings.parse(text) for text in ("scope=eager,cudagraphs=on", "scope=full,mode=reduce-overhead"))
    searching = LeverSearch(Candidates([*SETTINGS, captured]), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    failed, other = searching.place_of(captured.key), searching.place_of(graphed.key)
    assert failed is not None
    assert other is not None
    before, after = searching.model.works([]), searching.model.works([(failed, False)])
    assert after[other] == before[other]
    assert after[failed] < before[failed]


def test_the_reason_for_captured_cuda_graphs_names_them() -> None:
    settings = [CompileSettings.parse(text) for text in ("scope=eager", "scope=eager,cudagraphs=on")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere({}))
    reasons = [step.reason for step in run(searching, {"captured_cudagraphs=on": 0.2})]
    assert reasons == ["what runs today", "what runs today and eager CUDA graphs"]


def test_recording_cuda_graphs_of_regions_does_not_put_off_the_whole_model() -> None:
    graphed = CompileSettings.parse("scope=regional,mode=reduce-overhead,dynamic=static")
    steps = []
    for recording_s in (0.0, 67.0):
        searching = search(elsewhere(GAINS))
        searching.tell(row(SETTINGS[0], GAINS))
        recorded = {"compile_s": 20.0 + recording_s, "wall_s": 40.0 + recording_s}
        recorded["compile_phases_s"] = {"inductor": 20.0, "cudagraph_capture": recording_s}
        searching.tell({**row(graphed, GAINS), **recorded})
        full = next(place for place, one in enumerate(SETTINGS) if one.scope == "full" and one.cudagraphs)
        steps.append(float(searching._seconds()[full]))
    assert steps[1] == pytest.approx(steps[0] + 67.0), "once more, and not in proportion"


def test_it_begins_with_what_runs_today_and_then_with_all_that_won_elsewhere() -> None:
    first, second, *_ = run(search(elsewhere(GAINS)), GAINS)
    assert (first.setting.key, first.reason) == (SETTINGS[0].key, "what runs today")
    assert levers_of(second.setting).keys() == {"scope", "cudagraphs", "optimizer", "memory_format"}
    assert "cudagraphs=on (×1.26 on 2 others)" in second.reason


def test_what_follows_is_the_best_so_far_with_one_more_lever() -> None:
    searching = search(Prior())
    best: CompileSettings | None = None
    num_steps = 0
    while (step := searching.next_step()) is not None and num_steps < 6:
        num_steps += 1
        if best is not None and best.scope != "eager":
            assert len(changed(levers_of(best), levers_of(step.setting))) == 1, step
        searching.tell(row(step.setting, GAINS))
        best = SETTINGS[searching.best() or 0]
    assert num_steps >= 4


@pytest.mark.parametrize("loser", ["memory_format=channels_last", "cudagraphs=on"])
def test_it_goes_back_when_a_lever_that_won_elsewhere_loses_here(loser: str) -> None:
    here = {**GAINS, loser: -0.4}
    best_of_all = max(SETTINGS, key=lambda setting: row(setting, here)["samples_per_s"])
    steps = run(search(elsewhere(GAINS)), here)
    place = [step.setting.key for step in steps].index(best_of_all.key)
    assert place <= 4, "the baseline, all levers at once, the other scope, and one step back"


def test_a_lever_that_does_not_work_is_left_alone_after_it_failed() -> None:
    steps = run(search(elsewhere(GAINS)), GAINS, broken="cudagraphs=on")
    works = [step.setting for step in steps if not step.setting.cudagraphs]
    assert max(row(setting, GAINS)["samples_per_s"] for setting in works) == pytest.approx(100 * math.exp(0.75))
    assert len(steps) - len(works) <= 4


@pytest.mark.parametrize(
    ("tried", "label", "reason", "skipped", "kept"),
    [
        # Blocks that run again in the backward pass overwrite what their CUDA graphs returned.
        (
            "scope=regional,mode=reduce-overhead",
            "compile-error",
            f"RuntimeError: {GRAPHS_MEMORY} by",
            "regional graphs",
            "full graphs",
        ),
        ("scope=full,mode=reduce-overhead", "compile-error", f"RuntimeError: 2 tensors {GRAPHS_POOL}", "full graphs", "full"),
        ("scope=full,mode=reduce-overhead", "cudagraphs-skipped", "mutated inputs", "full graphs", "full"),
        ("scope=full,mode=reduce-overhead", "silent-fallback", "wrapper runs eagerly", "full", "regional"),
        ("scope=full,dynamic=mark", "silent-fallback", "wrapper runs eagerly", "full", "regional"),
        ("scope=full,mode=reduce-overhead,optimizer=compiled", "silent-fallback", "the optimizer's step", "", "full"),
        ("scope=full,mode=reduce-overhead", "compile-error", "an assertion", "", "full graphs"),
    ],
)
def test_what_fails_by_its_graphs_is_not_tried_again_with_other_levers(
    tried: str, label: str, reason: str, skipped: str, kept: str
) -> None:
    others = ("scope=full,mode=reduce-overhead,optimizer=compiled", "scope=full,dynamic=mark")
    settings = [*SETTINGS, *map(CompileSettings.parse, others)]
    searching = LeverSearch(Candidates(settings), SPEED, WorkloadFacts(max_length=1), prior=elsewhere(GAINS))
    key = CompileSettings.parse(tried).key
    searching.tell({"settings_key": key, "wall_s": 60.0, "status": "infeasible", "label": label, "reason": reason})
    left = []
    while (step := searching.next_step()) is not None:
        left.append(f"{step.setting.scope}{' graphs' if step.setting.claims_cudagraphs else ''}")
        searching.tell(row(step.setting, GAINS))
    assert kept in left
    assert not skipped or not any(f"{one} ".startswith(f"{skipped} ") for one in left)


def test_it_ends_when_nothing_promises_enough_and_says_what_more_time_would_gain() -> None:
    searching = search(elsewhere(GAINS))
    steps = run(searching, GAINS)
    assert len(steps) < len(SETTINGS)
    assert 0 <= searching.forecast(3600.0) < 0.01
    early = search(elsewhere(GAINS))
    assert early.forecast(3600.0) == math.inf
    early.tell(row(SETTINGS[0], GAINS))
    assert early.forecast(3600.0) > 0.5
    assert early.forecast(1.0) == 0.0


def test_what_would_not_end_in_time_is_not_proposed() -> None:
    steps = run(search(elsewhere(GAINS), fits=lambda setting: setting.scope != "full"), GAINS)
    assert {step.setting.scope for step in steps} == {"eager", "regional"}
    assert search(elsewhere(GAINS), fits=lambda setting: False).propose() is None


def test_fewer_tokens_are_worth_more_before_any_trial_has_shown_it() -> None:
    settings = [CompileSettings.parse(f"scope=eager,padding={padding}") for padding in ("max", "longest")]
    settings += [CompileSettings.parse(f"scope=full,dynamic={dynamic}") for dynamic in ("static", "mark")]
    tokens = {"max": 256.0, "longest": 64.0}
    searching = LeverSearch(
        Candidates(settings), SPEED, WorkloadFacts(max_length=256), tokens=lambda setting: tokens[str(setting.padding)]
    )
    searching.tell(row(settings[0], {}))
    step = searching.next_step()
    assert step is not None
    assert step.setting.padding == "longest"


def test_a_plan_is_what_would_be_tried_if_all_went_as_expected() -> None:
    steps = search(elsewhere(GAINS)).plan(300.0)
    assert steps[0].reason == "what runs today"
    assert levers_of(steps[1].setting).keys() >= {"scope", "cudagraphs", "memory_format"}
    assert sum(step.seconds for step in steps) <= 300
    assert len({step.setting.key for step in steps}) == len(steps)


@pytest.mark.parametrize(
    ("table", "share", "within_s"),
    [
        ("benchmarks/tables/captioning-base-h200", 0.9, 300),
        ("benchmarks/tables/captioning-tiny-cpu", 0.95, 300),
        ("docs/results/h100-gpt2-levers", 0.98, 120),
        ("docs/results/h100-resnet", 0.98, 200),
    ],
)
def test_recorded_sweeps_are_replayed_with_a_prior_that_has_not_seen_them(table: str, share: float, within_s: float) -> None:
    recorded = read_table(Path(REPOSITORY, table))
    has_gpu = "cpu" not in table
    prior = shipped_prior().elsewhere(recorded.origin.workload, has_gpu=has_gpu)
    lengths = {(s.padding, s.group_window): r["mean_length"] for s, r in _measured(recorded.rows) if r["mean_length"]}
    searching = LeverSearch(
        recorded.candidates,
        SPEED,
        recorded.facts,
        prior=prior,
        tokens=lambda setting: lengths.get((setting.padding, setting.group_window), recorded.facts.max_length),
    )
    best = max(one["samples_per_s"] for one in recorded.rows.values() if SPEED.is_usable(one))
    spent, found = 0.0, 0.0
    while found < share and (setting := searching.propose()) is not None:
        one = recorded.rows[setting.key]
        searching.tell(one)
        spent += one["wall_s"]
        found = max(found, one["samples_per_s"] / best if SPEED.is_usable(one) else 0.0)
    assert found >= share
    assert spent <= within_s


def _measured(rows: Mapping[str, Any]) -> list[tuple[CompileSettings, Any]]:
    return [(CompileSettings.parse(key), one) for key, one in rows.items()]


@pytest.mark.parametrize(
    ("model", "proposed"),
    [
        ({"memory_format": "channels_last", "has_blocks": True, "regional_share": 0.2}, {"memory_format", "regional"}),
        ({"memory_format": None, "has_blocks": True, "regional_share": 0.2}, {"regional"}),
        ({"memory_format": "channels_last_3d", "has_blocks": True, "regional_share": 0.2}, {"regional"}),
        ({"memory_format": "channels_last", "has_blocks": False}, {"memory_format"}),
        ({"memory_format": ["?"], "has_blocks": None, "regional_share": "?"}, {"regional"}),
    ],
)
def test_levers_that_a_scripts_model_has_no_use_for_are_proposed_no_more(model: dict[str, Any], proposed: set[str]) -> None:
    searching = search(elsewhere(GAINS))
    tell_first(searching, model)
    steps = run(searching, {**GAINS, "scope=full": 0.0})
    found = {"memory_format"} if any(step.setting.memory_format for step in steps) else set()
    found |= {"regional"} if any(step.setting.scope == "regional" for step in steps) else set()
    assert found == proposed


@pytest.mark.parametrize("can_compile", [True, False])
def test_nothing_compiled_is_proposed_for_a_script_that_differentiates_its_gradients_again(can_compile: bool) -> None:
    searching = search(elsewhere(GAINS))
    tell_first(searching, {"can_compile": can_compile})
    scopes = {step.setting.scope for step in run(searching, GAINS)}
    assert (Scope.FULL in scopes, Scope.REGIONAL in scopes) == (can_compile, can_compile)


@pytest.mark.parametrize(("known", "is_proposed"), [({}, True), ({"has_fused": True}, True), ({"has_fused": False}, False)])
def test_a_fused_optimizer_is_proposed_unless_torch_is_known_to_have_none(known: dict[str, bool], is_proposed: bool) -> None:
    searching = search(elsewhere(GAINS))
    tell_first(searching, known)
    assert any(step.setting.optimizer is OptimizerKind.FUSED for step in run(searching, GAINS)) is is_proposed


@pytest.mark.parametrize("can_compile", [True, False])
def test_a_compiled_optimizer_is_proposed_unless_its_gradients_are_sparse(can_compile: bool) -> None:
    settings = [CompileSettings.parse(f"scope={way}") for way in ("eager", "full", "full,optimizer=compiled")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"can_compile_optimizer": can_compile})
    steps = run(searching, {**GAINS, "compiled_optimizer=compiled": 0.28})
    assert any(step.setting.optimizer is OptimizerKind.COMPILED for step in steps) is can_compile


@pytest.mark.parametrize("is_fused", [True, False])
def test_no_optimizer_that_is_fused_is_replaced_by_another(is_fused: bool) -> None:
    searching = search(elsewhere(GAINS))
    tell_first(searching, {"has_fused": True, "is_fused": is_fused})
    kinds = {step.setting.optimizer for step in run(searching, GAINS)}
    assert (OptimizerKind.FOREACH in kinds) is not is_fused
    assert OptimizerKind.FUSED in kinds


@pytest.mark.parametrize(("is_fused", "graphs", "is_proposed"), [(True, 0, False), (True, 2, True), (False, 0, True)])
def test_a_fused_optimizer_alone_is_not_proposed_for_a_script_that_has_it_and_compiles_nothing_itself(
    is_fused: bool, graphs: int, is_proposed: bool
) -> None:
    settings = [CompileSettings.parse(f"scope={text}") for text in ("eager", "eager,optimizer=fused")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    first = searching.next_step()
    assert first is not None
    searching.tell({**row(first.setting, GAINS), "graphs": graphs, "model_facts": {"has_fused": True, "is_fused": is_fused}})
    assert [step.setting.optimizer for step in run(searching, GAINS)] == [OptimizerKind.FUSED] * is_proposed


def test_a_compiled_optimizer_is_tried_sooner_where_it_updates_weight_after_weight() -> None:
    ways = ("eager", "full", "full,mode=reduce-overhead", "regional", "regional,mode=reduce-overhead")
    settings = [CompileSettings.parse(f"scope={way},optimizer={kind}") for way in ways for kind in ("fused", "compiled")]
    tried = []
    for loops in (True, False):
        searching = LeverSearch(Candidates(settings[:1] + settings[2:]), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
        tell_first(searching, {"has_blocks": True, "loops_over_weights": loops})
        steps = run(searching, {**GAINS, "compiled_optimizer=compiled": 0.28})
        tried.append([step.setting.optimizer for step in steps].index(OptimizerKind.COMPILED))
    assert tried[0] < tried[1]


@pytest.mark.parametrize(
    ("known", "is_proposed"), [({}, True), ({"has_loss_outside": True}, True), ({"has_loss_outside": False}, False)]
)
def test_a_compiled_loss_is_proposed_unless_the_script_is_known_to_have_none(known: dict[str, bool], is_proposed: bool) -> None:
    settings = [CompileSettings.parse(f"scope={way}") for way in ("eager", "full", "full,compile_loss=on")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, **known})
    assert any(step.setting.compile_loss for step in run(searching, {**GAINS, "compile_loss=on": 0.1})) is is_proposed


@pytest.mark.parametrize("recomputes", [True, False])
def test_keeping_activations_is_proposed_unless_the_script_is_known_to_recompute_none(recomputes: bool) -> None:
    keeps = ",activation_checkpointing=off"
    settings = [CompileSettings.parse(f"scope={way}") for way in ("eager", "full", f"eager{keeps}", f"full{keeps}")]
    searching = LeverSearch(Candidates(settings), SPEED, replace(SCRIPT_FACTS, recomputes=True), prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "recomputes": recomputes})
    steps = run(searching, {**GAINS, "activation_checkpointing=off": 0.2})
    assert any(step.setting.activation_checkpointing for step in steps) is recomputes


@pytest.mark.parametrize("makes_cache", [True, False])
def test_a_cache_that_training_makes_is_left_out_from_the_first_compiled_setting_on(makes_cache: bool) -> None:
    ways = ("eager", "full", "regional")
    settings = [CompileSettings.parse(f"scope={way}{without}") for way in ways for without in ("", ",use_cache=off")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "makes_cache": makes_cache})
    steps = run(searching, {**GAINS, "use_cache=off": 0.2})
    first = next(step.setting for step in steps if step.setting.scope is not Scope.EAGER)
    assert (first.use_cache is False) is makes_cache
    assert any(step.setting.use_cache is False for step in steps) is makes_cache


@pytest.mark.parametrize("has_experts", [True, False])
def test_experts_are_cast_from_the_first_compiled_setting_on_where_autocast_leaves_them(has_experts: bool) -> None:
    ways = ("eager", "full", "regional")
    settings = [CompileSettings.parse(f"scope={way}{cast}") for way in ways for cast in ("", ",autocast_experts=on")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "float32_experts": has_experts})
    steps = run(searching, {**GAINS, "autocast_experts=on": 0.4})
    first = next(step.setting for step in steps if step.setting.scope is not Scope.EAGER)
    assert bool(first.autocast_experts) is has_experts
    assert any(step.setting.autocast_experts for step in steps) is has_experts


@pytest.mark.parametrize("can_pad", [True, False])
def test_texts_are_padded_where_they_can_be_and_then_shapes_recur_for_cuda_graphs(can_pad: bool) -> None:
    ways = ("eager", "full,dynamic=auto", "full,dynamic=auto,mode=reduce-overhead")
    settings = [CompileSettings.parse(f"scope={way}{padded}") for way in ways for padded in ("", ",pad_to_multiple_of=64")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "can_pad": can_pad, "shapes_recur": False})
    tried = {step.setting for step in run(searching, {**GAINS, "pad_to_multiple_of=64": 0.2})}
    assert any(setting.pad_to_multiple_of for setting in tried) is can_pad
    assert {setting.pad_to_multiple_of for setting in tried if setting.claims_cudagraphs} == ({64} if can_pad else set())


@pytest.mark.parametrize("can_pad", [True, False])
def test_a_kernel_that_needs_no_planning_comes_first_only_where_texts_are_not_padded(can_pad: bool) -> None:
    kernels = ("", ",sdpa_kernel=cudnn", ",sdpa_kernel=efficient")
    every = ("scope=full,dynamic=auto" + kernel + pads for kernel in kernels for pads in ("", ",pad_to_multiple_of=64"))
    settings = [CompileSettings.parse(text) for text in ("scope=eager", *every)]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere({**GAINS, "pad_to_multiple_of=64": 0.2}))
    tell_first(searching, {"has_blocks": True, "has_attention": True, "batches_change": True, "can_pad": can_pad})
    first = run(searching, GAINS)[0].setting
    assert (first.pad_to_multiple_of, first.sdpa_kernel) == ((64, None) if can_pad else (None, "efficient"))


@pytest.mark.parametrize("autocasts", [True, False])
def test_matmul_precision_is_proposed_unless_the_script_is_known_to_autocast(autocasts: bool) -> None:
    settings = [CompileSettings.parse(f"scope={way}") for way in ("eager", "full", "full,matmul_precision=high")]
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "autocasts": autocasts})
    steps = run(searching, {**GAINS, "matmul_precision=high": 0.1})
    assert any(step.setting.matmul_precision for step in steps) is not autocasts


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_an_optimizers_settings_are_proposed_if_the_script_has_one(has_optimizer: bool) -> None:
    searching = search(elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "has_optimizer": has_optimizer})
    assert any(step.setting.optimizer == "fused" for step in run(searching, GAINS)) is has_optimizer


@pytest.mark.parametrize("changes", [True, False])
def test_lengths_are_marked_first_if_a_scripts_batches_change_and_never_if_they_do_not(changes: bool) -> None:
    settings = [CompileSettings.parse(f"scope={way}") for way in ("eager", "full,dynamic=auto", "full,dynamic=mark")]
    settings.append(CompileSettings.parse("scope=full,dynamic=auto,optimizer=fused"))
    searching = LeverSearch(Candidates(settings), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "batches_change": changes})
    steps = run(searching, GAINS)
    assert [step.setting.dynamic for step in steps][:1] == ["mark" if changes else "auto"]
    assert any(step.setting.dynamic == "mark" for step in steps) is changes
    assert not any("dynamic=auto" in step.reason for step in steps[:1])  # what most settings do is no lever


@pytest.mark.parametrize("changes", [True, False])
def test_attention_that_plans_no_shape_anew_comes_first_where_shapes_change(changes: bool) -> None:
    kernels = ("", ",sdpa_kernel=cudnn", ",sdpa_kernel=efficient")
    ways = [f"scope={scope}{kernel}" for scope in ("eager", "full") for kernel in kernels]
    searching = LeverSearch(Candidates([*map(CompileSettings.parse, ways)]), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "has_attention": True, "batches_change": changes})
    first = run(searching, {**GAINS, "sdpa_kernel=efficient": 0.5, "sdpa_kernel=cudnn": 0.0})[0]
    assert (first.setting.sdpa_kernel == "efficient") is changes


@pytest.mark.parametrize(("left_s", "first"), [(math.inf, "full"), (65.0, "regional")])
def test_what_may_take_longer_than_is_left_waits_until_compile_times_are_known(left_s: float, first: str) -> None:
    settings = [CompileSettings.parse(f"scope={scope}") for scope in ("eager", "full", "regional")]
    facts = WorkloadFacts(max_length=1, regional_share=0.5)
    gains = {"scope=full": 0.6, "scope=regional": 0.3}
    searching = LeverSearch(Candidates(settings), SPEED, facts, prior=elsewhere(gains), left_s=lambda: left_s)
    searching.tell(row(settings[0], gains))
    assert run(searching, gains)[0].setting.scope == first


@pytest.mark.parametrize("recur", [True, False])
def test_cuda_graphs_are_proposed_unless_the_shapes_of_a_scripts_batches_hardly_come_again(recur: bool) -> None:
    searching = search(elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "shapes_recur": recur})
    assert any(step.setting.claims_cudagraphs for step in run(searching, GAINS)) is recur


def test_a_lever_is_added_to_the_cheaper_of_two_settings_that_are_as_good() -> None:
    texts = ["eager", *(f"{scope},optimizer={kind}" for scope in ("full", "regional") for kind in ("fused", "compiled"))]
    settings = [CompileSettings.parse(f"scope={text}") for text in texts]
    eager, fused, compiled, regional, _ = settings
    searching = LeverSearch(Candidates(settings), SPEED, WorkloadFacts(max_length=1, regional_share=1.5), prior=Prior())
    rates = {eager.key: 100.0, fused.key: 150.0, compiled.key: 152.0}
    for setting in (eager, fused, compiled):
        seconds = {eager.key: 1.0, fused.key: 50.0, compiled.key: 90.0}[setting.key]
        searching.tell(
            {
                "settings_key": setting.key,
                "status": "ok",
                "samples_per_s": rates[setting.key],
                "compile_s": seconds,
                "wall_s": 20.0 + seconds,
            }
        )
    step = searching.next_step()
    assert step is not None
    assert (step.setting, step.reason) == (regional, "a setting as good and scope=regional")


def test_an_hour_more_promises_less_where_combinations_gain_what_their_levers_do() -> None:
    def model_of(interplay: float) -> tuple[float, float]:
        searching = search(elsewhere(GAINS))
        for place, setting in enumerate(SETTINGS[:14]):
            told = row(setting, GAINS)
            searching.tell({**told, "samples_per_s": told["samples_per_s"] * math.exp((place * 7 % 5 - 2) * interplay)})
        return searching.model.likeliest_interplay(*searching._measured()), searching.forecast(3600.0)

    (even, promises), (uneven, promises_more) = model_of(0.0), model_of(0.1)
    assert even < uneven
    assert promises <= promises_more


@pytest.mark.parametrize(("kinds", "limit"), [(1, None), (8, None), (9, 64), (12, 64)])
@pytest.mark.parametrize("is_script", [True, False])
def test_blocks_of_many_kinds_get_a_higher_limit_of_graphs_from_the_first(
    kinds: int, limit: int | None, *, is_script: bool
) -> None:
    settings = [CompileSettings.parse(f"scope={way}") for way in ("eager", "full", "regional", "regional,optimizer=fused")]
    facts = SCRIPT_FACTS if is_script else WorkloadFacts(max_length=1, kinds_of_blocks=kinds)
    searching = LeverSearch(Candidates(settings), SPEED, facts, prior=elsewhere(GAINS))
    if is_script:
        tell_first(searching, {"has_blocks": True, "kinds_of_blocks": kinds})
    limits = {step.setting.scope: step.setting.recompile_limit for step in run(searching, GAINS)}
    assert limits[Scope.REGIONAL] == limit
    assert limits[Scope.FULL] is None


@pytest.mark.parametrize(("us", "first"), [(90.0, "captured"), (2_000.0, "compiled")])
def test_a_capture_comes_first_where_a_step_takes_hardly_longer_than_its_launches(us: float, first: str) -> None:
    captures = CompileSettings.parse("scope=eager,cudagraphs=on,optimizer=fused")
    prior = shipped_prior().elsewhere("a script", has_gpu=True)
    searching = LeverSearch(Candidates([*SETTINGS, captures]), SPEED, SCRIPT_FACTS, prior=prior)
    blocks = {"has_blocks": True, "num_weights": 62, "regional_share": 0.28}
    first_step = searching.next_step()
    assert first_step is not None
    model = {**blocks, "num_operators": 500, "us_per_operator": us}
    searching.tell({**row(first_step.setting, GAINS), "wall_s": 25.0, "model_facts": model})
    step = searching.next_step()
    assert step is not None
    assert ("captured" if step.setting == captures else "compiled" if step.setting.scope != "eager" else "eager") == first


def test_a_loop_of_thousands_of_operators_is_not_compiled_in_a_few_minutes() -> None:
    """Blocks of a plain Mamba, whose scan is a loop over the words, compiled for more than two minutes on an H200."""
    proposed = []
    for number in (500, 6_000):
        searching = search(elsewhere(GAINS), left_s=lambda: 100.0)
        tell_first(searching, {"num_operators": number, "num_weights": 62, "regional_share": 0.28, "has_blocks": True})
        step = searching.next_step()
        proposed.append(step is not None and step.setting.scope != "eager")
    assert proposed == [True, False]


@pytest.mark.parametrize("graphs", ["scope=eager,cudagraphs=on", "scope=regional,mode=reduce-overhead"])
@pytest.mark.parametrize(("shapes", "padded", "is_proposed"), [(16, False, True), (17, False, False), (17, True, True)])
def test_cuda_graphs_are_proposed_unless_batches_have_too_many_shapes(
    graphs: str, shapes: int, padded: bool, is_proposed: bool
) -> None:
    setting = CompileSettings.parse(f"{graphs}{',pad_to_multiple_of=64' if padded else ''}")
    searching = LeverSearch(Candidates([*SETTINGS, setting]), SPEED, SCRIPT_FACTS, prior=elsewhere(GAINS))
    tell_first(searching, {"has_blocks": True, "num_shapes": shapes})
    gains = {"captured_cudagraphs=on": 0.3, "compiled_scope=regional": 0.3, "mode=reduce-overhead": 0.3}
    assert any(step.setting == setting for step in run(searching, gains)) is is_proposed
