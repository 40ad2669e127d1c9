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
    r"|^PASS$|AUTHORIZATION|AUTH_(CONFIG|HEADER)|(^|_)(AUTH|BEARER|COOKIE|DSN|SAS|JWT)$|WEBHOOK|CONNECTION_?STRING",
    re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"(?i)([?&;#][^=&\s]*(?:secret|token|passw|credential|key|signature|sig|auth(?!or)|jwt)[^=&\s]*=)[^&\s'\"]+"
)
_NAME_OF_KEY = (
    "api|access|account|app|application|auth|client|consumer|database|db|encryption|license|master|openai|private|service|session"
    "|shared|shared[_-]?access|signing|storage|subscription|wandb|webhook"
)
_PASSWORD_NAME = (
    rf"(?:secret(?:[_-]?key)?(?:[_-]?base)?|passw(?:or)?d|passphrase|db_?pass|(?:{_NAME_OF_KEY})[_-]?key(?:[_-]?data)?)"
)
_SECRET_NAME = rf"(?:{_PASSWORD_NAME}|credentials?|pwd|(?<!pad_)(?<!pad-)token)"
_MIXED = r"(?=[^\s\"',;&<]{0,99}\d)(?=[^\s\"',;&<]{0,99}[A-Za-z])(?![~./*])"
"""Begins a value with letters and digits that is no path, which only says where a secret is kept."""
_CHAR = r"[^\s\"',;&()\[\]{}<>$\\]"
_QUOTE = r"\\?[\"']"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_PARAMETERS = (
    "(?:x-amz-|x-goog-)?signature|sig|code|assertion|samlresponse|pw|pass|sid|session(?:_?id)?|phpsessid|jsessionid"
    r"|[\w-]*(?:token|secret|password|passwd|api_?key)"
)

_KEYS_OF_SERVICES = (
    # clouds: AWS, Alibaba, Tencent, Azure's applications, Google, DigitalOcean, Heroku, Fly, Cloudflare, Terraform, Pulumi
    r"(?:A3T[A-Z0-9]|A[KS]IA|ABIA|ACCA)[A-Z0-9]{16}",
    r"ABSK[A-Za-z0-9+/]{90,}=*",
    r"bedrock-api-key-[\w+/=-]{20,}",
    r"LTAI[A-Za-z0-9]{16,26}",
    r"AKID[A-Za-z0-9]{32}",
    r"[\w.~]{3}\dQ~[\w.~-]{31,34}",
    r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",
    r"do[opr]_v1_[a-f0-9]{64}",
    r"HRKU-AA[\w-]{50,}",
    r"fo1_[\w-]{40,}|fm[12][ar]?_[A-Za-z0-9+/]{90,}=*",
    r"v1\.0-[a-f0-9]{24}-[a-f0-9]{140,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}",
    r"pul-[a-f0-9]{40}",
    # code and packages: GitHub, GitLab, Atlassian, npm, PyPI, RubyGems, Docker, Artifactory, Linear, Postman
    r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}",
    r"gl(?:pat|dt|rt|ptt|ft|soat|oas|agent|imt|ffct)-[\w.-]{20,}|glcbt-\w{1,5}_[\w-]{20,}|GR1348941[\w-]{20,}",
    r"ATATT3[\w=-]{150,}|ATBB[A-Za-z0-9]{28,}",
    r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|rubygems_[a-f0-9]{48}|dckr_pat_[\w-]{20,}|AKCp[A-Za-z0-9]{69}|cmVmd[A-Za-z0-9]{59}",
    r"lin_api_[A-Za-z0-9]{40}|PMAK-[a-f0-9]{24}-[a-f0-9]{34}",
    # models and machines: Hugging Face, OpenAI and Anthropic, Perplexity, Groq, xAI, Cerebras, Fireworks, Together, LangSmith
    r"(?:hf|api_org)_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|pplx-[A-Za-z0-9]{40,}|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{60,}",
    r"csk-[A-Za-z0-9]{40,}|tgp_v1_[\w-]{40,}|lsv2_(?:pt|sk)_[A-Za-z0-9_]{32,}",
    # NVIDIA, Replicate, RunPod, Modal, Databricks, Prefect
    r"nvapi-[\w-]{30,}|r8_[A-Za-z0-9]{30,}|rpa_[A-Za-z0-9]{40,}|dapi[a-f0-9]{32}(?:-\d)?|pn[ub]_[A-Za-z0-9]{36}",
    r"(?:fw_|a[ks]-)(?=[A-Za-z0-9]{0,30}\d)(?=[A-Za-z0-9]{0,30}[A-Z])(?=[A-Za-z0-9]{0,30}[a-z])[A-Za-z0-9]{22,30}",
    # messages: Slack, Discord's bots, Telegram, Twilio, SendGrid, Mailgun, Mailchimp, Brevo
    r"xox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}",
    r"[MNO](?=[\w-]{0,25}\d)[\w-]{23,25}\.[\w-]{6}\.(?=[\w-]{0,37}\d)(?=[\w-]{0,37}[A-Z])[\w-]{27,38}",
    r"bot\d{6,12}:[\w-]{30,}|\d{8,10}:AA[\w-]{33}",
    r"(?:AC|SK)[a-f0-9]{32}|SG\.[\w-]{20,}\.[\w-]{20,}|key-[a-f0-9]{32}|[a-f0-9]{32}-us\d{1,2}|xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}",
    # payments and shops: Stripe, Square, Shopify, Facebook
    r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{24,}|sq0[a-z]{3}-[\w-]{22,}|EAAA[\w-]{56,}|EAA[MC][A-Za-z0-9]{90,}",
    r"shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}",
    # operations: Grafana, Sentry, New Relic, Dynatrace, Doppler, Vault, 1Password, Tailscale, Supabase, PlanetScale, age
    r"glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}|glc_[A-Za-z0-9+/]{32,}=*|sntryu_[a-f0-9]{64}|sntrys_[\w+/=]{40,}|NRAK-[A-Z0-9]{27}",
    r"dt0c01\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{64}|dp\.pt\.[A-Za-z0-9]{40,}|hv[sbr]\.[\w-]{24,}|ops_eyJ[\w+/-]{100,}=*",
    r"tskey-[a-z]+-[\w-]{20,}|sbp_[a-f0-9]{40}|pscale_(?:tkn|oauth|pw)_[\w=.-]{32,}|sha256~[\w-]{43}|AGE-SECRET-KEY-1[A-Z0-9]{58}",
    # Notion, Figma, Airtable
    r"ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43}|figd_[\w-]{40,}|pat[A-Za-z0-9]{14}\.[a-f0-9]{64}",
    # a JSON web token
    r"eyJ[\w-]{8,}\.(?:eyJ[\w-]{4,}\.?[\w-]*|[\w-]{8,}\.[\w-]{8,})",
)
"""Keys and tokens by the formats that services publish for scanners."""

_LOOKS_SECRET: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----).*?(-----END|$)", re.DOTALL), rf"\1{REDACTED}\2"),
    (re.compile(rf"(?<!\w)(?=[\w.~:+/=-]{{15}})(?:{'|'.join(_KEYS_OF_SERVICES)})(?![\w-])"), REDACTED),
    (
        re.compile(rf"(?i)([?&](?!code=[^&\s]{{0,11}}(?:[&\s]|$))(?:{_PARAMETERS})=)(?:(?<!code=)|{_MIXED})[^&\s'\"]+"),
        rf"\1{REDACTED}",
    ),
)
"""Patterns of text that looks like a secret wherever it stands, and their replacements."""

_LOOKS_NAMED = tuple(
    re.compile(pattern)
    for pattern in (
        # schemes of several parts: the rest of the line
        r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?(?:digest|aws4-hmac-sha256|oauth|hawk|ntlm|negotiate)\s)[^\r\n]+",
        rf"(?i)\b(authorization[\"']?\s*[:=,]\s*b?[\"']?(?:(?:basic|bearer|token)\s+|[a-z][\w-]{{0,20}}\s+{_MIXED})?)[^\s\"',;]+",
        r"(?i)\b(bearer\s+)(?=\S{0,99}\d)[A-Za-z0-9._~+/=-]{8,}",
        r"(?i)\b(signature=)[a-f0-9]{64}",
        r"(\b(?:hooks\.(?:slack|zapier)\.com|discord(?:app)?\.com/api/(?:v\d+/)?webhooks|webhook\.office\.com)/)[^\s'\"<>]+",
        # what is typed to log in: W&B's key, and user:password of curl
        rf"(?i)(\bwandb\s+login\s+(?:-\S+\s+){{0,4}}|\blogin\(\s*(?:key\s*=\s*)?[\"']){_MIXED}[\w-]{{30,}}",
        r"(\bcurl\b[^\n]{0,300}?\s(?:-u|--user)[\s=]?[\"']?[^\s:\"']{1,60}:)(?!//)[^\s\"']+",
        r"(\b(?:docker|podman|helm)\s[^\n]{0,40}\blogin\b[^\n]{0,100}?\s-p[\s=]?)[^\s\"']+",
        r"(\b(?:sshpass|mysql|mysqldump)\b[^\n]{0,100}?\s-p\s?)[^\s\"']{4,}",
        # a value with letters and digits behind a name such as API_KEY= or "token":
        rf"(?i)({_SECRET_NAME}(?:{_QUOTE})?\]?\s{{0,3}}(?:=>|:=|[=:]|%3[AD])\s{{0,3}}[bru]?(?:{_QUOTE})?){_MIXED}{_CHAR}{{8,}}(?![\w(\[.])",
        # any value of an environment variable whose name ends by saying so, except words that mean none
        r"(?<![\w.])([A-Z0-9_]{0,60}(?:PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|_PASS|_PWD)=)"
        r"(?!none\b|null\b|true\b|false\b|os\.|[\w.]+\()(?![~./*$<\"'])[^\s\"',;&]{6,}(?![\w(\[.])",
        # any value directly behind a name that is surely a secret's, except names and numbers of code
        rf"(?i)({_PASSWORD_NAME}[\"']?(?:=|:\s?)[\"'])[^\s\"']{{4,}}(?=[\"'])",
        # an element or an attribute of XML
        rf"(?i)(<[\w:-]{{0,40}}{_SECRET_NAME}>)[^\s<]{{4,}}(?=</)",
        rf"(?i)({_SECRET_NAME}\"\s+value=\")[^\s\"]{{4,}}",
        # an option of a command line, also as two words of a list
        rf"(?i)((?:^|[\s\"'])--?[\w-]{{0,40}}(?:(?:{_PASSWORD_NAME}|pwd)(?:\s{{1,3}}|=|[\"'],\s?)(?!-)"
        rf"|token(?:\s{{1,3}}|=|[\"'],\s?[\"']){_MIXED})[\"']?)[^\s\"']{{4,}}",
        # a sentence, and what .netrc and Redis say
        rf"(?i)\b((?:(?:password|passphrase)(?:\s+(?:is|was))?|(?:token|secret|api key)\s+(?:is|was)|requirepass)\s+[\"']?)"
        rf"{_MIXED}{_CHAR}{{12,}}",
        rf"([\"']auth[\"']\s?:\s?[\"']|\b_auth\s?=\s?[\"']?){_MIXED}[\w+/=-]{{16,}}",
        r"(?i)\b(x-api-key\s*[:=]\s*)[^\s\"',]+",
        r"(?i)(cookie[\"']?:\s*[\"']?|\b_gitlab_session=)[^\r\n\"']+",
        r"(?i)(private-mac:\s*)\S+",
    )
)
"""The same, behind what stays of them, for lines that hold one of these words, because looking takes long."""
_WORDS = (
    *("secret", "passw", "passphrase", "pwd", "_pass", "key", "token", "credential", "auth", "bearer", "cookie", "session="),
    *("signature", "login", "curl", "sshpass", "mysql", "requirepass", "private-mac", "webhook", "hooks."),
)

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
    for pattern in _LOOKS_NAMED:
        line = pattern.sub(rf"\1{REDACTED}", line)
    return line


_MAX_LAST_LINE_BYTES = 4000  # how much of the end of a process's output is searched for its last line


def last_line(output: IO[bytes]) -> str:
    """Returns the last line of a process's output, with a colon before it and without secrets; nothing if there is none."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_LAST_LINE_BYTES))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return f": {redact_text(lines[-1].strip())}" if lines else ""
