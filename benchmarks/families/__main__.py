"""Checks and sweeps the families and forms of this package by the command line, and writes the table in docs/workloads.md.

Background: a user brings a model by a function that makes it, one that makes a batch, and a loss where the model has none. The
table counts the lines of those and of the call that puts them together, not those of the model itself. Of each family,
`compile-sweep check` and then `compile-sweep sweep` run on the CPU, the sweep with three settings: eager, the whole model
compiled, and its repeated blocks compiled or, where it has none, the strategy for lengths that comes next. The back-end is
torch's `aot_eager`: it finds breaks and recompiles in a fraction of Inductor's time. Each family has a process of its own.

Output of `python -m benchmarks.families --output FILE [--jobs N]`: a JSON line for each family, as it ends, and, in a folder
beside the file, what the commands printed and the sweep's folder. What is in the file is not run again unless it is named.
`--table FILE` writes the table between two marks of a Markdown file. About 40 s of one core for each. Needs neither Ray nor a
network.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.families.command_line import checked, import_shared, shared_imports, swept
from compile_sweep.child_process import die_with
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.schema.causes.recompiles import plain_guard
from compile_sweep.schema.settings import CompileSettings

MODULES = ("forms", "images", "text")
BACKEND = "aot_eager"
DEADLINE_S = 1200.0
MOST_REMARKS = 2  # remarks on a family that the table shows
EARLIER = "¹"  # marks rows of an earlier run
_ROW = re.compile(rf"^\| (\w+)(?: {EARLIER})? \|(.*)$", re.MULTILINE)
FIRST, LAST = "<!-- families -->", "<!-- end of families -->"


def families() -> dict[str, type[ModelWorkload]]:
    """Every family, as module and name."""
    found: dict[str, type[ModelWorkload]] = {}
    for name in MODULES:
        module = importlib.import_module(f"benchmarks.families.{name}")
        kinds = {key: kind for key, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, ModelWorkload)}
        found |= {f"{name}.{key}": kinds[key] for key in sorted(kinds)}
    return found


def written_lines(kind: type[ModelWorkload]) -> int:
    """Lines that a user writes beside the model: the functions that a workload is made of, and the call that makes it."""
    module = importlib.import_module(f"benchmarks.families.{_module_of(kind)}")
    name = next(key for key, value in vars(module).items() if value is kind)
    lines = inspect.getsource(module).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
    end = next((n for n in range(begin + 1, len(lines)) if not lines[n].startswith((" ", ")", "]"))), len(lines))
    call = "\n".join(lines[begin:end])
    functions = [
        value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and key in call.replace("(", " ").replace(")", " ")
    ]
    return end - begin + sum(len(inspect.getsource(function).strip().splitlines()) for function in functions)


def _module_of(kind: type[ModelWorkload]) -> str:
    return next(name.partition(".")[0] for name, other in families().items() if other is kind)


def strategies(checked: str) -> Iterator[str]:
    """Three settings that a user would try, given what `check` printed."""
    one_shape, no_blocks = "all of one shape" in checked, "repeated blocks: none" in checked
    first, second = ("auto", "static") if one_shape else ("mark", "auto")
    yield "scope=eager"
    yield f"scope=full,dynamic={first},backend={BACKEND}"
    yield f"scope=full,dynamic={second},backend={BACKEND}" if no_blocks else f"scope=regional,dynamic={first},backend={BACKEND}"


def looked_at(name: str, kind: type[ModelWorkload], folder: Path) -> dict[str, Any]:
    """What a check and a sweep of three settings say of a family; what they print and record goes into the folder."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    workload = f"benchmarks.families.{name.replace('.', ':')}"
    found: dict[str, Any] = {"family": name, "lines": written_lines(kind)}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    code, said = checked(workload, folder / "check.txt", backend=BACKEND)
    found |= {"check": code, "batches": _batches(said)}
    shutil.rmtree(folder / "sweep", ignore_errors=True)
    code, swept_said = swept(workload, list(strategies(said)), folder / "sweep", folder / "sweep.txt")
    trials = folder / "sweep" / "trials.jsonl"
    if not trials.exists():
        return {**found, "refused": swept_said.strip().splitlines()[-1], "wall_s": time.monotonic() - began}
    found |= {"sweep": code, "trials": [_shortened(json.loads(line)) for line in trials.read_text(encoding="utf-8").splitlines()]}
    return {**found, "wall_s": time.monotonic() - began}


def _shortened(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the table needs of a trial's record."""
    breaks, recompiles = trial["graph_break_reasons"], trial["recompile_reasons"]
    counts = {"graphs": trial["graphs"], "breaks": len(breaks), "recompiles": len(recompiles)}
    own = {"settings": trial["settings_key"], "label": trial["label"], "reason": trial["reason"]}
    return {**own, **counts, "said": list(short_findings(trial))}


def _batches(checked: str) -> str:
    """Returns what a check said of the batches' lengths."""
    found = re.search(r"^  batches: .* (?:of length (.*)|(all of one shape))$", checked, re.MULTILINE)
    if found is None:
        return ""
    return "one shape" if found[2] else found[1] + (", as they come" if "\n  pads nothing: " in checked else "")


def run_all(output: Path, names: Sequence[str], *, jobs: int = 1) -> None:
    """Looks at families, each in a process of its own, and prints a line for each as it ends.

    Args:
        output: JSON lines, to which a line is added as each family ends.
        names: Families to run; by default those that the file does not hold yet.
        jobs: How many run at the same time.
    """
    done = {record["family"] for record in records(output) if "failed" not in record}
    found = families()
    waiting = deque(names or [name for name in found if name not in done])
    running: dict[int, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            parent = os.getpid()
            if (child := os.fork()) == 0:
                die_with(parent)
                _in_child(name, found[name], output)
            running[child] = name, time.monotonic() + DEADLINE_S
        time.sleep(0.2)
        for child, (name, ends) in list(running.items()):
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)  # what it started ends with it
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                if killed := os.waitstatus_to_exitcode(status):
                    _add(output, {"family": name, "failed": f"no result within {DEADLINE_S:g} s, exit code {killed}"})
                print(f"{name}: {_summary(name, output)}", flush=True)


def _summary(name: str, output: Path) -> str:
    """Returns what to print of a family that ended."""
    record = next(record for record in records(output) if record["family"] == name)
    if "failed" in record:
        return f"failed: {record['failed']}"
    said = [f"refused: {_cell(record['refused'])}"] if "refused" in record else [_outcome(one) for one in record["trials"][1:]]
    if "trials" in record and record["trials"][0]["label"] is not None:
        said.insert(0, f"eager: `{record['trials'][0]['label']}`")
    return f"{'; '.join(said)} ({record['wall_s']:.0f} s)"


def _in_child(name: str, kind: type[ModelWorkload], output: Path) -> None:
    exit_code = 1
    try:
        try:
            with shared_imports():
                record = looked_at(name, kind, output.with_suffix("") / name)
        except Exception as error:
            traceback.print_exc()
            record = {"family": name, "failed": f"{type(error).__name__}: {error}"}
        _add(output, record)
        exit_code = 0
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


def _add(output: Path, record: Mapping[str, Any]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps(record).encode() + b"\n")  # one call, so that lines of processes that end together do not mix
    os.close(file)


def records(output: Path) -> list[dict[str, Any]]:
    """The last line of each family."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    return list({(record := json.loads(line))["family"]: record for line in lines}.values())


def table(found: list[dict[str, Any]], before: str = "") -> Iterator[str]:
    """The rows of a Markdown table, a family each; families that have no result keep their row of the table before, marked."""
    yield "| family or form | lines | batches | whole model | blocks, or the next strategy | what is said |"
    yield "|---|--:|---|---|---|---|"
    kept = {match[1]: f"| {match[1]} {EARLIER} |{match[2]}" for match in _ROW.finditer(before)}
    rows = kept | {_shown(record): _row(record) for record in found if "failed" not in record or _shown(record) not in kept}
    yield from (rows[name] for name in sorted(rows, key=str.lower))


def _row(record: Mapping[str, Any]) -> str:
    if "failed" in record:
        raise SystemExit(f"{record['family']} failed: {record['failed']}; run it again")
    start = f"| {_shown(record)} | {record['lines']} |"
    if "refused" in record:
        return f"{start} | | | refused: {_cell(record['refused'])} |"
    _, first, second = record["trials"]
    said = list(dict.fromkeys(_cell(line) for one in record["trials"] for line in _remarks(one)))[:MOST_REMARKS]
    return f"{start} {' | '.join([record['batches'], _outcome(first), _outcome(second), '; '.join(said)])} |"


def _shown(record: Mapping[str, Any]) -> str:
    return str(record["family"]).partition(".")[2]


def _outcome(one: Mapping[str, Any]) -> str:
    settings = CompileSettings.parse(one["settings"])
    where = f"{settings.scope}, {settings.dynamic}"
    if one["label"] is not None:
        return f"{where}: `{one['label']}`"
    counts = [f"{one[name]} {name[:-1] if one[name] == 1 else name}" for name in ("graphs", "breaks", "recompiles") if one[name]]
    return f"{where}: " + ", ".join(counts or ["ok"])


def _remarks(one: Mapping[str, Any]) -> list[str]:
    if one["label"] is not None:
        return [one["reason"]]
    return [line for line in one["said"] if not line.startswith(" ")] if one["breaks"] or one["recompiles"] else []


def _cell(text: str) -> str:
    cut = textwrap.shorten(" ".join(plain_guard(text).split()), 220, placeholder=" …")
    return re.sub(r"([|\[\]])", r"\\\1", cut)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; families that are there are not run again")
    parser.add_argument("names", nargs="*", metavar="NAME", help="families to run, by default those that are not there yet")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="families that run at the same time, with one thread each"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="Markdown file whose table is written anew; runs nothing")
    arguments = parser.parse_args()
    if arguments.table is None:
        if unknown := [name for name in arguments.names if name not in families()]:
            parser.error(f"there is no family {unknown[0]}; the families are {', '.join(families())}")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # families run on the CPU, also where there is a GPU
        import_shared()
        run_all(arguments.output, arguments.names, jobs=max(1, arguments.jobs))
        return 0
    text = arguments.table.read_text(encoding="utf-8")
    before, _, rest = text.partition(FIRST)
    earlier, _, after = rest.partition(LAST)
    lines = "\n".join(table(records(arguments.output), earlier))
    arguments.table.write_text(f"{before}{FIRST}\n\n{lines}\n\n{LAST}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
