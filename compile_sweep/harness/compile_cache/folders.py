"""Converts the folders of torch's compile caches to artifacts, and artifacts back to files in such folders.

Background: Inductor, AOTAutograd, Dynamo and Triton store only files, in two folders, in layouts that torch 2.11 to 2.13 share.
`torch.compiler.save_cache_artifacts` covers only a part of them: not the C++ libraries, not the timings by which max-autotune
chose, of Triton's kernels only those bundled into a graph, and only what this process made or hit. So the folders are read.
Files that the next process regenerates anyway (Python and C++ source) are left out.

Restoring only writes files, below the given folders and nowhere else; torch reads them when it compiles.
"""

import hashlib
import io
import json
import os
import re
import shutil
import struct
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Self

from torch._inductor.codecache import sha256_hash
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.schema.journal import written_whole


class ArtifactKind(StrEnum):
    """What made an artifact. The first five are torch's own names for the entries of its bundles."""

    INDUCTOR = "inductor"
    """A graph that Inductor compiled, its Triton kernels included."""
    AOT_AUTOGRAD = "aot_autograd"
    """Forward and backward of a graph, by reference to Inductor's entries."""
    AUTOTUNE = "autotune"
    """The best configuration of one Triton kernel."""
    PGO = "pgo"
    """Sizes that Dynamo found to be dynamic; only jobs with a name (`torch.compiler.config.job_id`) have it."""
    PRECOMPILE = "precompile"
    """A traced function with its guards; only with `torch._dynamo.config.caching_precompile`."""
    CHOICES = "choices"
    """Timings of the candidates for one operation, by which max-autotune chooses."""
    CODE = "code"
    """A compiled library in Inductor's folder."""
    TRITON = "triton"
    """The folder of one kernel, or one launcher, that Triton compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolders:
    """The folders of a process's compile caches."""

    inductor: Path
    triton: Path

    @classmethod
    def of_process(cls) -> Self:
        """Returns this process's folders, from `TORCHINDUCTOR_CACHE_DIR` and `TRITON_CACHE_DIR`, or else torch's defaults.

        Torch's default for Triton has a folder per GPU; this is the first GPU's.
        """
        return cls(inductor=Path(cache_dir()), triton=Path(triton_cache_dir(0)))


_CARRIED_CODE = (".so", ".cubin", ".hsaco")
_OWN_FOLDERS = ("fxgraph", "aotautograd", "dynamo", "cache", "triton", "locks")
_HERE = b"[KERNEL FOLDER]"
"""Placeholder for a kernel's own folder in Triton's lists of its files, which contain absolute paths."""
_NAME = re.compile(r"[A-Za-z0-9_=+][A-Za-z0-9_.=+@-]{,199}")
CHOICES_FOLDER = "cache"  # folder below Inductor's in which it keeps timings
_MOST_UNPACKED_BYTES = 2**30  # maximum size of one kernel's folder, which usually has some hundreds of kilobytes

_CHOICE_DEPTH = 3  # operation, inputs, matmul precision


def read_artifacts(folders: CacheFolders, given: Iterable[Artifact] = ()) -> Iterator[Artifact]:
    """Yields all artifacts in the folders but libraries that were cut short; those `given` before are not read again."""
    known = {_place(artifact, folders): artifact for artifact in given if artifact.kind != ArtifactKind.CHOICES}

    def at(path: Path, kind: ArtifactKind, key: str) -> Artifact:
        return known.get(path) or Artifact(kind=kind, key=key, content=path.read_bytes())

    inductor = folders.inductor
    for path in _files(inductor / "fxgraph", depth=3):
        yield at(path, ArtifactKind.INDUCTOR, path.parent.name)
    for path in _files(inductor / "aotautograd", depth=2):
        yield at(path, ArtifactKind.AOT_AUTOGRAD, path.parent.name)
    for path in _files(inductor / "dynamo", depth=2):
        if path.name == "entry":
            yield at(path, ArtifactKind.PRECOMPILE, path.parent.name)
    for path in _files(inductor / "dynamo", depth=1):
        if state := re.fullmatch(r"code_state_(.+)\.pkl", path.name):
            yield at(path, ArtifactKind.PGO, state[1])
    for path in _files(inductor / CHOICES_FOLDER, depth=1):
        yield from split_choices(path.name, path.read_bytes())
    for path in _files(inductor, depth=2):
        if path.parent.name in _OWN_FOLDERS:
            continue
        if path.suffix == ".best_config":
            yield at(path, ArtifactKind.AUTOTUNE, f"{path.parent.name}/{path.name}")
        elif path.suffix in _CARRIED_CODE:
            library = at(path, ArtifactKind.CODE, f"{path.parent.name}/{path.name}")
            if not library.is_cut_short:
                yield library

    def kernel(folder: Path) -> Artifact | None:
        if folder in known:
            return known[folder]
        files = [path for path in _children(folder) if path.is_file()]
        return Artifact(kind=ArtifactKind.TRITON, key=folder.name, content=_packed(folder, files)) if files else None

    with _threads() as threads:
        yield from filter(None, threads.map(kernel, _children(folders.triton)))


def restore_artifacts(artifacts: Iterable[Artifact], folders: CacheFolders) -> None:
    """Writes artifacts as the files that torch looks for, beside or merged into existing ones; ValueError for a foreign key.

    This neither runs nor unpickles them; torch does when it compiles. Restore only verified artifacts, before anything compiles.
    """
    choices: list[Artifact] = []
    kernels: list[Artifact] = []
    for artifact in artifacts:
        if artifact.kind == ArtifactKind.CHOICES:
            choices.append(artifact)
        elif artifact.kind == ArtifactKind.TRITON:
            kernels.append(artifact)
        else:
            _write_file(folders.inductor / inductor_path(artifact), artifact.content)
    with _threads() as threads:
        for _ in threads.map(lambda artifact: _unpack(artifact, folders.triton), kernels):
            pass  # raises an error from a thread
    for path, content in merge_choices(choices, folders.inductor).items():
        _write_file(folders.inductor / path, content, replace=True)


def inductor_path(artifact: Artifact) -> PurePosixPath:
    """Returns the path of an artifact below Inductor's folder; raises ValueError for a key that this module does not make."""
    key = artifact.key.partition("/")[0]
    match artifact.kind:
        case ArtifactKind.INDUCTOR:
            parts = ["fxgraph", key[1:3], key, sha256_hash(artifact.content)]
        case ArtifactKind.AOT_AUTOGRAD:
            parts = ["aotautograd", key, sha256_hash(artifact.content)]
        case ArtifactKind.PRECOMPILE:
            parts = ["dynamo", key, "entry"]
        case ArtifactKind.PGO:
            parts = ["dynamo", f"code_state_{pgo_key(artifact.key)}.pkl"]
        case ArtifactKind.AUTOTUNE | ArtifactKind.CODE:
            parts = artifact.key.split("/")
            if len(parts) != 2 or parts[0] in _OWN_FOLDERS:
                raise _unusable(artifact)
        case _:
            raise _unusable(artifact)
    if not all(_NAME.fullmatch(part) for part in parts):
        raise _unusable(artifact)
    return PurePosixPath(*parts)


def pgo_key(key: str) -> str:
    """Returns a job's name as torch spells it in a file name."""
    return re.sub(r'[<>:"/\\|?*]', "_", key)


def merge_choices(artifacts: Iterable[Artifact], folder: Path | None = None) -> dict[PurePosixPath, bytes]:
    """Returns the files of choices, by path below Inductor's folder, merged with those in `folder`; its own measurements win."""
    merged: dict[str, dict[str, Any]] = {}
    for artifact in artifacts:
        try:
            choice = json.loads(artifact.content)
            name = str(choice["system"]["hash"])
            file = merged.setdefault(name, {"system": choice["system"], "cache": {}})
            place = file["cache"]
            *parents, last = choice["path"]
            for parent in parents:
                place = place.setdefault(parent, {})
            _merge(place, {last: choice["value"]})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _unusable(artifact) from None
        if not _NAME.fullmatch(name):
            raise _unusable(artifact)
    for name, file in merged.items():
        if folder is not None and (folder / CHOICES_FOLDER / name).is_file():
            _merge(file["cache"], json.loads((folder / CHOICES_FOLDER / name).read_text())["cache"])
    return {PurePosixPath(CHOICES_FOLDER, name): json.dumps(file, indent=4).encode() for name, file in merged.items()}


def split_choices(name: str, content: bytes) -> list[Artifact]:
    """Splits a file of timings by operation: as one file, the timings of one trial would replace those of another."""
    try:
        file = json.loads(content)
        found = list(_leaves(file["cache"], ()))
        artifacts = [
            Artifact(
                kind=ArtifactKind.CHOICES,
                key=choice_key(name, keys),
                content=json.dumps({"system": file["system"], "path": keys, "value": value}, sort_keys=True).encode(),
            )
            for keys, value in found
        ]
        merge_choices(artifacts)
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{name[:80]!r} holds no timings of max-autotune") from None
    return artifacts


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and len(keys) < _CHOICE_DEPTH:
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, key))
    else:
        yield keys, value


def choice_key(system: str, path: Iterable[str]) -> str:
    """Returns the key of one operation's timings."""
    return f"{system[:16]}/{hashlib.sha256(json.dumps(list(path)).encode()).hexdigest()}"


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _packed(folder: Path, files: list[Path]) -> bytes:
    """Packs a kernel's files into an archive whose bytes do not depend on the folder's location or the files' times."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            content = path.read_bytes()
            if path.suffix == ".json":
                content = content.replace(str(folder).encode(), _HERE)
            info = zipfile.ZipInfo(path.name)  # dated 1980, without an owner
            info.external_attr = (0o755 if path.suffix == ".so" else 0o644) << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def unpack_kernel(artifact: Artifact) -> dict[str, bytes]:
    """Returns the files of a kernel's folder by name, which must be plain; lists of paths have a placeholder for the folder."""
    try:
        with zipfile.ZipFile(io.BytesIO(artifact.content)) as archive:
            files = archive.infolist()
            if not _NAME.fullmatch(artifact.key) or not all(_NAME.fullmatch(file.filename) for file in files):
                raise _unusable(artifact)
            if sum(file.file_size for file in files) > _MOST_UNPACKED_BYTES:  # never unpacks more than the archive declares
                raise _unusable(artifact)
            return {file.filename: archive.read(file) for file in files}
    # Encrypted, or compressed by another method.
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError):
        raise _unusable(artifact) from None


def _unpack(artifact: Artifact, into: Path) -> None:
    files = unpack_kernel(artifact)
    folder = into / artifact.key
    if folder.exists():
        return
    into.mkdir(parents=True, exist_ok=True)
    temporary = into / f"tmp.{uuid.uuid4()}"
    temporary.mkdir()
    try:
        for name, content in files.items():
            file = temporary / name
            file.write_bytes(content.replace(_HERE, str(folder).encode()) if name.endswith(".json") else content)
        os.replace(temporary, folder)
    except OSError:  # another process wrote it first
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():
            raise


def _write_file(path: Path, content: bytes, *, replace: bool = False) -> None:
    if path.exists() and not replace:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_bytes(content)


def _threads() -> ThreadPoolExecutor:
    """Returns a pool with a thread per core: packing releases the GIL, and max-autotune leaves a thousand kernels."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="kernels")


def _place(artifact: Artifact, folders: CacheFolders) -> Path:
    is_kernel = artifact.kind == ArtifactKind.TRITON
    return folders.triton / artifact.key if is_kernel else folders.inductor / inductor_path(artifact)


def _files(folder: Path, *, depth: int) -> Iterator[Path]:
    for path in _children(folder):
        if depth > 1:
            if path.is_dir():
                yield from _files(path, depth=depth - 1)
        elif path.is_file():
            yield path


def _children(folder: Path) -> list[Path]:
    """Lists a folder's files, sorted, without unfinished ones."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.name.startswith("tmp."))


def _unusable(artifact: Artifact) -> ValueError:
    return ValueError(
        f"an artifact of kind {artifact.kind!r} cannot be restored: its key {artifact.key[:80]!r} names no cache file"
    )
