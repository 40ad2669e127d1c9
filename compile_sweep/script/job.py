"""Which script to run and how: plain values that cross processes."""

import ast
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Self, get_type_hints

from compile_sweep.schema.errors import CompileSweepError, SettingsError
from compile_sweep.schema.setting_text import BATCH_SIZE, quote_value, with_batch_size
from compile_sweep.schema.settings import CompileSettings, Scope

NO_BATCH_ARGUMENT = (
    "batch_size is passed to a script by its own option for it; name that with --batch-arg, as --batch-arg --batch-size, or "
    "leave batch_size out"
)


SEE_OUTPUT = "the end of its output says why"
"""Ends a sentence about a script whose own output is needed to understand it."""


class ScriptError(CompileSweepError):
    """A script cannot be measured or trained as it is, perhaps because of the compiler; the message says what to do."""

    def __init__(self, message: str, from_compiler: bool = False) -> None:
        super().__init__(message)
        self.from_compiler = from_compiler


class FellBackError(ScriptError):
    """A run ended because something runs eagerly that should be compiled; the message says what, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    """A script, as a person starts it."""

    path: str
    """Absolute path of the Python file."""
    module: str | None = None
    """Dotted name that it runs under, as `python -m` would run it; None for a file that runs by its path."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments, `sys.argv[1:]`."""
    folder: str
    """Absolute path of the working directory it is started in."""
    in_place: bool = False
    """Whether it runs in that folder itself, instead of in a copy made of links."""
    seed: int = 0
    """Seed of torch, numpy and Python, set before the script begins; seeds that the script sets override it."""
    batch_argument: str | None = None
    """The script's own option for its batch size, such as `--batch-size`; one that ends with `=` takes it in the same word."""

    @classmethod
    def of(
        cls,
        path: str,
        arguments: Sequence[str] = (),
        *,
        folder: str | None = None,
        in_place: bool = False,
        seed: int = 0,
        batch_argument: str | None = None,
        option: str | None = "--script",
    ) -> Self:
        """Returns the job that starts a Python file, or a module by its dotted name; raises ScriptError if there is none.

        Args:
            option: The option that names it; None for an argument without an option.
        """
        given = f"{option} {path}" if option else path
        base = Path(folder or os.getcwd()).absolute()
        file, module = base / path, None
        if not file.is_file():
            if (found := _file_of_module(path, base)) is None and file.is_dir():
                raise ScriptError(f"{given} is a folder; name the Python file in it that trains{_example_in(file, path)}")
            if found is None and (words := _without_launcher(path)):
                right = " ".join([*filter(None, [option]), *words])
                raise ScriptError(f"{given} is a whole command; name only the file, and its arguments after --: {right}")
            if found is None:
                raise ScriptError(f"{given}: there is no such file in {base}; name a Python file or, as for python -m, a module")
            file, module = found, path
        if file.suffix == ".ipynb":
            raise ScriptError(f"{given} is a notebook; save it as a Python file, by jupyter nbconvert --to script, and name that")
        if file.suffix != ".py":
            raise ScriptError(f"{given} is not a Python file; name the one that trains, not what starts it")
        return cls(
            path=os.path.normpath(file),
            module=module,
            arguments=tuple(arguments),
            folder=str(base),
            in_place=in_place,
            seed=seed,
            batch_argument=batch_argument,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores a job from the result of `to_dict`; raises TypeError for fields that it did not write."""
        arguments = values.get("arguments")
        if not isinstance(arguments, list | tuple) or not all(isinstance(word, str) for word in arguments):
            raise TypeError(f"the script's arguments are {quote_value(arguments)}")
        job = cls(**{**values, "arguments": tuple(arguments)})
        for name, kind in get_type_hints(cls).items():
            if name != "arguments" and not isinstance(value := getattr(job, name), kind):
                raise TypeError(f"the script's {name} is {quote_value(value)}")
        return job

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain JSON values."""
        return {**asdict(self), "arguments": list(self.arguments)}

    def under(self, settings: CompileSettings) -> Self:
        """Returns the job with the settings' batch size among its arguments; ScriptError if its option is not known."""
        if settings.batch_size is None:
            return self
        if self.batch_argument is None:
            raise ScriptError(NO_BATCH_ARGUMENT)
        return replace(self, arguments=with_batch_size(self.arguments, self.batch_argument, settings.batch_size))

    @property
    def name(self) -> str:
        """Name in records: the file's name, or the module's."""
        return self.module or Path(self.path).name

    @property
    def shown(self) -> str:
        """How a person names it in its working directory."""
        path = Path(self.path)
        return self.module or str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)

    @property
    def given(self) -> str:
        """What `of` takes to return this job again: the module's name, or the file's path."""
        return self.module or self.path


_LAUNCHER = re.compile(r"(.*/)?(python|torchrun|accelerate|deepspeed|uv|poetry)|\w+=")
"""How a command begins that starts a script: with a program, or with a variable of its environment."""


def _without_launcher(text: str) -> list[str]:
    """Returns the words of a command such as `python train.py --epochs 2`, without what starts it; empty if it is none."""
    words = text.split()
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or words[at - 1 : at] == ["-m"]), None)
    if at is None or len(words) < 2 or (at > 0 and not _LAUNCHER.match(words[0])):
        return []
    return [words[at], *(["--", *words[at + 1 :]] if words[at + 1 :] else [])]


def _example_in(folder: Path, path: str) -> str:
    """Returns the file of a folder that probably trains, as an example; empty if none has a name that says so."""
    names = sorted((file.name for file in folder.glob("*.py")), key=lambda name: ("train" not in name, "main" not in name, name))
    return f", such as {os.path.join(path, names[0])}" if names and ("train" in names[0] or "main" in names[0]) else ""


def _file_of_module(name: str, folder: Path) -> Path | None:
    """Returns the file that `python -m NAME` runs from a folder, without importing anything; None if there is none."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return None
    spec = PathFinder.find_spec(first, [str(folder)]) or importlib.util.find_spec(first)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:  # a package runs its __main__
        spec = PathFinder.find_spec("__main__", spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin else None


_NEEDS_RANK = re.compile(r"""environ\[\s*["'](LOCAL_)?RANK["']\s*\]|init_process_group\(""")
_DOES_WITHOUT = re.compile(
    r"""(environ\.get|getenv)\(\s*["'](LOCAL_|WORLD_)?(RANK|SIZE)|RANK["']\s+(not\s+)?in\s|mp\.spawn|rank="""
)


def needs_launcher(text: str) -> bool:
    """Tells from a script's text whether it only runs under torchrun: it reads its rank without a default."""
    return _NEEDS_RANK.search(text) is not None and _DOES_WITHOUT.search(text) is None


NOT_FOR_SCRIPTS: Mapping[str, str] = {
    "padding": "the script pads its own batches",
    "pad_multiple": "the script pads its own batches",
    "bucket_size": "the script pads its own batches",
    "buckets": "the script pads its own batches",
    "num_buckets": "the script pads its own batches",
    "dynamic_min": "bounds are of a workload's lengths, which a script does not name",
    "dynamic_max": "bounds are of a workload's lengths, which a script does not name",
    "group_window": "the script orders its own samples",
    "autocast": "the script chooses its own autocast",
    "attention": "the script chooses its own attention",
    "static_gradients": "the script zeroes its own gradients",
    "workload": "options are a workload's, and a script has none",
    "ddp": "the script wraps its own model",
    "accumulate": "the script accumulates its own gradients",
    "unbacked": "lengths of a script are marked by mark_dynamic alone",
}
"""Settings that cannot be applied to a script from outside, and why."""


ONLY_FOR_SCRIPTS: Mapping[str, str] = {
    "as_written": "leaves a script as it is, and a workload has none; use --script, or leave it out",
    "activation_checkpointing=off": "is for scripts that recompute; a workload keeps its activations, so leave it out",
    "use_cache": "is for scripts; a workload decides itself whether its model makes a cache, so leave it out",
    "autocast_experts": "is for scripts; a workload decides itself how its experts are multiplied, so leave it out",
    "pad_to_multiple_of": "is for scripts; use padding=longest with pad_multiple for a workload",
    "compile_loss": "is for scripts; scope=full compiles a workload's loss with its model, so leave it out",
}
"""Settings, or values of them, that only apply to scripts, and the message about them for a workload."""


def refusal(candidate: Mapping[str, Any]) -> str | None:
    """Says why these fields, as a person wrote them, cannot be applied to a script; None if they can."""
    for name, value in candidate.items():
        field = name.partition(".")[0]
        if name == BATCH_SIZE or (name == "workload" and isinstance(value, Mapping) and set(value) == {"batch_size"}):
            continue
        if value is not None and (reason := NOT_FOR_SCRIPTS.get(field)):
            return f"{name} cannot be applied to a script from outside: {reason}; leave it out, or write a workload"
    if str(candidate.get("scope")) == Scope.MODULAR:
        return (
            "scope=modular compiles parts that a workload names, and a script has none; use full or regional, where "
            "parts.NAME.compile=off leaves one of several modules eager"
        )
    if str(candidate.get("dynamic")) == "buckets":
        return "dynamic=buckets pads batches to buckets, and the script pads its own; use auto, mark or true"
    if str(candidate.get("optimizer")) == "foreach_map":
        return "optimizer=foreach_map replaces the optimizer by another; use fused or compiled"
    return None


def refuse_outside_scripts(candidate: Mapping[str, Any], *, is_script: bool, has_batch_argument: bool = False) -> None:
    """Refuses fields that only apply to scripts or, for a script, fields that cannot be applied to one."""
    if is_script and (reason := refusal(_without_usual_padding(candidate))):
        raise SettingsError(reason)
    if is_script and not has_batch_argument and {"batch_size", BATCH_SIZE} & candidate.keys():
        raise SettingsError(NO_BATCH_ARGUMENT)
    names_parts = any(name.partition(".")[0] == "parts" for name, value in candidate.items() if value is not None)
    if not is_script and names_parts and str(candidate.get("scope")) != Scope.MODULAR:
        raise SettingsError("a workload's parts go with scope=modular; with other scopes, parts are modules of a script")
    if not is_script and str(candidate.get("scope")) == Scope.EAGER and str(candidate.get("cudagraphs")) in ("on", "True"):
        raise SettingsError("scope=eager captures CUDA graphs of scripts alone; leave cudagraphs out, or compile the workload")
    for what, reason in ONLY_FOR_SCRIPTS.items():
        name, _, only = what.partition("=")
        value = candidate.get(name)
        if not is_script and (str(value) == only if only else value not in (None, False, "off")):
            raise SettingsError(f"{what} {reason}")


_PADDING = ("padding", "pad_multiple")  # may follow from other fields


def _without_usual_padding(candidate: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves out padding that follows from the other fields, which the whole key of a setting names, as records hold it."""
    others = {name: value for name, value in candidate.items() if name not in _PADDING}
    if len(others) == len(candidate):
        return candidate
    try:
        is_usual = CompileSettings.from_dict(dict(others)) == CompileSettings.from_dict(dict(candidate))
    except SettingsError:  # is said where settings are made
        return candidate
    return others if is_usual else candidate


def check_settings(settings: CompileSettings) -> None:
    """Refuses settings that no script can run under."""
    given = {name: value for name, value in settings.fields_that_apply().items() if name not in _PADDING}
    if reason := refusal(given):
        raise ScriptError(reason)


def leading_imports(job: ScriptJob) -> tuple[str, ...]:
    """Returns the import statements that a script, and modules in its folders that these import, begin with.

    Imports of such modules themselves are left out, and so is what follows any other statement, which may decide how a package
    is imported.
    """
    folders, found = {Path(job.path).parent, Path(job.folder)}, dict[str, None]()
    waiting, seen = [Path(job.path)], set[Path]()
    while waiting:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for statement in _leading_imports(file):
            names = [one.name for one in statement.names] if isinstance(statement, ast.Import) else [statement.module or ""]
            heads = [name.partition(".")[0] for name in names]
            own = [folder / head for folder in folders for head in heads]
            waiting += [path.with_suffix(".py") for path in own if path.with_suffix(".py").is_file()]
            is_own = any(path.with_suffix(".py").is_file() or path.is_dir() for path in own)
            if not is_own and "__future__" not in heads and not (isinstance(statement, ast.ImportFrom) and statement.level):
                found[ast.unparse(statement)] = None
    return tuple(found)


def _leading_imports(file: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
            return
