"""What a store records about an artifact (`Entry`) and the trial that made it (`Manifest`). JSON only: reading runs no code.

The facts of a manifest are the components that make artifacts useless or wrong elsewhere: two processes may share artifacts
if all facts are equal.
"""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any, Self

import pynvml

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.schema.errors import CacheError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.artifacts.signing import SigningKey
from orchestrator.environment import Environment, cpu_fact, fingerprint, visible_gpus
from orchestrator.guard import cores

Facts = Mapping[str, str]
"""Component → value. Compared as a whole; a component that one side lacks counts as different."""

DECISIVE = (
    "torch", "triton", "cuda", "driver", "gpu", "capability", "python", "machine", "libc", "cpu", "cpu_instructions",
)  # fmt: skip
"""Components of the host, the most explanatory first: another torch, for instance, brings another triton and configuration."""

_KEPT_APART = ("attention", "matmul_precision", "autocast", "backend", "dynamic_min", "dynamic_max")
"""Settings that some keys of torch's caches lack: what a compiled graph computes, who compiles it, and the bounds of a
marked size, under which torch 2.13 finds a graph of narrower ones and then fails, because that graph's guard contradicts them.
"""


def trial_facts(configuration: Mapping[str, str], settings: CompileSettings, *, use_gpu: bool) -> dict[str, str]:
    """Returns everything that a trial's artifacts depend on."""
    own = kept_apart(settings)
    if use_gpu:
        own["device"] = "cuda"
    else:  # the number of threads is compiled into the code; `cores.bind_process` sets it for trials
        threads = next(filter(None, map(os.environ.get, cores.THREADS)), configuration.get("cpu_threads", ""))
        own |= {"device": "cpu", "threads": threads}
    return environment_facts({**configuration, **own})


def kept_apart(settings: CompileSettings) -> dict[str, str]:
    """Returns the settings, by name, that must keep artifacts apart because torch does not."""
    chosen = settings.to_dict()
    return {f"settings.{name}": str(chosen[name]) for name in _KEPT_APART if chosen[name] is not None}


def environment_facts(configuration: Mapping[str, str], environment: Environment | None = None) -> dict[str, str]:
    """Returns everything that an artifact of this process depends on; `configuration` is that of `compile_cache.torch_state`."""
    host = environment or fingerprint()
    facts = {
        "torch": host.torch,
        "triton": host.triton,
        "python": host.python,
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),  # a library that g++ links here does not load with an older libc
        "cpu": host.cpu,
        "cpu_instructions": _cpu_instructions(),  # some virtual machines hide some instructions of the same CPU
    }
    if host.gpu:
        # The CUDA version and the driver's branch decide; a patch release changes neither what loads nor what is fastest.
        facts |= {"cuda": host.cuda, "driver": (host.driver or "").partition(".")[0], "gpu": host.gpu}
        facts["capability"] = _capability()
    present = {name: value for name, value in facts.items() if value}
    return {**{name: str(value) for name, value in configuration.items()}, **present}


def digest(facts: Facts) -> str:
    """Returns the SHA-256 of the facts, in hex."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def differences(a: Facts, b: Facts) -> list[str]:
    """Lists the components that differ, the most decisive first."""
    rank = {name: number for number, name in enumerate(DECISIVE)}
    differing = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    return sorted(differing, key=lambda name: (rank.get(name, len(rank)), name))


@cache
def _cpu_instructions() -> str:
    """Returns a digest of this CPU's instruction sets: code built with `-march=native` crashes on a CPU that lacks some."""
    flags = sorted(cpu_fact("flags", "Features").split())
    return hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12] if flags else ""


@cache
def _capability() -> str:
    """Returns the compute capability of this process's first GPU from NVML, which does not start CUDA."""
    pynvml.nvmlInit()
    try:
        visible = visible_gpus()
        return "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(visible[0])) if visible else ""
    except pynvml.NVMLError:
        return ""
    finally:
        pynvml.nvmlShutdown()


VERSION = 1
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An artifact in a store, without its content, which is stored under its digest."""

    kind: str
    key: str
    """Name of the artifact within its kind."""
    digest: str
    """SHA-256 of the content, in hex."""
    size_bytes: int
    cost_s: float
    """Seconds of compile time that a hit saves."""
    environment: str
    """Digest of the facts under which the artifact was made."""
    signature: str = ""

    @classmethod
    def of(cls, artifact: Artifact, environment: str, key: SigningKey) -> Self:
        """Returns an artifact's signed entry."""
        entry = cls(
            kind=artifact.kind,
            key=artifact.key,
            digest=artifact.digest,
            size_bytes=len(artifact.content),
            cost_s=float(artifact.cost_s) if math.isfinite(artifact.cost_s) else 0.0,  # JSON has no infinities or NaN
            environment=environment,
        )
        return replace(entry, signature=key.sign(entry._message()))

    def problem(self, key: SigningKey, environment: str) -> str | None:
        """Returns why the entry must not be restored here, as the end of a sentence; None if it may be. Ignores the content."""
        if problem := key.problem(self._message(), self.signature):
            return problem
        return None if self.environment == environment else "was made in another environment"

    def _message(self) -> bytes:
        return _canonical("entry", {**asdict(self), "signature": None})

    def __str__(self) -> str:
        return ascii(f"{self.kind[:20]} {self.key[:60]}")[1:-1]  # shown in a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The artifacts that one trial made, and the facts under which it made them. The manifest and each entry are signed."""

    facts: Facts
    """Facts of the process that made the artifacts; see `trial_facts`."""
    workload: str
    size: str
    settings_key: str
    maker: str
    """Trial ID, or where the artifacts were imported from."""
    created_at: str = ""
    """ISO 8601 with its UTC offset; `publish` fills it in."""
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    signature: str = ""

    @property
    def environment(self) -> str:
        """Digest of the facts."""
        return digest(self.facts)

    @property
    def id(self) -> str:
        """The manifest's name in a store: a digest of all of it, so that no two share a name."""
        return hashlib.sha256(self.to_json()).hexdigest()[:32]

    @property
    def size_bytes(self) -> int:
        """Size of its artifacts in bytes, counting each content once."""
        return sum({entry.digest: entry.size_bytes for entry in self.entries}.values())

    def signed(self, key: SigningKey) -> Self:
        """Returns a copy with a signature."""
        return replace(self, signature=key.sign(self._message()))

    def problem(self, key: SigningKey) -> str | None:
        """Returns why the manifest cannot be trusted, as the end of a sentence; None if it can."""
        return key.problem(self._message(), self.signature)

    def to_json(self) -> bytes:
        """Serializes the manifest to strict JSON; equal manifests give equal bytes."""
        return _json({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parses what `to_json` wrote, without verifying its signature; raises CacheError for anything else."""
        try:
            values = json.loads(text.decode())  # given bytes, it would guess an encoding
            if not isinstance(values, dict):
                raise TypeError("no JSON object")
            if (version := values.pop("version", None)) != VERSION:
                raise ValueError(f"version {version!r}, and this version of compile-sweep reads {VERSION}")
            entries = tuple(_read_entry(entry) for entry in values.pop("entries"))
            facts = values.pop("facts")
            if not isinstance(facts, dict) or not all(isinstance(value, str) for value in (*facts.values(), *values.values())):
                raise TypeError("a value of a wrong kind")
            manifest = cls(facts=facts, entries=entries, **values)
            if datetime.fromisoformat(manifest.created_at).tzinfo is None:
                raise ValueError("a time without its UTC offset")
            return manifest
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            words = ascii(str(error))[1:-1]  # the message may quote untrusted text and is shown in a terminal
            raise CacheError(f"is not a manifest ({words[:100]})") from None

    def _message(self) -> bytes:
        return _canonical("manifest", {**asdict(self), "signature": None})


def _read_entry(values: Mapping[str, Any]) -> Entry:
    entry = Entry(**values)
    texts = (entry.kind, entry.key, entry.environment, entry.signature)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("an entry's text is none")
    if type(entry.size_bytes) is not int or entry.size_bytes < 0:
        raise TypeError("an entry's size is none")
    if not isinstance(entry.cost_s, int | float) or not math.isfinite(entry.cost_s):
        raise TypeError("an entry's cost is none")
    if not isinstance(entry.digest, str) or not DIGEST.fullmatch(entry.digest):  # the digest becomes a file name
        raise ValueError("an entry's digest is none")
    return entry


def _canonical(what: str, values: Mapping[str, Any]) -> bytes:
    """Returns the bytes to sign; `what` keeps a signature from being valid for another kind of object."""
    return f"compile-sweep {what} {VERSION}\n".encode() + _json(values)


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()
