"""What to do, in words: one set of sentences for the end of a sweep, its report, `recommend` and `best.py`.

The report's script fills in the same sentences for the job that its reader chooses.
"""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from analysis.choose.break_even import Starts, batch_size_of
from analysis.choose.decision import Decision, Line, Outcome, step_saving
from analysis.choose.uncertainty import chance
from analysis.formatting import duration, durations, gib, percent, whole
from compile_sweep.schema.outcome import MAX_DATA_WAIT_SHARE, SCRIPT_PIPELINE
from compile_sweep.schema.record import largest_fitting
from compile_sweep.schema.settings import CompileSettings

SENTENCES = {
    "use": "Use “{setting}”.",
    "use_why": "For {job}, it saves {saved} of {whole}, or {share} (95%: {low} to {high}), against {baseline}; "
    "the probability that it saves anything is {probability}.",
    "use_bound": "It is the fastest setting that meets the constraints; {baseline} does not meet them.",
    "stay": "Stay with {baseline}.",
    "stay_alone": "No other setting that was tried is both usable and faster.",
    "untried": "Cannot tell whether any setting is faster than {baseline}.",
    "untried_why": "No other setting was tried, or its trial failed for a reason that may not be the setting's. What would tell: "
    "a sweep in which one is measured, or the rest of this one (--resume).",
    "stay_loses": "For {job}, it takes {whole}; the closest alternative, “{setting}”, takes {lost} longer "
    "(95%: {least} to {most}).",
    "stay_negligible": "For {job}, the best other setting, “{setting}”, saves less than 1% of {whole} (95%: {low} to {high}).",
    "unclear": "Cannot tell whether “{setting}” is faster than {baseline}.",
    "unclear_why": "For {job}, it saves {low} to {high} of {whole} (95%); the probability that it saves anything is "
    "{probability}.",
    "unclear_longer": "What would tell: a job of {steps} steps or more, in which it certainly saves time; or measuring both "
    "again on an otherwise idle machine.",
    "unclear_again": "What would tell: measuring both again on an otherwise idle machine; a longer job would not, because a "
    "step saves {step_saves} (95%).",
    "unknown": "Cannot tell what “{setting}” gains.",
    "unknown_why": "No eager trial is usable; among the others it is the fastest for {job}. What would tell: an eager "
    "trial (--settings scope=eager).",
}

TILES = {
    "Saves": ("{share}", "{saved} of {whole} (95%: {low} to {high}) against {baseline}"),
    "Takes": ("{total}", "including {starts} for starting and compiling"),
    "Memory": ("{memory}", "{memory_more}"),
    "Real": ("{probability}", "probability that it saves anything"),
}
"""The decision at a glance: caption → figure, and the text below it."""

MEMORY_MORE = "{more} GiB against {baseline}"

OTHER_BATCH = (
    "It trains on batches of {own} samples instead of {usual}, which changes the training: times are for the same number of "
    "samples, and the learning rate has to be chosen again."
)
OTHER_BATCH_OF_INFERENCE = "It takes batches of {own} samples instead of {usual}; times are for the same number of samples."
LARGEST_BATCH = "Batches of up to {largest} samples fit the device's memory with it."
WAITS = (
    "Times are without the wait for data, which is {share} of a step of the script as it is. No setting shortens it, so the "
    "share that is saved of the whole is smaller."
)
SAME_BATCH = "It splits each batch into {parts} parts, so a step still trains on {usual} samples."

STARTS = {
    Starts.COLD: "with cold compile caches",
    Starts.FIRST_COLD: "with warm compile caches after restarts",
    Starts.WARM: "with warm compile caches",
}

AS_WRITTEN = "the script as it is"


def sentence_names(found: Decision) -> list[str]:
    """Returns the names of the sentences that say what to do, why, and, if that is not clear, what would tell."""
    saving = found.saving
    if saving is None:
        if found.baseline is None:
            return ["unknown", "unknown_why"]
        return ["stay", "stay_alone"] if found.outcome is Outcome.STAY else ["untried", "untried_why"]
    if found.outcome is Outcome.USE:
        return ["use", "use_why" if saving.low_s > 0 else "use_bound"]
    if found.outcome is Outcome.STAY:
        return ["stay", "stay_loses" if saving.high_s <= 0 else "stay_negligible"]
    return ["unclear", "unclear_why", "unclear_again" if found.clear_from_steps is None else "unclear_longer"]


def saving_words(found: Decision, lines: Sequence[Line], steps: int) -> dict[str, str]:
    """Returns the values of placeholders for times; empty if nothing is compared."""
    saving = found.saving
    if saving is None or found.setting is None or found.baseline is None:
        return {}
    setting, baseline = lines[found.setting], lines[found.baseline]
    step_low, step_high = step_saving(setting, baseline)
    saved, low, high = durations(saving.saved_s, saving.low_s, saving.high_s)
    lost, least, most = durations(-saving.saved_s, -saving.high_s, -saving.low_s)
    return {
        "whole": duration(baseline.total_s(steps)),
        "total": duration(setting.total_s(steps)),
        "starts": duration(setting.fixed_s),
        **{"saved": saved, "low": low, "high": high},
        **{"lost": lost, "least": least, "most": most},
        "share": minus(percent(saving.share)),
        "probability": chance(saving.probability),
        "steps": "" if found.clear_from_steps is None else whole(rounded_up(found.clear_from_steps)),
        "step_saves": minus(f"{percent(step_low)} or more" if step_high == 1 else f"{percent(step_low)} to {percent(step_high)}"),
    }


def on_batches(trial: pd.Series, today: pd.Series | None) -> str:
    """Says how a setting changes the training batches, how large they may be, and whether steps wait for them; may be empty."""
    largest = largest_fitting(trial["batch_peak_bytes"])
    larger = LARGEST_BATCH.format(largest=largest) if largest else ""
    return " ".join(filter(None, (_other_batches(trial, today), larger, _waits(today))))


def _waits(today: pd.Series | None) -> str:
    if today is None or today["pipeline"] is pd.NA or today["pipeline"] != SCRIPT_PIPELINE:
        return ""
    share = today["data_wait_share"]
    return "" if pd.isna(share) or share <= MAX_DATA_WAIT_SHARE else WAITS.format(share=f"{share:.0%}")


def _other_batches(trial: pd.Series, today: pd.Series | None) -> str:
    setting = CompileSettings.parse(str(trial["settings_key"]))
    if today is None:
        return ""
    is_asked_alike = setting.batch_size == CompileSettings.parse(str(today["settings_key"])).batch_size
    usual = batch_size_of(today)
    own = usual if is_asked_alike else batch_size_of(trial)
    if own is None or usual is None:
        return ""
    if own != usual:
        numerics = trial["numerics"]
        infers = isinstance(numerics, Mapping) and numerics.get("outputs") is not None
        return (OTHER_BATCH_OF_INFERENCE if infers else OTHER_BATCH).format(own=own, usual=usual)
    return SAME_BATCH.format(parts=setting.accumulate, usual=usual) if setting.accumulate else ""


def memory_words(setting_bytes: float | None, baseline_bytes: float | None, baseline: str) -> dict[str, str]:
    """Returns the values of placeholders for memory."""
    more = ""
    if setting_bytes is not None and baseline_bytes is not None:
        gibs = round((setting_bytes - baseline_bytes) / 2**30, 1) + 0.0  # avoids −0.0
        more = MEMORY_MORE.format(more=minus(f"{gibs:+.1f}"), baseline=baseline)
    return {"memory": gib(setting_bytes), "memory_more": more}


def words_of_baseline(settings_key: str, setting_name: str) -> str:
    """Describes what is run today, like `A1 (eager, fused optimizer)`."""
    if CompileSettings.parse(settings_key).as_written:
        return AS_WRITTEN
    own, _, words = setting_name.partition(" ")
    return f"{own} ({words})"


def minus(words: str) -> str:
    """Formats a figure with the minus sign that is as wide as a plus."""
    return words.replace("-", "−")


def rounded_up(steps: int) -> int:
    """Rounds a count up to two digits."""
    unit = int(10 ** max(0, math.floor(math.log10(steps)) - 1))
    return math.ceil(steps / unit) * unit
