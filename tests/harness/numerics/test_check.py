"""The numerics check on made-up runs: what it calls right or wrong, and how often it is mistaken."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import fdtrc
from torch import Tensor, nn

from compile_sweep.harness.numerics import check, what_to_try
from compile_sweep.harness.numerics.check import Numerics, NumericsStatus, check_numerics, judge
from compile_sweep.harness.numerics.gradient_check import GradientCheck, Outcome
from compile_sweep.harness.numerics.references import References
from compile_sweep.harness.numerics.tolerance import (
    FALSE_ALARM_RATE,
    FLOAT8_ROUNDING,
    GRADIENTS,
    calm_steps,
    chi_square_quantile,
    f_quantile,
    minus_two_log_p,
)
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.schema.settings import CompileSettings

NAN, INF = math.nan, math.inf
STEPS, MODULES, ELEMENTS = 10, ("encoder", "decoder", "output"), 200
LOSSES = [4.0 - 0.1 * step for step in range(STEPS)]


def run(seed: int, scatter: float, *, draws: bool = False, late: float = 1.0) -> Trajectory:
    """A right run: common values, each with a relative error of its own, which is multiplied by `late` from step 5 on."""
    source = random.Random(seed)

    def off(values: Sequence[float]) -> list[float]:
        return [value * (1 + source.gauss(0, scatter * (late if step >= 5 else 1))) for step, value in enumerate(values)]

    directions = torch.Generator().manual_seed(1)
    noise = torch.Generator().manual_seed(seed + 2)
    return Trajectory(
        losses=off(LOSSES),
        gradients={module: off([2.0] * STEPS) for module in MODULES},
        updates={module: off([0.1] * STEPS) for module in MODULES},
        movement={
            module: torch.randn(ELEMENTS, generator=directions, dtype=torch.float64)
            * (1 + 10 * scatter * torch.randn(ELEMENTS, generator=noise, dtype=torch.float64))
            for module in MODULES
        },
        start_norms=dict.fromkeys(MODULES, 20.0),
        buffers={"decoder": torch.tensor(off([1.0] * ELEMENTS)), "mask": torch.zeros(3)},
        buffer_norms={"decoder": 1.0, "mask": 0.0},
        weights=torch.float32,
        random=draws,
    )


def references(seed: int, scatter: float, *, draws: bool = False, late: float = 1.0) -> References:
    """Eager runs with errors of that size."""
    eager, first, second, third, precise = (run(seed + i, scatter, draws=draws, late=late) for i in range(5))
    if not draws:  # from the same weights, on the same rows
        first = replace(first, losses=[eager.losses[0], *first.losses[1:]])
    return References(
        eager=eager,
        permuted=[first, second, third] if draws else [first],
        precise=precise if draws else run(seed, 0.0),
        precise_dtype="float64",
        rounding=2.0**-24,
    )


EAGER = references(0, 1e-6)
RIGHT = run(99, 1e-6)


def judged(compiled: Trajectory, eager: References = EAGER, steady: Sequence[float] = (1.9, 1.8)) -> Numerics:
    return judge(compiled, eager, steady)


def changed(values: Sequence[float], step: int, value: float) -> list[float]:
    return [*values[:step], value, *values[step + 1 :]]


def scaled(values: Sequence[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def test_a_run_as_near_to_eager_as_eager_to_itself_is_ok() -> None:
    verdict = judged(RIGHT)
    assert verdict.status is NumericsStatus.OK
    assert (verdict.compared_steps, verdict.judged_steps, verdict.random, verdict.reference) == (10, 10, False, "float64")
    assert (verdict.first_bad_step, verdict.first_bad_steady_step, verdict.last_loss) == (None, None, 1.8)
    assert set(verdict.gradients) == set(verdict.updates) == set(verdict.parameters) == set(MODULES)
    gaps = [verdict.loss, *verdict.gradients.values(), *verdict.updates.values(), *verdict.parameters.values()]
    assert all(gap.share <= 1 for gap in gaps)
    assert verdict.loss.tolerance is not None
    assert verdict.loss.tolerance < 1e-4, "a deterministic model is to be checked sharply"


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["losses", "gradients", "updates"])
def test_a_number_that_is_none_in_a_compared_step_is_found(where: str, bad: float) -> None:
    broken = {
        "losses": replace(RIGHT, losses=changed(RIGHT.losses, 3, bad)),
        "gradients": replace(RIGHT, gradients={**RIGHT.gradients, "decoder": changed(RIGHT.gradients["decoder"], 3, bad)}),
        "updates": replace(RIGHT, updates={**RIGHT.updates, "decoder": changed(RIGHT.updates["decoder"], 3, bad)}),
    }[where]
    verdict = judged(broken)
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.NAN, 3)
    assert ("loss" if where == "losses" else f"{where} of decoder") in verdict.worst
    assert verdict.loss.gap is None


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_buffer_that_is_no_number_is_found_unless_it_is_none_in_eager_runs_either(bad: float) -> None:
    broken = {**RIGHT.buffers, "mask": torch.full((3,), bad)}
    verdict = judged(replace(RIGHT, buffers=broken))
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.NAN, 9)
    assert verdict.worst == "buffers of mask: not finite"
    likewise = replace(EAGER, eager=replace(EAGER.eager, buffers=broken))
    assert judged(replace(RIGHT, buffers=broken), likewise).status is NumericsStatus.OK


def test_buffers_alone_that_are_elsewhere_are_remarked_on_and_the_setting_is_usable() -> None:
    assert set(judged(RIGHT).buffers) == {"decoder"}
    assert judged(RIGHT).remark is None
    verdict = judged(replace(RIGHT, buffers={**RIGHT.buffers, "mask": torch.ones(3)}))
    assert (verdict.status, verdict.first_bad_step, verdict.advice) == (NumericsStatus.OK, None, None)
    assert "buffers of mask" in (verdict.remark or "")
    assert "checkpointing" in (verdict.remark or "")
    assert "buffers" not in verdict.worst


@pytest.mark.parametrize(
    ("scatter", "rounding", "tries"),
    [
        (1e-6, 2.0**-24, ["aot_eager", "--bisect"]),
        (1e-6, 2.0**-9, ["emulate_precision_casts", "aot_eager"]),
        (2e-3, 2.0**-24, ["fallback_random", "aot_eager"]),
    ],
)
def test_a_diverging_run_says_what_to_try(scatter: float, rounding: float, tries: list[str]) -> None:
    eager = replace(references(0, scatter, draws=scatter > 1e-4), rounding=rounding)
    wrong = run(99, scatter)
    verdict = judged(replace(wrong, losses=scaled(wrong.losses, 1.1)), eager)
    assert verdict.status is NumericsStatus.DIVERGES
    assert all(word in (verdict.advice or "") for word in tries)
    assert "times as much" in verdict.worst


def test_modules_that_get_no_gradients_when_compiled_are_named() -> None:
    eager = references(0, 0.5, draws=True)  # so far apart that a gradient of zero is within their tolerance
    right = run(99, 0.5)
    zero = [0.0] * STEPS
    verdict = judged(replace(right, gradients={**right.gradients, "encoder": zero, "decoder": zero}), eager)
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.DIVERGES, 0)
    assert verdict.worst == "gradients of encoder, decoder are zero in every compared step, and in no step of eager runs"
    many = judged(replace(right, gradients=dict.fromkeys(MODULES, zero)), eager)
    assert (
        many.worst == "gradients of encoder, decoder and of 1 more are zero in every compared step, and in no step of eager runs"
    )
    frozen = [replace(one, gradients={**one.gradients, "encoder": zero}) for one in (right, eager.eager)]
    assert "are zero" not in judged(frozen[0], replace(eager, eager=frozen[1])).worst


def test_gradients_that_only_eager_loses_are_told_with_their_usual_cause() -> None:
    first, second = (
        replace(one, gradients={**one.gradients, "encoder": [0.0] * STEPS}) for one in (EAGER.eager, *EAGER.permuted)
    )
    verdict = judged(RIGHT, replace(EAGER, eager=first, permuted=[second], precise=None))
    assert verdict.status is NumericsStatus.DIVERGES
    assert verdict.worst == "gradients of encoder are zero in every step of eager runs, and in no compared step"
    assert "pass use_reentrant=False" in (verdict.advice or "")


@pytest.mark.parametrize(
    ("version", "settings", "changed", "is_named"),
    [
        ((2, 11), "scope=full", ["Schedule.weight"], True),
        ((2, 11), "scope=full", [], False),
        ((2, 11), "scope=eager,float8=rowwise", ["Schedule.weight"], False),
        ((2, 13), "scope=full", ["Schedule.weight"], False),
    ],
)
def test_a_number_of_a_class_that_compiled_code_does_not_follow_is_named_first(
    version: tuple[int, int], settings: str, changed: list[str], is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_to_try, "torch_version", lambda: version)
    wrong = replace(RIGHT, losses=scaled(RIGHT.losses, 1.1))
    found = judge(wrong, EAGER, [], settings=CompileSettings.parse(settings), changed_in_classes=changed)
    assert found.status is NumericsStatus.DIVERGES
    assert (found.advice or "").startswith("keep Schedule.weight in the model, as self.weight") is is_named


@pytest.mark.parametrize(
    ("settings", "on_gpu", "kernels", "remedy"),
    [
        ("scope=full", False, [], "inductor.pattern_matcher=off"),
        ("scope=full", True, [], "inductor.pattern_matcher=off,inductor.triton.mix_order_reduction=off"),
        ("scope=full,inductor.pattern_matcher=off", False, [], None),
        ("scope=full,backend=aot_eager", True, [], None),
        ("scope=eager,float8=rowwise", True, [], None),
        ("scope=full", True, ["triton_red_17"], "inductor.loop_ordering_after_fusion=off"),
        ("scope=full,backend=aot_eager", True, ["triton_red_17"], None),
    ],
)
def test_a_diverging_run_has_a_remedy_that_is_worth_a_trial(settings: str, on_gpu: bool, kernels: list[str], remedy: str) -> None:
    wrong = replace(RIGHT, losses=scaled(RIGHT.losses, 1.1))
    found = judge(wrong, EAGER, [], settings=CompileSettings.parse(settings), on_gpu=on_gpu, unsynchronized=kernels)
    assert (found.status, found.remedy) == (NumericsStatus.DIVERGES, remedy)
    assert all(one in (found.advice or "") for one in (remedy or "").split(","))
    if remedy and kernels:
        assert "triton_red_17 reads back what it has just stored" in (found.advice or "")
    healthy = judge(RIGHT, EAGER, [], settings=CompileSettings.parse(settings), on_gpu=on_gpu, unsynchronized=kernels)
    assert (healthy.status, healthy.advice, healthy.remedy) == (NumericsStatus.OK, None, None)


@pytest.mark.parametrize(
    ("settings", "on_gpu", "remedy"),
    [
        ("scope=full", False, "inductor.layout_optimization=off"),
        ("scope=full", True, "inductor.layout_optimization=off,inductor.triton.mix_order_reduction=off"),
        ("scope=full,inductor.layout_optimization=off", False, None),
        ("scope=full,backend=aot_eager", True, None),
    ],
)
def test_wrong_gradients_have_a_remedy_that_is_worth_a_trial(settings: str, on_gpu: bool, remedy: str | None) -> None:
    check = GradientCheck(outcome=Outcome.WRONG, error=0.5, allowed=0.03, layers={"encoder": 0.5})
    found = judge(RIGHT, EAGER, [], gradient_check=check, settings=CompileSettings.parse(settings), on_gpu=on_gpu)
    assert (found.status, found.remedy) == (NumericsStatus.DIVERGES, remedy)
    assert all(one in (found.advice or "") for one in (remedy or "").split(","))


def test_a_diverging_run_is_advised_nothing_that_it_has_or_cannot_have() -> None:
    right = run(99, 2e-3)
    wrong = replace(right, losses=scaled(right.losses, 1.1))

    def advice(spelled: str, *, is_script: bool = False) -> str:
        found = judge(wrong, references(0, 2e-3, draws=True), [], settings=CompileSettings.parse(spelled), is_script=is_script)
        assert found.status is NumericsStatus.DIVERGES
        return found.advice or ""

    assert "fallback_random" in advice("scope=full")
    assert "fallback_random" not in advice("scope=full,inductor.fallback_random=on")
    assert advice("scope=full,backend=aot_eager") == "try --bisect with this setting, which names the module"
    assert "bisect" not in advice("scope=full", is_script=True)
    assert advice("scope=full,backend=aot_eager", is_script=True) == ""
    assert advice("scope=eager,memory_format=channels_last", is_script=True) == ""
    both = "try it without memory_format or without optimizer, to see which is at fault"
    assert advice("scope=eager,memory_format=channels_last,optimizer=fused") == both
    assert advice("scope=eager,attention=unmasked,optimizer=fused").startswith("try it without attention or without optimizer")


@pytest.mark.parametrize(("error", "expected"), [(1e-5, NumericsStatus.OK), (1e-3, NumericsStatus.DIVERGES)])
def test_updates_in_float32_that_differ_by_less_than_matters_are_right(error: float, expected: NumericsStatus) -> None:
    """Compiled Adam differs by 7e-6, because it takes powers of its betas in float32."""
    eager = replace(references(0, 1e-8), precise=None, precise_dtype=None, rounding=2.0**-24)
    right = run(99, 1e-8)
    other = replace(right, updates={name: scaled(values, 1 + error) for name, values in right.updates.items()})
    assert judge(other, eager, []).status is expected


@pytest.mark.parametrize(
    ("spelled", "is_script", "tried", "never"),
    [
        ("scope=regional,mode=reduce-overhead", True, ["mode=default"], ["scope=regional", "bisect", "aot_eager"]),
        ("scope=full", True, ["scope=regional"], ["mode=default", "bisect"]),
        ("scope=regional", True, ["backend=aot_eager", "triton.mix_order_reduction=off"], ["scope=regional", "mode=default"]),
        ("scope=full,inductor.triton.mix_order_reduction=off", True, ["scope=regional"], ["mix_order"]),
        ("scope=full,backend=aot_eager", True, ["scope=regional"], ["mix_order"]),
        ("scope=full,mode=reduce-overhead", False, ["bisect", "scope=regional", "mode=default"], []),
        ("scope=nested,mode=reduce-overhead", False, ["use scope=full"], ["bisect", "mode=default", "optimization=off"]),
    ],
)
def test_where_gradients_are_wrong_nothing_is_advised_that_the_setting_has(
    spelled: str, is_script: bool, tried: list[str], never: list[str]
) -> None:
    wrong = GradientCheck(outcome=Outcome.WRONG, error=0.5, allowed=0.03, layers={"head": 0.5})
    chosen = CompileSettings.parse(spelled)
    judged = partial(judge, run(99, 2e-3), references(0, 2e-3, draws=True), [], gradient_check=wrong, settings=chosen)
    found = judged(is_script=is_script, on_gpu=True)
    assert found.status is NumericsStatus.DIVERGES
    advice = found.advice or ""
    assert all(word in advice for word in tried)
    assert "mix_order" not in (judged(is_script=is_script).advice or ""), "only kernels for GPUs have that reduction"
    assert not any(word in advice for word in never)


def test_a_run_that_diverges_by_a_number_that_the_forward_changes_is_advised_to_keep_it_in_a_buffer() -> None:
    wrong = replace(RIGHT, losses=scaled(RIGHT.losses, 1.1))

    def advice(*values: object) -> str:
        recompiles = [f"forward (net.py:3): self.heat == {value} # self.heat *= 0.9 # net.py:4 in forward" for value in values]
        return judge(wrong, EAGER, [], recompiles=recompiles).advice or ""

    assert advice(2.0).startswith("compiled code can go on with an old value of heat, which the forward changes: ")
    assert "self.register_buffer('heat', torch.tensor(2.0))" in advice(2.0)
    assert all("layout_optimization" in advice(*values) for values in ((), (3,)))


@pytest.mark.nightly(reason="Inductor compiles for half a minute on a busy host")
def test_inductors_code_keeps_an_old_value_of_a_number_and_eagers_of_a_buffer() -> None:
    class Annealed(nn.Module):
        def __init__(self, heat: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            if isinstance(heat, Tensor):
                self.register_buffer("heat", heat)
            else:
                self.heat = heat

        def forward(self, x: Tensor) -> Tensor:
            self.heat = self.heat * 0.9
            found: Tensor = self.layer(x) / self.heat
            return found

    heats = []
    for heat in (2.0, torch.tensor(2.0)):
        torch._dynamo.reset()
        model = Annealed(heat)
        compiled = torch.compile(model)
        for _ in range(6):
            compiled(torch.randn(3, 4)).sum().backward()
        heats.append(float(model.heat))
    assert heats[1] == pytest.approx(2 * 0.9**6)
    assert heats[0] != pytest.approx(heats[1]), "torch has mended this: advice_on_stale_number can go"


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_number_that_is_none_in_a_timed_step_is_found(bad: float) -> None:
    verdict = judged(RIGHT, steady=[1.9, 1.8, bad, 1.6])
    assert (verdict.status, verdict.first_bad_step, verdict.first_bad_steady_step) == (NumericsStatus.NAN, None, 2)
    assert judged(RIGHT, steady=[1.9, bad]).last_loss is None


@pytest.mark.parametrize("scatter", [1e-6, 2e-3])
@pytest.mark.parametrize("where", ["loss", "gradients", "updates", "parameters"])
def test_what_is_wrong_in_one_respect_alone_diverges_and_is_named(where: str, scatter: float) -> None:
    eager = references(0, scatter, draws=scatter > 1e-4)
    right = run(99, scatter)
    assert judged(right, eager).status is NumericsStatus.OK
    wrong = {
        "loss": replace(right, losses=scaled(right.losses, 1.01)),
        "gradients": replace(right, gradients={**right.gradients, "decoder": scaled(right.gradients["decoder"], 1.02)}),
        "updates": replace(right, updates={**right.updates, "decoder": scaled(right.updates["decoder"], 1.05)}),
        "parameters": replace(right, movement={**right.movement, "decoder": -right.movement["decoder"]}),
    }[where]
    verdict = judged(wrong, eager)
    assert verdict.status is NumericsStatus.DIVERGES
    assert verdict.worst.startswith("loss" if where == "loss" else f"{where} of decoder")
    assert verdict.first_bad_step == (None if where == "parameters" else 0)


def test_a_single_wrong_step_is_found_and_named() -> None:
    wrong = replace(RIGHT, losses=changed(RIGHT.losses, 6, RIGHT.losses[6] * 1.01))
    verdict = judged(wrong)
    assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.DIVERGES, 6)
    scattering = references(0, 2e-3, draws=True)
    right = run(99, 2e-3)
    wrong = replace(right, losses=changed(right.losses, 6, right.losses[6] * 2))
    assert judged(wrong, scattering).first_bad_step == 6


def test_training_that_stands_still_diverges() -> None:
    still = replace(
        RIGHT,
        updates={module: [0.0] * STEPS for module in MODULES},
        movement={module: torch.zeros(ELEMENTS, dtype=torch.float64) for module in MODULES},
    )
    assert judged(still).status is NumericsStatus.DIVERGES
    assert judged(still, references(0, 2e-3, draws=True)).status is NumericsStatus.DIVERGES


@pytest.mark.parametrize("which", ["eager", "permuted", "precise"])
def test_where_eager_itself_is_not_finite_nothing_is_said_of_the_compiled_run(which: str) -> None:
    broken = replace(RIGHT, losses=changed(RIGHT.losses, 1, NAN))
    eager = replace(EAGER, **{which: [broken] if which == "permuted" else broken})
    for compiled in (RIGHT, broken):
        verdict = judged(compiled, eager)
        assert verdict.status is NumericsStatus.EAGER_UNSTABLE
        assert verdict.worst == "eager: loss of step 1: not finite"


def test_where_eager_steps_do_not_repeat_nothing_is_said_of_the_compiled_run() -> None:
    def first_off(by: float, eager: References = EAGER) -> References:
        losses = [eager.eager.losses[0] * (1 + by), *eager.permuted[0].losses[1:]]
        return replace(eager, permuted=[replace(eager.permuted[0], losses=losses)])

    for compiled in (RIGHT, replace(RIGHT, losses=scaled(RIGHT.losses, 1.3))):
        verdict = judged(compiled, first_off(0.05))
        assert (verdict.status, verdict.first_bad_step) == (NumericsStatus.EAGER_UNSTABLE, None)
        assert verdict.worst.startswith("two eager runs from the same weights on the same batch have losses 4 and 4.2: ")
    assert judged(replace(RIGHT, losses=changed(RIGHT.losses, 0, NAN)), first_off(0.05)).status is NumericsStatus.NAN
    assert judged(RIGHT, first_off(0.0005)).status is NumericsStatus.OK
    assert judged(RIGHT, replace(first_off(0.02), rounding=2.0**-7)).status is NumericsStatus.OK, "all that is rounding"
    draws = replace(EAGER, eager=replace(EAGER.eager, random=True))
    assert judged(RIGHT, first_off(0.05, draws)).status is NumericsStatus.OK


def test_where_timed_eager_steps_are_not_finite_either_it_is_not_the_compiler() -> None:
    assert judge(RIGHT, EAGER, [1.9, NAN], [1.9, 1.8]).status is NumericsStatus.NAN
    assert judge(RIGHT, EAGER, [1.9, NAN], [NAN]).status is NumericsStatus.EAGER_UNSTABLE
    assert judge(RIGHT, EAGER, [1.9, 1.8], [NAN]).status is NumericsStatus.OK


def test_one_element_that_goes_the_other_way_is_no_divergence() -> None:
    """Adam moves an element with a negligible gradient by a whole step either way."""
    moved = RIGHT.movement["decoder"].clone()
    moved[:3] *= -1
    assert judged(replace(RIGHT, movement={**RIGHT.movement, "decoder": moved})).status is NumericsStatus.OK


def test_without_a_precise_run_the_tolerance_is_wider_and_a_wrong_run_is_still_found() -> None:
    alone = replace(EAGER, precise=None, precise_dtype=None)
    verdict = judged(RIGHT, alone)
    assert (verdict.status, verdict.reference) == (NumericsStatus.OK, None)
    assert (verdict.loss.tolerance or 0) > 0
    assert judged(replace(RIGHT, losses=scaled(RIGHT.losses, 1.01)), alone).status is NumericsStatus.DIVERGES


def test_steps_at_which_right_runs_have_drifted_apart_are_not_judged() -> None:
    drifting = references(0, 2e-3, draws=True, late=50)
    verdict = judged(run(99, 2e-3, late=50), drifting)
    assert (verdict.status, verdict.judged_steps) == (NumericsStatus.OK, 5)
    wrong = run(99, 2e-3, late=50)
    wrong = replace(wrong, losses=scaled(wrong.losses, 1.02))
    assert judged(wrong, drifting).status is NumericsStatus.DIVERGES, "the steps before still count"
    assert calm_steps([[run.gradients[m] for run in drifting.runs] for m in MODULES]) == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("draws", [True, False])
def test_right_runs_are_called_wrong_about_as_seldom_as_is_said(draws: bool) -> None:
    checks = 300
    verdicts = [judged(run(7000 + i, 0.01, draws=draws), references(10 * i, 0.01, draws=draws)) for i in range(checks)]
    false_alarms = sum(verdict.status is not NumericsStatus.OK for verdict in verdicts)
    # 0.3 are expected. More than 3 by chance have probability 3e-4 if the rate is 0.1%, and 1 if it is 10%.
    assert false_alarms <= 3, FALSE_ALARM_RATE


def test_a_value_of_zero_divides_nothing() -> None:
    zeros = {module: [0.0] * STEPS for module in MODULES}

    def without(run: Trajectory) -> Trajectory:
        return replace(run, losses=[0.0] * STEPS, gradients=zeros)

    first, second, precise = map(without, EAGER.runs)
    eager = replace(EAGER, eager=first, permuted=[second], precise=precise)
    assert judged(without(RIGHT), eager).status is NumericsStatus.OK
    assert judged(RIGHT, eager).status is NumericsStatus.DIVERGES
    scattering = replace(eager, eager=replace(eager.eager, random=True))
    assert judged(without(RIGHT), scattering).status is NumericsStatus.OK


def test_runs_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="5 and 10 steps cannot be compared"):
        judged(replace(RIGHT, losses=RIGHT.losses[:5]))


numbers = st.lists(st.floats(0.01, 100), min_size=STEPS, max_size=STEPS)
anything = st.lists(st.floats(), min_size=STEPS, max_size=STEPS)


@given(numbers, st.booleans())
@settings(max_examples=30, deadline=None)
def test_an_eager_run_is_always_ok_beside_itself(values: list[float], draws: bool) -> None:
    eager = references(0, 1e-3, draws=draws)
    shifted = [replace(run, losses=[a * b for a, b in zip(run.losses, values, strict=True)]) for run in eager.runs]
    all_shifted = replace(eager, eager=shifted[0], permuted=shifted[1:-1], precise=shifted[-1])
    assert judged(shifted[0], all_shifted).status is NumericsStatus.OK


@given(anything, anything, anything)
@settings(deadline=None)
def test_what_is_not_finite_is_never_ok(losses: list[float], norms: list[float], steady: list[float]) -> None:
    compiled = replace(RIGHT, losses=losses, gradients={**RIGHT.gradients, "decoder": norms})
    verdict = judged(compiled, steady=steady)
    if not all(map(math.isfinite, [*losses, *norms, *steady])):
        assert verdict.status is NumericsStatus.NAN
    else:
        assert verdict.status in (NumericsStatus.OK, NumericsStatus.DIVERGES)
        assert verdict.first_bad_step is None or verdict.status is NumericsStatus.DIVERGES


@pytest.mark.parametrize("compiled", [RIGHT, replace(RIGHT, losses=changed(RIGHT.losses, 0, NAN))])
def test_a_verdict_is_plain_json(compiled: Trajectory) -> None:
    values = judged(compiled).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["status"] in ("ok", "nan")
    assert set(values["loss"]) == {"gap", "tolerance", "kind"}
    assert NumericsStatus.EAGER_UNSTABLE == "eager_unstable"


def test_quantiles_are_those_of_tables() -> None:
    assert f_quantile(0.01, 10, 20) == pytest.approx(3.368, abs=1e-3)
    assert f_quantile(0.001, 4, 8) == pytest.approx(14.39, abs=1e-2)
    assert f_quantile(0.001, 1, 20) == pytest.approx(14.82, abs=1e-2)  # the square of Student's 3.850
    assert fdtrc(3.5, 7.25, f_quantile(1e-6, 3.5, 7.25)) == pytest.approx(1e-6, rel=1e-6)
    assert chi_square_quantile(0.001, 20) == pytest.approx(45.31, rel=0.01)
    assert chi_square_quantile(0.01, 8) == pytest.approx(20.09, rel=0.01)


def test_surprise_is_twice_the_negative_logarithm_of_students_tail() -> None:
    # Student's two-sided tails for 4 degrees of freedom: 0.05 at 2.776, 0.001 at 8.610.
    assert minus_two_log_p([0.0, 2.776, -8.610], 4) == pytest.approx([0.0, -2 * math.log(0.05), -2 * math.log(0.001)], abs=1e-3)
    far = minus_two_log_p([1e3, 1e6], 4)
    assert far[1] - far[0] == pytest.approx(2 * 4 * math.log(1e3), rel=1e-2)  # the tail falls as the 4th power


def test_a_sum_of_right_steps_exceeds_fishers_limit_as_often_as_it_should() -> None:
    source = random.Random(5)
    limit = chi_square_quantile(0.05, 2 * STEPS)

    def student() -> float:
        values = [source.gauss(0, 1) for _ in range(6)]
        mean = sum(values[1:]) / 5
        return (values[0] - mean) / math.sqrt(sum((v - mean) ** 2 for v in values[1:]) / 4 * 1.2)

    exceeded = sum(minus_two_log_p([student() for _ in range(STEPS)], 4).sum() > limit for _ in range(2000))
    assert 60 <= exceeded <= 140  # 100 expected, ± 4 standard deviations
    assert GRADIENTS.correlation > 1, "real steps are less independent than these"


@pytest.mark.parametrize(("scatter", "expected"), [(3e-3, NumericsStatus.OK), (1e-5, NumericsStatus.DIVERGES)])
def test_a_run_a_little_out_of_tolerance_is_judged_again_by_eager_runs_from_perturbed_weights(
    scatter: float, expected: NumericsStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[References] = []

    def more(prepared: Any, batches: Any, before: References) -> References:
        made.append(before)
        return replace(before, perturbed=[run(seed, scatter) for seed in range(60, 65)])

    monkeypatch.setattr(check, "run_references", lambda *given, **named: references(0, 1e-5))
    monkeypatch.setattr(check, "with_perturbed_runs", more)
    prepared: Any = SimpleNamespace(workload=None, settings=CompileSettings(), device=torch.device("cpu"))
    right = run(50, 1e-5)
    doubtful = replace(right, updates={**right.updates, "output": [value * 1.002 for value in right.updates["output"]]})
    assert judge(doubtful, references(0, 1e-5), []).status is NumericsStatus.DIVERGES
    assert check_numerics(prepared, [], doubtful, []).status is expected
    assert check_numerics(prepared, [], right, []).status is NumericsStatus.OK
    far = replace(right, losses=[2 * loss for loss in right.losses])
    assert check_numerics(prepared, [], far, []).status is NumericsStatus.DIVERGES
    assert len(made) == 1


def test_the_loss_in_float8_may_be_off_by_a_share_of_how_far_it_has_changed() -> None:
    eager = replace(references(0, 1e-6), rounding=FLOAT8_ROUNDING)
    off = [loss - 0.1 * (LOSSES[0] - loss) for loss in RIGHT.losses]
    assert judge(replace(RIGHT, losses=off), eager, []).status is NumericsStatus.OK
    further = [loss - 4 * (loss - one) for loss, one in zip(RIGHT.losses, off, strict=True)]
    assert judge(replace(RIGHT, losses=further), eager, []).status is NumericsStatus.DIVERGES
    assert judge(replace(RIGHT, losses=off), replace(eager, rounding=2.0**-9), []).status is NumericsStatus.DIVERGES


def rarely_drawn(seed: int, *, off: float = 1.0) -> Trajectory:
    """A right run that random numbers change in about one step of ten, there by up to 30%; gradients are multiplied by `off`."""
    source, made = random.Random(seed), run(seed, 1e-7, draws=True)
    acts = [1 + 0.3 * source.random() if source.random() < 0.1 else 1.0 for _ in range(STEPS)]
    return replace(
        made,
        losses=[loss * (1 + 0.01 * (act - 1)) for loss, act in zip(made.losses, acts, strict=True)],
        gradients={
            name: [off * norm * act for norm, act in zip(norms, acts, strict=True)] for name, norms in made.gradients.items()
        },
    )


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_random_numbers_that_rarely_act_are_no_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, *permuted, precise = (rarely_drawn(seed + at) for at in range(5))
    first = References(eager=eager, permuted=permuted, precise=precise, precise_dtype="float64", rounding=2.0**-24)
    more = replace(first, perturbed=[rarely_drawn(seed + 10 + at) for at in range(8)])
    monkeypatch.setattr(check, "run_references", lambda *given, **named: first)
    monkeypatch.setattr(check, "with_perturbed_runs", lambda *given: more)
    prepared: Any = SimpleNamespace(workload=None, settings=CompileSettings(), device=torch.device("cpu"))
    found = [check_numerics(prepared, [], rarely_drawn(seed + 50 + at), []) for at in range(5)]
    assert [one.status for one in found] == [NumericsStatus.OK] * 5, [one.worst for one in found]
    assert check_numerics(prepared, [], rarely_drawn(seed + 60, off=1.02), []).status is NumericsStatus.DIVERGES
