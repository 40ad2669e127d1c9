"""`TrialRecord` and its log: strict lines, atomic appends, and messages about damage."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.schema.attempt_record import SCHEMA_VERSION, why_impossible
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.record import (
    SWEEP_FILE,
    TRIALS_FILE,
    WARM_STARTS_FILE,
    Caches,
    TrialRecord,
    WarmStart,
    append,
    read,
    read_warm_starts,
    standing,
)
from compile_sweep.schema.settings import CompileSettings

SETTINGS = CompileSettings.parse("scope=full,dynamic=buckets,mode=reduce-overhead")


def record(trial_id: str = "001-abcdef", **fields: Any) -> TrialRecord:
    """A measured trial, with these fields changed."""
    measured = {
        "status": Status.OK,
        "wall_s": 61.5,
        "compile_s": 54.25,
        "step_ms_ci95": (81.0, 82.5),
        "samples_per_s": 781.0,
        "samples_per_s_ci95": (779.5, 782.5),
        "peak_memory_bytes": 18 * 2**30,
        "numerics": {"status": "ok", "loss": {"gap": 0.001, "tolerance": 0.01}, "first_bad_step": None},
        "speedup_eager_ci95": (1.2, 1.4),
        "compile_phases_s": {"dynamo": 2.5},
        "contended": True,
        "graph_break_reasons": ["call_method <x> & 'y'"],
        "step_ms": [81.5, 82.0],
    }
    return TrialRecord(trial_id=trial_id, settings=SETTINGS.to_dict(), settings_key=SETTINGS.key, **{**measured, **fields})


def strictly(line: str) -> Any:
    """Parses JSON without NaN and Infinity, which Python's parser accepts."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"a bare {name}"))


def test_a_record_is_read_back_as_it_was_written() -> None:
    written = record(label=Label.NAN, status=Status.INFEASIBLE, caches=Caches.WARM, reason="the loss is not finite")
    again = TrialRecord.from_json(written.to_json())
    assert again == written
    assert (type(again.status), type(again.caches), type(again.step_ms_ci95)) == (Status, Caches, tuple)
    assert (again.speedup_eager_ci95, again.contended, again.compile_phases_s) == ((1.2, 1.4), True, {"dynamo": 2.5})


def test_a_record_that_says_failed_for_noise_alone_is_read_as_ok() -> None:
    now = json.loads(record(stable=False).to_json())
    before = now | {"status": "failed", "label": "unstable", "reason": "its steps are too noisy to rank"}
    assert TrialRecord.from_json(json.dumps(before)) == TrialRecord.from_json(json.dumps(now))
    other = TrialRecord.from_json(json.dumps(before | {"label": "gpu-shared"}))
    assert (other.status, other.label, other.reason) == (Status.FAILED, "gpu-shared", before["reason"])


def test_a_line_holds_every_field_and_the_schema_version() -> None:
    values = strictly(record().to_json())
    assert values.keys() == {field.name for field in dataclasses.fields(TrialRecord)} | {"schema_version"}
    assert values["schema_version"] == SCHEMA_VERSION


def test_fields_a_record_need_not_have_are_filled_in() -> None:
    short = {
        "schema_version": SCHEMA_VERSION,
        "trial_id": "1",
        "settings": {"scope": "eager"},
        "settings_key": CompileSettings.parse("scope=eager").key,
        "status": "failed",
    }
    again = TrialRecord.from_json(json.dumps(short))
    assert (again.caches, again.compile_s, again.step_ms) == (Caches.COLD, None, [])
    assert again.settings == CompileSettings.parse("scope=eager").to_dict()


def test_a_step_may_be_a_quadrillion_floating_point_operations_and_more() -> None:
    assert why_impossible(record(device_use={"flops_per_step": 6e15})) is None


def test_every_field_of_a_measurement_is_recorded() -> None:
    from compile_sweep.schema.record import Measurement

    measured = {field.name for field in dataclasses.fields(Measurement)}
    assert measured <= {field.name for field in dataclasses.fields(TrialRecord)}


NESTED = (
    "scope=modular,parts.encoder.mode=max-autotune,parts.decoder.compile=off,inductor.max_fusion_size=32,"
    "inductor.triton.unique_kernel_names=on"
)


@pytest.mark.parametrize("spelled", [NESTED, "dynamic=buckets,buckets=4/8/16,group_window=10,fullgraph=on,autocast=off"])
def test_settings_that_are_lists_and_objects_are_read_back(spelled: str) -> None:
    chosen = CompileSettings.parse(spelled)
    again = TrialRecord.from_json(
        TrialRecord(trial_id="1", settings=chosen.to_dict(), settings_key=chosen.key, status=Status.FAILED).to_json()
    )
    assert CompileSettings.from_dict(again.settings) == chosen
    assert again.settings == chosen.to_dict()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null_wherever_it_stands(number: float) -> None:
    line = record(
        compile_s=number,
        samples_per_s_ci95=(number, 1.0),
        numerics={"status": "nan", "loss_gap": number, "deep": [{"er": number}]},
        step_ms=[1.0, number],
    ).to_json()
    values = strictly(line)
    assert values["compile_s"] is None
    assert values["samples_per_s_ci95"] == [None, 1.0]
    assert values["numerics"] == {"status": "nan", "loss_gap": None, "deep": [{"er": None}]}
    assert values["step_ms"] == [1.0, None]


def test_an_upper_end_that_nothing_bounds_is_null_in_a_line_and_infinite_when_it_is_read() -> None:
    line = record(samples_per_s_ci95=(204.5, math.inf), step_ms_ci95=(math.nan, math.nan)).to_json()
    assert strictly(line)["samples_per_s_ci95"] == [204.5, None]
    again = TrialRecord.from_json(line)
    assert (again.samples_per_s_ci95, again.step_ms_ci95) == ((204.5, math.inf), None)
    assert again.to_json() == line.replace('"step_ms_ci95":[null,null]', '"step_ms_ci95":null')


HOSTILE = st.text() | st.sampled_from(["a\nb\r\nc", "\u2028\u2029\x85\x0b\x0c", '"}\n{"', "\x00\x1b[31m", "×…😀", "NaN", "\\"])


@given(text=HOSTILE, number=st.floats())
@settings(deadline=None)
def test_any_text_and_number_stay_one_line_and_survive(text: str, number: float) -> None:
    written = record(reason=text, recompile_reasons=[text], numerics={text: text}, bounds={"compile_s": number})
    line = written.to_json()
    assert "\n" not in line
    assert "\r" not in line
    strictly(line)
    assert json.loads(line)["reason"] == text
    if why_impossible(written) is None:
        again = TrialRecord.from_json(line)
        assert (again.reason, again.recompile_reasons, again.numerics) == (text, [text], {text: text})


@given(numbers=st.lists(st.floats(), min_size=4, max_size=4), times=st.lists(st.floats(allow_nan=False, allow_infinity=False)))
@settings(deadline=None)
def test_any_figure_is_read_back_as_it_was_or_refused_in_one_line(numbers: list[float], times: list[float]) -> None:
    one, low, high, bound = numbers
    written = record(compile_s=one, step_ms_ci95=(low, high), bounds={"compile_s": bound}, wall_s=sum(times[:1]), step_ms=times)
    if why_impossible(written) is not None:
        with suppress(RecordsError):  # a number that is not finite becomes null, and the rest may then be possible
            TrialRecord.from_json(written.to_json())
        return
    again = TrialRecord.from_json(written.to_json())
    assert again.step_ms == times
    if all(map(math.isfinite, numbers)):
        assert (again.compile_s, again.step_ms_ci95, again.bounds) == (one, (low, high), {"compile_s": bound})


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "a negative rate": ({"samples_per_s": -5.0}, "samples_per_s is -5,"),
    "a rate of nothing": ({"samples_per_s": 0.0, "samples_per_s_ci95": None}, "above 0"),
    "a step that takes no time": ({"step_ms_median": 0.0, "step_ms_ci95": None}, "above 0"),
    "a huge rate": ({"samples_per_s": 1e308}, "from 0 to 1e+15"),
    "a huge drift": ({"clock_drift": 1e308}, "clock_drift is 1e+308"),
    "a ratio below any that is measured": ({"speedup_eager": 5e-324}, "above 0"),
    "a negative step": ({"step_ms": [1.0, -1.0]}, "step_ms is -1"),
    "a negative wall time": ({"wall_s": -1.0}, "wall_s is -1"),
    "a negative size": ({"peak_memory_bytes": -1}, "peak_memory_bytes is -1"),
    "a negative count": ({"graphs": -1}, "graphs is -1"),
    "no workers": ({"num_workers": 0}, "num_workers is 0"),
    "workers without end": ({"num_workers": 10**9}, "num_workers is 1e+09"),
    "a share above one": ({"cpu_pressure": 1.5}, "from 0 to 1"),
    "a gap that is too large to divide": ({"numerics": {"loss": {"gap": 1e300, "tolerance": 0.1}}}, "numerics is 1e+300"),
    "a figure outside of its interval": ({"samples_per_s": 99_999.0}, "outside of its interval"),
    "an interval from high to low": ({"speedup_eager_ci95": (1.4, 1.2)}, "lower end must come first"),
    "a key of other settings": ({"settings_key": "scope=eager"}, "the key of its settings is"),
    "ok without figures": ({"samples_per_s": None}, "status is ok, and yet it has no samples_per_s"),
    "ok with a rate that is not finite": ({"samples_per_s": math.inf, "samples_per_s_ci95": None}, "it has no samples_per_s"),
    "ok with a label": ({"label": "nan"}, "status is ok, and yet its label is 'nan'"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_record_that_cannot_be_true_is_refused_with_what_is_wrong(tmp_path: Path, name: str) -> None:
    changes, complaint = IMPOSSIBLE[name]
    append(tmp_path, record("1"))
    impossible = replace(record("2"), **changes)
    with pytest.raises(RecordsError, match=re.escape(complaint)):
        append(tmp_path, impossible)
    assert [one.trial_id for one in read(tmp_path)] == ["1"], "nothing was written"
    with (tmp_path / TRIALS_FILE).open("a") as log:
        log.write(impossible.to_json() + "\n")
    with pytest.raises(RecordsError) as error:
        read(tmp_path)
    assert f"{TRIALS_FILE} line 2 is not a trial record" in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trial_that_is_recorded_twice_is_refused_by_line(tmp_path: Path) -> None:
    for name in ("1", "2"):
        append(tmp_path, record(name))
    with (tmp_path / TRIALS_FILE).open("a") as log:
        log.write(record("1").to_json() + "\n")
    with pytest.raises(RecordsError, match=r"line 3 repeats the trial_id '1' of line 1; remove one of the two"):
        read(tmp_path)


@pytest.mark.parametrize(("name", "theirs"), [("workload", "detection"), ("size", "large")])
def test_a_record_of_another_workload_is_refused_rather_than_counted(tmp_path: Path, name: str, theirs: str) -> None:
    (tmp_path / SWEEP_FILE).write_text(json.dumps({"config": {"workload": "captioning", "size": "base"}}))
    append(tmp_path, record("1", workload="captioning", size="base"))
    append(tmp_path, record("2", **{"workload": "captioning", "size": "base", name: theirs}))
    with pytest.raises(RecordsError, match=rf"line 2 is not a record of this sweep: its {name} is '{theirs}', and the sweep's"):
        read(tmp_path)


@pytest.mark.parametrize("cluster", [{}, {"cluster": False}])
def test_a_record_of_another_environment_is_refused_rather_than_counted(tmp_path: Path, cluster: dict[str, bool]) -> None:
    (tmp_path / SWEEP_FILE).write_text(json.dumps({"environment_key": "here", **cluster}))
    append(tmp_path, record("1", environment_key="here"))
    append(tmp_path, record("2", environment_key=None))  # it failed before a worker could say where it ran
    assert len(read(tmp_path)) == 2
    append(tmp_path, record("3", environment_key="elsewhere"))
    with pytest.raises(RecordsError, match=r"line 3 was measured in another environment .*'elsewhere' instead of here.*remove"):
        read(tmp_path)


@pytest.mark.parametrize("sweep", [{"environment_key": "head", "cluster": True}, {"environment_key": "head"}, {}])
def test_hosts_of_a_cluster_may_have_different_environments(tmp_path: Path, sweep: dict[str, object]) -> None:
    (tmp_path / SWEEP_FILE).write_text(json.dumps(sweep))
    for name in ("one", "other"):
        append(tmp_path, record(name, environment_key=name))
    assert len(read(tmp_path)) == 2


@pytest.mark.parametrize("sweep", ["", "[]", "{", '{"config": 5}', "null"])
def test_records_beside_a_damaged_sweep_json_are_read(tmp_path: Path, sweep: str) -> None:
    (tmp_path / SWEEP_FILE).write_text(sweep)
    append(tmp_path, record("1", workload="captioning"))
    assert len(read(tmp_path)) == 1


def test_text_that_is_no_unicode_can_be_recorded(tmp_path: Path) -> None:
    undecodable = b"/data/caf\xe9".decode(errors="surrogateescape")  # how Python represents a file name that is not UTF-8
    append(tmp_path, record(reason=f"no such file: {undecodable}"))
    (again,) = read(tmp_path)
    assert again.reason is not None
    assert again.reason.startswith("no such file: /data/caf")


def test_a_log_holds_hostile_text_line_by_line(tmp_path: Path) -> None:
    reasons = ["a\nb", "c\u2028d", "e\x85f", "g\r\nh"]
    for number, reason in enumerate(reasons):
        append(tmp_path, record(str(number), reason=reason))
    assert [r.reason for r in read(tmp_path)] == reasons
    assert (tmp_path / TRIALS_FILE).read_bytes().count(b"\n") == len(reasons)


def changed(**values: Any) -> str:
    """Returns a record's line with these values."""
    return json.dumps({**json.loads(record().to_json()), **values})


def without(name: str) -> str:
    """Returns a record's line without a field."""
    return json.dumps({key: value for key, value in json.loads(record().to_json()).items() if key != name})


def endless(**values: Any) -> str:
    """Returns a record's line with these values, with infinities as overflowing numbers."""
    return changed(**values).replace("Infinity", "1e999")


ENDLESS: dict[str, dict[str, Any]] = {
    "time that every trial has": {"wall_s": math.inf},
    "figure": {"mean_length": math.inf},
    "end of an interval": {"step_ms_ci95": [1.0, math.inf]},
    "step": {"step_ms": [1.0, -math.inf]},
    "phase": {"compile_phases_s": {"dynamo": math.inf}},
    "gap of the check": {"numerics": {"loss": {"gap": math.inf}}},
}

DAMAGED = [
    ("half a line", record().to_json()[:200], "not a whole JSON object"),
    ("an empty line", "", "not a whole JSON object"),
    ("two records in one line", record().to_json() * 2, "not a whole JSON object"),
    ("a list", "[1, 2]", "not a JSON object"),
    ("an older version", changed(schema_version=1), "schema version 1, and this version reads 2"),
    ("no version", without("schema_version"), "schema version None"),
    ("an unknown field", changed(colour="red"), "unknown field 'colour'"),
    ("a missing field", without("trial_id"), "not a trial record"),
    ("no settings", without("settings"), "not a trial record"),
    ("an unknown status", changed(status="splendid"), "not a trial record"),
    ("unknown caches", changed(caches="tepid"), "not a trial record"),
    ("settings that cannot be", changed(settings={"scope": "eager", "mode": "default"}), "not a trial record"),
    ("settings that are none", changed(settings=7), "not a trial record"),
    ("a part that is none", changed(settings={"scope": "modular", "parts": {"encoder": 7}}), "not a trial record"),
    ("parts that are none", changed(settings={"scope": "modular", "parts": 7}), "not a trial record"),
    ("options that are none", changed(settings={"options": [1]}), "not a trial record"),
    ("buckets that are none", changed(settings={"dynamic": "buckets", "buckets": {"a": None}}), "not a trial record"),
    ("an interval of one", changed(step_ms_ci95=[1.0]), "not a trial record"),
    ("a bare NaN", changed(wall_s=math.nan), "not a whole JSON object"),
    ("words for a number", changed(wall_s="soon"), "not a trial record"),
    ("words for a count", changed(graphs="many"), "not a trial record"),
    ("words for an interval", changed(step_ms_ci95=["1", "2"]), "step_ms_ci95 is ['1', '2']"),
    ("null for a list", changed(step_ms=None), "not a trial record"),
    ("null for a time that every trial has", changed(wall_s=None), "wall_s is None"),
    ("null for a step", changed(eager_step_ms=[None, 1.0]), "eager_step_ms is [None, 1.0]"),
    ("null for a worker's memory", changed(peak_memory_bytes_by_rank=[None]), "peak_memory_bytes_by_rank is [None]"),
    *((f"no finite {what}", endless(**values), "inf") for what, values in ENDLESS.items()),
    ("a number for a name", changed(trial_id=5), "not a trial record"),
    ("a number for a switch", changed(contended=1), "not a trial record"),
]


@pytest.mark.parametrize(("line", "complaint"), [d[1:] for d in DAMAGED], ids=[d[0] for d in DAMAGED])
def test_a_damaged_line_is_named_with_how_many_before_it_are_intact(tmp_path: Path, line: str, complaint: str) -> None:
    append(tmp_path, record("1"))
    append(tmp_path, record("2"))
    log = tmp_path / TRIALS_FILE
    damaged = log.read_bytes() + line.encode() + b"\n"
    log.write_bytes(damaged)
    with pytest.raises(RecordsError) as error:
        read(tmp_path)
    sentence = str(error.value)
    assert f"{log} line 3 is not a trial record" in sentence
    assert complaint in sentence
    assert "the 2 lines before it are intact" in sentence
    assert len(sentence.splitlines()) == 1
    assert log.read_bytes() == damaged


def test_a_damaged_line_in_the_middle_is_named_too(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    with (tmp_path / TRIALS_FILE).open("a") as log:
        log.write("garbage\n")
    append(tmp_path, record("3"))
    with pytest.raises(RecordsError, match=r"line 2 is not a trial record.*the line before it is intact"):
        read(tmp_path)


def warm_start(**fields: Any) -> WarmStart:
    """A start that succeeded, with these fields changed."""
    measured = {"status": Status.OK, "warm_start_s": 3.5, "restore_s": 0.5, "compile_phases_s": {"dynamo": 1.0}, "cache_hits": 3}
    known = {"trial_id": "9", "settings": SETTINGS.to_dict(), "settings_key": SETTINGS.key}
    return WarmStart(**{**known, **measured, **fields})


def test_a_warm_start_is_read_back_from_a_log_of_its_own(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    append(tmp_path, warm_start())
    append(
        tmp_path,
        warm_start(trial_id="10", status=Status.FAILED, warm_start_s=None, label=Label.NOT_WARM, reason="nothing was there"),
    )
    assert [r.trial_id for r in read(tmp_path)] == ["1"]
    ok, failed = read_warm_starts(tmp_path)
    assert ok == warm_start()
    assert (failed.status, failed.label, failed.warm_start_s) == (Status.FAILED, "not-warm", None)


@pytest.mark.parametrize("line", ['{"schema_version": 2}', record().to_json(), warm_start().to_json()[:-4]])
def test_a_damaged_warm_start_is_named(tmp_path: Path, line: str) -> None:
    append(tmp_path, warm_start())
    with (tmp_path / WARM_STARTS_FILE).open("a") as log:
        log.write(line + "\n")
    with pytest.raises(RecordsError, match=rf"{WARM_STARTS_FILE} line 2 is not a warm-start.*the line before it is intact"):
        read_warm_starts(tmp_path)


def test_a_record_from_before_artifacts_were_shared_loads() -> None:
    caching = [name for name in json.loads(record().to_json()) if name.startswith("cache_")]
    old = {k: v for k, v in json.loads(record().to_json()).items() if k not in (*caching, "restore_s", "publish_s")}
    del old["cold_equivalent_s"]
    again = TrialRecord.from_json(json.dumps(old))
    assert (again.caches, again.cache_hits, again.cold_equivalent_s, again.cache_made) == (Caches.COLD, None, None, None)
    assert again == record()


def test_of_a_setting_the_latest_cold_record_counts_and_a_warm_one_only_without_it() -> None:
    cold, warm = record("1"), record("2", caches=Caches.WARM)
    later_cold, later_warm = record("3", status=Status.FAILED), record("4", caches=Caches.WARM)
    assert standing([cold, warm]) == {SETTINGS.key: cold}
    assert standing([warm, cold, later_warm]) == {SETTINGS.key: cold}
    assert standing([cold, later_cold, later_warm]) == {SETTINGS.key: later_cold}
    assert standing([warm, later_warm]) == {SETTINGS.key: later_warm}
    assert standing([]) == {}


def test_an_attempt_that_the_machines_ended_counts_only_where_there_is_no_other() -> None:
    cold, warm = record("1"), record("2", caches=Caches.WARM)
    lost, lost_again = (record(name, status=Status.FAILED, label="node-lost") for name in ("3", "4"))
    assert standing([cold, lost]) == standing([lost, cold]) == {SETTINGS.key: cold}
    assert standing([warm, lost]) == standing([lost, warm]) == {SETTINGS.key: warm}
    assert standing([lost, lost_again]) == {SETTINGS.key: lost_again}


def test_a_line_that_names_a_field_twice_is_refused(tmp_path: Path) -> None:
    line = record("1").to_json()
    (tmp_path / TRIALS_FILE).write_text(line[:-1] + ',"reason":"","reason":"x"}\n')
    with pytest.raises(
        RecordsError, match=r"line 1 is not a trial record: .*'reason' stands there twice.*; its trial runs again"
    ):
        read(tmp_path)
