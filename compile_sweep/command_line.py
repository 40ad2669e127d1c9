"""Command lines: parses options into a dataclass with tyro, and reports every mistake as one sentence with exit code 2."""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TextIO, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors as complaints  # private, so pyproject.toml limits tyro to versions that are known to have it

import compile_sweep
from compile_sweep import command_help
from compile_sweep.schema.errors import CompileSweepError, check_utf8, one_line_message
from compile_sweep.schema.visible_text import for_terminal

Options = TypeVar("Options")
Command = TypeVar("Command")

READER_GONE, USAGE_ERROR, STOPPED = 1, 2, 130

Flag = tyro.conf.FlagCreatePairsOff[bool]  # a switch that is off by default and has no `--no-name`, unlike a plain bool


@dataclass(frozen=True, slots=True)
class Several:
    """Marks an option of several values. A word that is not a value ends it, so that the command's own argument may follow."""

    accepts: Callable[[str], bool]
    """Tells whether a word may be a further value. The first word always is a value."""


Repeated: Any = tyro.conf.UseAppendAction
"""Marks an option of several values that takes one value at a time and may be repeated."""

_CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues)


class UsageError(CompileSweepError):
    """Words on the command line do not fit its options."""


def parse(options: type[Options], prog: str, arguments: Sequence[str], *, default: Options | None = None) -> Options:
    """Parses the arguments into options; `--help` and `--version` print and exit.

    Args:
        arguments: Words of the command line. An option of several values may be given more than once.
        default: Values of options that are not given; by default the class's own.

    Raises:
        UsageError: There is an unknown option, or a value of the wrong type.
        ConfigError: A word is not valid text, or the class itself refuses a value.
    """
    if "--version" in arguments:
        print(f"compile-sweep {compile_sweep.__version__}")
        raise SystemExit(0)
    if set(command_help.WORDS).intersection(arguments):
        print(command_help.help_text(options, prog, all_options="--help-all" in arguments), end="")
        raise SystemExit(0)
    words = _checked(options, arguments)
    with complaints.on_parse_error(lambda complaint: _refuse(complaint, options, prog, words)):
        usual = tyro.MISSING_NONPROP if default is None else default
        return tyro.cli(options, prog=prog, args=words, default=usual, add_help=False, config=_CONFIG)


def parse_known(options: type[Options], prog: str, arguments: Sequence[str]) -> Options:
    """Parses the options of this class among arguments for other options; raises the errors of `parse`."""
    words = _checked(options, arguments)
    with complaints.on_parse_error(lambda complaint: _refuse(complaint, options, prog, words)):
        return tyro.cli(options, prog=prog, args=words, return_unknown_args=True, add_help=False, config=_CONFIG)[0]


class _Option(NamedTuple):
    """A field that is an option."""

    name: str
    kind: Any
    flag: str
    has_negative: bool
    accepts: Callable[[str], bool] | None
    """For an option of several values, tells whether a word may be a further one; None for one value, or one at a time."""


def _options(options: type[Any]) -> Iterator[_Option]:
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        kind, *marks = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else [hints[field.name]]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _options(kind)
        elif tyro.conf.Suppress not in marks and tyro.conf.Positional not in marks:
            called = next(filter(None, (getattr(mark, "name", None) for mark in marks)), field.name)
            has_negative = kind is bool and tyro.conf.FlagCreatePairsOff not in marks
            yield _Option(field.name, kind, f"--{called.replace('_', '-')}", has_negative, _accepts(kind, marks))


def _accepts(kind: Any, marks: Sequence[Any]) -> Callable[[str], bool] | None:
    if get_origin(kind) is not tuple or Repeated in marks:
        return None
    member = get_args(kind)[0]
    if isinstance(member, type) and issubclass(member, Enum):
        values = {str(one.value) for one in member}
        return values.__contains__
    return next((mark.accepts for mark in marks if isinstance(mark, Several)), lambda word: True)


def flags(options: type[Any]) -> dict[str, str]:
    """Returns the flag of each field that is an option, by the field's name."""
    return {option.name: option.flag for option in _options(options)}


def _checked(options: type[Any], arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with all values of each multi-value option in one place, however often the option is given."""
    check_utf8(arguments)
    paths = {option.flag for option in _options(options) if Path in (option.kind, *get_args(option.kind))}
    for word, following in pairwise((*arguments, "?")):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") in paths and not (value if equals else following):
            raise UsageError(f"{flag} has no value; give one, or leave it out")
    several = {option.flag: option.accepts for option in _options(options) if option.accepts is not None}
    words: list[str] = []
    values: dict[str, list[str]] = {}
    into, is_first = words, False
    accepts: Callable[[str], bool] = bool
    for word in arguments:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in several:
            into, accepts = values.setdefault(flag, []), several[flag]
            into += [value] if equals else []
            is_first = not equals
        elif word.startswith("--"):
            into = words
            into.append(word)
        elif into is words or is_first or accepts(word):
            into.append(word)
            is_first = False
        else:
            into = words
            into.append(word)
    if empty := next((flag for flag, given in values.items() if not given), None):
        raise UsageError(f"{empty} has no value; give one or more, or leave it out")
    return [*words, *(word for flag, given in values.items() for word in (flag, *given))]


def _refuse(complaint: complaints.ParseErrorEvent, options: type[Any], prog: str, words: Sequence[str]) -> NoReturn:
    see = f"see {prog} --help"
    match complaint:
        case complaints.UnrecognizedArgs(tokens=[word, *_]):
            known = [option.flag for option in _options(options)]
            known += [option.flag.replace("--", "--no-", 1) for option in _options(options) if option.has_negative]
            near = get_close_matches(word, known, n=1)
            raise UsageError(f"no option or argument {word!r}; {f'did you mean {near[0]}?' if near else see}")
        case complaints.MissingArgs(missing_arguments=missing):
            names = [str(one.arg.lowered.metavar if one.arg.is_positional() else _shown(one.arg)) for one in missing]
            raise UsageError(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing; {see}")
        case complaints.InvalidChoice(argument=argument, value=value, choices=choices):
            able = ", ".join(sorted({*choices} - {"None"}))
            raise UsageError(f"{_shown(argument)} cannot be {value!r}; use one of {able}")
        case complaints.BadValue(argument=argument):
            raise UsageError(f"{_shown(argument)} has no value; give one, or leave it out")
        case complaints.InstantiationFailure(argument=argument) if argument is not None:
            name = _shown(argument)
            kind = next((option.kind for option in _options(options) if option.flag == name), None)
            right = next((f"give {says}" for number, says in _NUMBERS.items() if number in (kind, *get_args(kind))), None)
            if right is not None and name.endswith("-s"):
                right += " of seconds"
            raise UsageError(f"{name} cannot be {_value_of(name, words)!r}; {right or f'{see} for what it takes'}")
    raise UsageError(f"these words do not fit together; {see}")


_NUMBERS = {int: "a whole number", float: "a number"}


def _shown(argument: Any) -> str:
    """Returns an option's name, without the earlier ones that it is also accepted by."""
    return str(argument.display_name()).rpartition("/")[2]


def _value_of(flag: str, words: Sequence[str]) -> str:
    """Returns the value of an option in the words; the last one counts."""
    for word, following in reversed([*pairwise((*words, ""))]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following
    return ""


def chosen(commands: Mapping[str, tuple[type[Any], Command]], prog: str, words: Sequence[str]) -> tuple[Any, Command] | None:
    """Returns the options and function of the command that the words begin with; None after help. UsageError for other words."""
    name = words[0] if words else ""
    if name in command_help.WORDS:
        says = {command: (options.__doc__ or "").splitlines()[0] for command, (options, _) in commands.items()}
        print(command_help.commands_text(prog, says), end="")
        return None
    if name not in commands:
        raise UsageError(f"{f'no command {name!r}' if name else 'a command is missing'}; use one of {', '.join(commands)}")
    options, function = commands[name]
    return parse(options, f"{prog} {name}", words[1:]), function


def words_of(arguments: Sequence[str] | None) -> Sequence[str]:
    """Returns the words of a command line, by default this process's."""
    return sys.argv[1:] if arguments is None else arguments


def main_of(options: type[Options], command: Callable[[Options], int], prog: str) -> Callable[..., int]:
    """Returns the `main` of a command, which takes its words, by default this process's, and how a person calls it."""

    def main(arguments: Sequence[str] | None = None, prog: str = prog) -> int:
        return run(lambda: command(parse(options, prog, words_of(arguments))))

    return main


def run(command: Callable[[], int]) -> int:
    """Runs a command; a user's mistake is one sentence on stderr and exit code 2, a reader that stops early exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that its encoding lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        with _ending_in_order():
            code = command()
        if sys.stdout is not None:  # it is None if it was closed at the start
            sys.stdout.flush()
    except CompileSweepError as error:
        print(for_terminal(f"error: {one_line_message(error)}", sys.stderr), file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    except MemoryError:
        print("error: there is not enough memory for what was asked; ask for less, or free some", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `| head` has read enough; at exit, Python would try again to write the rest, and complain
        _discard_output()
        return READER_GONE
    except OSError as error:
        if not _has_current_folder():
            print("error: the current folder does not exist any more; change to one that does", file=sys.stderr)
            return USAGE_ERROR
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        _discard_output()
        with contextlib.suppress(OSError):
            print(f"error: the output cannot be written ({error.strerror}); send it elsewhere", file=sys.stderr)
        return USAGE_ERROR
    return code


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Errors that writing to an open stream can raise. They name no file, unlike those of opening or renaming one."""


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Makes SIGTERM, which `timeout` sends, and SIGHUP of a closed terminal raise, so that a command's processes end with it."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in kept.items():
        if handler is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def optional_output() -> Iterator[None]:
    """Lets a command continue while its output cannot be written: a full disk, a closed terminal, a reader that has left."""
    kept = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        streams = [_Optional(stream, nowhere) for stream in kept]
        sys.stdout, sys.stderr = streams
        try:
            yield
        finally:
            for stream in streams:
                stream.flush()
            sys.stdout, sys.stderr = kept


class _Optional:
    """A stream whose failures to write are ignored."""

    def __init__(self, stream: TextIO | None, nowhere: TextIO) -> None:
        self._stream, self._nowhere = stream or nowhere, nowhere

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # otherwise unwritten text is retried, at the latest at exit
                os.dup2(self._nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
