"""The key that proves an artifact is ours: HMAC-SHA256, because artifacts contain code and others may write to a cache.

The key is never stored in the cache, where anyone with write access could use it to sign.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from compile_sweep.schema.errors import CacheError
from compile_sweep.schema.journal import read_regular

KEY_VARIABLE = "COMPILE_SWEEP_CACHE_KEY"
"""Environment variable with the key itself, as 64 or more hexadecimal digits; takes precedence over any file."""

KEY_BYTES = 32
KEY_ID = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A secret that signs messages and verifies its own signatures."""

    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Self:
        """Loads the key from the environment variable, or else from a file, created at first use and readable by its owner only.

        Args:
            path: Path of the file; by default the user's, `~/.config/compile-sweep/cache.key`.

        Raises:
            CacheError: The key is not valid, others may read the file, or the file can be neither read nor created.
        """
        if text := environ.get(KEY_VARIABLE):
            return cls._parsed(text, KEY_VARIABLE)
        path = path or _default_path(environ)
        try:
            if not path.exists():
                _make(path)
            if not path.is_file():  # reading a pipe would block
                raise CacheError(f"the key in {path} is not a regular file; name one, or set {KEY_VARIABLE} instead")
            if path.stat().st_mode & 0o077:
                raise CacheError(f"the key in {path} can be read by others, who could sign with it: chmod 600 it")
            return cls._parsed(read_regular(path).decode("ascii", "replace"), str(path))
        except OSError as error:
            raise CacheError(
                f"the key in {path} can be neither read nor made ({error.strerror}); set {KEY_VARIABLE} instead"
            ) from None

    @classmethod
    def _parsed(cls, text: str, origin: str) -> Self:
        try:
            secret = bytes.fromhex(text.strip())
        except ValueError:
            secret = b""
        if len(secret) < KEY_BYTES:
            raise CacheError(
                f"{origin} holds no key of {2 * KEY_BYTES} hexadecimal digits or more (openssl rand -hex 32 makes one)"
            )
        return cls(secret)

    @property
    def id(self) -> str:
        """Eight hex digits that identify the key without revealing it."""
        return self._mac(b"compile-sweep key id")[:8]

    def sign(self, message: bytes) -> str:
        """Returns the message's signature: the key's ID, a colon, and the HMAC."""
        return f"{self.id}:{self._mac(message)}"

    def problem(self, message: bytes, signature: str) -> str | None:
        """Returns why a message's signature cannot be trusted, as the end of a sentence; None if it is valid."""
        if not signature:
            return "is not signed"
        if hmac.compare_digest(signature.encode("utf-8", "replace"), self.sign(message).encode()):  # constant time
            return None
        signer = signature.partition(":")[0]
        if signer == self.id:
            return "does not match its signature"
        shown = signer if KEY_ID.fullmatch(signer) else "one that has no name"  # untrusted text, shown in a terminal
        return f"is signed with another key ({shown}; the one here is {self.id})"

    def _mac(self, message: bytes) -> str:
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()


def _default_path(environ: Mapping[str, str]) -> Path:
    try:
        folder = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # a container's user without a name
        raise CacheError(f"this user has no home folder for the key; set {KEY_VARIABLE}, or name a file") from None
    return Path(folder) / "compile-sweep" / "cache.key"


def _make(path: Path) -> None:
    """Writes a new key atomically: if two processes do so at the same time, both then use the first one's key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
