"""Where benchmarks write what they measure."""

from pathlib import Path

from compile_sweep.schema.errors import SweepFolderError


def make_room(path: Path) -> None:
    """Creates a file's folder before its content is computed.

    Raises:
        SweepFolderError: The folder cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); name another place") from None
