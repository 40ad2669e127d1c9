"""What follows the main stage of a sweep, with trials that take no time and report durations."""

from __future__ import annotations

import io
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from samples import H200

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.record import TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import SearchConfig, SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.progress import Progress
from orchestrator.run import stages as stages_module
from orchestrator.run import sweep_folder
from orchestrator.run.runner import Batch, EarlyStopping
from orchestrator.run.session import Interrupts
from orchestrator.run.stages import Fronts, Stages
from orchestrator.run.trial import Attempt
from orchestrator.search import Searcher
from orchestrator.tracking import Tracking

SETTINGS = tuple(CompileSettings.parse(f"scope={scope}") for scope in ("full", "regional", "modular"))
KEYS = [setting.key for setting in SETTINGS]
TRIAL_S, START_S = 100.0, 20.0


def recorded(setting: CompileSettings, **fields: Any) -> TrialRecord:
    known = {"settings": setting.to_dict(), "settings_key": setting.key, "status": Status.OK, "wall_s": TRIAL_S, "cache_made": 1}
    return TrialRecord(**{"trial_id": uuid.uuid4().hex, "compile_s": 1.0, "samples_per_s": 5.0, **known, **fields})


class InstantRunner:
    """A runner whose trials take no time and report durations."""

    def __init__(self, config: SweepConfig, environment: Environment, output: Path, tracking: Tracking) -> None:
        self._output = output

    @contextmanager
    def session(self, say: Callable[[str], object], interrupts: Interrupts) -> Iterator[None]:
        yield

    def run(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for setting in filter(batch.may_start, batch.settings):
                known = {"settings": setting.to_dict(), "settings_key": setting.key, "status": Status.OK, "warm_start_s": START_S}
                start = WarmStart(trial_id=uuid.uuid4().hex, wall_s=START_S, **known)  # type: ignore[arg-type]
                records.append(self._output, start if batch.warm_start else recorded(setting))

    def running(self) -> Sequence[Progress]:
        return ()


@pytest.fixture
def instant_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "make_runner", InstantRunner)


AS_WRITTEN = CompileSettings.parse("scope=eager,as_written=on")


def of_script(tmp_path: Path, *done: CompileSettings, time_budget_s: float | None = None) -> Stages:
    """Returns the stages of a script's sweep with records of these settings; what it runs is on no front."""
    config = SweepConfig(
        recipe="given",
        workload="train.py",
        size="script",
        settings=(AS_WRITTEN, *SETTINGS[:2]),
        script={"path": "/train.py", "folder": "/"},
        time_budget_s=time_budget_s,
    )
    output = tmp_path / "sweep"
    sweep_folder.begin(output, config, H200, None)
    for setting in done:
        records.append(output, recorded(setting))
    return Stages(
        config=config,
        output=output,
        fronts=Fronts(lambda _: [], lambda _: [], lambda _: None),
        facts=WorkloadFacts(max_length=16),
        environment=H200,
    )


@pytest.mark.parametrize(("was_measured", "failure"), [(False, "the script raised KeyError"), (True, None)])
def test_a_script_fails_as_it_is_unless_it_was_ever_measured(was_measured: bool, failure: str | None, tmp_path: Path) -> None:
    stages = of_script(tmp_path, *[AS_WRITTEN] * was_measured)
    assert stages.script_failure is None
    failed = {"status": Status.FAILED, "label": Label.EXCEPTION, "reason": "ScriptError: the script raised KeyError"}
    records.append(stages.output, recorded(AS_WRITTEN, **failed))
    assert stages.script_failure == failure


@pytest.mark.parametrize(
    ("label", "is_final"),
    [
        (Label.CRASHED, True),
        (Label.WORKER_DIED, True),
        (Label.BUDGET_SPENT, True),
        (Label.OUT_OF_MEMORY, False),
        (Label.DISK_FULL, False),
    ],
)
def test_nothing_follows_where_the_script_dies_as_it_is(label: Label, is_final: bool, tmp_path: Path) -> None:
    stages = of_script(tmp_path)
    records.append(stages.output, recorded(AS_WRITTEN, status=label.status, label=label, reason="it died", samples_per_s=None))
    assert stages.script_failure == ("it died" if is_final else None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stages_module, "make_runner", InstantRunner)
        run(stages)
    assert (len(records.read(stages.output)) == 1) is is_final


@pytest.mark.usefixtures("instant_runner")
def test_a_script_is_measured_as_it_is_again_after_the_other_settings(tmp_path: Path) -> None:
    stages = of_script(tmp_path)
    run(stages)
    keys = [AS_WRITTEN.key, *KEYS[:2], AS_WRITTEN.key]
    assert [record.settings_key for record in records.read(stages.output)] == keys
    assert stages.undone(interrupted=False) is None
    run(replace(stages))
    assert len(records.read(stages.output)) == len(keys), "nothing was measured after it"
    records.append(stages.output, recorded(SETTINGS[0]))
    assert "was not measured again" in str(stages.undone(interrupted=True))


@pytest.mark.usefixtures("instant_runner")
def test_a_time_budget_keeps_what_measuring_a_script_again_takes(tmp_path: Path) -> None:
    short = of_script(tmp_path, AS_WRITTEN, SETTINGS[0], time_budget_s=1.5 * TRIAL_S)
    run(short)
    assert [record.settings_key for record in records.read(short.output)][2:] == [AS_WRITTEN.key]


def test_a_trial_that_runs_when_the_budget_is_used_up_is_stopped_and_keeps_the_time_for_the_script_as_it_is(
    tmp_path: Path,
) -> None:
    ends: dict[str, list[float]] = {}

    class NotingRunner(InstantRunner):
        def run(self, batches: Iterable[Batch]) -> None:
            for batch in batches:
                for setting in filter(batch.may_start, batch.settings):
                    assert batch.ends_at is not None
                    ends.setdefault(setting.key, []).append(batch.ends_at() - time.monotonic())
                    records.append(self._output, recorded(setting))

    stages = of_script(tmp_path, time_budget_s=10 * TRIAL_S)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stages_module, "make_runner", NotingRunner)
        run(stages)
    first, again = ends[AS_WRITTEN.key]
    assert first == pytest.approx(10 * TRIAL_S, abs=30.0)
    assert [*ends[KEYS[0]], again] == pytest.approx([10 * TRIAL_S] * 2, abs=30.0)
    assert ends[KEYS[1]] == pytest.approx([9 * TRIAL_S], abs=30.0)


def test_a_stopped_trial_says_that_the_budget_was_used_up_and_is_left_for_the_next_run(tmp_path: Path) -> None:
    stages = of_script(tmp_path, AS_WRITTEN, SETTINGS[1])
    progress = Progress(
        trial_id="3", settings_key=KEYS[0], phase="warming-up", in_phase_s=5.0, elapsed_s=9.0, neighbors=0, stop_request=None
    )
    now = time.monotonic()
    in_time = EarlyStopping(stages.output, Batch(settings=SETTINGS, may_start=lambda _: True, ends_at=lambda: now + 1e6))
    assert not in_time.requests([progress])
    late = EarlyStopping(stages.output, Batch(settings=SETTINGS, may_start=lambda _: True, ends_at=lambda: now - 1.0))
    request = late.requests([progress])["3"]
    assert not late.requests([progress]), "it is asked once"
    verdict = Attempt(progress=replace(progress, stop_request=request)).verdict(None)  # type: ignore[arg-type]
    assert (verdict.status, verdict.label) == (Status.STOPPED, Label.BUDGET_SPENT)
    assert "time budget was used up" in str(verdict.reason)
    fields = {"status": verdict.status, "label": verdict.label, "reason": verdict.reason, "samples_per_s": None}
    records.append(stages.output, recorded(SETTINGS[0], **fields))
    assert stages.left() == [SETTINGS[0]]


def begun(tmp_path: Path, *, budget_s: float | None = None, **fields: Any) -> Stages:
    """Returns the stages of a sweep, with these fields, whose settings all have records and are all on the front."""
    config = SweepConfig(
        recipe="given",
        workload="captioning",
        size="tiny",
        settings=SETTINGS,
        max_concurrent=2,
        cache=str(tmp_path / "cache"),
        search=SearchConfig(searcher=Searcher.GRID, gpu_budget_s=budget_s) if budget_s else SearchConfig(),
    )
    output = tmp_path / "sweep"
    sweep_folder.begin(output, config, H200, None)
    for setting in SETTINGS:
        records.append(output, recorded(setting, **fields))
    return Stages(
        config=config,
        output=output,
        fronts=Fronts(lambda _: KEYS, lambda _: KEYS, lambda _: None),
        facts=WorkloadFacts(max_length=16),
        environment=H200,
    )


def run(stages: Stages) -> None:
    stages.run(Console(file=io.StringIO()), stages.search())


@pytest.mark.usefixtures("instant_runner")
def test_a_gpu_budget_holds_for_what_is_measured_again_and_started_warm(tmp_path: Path) -> None:
    stages = begun(tmp_path, budget_s=len(SETTINGS) * TRIAL_S + 2.5 * TRIAL_S, contended=True)
    run(stages)
    again = records.read(stages.output)[len(SETTINGS) :]
    assert [record.settings_key for record in again] == KEYS[:2], "a third would take 50 s more than are left"
    assert [start.settings_key for start in records.read_warm_starts(stages.output)] == KEYS[:2], "likewise, 10 s"
    run(replace(stages))
    assert (len(records.read(stages.output)), len(records.read_warm_starts(stages.output))) == (5, 2), (
        "the next run counts them too"
    )


@pytest.mark.usefixtures("instant_runner")
def test_where_only_starts_were_put_off_the_next_run_does_those_alone(tmp_path: Path) -> None:
    stages = begun(tmp_path)
    run(stages)
    assert len(records.read(stages.output)) == len(SETTINGS)
    assert [start.settings_key for start in records.read_warm_starts(stages.output)] == KEYS


@pytest.mark.parametrize(("number", "apart_s", "stops"), [("SIGINT", 0.3, True), ("SIGINT", 0.0, False), ("SIGTERM", 0.3, False)])
def test_ctrl_c_pressed_twice_stops_now_and_a_signal_that_timeout_sends_twice_asks_once(
    number: str, apart_s: float, *, stops: bool
) -> None:
    interrupts = Interrupts()
    with interrupts.handled(), pytest.raises(KeyboardInterrupt) if stops else nullcontext():
        signal.raise_signal(signal.Signals[number])
        assert interrupts.asked.is_set()
        time.sleep(apart_s)
        signal.raise_signal(signal.Signals[number])
