"""Which steps of a script count."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from compile_sweep.harness import steady
from compile_sweep.harness.protocol import Protocol
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import clock, session_results, steady_steps
from compile_sweep.script.clock import StepTime
from compile_sweep.script.steady_steps import MAX_NEW_STEPS, Stream
from tests.scripts.conftest import Run


def _steps(*times: tuple[float, bool], samples: int = 1) -> list[StepTime]:
    return [StepTime(ms=ms, wait_ms=0.0, interrupted=False, is_new=is_new, samples=samples) for ms, is_new in times]


def _stream(*passes: Sequence[StepTime]) -> Stream:
    stream = Stream.after(_steps((150.0, False)), Protocol(), torch.device("cpu"))
    for taken in passes:
        stream.take(taken)
    return stream


def test_a_pass_is_filled_by_shapes_that_have_come_before() -> None:
    stream = _stream(_steps((900.0, True), (10.0, False)), _steps((11.0, False), (700.0, True)))
    assert stream.passes == [[10.0, 11.0]]
    assert stream.extra_ms == pytest.approx(800 - 10.5)


def test_new_shapes_that_are_not_slower_count() -> None:
    stream = _stream(_steps((10.0, True), (10.0, False)), _steps((11.0, False), (11.0, True)))
    assert stream.passes == [[10.0, 10.0], [11.0, 11.0]]
    assert stream.extra_ms == 0


@pytest.mark.parametrize(("every", "counts"), [(2, False), (4, True)])
def test_shapes_that_hardly_ever_come_again_count_in_the_end(every: int, counts: bool) -> None:
    steps = _steps(*((10.0, False) if index % every == 0 else (100.0, True) for index in range(MAX_NEW_STEPS)))
    stream = _stream(*(steps[at : at + 2] for at in range(0, len(steps) - 2, 2)))
    assert len(stream.times) == (len(steps) - 2) // every + (every == 4)  # the first of every four
    stream.take(steps[-2:])
    assert len(stream.times) == (len(steps) if counts else len(steps) // every)


@pytest.mark.parametrize(("known", "every", "counts"), [(None, 3, False), (True, 3, True), (None, 5, True), (False, 5, False)])
def test_rarely_known_shapes_count_as_they_did_of_the_script_as_it_is(known: bool | None, every: int, counts: bool) -> None:
    protocol = Protocol(counts_new_shapes=known)
    stream = Stream.after(_steps((150.0, False)), protocol, torch.device("cpu"))
    stream.take(_steps(*((10.0, False) if index % every == 0 else (30.0, True) for index in range(MAX_NEW_STEPS))))
    assert len(stream.times) == (MAX_NEW_STEPS if counts else len(range(0, MAX_NEW_STEPS, every)))


def test_shapes_that_come_again_even_more_rarely_count_sooner() -> None:
    steps = _steps(*((10.0, False) if index % 10 == 0 else (100.0, True) for index in range(MAX_NEW_STEPS // 2)))
    stream = _stream(*(steps[at : at + 2] for at in range(0, len(steps) - 2, 2)))
    assert len(stream.times) == 5
    stream.take(steps[-2:])
    assert len(stream.times) == len(steps)


def test_a_script_that_ends_before_a_shape_comes_again_is_measured_with_all() -> None:
    stream = _stream(_steps((100.0, True), (100.0, True)))
    assert not stream.passes
    stream.take(_steps((90.0, True), (90.0, True)), are_last=True)
    assert stream.passes == [[100.0, 100.0], [90.0, 90.0]]


@pytest.mark.parametrize(("steps", "passes"), [(19, 0), (20, 4), (90, 4), (100, 2)])
def test_a_script_of_short_steps_that_ends_before_two_passes_has_shorter_ones(steps: int, passes: int) -> None:
    stream = Stream.after(_steps((2.0, False)), Protocol(), torch.device("cpu"))
    assert stream.pass_steps == 50
    stream.take(_steps(*((2.0 + 0.1 * (at % 3), False) for at in range(steps))), are_last=True)
    assert len(stream.passes) == passes
    assert not passes or stream.median_ms == pytest.approx(2.1)


@pytest.mark.parametrize(("steps", "passes"), [(19, []), (22, [4] * 5), (60, [14] * 4), (100, [50] * 2)])
def test_a_script_that_evaluates_in_most_steps_and_ends_early_has_passes_of_whole_periods(steps: int, passes: list[int]) -> None:
    """A graph network evaluates after every second step, and ended after 200 steps with nearly two passes, and no figure."""
    every_second = [replace(one, interrupted=at % 2 == 1) for at, one in enumerate(_steps(*[(2.0, False)] * 100))]
    stream = Stream.after(every_second[:11], Protocol(), torch.device("cpu"))
    assert (stream.keeps_interrupted, stream.period, stream.pass_steps) == (True, 2, 50)
    stream.take(every_second[:steps], are_last=True)
    assert [len(taken) for taken in stream.passes] == passes


@pytest.mark.parametrize(("every", "counts"), [(1, True), (2, False)])
def test_steps_with_a_checkpoint_count_if_later_hardly_any_is_without(every: int, counts: bool) -> None:
    """YOLOv5 accumulates more and more batches, so that at last each step held the checkpoint of an epoch, and none was timed."""
    stream = _stream()
    assert not stream.keeps_interrupted
    steps = [replace(one, interrupted=at % every == 0) for at, one in enumerate(_steps(*[(300.0, False)] * MAX_NEW_STEPS))]
    for at in range(0, len(steps), 10):
        stream.take(steps[at : at + 10])
    assert stream.keeps_interrupted is counts
    assert len(stream.times) == (100 if counts else 50)
    ended = _stream()
    ended.take(steps[:24], are_last=True)
    assert [len(taken) for taken in ended.passes] == [2] * (12 if counts else 6)


@pytest.mark.parametrize("new_ms", [0.0, 5.0])
def test_new_shapes_are_slower_only_if_their_size_does_not_explain_it(new_ms: float) -> None:
    """Of graphs in batches, those of 128 are seldom of a known size and those of 41, at the end of an epoch, often are."""
    elements = [1000 + 10 * (at % 5) if at % 2 else 3000 + at for at in range(60)]
    seen = [at % 2 == 1 or at % 10 == 0 for at in range(60)]
    stream = _stream(
        [
            replace(one, elements=size, ms=size / 500 + 0.01 * (at % 3) + new_ms * one.is_new)
            for at, (one, size) in enumerate(zip(_steps(*((0.0, not known) for known in seen)), elements, strict=True))
        ]
    )
    assert stream.extra_ms == pytest.approx(new_ms, abs=0.02)
    assert stream.keeps_new is not bool(new_ms)


@pytest.mark.parametrize(("slow", "counts"), [(1, False), (3, False), (4, True)])
def test_a_few_new_shapes_that_take_several_times_as_long_are_warm_up(slow: int, counts: bool) -> None:
    times = [2500.0 if at % 9 == 2 and at < 9 * slow else 300.0 for at in range(34)]  # as of T5-base on an H200
    stream = _stream()
    stream.take(_steps(*((ms, True) for ms in times)), are_last=True)
    counted = [ms for taken in stream.passes for ms in taken]
    assert (max(counted) > 300.0) is counts
    assert [one.ms for one in stream.prepared] == [] if counts else [2500.0] * slow
    assert stream.median_ms == 300.0


def test_a_step_that_takes_several_times_as_long_counts_if_its_shape_is_known() -> None:
    stream = _stream()
    stream.take(_steps(*((2500.0 if at == 7 else 300.0, False) for at in range(30))), are_last=True)
    assert (len(stream.times), stream.prepared) == (30, [])


def test_samples_are_those_of_the_steps_that_count() -> None:
    stream = _stream(_steps((900.0, True), samples=1), _steps((10.0, False), samples=3), _steps((10.0, False), samples=5))
    assert stream.mean_size() == (4.0, 1.0)


@pytest.mark.parametrize(("seen", "recur"), [(0, False), (2, False), (4, True), (10, True)])
def test_shapes_recur_if_enough_steps_have_a_known_one_however_long_new_ones_take(seen: int, recur: bool) -> None:
    stream = _stream(*[_steps((10.0, place >= seen)) for place in range(10)])
    assert stream.shapes_recur is recur


@pytest.mark.parametrize(
    ("device", "settings", "shapes", "attends", "may"),
    [
        ("cuda", "scope=eager", "new", True, True),
        ("cuda", "scope=full,sdpa_kernel=cudnn", "new", True, True),
        ("cuda", "scope=full,sdpa_kernel=efficient", "new", True, False),
        ("cuda", "scope=eager", "known", True, False),
        ("cuda", "scope=eager", "new", False, False),
        ("cpu", "scope=eager", "new", True, False),
    ],
)
def test_attention_may_be_planned_anew_for_each_new_shape(
    device: str, settings: str, shapes: str, attends: bool, may: bool
) -> None:
    stream = _stream(_steps(*[(300.0, shapes == "new")] * 20))
    asked = CompileSettings.parse(settings), torch.device(device), stream
    assert session_results.plans_attention(*asked, lambda: attends) is may


@pytest.mark.parametrize("steps", range(60, 64))  # passes of 2 steps, with 1 or 2 between them
def test_a_script_may_end_between_two_passes(steps: int, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_steps, "PASS_S", 1e-9)
    (folder / "short.py").write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("short.py", "scope=eager", str(steps), min_passes=100)
    assert error is None
    assert session.stream is not None
    assert session.stream.passes


@pytest.mark.slow
def test_what_a_length_costs_when_it_first_comes_is_warm_up(run: Run, folder: Path) -> None:
    (folder / "lengths.py").write_text(
        "import random, time, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.planned = torch.nn.Linear(4, 4), set()\n"
        "    def forward(self, x):\n"
        "        if x.shape[1] not in self.planned:\n"
        "            self.planned.add(x.shape[1])\n"
        "            time.sleep(0.05)\n"
        "        return self.layer(x)\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for _ in range(4000):\n"
        "    model(torch.randn(2, random.randint(1, 20), 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("lengths.py", "scope=eager", min_passes=8)
    assert error is None
    figures = session_results.measurement(session)
    assert session.stream is not None
    assert session.stream.new
    assert median(figures.step_ms) < 20
    assert sum(step_ms > 50 for step_ms in figures.step_ms) <= 1  # but for a pause of the process
    assert figures.compile_s > 0.4
    facts = session_results.model_facts(session)
    assert (facts["batches_change"], facts["shapes_recur"]) == (True, True)
    assert 10 < facts["num_shapes"] <= 20
    said = " ".join(session_results.findings(session))
    assert "shape that had not come before, and each took" in said
    assert "as by padding batches to a few sizes where the script makes its batches, may run faster" in said  # no texts


@pytest.mark.parametrize("period", range(2, 13))
def test_what_comes_every_few_steps_is_not_always_in_a_pass_at_the_same_place(period: int) -> None:
    stream, begins, at = _stream(), [], 0
    for _ in range(2 * period):
        begins.append(at % period)
        at += 5 - stream.before_next_pass()
    assert {begins.count(place) for place in range(period)} == {2}


def test_a_pass_has_as_many_steps_of_each_kind_where_most_do_something_else() -> None:
    warmup = [replace(one, interrupted=at % 3 == 1) for at, one in enumerate(_steps(*[(60.0, False)] * 9))]
    assert Stream.after(warmup, Protocol(), torch.device("cpu")).pass_steps == 6  # 5 of 60 ms make 0.3 s
    warmup[8] = replace(warmup[8], interrupted=True)  # not every third one
    assert Stream.after(warmup, Protocol(), torch.device("cpu")).pass_steps == 5


@pytest.mark.slow
def test_every_second_step_that_generates_first_counts_half(run: Run, folder: Path) -> None:
    """A policy on an H200 was 29% too fast in one run: passes had three steps without and two with what it samples."""
    (folder / "samples.py").write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(4000):\n"
        "    if step % 2:\n"
        "        with torch.no_grad():\n"
        "            model(torch.randn(2, 4))\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(0.02)\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("samples.py", "scope=eager", min_passes=6)
    assert error is None
    assert session.stream is not None
    assert session.stream.pass_steps % 2 == 0
    rate = session_results.measurement(session)
    assert rate.samples_per_s == pytest.approx(2 / 0.07, rel=0.15)
    assert rate.step_ms_median == pytest.approx(70, rel=0.15)
    assert rate.outliers == 0
    assert rate.compile_s < 0.3


def test_texts_that_no_setting_pads_are_padded_where_batches_are_made(run: Run, folder: Path) -> None:
    (folder / "texts.py").write_text(
        "import random, time, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.words, self.planned = torch.nn.Embedding(9, 4), set()\n"
        "    def forward(self, ids):\n"
        "        if ids.shape[1] not in self.planned:\n"
        "            self.planned.add(ids.shape[1])\n"
        "            time.sleep(0.05)\n"
        "        return self.words(ids)\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for _ in range(4000):\n"
        "    model(torch.randint(9, (2, random.randint(1, 20)))).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("texts.py", "scope=eager,as_written=on", min_passes=4)
    assert error is session.error is None
    said = " ".join(session_results.findings(session))
    assert "as by padding texts to multiples of 64 where the script makes its batches, may run faster" in said
    assert "pad_to_multiple_of" not in said  # which refuses to: the texts have no mask


@pytest.mark.slow
def test_how_much_of_the_time_no_figure_includes_is_said(run: Run, folder: Path) -> None:
    """PPO samples with its policy, then updates it 40 times: a fifth of the time is in one step of 40."""
    (folder / "ppo.py").write_text(
        "import time, torch\n"
        "policy = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)\n"
        "for step in range(4000):\n"
        "    if step % 10 == 0:\n"
        "        with torch.no_grad():\n"
        "            policy(torch.randn(2, 4))\n"
        "        time.sleep(0.3)\n"
        "    time.sleep(0.03)\n"
        "    policy(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("ppo.py", "scope=eager,as_written=on", min_passes=4, max_passes=4)
    assert error is session.error is None
    assert session.stream is not None
    assert session.stream.interrupted_share == pytest.approx(1 / 2, abs=0.2)  # 0.3 s of 0.6 s, more or less by where it ends
    (said,) = (line for line in session_results.findings(session) if "a policy that acts" in line)
    share = f"{session.stream.interrupted_share:.0%}"
    assert said.endswith(f"no figure includes; it took {share} of the time")
    assert session_results.measurement(session).step_ms_median < 60


@pytest.mark.parametrize(("number", "share"), [(0, 0.0), (1, 0.0), (4, 4 * 90 / (4 * 100 + 8 * 10))])
def test_a_share_needs_more_than_one_evaluation_by_chance(number: int, share: float) -> None:
    steps = [replace(one, interrupted=at < number) for at, one in enumerate(_steps(*[(10.0, False)] * 12))]
    stream = _stream([replace(one, ms=100.0 if one.interrupted else one.ms) for one in steps])
    assert stream.interrupted == number
    assert stream.interrupted_share == pytest.approx(share)


@pytest.mark.slow
def test_the_evaluation_of_an_average_of_the_weights_counts_in_no_figure(run: Run, folder: Path) -> None:
    """A diffusion model is sampled by its average, every so many steps."""
    (folder / "average.py").write_text(
        "import copy, time, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
        "average = copy.deepcopy(model).eval().requires_grad_(False)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(1, 4000):\n"
        "    time.sleep(0.02)\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    with torch.no_grad():\n"
        "        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)\n"
        "        if step % 10 == 0:\n"
        "            average(torch.randn(2, 4))\n"
        "            time.sleep(0.5)\n"
    )
    session, error = run("average.py", "scope=eager,as_written=on", min_passes=4, max_passes=4)
    assert error is session.error is None
    assert session.stream is not None
    assert session.stream.interrupted > 3
    assert session_results.measurement(session).samples_per_s > 1.5 * 2 / 0.07  # which it would be with the evaluations


@pytest.mark.slow
def test_an_evaluation_without_no_grad_counts_in_no_figure(run: Run, folder: Path) -> None:
    """TabNet's and many others: its samples counted, and its longer step was one of a larger batch."""
    (folder / "forgets_no_grad.py").write_text(
        "import time, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(1, 4000):\n"
        "    time.sleep(0.02)\n"
        "    model.train()(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    if step % 5 == 0:\n"
        "        model.eval()(torch.randn(500, 4))\n"
        "        time.sleep(0.2)\n"
    )
    session, error = run("forgets_no_grad.py", "scope=eager,as_written=on", min_passes=4, max_passes=4)
    assert error is session.error is None
    assert session.stream is not None
    assert session.stream.interrupted > 3
    assert session.step_size() == (2, 2)
    assert session_results.measurement(session).step_ms_median < 60
    assert not any("larger batch" in said for said in session_results.findings(session))


def test_steps_that_each_hold_a_checkpoint_are_said_to_hold_one(run: Run, folder: Path) -> None:
    (folder / "saves.py").write_text(
        "import io, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(4000):\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    torch.save(model.state_dict(), io.BytesIO())\n"
    )
    session, error = run("saves.py", "scope=eager,as_written=on")
    assert error is session.error is None
    (said,) = (line for line in session_results.findings(session) if line.startswith("most steps also"))
    assert said == "most steps also hold an evaluation or a checkpoint, which counts as part of the step"


@pytest.mark.parametrize("from_step", [1, 20])
def test_a_script_that_trains_on_in_evaluation_mode_is_measured(from_step: int, run: Run, folder: Path) -> None:
    """One that forgets `model.train()` after its first evaluation, or keeps the statistics of its norms."""
    (folder / "forgets_train.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(1, 4000):\n"
        f"    if step == {from_step}:\n"
        "        model.eval()(torch.randn(500, 4))\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("forgets_train.py", "scope=eager,as_written=on", min_passes=4, max_passes=4)
    assert error is session.error is None
    assert session.stream is not None
    assert session.stream.interrupted <= 2
    assert session.step_size() == (2, 2)


@pytest.mark.parametrize("evaluates", [True, False])
def test_what_each_step_computes_in_evaluation_mode_is_said_not_to_be_compiled(evaluates: bool, run: Run, folder: Path) -> None:
    """DPO by the same model without its adapters is a reference that no setting compiles."""
    (folder / "dpo.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(4000):\n"
        "    x = torch.randn(2, 4)\n"
        "    with torch.no_grad():\n"
        f"        reference = model.train({not evaluates})(x)\n"
        "    (model.train()(x) - reference).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("dpo.py", "scope=eager,as_written=on")
    assert error is session.error is None
    (said,) = (line for line in session_results.findings(session) if line.startswith("most steps also call the model"))
    assert ("no setting compiles a model in evaluation mode" in said) is evaluates


@pytest.mark.slow
@pytest.mark.parametrize(("busy_s", "is_known"), [(0.0, True), (0.05, False)])
def test_launches_do_not_limit_a_step_if_the_device_is_behind_with_them(
    busy_s: float, is_known: bool, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "synchronize", lambda device: busy_s and time.sleep(busy_s))
    (folder / "short.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for _ in range(4000):\n"
        "    model(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    session, error = run("short.py", "scope=eager,as_written=on")
    assert error is session.error is None
    assert ("us_per_operator" in session_results.model_facts(session)) is is_known


def _sized(number: int, seed: int, *, slope: float = 0.2, noise: float = 2.0) -> list[StepTime]:
    """Steps whose batches of 8 have 100 to 500 elements, one token for every four."""
    draws = random.Random(seed)
    sizes = [draws.randrange(100, 500, 4) for _ in range(number)]
    times = [20 + slope * size + draws.gauss(0, noise) for size in sizes]
    return [
        StepTime(ms=ms, wait_ms=0.0, interrupted=False, samples=8, tokens=size // 4, elements=size)
        for ms, size in zip(times, sizes, strict=True)
    ]


def _of_size(steps: Sequence[StepTime], mean_step: Sequence[float] | None = None) -> Stream:
    stream = Stream.after(_steps((150.0, False)), Protocol(mean_step=mean_step), torch.device("cpu"))
    stream.take(steps)
    return stream


def test_steps_are_timed_as_if_each_had_a_batch_of_the_mean_size() -> None:
    """Two runs that happened to get other batches agree, and each rate's interval holds the true one."""
    mean_step = (8.0, 75.0, 300.0)
    true = 8 / (20 + 0.2 * 300) * 1e3
    widths, raw_widths, within = [], [], 0
    for seed in range(100):
        steps = _sized(20, seed)
        stream = _of_size(steps, mean_step)
        assert stream.mean_size() == (8.0, 75.0)
        low, high = stream.throughput(*stream.mean_size()).ci95
        within += low <= true <= high
        widths.append(high - low)
        raw = steady.throughput([[one.ms for one in steps[at : at + 2]] for at in range(0, 20, 2)], samples=16, tokens=150)
        raw_widths.append(raw.ci95[1] - raw.ci95[0])
    assert within >= 90
    assert median(widths) < median(raw_widths) / 4


def test_sizes_that_times_do_not_follow_change_nothing() -> None:
    steps = _sized(40, seed=1, slope=0.0)
    stream = _of_size(steps, (8.0, 75.0, 300.0))
    assert not stream.explained
    assert [ms for times in stream.passes for ms in times] == [one.ms for one in steps]
    assert stream.mean_size() == (8, pytest.approx(sum(one.tokens for one in steps) / 40))


def test_another_batch_size_is_timed_at_its_own_mean() -> None:
    steps = [replace(one, samples=16, elements=4 * one.elements) for one in _sized(40, seed=2)]
    stream = _of_size(steps, (8.0, 75.0, 300.0))
    assert stream.explained > 0.9
    assert stream.mean_size() == (16, pytest.approx(sum(one.tokens for one in steps) / 40))
    assert stream.median_ms == pytest.approx(median(one.ms for one in steps), rel=0.1)


SIZED = """
import random, time, torch
net, draws = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)), random.Random(0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2000):
    words = draws.choice(range(20, 201, 20))
    ids = torch.randint(20, (4, words))
    loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    time.sleep(words * 2e-4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_says_that_its_times_follow_its_batches(run: Run, folder: Path) -> None:
    (folder / "sized.py").write_text(SIZED, encoding="utf-8")
    session, error = run("sized.py", "scope=eager,as_written=on", cpu_window_s=1.5)
    assert error is None
    assert session.stream is not None
    assert session.stream.explained > 0.5
    samples, tokens, elements = session.stream.to_keep()["mean_step"]
    assert (samples, elements) == (4, tokens)
    assert any("a step takes longer with a larger batch" in one for one in session_results.findings(session))


def test_a_few_steps_do_not_follow_their_sizes_by_chance() -> None:
    adjusted = sum(bool(_of_size(_sized(10, seed, slope=0.0)).explained) for seed in range(200))
    assert adjusted <= 5


def test_a_first_pass_of_large_batches_does_not_stand_for_all() -> None:
    """What it shows decides whether a trial goes on."""
    alike, sized = _steps(*[(40.0, False)] * 6), sorted(_sized(16, seed=3), key=lambda one: -one.elements)
    stream = _stream(alike[:2])
    assert (stream.begins_to_show(), stream.slack) == (True, 1.0)
    stream.take(alike[2:4])
    assert not stream.begins_to_show(), "said once"
    stream = Stream.after(_steps((150.0, False)), Protocol(mean_step=(8.0, 75.0, 300.0)), torch.device("cpu"))
    shown = []
    for at in range(0, 16, 2):
        stream.take(sized[at : at + 2])
        shown.append(stream.begins_to_show())
        if shown[-1]:
            best = stream.throughput(*stream.mean_size()).samples_per_s * stream.slack
    assert shown == [False, False, False, True, False, False, False, False]
    assert best >= stream.throughput(*stream.mean_size()).samples_per_s
