"""Small text files, written beside and renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autoplan.errors import AutoplanError


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
            handle, temporary = tempfile.mkstemp(dir=directory, prefix=name, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o755 if text.startswith("#!") else 0o644)
            os.replace(temporary, directory / name)
    except OSError as error:
        raise AutoplanError(f"cannot write: {error.strerror}", where=str(error.filename or directory)) from None
