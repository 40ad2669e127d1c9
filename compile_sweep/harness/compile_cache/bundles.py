"""Splits torch's bundles of compile-cache artifacts into entries, joins entries into a bundle, and reads entries of graphs.

torch's own loader cannot split them: if a process saved twice, the bundle lists each kind twice, and the loader reads only the
later half. Splitting runs nothing and unpickles nothing.

Reading an entry of a compiled graph (its guards, compile seconds, and the entries it refers to) unpickles it, which runs code:
only entries that this process made, or would load itself, may be read.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils._appending_byte_serializer import AppendingByteSerializer, BytesReader, BytesWriter

from compile_sweep.harness.compile_cache import kernels as cache_kernels
from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.folders import (
    CHOICES_FOLDER,
    ArtifactKind,
    inductor_path,
    merge_choices,
    pgo_key,
    split_choices,
)

_AS_THEY_ARE = (ArtifactKind.INDUCTOR, ArtifactKind.AOT_AUTOGRAD, ArtifactKind.PRECOMPILE, ArtifactKind.PGO)
_Group = tuple[str, list[tuple[str, bytes]]]
T = TypeVar("T")


def split_bundle(bundle: bytes) -> list[Artifact]:
    """The entries of a bundle that `torch.compiler.save_cache_artifacts` or `joined` made.

    Raises:
        ValueError: it is none, or holds something that could not be restored.
    """
    try:
        groups = AppendingByteSerializer.to_list(bundle, deserialize_fn=_read_group)
    except (AssertionError, RuntimeError) as error:  # torch's, of a content that is none or is damaged
        raise ValueError(str(error)) from None
    return [artifact for kind, entries in groups for key, content in entries for artifact in _artifacts(kind, key, content)]


def join_bundle(artifacts: Iterable[Artifact]) -> bytes:
    """A bundle for `torch.compiler.load_cache_artifacts`, each kind listed once.

    torch has no kind of entry for compiled libraries and timings. An autotuning entry is for torch a file by its path below
    Inductor's folder, so they travel as such. Folders of Triton's kernels stay behind: graphs bring the kernels they call.
    """
    groups: dict[str, dict[tuple[str, bytes], None]] = {}

    def add(kind: str, key: str, content: bytes) -> None:
        groups.setdefault(kind, {})[(key, content)] = None

    files: dict[str, bytes] = {}
    choices: list[Artifact] = []
    for artifact in artifacts:
        if artifact.kind in _AS_THEY_ARE:
            add(artifact.kind, artifact.key.partition("/")[0], artifact.content)
        elif artifact.kind == ArtifactKind.CHOICES:
            choices.append(artifact)
        elif artifact.kind != ArtifactKind.TRITON:
            files[str(inductor_path(artifact))] = artifact.content
    files |= {str(path): content for path, content in merge_choices(choices).items()}
    for path, content in files.items():
        add(ArtifactKind.AUTOTUNE, path, content)
    serializer: AppendingByteSerializer[_Group] = AppendingByteSerializer(serialize_fn=_write_group)
    serializer.extend((kind, list(entries)) for kind, entries in groups.items())
    return serializer.to_bytes()


def _artifacts(kind: str, key: str, content: bytes) -> Iterable[Artifact]:
    folder, slash, name = key.partition("/")
    if kind == ArtifactKind.AUTOTUNE and slash and folder == CHOICES_FOLDER:
        return split_choices(name, content)
    artifact = Artifact(kind=kind, key=pgo_key(key) if kind == ArtifactKind.PGO else key, content=content)
    inductor_path(artifact)  # refuses what could not be restored
    return [artifact]


def _read_group(reader: BytesReader) -> _Group:
    kind = _inside(reader, reader.read_str())
    count = _inside(reader, reader.read_uint64())
    return kind, [_inside(reader, (reader.read_str(), reader.read_bytes())) for _ in range(count)]


def _inside(reader: BytesReader, found: T) -> T:
    """What was read. Past its end, torch's reader goes on for ever with nothing."""
    if reader._i > len(reader._data):
        raise ValueError("it says that it is longer than it is")
    return found


def _write_group(writer: BytesWriter, group: _Group) -> None:
    kind, entries = group
    writer.write_str(kind)
    writer.write_uint64(len(entries))
    for key, content in entries:
        writer.write_str(key)
        writer.write_bytes(content)


GUARDED_KINDS = (ArtifactKind.INDUCTOR, ArtifactKind.AOT_AUTOGRAD)


def guarded_name(kind: str, key: str, guards: str | None) -> tuple[str, str]:
    """Kind and key of an entry: torch's own key is one for all that were compiled under different guards, ours is not."""
    return str(kind), f"{key}/{hashlib.sha256(str(guards or '').encode()).hexdigest()[:16]}"


def entry_name(kind: str, key: str, entry: Any) -> tuple[str, str]:
    """Kind and key of an entry as torch holds it."""
    return guarded_name(kind, key, getattr(entry, "guards_expr", None))


def seconds_taken(entry: Any) -> float:
    """Seconds that compiling an entry took, as torch has it; 0 where it has not."""
    nanoseconds = getattr(entry, "_time_taken_ns", None)
    if nanoseconds is None:
        nanoseconds = getattr(entry, "forward_time_taken_ns", 0) + getattr(entry, "backward_time_taken_ns", 0)
    return float(nanoseconds) / 1e9


def referenced_graphs(entry: Any) -> list[tuple[str, str]]:
    """Inductor's entries that one of AOTAutograd's refers to: forward, then backward if there is one."""
    parts: list[Any] = [getattr(entry, "compiled_fw", None), getattr(entry, "compiled_bw", None)]
    return [
        guarded_name(ArtifactKind.INDUCTOR, part.fx_graph_cache_info[0], part.fx_graph_guard_expr)
        for part in parts
        if hasattr(part, "fx_graph_cache_info")
    ]


def read_graph_entry(artifact: Artifact) -> Artifact:
    """A compiled graph under its full key, with the seconds torch says it took, and without choices that were made since."""
    try:
        entry = pickle.loads(artifact.content)
    except Exception:  # torch takes an entry that does not load for a miss, and so loses nothing by its key
        return replace(artifact, key=f"{artifact.key}/{artifact.digest[:16]}")
    key = entry_name(artifact.kind, artifact.key, entry)[1]
    return replace(artifact, key=key, cost_s=seconds_taken(entry), content=_settled(entry) or artifact.content)


def _settled(entry: Any) -> bytes | None:
    """An entry of Inductor's whose kernels were tuned since it was written, with their best configuration alone; else None.

    torch writes an entry before its kernels first run. Of each it keeps all configurations, and a path of this host where to
    look for the best: elsewhere, a process that imports only torch would tune them all again.
    """
    bundle = getattr(entry, "_triton_bundle", None)
    kernels = [held.kernel for held in getattr(bundle, "static_autotuners", None) or ()]
    try:
        settled = [cache_kernels.keep_best_configuration(kernel) for kernel in kernels]
        return pickle.dumps(entry) if any(settled) else None
    except Exception:  # as torch wrote it, it serves as well, if more slowly
        return None
