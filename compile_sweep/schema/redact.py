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
_PARAMETER = re.compile(r"(?i)([?&;][^=&\s]*(?:secret|token|passw|credential|key|signature|sig)[^=&\s]*=)[^&\s'\"]+")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_LOOKS_SECRET: Sequence[tuple[re.Pattern[str], str]] = (
    (  # keys of AWS, GitHub, GitLab, Slack, Hugging Face, Google and OpenAI, by the formats that they publish for scanners
        re.compile(
            r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
            r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|hf_[A-Za-z0-9]{30,}|AIza[\w-]{35}|sk-[A-Za-z0-9_-]{20,})(?![\w-])"
        ),
        REDACTED,
    ),
    (
        re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token)\s+)?)[^\s\"',;]+"),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{16,}"), rf"\1{REDACTED}"),
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
        return [cleared(member) for member in inner] if isinstance(inner, list | tuple) else inner

    return cleared(value)


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
    return text


_MAX_LAST_LINE_BYTES = 4000  # how much of the end of a process's output is searched for its last line


def last_line(output: IO[bytes]) -> str:
    """Returns the last line of a process's output, with a colon before it and without secrets; nothing if there is none."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_LAST_LINE_BYTES))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return f": {redact_text(lines[-1].strip())}" if lines else ""
