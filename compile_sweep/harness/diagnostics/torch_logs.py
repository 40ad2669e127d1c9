"""Summarizes torch's log messages: where in the model's code, what, why, and what torch advises. Text in, text out.

Background: a message contains a whole stack, of which one frame is the user's, and absolute paths, which must not be recorded.
Output: one text per finding; its first line is `place: what`, further lines are indented.
"""

import ast
import linecache
import operator
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from compile_sweep.schema.causes.places import SOURCE_PREFIX, is_harness, is_installed, is_of_python, is_package, torch_folder
from compile_sweep.schema.causes.recompiles import plain_guard

LINE_LENGTH = 300  # maximum length of a line, in characters

_HINTS = 3
_QUOTED = r"""(?:"[^"]*"|'[^']*')"""
_NO_FALLBACK = (
    "recompile limit exceeded",  # logged with the function and the limit right before
    "Attempt to trace generator",  # the caller of a generator has a frame of its own, and inlines the generator if it is compiled
)
_SOURCE_RUNTIME = os.path.join(os.path.dirname(os.path.dirname(__file__)), "source_runtime.py")
"""Named, not imported: that would load torch in a driver, which reads what is left of a dead trial."""


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
    """Returns a source file's path as modules are imported, without the folder that this machine keeps them in."""
    for folder in _import_folders():
        if path.startswith(folder):
            return path.removeprefix(folder)
    if "site-packages/" in path:
        return path.rpartition("site-packages/")[2]
    return os.path.basename(path) if path.startswith("/") else path


def without_machine_paths(text: str) -> str:
    """Returns the text with every absolute path of a Python file replaced by its `module_path`."""
    return re.sub(r"(?<![\w.-])/[^\s:'\"`()<>]+\.py\b", lambda found: module_path(found.group()), text)


def shorten_text(text: str, length: int = LINE_LENGTH) -> str:
    """Returns the text without machine paths, cut to a readable length."""
    text = re.sub(r" at 0x[0-9a-f]+", "", without_machine_paths(text))
    return text if len(text) <= length else text[:length] + "…"


def parse_frames(text: str) -> list[Frame]:
    """Parses the frames of a stack that `traceback` printed, outermost first."""
    found = re.finditer(r'File "([^"]+)", line (\d+)(?:, in (\S+))?(?:\n[ \t]+(?!File ")([^\n]*))?', text)
    return [Frame(match[1], int(match[2]), match[3] or "", (match[4] or "").strip()) for match in found]


def find_user_frame(stack: Sequence[Frame]) -> Frame | None:
    """Returns the innermost frame in the model's own code or, if all frames are a library's, the innermost of the library.

    Frames up to the last one of the harness only lead to the model, and are skipped.
    """
    last_harness = max((index for index, frame in enumerate(stack) if _leads_to_model(frame.path)), default=-1)
    models = stack[last_harness + 1 :]
    own = [frame for frame in models if not is_installed(frame.path)]
    library = [frame for frame in models if not is_torch_internal(frame.path)]
    return next(reversed(own or library), None)


def is_torch_internal(path: str) -> bool:
    """Tells whether a file belongs to Python or torch and computes no part of a model: only `torch.nn` and libraries on it do."""
    if path.startswith("<frozen ") or is_of_python(path):
        return True
    inside = path.removeprefix(torch_folder())
    return inside != path and (not inside.startswith("nn/") or inside.startswith(("nn/parallel/", "nn/modules/module.py")))


def is_inductor_file(path: str) -> bool:
    """Tells whether a file is part of Inductor, whose Python warnings are advice on speed."""
    return path.startswith(f"{torch_folder()}_inductor/")


def function_name(name: str) -> str:
    """Returns a code object's name without what torch appends after a graph break and we append to copies for classes."""
    if resumed := re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", name):
        return f"{function_name(resumed[1])} from line {resumed[2]} on"
    original, _, owner = name.partition("@")  # which no name in Python contains
    return f"{original} of {owner}" if owner else name


def _function(name: str, path: str, line: str) -> str:
    """Returns a compiled function and its place; modules of `torch.nn` are compiled through a function of torch's or ours."""
    if "@" in name and (path == _SOURCE_RUNTIME or path.startswith(SOURCE_PREFIX)):
        return f"{function_name(name)} (torch.nn)"
    place = f"{module_path(path)}:{line}"
    return f"{'module of torch.nn' if 'torch/_dynamo/external_utils' in place else function_name(name)} ({place})"


_TOLD = ("torch/optim/optimizer.py", "/functools.py")  # whose own graph breaks the user's line does not show


class GraphBreak(NamedTuple):
    """A graph break: where torch saw it, and what it is."""

    key: tuple[str, str]  # equal when the same break is reported again
    text: str


def parse_graph_break(message: str, inside: str | None = None) -> GraphBreak:
    """Reads a message of `graph_breaks`; `inside` is the function that Dynamo gave up in, if the message names none."""
    location = re.search(r"in user code at (.+?):(\d+)\s", message)
    stack = parse_frames(re.split(r"User code traceback:|following user code:", message)[-1])
    seen = Frame(location[1], int(location[2]), "") if location else stack[-1] if stack else Frame("unknown place", 0, "")
    users = find_user_frame(stack) or seen
    what, advice = _explained(message.partition("Graph Break Reason:")[2] or message, inside)
    lines = [f"{users.place}{f' in {function_name(users.function)}' if users.function else ''}: {what}"]
    if users.code:
        lines.append(f"code: {users.code}")
    if seen.place != users.place and (not is_torch_internal(seen.path) or seen.path.endswith(_TOLD)):
        lines.append(f"inside: {seen.place}")
    breaks_at = users if is_torch_internal(seen.path) else seen
    if is_package(breaks_at.path) and (library := module_path(breaks_at.path).partition("/")[0]) != "torch":
        lines.append(f"library: {library}")
        if breaks_at is not users and (theirs := next((one.code for one in stack if one.place == seen.place and one.code), "")):
            lines.append(f"its code: {theirs}")
    return GraphBreak((f"{seen.path}:{seen.line}", what), _joined([*lines, *advice]))


def parse_recompile(message: str) -> str:
    """Parses a message of the artifact `recompiles`: which function, and which guard of its latest graph failed."""
    head = re.search(r"Recompiling function (\S+) in (.+?):(\d+)", message)
    guards = re.findall(r"^\s*- (\d+/\d+\S*: .*)$", message, re.MULTILINE)
    function = _function(*head.groups()) if head else "a function"
    guard = _guard(guards[0]) if guards else "torch names no guard"
    more = f" (one of {len(guards)} graphs, none of which fits)" if len(guards) > 1 else ""
    return shorten_text(f"{function}: {guard}{more}", 2 * LINE_LENGTH)


def parse_recompile_limit(message: str) -> str | None:
    """Parses a warning of Dynamo's frame conversion about a recompile limit that was hit; None for other messages."""
    limit = re.search(r"hit config\.(\w*recompile_limit|cache_size_limit) \((\d+)\)", message)
    if limit is None:
        return None
    function = re.search(r"function: '(.+?)' \((.+?):(\d+)\)", message)
    reason = re.search(r"last reason: (.*)", message)
    where = _function(*function.groups()) if function else "a function"
    return shorten_text(
        f"{where} hit {limit[1]} {limit[2]}: {_guard(reason[1]) if reason else 'torch gives no reason'}", 2 * LINE_LENGTH
    )


def parse_not_converted(message: str, error: BaseException | None) -> str | None:
    """Parses Dynamo's message that it will not convert a frame; None for other messages and for frames outside the model."""
    frame = re.match(r"WON'T CONVERT (\S+) (.+?) line (\d+)", message)
    if frame is None or is_torch_internal(frame[2]) or any(words in str(error) for words in _NO_FALLBACK):
        return None
    where = f"{function_name(frame[1])} ({module_path(frame[2])}:{frame[3]})"
    stack = [Frame(f.filename, f.lineno or 0, f.name) for f in getattr(error, "real_stack", None) or ()]
    if hasattr(error, "gb_type"):  # refused by torch itself; any other error was swallowed by suppress_errors
        reasons = [_explained(part)[0] for part in str(error).split("*** While handling this graph break")]
        inside = ", inside a `try`" if any(_is_inside_try(one) for one in stack if one.path == frame[2]) else ""
        why = f"torch would not convert it ({'; then '.join(reasons)}{inside})"
    else:
        text = " ".join(line.strip() for line in str(error).split("\n\n")[0].splitlines())
        why = f"its compile failed and the error was suppressed ({type(error).__name__}: {text})"
    at = find_user_frame(stack)
    return shorten_text(f"{where} runs eagerly: {why}{f', at {at.place}' if at else ''}", 2 * LINE_LENGTH)


def _is_inside_try(frame: Frame) -> bool:
    """Tells whether a line is in the body or a handler of a `try` of its function, where Dynamo cannot go on after a break."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.path)))
    except SyntaxError:  # not Python, such as a template that is compiled to it
        return False
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    inner = [one for one in functions if one.lineno <= frame.line <= (one.end_lineno or 0)]
    tries = (one for one in ast.walk(inner[-1] if inner else tree) if isinstance(one, ast.Try))
    parts = ((one.body[0].lineno, one.handlers[-1] if one.handlers else one.body[-1]) for one in tries)
    return any(first <= frame.line <= (last.end_lineno or 0) for first, last in parts)


def parse_cudagraph_skip(message: str) -> str:
    """Parses a warning that CUDA graphs are skipped: why, and the user's line if torch knows one."""
    why = re.split(r"\.?\s*Found from\s*:", message)[0]
    at = find_user_frame(parse_frames(message))
    return shorten_text(f"{_one_line(why)}{f', at {at.place}: {at.code}' if at else ''}", 2 * LINE_LENGTH)


def parse_outside_cudagraphs(message: str) -> str:
    """Parses the lines about a node that stays outside a graph's CUDA graphs: why, and the user's line if torch knows one."""
    found = re.search(r"reason=(.*?), ir=\w+(?:, fx=([^\n(]+))?", message)
    why = " in ".join(filter(None, found.groups())) if found else _one_line(message)
    at = find_user_frame(parse_frames(message))
    return shorten_text(f"a part of a graph runs outside its CUDA graphs: {why}{f', at {at.place}: {at.code}' if at else ''}")


def parse_hint(message: str, stack: str = "", is_complex: bool = False) -> str:
    """Returns a hint on one line, with long lists of names shortened; `stack` is the code of the operator that it is about."""
    text = re.sub(rf"\[{_QUOTED}(?:, {_QUOTED})+\]", lambda found: f"[{found[0].count(', ') + 1} of them]", _one_line(message))
    at = find_user_frame(parse_frames(stack))
    where = f", at {at.place}: {at.code}" if at else ""
    return shorten_text(f"{text}{' (complex numbers)' if is_complex else ''}{where}", 2 * LINE_LENGTH)


def _guard(text: str) -> str:
    """Returns a failed guard without its graph's number, with the line of code it comes from, whose path torch abbreviates."""
    text = re.sub(r"^\d+/\d+(?:_\d+)?: ", "", _one_line(text)).partition(" (user code shown is first use")[0]
    text = re.sub(r"\s*(# )?\([\w./-]+\.py:\d+ in \w+\)$", "", text)  # a line of torch's own, in place of the user's or behind it
    text = re.sub(r"(?<=# )\S*/([\w.-]+\.py:\d+ in)", r"\1", text)
    return plain_guard(re.sub(r"(\.py:\d+ in )([\w.<>]+@[\w.<>]+)", lambda at: f"{at[1]}{function_name(at[2])}", text))


_NAMED_IN_CONTEXT = (
    r"UserDefinedObjectVariable\((\w+)\)",
    r"target: <(?:built-in )?(?:function|method) (\w+)",
    r"unsupported operator: ([\w.]+)",
    r"file matches MOD_SKIPLIST \(\S*/(torch/ao)\)",
    r"^\s+(random_value)_\d+: graph input",
    r": (graph input) \([LG]_[\s\S]*attempted to jump with NumpyNdarrayVariable\(",  # such as an attribute: nothing is drawn
    r" = wrapped_(random_sample|random|randn?|randint|normal|uniform|choice|shuffle)\([\s\S]*attempted to jump with Numpy",
    r"attempted to jump with (NumpyNdarrayVariable)\(",  # of numpy, whether drawn or computed from a tensor
    r"raised exception TypeError\(.*\bfor (%): 'str' and",
    r"\b(LoggingLoggerVariable|NestedUserFunctionVariable|UserFunctionVariable|UnspecializedPythonVariable)\b",
    r"call_function args: [^\n]*?\b(\w*NNModuleVariable)\b",
)
"""Objects that torch could not put into a graph, such as a Generator or an operator; only the developer context names them."""


_NODE_IN = {"get_fake_value": "node", "run_node": "n"}
"""Functions of Dynamo and of torch.fx that run a graph's node, and what the node is called there."""

_READS = "aten._local_scalar_dense"  # the operator that reads a number from a tensor


def broken_function(error: BaseException | None) -> str | None:
    """Returns the function, operator or method in which Dynamo failed, from the error it handles; None if that is not known.

    Dynamo runs torch's own implementations of functions and reports what breaks inside, not which function it was.
    """
    in_function = None
    while error is not None:
        step = error.__traceback__
        while step is not None:
            path, name = step.tb_frame.f_code.co_filename, step.tb_frame.f_code.co_name
            if (replaced := _replaced_by_harness(step.tb_frame.f_locals)) is not None:
                return replaced
            if type(step.tb_frame.f_locals.get("self")).__name__ == "AutogradFunctionApplyVariable":
                in_function = "autograd.Function"
            if path == f"{torch_folder()}_numpy/random.py" and name != "inner":
                return f"numpy.random.{name}"
            if path == f"{torch_folder()}_numpy/_funcs_impl.py" and not name.startswith(("_", "<")):
                return f"numpy.{name}"
            run = getattr(step.tb_frame.f_locals.get(_NODE_IN.get(name, "")), "target", None)
            if run in (operator.getitem, operator.setitem) and _READS in str(error):
                return "operator.getitem"
            if run is operator.mod and isinstance(step.tb_frame.f_locals[_NODE_IN[name]].args[0], str):
                return "%"
            called = run if name == "get_fake_value" else None
            if type(called).__name__ == "numpy_method_wrapper":
                return f"numpy.ndarray.{getattr(called, 'method', '')}"
            if getattr(called, "__name__", None) == "_assert":
                return "torch._assert"
            if called == "item":  # which Dynamo calls itself for each element of a list
                return "Tensor.tolist"
            step = step.tb_next
        error = error.__cause__ or error.__context__
    return in_function


def _replaced_by_harness(names: Mapping[str, Any]) -> str | None:
    """Returns the function of torch's that this project replaced and excluded from compiling, if one was met: `module.name`."""
    met: Any = names.get("self")
    if type(met).__name__ != "SkipFunctionVariable":
        return None
    function: Any = getattr(met.value, "_torchdynamo_orig_callable", met.value)
    if not isinstance(function, FunctionType) or not is_harness(function.__code__.co_filename):
        return None
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    torchs = (one for one in held if callable(one) and str(getattr(one, "__module__", "")).partition(".")[0] == "torch")
    return next((f"{one.__module__}.{one.__name__}" for one in torchs), None)


def _explained(reason: str, inside: str | None = None) -> tuple[str, list[str]]:
    """Extracts the headline of a graph break and the advice below it from torch's layout."""
    found = re.search(
        r"^(\S.*)\n(?: {2}Higher Order Operator: .*\n)? {2}Explanation: (.*)((?:\n(?! ?For more).*)*)",
        reason.strip(),
        re.MULTILINE,
    )
    if found is None:
        lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["torch gives no reason"]
        return shorten_text(next((line for line in lines if not line.endswith(":")), lines[0])), []
    if "torch.compiler.disable" in found[1] and (inside or "").startswith("torch."):  # by this project, and not by the user
        return f"Attempted to call `{inside}`, which Dynamo does not trace", [f"explanation: Dynamo does not trace it ({inside})"]
    held = [name for pattern in _NAMED_IN_CONTEXT for name in re.findall(pattern, found[3], re.MULTILINE)]
    named = dict.fromkeys([*([inside] if inside else []), *held])
    names = f" ({', '.join(named)})" if named else ""
    hints = re.findall(r"^ {2}Hint: (.*)$", found[3], re.MULTILINE)
    return shorten_text(found[1]), [f"explanation: {found[2]}{names}", *(f"hint: {text}" for text in hints[:_HINTS])]


def _joined(lines: Sequence[str]) -> str:
    return "\n  ".join(shorten_text(line) for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _leads_to_model(path: str) -> bool:
    return is_harness(path) or os.path.basename(path).startswith(SOURCE_PREFIX)


def _import_folders() -> Iterator[str]:
    """Yields the folders that modules are imported from, longest first, so that as much as possible of a path is removed."""
    folders = {os.path.abspath(folder) for folder in (*sys.path, os.getcwd()) if folder}
    yield from (f"{folder}/" for folder in sorted(folders, key=len, reverse=True) if folder != "/")
