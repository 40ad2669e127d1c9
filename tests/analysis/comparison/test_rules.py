"""Rules of `analysis.compare --fail-on`: what breaks one, what passes, and the exit code."""

from __future__ import annotations

import pytest
from sweep_folders import FULL, REGIONAL, MakeTwo, compared, trial

from analysis.compare import main
from analysis.comparison.changes import Kind
from analysis.comparison.rules import Rule, check
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord


@pytest.mark.parametrize(
    ("rule", "compile_s", "samples_per_s", "fails"),
    [
        ("compile_s>+15%", 90, 800, True),
        ("compile_s>+15%", 64, 800, False),
        ("compile_s>+5%", 64, 800, False),  # beyond the limit, within noise
        ("compile_s>+20", 90, 800, True),
        ("compile_s>+40", 90, 800, False),
        ("compile_s>1min", 90, 800, True),
        ("compile_s>2min", 90, 800, False),
        ("samples_per_s<-3%", 60, 700, True),
        ("samples_per_s<-3%", 60, 900, False),
        ("samples_per_s<750", 60, 700, True),
        ("peak_memory_bytes>10GiB", 60, 800, True),
        ("peak_memory_bytes>20GiB", 60, 800, False),
        ("graph_breaks>0", 60, 800, False),
    ],
)
def test_rules(two: MakeTwo, rule: str, compile_s: float, samples_per_s: float, fails: bool) -> None:
    found = compared(two([trial(FULL, 800, 60)], [trial(FULL, samples_per_s, compile_s)]))
    assert any(finding.fails for finding in check(found, [Rule.parse(rule)])) == fails


def test_beyond_the_limit_but_within_noise_is_said_and_passes(two: MakeTwo) -> None:
    found = compared(two([trial(FULL, 800, 60)], [trial(FULL, 800, 64)]))
    (finding,) = check(found, [Rule.parse("compile_s>+5%")])
    assert not finding.fails
    assert "within noise" in finding.sentence


@pytest.mark.parametrize("name", ["samples_per_s", "samples_per_s_per_worker", "tokens_per_s"])
def test_what_is_a_multiple_of_the_throughput_has_its_interval(two: MakeTwo, name: str) -> None:
    def known_to_7_percent(rate: float) -> TrialRecord:
        return trial(FULL, rate, 60, samples_per_s_per_worker=rate, samples_per_s_ci95=(0.93 * rate, 1.07 * rate))

    found = compared(two([known_to_7_percent(800)], [known_to_7_percent(760)]))
    (finding,) = check(found, [Rule.parse(f"{name}<-3%")])
    assert not finding.fails
    assert "(95%: −14.1% to +5.0%)" in finding.sentence


def test_what_broke_keeps_no_rule_about_its_figures(two: MakeTwo) -> None:
    broken = trial(REGIONAL, status=Status.INFEASIBLE, label="compile-deadline", reason="too long")
    found = compared(two([trial(FULL, 800, 60), trial(REGIONAL, 700, 20)], [trial(FULL, 800, 60), broken]))
    (finding,) = check(found, [Rule.parse("samples_per_s<-3%")])
    assert finding.fails
    assert "compile-deadline" in finding.sentence
    assert check(found, [Rule.parse("failures")])[0].fails


@pytest.mark.parametrize("rule", ["samples_per_s<-3%", "compile_s>2min", "warm_start_s>+10%"])
def test_a_gate_fails_where_nothing_is_left_to_judge_by(two: MakeTwo, capsys: pytest.CaptureFixture[str], rule: str) -> None:
    broken = [trial(name, status=Status.FAILED, label="exception", reason="boom") for name in (FULL, REGIONAL)]
    folders = two([trial(FULL, 800, 60), trial(REGIONAL, 700, 20)], broken)
    assert main([*map(str, folders), "--fail-on", rule, "--fail-on", "failures"]) == 1
    assert capsys.readouterr().out.count(f"FAILS {rule}: ") == 2
    assert "The gate fails: 4 reasons" in (folders[1] / "compare.html").read_text()


def test_a_gate_fails_where_every_setting_lost_its_figure(two: MakeTwo) -> None:
    found = compared(two([trial(FULL, 800, 60)], [trial(FULL, 800, 6, caches=Caches.WARM)]))
    (finding,) = check(found, [Rule.parse("compile_s>+15%")])
    assert finding.fails
    assert "no compile_s anymore" in finding.sentence


def test_what_was_usable_in_neither_judges_no_rule(two: MakeTwo) -> None:
    broken = [trial(FULL, status=Status.FAILED, label="exception", reason="boom")]
    found = compared(two(broken, broken))
    with pytest.raises(ConfigError, match="no setting has a figure for samples_per_s"):
        check(found, [Rule.parse("samples_per_s<-3%")])


def test_a_planned_setting_without_a_record_fails_also_where_nothing_else_is_left(two: MakeTwo) -> None:
    broken = trial(FULL, status=Status.FAILED, label="exception", reason="boom")
    planned = [broken.settings_key, trial(REGIONAL).settings_key]
    found = compared(two([broken, trial(REGIONAL, 700, 20)], [broken], planned=planned))
    (finding,) = check(found, [Rule.parse("samples_per_s<-3%")])
    assert finding.fails
    assert finding.sentence == "planned, but without a record"


def test_what_was_stopped_early_is_no_failure_but_keeps_no_rule_about_figures(two: MakeTwo) -> None:
    stopped = trial(REGIONAL, status=Status.STOPPED, label="dominated", reason="at best 100 samples/s")
    found = compared(two([trial(FULL, 800, 60), trial(REGIONAL, 700, 20)], [trial(FULL, 800, 60), stopped]))
    assert check(found, [Rule.parse("failures")]) == []
    assert [news.kind for news in found.pairs[1].news] == [Kind.OTHERWISE]
    (finding,) = check(found, [Rule.parse("samples_per_s<-3%")])
    assert finding.fails
    assert "stopped: dominated" in finding.sentence


def test_what_was_not_usable_before_breaks_no_rule(two: MakeTwo) -> None:
    bad = [trial(REGIONAL, 700, 20, status=Status.FAILED, label="gpu-shared", reason="others")]
    worse = [trial(REGIONAL, 300, 90, status=Status.FAILED, label="gpu-shared", reason="others")]
    found = compared(two([trial(FULL, 800, 60), *bad], [trial(FULL, 800, 60), *worse]))
    assert check(found, [Rule.parse("samples_per_s<-3%"), Rule.parse("failures")]) == []


def test_a_planned_setting_without_a_record_fails_once(two: MakeTwo) -> None:
    planned = [trial(FULL, 800, 60).settings_key, trial(REGIONAL, 700, 20).settings_key]
    folders = two([trial(FULL, 800, 60), trial(REGIONAL, 700, 20)], [trial(FULL, 800, 60)], planned=planned)
    findings = check(compared(folders), [Rule.parse("compile_s>+15%"), Rule.parse("samples_per_s<-3%")])
    assert [finding.sentence for finding in findings] == ["planned, but without a record"]


def test_a_figure_that_went_missing_fails(two: MakeTwo) -> None:
    after = [trial(FULL, 800, 6, caches=Caches.WARM), trial(REGIONAL, 700, 20)]
    found = compared(two([trial(FULL, 800, 60), trial(REGIONAL, 700, 20)], after))
    (finding,) = check(found, [Rule.parse("compile_s>+15%")])
    assert "no compile_s anymore" in finding.sentence


def test_a_rule_that_nothing_can_be_judged_by_is_refused(two: MakeTwo) -> None:
    found = compared(two([trial(FULL, 800, 60)], [trial(FULL, 800, 60)]))
    with pytest.raises(ConfigError, match="no setting has a figure for warm_start_s"):
        check(found, [Rule.parse("warm_start_s>+10%")])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("compile_s", "is not a rule"),
        ("compile_s>", "is not a rule"),
        ("compile_s>=+3%", "is not a rule"),
        ("compile>+3%", "did you mean compile_s"),
        ("failure", "is not a rule"),
        ("compile_s>15%", "does not say which way"),
        ("compile_s>3GiB", "is not a unit of compile_s"),
        (f"compile_s<+{'9' * 400}%", "too large for a number"),
    ],
)
def test_a_rule_that_is_none_is_refused(words: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Rule.parse(words)


@pytest.mark.slow
def test_the_gate_is_an_exit_code_with_reasons(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = two([trial(FULL, 800, 60)], [trial(FULL, 700, 60)])
    assert main([str(before), str(after), "--fail-on", "samples_per_s<-3%"]) == 1
    out = capsys.readouterr().out
    assert "FAILS samples_per_s<-3%: “full, default, static”: samples_per_s from 800 to 700, −12.5%" in out
    assert main([str(before), str(after), "--fail-on", "samples_per_s<-20%"]) == 0
    assert main([str(before), str(after)]) == 0
    assert main([str(after), str(before), "--fail-on", "samples_per_s<-3%"]) == 0
