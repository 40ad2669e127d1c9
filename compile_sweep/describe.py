"""Describes workloads and the installed torch to a process that imports neither: `python -P -m compile_sweep.describe`.

Reads one JSON question per line on stdin, and answers each with one JSON object on stdout. Output of the user's code goes to
stderr, and its stdin is empty. Ends when stdin does.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from compile_sweep.child_process import die_with, empty_stdin, importing, only_in_this_process
from compile_sweep.contract.workload_facts import WorkloadFacts, shown_name
from compile_sweep.contract.workload_names import import_named, named_workloads
from compile_sweep.schema.choices import Attention
from compile_sweep.schema.errors import CompileSweepError, SettingsError, WorkloadError
from compile_sweep.schema.setting_text import format_value
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.visible_text import spoken_number

if TYPE_CHECKING:
    from compile_sweep.contract.base import Workload

_SHOWN = 3  # maximum number of names listed individually; of more, the first and the last are shown


def describe(workload: Workload, folder: str | None = None) -> WorkloadFacts:
    """Returns what a plan must know about a workload; raises WorkloadError if the workload's own code fails."""
    from compile_sweep.contract.base import Workload
    from compile_sweep.contract.inspect_model import batch_lengths, model_facts

    with explained_failures():
        try:
            row_lengths = tuple(workload.row_lengths())
        except WorkloadError:
            row_lengths = ()
        return WorkloadFacts(
            max_length=workload.max_length,
            min_length=workload.min_length,
            batch_size=workload.batch_size,
            unpadded_reason=workload.unpadded_reason,
            row_lengths=row_lengths,
            batch_lengths=() if row_lengths or workload.has_one_shape else batch_lengths(workload),
            parts=tuple(name.rpartition(".")[2] for name in workload.parts()),
            attentions=tuple(attention for attention in Attention if _runs(workload, attention)),
            workload=type(workload).__name__,
            size=workload.size,
            options=workload.options,
            job_options=frozenset(workload.job_options),
            has_own_step=workload.has_own_step,
            trains=workload.trains,
            needs_gpu=workload.needs_gpu,
            memory_format=workload.memory_format(),
            **model_facts(workload),
            has_loader=type(workload).loader is not Workload.loader,
            folder=folder,
        )


def _runs(workload: Workload, attention: Attention) -> bool:
    try:
        workload.attention_statement(attention)
    except SettingsError:
        return False
    return True


def foreach_map_refusal(workload: Workload) -> str | None:
    """Says why optimizer=foreach_map would train differently from the workload's own optimizer; None if it would not."""
    from compile_sweep.harness.prepare import refuse_other_update_of  # loads the compiler, which most plans do not need

    try:
        refuse_other_update_of(workload)
    except SettingsError as error:
        return str(error)
    return None


@contextmanager
def explained_failures() -> Iterator[None]:
    """Turns any error of a workload's own code while it is built into a WorkloadError of one sentence."""
    try:
        yield
    except CompileSweepError:
        raise
    except (Exception, SystemExit) as error:  # a user's functions may raise anything
        raise WorkloadError(f"building the workload failed: {type(error).__name__}: {error}") from error


def answer(question: Mapping[str, Any]) -> Any:
    """Answers one question, with plain JSON values.

    Args:
        question: `ask`, one of `facts`, `first_step`, `foreach_map_refusal`, `model`, `padding`, `source`, `largest_batch`,
            `list`, `inductor_options`, `config_options` of a `module`, `backends` and `ddp_arguments`. The first seven are about
            a workload: `workload`, `size` (None for the first with a GPU and the last without), `seed` and `has_gpu`. `source`
            and `largest_batch` also take `settings`, a key, and `device`, `source` also `num_workers`.

    Raises:
        WorkloadError: There is no such workload, or its own code failed.
        SettingsError: the settings do not fit the workload.
    """
    from compile_sweep.contract.installed_torch import LoadedTorch

    match question["ask"]:
        case "list":
            return [[name, *_listed(name)] for name in sorted(named_workloads())]
        case "inductor_options":
            return LoadedTorch().inductor_options()
        case "config_options":
            return LoadedTorch().config_options(question["module"])
        case "backends":
            return list(LoadedTorch().backends())
        case "ddp_arguments":
            return list(LoadedTorch().ddp_arguments())
    workload = build(question["workload"], question["size"], question["seed"], has_gpu=question["has_gpu"])
    match question["ask"]:
        case "model":
            with explained_failures():
                return {"lines": list(_model_lines(workload)), "has_regions": bool(workload.regions(workload.build_model()))}
        case "source":
            return _source(workload, question)
        case "largest_batch":
            return _largest_batch(workload, question)
        case "foreach_map_refusal":
            return foreach_map_refusal(workload)
        case "padding":
            from compile_sweep.contract.padding_check import checked_padding

            with explained_failures():
                return checked_padding(workload, has_gpu=question["has_gpu"])
        case "first_step":
            from compile_sweep.contract.first_step import check_first_step

            with explained_failures():
                return check_first_step(workload, has_gpu=question["has_gpu"])
    module = sys.modules[import_named(question["workload"]).__module__]
    return describe(workload, _folder(module)).to_dict()


def build(name: str, size: str | None, seed: int, *, has_gpu: bool) -> Workload:
    """Builds the workload, by default in its first size with a GPU and its last without; a WorkloadError says why it cannot."""
    with importing():
        import_named(name)  # before torch, so that a missing module is refused at once
        from compile_sweep.contract.base import load_workload

    found = load_workload(name)
    with explained_failures():
        return _built(found, found.sizes[0 if has_gpu else -1] if size is None else size, seed)


@lru_cache(maxsize=1)  # several questions are about one workload, and its batches and model may take a while to make
def _built(kind: type[Workload], size: str, seed: int) -> Workload:
    return kind(size, seed)


def _folder(module: Any) -> str | None:
    origin = getattr(module, "__file__", None)
    return None if origin is None else os.path.dirname(os.path.abspath(origin))


def _source(workload: Workload, question: Mapping[str, Any]) -> str:
    from compile_sweep.harness.prepare import prepare

    with explained_failures():
        model = workload.build_model()
    setting = CompileSettings.parse(question["settings"])
    return prepare(workload, setting, question["device"], num_workers=question["num_workers"]).source(model)


def _largest_batch(workload: Workload, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    from compile_sweep.harness.diagnostics.largest_batch import largest_batch
    from compile_sweep.harness.toolchain import compile_whole_files

    compile_whole_files()
    with explained_failures():
        tried = largest_batch(workload, CompileSettings.parse(question["settings"]), question["device"])
    return [asdict(one) for one in tried]


def _listed(name: str) -> tuple[str, Sequence[str], Mapping[str, str]] | tuple[str]:
    """Returns a workload's first line, sizes and options for a list; only the reason if it does not load."""
    from compile_sweep.contract.base import load_workload

    try:
        kind = load_workload(name)
    except WorkloadError as error:
        return (str(error),)
    options = {name: "N" if isinstance(able, type) else "|".join(map(format_value, able)) for name, able in kind.options.items()}
    return (inspect.getdoc(kind) or "").partition("\n")[0], list(kind.sizes), options


def _model_lines(workload: Workload) -> Iterator[str]:
    """Yields what a check says about a workload before it runs it."""
    model = workload.build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    yield f"{'trains' if workload.trains else 'infers only, without an optimizer'}; {spoken_number(parameters)} parameters"
    least = f"{workload.min_length} to" if workload.min_length > 1 else "at most"
    lengths = f"of length {least} {workload.max_length}" if not workload.has_one_shape else "all of one shape"
    yield f"batches: {workload.pool_batches} of {workload.batch_size} samples, {lengths}"
    if workload.unpadded_reason is not None:
        yield f"pads nothing: {workload.unpadded_reason}; so dynamic=static and buckets are left out"
    yield from workload.remarks()
    if workload.has_own_step:
        yield "has a step of its own: where settings say scope=full, the model is compiled and the step around it is not"
    regions = list(workload.regions(model))
    kinds = sorted({type(model.get_submodule(name)).__name__ for name in regions})
    yield f"repeated blocks: {_names(regions)}" + (f" of class {', '.join(kinds)}" if kinds else "")
    yield f"parts: {_names(list(workload.parts()))}"
    if workload.max_length > 1:
        for name in ("", *regions[:1]):
            yield f"dynamic dimensions of {name or 'the model'}: {_dims(workload.dynamic_dims(name))}"
    for name, values in workload.options.items():
        yield f"workload.{name}: {'a whole number' if isinstance(values, type) else ', '.join(map(str, values))}"


def _dims(dims: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{shown_name(name)} {'/'.join(map(str, where))}" for name, where in dims.items()) or "none"


def _names(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names) or "none"
    return f"{len(names)}, {names[0]} to {names[-1]}"


def answer_or_error(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a question under `answer`, or says under `error` and `kind` why there is no answer."""
    try:
        return {"answer": answer(question)}
    except CompileSweepError as error:
        return {"error": str(error), "kind": "settings" if isinstance(error, SettingsError) else "workload"}


def main() -> None:
    """Answers questions until there are no more, or the asking process has ended."""
    die_with(os.getppid())  # the user's code may hang, and then nobody reads that stdin has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the asking process, which then ends this one
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    empty_stdin()
    os.dup2(2, 1)
    for line in questions:
        with only_in_this_process():
            answered = json.dumps(answer_or_error(json.loads(line)))
        print(answered, file=answers, flush=True)


if __name__ == "__main__":
    main()
