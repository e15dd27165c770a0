"""Checkpoints on disk: directories that are whole or do not count.

``<root>/step-00000012/`` holds torch.distributed.checkpoint's files (``.metadata`` and one ``.distcp`` a rank: weights
and optimizer state), ``training.pt`` (what is small: groups, schedulers, random state, the data's position) and
``checkpoint.json``, the manifest: step, plan, and every file's size and CRC-32. It is written as ``step-00000012.part``
and renamed when the manifest is there, so a writer that dies at any moment leaves the checkpoints before it as they
were. Where a step is written again, what was there is renamed to ``.old`` until the new one has its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.runtime.faults import CheckpointError

if TYPE_CHECKING:
    from autoplan.runtime.distributed_file import DistributedFile

MANIFEST = "checkpoint.json"
TRAINING = "training.pt"
METADATA = ".metadata"
MODEL = "model."  # before the user's names of parameters and buffers
OPTIMIZER = "optimizer."  # before the user's names of parameters and ".<state>"
_STEP = re.compile(r"step-(\d+)(\.old)?")
_BLOCK = 2**22


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def checkpoints_in(root: Path) -> list[tuple[int, Path]]:
    """Steps and directories of what was written whole below ``root``, the newest first; nothing is verified."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and (match[2] is None or int(match[1]) not in found):
            found[int(match[1])] = path
    return sorted(found.items(), reverse=True)


def is_checkpoint(directory: Path) -> bool:
    """Whether this is one, whole or not, and no directory of plain weights."""
    return (directory / MANIFEST).exists() or (directory / METADATA).exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``files``: name -> (bytes, CRC-32)."""

    step: int
    plan: str
    world: int
    files: dict[str, tuple[int, int]]

    def write(self, directory: Path) -> None:
        content: dict[str, Any] = {
            "schema": 1,
            "step": self.step,
            "plan": self.plan,
            "world": self.world,
            "files": {name: {"bytes": size, "crc32": crc} for name, (size, crc) in sorted(self.files.items())},
        }
        content["crc32"] = zlib.crc32(json.dumps(content).encode())
        with (directory / MANIFEST).open("w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises CheckpointError naming the file that is missing or damaged."""
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_text())
            if content.pop("crc32") != zlib.crc32(json.dumps(content).encode()):
                raise ValueError
            files = {name: (int(known["bytes"]), int(known["crc32"])) for name, known in content["files"].items()}
            return cls(step=int(content["step"]), plan=str(content["plan"]), world=int(content["world"]), files=files)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", where=str(directory)) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is damaged: it is no manifest", where=str(directory)) from None


def measure(file: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def verify(directory: Path, rank: int, world: int) -> None:
    """Compare every ``world``-th file from the ``rank``-th with the manifest. Raises CheckpointError naming the first
    that is missing, cut short or damaged."""
    files = sorted(Manifest.read(directory).files.items())
    for name, (size, crc) in files[rank::world]:
        path = directory / name
        if not path.exists():
            raise CheckpointError(f"{path} is missing", where=str(directory))
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size} bytes of {size}", where=str(directory)
            )
        if measure(path) != (size, crc):
            raise CheckpointError(f"{path} is damaged: its bytes are not those written", where=str(directory))


def open_checkpoint(directory: Path, rank: int, world: int) -> DistributedFile:
    """Its tensors. Each of ``world`` ranks verifies a share of the files, so all of them must call this."""
    from autoplan.runtime.distributed_file import DistributedFile

    verify(directory, rank, world)
    try:
        return DistributedFile(directory)
    except Exception as error:  # a pickle of torch's: it may fail in any way
        raise CheckpointError(f"{directory / METADATA} cannot be read: {error!r}", where=str(directory)) from None


def part_of(directory: Path) -> Path:
    """Where ``directory`` is written."""
    return directory.with_name(f"{directory.name}.part")


def begin(directory: Path) -> None:
    """Make room for a checkpoint at ``directory``; what writers that died left beside it is gone after."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for left in directory.parent.glob("step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    part_of(directory).mkdir()


def publish(directory: Path, *, keep: int) -> None:
    """Give what was written its name, and delete all but the newest ``keep`` checkpoints up to it. Later ones stay:
    they may be the better ones of a run that went back."""
    part, old = part_of(directory), directory.with_name(f"{directory.name}.old")
    _sync(part)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(directory, old)
    os.replace(part, directory)
    _sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)
    step = _STEP.fullmatch(directory.name)
    assert step is not None
    earlier = [path for number, path in checkpoints_in(directory.parent) if number <= int(step[1])]
    for path in earlier[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Let a directory's entries outlive a crash of the machine."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
