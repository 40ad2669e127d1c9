"""The recommended setting by length of the job as a table for a text. Markdown; no text of a record is mark-up."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.formatting import MISSING, cell, duration, figure, number, whole
from analysis.recommend import Gain, Recommendation, by_length
from analysis.uncertainty import chance


def recommendation_markdown(found: Sequence[Recommendation]) -> str:
    """A row for each job, then a line for each range of lengths with the setting that is the shortest in it.

    Args:
        found: one or more, of jobs that differ in their length alone.
    """
    has_price = any(number(one.trial["cost"]) is not None for one in found)
    headings = [
        "steps",
        "setting",
        "total (95 %)",
        "of it starts",
        "probable",
        "against the best eager",
        "against `torch.compile(model)`",
    ]
    headings += ["costs"] if has_price else []
    lines = [headings, ["--:", "---", *["--:"] * (len(headings) - 2)]]
    for one in found:
        trial = one.trial
        total = f"{duration(trial['total_s'])} ({duration(trial['total_s_low'])} to {duration(trial['total_s_high'])})"
        row = [whole(one.job.steps), cell(str(trial["settings_label"])), total, duration(trial["fixed_s"])]
        row += [chance(float(trial["best_probability"])), _gained(one.over_eager), _gained(one.over_plain)]
        lines.append([*row, *([figure(trial["cost"])] if has_price else [])])
    flips = [f"- {cell(line)}" for line in by_length(found[0])]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in lines), "", *flips]) + "\n"


def _gained(gain: Gain | None) -> str:
    if gain is None:
        return MISSING
    sign = "−" if gain.saved_s > 0 else "+"
    return f"{sign}{duration(abs(gain.saved_s))}, {sign}{100 * abs(gain.share):.1f} %"
