"""Logging to trackers: real MLflow and TensorBoard stores hold what the records hold, and a tracker that fails costs nothing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import measured

from compile_sweep.schema.attempt_record import SCHEMA_VERSION
from compile_sweep.schema.errors import CompileSweepError, ConfigError, TrackingError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, WarmStart, append
from compile_sweep.schema.settings import CompileSettings
from orchestrator.tracking import Destination, LoggedTrial, Tracking, delivery, entry_of

SETTING = CompileSettings.parse("scope=full,dynamic=mark,optimizer=fused,inductor.triton.mix_order_reduction=off")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    # SQLAlchemy of MLflow's SQLite store; can go when that no longer uses `noload`
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
]


def record(trial_id: str = "001-abc", **fields: Any) -> TrialRecord:
    usual: dict[str, Any] = {
        "status": Status.OK,
        "started_at": "2026-11-21T09:11:40+00:00",
        "wall_s": 90.0,
        "samples_per_s": 700.0,
    }
    return TrialRecord(
        trial_id=trial_id, settings=SETTING.to_dict(), settings_key=SETTING.key, **usual | measured(700.0, 54.0) | fields
    )


def start(**fields: Any) -> WarmStart:
    usual: dict[str, Any] = {"status": Status.OK, "started_at": "2026-11-21T09:20:00+00:00", "wall_s": 20.0, "warm_start_s": 9.5}
    return WarmStart(trial_id="002-def", settings=SETTING.to_dict(), settings_key=SETTING.key, **usual | fields)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep-1"
    folder.mkdir()
    told = {
        "schema_version": SCHEMA_VERSION,
        "config": {"workload": "captioning", "size": "base", "seed": 0, "settings": [SETTING.key] * 3},
        "environment": {"gpu": "NVIDIA H200", "torch": "2.13.0"},
        "environment_key": "abc",
        "started_at": "2026-11-21T09:11:40+00:00",
    }
    (folder / "sweep.json").write_text(json.dumps(told))
    (folder / "report.html").write_text("<p>the report")
    return folder


def test_an_entry_holds_every_figure_and_word_of_the_record() -> None:
    entry = entry_of(
        record(compile_phases_s={"dynamo": 3.5, "other": 1.0}, step_ms_ci95=(9.0, 11.0), numerics={"status": "ok", "worst": None},
               step_ms=[10.0, float("nan"), 11.0], contended=True, perf_hints=["one", "two"], clock_drift=float("inf"))
    )  # fmt: skip
    assert entry.name == SETTING.label
    assert entry.params["scope"] == "full"
    assert entry.params["options.triton.mix_order_reduction"] == "off"
    assert entry.metrics["samples_per_s"] == 700.0
    assert entry.metrics["compile_phases_s.dynamo"] == 3.5
    assert (entry.metrics["step_ms_low"], entry.metrics["step_ms_high"]) == (9.0, 11.0)
    assert "clock_drift" not in entry.metrics
    assert entry.series["step_ms"] == [10.0, 11.0]
    assert entry.tags["contended"] == "true"
    assert entry.tags["perf_hints"] == "one\ntwo"
    assert entry.tags["numerics.status"] == "ok"
    assert entry.tags["settings_key"] == SETTING.key


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("mlflow:http://host:5000", "mlflow:http://host:5000"),
        ("mlflow:databricks", "mlflow:databricks"),
        ("mlflow:/runs", "mlflow:/runs"),
        ("tensorboard:/runs", "tensorboard:/runs"),
        ("wandb:team/project-1", "wandb:team/project-1"),
    ],
)
def test_a_destination_reads_back(text: str, spelled: str) -> None:
    assert Destination.parse(text).spelled == spelled
    assert Destination.parse(spelled).spelled == spelled


def test_a_folder_means_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Destination.parse("tensorboard:runs").where == str(tmp_path / "runs")


@pytest.mark.parametrize(
    "text",
    ["", "mlflow", "mlflow:", "comet:x", "wandb:a b", "wandb:a/b/c", "tensorboard:s3://bucket/runs", "mlflow:http://***@host"],
)
def test_what_names_no_place_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^(--log-to|the password of --log-to) .*"):
        Destination.parse(text)


@pytest.mark.slow
def test_a_password_is_in_no_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    place = "mlflow:http://me:hunter2@127.0.0.1:9"
    assert "hunter2" not in str(Destination.parse(place))
    with pytest.raises(TrackingError) as refused:
        Tracking([place], tmp_path)
    assert "hunter2" not in str(refused.value)
    assert str(refused.value).startswith("mlflow:http://***@127.0.0.1:9 cannot be logged to (")


@pytest.mark.slow
def test_mlflow_holds_a_run_for_each_trial_below_the_sweeps(sweep: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    append(sweep, record("000-before"))  # recorded before: not logged again
    tracking = Tracking([f"mlflow:{tmp_path / 'store'}"], sweep)
    append(sweep, record(numerics={"status": "ok", "gradients": {"image->text": {"gap": 0.5}}}))  # names that MLflow refuses
    tracking.catch_up()
    append(sweep, record("003-bad", status=Status.INFEASIBLE, label="nan", reason="the loss is NaN", step_ms=[]))
    append(sweep, start())
    assert tracking.finish(sweep / "report.html") == []

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("compile-sweep/captioning-base")
    runs = {
        run.data.tags["kind"] + run.data.tags.get("trial_id", ""): run for run in client.search_runs([experiment.experiment_id])
    }
    assert runs.keys() == {"sweep", "trial001-abc", "trial003-bad", "warm-start002-def"}
    parent, good, bad = runs["sweep"], runs["trial001-abc"], runs["trial003-bad"]
    assert (parent.info.run_name, parent.info.status) == ("sweep-1", "FINISHED")
    assert parent.data.params["seed"] == "0"
    assert parent.data.tags["gpu"] == "NVIDIA H200"
    assert [one.path for one in client.list_artifacts(parent.info.run_id)] == ["report.html"]
    assert {run.data.tags["mlflow.parentRunId"] for name, run in runs.items() if name != "sweep"} == {parent.info.run_id}
    assert good.data.params["mode"] == "default"
    assert good.data.metrics["samples_per_s"] == 700.0
    assert good.data.metrics["numerics.gradients.image-_text.gap"] == 0.5
    assert good.info.end_time - good.info.start_time == 90_000
    steps = record().step_ms
    assert steps
    assert [one.value for one in client.get_metric_history(good.info.run_id, "series.step_ms")] == steps
    assert (bad.info.status, bad.data.tags["reason"]) == ("FAILED", "the loss is NaN")
    assert runs["warm-start002-def"].data.metrics["warm_start_s"] == 9.5


@pytest.mark.slow
def test_a_sweep_that_is_resumed_goes_on_in_its_mlflow_run(sweep: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    told = json.loads((sweep / "sweep.json").read_text())
    taken_up = {**told, "started_at": "2026-11-22T08:00:00+00:00", "runs": [{"started_at": told["started_at"], "commit": None}]}
    for trial_id, run in (("001-a", told), ("002-b", taken_up)):
        (sweep / "sweep.json").write_text(json.dumps(run))  # as a resume leaves it
        tracking = Tracking([f"mlflow:{tmp_path / 'store'}"], sweep)
        append(sweep, record(trial_id))
        assert tracking.finish() == []
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    kinds = [run.data.tags["kind"] for run in client.search_runs([one.experiment_id for one in client.search_experiments()])]
    assert sorted(kinds) == ["sweep", "trial", "trial"]


def test_tensorboard_shows_figures_steps_and_the_setting(sweep: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = Tracking([f"tensorboard:{tmp_path / 'runs'}"], sweep)
    assert not (tmp_path / "runs").exists()
    append(sweep, record(reason="<script>"))
    assert tracking.finish() == []
    events = EventAccumulator(str(tmp_path / "runs" / "sweep-1" / "001-abc"), size_guidance={"scalars": 0})
    events.Reload()
    (rate,) = events.Scalars("samples_per_s")
    assert (rate.value, rate.wall_time) == (700.0, pytest.approx(1795252300.0))
    assert [one.value for one in events.Scalars("series/step_ms")] == pytest.approx(record().step_ms)
    assert b"    <script>" in events.Tensors("reason/text_summary")[0].tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in events.SummaryMetadata.__self__.PluginTagToContent("hparams")  # type: ignore[attr-defined]


class Failing:
    """Takes the first entry, refuses the second, and hangs at the third."""

    def __init__(self, release: threading.Event) -> None:
        self.release, self.count = release, 0

    def log(self, entry: LoggedTrial) -> None:
        self.count += 1
        if self.count == 2:
            raise OSError("http://me:hunter2@host: no space\nleft")
        if self.count == 3:
            self.release.wait(30)

    def close(self, report: Path | None) -> None:
        pass


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_tracker_that_fails_or_hangs_is_told_of_in_one_sentence(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    monkeypatch.setattr(delivery, "opened", lambda destination, output: Failing(release))
    tracking = Tracking(["wandb:project"], sweep)
    for number in range(4):
        append(sweep, record(f"{number}"))
    tracking.catch_up()
    (complaint,) = tracking.finish(limit_s=0.5)
    assert complaint == (
        "wandb:project did not take 4 of 5 entries (OSError: http://***@host: no space left); the sweep's folder has them all"
    )


def test_a_library_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(
        CompileSweepError, match=r"^--log-to wandb:project needs wandb; install it with: make install EXTRAS=wandb$"
    ):
        Tracking(["wandb:project"], tmp_path)


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="is not a folder that can be written to"):
        Tracking([f"tensorboard:{tmp_path / 'file' / 'runs'}"], tmp_path)


def test_mlflow_is_not_tried_in_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))  # root may write everywhere
    with pytest.raises(TrackingError, match="is not a folder that can be written to"):
        Tracking([f"mlflow:{tmp_path}"], tmp_path)


def test_without_destinations_nothing_is_read_or_started(tmp_path: Path) -> None:
    before = threading.active_count()
    tracking = Tracking()
    tracking.catch_up()
    assert not tracking._deliveries
    assert tracking.finish() == []
    assert threading.active_count() == before


def test_wandb_takes_trials_offline(sweep: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracking = Tracking(["wandb:project"], sweep)
    append(sweep, record())
    assert tracking.finish(sweep / "report.html") == []
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 2
