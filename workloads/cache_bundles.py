"""torch's bundles of compile-cache artifacts, split into their entries, and entries joined into a bundle.

torch's own loader cannot be used to split them: of a process that saved twice it reads only the later half, since a bundle then
lists each kind twice. Splitting runs nothing and unpickles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch.utils._appending_byte_serializer import AppendingByteSerializer, BytesReader, BytesWriter

from workloads.artifacts import Artifact
from workloads.cache_folders import CHOICES_FOLDER, ArtifactKind, choices_in, inductor_path, merged_choices, pgo_key

_AS_THEY_ARE = (ArtifactKind.INDUCTOR, ArtifactKind.AOT_AUTOGRAD, ArtifactKind.PRECOMPILE, ArtifactKind.PGO)
_Group = tuple[str, list[tuple[str, bytes]]]
Read = TypeVar("Read")


def split(bundle: bytes) -> list[Artifact]:
    """The entries of a bundle that `torch.compiler.save_cache_artifacts` or `joined` made.

    Raises:
        ValueError: it is none, or holds something that could not be restored.
    """
    try:
        groups = AppendingByteSerializer.to_list(bundle, deserialize_fn=_read_group)
    except (AssertionError, RuntimeError) as error:  # torch's, of a content that is none or is damaged
        raise ValueError(str(error)) from None
    return [artifact for kind, entries in groups for key, content in entries for artifact in _artifacts(kind, key, content)]


def joined(artifacts: Iterable[Artifact]) -> bytes:
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
    files |= {str(path): content for path, content in merged_choices(choices).items()}
    for path, content in files.items():
        add(ArtifactKind.AUTOTUNE, path, content)
    serializer: AppendingByteSerializer[_Group] = AppendingByteSerializer(serialize_fn=_write_group)
    serializer.extend((kind, list(entries)) for kind, entries in groups.items())
    return serializer.to_bytes()


def _artifacts(kind: str, key: str, content: bytes) -> Iterable[Artifact]:
    folder, slash, name = key.partition("/")
    if kind == ArtifactKind.AUTOTUNE and slash and folder == CHOICES_FOLDER:
        return choices_in(name, content)
    artifact = Artifact(kind=kind, key=pgo_key(key) if kind == ArtifactKind.PGO else key, content=content)
    inductor_path(artifact)  # refuses what could not be restored
    return [artifact]


def _read_group(reader: BytesReader) -> _Group:
    kind = _inside(reader, reader.read_str())
    count = _inside(reader, reader.read_uint64())
    return kind, [_inside(reader, (reader.read_str(), reader.read_bytes())) for _ in range(count)]


def _inside(reader: BytesReader, found: Read) -> Read:
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
