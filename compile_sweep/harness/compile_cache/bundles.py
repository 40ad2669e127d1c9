"""Splits torch's bundles of compile-cache artifacts into entries, joins entries into a bundle, and reads entries of graphs.

torch's own loader cannot split them: if a process saved twice, the bundle lists each kind twice, and the loader reads only the
later half. Splitting runs nothing and unpickles nothing.

Reading an entry of a compiled graph (its guards, compile seconds, and the entries it refers to) unpickles it, which runs code:
only entries that this process made, or would load itself, may be read.
"""

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
    """Splits a bundle of `torch.compiler.save_cache_artifacts` or `make_bundle`; raises ValueError if it cannot be restored."""
    try:
        groups = AppendingByteSerializer.to_list(bundle, deserialize_fn=_read_group)
    except (AssertionError, RuntimeError) as error:  # raised by torch for bytes that are not a bundle or are damaged
        raise ValueError(str(error)) from None
    return [artifact for kind, entries in groups for key, content in entries for artifact in _artifacts(kind, key, content)]


def make_bundle(artifacts: Iterable[Artifact]) -> bytes:
    """Makes a bundle for `torch.compiler.load_cache_artifacts` that lists each kind only once.

    Torch has no kind of entry for compiled libraries and timings. It restores an autotuning entry as a file, by its path below
    Inductor's folder, so libraries and timings are disguised as such. Folders of Triton kernels are left out, since graphs
    contain the kernels they call.
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
    inductor_path(artifact)  # refuses what cannot be restored
    return [artifact]


def _read_group(reader: BytesReader) -> _Group:
    kind = _inside(reader, reader.read_str())
    count = _inside(reader, reader.read_uint64())
    return kind, [_inside(reader, (reader.read_str(), reader.read_bytes())) for _ in range(count)]


def _inside(reader: BytesReader, found: T) -> T:
    """Returns what was read; raises at the end of the bytes, past which torch's reader would loop forever."""
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
    """Returns an entry's kind and key. Torch's key is the same for all guards that a graph was compiled under; ours is not."""
    return str(kind), f"{key}/{hashlib.sha256(str(guards or '').encode()).hexdigest()[:16]}"


def entry_name(kind: str, key: str, entry: Any) -> tuple[str, str]:
    """Returns the kind and key of an entry in torch's own form."""
    return guarded_name(kind, key, getattr(entry, "guards_expr", None))


def seconds_taken(entry: Any) -> float:
    """Returns how long compiling an entry took, in seconds, as torch recorded it; 0 if it did not."""
    nanoseconds = getattr(entry, "_time_taken_ns", None)
    if nanoseconds is None:
        nanoseconds = getattr(entry, "forward_time_taken_ns", 0) + getattr(entry, "backward_time_taken_ns", 0)
    return float(nanoseconds) / 1e9


def referenced_graphs(entry: Any) -> list[tuple[str, str]]:
    """Returns the Inductor entries that an AOTAutograd entry refers to: forward, then backward if there is one."""
    parts: list[Any] = [getattr(entry, "compiled_fw", None), getattr(entry, "compiled_bw", None)]
    return [
        guarded_name(ArtifactKind.INDUCTOR, part.fx_graph_cache_info[0], part.fx_graph_guard_expr)
        for part in parts
        if hasattr(part, "fx_graph_cache_info")
    ]


def read_graph_entry(artifact: Artifact) -> Artifact:
    """Returns a compiled graph under its full key, with its compile seconds, and reduced to the configurations chosen since."""
    try:
        entry = pickle.loads(artifact.content)
    except Exception:  # torch treats an entry that does not load as a miss, so an incomplete key loses nothing
        return replace(artifact, key=f"{artifact.key}/{artifact.digest[:16]}")
    key = entry_name(artifact.kind, artifact.key, entry)[1]
    return replace(artifact, key=key, cost_s=seconds_taken(entry), content=_settled(entry) or artifact.content)


def _settled(entry: Any) -> bytes | None:
    """Returns an Inductor entry with only the best configuration of kernels tuned since it was written; None if there are none.

    Torch writes an entry before its kernels first run. It keeps all configurations of each, and a path on this host where to look
    for the best. On another host, a process that imports only torch would tune them all again.
    """
    bundle = getattr(entry, "_triton_bundle", None)
    kernels = [held.kernel for held in getattr(bundle, "static_autotuners", None) or ()]
    try:
        settled = [cache_kernels.keep_best_configuration(kernel) for kernel in kernels]
        return pickle.dumps(entry) if any(settled) else None
    except Exception:  # the entry that torch wrote works as well, only more slowly
        return None
