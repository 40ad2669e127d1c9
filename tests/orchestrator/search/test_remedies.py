"""What the advice on a trial names is tried on the same setting, and kept for others if it helps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.causes.errors import GRAPHS_POOL
from compile_sweep.schema.causes.remedies import remedy_of
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates
from orchestrator.search.lever_prior import Prior
from orchestrator.search.lever_search import LeverSearch, Step
from orchestrator.search.levers import levers_of

REMEDY = "inductor.pattern_matcher=off"
PROBE = "backend=aot_eager"
SETTINGS = [
    CompileSettings.parse(f"scope={scope},optimizer={optimizer}{layout}")
    for scope in ("eager", "full", "regional")
    for optimizer in ("foreach", "fused")
    for layout in ("", ",memory_format=channels_last")
]
GAINS = {"scope=full": 0.5, "scope=regional": 0.2, "optimizer=fused": 0.05, "memory_format=channels_last": 0.1}
NUMERICS = {"status": "diverges", "remedy": REMEDY}
PERMUTATION = (
    "RuntimeError: Not all inputs to pattern found in match.kwargs. argname=slice_shape, missing_argnames=['slice_shape']"
)


def new_search(**options: Any) -> LeverSearch:
    aims = Aims.parse(["samples_per_s:max"])
    return LeverSearch(Candidates(SETTINGS), aims, WorkloadFacts(max_length=1), prior=Prior(), **options)


def row(
    setting: CompileSettings,
    failure: dict[str, Any],
    *,
    mends: bool,
    scopes: tuple[str, ...] = ("full",),
    is_of_inductor: bool = True,
) -> dict[str, Any]:
    """Returns the record of a setting: of these scopes all fail, unless a remedy mends them, or they do without what fails."""
    has_remedy = "pattern_matcher" in setting.key or (is_of_inductor and PROBE in setting.key)
    common = {"settings_key": setting.key, "wall_s": 20.0}
    if setting.scope in scopes and not ((mends or PROBE in setting.key) and has_remedy):
        return {**common, "status": "infeasible", **failure}
    gain = sum(GAINS.get(f"{name}={value}", 0.0) for name, value in levers_of(setting).items())
    return {**common, "status": "ok", "label": None, "samples_per_s": 100 * math.exp(gain), "compile_s": 5.0}


def steps_of(search: LeverSearch, failure: dict[str, Any], **options: Any) -> list[Step]:
    steps = []
    while (step := search.next_step()) is not None:
        steps.append(step)
        search.tell(row(step.setting, failure, **options))
    return steps


DIVERGES = {"label": "diverges", "reason": "does not follow eager", "numerics": NUMERICS}


def test_a_remedy_is_tried_next_and_all_later_settings_of_the_scope_get_it() -> None:
    steps = steps_of(new_search(), DIVERGES, mends=True)
    of_full = [place for place, step in enumerate(steps) if step.setting.scope == "full"]
    first, probe, second = of_full[:3]
    assert (probe, second) == (first + 1, first + 2)
    assert PROBE in steps[probe].setting.key
    assert steps[probe].reason == f"{PROBE}, which tells whether Inductor's code is at fault"
    assert steps[second].setting.key == f"{steps[first].setting.key},{REMEDY}"
    assert steps[second].reason == f"{REMEDY}, which the advice on the same without it names"
    assert all("pattern_matcher" in steps[place].setting.key for place in of_full[2:])
    assert not any("pattern_matcher" in step.setting.key for step in steps if step.setting.scope != "full")
    assert len({step.setting.key for step in steps}) == len(steps)


def test_options_of_inductor_are_not_tried_where_numbers_are_wrong_without_it() -> None:
    search = new_search()
    steps = steps_of(search, DIVERGES, mends=False, is_of_inductor=False)
    assert [PROBE in step.setting.key for step in steps if step.setting.scope == "full"] == [False, True]  # no other of the scope
    assert not any("pattern_matcher" in step.setting.key for step in steps)
    assert search.best() is not None


def test_what_only_tells_where_the_fault_is_does_not_count_as_the_setting() -> None:
    search, keys = new_search(), []
    while (step := search.next_step()) is not None:
        keys.append(step.setting.key)
        told = row(step.setting, DIVERGES, mends=False)
        search.tell({**told, "samples_per_s": 1e6} if PROBE in step.setting.key else told)
    best = search.best()
    assert best is not None
    assert SETTINGS[best].scope != "full"
    assert not any(PROBE in key for key in keys[keys.index(next(key for key in keys if PROBE in key)) + 1 :])


def test_a_remedy_that_does_not_help_is_tried_once() -> None:
    steps = steps_of(new_search(), DIVERGES, mends=False)
    assert sum("pattern_matcher" in step.setting.key for step in steps) == 1


def test_what_fails_in_its_cuda_graphs_with_a_remedy_is_not_tried_with_other_levers() -> None:
    graphs = [
        CompileSettings.parse(one.key.replace("cudagraphs=off", "cudagraphs=on")) for one in SETTINGS if one.scope != "eager"
    ]
    aims, keys = Aims.parse(["samples_per_s:max"]), []
    search = LeverSearch(Candidates([*SETTINGS, *graphs]), aims, WorkloadFacts(max_length=1), prior=Prior())
    while (step := search.next_step()) is not None:
        keys.append(step.setting.key)
        has_graphs = step.setting.scope == "full" and step.setting.claims_cudagraphs
        pool = has_graphs and "pattern_matcher" in step.setting.key
        reason = f"RuntimeError: 163 tensors {GRAPHS_POOL}" if pool else PERMUTATION
        failure = {"label": "compile-error", "reason": reason}
        search.tell(row(step.setting, failure, mends=not has_graphs))
    of_full = [key for key in keys if "scope=full" in key]
    assert sum("reduce-overhead" in key for key in of_full) == 2
    assert sum("reduce-overhead" not in key for key in of_full) >= 2


def test_the_next_remedy_is_tried_with_the_first_if_that_does_not_help() -> None:
    first, second = "inductor.loop_ordering_after_fusion=off", REMEDY
    search, keys = new_search(), []
    while (step := search.next_step()) is not None:
        keys.append(step.setting.key)
        named = second if first in step.setting.key else first
        told = row(step.setting, {**DIVERGES, "numerics": {"status": "diverges", "remedy": named}}, mends=True)
        search.tell(told)
    of_full = [key for key in keys if "scope=full" in key]
    assert PROBE in of_full[1]
    assert of_full[2] == f"{of_full[0]},{first}"
    assert of_full[3] == CompileSettings.parse(f"{of_full[0]},{first},{second}").key
    assert all(first in key and second in key for key in of_full[3:])


def test_what_would_fail_alike_is_tried_once_a_remedy_helps_and_not_before() -> None:
    fallback = {
        "label": "silent-fallback",
        "reason": "torch did not compile all that it should",
        "graph_break_reasons": ["net.py:3 in f: Unsupported Tensor.item() call with capture_scalar_outputs=False"],
    }
    remedy = remedy_of(fallback)
    assert remedy == "dynamo.capture_scalar_outputs=on"

    def tried(*, mends: bool) -> list[str]:
        search, keys = new_search(), []
        while (step := search.next_step()) is not None:
            keys.append(step.setting.key)
            told = row(step.setting, fallback, mends=False, scopes=() if mends and remedy in step.setting.key else ("full",))
            search.tell(told)
        return [key for key in keys if "scope=full" in key]

    assert len(tried(mends=False)) == 2  # the first, and the same with the remedy
    assert len(tried(mends=True)) > 2  # others are tried, all with the remedy
    assert all(remedy in key for key in tried(mends=True)[1:])


def test_a_resumed_search_goes_on_with_the_remedy() -> None:
    search = new_search()
    records: list[dict[str, Any]] = []
    while sum(REMEDY in record["settings_key"] for record in records) < 2:  # the retry, and another that got the remedy
        step = search.next_step()
        assert step is not None
        records.append(row(step.setting, DIVERGES, mends=True))
        search.tell(records[-1])
    again = new_search()
    for record in records:
        again.tell(record)
    (ahead, resumed) = search.next_step(), again.next_step()
    assert ahead is not None
    assert ahead == resumed
    rest = [step.setting.key for step in steps_of(again, DIVERGES, mends=True)]
    assert not {record["settings_key"] for record in records} & set(rest)


def test_a_remedy_that_does_not_fit_in_the_budget_is_dropped() -> None:
    steps = steps_of(new_search(fits=lambda setting: "pattern_matcher" not in setting.key), DIVERGES, mends=True)
    assert not any("pattern_matcher" in step.setting.key for step in steps)
    assert any(step.setting.scope == "regional" for step in steps)


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_compiler_error_is_mended_if_the_next_one_is_another(is_mended: bool) -> None:
    first = {"label": "compile-error", "reason": f"{PERMUTATION} (in phase warming-up); set {REMEDY}"}
    after = {**first, "reason": "RuntimeError: something else (in phase warming-up)"} if is_mended else first
    search, steps = new_search(), []
    while (step := search.next_step()) is not None:
        steps.append(step)
        search.tell(row(step.setting, after if "pattern_matcher" in step.setting.key else first, mends=False))
    of_full = [step.setting.key for step in steps if step.setting.scope == "full"]
    assert [REMEDY in key for key in of_full[1:]] == [True] + [is_mended] * (len(of_full) - 2)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_module_that_cannot_be_compiled_is_left_eager_in_all_scopes(is_slow: bool) -> None:
    """Also where the first setting without it was stopped, because it is slower than another."""
    spared = "parts.critic.compile=off"
    failure = {"label": "compile-error", "reason": f"RuntimeError: changed (in phase warming-up); leave it eager: {spared}"}
    search, steps = new_search(), []
    while (step := search.next_step()) is not None:
        steps.append(step)
        told = row(step.setting, failure, mends=False, scopes=() if spared in step.setting.key else ("full", "regional"))
        stopped = (
            {"status": "stopped", "label": "dominated", "samples_per_s": None} if is_slow and spared in step.setting.key else {}
        )
        search.tell({**told, **stopped})
    compiled = [step.setting.key for step in steps if step.setting.scope != "eager"]
    assert {CompileSettings.parse(key).scope for key in compiled} == {"full", "regional"}
    assert [spared in key for key in compiled] == [False] + [True] * (len(compiled) - 1)


def test_what_a_trial_advises_is_read_from_what_was_found() -> None:
    counter = "Net.forward (net.py:6) hit recompile_limit 8: self.calls == 10 # self.calls += 1 # net.py:7 in forward"
    assert remedy_of({"recompile_limit_hits": [counter]}) == "dynamo.allow_unspec_int_on_nn_module=on"
    assert remedy_of({"label": "compile-error", "reason": PERMUTATION}) == REMEDY
    rows = "net.py:3 in f: Dynamic shape operator"
    assert remedy_of({"graph_break_reasons": ["net.py:2 in f: print", rows]}) == "dynamo.capture_dynamic_output_shape_ops=on"
    bins = f"{rows}\n  explanation: Operator `aten.bincount.default`'s output shape depends on input Tensor data."
    assert remedy_of({"graph_break_reasons": [bins]}) == "dynamo.capture_dynamic_output_shape_ops=on"
    assert remedy_of({"label": "diverges", "numerics": NUMERICS}) == REMEDY
    in_place = "modified by an inplace operation; or leave the module that raised it eager: parts.agent.critic.compile=off"
    assert remedy_of({"label": "compile-error", "reason": in_place}) == "parts.agent.critic.compile=off"
    assert remedy_of({"label": "compile-error", "reason": f"{PERMUTATION}; or {in_place}"}) == REMEDY
    assert remedy_of({"label": "out-of-memory", "reason": "the device ran out of memory"}) is None


BREAK = (
    "model.py:3 in forward: Dynamic shape operator\n"
    "  explanation: Operator `aten.nonzero.default`'s output shape depends on input Tensor data."
)


@pytest.mark.parametrize("faster", [True, False])
def test_a_break_is_mended_although_its_setting_works_and_the_remedy_is_kept_if_it_is_no_slower(faster: bool) -> None:
    remedy = "dynamo.capture_dynamic_output_shape_ops=on"
    search, steps = new_search(), []
    while (step := search.next_step()) is not None:
        steps.append(step)
        has_remedy = "capture_dynamic_output_shape_ops" in step.setting.key
        told = row(step.setting, {}, mends=True, scopes=())
        if step.setting.scope == "full":  # slower than eager, with its breaks or without
            told["samples_per_s"] = 50.0 if has_remedy is faster else 40.0
            told["graph_break_reasons"] = [] if has_remedy else [BREAK]
        search.tell(told)
    full = [step for step in steps if step.setting.scope == "full"]
    assert f"{full[0].setting.key},{remedy}" == full[1].setting.key
    assert full[1].reason == f"{remedy}, which the advice on the same without it names"
    assert all(("capture_dynamic_output_shape_ops" in step.setting.key) is faster for step in full[2:])
    assert len({step.setting.key for step in steps}) == len(steps)


def test_blocks_with_numbers_of_their_own_are_tried_with_a_higher_limit_of_graphs() -> None:
    rates = [f"forward of Block (vit.py:49): self.drop.p == {0.009 * block}  # if self.p == 0.0:" for block in range(8)]
    limit = {
        "label": "recompile-limit",
        "reason": "torch stopped compiling and runs eagerly",
        "recompile_limit_hits": ["forward of Block (vit.py:49) hit recompile_limit 8: self.drop.p == 0.063"],
        "recompile_reasons": rates,
    }
    assert remedy_of(limit) == "recompile_limit=64"
    search, keys = new_search(), []
    while (step := search.next_step()) is not None:
        keys.append(step.setting.key)
        has_remedy = "recompile_limit=64" in step.setting.key
        search.tell(row(step.setting, limit, mends=False, scopes=() if has_remedy else ("regional",)))
    of_blocks = [CompileSettings.parse(key) for key in keys if "scope=regional" in key]
    assert [setting.recompile_limit for setting in of_blocks] == [None, *[64] * (len(of_blocks) - 1)]
    assert len(of_blocks) >= 2
