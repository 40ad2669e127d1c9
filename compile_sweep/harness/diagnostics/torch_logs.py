"""What torch's log messages say, in few words: where in the model's code, what, why and what torch advises. Text in, text out.

Background: a message carries a whole stack, of which one frame is the user's, and absolute paths, which belong in no record.
Output: one text a finding, its first line `place: what`, further lines indented.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from compile_sweep.schema.recompiles import plain_guard

LINE_LENGTH = 300
"""Characters kept of one line."""

_HINTS = 3
_QUOTED = r"""(?:"[^"]*"|'[^']*')"""
_NO_FALLBACK = (
    "recompile limit exceeded",  # logged with the function and the limit just before
    "Attempt to trace generator",  # what calls a generator is a frame of its own, and inlines it if it is compiled
)
_ROOT = Path(__file__).resolve().parents[3]
_HARNESS = (f"{_ROOT}/compile_sweep/", f"{_ROOT}/orchestrator/")
_WORKLOADS = f"{_ROOT}/workloads/"
_EXECUTED_SOURCE = "compile_settings_"
"""Prefix of the pseudo file name under which `harness/apply.py` executes the source of settings."""


class Frame(NamedTuple):
    """One line of a printed stack."""

    path: str
    line: int
    function: str
    code: str = ""

    @property
    def place(self) -> str:
        """`path:line` without this machine's folders."""
        return f"{module_path(self.path)}:{self.line}"


def module_path(path: str) -> str:
    """A source file's path as modules are imported, without the folder this machine keeps them in."""
    for folder in _import_folders():
        if path.startswith(folder):
            return path.removeprefix(folder)
    if "site-packages/" in path:
        return path.rpartition("site-packages/")[2]
    return os.path.basename(path) if path.startswith("/") else path


def without_machine_paths(text: str) -> str:
    """The text with every absolute path of a Python file as `module_path` gives it."""
    return re.sub(r"(?<![\w.-])/[^\s:'\"`()<>]+\.py\b", lambda found: module_path(found.group()), text)


def shorten_text(text: str, length: int = LINE_LENGTH) -> str:
    """The text without machine paths, cut to a readable length."""
    text = re.sub(r" at 0x[0-9a-f]+", "", without_machine_paths(text))
    return text if len(text) <= length else text[:length] + "…"


def parse_frames(text: str) -> list[Frame]:
    """The frames of a stack as `traceback` prints it, outermost first."""
    found = re.finditer(r'File "([^"]+)", line (\d+)(?:, in (\S+))?(?:\n[ \t]+(?!File ")([^\n]*))?', text)
    return [Frame(match[1], int(match[2]), match[3] or "", (match[4] or "").strip()) for match in found]


def find_user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame in the model's own code; where it is all a library's, the innermost of the library.

    Frames up to the last one of the harness are how the model came to be called, and no part of it.
    """
    last_harness = max((index for index, frame in enumerate(stack) if _is_harness(frame.path)), default=-1)
    models = stack[last_harness + 1 :]
    own = [frame for frame in models if not _is_installed(frame.path)]
    library = [frame for frame in models if not is_torch_internal(frame.path)]
    return next(reversed(own or library), None)


def is_torch_internal(path: str) -> bool:
    """Whether a file is Python's or torch's own and computes no part of a model: only `torch.nn` and libraries on it do."""
    if path.startswith("<frozen ") or (path.startswith(_folders("stdlib")) and not _is_package(path)):
        return True
    inside = path.removeprefix(_torch_folder())
    return inside != path and (not inside.startswith("nn/") or inside.startswith(("nn/parallel/", "nn/modules/module.py")))


def is_inductor_file(path: str) -> bool:
    """Whether a file is part of Inductor, whose Python warnings are advice on speed."""
    return path.startswith(f"{_torch_folder()}_inductor/")


def function_name(name: str) -> str:
    """A code object's name as a person knows it: torch names what follows a graph break, and we name copies for classes."""
    if resumed := re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", name):
        return f"{function_name(resumed[1])} from line {resumed[2]} on"
    if copied := re.fullmatch(r"(\w+?)_of_([\w.<>]+)", name):
        return f"{copied[1]} of {copied[2]}"
    return name


class GraphBreak(NamedTuple):
    """One graph break: where torch saw it, and what it is."""

    key: tuple[str, str]
    """The same for the same break reported again."""
    text: str


def parse_graph_break(message: str, inside: str | None = None) -> GraphBreak:
    """Reads a message of the artifact `graph_breaks`.

    Args:
        message: torch's.
        inside: function in which Dynamo gave up, where its message does not name it.
    """
    location = re.search(r"in user code at (.+?):(\d+)\s", message)
    stack = parse_frames(re.split(r"User code traceback:|following user code:", message)[-1])
    seen = Frame(location[1], int(location[2]), "") if location else stack[-1] if stack else Frame("unknown place", 0, "")
    users = find_user_frame(stack) or seen
    what, advice = _explained(message.partition("Graph Break Reason:")[2] or message, inside)
    lines = [f"{users.place}{f' in {function_name(users.function)}' if users.function else ''}: {what}"]
    if users.code:
        lines.append(f"code: {users.code}")
    if seen.place != users.place and not is_torch_internal(seen.path):
        lines.append(f"inside: {seen.place}")
    return GraphBreak((f"{seen.path}:{seen.line}", what), _joined([*lines, *advice]))


def parse_recompile(message: str) -> str:
    """Reads a message of the artifact `recompiles`: which function, and which guard of its latest graph failed."""
    head = re.search(r"Recompiling function (\S+) in (.+?):(\d+)", message)
    guards = re.findall(r"^\s*- (\d+/\d+\S*: .*)$", message, re.MULTILINE)
    function = f"{function_name(head[1])} ({module_path(head[2])}:{head[3]})" if head else "a function"
    guard = _guard(guards[0]) if guards else "torch names no guard"
    more = f" (one of {len(guards)} graphs, none of which fits)" if len(guards) > 1 else ""
    return shorten_text(f"{function}: {guard}{more}", 2 * LINE_LENGTH)


def parse_recompile_limit(message: str) -> str | None:
    """Reads a warning of Dynamo's frame conversion that a recompile limit was hit; None for other messages."""
    limit = re.search(r"hit config\.(\w*recompile_limit|cache_size_limit) \((\d+)\)", message)
    if limit is None:
        return None
    function = re.search(r"function: '(.+?)' \((.+?):(\d+)\)", message)
    reason = re.search(r"last reason: (.*)", message)
    where = f"{function_name(function[1])} ({module_path(function[2])}:{function[3]})" if function else "a function"
    return shorten_text(
        f"{where} hit {limit[1]} {limit[2]}: {_guard(reason[1]) if reason else 'torch gives no reason'}", 2 * LINE_LENGTH
    )


def parse_not_converted(message: str, error: BaseException | None) -> str | None:
    """Reads Dynamo's message that it will not convert a frame; None if it says another thing, or of no code of a model.

    Args:
        message: of the logger of frame conversion.
        error: the exception it was logged with.
    """
    frame = re.match(r"WON'T CONVERT (\S+) (.+?) line (\d+)", message)
    if frame is None or is_torch_internal(frame[2]) or any(words in str(error) for words in _NO_FALLBACK):
        return None
    where = f"{function_name(frame[1])} ({module_path(frame[2])}:{frame[3]})"
    if hasattr(error, "gb_type"):  # torch's own refusal; anything else is an error that suppress_errors swallowed
        reasons = [_explained(part)[0] for part in str(error).split("*** While handling this graph break")]
        why = f"torch would not convert it ({'; then '.join(reasons)})"
    else:
        text = " ".join(line.strip() for line in str(error).split("\n\n")[0].splitlines())
        why = f"its compile failed and the error was suppressed ({type(error).__name__}: {text})"
    stack = [Frame(f.filename, f.lineno or 0, f.name) for f in getattr(error, "real_stack", None) or ()]
    at = find_user_frame(stack)
    return shorten_text(f"{where} runs eagerly: {why}{f', at {at.place}' if at else ''}", 2 * LINE_LENGTH)


def parse_cudagraph_skip(message: str) -> str:
    """Reads a warning that CUDA graphs are skipped: why, and the user's line if torch knows one."""
    why = re.split(r"\.?\s*Found from\s*:", message)[0]
    at = find_user_frame(parse_frames(message))
    return shorten_text(f"{_one_line(why)}{f', at {at.place}: {at.code}' if at else ''}", 2 * LINE_LENGTH)


def parse_outside_cudagraphs(message: str) -> str:
    """Reads the lines on a node that stays outside a graph's CUDA graphs: why, and the user's line if torch knows one."""
    found = re.search(r"reason=(.*?), ir=\w+(?:, fx=([^\n(]+))?", message)
    why = " in ".join(filter(None, found.groups())) if found else _one_line(message)
    at = find_user_frame(parse_frames(message))
    return shorten_text(f"a part of a graph runs outside its CUDA graphs: {why}{f', at {at.place}: {at.code}' if at else ''}")


def parse_hint(message: str, stack: str = "", is_complex: bool = False) -> str:
    """A hint on one line, with long lists of names cut to their number.

    Args:
        message: torch's.
        stack: the code of the model that was lowered when torch gave the hint; empty where it is about no operator.
        is_complex: whether complex numbers go in or out of it.
    """
    text = re.sub(rf"\[{_QUOTED}(?:, {_QUOTED})+\]", lambda found: f"[{found[0].count(', ') + 1} of them]", _one_line(message))
    at = find_user_frame(parse_frames(stack))
    where = f", at {at.place}: {at.code}" if at else ""
    return shorten_text(f"{text}{' (complex numbers)' if is_complex else ''}{where}", 2 * LINE_LENGTH)


def _guard(text: str) -> str:
    """A failed guard without the number of its graph, and with the line of code it stems from, of which torch cuts the path."""
    text = re.sub(r"^\d+/\d+(?:_\d+)?: ", "", _one_line(text)).partition(" (user code shown is first use")[0]
    return plain_guard(re.sub(r"(?<=# )\S*/([\w.-]+\.py:\d+ in)", r"\1", text))


_NAMED_IN_CONTEXT = (
    r"UserDefinedObjectVariable\((\w+)\)",
    r"target: <(?:built-in )?(?:function|method) (\w+)",
    r"unsupported operator: ([\w.]+)",
    r"\b(LoggingLoggerVariable|NestedUserFunctionVariable|UserFunctionVariable)\b",
)
"""What torch could not hand to a graph, such as a Generator or an operator, which the context for its developers alone names."""


def numpy_function(error: BaseException | None) -> str | None:
    """The function of numpy's in which Dynamo failed, by the error it handles; None if it is in none.

    Dynamo runs torch's own implementations of them, and reports what breaks inside, not which function it was.
    """
    while error is not None:
        step = error.__traceback__
        while step is not None:
            path, name = step.tb_frame.f_code.co_filename, step.tb_frame.f_code.co_name
            if path == f"{_torch_folder()}_numpy/random.py" and name != "inner":
                return f"numpy.random.{name}"
            step = step.tb_next
        error = error.__cause__ or error.__context__
    return None


def _explained(reason: str, inside: str | None = None) -> tuple[str, list[str]]:
    """The headline of a graph break and the lines of advice below it, out of torch's own layout of them."""
    found = re.search(r"^(\S.*)\n {2}Explanation: (.*)((?:\n(?! ?For more).*)*)", reason.strip(), re.MULTILINE)
    if found is None:
        return shorten_text(next((line.strip() for line in reason.splitlines() if line.strip()), "torch gives no reason")), []
    held = [name for pattern in _NAMED_IN_CONTEXT for name in re.findall(pattern, found[3])]
    named = dict.fromkeys([*([inside] if inside else []), *held])
    names = f" ({', '.join(named)})" if named else ""
    hints = re.findall(r"^ {2}Hint: (.*)$", found[3], re.MULTILINE)
    return shorten_text(found[1]), [f"explanation: {found[2]}{names}", *(f"hint: {text}" for text in hints[:_HINTS])]


def _joined(lines: Sequence[str]) -> str:
    return "\n  ".join(shorten_text(line) for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _is_harness(path: str) -> bool:
    if os.path.basename(path).startswith(_EXECUTED_SOURCE):
        return True
    return path.startswith(_HARNESS)


def _is_installed(path: str) -> bool:
    """Whether a file came with Python or a package, other than with this project's own workloads."""
    if path.startswith((*_HARNESS, _WORKLOADS)):
        return False
    return path.startswith("<") or _is_package(path) or path.startswith(_folders("stdlib"))


def _is_package(path: str) -> bool:
    return path.startswith(_folders("purelib", "platlib")) or path.startswith(os.path.dirname(_torch_folder().rstrip("/")) + "/")


@cache
def _torch_folder() -> str:
    spec = find_spec("torch")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return f"{places[0]}/" if places else "/no torch/"


@cache
def _folders(*names: str) -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}/" for name in names)


def _import_folders() -> Iterator[str]:
    """Folders modules are imported from, the longest first, so that the most of a path goes."""
    folders = {os.path.abspath(folder) for folder in (*sys.path, os.getcwd()) if folder}
    yield from (f"{folder}/" for folder in sorted(folders, key=len, reverse=True) if folder != "/")
