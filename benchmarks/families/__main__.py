"""Checks the families and forms of this package, measures each under three settings, and writes the table in docs/workloads.md.

Background: a user brings a model by a function that makes it, one that makes a batch, and a loss where the model has none. The
table counts the lines of those and of the call that puts them together, not those of the model itself. What
`orchestrator.check` asks of a workload is asked of each; then it runs eagerly, with the whole model compiled, and with its
repeated blocks compiled or, where it has none, with the strategy for lengths that comes next. The back-end is torch's `eager`:
it finds breaks and recompiles in a fraction of Inductor's time, and generates no code. Each family has a process of its own,
forked from one that has imported torch.

Output of `python -m benchmarks.families --output FILE [--jobs N]`: a JSON line for each family, as it ends. What is in the file
is not run again unless it is named. `--table FILE` writes the table between two marks of a Markdown file. About 30 s of CPU time
for each. Needs neither Ray nor a network.
"""

import argparse
import importlib
import inspect
import json
import os
import re
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

from compile_sweep.contract.first_step import check_first_step
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.contract.padding_check import checked_padding
from compile_sweep.describe import describe, explained_failures
from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.causes.errors import advice_on_error, advice_on_exception
from compile_sweep.schema.outcome import Label, judge_measurement
from compile_sweep.schema.settings import CompileSettings
from orchestrator.check import SHORT
from orchestrator.plan.space import Target, choose

MODULES = ("forms", "images", "text")
BACKEND = "eager"
DEADLINE_S = 900.0
MOST_REMARKS = 2  # remarks on a family that the table shows
FIRST, LAST = "<!-- families -->", "<!-- end of families -->"


def families() -> dict[str, type[ModelWorkload]]:
    """Every family, as module and name."""
    found = {}
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


def strategies(target: Target, *, has_blocks: bool) -> Iterator[dict[str, Any]]:
    """Three settings that `orchestrator.check` and a sweep would try."""
    yield {"scope": "eager"}
    lengths = ["auto", "static"] if target.has_one_shape else ["mark", "auto"]
    yield {"scope": "full", "dynamic": lengths[0], "backend": BACKEND}
    if not has_blocks:
        yield {"scope": "full", "dynamic": lengths[1], "backend": BACKEND}
    else:
        yield {"scope": "regional", "dynamic": lengths[0], "backend": BACKEND}


def looked_at(name: str, kind: type[ModelWorkload]) -> dict[str, Any]:
    """What a check and three trials say of a family."""
    began = time.monotonic()
    found: dict[str, Any] = {"family": name, "lines": written_lines(kind), "torch": torch.__version__}
    try:
        with explained_failures():
            workload = kind(kind.sizes[-1], 0)
            check_first_step(workload, has_gpu=False)
            pads = checked_padding(workload, has_gpu=False)
            has_blocks = bool(workload.regions(workload.build_model()))
        target = Target.of(describe(workload), has_gpu=False)
    except Exception as error:
        return {**found, "refused": str(error), "wall_s": time.monotonic() - began}
    found |= {"batches": _batches(target), "padding": list(pads), "transformers": transformers.__version__, "trials": []}
    for candidate in strategies(target, has_blocks=has_blocks):
        chosen = choose([candidate], target)
        settings = chosen.settings[0] if chosen.settings else CompileSettings.from_dict(candidate)
        reason = chosen.excluded[0].reason if chosen.excluded else None
        found["trials"].append(_excluded(settings, reason) if reason else trial(workload, settings))
    return {**found, "wall_s": time.monotonic() - began}


def trial(workload: ModelWorkload, settings: CompileSettings) -> dict[str, Any]:
    """One setting, measured and judged as a trial is."""
    torch._dynamo.reset()
    try:
        figures = measure(
            prepare(workload, settings, torch.device("cpu")), protocol=Protocol(**{**SHORT, "compared_steps": 2})
        ).to_dict()
    except Exception as error:
        traceback.print_exc()
        is_compilers = is_compiler_error(error)
        label = Label.COMPILE_ERROR if is_compilers else Label.EXCEPTION
        advice = (advice_on_error if is_compilers else advice_on_exception)(str(error))
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {"settings": settings.key, "label": str(label), "reason": f"{said}; {advice}" if advice else said}
    verdict = judge_measurement(figures, claims_cudagraphs=settings.claims_cudagraphs)
    breaks, recompiles = figures["graph_break_reasons"], figures["recompile_reasons"]
    return {
        "settings": settings.key,
        "label": verdict.label and str(verdict.label),
        "reason": verdict.reason,
        "graphs": figures["graphs"],
        "breaks": len(breaks),
        "recompiles": len(recompiles),
        "said": list(short_findings(figures)),
    }


def _excluded(settings: CompileSettings, reason: str) -> dict[str, Any]:
    return {"settings": settings.key, "label": "left out", "reason": reason}


def _batches(target: Target) -> str:
    if target.has_one_shape:
        return "one shape"
    return f"{target.min_length} to {target.max_length}" + (", as they come" if target.unpadded_reason else "")


def run_all(output: Path, names: Sequence[str], *, jobs: int = 1) -> None:
    """Looks at families, each in a process of its own, and prints a line for each as it ends.

    Args:
        output: JSON lines, to which a line is added as each family ends.
        names: Families to run; by default those that the file does not hold yet.
        jobs: How many run at the same time.
    """
    done = {line["family"] for line in records(output)}
    found = families()
    waiting = deque(names or [name for name in found if name not in done])
    running: dict[int, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            if (child := os.fork()) == 0:
                _in_child(name, found[name], output)
            running[child] = name, time.monotonic() + DEADLINE_S
        time.sleep(0.2)
        for child, (name, ends) in list(running.items()):
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                print(f"{name}: {_summary(name, output, os.waitstatus_to_exitcode(status))}", flush=True)


def _summary(name: str, output: Path, exit_code: int) -> str:
    """Returns what to print of a family that ended."""
    if exit_code:
        return f"no result, exit code {exit_code}"
    record = next(record for record in records(output) if record["family"] == name)
    said = [f"refused: {_cell(record['refused'])}"] if "refused" in record else [_outcome(one) for one in record["trials"][1:]]
    if "trials" in record and record["trials"][0]["label"] is not None:
        said.insert(0, f"eager: `{record['trials'][0]['label']}`")
    return f"{'; '.join(said)} ({record['wall_s']:.0f} s)"


def _in_child(name: str, kind: type[ModelWorkload], output: Path) -> None:
    exit_code = 1
    try:
        torch.set_num_threads(1)
        line = json.dumps(looked_at(name, kind)) + "\n"
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())  # one call, so that lines of processes that end together do not mix
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


def records(output: Path) -> list[dict[str, Any]]:
    """The last line of each family."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    return list({(record := json.loads(line))["family"]: record for line in lines}.values())


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of a Markdown table, a family each."""
    yield "| family or form | lines | batches | whole model | blocks, or the next strategy | what is said |"
    yield "|---|--:|---|---|---|---|"
    for record in sorted(found, key=lambda record: record["family"].lower()):
        if "refused" in record:
            yield f"| {_shown(record)} | {record['lines']} | | | | refused: {_cell(record['refused'])} |"
            continue
        _, first, second = record["trials"]
        said = list(dict.fromkeys(_cell(line) for one in record["trials"] for line in _remarks(one)))[:MOST_REMARKS]
        cells = [record["batches"], _outcome(first), _outcome(second), "; ".join(said)]
        yield f"| {_shown(record)} | {record['lines']} | {' | '.join(cells)} |"


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
    cut = textwrap.shorten(" ".join(text.split()), 220, placeholder=" …")
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
        run_all(arguments.output, arguments.names, jobs=max(1, arguments.jobs))
        return 0
    text = arguments.table.read_text(encoding="utf-8")
    before, _, rest = text.partition(FIRST)
    after = rest.partition(LAST)[2]
    lines = "\n".join(table(records(arguments.output)))
    arguments.table.write_text(f"{before}{FIRST}\n\n{lines}\n\n{LAST}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
