"""Takes the file system away from a process for good, but for what it is given: Landlock, which needs no privilege."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_O_PATH = 0o10000000
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_ABI_1 = (1 << 13) - 1
_MAKE_DEVICES = 1 << 6 | 1 << 11
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_TCP = 1 << 0 | 1 << 1
_ABSTRACT_SOCKETS_AND_SIGNALS = 1 << 0 | 1 << 1


def abi() -> int:
    """The kernel's Landlock version; 0 where it has none, or it is switched off."""
    version = ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, 1)
    return max(0, version)


def confine(*, readable: Sequence[str], writable: Sequence[str]) -> None:
    """Leave this process the named files and folders, those in the former to read and execute; raises OSError.

    What the kernel's version cannot restrict (cutting files, TCP, abstract sockets, signals) seccomp.py takes away
    altogether. no_new_privs must be set already.
    """
    version = abi()
    handled = _ALL_OF_ABI_1
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEVICE if version >= 5 else 0
    # An older kernel refuses a longer description, so it is as long as this one knows.
    attributes = [
        handled,
        *([_TCP] if version >= 4 else []),
        *([_ABSTRACT_SOCKETS_AND_SIGNALS] if version >= 6 else []),
    ]
    description = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = _call(_CREATE_RULESET, description, len(description), 0)
    for path in readable:
        _allow(ruleset, path, handled & (_EXECUTE | _READ_FILE | _READ_DIR))
    for path in writable:
        _allow(ruleset, path, handled & ~_EXECUTE & ~_MAKE_DEVICES & ~_IOCTL_DEVICE)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    beneath_path = 1
    try:
        fd = os.open(path, _O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        access &= _OF_A_FILE
    _call(_ADD_RULE, ruleset, beneath_path, struct.pack("=Qi", access, fd), 0)
    os.close(fd)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
