"""Writes scalars to a TensorBoard event file.

By hand, since it is two small formats (a TFRecord around a protobuf message) and the libraries that write them import
torch, which the driver otherwise does without. Field numbers: tensorflow/core/util/event.proto and summary.proto.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


class ScalarFile:
    """One event file of a folder; each write is whole on disk when it returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The process keeps apart two starts within one second, which TensorBoard then reads as one run.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._file.write(_record(_wall_time(time.time()) + _text(3, b"brain.Event:2")))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(_record(scalar_event(time.time(), step, values)))

    def close(self) -> None:
        self._file.close()


def scalar_event(wall_time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """An Event whose Summary holds every value, as TensorBoard's protobuf has it. step: not negative."""
    summary = b"".join(_text(1, _text(1, name.encode()) + _float(2, value)) for name, value in values.items())
    return _wall_time(wall_time_s) + b"\x10" + _varint(step) + _text(5, summary)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def _wall_time(wall_time_s: float) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time_s)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


def _text(field: int, data: bytes) -> bytes:
    """A length-delimited field: a string or a message."""
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _masked_checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted as the TFRecord format wants it."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _CRC32C[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _crc32c_table() -> Iterator[int]:
    for index in range(256):
        remainder = index
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
        yield remainder


_CRC32C = tuple(_crc32c_table())
