"""Whole tensors in memory and in safetensors files, read and written rectangle by rectangle or one by one.

Torch's distributed checkpoints are in :mod:`autoplan.runtime.distributed_file`, which takes a second to import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from autoplan.runtime.faults import CheckpointError
from autoplan.runtime.pieces import Piece

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a tensor whose whole shape is ``shape``."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def copied(self) -> Part:
        """In host memory of its own, so that training may go on while it is written."""
        return Part(self.shape, tuple(Piece(p.offset, p.view.to("cpu", copy=True).contiguous()) for p in self.pieces))


class Source(Protocol):
    """Whole tensors by name that can be read in part."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the pieces of ``parts``."""
        ...


class SafetensorsFile:
    """A safetensors file, or a directory with one, or with several and their index; read slice by slice."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file that is missing or damaged."""
        self._files: dict[Path, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._where: dict[str, Path] = {}
        for file in self._files_of(path):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118  no mapping, though it has keys
                self._where[name] = file
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the pieces of ``parts``."""
        for name, part in parts.items():
            opened = self._open(self._where[name])
            for piece in part.pieces:
                values = opened.get_slice(name)[piece.index] if piece.offset else opened.get_tensor(name)
                piece.view.copy_(values)

    @staticmethod
    def _files_of(path: Path) -> list[Path]:
        if not path.is_dir():
            return [path]
        index = path / _INDEX
        if not index.exists():
            return [path / WEIGHTS]
        try:
            return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{index} cannot be read as a checkpoint: {error!r}") from None

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read as a checkpoint: {error}") from None
        return self._files[file]


class InMemory:
    """Whole tensors of a state dict, as a file of them."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the pieces of ``parts``."""
        for name, part in parts.items():
            for piece in part.pieces:
                piece.view.copy_(self._state[name].detach()[piece.index])


def write_safetensors(
    path: Path, patterns: Mapping[str, Tensor], whole: Iterable[tuple[Sequence[str], Tensor]]
) -> None:
    """One file in the safetensors format, a tensor in memory at a time. ``patterns`` have names, shapes and dtypes (on
    any device, meta included); ``whole`` yields, in any order, the names that share a tensor, and that tensor."""
    stop, header, begins = 0, {}, {}
    for name, pattern in patterns.items():
        if pattern.dtype not in _NAMES:
            raise CheckpointError(f"`{name}` is {pattern.dtype}, which safetensors files do not hold")
        start, stop = stop, stop + pattern.numel() * pattern.element_size()
        begins[name] = start
        header[name] = {"dtype": _NAMES[pattern.dtype], "shape": list(pattern.shape), "data_offsets": [start, stop]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)
        for names, tensor in whole:
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for name in names:
                file.seek(8 + len(text) + begins[name])
                file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
