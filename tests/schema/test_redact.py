"""Secrets are found wherever they are, and other text is unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from samples import H200

from compile_sweep.schema import journal, redact
from compile_sweep.schema.errors import ConfigError, one_line_message
from compile_sweep.schema.redact import redact_json, redact_text, redact_uri
from compile_sweep.schema.settings import CompileSettings
from orchestrator.cluster import remote_logs
from orchestrator.config import SweepConfig, shown
from orchestrator.run.sweep_folder import begin, resume, write_json
from orchestrator.storage import filesystem

EAGER = CompileSettings.parse("scope=eager")

ENVIRON = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfi",
    "AWS_SESSION_TOKEN": "IQoJb3JpZ2luX2VjEXAMPLE==",
    "COMPILE_SWEEP_CACHE_KEY": "ab" * 32,
    "HF_TOKEN": "hf_planted_token",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-planted",
    "TORCHINDUCTOR_REDIS_URL": "redis://:redis%2Dplanted@host:6379",
    "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
    "TOKENIZERS_PARALLELISM": "disabled",
    "RAY_AUTH_MODE": "token",
}


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "COMPILE_SWEEP_CACHE_KEY", "HF_TOKEN",
                                  "MLFLOW_TRACKING_PASSWORD"])  # fmt: skip
def test_a_variable_that_is_named_like_a_secret_is_one(name: str) -> None:
    assert redact_text(f"before{ENVIRON[name]}, after", ENVIRON) == "before***, after"


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD", "MYSECRET", "OPENAIAPIKEY", "AUTHTOKEN", "API_TOKENS", "DB_PASS", "GITHUB_PAT", "OPENAI_KEY",
        "SLACK_WEBHOOK_URL", "AUTHORIZATION", "PROXY_AUTH", "BEARER", "SENTRY_DSN", "STORAGE_CONNECTION_STRING",
        "DOCKER_AUTH_CONFIG",
    ],
)  # fmt: skip
def test_a_secrets_name_need_not_set_the_word_apart(name: str) -> None:
    assert redact_text("it says planted-word", {name: "planted-word"}) == "it says ***"


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "PWD", "COMPASS", "PATTERN", "LOGKEY", "SORT_KEYS", "SSH_AUTH_SOCK", "AUTHOR", "KEYBOARD"]
)
def test_a_name_that_only_looks_alike_is_none_of_a_secret(name: str) -> None:
    assert redact_text("it says planted-word", {name: "planted-word"}) == "it says planted-word"


def test_passwords_in_addresses_of_variables_are_secret_quoted_and_not() -> None:
    assert redact_text("redis%2Dplanted and redis-planted", ENVIRON) == "*** and ***"


AWKWARD = {
    "DB_PASSWORD": 'it\'s "planted" \\ so/é+%',
    "APOSTROPHE_PASSWORD": "it's-planted",
    "SSH_PRIVATE_KEY": "-----BEGIN-----\n/planted+first/line\n\tplanted-second\r\nshort\n",
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(
    "spell",
    [str, repr, json.dumps, partial(json.dumps, ensure_ascii=False), quote, partial(quote, safe=""), quote_plus,
     lambda value: repr(f"{value} and 'this' and \"that\""), lambda value: repr({"a": [value]})],
)  # fmt: skip
def test_a_secret_is_hidden_however_it_is_quoted(name: str, spell: Callable[[str], str]) -> None:
    cleared = redact_text(f"before {spell(AWKWARD[name])} after", AWKWARD)
    assert "***" in cleared
    assert "planted" not in cleared


def test_each_line_of_a_secret_is_one_unless_it_is_short() -> None:
    assert redact_text("/planted+first/line, then planted-second and short", AWKWARD) == "***, then *** and short"
    assert redact_text(quote("/planted+first/line", safe=""), AWKWARD) == "***"


def test_a_secret_that_is_no_text_is_hidden_too() -> None:
    assert redact_text("it says planted\udcff", {"DB_PASSWORD": "planted\udcff"}) == "it says ***"


def test_a_short_secret_is_none_even_if_its_quoted_form_is_long() -> None:
    assert redact_text(r"a\n\n\n\nb", {"DB_PASSWORD": "a\n\n\n\nb"}) == r"a\n\n\n\nb"


def test_paths_and_words_are_no_secrets() -> None:
    text = "the token of /home/me/key.json is disabled"
    assert redact_text(text, ENVIRON) == text


@pytest.mark.parametrize(
    ("address", "without"),
    [
        ("redis://:pass@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:p@ss@host:6379", "redis://***@host:6379"),
        ("redis://:pa/ss@host:6379", "redis://***@host:6379"),
        ("redis://:12/34@host", "redis://***@host"),
        ("redis://host:6379/0?db=1&password=pass", "redis://host:6379/0?db=1&password=***"),
        ("s3://AKIA:se/cr+et@bucket/x?region=r&endpoint_override=h:1", "s3://***@bucket/x?region=r&endpoint_override=h:1"),
        ("fsspec+s3://bucket/x?secret=pass", "fsspec+s3://bucket/x?secret=***"),
        ("s3://bucket/a@b?region=r", "s3://bucket/a@b?region=r"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("/folder/a@b", "/folder/a@b"),
        ("C:folder", "C:folder"),
    ],
)
def test_an_address_keeps_all_but_user_password_and_secret_options(address: str, without: str) -> None:
    assert redact_uri(address) == shown(address) == without
    assert redact_text(f"at {address} it says", {}) == f"at {without} it says"
    if "://" in address:
        assert "pass" not in filesystem.without_credentials(address)


@pytest.mark.parametrize("address", ["http://[::1", "s3://", "://", "a://@", "a://b:c:d@e", "a://?#@"])
def test_what_is_no_address_is_no_traceback(address: str) -> None:
    redact_uri(address)
    filesystem.without_credentials(address)
    redact_text(address, {})


def test_the_key_id_of_an_account_is_hidden_anywhere() -> None:
    assert redact_text("user AKIAIOSFODNN7EXAMPLE may not", {}) == "user *** may not"


CANARY = "pl4nt3d" * 6
LOOKS_SECRET = {
    "an authorization header": (f"Authorization: Bearer {CANARY}", "Authorization: Bearer ***"),
    "basic authorization in JSON": (f'{{"authorization": "Basic {CANARY}"}}', '{"authorization": "Basic ***"}'),
    "a bearer token": (f"sent bearer {CANARY}, refused", "sent bearer ***, refused"),
    "a signed path": (f"GET /container/blob?sv=2024&sig={CANARY}&se=1", "GET /container/blob?sv=2024&sig=***&se=1"),
    "a signed address": (f"https://a.blob.example/c?sp=r&sig={CANARY}", "https://a.blob.example/c?sp=r&sig=***"),
    "a token of a query": (f"path?access_token={CANARY}", "path?access_token=***"),
    "Slack's webhook": (f"https://hooks.slack.com/services/T0/B0/{CANARY}", "https://hooks.slack.com/***"),
    "Discord's webhook": (f"to https://discord.com/api/webhooks/12/{CANARY} now", "to https://discord.com/api/webhooks/*** now"),
    "Teams' webhook": (f"https://acme.webhook.office.com/webhookb2/{CANARY}", "https://acme.webhook.office.com/***"),
    "OpenAI's key": (f"key sk-proj-{CANARY}", "key ***"),
    "GitHub's token": (f"ghp_{CANARY}", "***"),
    "GitLab's token": (f"glpat-{CANARY}", "***"),
    "Hugging Face's token": (f"hf_{CANARY}", "***"),
    "Slack's token": (f"xoxb-12345-{CANARY}", "***"),
    "Slack's app token": (f"xapp-1-A1-{CANARY}", "***"),
    "Stripe's key": (f"sk_live_{CANARY}", "***"),
    "npm's token": (f"npm_{CANARY}", "***"),
    "NVIDIA's key": (f"nvapi-{CANARY}", "***"),
    "a bot's address": (f"https://api.telegram.org/bot123456789:{CANARY}/send", "https://api.telegram.org/***/send"),
    "a JSON web token": (f"eyJhbGciOiJIUzI1NiJ9.{CANARY}.{CANARY}", "***"),
    "a private key": (f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END", "-----BEGIN PRIVATE KEY-----***-----END"),
    "a variable that is printed": (f"AWS_SECRET_ACCESS_KEY={CANARY}", "AWS_SECRET_ACCESS_KEY=***"),
    "a variable of Python": (f"config = {{'auth_token': '{CANARY}', 'x': 1}}", "config = {'auth_token': '***', 'x': 1}"),
    "a field of JSON": (f'{{"api_key": "{CANARY}"}}', '{"api_key": "***"}'),
    "a line of YAML": (f"password: {CANARY}", "password: ***"),
    "an option": (f"train.py --wandb-key {CANARY} --lr 1", "train.py --wandb-key *** --lr 1"),
    "an option with =": (f"train.py --api-token={CANARY}", "train.py --api-token=***"),
    "a header of a key": (f"x-api-key: {CANARY}", "x-api-key: ***"),
    "a connection string": (f"AccountName=x;AccountKey={CANARY};Suffix=y", "AccountName=x;AccountKey=***;Suffix=y"),
    "a fragment": (f"https://host/done#access_token={CANARY}", "https://host/done#access_token=***"),
}


@pytest.mark.parametrize(("said", "without"), LOOKS_SECRET.values(), ids=LOOKS_SECRET.keys())
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(said: str, without: str) -> None:
    assert redact_text(said, {}) == without
    assert CANARY not in json.dumps(redact_json({said: [said, {"reason": f"it said {said}"}]}, {}))
    assert CANARY not in one_line_message(ConfigError(said))


@pytest.mark.parametrize(
    "text",
    [
        "scope=full,mode=max-autotune?settings_key=scope=full",
        "the bearer of this", "basic arithmetic of bfloat16", "task-12345678901234567890123", "authorization is needed",
        "--settings scope=regional,dynamic=mark", "sk-learn", "https://discord.com/channels/1", "?size=tiny&seed=1",
        "max_tokens=4096 and pad_token_id=50256", "token = tokenizer2.encode(text)", "--tokens-per-batch 128k", "api_key=None",
        "key_padding_mask=x1", "unexpected token: 'x1'", "--password", "secret=os.environ['A1']", "a token of 12 characters",
    ],
)  # fmt: skip
def test_what_only_resembles_a_secret_stays(text: str) -> None:
    assert redact_text(text, {}) == text


def test_what_stands_within_a_variable_is_hidden_apart_from_it() -> None:
    docker = json.dumps({"auths": {"registry.example": {"auth": "dXNlcjpwbGFudGVk", "password": "planted-word"}}})
    environ = {"DOCKER_AUTH_CONFIG": docker, "AUTHORIZATION": "Bearer planted-token"}
    assert redact_text("dXNlcjpwbGFudGVk, planted-word, planted-token", environ) == "***, ***, ***"
    assert redact_text("registry.example", environ) == "registry.example"


def test_values_in_lists_and_objects_and_names_are_looked_through() -> None:
    found = redact_json({"a": ["hf_planted_token", 1, None, {"hf_planted_token": 2.5}], "b": ("x",)}, ENVIRON)
    assert found == {"a": ["***", 1, None, {"***": 2.5}], "b": ["x"]}


def test_an_option_of_a_list_hides_the_word_after_it() -> None:
    words = ["--lr", "1e-4", "--wandb-key", "planted1", "--password", "planted2", "--data", "x1", "--token"]
    assert redact_json(words, {}) == ["--lr", "1e-4", "--wandb-key", "***", "--password", "***", "--data", "x1", "--token"]


def test_what_was_written_of_a_value_is_known_again() -> None:
    value = {"arguments": ["--lr", "1", "--password", "planted1"], "seed": 0}
    assert redact.is_redacted(value, redact_json(value, {}))
    assert not redact.is_redacted({**value, "seed": 1}, redact_json(value, {}))
    assert not redact.is_redacted({**value, "arguments": ["--lr", "2", "--password", "x"]}, redact_json(value, {}))


def test_what_is_kept_secret_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_kept", set())
    redact.register_secret("from a file")
    redact.register_secret("short")
    assert redact_text("from a file, short", {}) == "***, short"


def test_records_descriptions_and_sentences_are_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted_token")
    assert json.loads(journal.written({"reason": "denied: hf_planted_token"})) == {"reason": "denied: ***"}
    write_json(tmp_path / "sweep.json", {"runs": ["hf_planted_token"]})
    assert "planted" not in (tmp_path / "sweep.json").read_text()
    assert one_line_message(ConfigError("s3://a:b@c/d\n  said\x1b[31m hf_planted_token")) == "s3://***@c/d said\\x1b[31m ***"


def test_a_trials_log_is_cleared_of_secrets_and_of_nothing_else(tmp_path: Path) -> None:
    before = b"HF_TOKEN=hf_planted_token\n\xff\x00 redis://:pw@host done\n"
    (tmp_path / "worker-0.log").write_bytes(before)
    (tmp_path / "worker-1.log").write_bytes(b"\xfe nothing\n")
    (tmp_path / "elsewhere.log").symlink_to(tmp_path / "worker-1.log")
    untouched = (tmp_path / "worker-1.log").stat()
    redact.redact_logs(tmp_path, ENVIRON)
    assert (tmp_path / "worker-0.log").read_bytes() == b"HF_TOKEN=***\n\xff\x00 redis://***@host done\n"
    assert (tmp_path / "worker-1.log").stat().st_mtime_ns == untouched.st_mtime_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.log", "worker-0.log", "worker-1.log"]
    redact.redact_logs(tmp_path / "missing", ENVIRON)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trial's log in a sweep's folder, into which the workload has printed its token."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted_token")
    begin(tmp_path, SweepConfig(recipe="given", workload="captioning", size="tiny", settings=(EAGER,)), H200, None)
    log = tmp_path / "logs" / "7" / "worker-0.log"
    log.parent.mkdir()
    log.write_text("hf_planted_token\n")
    return log


def test_the_log_of_a_trial_whose_driver_was_killed_is_cleared_once_the_sweep_is_taken_up(left: Path, tmp_path: Path) -> None:
    resume(tmp_path, SweepConfig(recipe="given", workload="captioning", size="tiny", settings=(EAGER,)), H200, None)
    assert left.read_text() == "***\n"


def test_the_log_of_another_host_is_cleared_of_what_only_that_host_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_kept", set())
    book = remote_logs.LogActor(str(tmp_path))
    book.begin("7", 0, "there", "/there/worker-0.log", redact.known_secrets({"HF_TOKEN": "hf_planted_token"}))
    book.write("7", 0, 0, b"first hf_planted_")
    book.write("7", 0, 17, b"token\n")
    beside = tmp_path / "logs" / "7" / "worker-1.log"
    beside.write_text("hf_planted_token, of a worker that goes on writing\n")
    book.end("7", 0)
    assert (tmp_path / "logs" / "7" / "worker-0.log").read_text() == "first ***\n"
    assert "hf_planted_token" in beside.read_text()


def test_a_worker_tells_the_log_book_what_is_secret_on_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted_token")
    told: dict[str, tuple[Any, ...]] = {}
    book = SimpleNamespace(
        **{name: SimpleNamespace(remote=lambda *said, name=name: told.update({name: said})) for name in ("begin", "write", "end")}
    )
    monkeypatch.setattr(remote_logs, "_find_log_actor", lambda: book)
    monkeypatch.setattr(remote_logs.ray, "get", lambda answer, timeout: answer)
    (tmp_path / "worker-0.log").write_text("said\n")
    with remote_logs._sending("7", 0, "there", tmp_path / "worker-0.log"):
        pass
    assert told["write"] == ("7", 0, 0, b"said\n")
    assert "hf_planted_token" in told["begin"][4]


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("DB_PASSWORD", "hunter2", True),
        ("MY_TOKEN", "a-b!", True),
        ("SMTP_PASS", "x7Q9", True),
        ("DB_PASSWORD", "eager", False),  # a word
        ("DB_PASSWORD", "1234567", False),  # a number
        ("DB_PASSWORD", "a1b", False),
        ("TOKEN_TYPE", "v1.0", False),
        ("SORT_KEY", "step1", False),
    ],
)
def test_a_short_secret_is_hidden_where_it_stands_alone(name: str, value: str, is_hidden: bool) -> None:
    hidden = redact_text(f"login:{value}, x{value}x", {name: value})
    assert hidden == (f"login:***, x{value}x" if is_hidden else f"login:{value}, x{value}x")
    assert redact_json([f"({value})"], {name: value}) == (["(***)"] if is_hidden else [f"({value})"])


def test_a_message_that_quotes_something_long_keeps_its_beginning_and_end() -> None:
    message = one_line_message(ConfigError(f"--settings {'x' * 100_000} is not a setting; write it like scope=full"))
    assert len(message) < 1_300
    assert message.startswith("--settings xxx")
    assert message.endswith("xxx is not a setting; write it like scope=full")
