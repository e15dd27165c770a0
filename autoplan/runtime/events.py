"""Scalars in TensorBoard's own file format, without TensorBoard: ``tensorboard --logdir DIR`` shows them.

A file is records of (length, masked CRC of it, an ``Event`` message, masked CRC of it), all little-endian
(tensorflow/core/lib/io/record_writer.h). The CRC is Castagnoli's, rotated right by 15 bits plus 0xa282ead8. Of
``Event`` and ``Summary`` (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto) four fields are
written, by protocol buffers' wire format.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from autoplan.errors import AutoplanError

_CASTAGNOLI = 0x82F63B78  # the polynomial, bits reversed
_VERSION = b"brain.Event:2"


class EventFile:
    """A new event file in ``directory``. Raises AutoplanError where it cannot be written."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        started = time.time()
        name = f"events.out.tfevents.{int(started)}.{socket.gethostname()}.{os.getpid()}"
        self.path = Path(directory) / name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self.path.open("ab")
        except OSError as error:
            raise AutoplanError(
                f"cannot write the metrics: {error.strerror}", where=str(directory), attempt="another log_dir"
            ) from None
        self._stream.write(record(_double(1, started) + _text(3, _VERSION)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The values of one step, by tag; on disk when this returns to the system."""
        values = b"".join(_text(1, _text(1, tag.encode()) + _float(2, value)) for tag, value in scalars.items())
        self._stream.write(record(_double(1, time.time()) + _number(2, step) + _text(5, values)))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def record(message: bytes) -> bytes:
    """One message with its length and checksums."""
    length = struct.pack("<Q", len(message))
    return length + _masked_crc(length) + message + _masked_crc(message)


def _masked_crc(data: bytes) -> bytes:
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CASTAGNOLI if entry & 1 else 0)
        table.append(entry)
    return tuple(table)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
