"""Keeps secrets out of everything that is written: records, descriptions, trial logs, terminal output.

Known secrets are removed wherever they appear: values of environment variables whose names suggest a secret, passwords in URIs,
and anything passed to `register_secret`. Text that looks like a secret is removed too: user and password in any URI, signed query
strings, addresses of webhooks, authorization headers, and keys by the formats of well-known services. This is a safety net; code
should not print secrets in the first place.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, quote_plus, unquote

REDACTED = "***"  # replaces a secret in text

_SHORTEST = 8
"""Minimum length of a secret in characters. A shorter word would match where it is not a secret: `disabled`, a port, part of a
name.
"""

_SHORT = re.compile(r"(?=.*[^\W\d_])(?=.*[\d\W_])\S{4,7}")
"""A shorter secret, redacted only where it stands alone: letters with digits or signs among them, so no common word or number."""

_SURELY_SECRET = re.compile(r"(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|API_?KEY|_PASS|_PWD)$", re.IGNORECASE)
"""Names of variables whose values are secrets even if they are short. Unlike TOKEN_TYPE, the name ends by saying so."""

_MOST_LOG_BYTES = 64 * 2**20

_NAMED_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CACHE_KEY|TOKENS?(_|$)|_(KEY|PASS|PWD|PAT)$"
    r"|AUTHORIZATION|AUTH_(CONFIG|HEADER)|(^|_)(AUTH|BEARER|DSN|SAS|JWT)$|WEBHOOK|CONNECTION_?STRING",
    re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"(?i)([?&;#][^=&\s]*(?:secret|token|passw|credential|key|signature|sig|auth(?!or)|jwt)[^=&\s]*=)[^&\s'\"]+"
)
_PASSWORD_NAME = r"(?:secret(?:[_-]?key)?|passw(?:or)?d|passphrase|(?:api|access|account|private|signing|wandb|openai)[_-]?key)"
_SECRET_NAME = rf"(?:{_PASSWORD_NAME}|credentials?|pwd|(?<!pad_)(?<!pad-)token)"
_MIXED = r"(?=[^\s\"',;&]{0,99}\d)(?=[^\s\"',;&]{0,99}[A-Za-z])(?![~./*])"
"""Begins a value with letters and digits that is no path, which only says where a secret is kept."""
_CHAR = r"[^\s\"',;&()\[\]{}<>$]"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_LOOKS_SECRET: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----).*?(-----END|$)", re.DOTALL), rf"\1{REDACTED}\2"),
    (  # by the formats that services publish for scanners
        re.compile(
            # AWS, GitHub, GitLab, Slack
            r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
            r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"
            # Hugging Face, Google, OpenAI and Anthropic, Stripe, npm, PyPI, Docker, NVIDIA, Replicate, SendGrid
            r"|hf_[A-Za-z0-9]{30,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|sk-[A-Za-z0-9_-]{20,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"
            r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{20,}|nvapi-[\w-]{30,}|r8_[A-Za-z0-9]{30,}|SG\.[\w-]{20,}\.[\w-]{20,}"
            # Shopify, DigitalOcean, Databricks, a Telegram bot, a JSON web token
            r"|shp(?:at|ca|pa|ss)_[a-f0-9]{32}|do[opr]_v1_[a-f0-9]{64}|dapi[a-f0-9]{32}|bot\d{6,12}:[\w-]{30,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})(?![\w-])"
        ),
        REDACTED,
    ),
    (
        re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token)\s+)?)[^\s\"',;]+"),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(bearer\s+)(?=\S{0,99}\d)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{REDACTED}"),
    (
        re.compile(r"(?i)([?&](?:sig|(?:x-amz-|x-goog-)?signature|[\w-]*(?:token|secret|password|passwd|api_?key))=)[^&\s'\"]+"),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(
            r"(https://(?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w-]+\.webhook\.office\.com"
            r"|hooks\.zapier\.com)/)[^\s'\"<>]+"
        ),
        rf"\1{REDACTED}",
    ),
)
"""Patterns of text that looks like a secret wherever it stands, and their replacements."""

_LOOKS_NAMED: Sequence[tuple[re.Pattern[str], str]] = (
    (  # a value with letters and digits behind a name such as API_KEY= or "token":
        re.compile(rf"(?i)({_SECRET_NAME}[\"']?\]?\s{{0,3}}(?:=>|[=:])\s{{0,3}}[bru]?[\"']?){_MIXED}{_CHAR}{{8,}}(?![\w(\[.])"),
        rf"\1{REDACTED}",
    ),
    (  # any value directly behind a name that is surely a secret's, except names and numbers of code
        re.compile(rf"(?i)({_PASSWORD_NAME}[\"']?(?:=|:\s?)[\"'])[^\s\"']{{4,}}(?=[\"'])"),
        rf"\1{REDACTED}",
    ),
    (  # an option of a command line
        re.compile(
            rf"(?i)((?:^|\s)--?[\w-]{{0,40}}(?:(?:{_PASSWORD_NAME}|pwd)(?:\s{{1,3}}|=)(?!-)|token(?:\s{{1,3}}|=){_MIXED})[\"']?)"
            rf"[^\s\"']{{4,}}"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(x-api-key\s*[:=]\s*|(?:set-)?cookie:\s*)[^\s\"',]+"), rf"\1{REDACTED}"),
)
"""The same of a value behind the name of a secret, for lines that hold one of these words, because looking takes long."""
_WORDS = ("secret", "passw", "passphrase", "key", "token", "credential", "pwd", "cookie")

_SCHEME = re.compile(r"(?i)^(?:basic|bearer|token)\s+(?=\S+$)")
_kept: set[str] = set()


def register_secret(secret: str) -> None:
    """Redacts a secret that is in no environment variable, for the rest of this process's life."""
    if len(secret) >= _SHORTEST:
        _kept.add(secret)


def redact_uri(address: str) -> str:
    """Redacts the user, the password, and query parameters with secret-sounding names in a URI; a path is returned as it is.

    People paste keys unquoted, so a password that contains `@` or `/` is redacted as well.
    """
    scheme, colon, rest = address.partition("://")
    if not colon:
        return address
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = authority.rpartition("]")[2].partition(":")[2]
    is_cut = authority.startswith(":") or (port and not port.isdigit())  # cut off by a slash that belongs to the password
    if "@" in authority or (is_cut and "@" in rest):
        rest = f"{REDACTED}@{rest.rpartition('@')[2]}"
    return f"{scheme}://" + _PARAMETER.sub(lambda found: found[1] + REDACTED, rest)


def known_secrets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the known secrets, longest first, because one may be part of another."""
    found = set(_kept)
    for name, value in environ.items():
        if _NAMED_SECRET.search(name):
            found |= {value, value.strip()}
        elif "://" in value and "@" in value:
            password = value.partition("://")[2].rpartition("@")[0].partition(":")[2]
            found |= {password, unquote(password)}
    spelled = {spelling for value in found for secret in _parts(value) for spelling in _spellings(secret)}
    return sorted(spelled, key=lambda secret: (-len(secret), secret))


def _short_secrets(environ: Mapping[str, str]) -> re.Pattern[str] | None:
    """Returns a pattern that finds the known secrets that are short; None if there are none."""
    found = {value.strip() for name, value in environ.items() if _SURELY_SECRET.search(name)}
    short = sorted(value for value in found if _SHORT.fullmatch(value))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, short))})(?!\w)") if short else None


def _parts(value: str) -> Iterator[str]:
    """Yields the secret parts of a value. Each line of a private key counts; a path only says where a secret is kept."""
    lines = value.splitlines()
    if len(lines) > 1 or not Path(value).is_absolute():
        found = (value, *map(str.strip, lines), _SCHEME.sub("", value), *_texts_of_json(value))
        yield from (part for part in found if len(part) >= _SHORTEST)


def _texts_of_json(value: str) -> Iterator[str]:
    if not value.lstrip().startswith("{"):
        return
    with suppress(ValueError, RecursionError):
        waiting = [json.loads(value)]
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, str):
                yield inner
            elif isinstance(inner, dict | list):
                waiting.extend(inner.values() if isinstance(inner, dict) else inner)


def _spellings(secret: str) -> Iterator[str]:
    """Yields a secret verbatim, as Python and JSON quote it alone or within a text, and as URIs encode it."""
    quoted = repr(f'{secret}"')[1:-2]  # the appended double quote makes Python escape single quotes
    yield from (secret, quoted, quoted.replace("\\'", "'"))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    with suppress(UnicodeEncodeError):  # environment values may hold bytes that are not text
        yield from (quote(secret), quote(secret, safe=""), quote_plus(secret))


def redact_text(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the text with secrets redacted."""
    return _without(text, known_secrets(environ), _short_secrets(environ))


def redact_json(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Returns a JSON value with secrets redacted in all its strings."""
    secrets, short = known_secrets(environ), _short_secrets(environ)

    def cleared(inner: Any) -> Any:
        if isinstance(inner, str):
            return _without(inner, secrets, short)
        if isinstance(inner, Mapping):
            return {cleared(name): cleared(member) for name, member in inner.items()}
        if not isinstance(inner, list | tuple):
            return inner
        words = [cleared(member) for member in inner]
        for place, (option, word) in enumerate(pairwise(words), start=1):  # an option and its value are two words of a command
            if isinstance(option, str) and isinstance(word, str) and option.startswith("-"):
                words[place] = _without_named(f"{option} {word}").removeprefix(f"{option} ")
        return words

    return cleared(value)


def is_redacted(value: Any, written: Any) -> bool:
    """Tells whether `written` is the JSON value with some of its text redacted, by whatever secrets were known then."""
    if isinstance(value, Mapping) and isinstance(written, Mapping):
        return value.keys() == written.keys() and all(is_redacted(value[name], written[name]) for name in value)
    if isinstance(value, list | tuple) and isinstance(written, list | tuple):
        return len(value) == len(written) and all(map(is_redacted, value, written))
    if isinstance(value, str) and isinstance(written, str) and REDACTED in written:
        return re.fullmatch(".+".join(map(re.escape, written.split(REDACTED))), value, re.DOTALL) is not None
    return bool(value == written)


def redact_logs(folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Redacts the files in a folder that nothing writes to any more."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        redact_log(path, environ)


def redact_log(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Redacts one file; one that cannot be read is left alone."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_LOG_BYTES:
            return
        found = path.read_bytes().decode("utf-8", "surrogateescape")
        if (cleared := redact_text(found, environ)) != found:
            part = path.with_name(f".{path.name}.part")
            part.write_bytes(cleared.encode("utf-8", "surrogateescape"))
            part.replace(path)


def _without(text: str, secrets: Sequence[str], short: re.Pattern[str] | None) -> str:
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    if short is not None:
        text = short.sub(REDACTED, text)
    if "://" in text:
        text = _ADDRESS.sub(lambda found: redact_uri(found[0]), text)
    for pattern, rest in _LOOKS_SECRET:
        text = pattern.sub(rest, text)
    if not _has_word(text):
        return text
    return "\n".join(_without_named(line) if _has_word(line) else line for line in text.split("\n"))


def _has_word(text: str) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in _WORDS)


def _without_named(line: str) -> str:
    for pattern, rest in _LOOKS_NAMED:
        line = pattern.sub(rest, line)
    return line


_MAX_LAST_LINE_BYTES = 4000  # how much of the end of a process's output is searched for its last line


def last_line(output: IO[bytes]) -> str:
    """Returns the last line of a process's output, with a colon before it and without secrets; nothing if there is none."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_LAST_LINE_BYTES))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return f": {redact_text(lines[-1].strip())}" if lines else ""
