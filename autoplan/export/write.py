"""Small text files, written beside and renamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autoplan.errors import AutoplanError
from autoplan.whole_file import write_whole


def write_files(files: Mapping[str, str], directory: Path) -> None:
    """Write each text under its name; raises AutoplanError for a place that cannot be written, or holds one already."""
    taken = [name for name in files if (directory / name).exists()]
    if taken:
        raise AutoplanError(
            f"{taken[0]} is there already, and nothing is overwritten",
            where=str(directory),
            attempt="another directory, or remove it first",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(directory / name, text, mode=0o755 if text.startswith("#!") else 0o644)
    except OSError as error:
        raise AutoplanError(f"cannot write: {error.strerror}", where=str(error.filename or directory)) from None
