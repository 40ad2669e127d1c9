"""The signing key: where it comes from, who may read it, and which signatures it rejects."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts.signing import KEY_VARIABLE, SigningKey


def test_a_key_is_made_at_first_use_for_its_owner_alone_and_stays(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    made = SigningKey.load(environ=environ)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert SigningKey.load(environ=environ) == made
    assert SigningKey.load(tmp_path / "another", environ=environ) != made


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: SigningKey.load(tmp_path / "deep" / "key", environ={}), range(8)))
    assert len(set(keys)) == 1
    assert os.listdir(tmp_path / "deep") == ["key"]


def test_the_variable_goes_before_the_file(tmp_path: Path) -> None:
    key = SigningKey.load(tmp_path / "key", environ={KEY_VARIABLE: "ab" * 32})
    assert key.secret == b"\xab" * 32
    assert not (tmp_path / "key").exists()


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    SigningKey.load(tmp_path / "key", environ={})
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(CacheError, match="chmod 600"):
        SigningKey.load(tmp_path / "key", environ={})


@pytest.mark.parametrize("text", ["no hex", "abcd", "ab" * 31, "é" * 64])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    for path, environ in ((tmp_path / "key", {}), (None, {KEY_VARIABLE: text})):
        with pytest.raises(CacheError, match="holds no key") as refusal:
            SigningKey.load(path, environ=environ)
        assert text not in str(refusal.value)


def test_a_place_where_none_can_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=KEY_VARIABLE):
        SigningKey.load(tmp_path / "file" / "key", environ={})


def test_a_signature_holds_for_its_message_and_key_alone() -> None:
    key, other = SigningKey(b"1" * 32), SigningKey(b"2" * 32)
    signature = key.sign(b"message")
    assert key.problem(b"message", signature) is None
    assert key.problem(b"messagE", signature) == "does not match its signature"
    assert key.problem(b"message", "") == "is not signed"
    assert key.problem(b"message", signature[:-1]) == "does not match its signature"
    assert key.problem(b"message", signature.partition(":")[2]) is not None
    assert key.problem(b"message", "é:\N{SNOWMAN}") is not None
    assert "another key" in str(other.problem(b"message", signature))


def test_a_key_does_not_show_itself() -> None:
    assert "1111" not in repr(SigningKey(b"1" * 32)) + str(SigningKey(b"1" * 32))


def test_a_user_without_a_home_is_told_to_set_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*of: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fails)
    with pytest.raises(CacheError, match=f"set {KEY_VARIABLE}"):
        SigningKey.load(environ={})


def test_a_key_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache.key", 0o600)
    with pytest.raises(CacheError, match="is not a regular file"):
        SigningKey.load(tmp_path / "cache.key", {})
