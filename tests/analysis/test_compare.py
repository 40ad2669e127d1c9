"""`python -m analysis.compare`: what changed, what is noise, what breaks a rule, and the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from samples import REPOSITORY
from sweep_folders import EAGER, ENVIRONMENT, FULL, MODULAR, REGIONAL, MakeTwo, compared, trial

import analysis
from analysis.choose.uncertainty import RESIDENT, USUAL, noise
from analysis.compare import main
from analysis.comparison.change_text import cell_of, sentences
from analysis.comparison.changes import Kind, change, compare, mean_change
from analysis.comparison.rules import Rule, check
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord

pytestmark = pytest.mark.slow


def test_a_change_beyond_both_intervals_counts_and_one_within_does_not(two: MakeTwo) -> None:
    """Throughput is known to ±1%; compile times vary by about ±10% between runs."""
    found = compared(two([trial(FULL, 800, 60), trial(REGIONAL, 700, 20)], [trial(FULL, 780, 63), trial(REGIONAL, 640, 40)]))
    full, regional = found.pairs
    assert not full.changes["compile_s"].is_significant
    assert full.changes["samples_per_s"].is_significant == (800 / 780 > 1 + 1.96 * (2 * (0.0051**2 + 0.005**2)) ** 0.5)
    assert regional.changes["samples_per_s"].is_significant
    assert regional.changes["compile_s"].is_significant
    assert regional.changes["compile_s"].share == pytest.approx(1.0)
    low, high = regional.changes["compile_s"].low, regional.changes["compile_s"].high
    assert 0.6 < low < 1 < high < 1.5


def several(rate: float = 1.0, *, compiles: float = 1.0, runs: Sequence[float] = (1.0,)) -> list[TrialRecord]:
    """Eight settings whose throughput is known to ±1%, each run once per factor in `runs`."""
    return [
        trial(
            f"scope=full,inductor.epilogue_fusion={at}", (800 + 10 * at) * rate * run, (60 + at) * compiles / run,
            trial_id=f"{at}-{run}-{rate}", environment_key="same",
        )
        for run in runs
        for at in range(8)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "compiles"), [(0.97, 1.0), (1.0, 10.0)])
def test_a_change_of_all_settings_alike_is_no_noise(
    two: MakeTwo, capsys: pytest.CaptureFixture[str], rate: float, compiles: float
) -> None:
    """Each setting is once in both sweeps, in the same environment: the difference between the sweeps is the change itself."""
    folders = two(several(), several(rate, compiles=compiles))
    rule = "samples_per_s<-2%" if rate < 1 else "compile_s>+15%"
    assert main([*map(str, folders), "--fail-on", rule]) == 1
    assert capsys.readouterr().out.count(f"FAILS {rule}") == 8
    assert main([*map(str, reversed(folders)), "--fail-on", rule]) == 0
    frames = [analysis.load(folder) for folder in folders]
    name = rule[: rule.index("_s") + 2]
    assert all(pair.changes[name].is_significant for pair in compare(*frames).pairs), "nor without every attempt"


@pytest.mark.slow
def test_what_was_repeated_within_a_sweep_says_how_runs_scatter(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of one setting differ by 10% in A and in B, and the two sweeps by 5%, which is then insignificant."""
    folders = two(several(runs=(1.1, 1.0)), several(0.95, runs=(1.1, 1.0)))
    assert main([*map(str, folders), "--fail-on", "samples_per_s<-3%"]) == 0
    out = capsys.readouterr().out
    (told,) = [line for line in out.splitlines() if line.startswith("Noise between runs")]
    assert "samples/s 6.7%" in told
    assert "compile s 6.7%" in told
    assert told.endswith("(from 16 repeated measurements of the same code).")
    once = two(several(), several(0.95), name="once")
    assert main([*map(str, once), "--fail-on", "samples_per_s<-3%"]) == 1


def test_a_comparison_opens_with_whether_the_recommendation_changed(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    before = [trial(EAGER, 500, 0.5), trial(FULL, 900, 60), trial(REGIONAL, 700, 20)]
    slower = [trial(EAGER, 500, 0.5), trial(FULL, 600, 60), trial(REGIONAL, 700, 20)]
    for name, after, answer in (
        ("same", before, "is unchanged: use full, default, static."),
        ("other", slower, "changed from “use full, default, static” to “use regional, default, static”."),
    ):
        folders = two(before, after, name=name)
        assert main([*map(str, folders)]) == 0
        lead = f"For a job of 100,000 steps, the recommendation {answer}"
        assert capsys.readouterr().out.startswith(lead)
        page = (folders[1] / "compare.html").read_text()
        assert page.index(f'<p class="lead">{lead}</p>') < page.index("geometric mean")


@pytest.mark.slow
def test_a_repeat_of_the_first_sweep_says_how_runs_scatter(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight settings are 6% slower: a change if runs scatter by 0.5% as usual, but not if a repeat was 8% off."""
    before, after = map(str, two(several(), several(0.94)))
    again = [str(two(several(rate, compiles=0.9), several(), name=str(rate))[0]) for rate in (0.92, 1.08)]
    gate = [before, after, "--fail-on", "samples_per_s<-3%"]
    assert main(gate) == 1
    assert main([*gate, "--repeat", again[0], "--repeat", again[1]]) == 0
    told = capsys.readouterr().out
    assert "from 16 repeated measurements of the same code" in told
    assert "within noise" in told
    assert "FAILS" in told[: told.index("from 16")]
    assert "FAILS" not in told[told.index("from 16") :]


def test_both_recommendations_are_judged_by_the_noise_of_the_repeat(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = map(str, two(several(), several()))
    again = [str(two(several(rate), several(), name=str(rate))[0]) for rate in (0.3, 3.0)]
    assert main([before, after, "--repeat", again[0], "--repeat", again[1]]) == 0
    assert "the recommendation is unchanged" in capsys.readouterr().out


def test_a_repeat_is_another_sweep_of_the_same_work(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = map(str, two(several(), several()))
    other, _ = map(str, two(several(), several(), {"config": {"workload": "captioning", "size": "tiny"}}, name="tiny"))
    for repeat, complaint in (
        (before, f"--repeat {before} is named twice"),
        (after, f"--repeat {after} is named twice"),
        (other, "the sweeps are not of the same size (base and tiny)"),
        ("none", "there is no folder none"),
    ):
        assert main([before, after, "--repeat", repeat]) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1


@pytest.mark.slow
def test_the_text_the_table_and_the_page_say_where_the_noise_is_from(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    folders = two(several(), several())
    told = (
        "Noise between runs of one setting: samples/s 0.5%, compile s 5.0% (as usual on an H200, because too few settings were "
        "repeated with the same code); vs eager interleaved, peak memory (none is known)."
    )
    assert main([*map(str, folders)]) == 0
    assert told in capsys.readouterr().out
    assert main([*map(str, folders), "--markdown"]) == 0
    assert f"- {told}\n" in capsys.readouterr().out
    assert told in (folders[1] / "compare.html").read_text()


def test_memory_on_a_gpu_has_no_noise_so_any_change_of_it_counts(two: MakeTwo) -> None:
    more = trial(FULL, 800, 60, peak_memory_bytes=18 * 2**30 + 2**20)
    assert compared(two([trial(FULL, 800, 60)], [more])).pairs[0].changes["peak_memory_bytes"].is_significant


@pytest.mark.parametrize(("share", "counts"), [(0.0002, False), (0.013, False), (-0.013, False), (0.03, True), (-0.03, True)])
def test_memory_on_a_cpu_differs_between_runs(
    two: MakeTwo, capsys: pytest.CaptureFixture[str], share: float, counts: bool
) -> None:
    """On a CPU it is the process's resident size, which never repeats exactly."""
    before, after = (trial(FULL, 800, 60, device="cpu", peak_memory_bytes=round(2**30 * size)) for size in (1.0, 1 + share))
    folders = two([before], [after])
    rule = f"peak_memory_bytes{'>+' if share > 0 else '<-'}0%"
    assert main([*map(str, folders), "--fail-on", rule]) == counts
    assert "peak memory 0.5% (as usual on CPUs, because too few" in capsys.readouterr().out


def test_memory_on_a_cpu_scatters_as_the_sweep_itself_says(two: MakeTwo) -> None:
    def runs(size: float) -> list[TrialRecord]:
        return [
            trial(f"scope=full,inductor.epilogue_fusion={at}", 800, 60, device="cpu", trial_id=f"{at}-{run}-{size}",
                  peak_memory_bytes=round(2**30 * size * run))
            for run in (1.1, 1.0) for at in range(6)
        ]  # fmt: skip

    folders = two(runs(1.0), runs(1.05))
    attempts = (analysis.load(folders[0], all_attempts=True), analysis.load(folders[1], all_attempts=True))
    found = compare(*map(analysis.load, folders), attempts=attempts)
    assert found.noise["peak_memory_bytes"].relative == pytest.approx(0.0674, abs=0.0001)
    assert not any(pair.changes["peak_memory_bytes"].is_significant for pair in found.pairs)


def test_what_repeats_alike_scatters_by_nothing_at_all(two: MakeTwo) -> None:
    folders = two(several(runs=(1.0, 0.99)), several())
    found = noise([analysis.load(folder, all_attempts=True) for folder in folders], "peak_memory_bytes")
    assert (found.relative, found.repeats) == (0.0, 8)


def test_the_usual_memory_noise_on_a_cpu_is_that_of_the_committed_sweeps() -> None:
    """Each setting is in two or three of them, with equal versions; no sweep repeats a setting."""
    live = REPOSITORY / "docs" / "results" / "search" / "live-captioning-tiny-cpu"
    table = REPOSITORY / "benchmarks" / "tables" / "captioning-tiny-cpu"
    sweeps = [analysis.load(folder).query("status == 'ok'") for folder in (live / "gain", live / "random", table)]
    several = pd.concat(sweeps).groupby("settings_key")["peak_memory_bytes"]
    logarithms = [np.log(sizes.astype(float)) for _, sizes in several if len(sizes) > 1]
    freedom = sum(len(one) - 1 for one in logarithms)
    assert (len(logarithms), freedom) == (12, 14)
    squares = sum(((one - one.mean()) ** 2).sum() for one in logarithms)
    assert RESIDENT.relative == pytest.approx((squares / freedom) ** 0.5, rel=0.1)
    found = compare(analysis.load(live / "gain"), analysis.load(live / "random"))
    assert not any(
        pair.changes["peak_memory_bytes"].is_significant for pair in found.pairs if "peak_memory_bytes" in pair.changes
    )


@pytest.mark.parametrize("ends", [(0.0, 2.4), (0.01, 2.39), (0.0, float("inf"))])
def test_a_change_to_a_figure_that_may_be_next_to_anything_is_none(two: MakeTwo, ends: tuple[float, float]) -> None:
    before = trial(FULL, 800, 60, speedup_eager=1.3, speedup_eager_ci95=(1.29, 1.31))
    after = trial(FULL, 800, 60, speedup_eager=1.2, speedup_eager_ci95=ends, stable=False)
    assert not compared(two([before], [after])).pairs[0].changes["speedup_eager"].is_significant


def test_a_setting_that_broke_is_neither_better_nor_mended(two: MakeTwo) -> None:
    before = trial(FULL, 700, 60, graph_breaks=2)
    after = trial(FULL, 1400, 9, graph_breaks=0, status=Status.INFEASIBLE, label="diverges", reason="the loss is off")
    (pair,) = compared(two([before], [after])).pairs
    assert [news.kind for news in pair.news] == [Kind.FAILURE]
    assert cell_of("samples_per_s", pair).verdict == "same"
    (usable,) = compared(two([before], [trial(FULL, 1400, 9, graph_breaks=0)], name="usable")).pairs
    assert cell_of("samples_per_s", usable).verdict == "better"
    assert [news.kind for news in usable.news] == [Kind.FIXED]


def test_compile_times_near_zero_are_noise(two: MakeTwo) -> None:
    found = compared(two([trial(EAGER, 500, 0.3)], [trial(EAGER, 500, 0.9)]))
    assert not found.pairs[0].changes["compile_s"].is_significant
    from_zero = compared_series(0.0, 0.9)
    assert from_zero.share is None
    assert not from_zero.is_significant
    assert compared_series(0.0, 5.0).is_significant


@pytest.mark.parametrize("before", [1e-300, 0.0009, 0.002, 0.01, 0.9])
def test_a_compile_time_near_zero_is_compared_by_seconds(two: MakeTwo, capsys: pytest.CaptureFixture[str], before: float) -> None:
    """Eager compiles nothing and takes only a rounded 0 s, so a ratio has no meaning, and its interval no end."""
    found = compared_series(before, 0.8)
    assert not found.is_significant
    assert found.low is None
    assert compared_series(before, 5.0).is_significant
    assert compared_series(5.0, before).is_significant
    folders = two([trial(EAGER, 500, before), trial(FULL, 800, 60)], [trial(EAGER, 500, before + 0.79), trial(FULL, 800, 60)])
    assert main([*map(str, folders), "--fail-on", "compile_s>+15%"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"  compile s: [\d.]+ → [\d.]+, \+0\.790 s\n", out)
    assert re.search(r"passes .*compile_s from [\d.]+ to [\d.]+; within noise, so it does not fail", out)
    assert max(float(share.replace(",", "")) for share in re.findall(r"([\d.,]+)%", out)) < 100


@pytest.mark.parametrize("before", [0.0, 0.0009, 0.5])
def test_what_took_next_to_nothing_and_takes_seconds_breaks_a_rule(two: MakeTwo, before: float) -> None:
    found = compared(two([trial(EAGER, 500, before)], [trial(EAGER, 500, 20)]))
    (finding,) = check(found, [Rule.parse("compile_s>+15%")])
    assert finding.fails
    assert "%" not in finding.sentence


def test_a_count_that_was_0_is_beyond_any_share(two: MakeTwo) -> None:
    found = compared(two([trial(FULL, 800, 60, graph_breaks=0)], [trial(FULL, 800, 60, graph_breaks=2)]))
    assert [finding.fails for finding in check(found, [Rule.parse("graph_breaks>+10%"), Rule.parse("graph_breaks>+1")])] == [
        True
    ] * 2
    assert check(found, [Rule.parse("graph_breaks<-10%")]) == []
    assert check(compared(two(*[[trial(FULL, 800, 60)]] * 2, name="same")), [Rule.parse("graph_breaks>+0%")]) == []


def test_the_mean_of_compile_times_is_of_those_that_compile(two: MakeTwo) -> None:
    """Eager's 0.02 and 0.9 s would make it +114%."""
    before = [trial(EAGER, 500, 0.02), *several()[:4]]
    found = compared(two(before, [trial(EAGER, 500, 0.9), *several()[:4]]))
    assert mean_change(found.pairs, "compile_s") == 0
    told = {sentence.split(": ")[0]: sentence for sentence in sentences(found)}
    assert told["compile s"].startswith(
        "compile s: +0.0%, the geometric mean of 4 of the 5 settings usable in both, because 1 is too"
    )
    assert told["samples/s"].startswith("samples/s: +0.0%, the geometric mean of the 5 settings usable in both; beyond")


@pytest.mark.parametrize("before", [0.0, 0.02])
def test_without_a_setting_that_compiles_there_is_no_mean(two: MakeTwo, before: float) -> None:
    found = compared(two([trial(EAGER, 500, before)], [trial(EAGER, 500, 0.9)]))
    assert mean_change(found.pairs, "compile_s") is None
    assert (
        "compile s: no mean, because the one setting usable in both is too close to 0 for a ratio; "
        "beyond noise, 0 better, 0 worse." in sentences(found)
    )


def test_rates_that_no_machine_has_are_refused_and_no_crash(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    ends = (5e-324, 1e308)
    folders = two([trial(FULL, 500, 60)], [trial(FULL, 500, 60)])
    for folder, rate in zip(folders, (1e-200, 1e200), strict=True):  # not appended, which would refuse it
        line = trial(FULL, rate, 60, samples_per_s_ci95=ends, stable=False).to_json()
        (folder / "trials.jsonl").write_text(f"{line}\n")
    assert main([*map(str, folders), "--fail-on", "samples_per_s<-3%"]) == 2
    assert "trials.jsonl line 1 is not a trial record" in capsys.readouterr().err


def compared_series(before: float, after: float) -> Any:
    return change(pd.DataFrame({"compile_s": [before, after]}), "compile_s", USUAL)


def test_news_is_what_no_figure_says(two: MakeTwo) -> None:
    worse = trial(
        FULL, 800, 60, graph_breaks=2, graph_break_reasons=["print", "item"], recompiles=1, recompile_reasons=["length == 8"],
        fallbacks=["frame skipped"], cudagraph_skips=1, cudagraph_skip_reasons=["mutated inputs"], numerics={"status": "nan"},
    )  # fmt: skip
    broken = trial(REGIONAL, status=Status.FAILED, label="worker-died", reason="signal 9")
    fixed = trial(MODULAR, 700, 30)
    unwell = trial(MODULAR, status=Status.INFEASIBLE, label="nan", reason="NaN")
    before = [trial(FULL, 800, 60, graph_breaks=1, graph_break_reasons=["print"]), trial(REGIONAL, 700, 20), unwell]
    found = compared(two(before, [worse, broken, fixed]))
    full, regional, modular = found.pairs
    assert {news.kind for news in full.news} == {
        Kind.BREAK, Kind.RECOMPILE, Kind.FALLBACK, Kind.CUDAGRAPH_SKIP, Kind.NUMERICS,
    }  # fmt: skip
    assert next(news for news in full.news if news.kind is Kind.BREAK).sentence == "2 graph breaks, before 1; new: item"
    assert [news.kind for news in regional.news] == [Kind.FAILURE]
    assert "signal 9" in regional.news[0].sentence
    assert [news.kind for news in modular.news] == [Kind.FIXED]


def test_nothing_changed_is_no_news(two: MakeTwo) -> None:
    records = [trial(FULL, 800, 60), trial(REGIONAL, 700, 20)]
    found = compared(two(records, records))
    assert [pair.news for pair in found.pairs] == [[], []]
    assert all(one.share == 0 for pair in found.pairs for one in pair.changes.values())
    assert not found.circumstances


def test_circumstances_that_differ_are_named(two: MakeTwo) -> None:
    folders = two([trial(FULL, 800, 60)], [trial(FULL, 800, 60)], environment=ENVIRONMENT | {"torch": "2.14.0", "commit": "abc"})
    assert compared(folders).circumstances == [("torch", "2.13.0", "2.14.0"), ("commit", "—", "abc")]


def test_a_comparison_begins_with_the_torch_that_differs(two: MakeTwo, capsys: pytest.CaptureFixture[str]) -> None:
    records = [trial(EAGER, 500, 0.5), trial(FULL, 900, 60)]
    newer = ENVIRONMENT | {"torch": "2.15.0", "commit": "0123456789abcdef"}
    folders = two(records, records, environment=newer)
    said = ["B differs in torch (2.13.0 → 2.15.0) and commit (— → 0123456789).", "For a job of 100,000 steps"]
    assert main([*map(str, folders)]) == 0
    assert [line[: len(words)] for line, words in zip(capsys.readouterr().out.splitlines(), said, strict=False)] == said
    page = (folders[1] / "compare.html").read_text()
    assert page.index(said[0]) < page.index(said[1]) < page.index("geometric mean")
    assert main([*map(str, folders), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith(" ".join(said))


def test_eager_compiles_nothing_so_its_start_is_in_no_mean(two: MakeTwo) -> None:
    busy = [trial(EAGER, 500, 9.0), trial(FULL, 900, 60)]
    found = compared(two([trial(EAGER, 500, 2.0), trial(FULL, 900, 60)], busy))
    assert found.pairs[0].changes["compile_s"].is_ratio is False
    assert mean_change(found.pairs, "compile_s") == 0


def test_sweeps_of_other_workloads_or_other_settings_are_refused(two: MakeTwo) -> None:
    folders = two([trial(FULL, 800, 60)], [trial(FULL, 800, 60)], config={"workload": "captioning", "size": "tiny"})
    with pytest.raises(ConfigError, match=r"not of the same size \(base and tiny\)"):
        compared(folders)


def test_sweeps_without_a_common_setting_are_refused(two: MakeTwo) -> None:
    folders = two([trial(FULL, 800, 60)], [trial(FULL, 800, 60, num_workers=4)])
    with pytest.raises(ConfigError, match="no setting"):
        compared(folders)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fail-on", "nonsense"],
        ["--output", "no/such/folder/page.html"],
        ["--output", "/dev/null/page.html"],
        ["--output", ""],
        ["--output", "x" * 300],
        ["--output", "a\0b"],
        ["--wrong"],
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    two: MakeTwo, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    before, after = two([trial(FULL, 800, 60)], [trial(FULL, 700, 60)])
    assert main([str(before), str(after), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (".", "error: . is a folder; name a file with --output\n"),
        ("..", "error: .. is a folder; name a file with --output\n"),
        ("/", "error: / is a folder; name a file with --output\n"),
        ("b", "error: b is a folder; name a file with --output\n"),
        ("a/sweep.json/page.html", "error: a/sweep.json/page.html cannot be written (Not a directory); name another"),
        ("none/page.html", "error: none/page.html cannot be written (No such file or directory); name another"),
        (251 * "x" + ".html", "x.html cannot be written (File name too long); name another"),
        (300 * "x" + "/page.html", "x/page.html cannot be written (File name too long); name another"),
        ("a\0.html", "is not UTF-8 text"),
    ],
)
def test_a_page_that_cannot_be_written_is_one_sentence_and_leaves_nothing(
    two: MakeTwo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, output: str, complaint: str
) -> None:
    before, _ = two([trial(FULL, 800, 60)], [trial(FULL, 700, 60)])
    monkeypatch.chdir(before.parent)
    held = sorted(before.parent.rglob("*"))
    assert main(["a", "b", "--output", output]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert sorted(before.parent.rglob("*")) == held


def test_a_page_may_have_the_longest_name_there_is(two: MakeTwo) -> None:
    before, after = two([trial(FULL, 800, 60)], [trial(FULL, 700, 60)])
    page = before.parent / (250 * "x" + ".html")
    assert main([str(before), str(after), "--output", str(page)]) == 0
    assert "what changed" in page.read_text()


def test_a_folder_that_is_none_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_page_says_it_all_and_escapes_what_records_say(two: MakeTwo) -> None:
    hostile = "<script>alert(1)</script>"
    before = [trial(FULL, 800, 60), trial(REGIONAL, 700, 20)]
    after = [trial(FULL, 700, 90), trial(REGIONAL, status=Status.FAILED, label=hostile, reason=hostile)]
    folders = two(before, after, environment=ENVIRONMENT | {"gpu": hostile})
    assert main([*map(str, folders), "--fail-on", "samples_per_s<-3%"]) == 1
    page = (folders[1] / "compare.html").read_text()
    assert "The gate fails: 2 reasons" in page
    assert "−12.5%" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=", page), "it loads nothing"
    assert len(page) < 60_000


@pytest.mark.browser
def test_the_page_fits_and_has_no_errors(two: MakeTwo, browser: Any) -> None:
    records = [trial(EAGER, 500, 0.5), trial(FULL, 800, 60), trial(REGIONAL, 700, 20)]
    broken = trial(REGIONAL, status=Status.FAILED, label="worker-died", reason="/a/very/long/path" * 12)
    folders = two(records, [trial(EAGER, 510, 0.4), trial(FULL, 650, 90), broken])
    main(list(map(str, folders)))
    complaints: list[str] = []
    with browser.new_page() as page:
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: None if request.url.startswith("file:") else complaints.append(request.url))
        for width, theme, expected in ((390, "light", "rgb(31, 35, 40)"), (1280, "dark", "rgb(230, 233, 237)")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=theme)
            page.goto((folders[1] / "compare.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            heights = page.evaluate("[...document.querySelectorAll('thead th')].map(cell => cell.offsetHeight)")
            assert max(heights) < 80, "no heading is squeezed into a column of letters"
            assert page.evaluate("getComputedStyle(document.body).color") == expected
    assert complaints == []
