"""Where files can be kept: a folder, or whatever file system or object store pyarrow or fsspec has a URI for."""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from pyarrow.fs import AwsStandardS3RetryStrategy, FileInfo, FileSelector, FileSystem, FileType, S3FileSystem, resolve_s3_region

from compile_sweep.schema import redact

SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
FSSPEC = "fsspec+"
"""Goes before the scheme of a file system that only fsspec knows: fsspec+https://…"""

OBJECT_STORES = ("s3", "gcs", "abfs")
"""What pyarrow calls the file systems where an object appears whole once it is written, and folders are no thing."""


_GCS_PATIENCE_S = 12
"""As S3's three tries of 4 s."""


def normalized(location: str) -> str:
    """A URI or folder as it means the same from any folder of this host.

    Raises:
        ValueError: it is none that files can be kept at; a sentence, less its subject.
    """
    if not location.strip():
        raise ValueError("can be at an empty place; name a folder or a URI")
    scheme, colon, _ = location.partition("://")
    if not colon:
        try:
            return str(Path(location).expanduser().absolute())
        except RuntimeError:
            raise ValueError(f"can be at {location}, for no user is called so; name a folder or a URI") from None
    if scheme in SCHEMES or (scheme.startswith(FSSPEC) and scheme != FSSPEC):
        return location
    raise ValueError(f"can be at {without_credentials(location)}; use a folder, s3://, gs://, or {FSSPEC}scheme://")


def opened(uri: str) -> tuple[FileSystem, str]:
    """The file system of a normalized URI, and the path in it; of this host, one that is a folder or can become one.

    Raises:
        Exception: whatever its library says, here and at each later use, or the path is not a folder. Those that only fsspec
            knows have errors of their own, which no class holds together.
    """
    filesystem, root = _s3(uri) if uri.startswith("s3://") else FileSystem.from_uri(_patient(uri))
    refuse_no_folder(filesystem, root := root.rstrip("/"))
    return filesystem, root


def refuse_no_folder(filesystem: FileSystem, root: str, *, to_write: bool = False) -> None:
    """Refuses a folder of this host that is none and cannot become one; an object store has no folders.

    Args:
        filesystem: where.
        root: the folder.
        to_write: whether it must let us write, too.

    Raises:
        OSError: it, or what is to hold it, is a file, lets nobody in or cannot be looked at.
    """
    if filesystem.type_name != "local":
        return
    for there in (path := Path(root or "/"), *path.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            there.stat()
            break
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is not a folder")
    if to_write and not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} is not a folder that can be written to")


def write_whole(filesystem: FileSystem, root: str, name: str, content: bytes) -> None:
    """Writes a file that appears whole, whoever looks, and takes the place of another at once.

    Args:
        filesystem: where.
        root: the folder that `name` is in; unfinished files lie in `parts` below it.
        name: the file, with the folders between.
        content: all of it.
    """
    path = f"{root}/{name}"
    if filesystem.type_name in OBJECT_STORES:
        with filesystem.open_output_stream(path) as file:
            file.write(content)
        return
    part = f"{root}/parts/{uuid.uuid4().hex}"
    for file in (part, path):
        filesystem.create_dir(file.rpartition("/")[0], recursive=True)
    try:
        with filesystem.open_output_stream(part) as file:
            file.write(content)
        filesystem.move(part, path)
    except BaseException:
        with suppress(OSError):  # it was never made, or whatever kept it from being written keeps it from being removed
            filesystem.delete_file(part)
        raise


def files(filesystem: FileSystem, root: str) -> list[FileInfo]:
    """Every file below a folder; none, where there is no folder.

    Args:
        filesystem: where.
        root: the folder.

    Raises:
        Exception: as `opened`; NotADirectoryError, if the folder is a file.
    """
    selector = FileSelector(root, recursive=True, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except NotADirectoryError:  # or one made since pyarrow asked fsspec for a folder: it then asks whether anything is there
        infos = filesystem.get_file_info(selector)
    return [info for info in infos if info.type is FileType.File]


def without_credentials(uri: str) -> str:
    """The URI for people: neither user and password nor options."""
    scheme, colon, rest = redact.redact_uri(uri).partition("://")
    if not colon:
        return uri
    return f"{scheme}://" + re.split(r"[?#]", rest.removeprefix(f"{redact.REDACTED}@"), maxsplit=1)[0]


def brief(error: BaseException) -> str:
    """An error's own words without secrets, which libraries quote, on one line and no longer than a line."""
    words = " ".join(redact.redact_text(str(error) or type(error).__name__).split())
    return words if len(words) <= 200 else f"{words[:200]}…"


def _patient(uri: str) -> str:
    """The URI with a limit to how long Google's library tries again, which is 15 minutes unless one is said."""
    if not uri.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds={_GCS_PATIENCE_S}"


def _s3(uri: str) -> tuple[S3FileSystem, str]:
    """As `FileSystem.from_uri`, which would ask a server that hangs 31 times and give up after 100 s (pyarrow 25)."""
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query))
    if unknown := sorted(options.keys() - {"region", "scheme", "endpoint_override"}):
        raise ValueError(f"an s3:// URI has no option {unknown[0]}; it takes region, scheme and endpoint_override")
    bucket = parts.netloc.rpartition("@")[2]
    if not (options.keys() | os.environ.keys()) & {"region", "endpoint_override", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}:
        options["region"] = resolve_s3_region(bucket)
    filesystem = S3FileSystem(
        access_key=unquote(parts.username) if parts.username else None,
        secret_key=unquote(parts.password) if parts.password else None,
        connect_timeout=3,
        request_timeout=4,
        allow_delayed_open=True,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=3),
        **options,
    )
    return filesystem, f"{bucket}/{parts.path.strip('/')}"
