"""Where files can be kept: a folder, or any file system or object store that pyarrow or fsspec has a URI for."""

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from pyarrow.fs import AwsStandardS3RetryStrategy, FileInfo, FileSelector, FileSystem, FileType, S3FileSystem, resolve_s3_region

from compile_sweep.schema import redact
from compile_sweep.schema.errors import CompileSweepError

SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
BUCKET_SCHEMES = ("s3", "gs", "gcs")
FSSPEC = "fsspec+"  # prefix for the scheme of a file system that only fsspec knows: fsspec+https://…

OBJECT_STORES = ("s3", "gcs", "abfs")
"""Pyarrow's names of object stores, where an object appears whole once it is written and folders do not exist."""


_GCS_PATIENCE_S = 12  # as long as three tries of 4 s on S3


def normalized(location: str, *, what: str, refused: type[CompileSweepError]) -> str:
    """Returns a URI or folder in a form that means the same in any folder; raises `refused` if `what` cannot be kept there."""
    if not location.strip():
        raise refused(f"no {what} can be kept at an empty location; name a folder or a URI")
    scheme, colon, _ = location.partition("://")
    if not colon:
        try:
            return str(Path(location).expanduser().absolute())
        except RuntimeError:
            raise refused(f"no {what} can be kept at {location}: there is no such user; name a folder or a URI") from None
    if scheme in BUCKET_SCHEMES and not re.split(r"[/?]", without_credentials(location).partition("://")[2], maxsplit=1)[0]:
        raise refused(
            f"no {what} can be kept at {without_credentials(location)}: it names no bucket; write it like {scheme}://bucket/folder"
        )
    if scheme in SCHEMES or (scheme.startswith(FSSPEC) and scheme != FSSPEC):
        return location
    raise refused(f"no {what} can be kept at {without_credentials(location)}; use a folder, s3://, gs://, or {FSSPEC}scheme://")


def opened(uri: str) -> tuple[FileSystem, str]:
    """Opens the file system of a normalized URI; returns it and the path in it.

    Raises:
        Exception: any error of the file system's library, here and at each later use, or NotADirectoryError if a local path is
            not a folder. Libraries that only fsspec knows raise errors of their own, which share no base class.
    """
    filesystem, root = _s3(uri) if uri.startswith("s3://") else FileSystem.from_uri(_patient(uri))
    refuse_no_folder(filesystem, root := root.rstrip("/"))
    return filesystem, root


def refuse_no_folder(filesystem: FileSystem, root: str, *, to_write: bool = False) -> None:
    """Raises OSError if a local path is not a folder that can be read or made; other file systems always pass."""
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
    """Writes `root/name` atomically: readers see the old file or the whole new one. Unfinished files lie in `root/parts`."""
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
        with suppress(OSError):  # it was never created, or what kept it from being written keeps it from being removed
            filesystem.delete_file(part)
        raise


def files(filesystem: FileSystem, root: str) -> list[FileInfo]:
    """Lists every file below a folder; empty if there is no folder. Raises any error of the file system's library."""
    selector = FileSelector(root, recursive=True, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except NotADirectoryError:  # or created after pyarrow asked fsspec for a folder: it then asks whether anything exists
        infos = filesystem.get_file_info(selector)
    return [info for info in infos if info.type is FileType.File]


def without_credentials(uri: str) -> str:
    """Returns the URI without user, password and options, for display."""
    scheme, colon, rest = redact.redact_uri(uri).partition("://")
    if not colon:
        return uri
    return f"{scheme}://" + re.split(r"[?#]", rest.removeprefix(f"{redact.REDACTED}@"), maxsplit=1)[0]


def brief(error: BaseException) -> str:
    """Returns an error's message on one line, shortened, without the secrets that libraries quote."""
    words = " ".join(redact.redact_text(str(error) or type(error).__name__).split())
    return words if len(words) <= 200 else f"{words[:200]}…"


def _patient(uri: str) -> str:
    """Returns the URI with a limit on how long Google's library retries; its own default is 15 minutes."""
    if not uri.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds={_GCS_PATIENCE_S}"


def _s3(uri: str) -> tuple[S3FileSystem, str]:
    """Does what `FileSystem.from_uri` does with fewer retries: pyarrow 25 would ask a hanging server 31 times, for 100 s."""
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
