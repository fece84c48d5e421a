"""The filter's decisions, by interpreting it as the kernel does; and its numbers against the kernel's headers."""

import errno
import re
from pathlib import Path

import pytest

from laminar.envs.sandbox.inside import seccomp

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
DENIED, ABSENT = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel does with a system call: a classic BPF machine with one register."""
    architecture = seccomp.AUDIT_ARCHITECTURE[machine] if architecture is None else architecture
    words = {0: number, 4: architecture}
    for position, argument in enumerate((*arguments, *(0,) * (6 - len(arguments)))):
        words[16 + 8 * position] = argument & 0xFFFFFFFF
        words[20 + 8 * position] = argument >> 32 & 0xFFFFFFFF
    code, at, loaded = seccomp.program(machine), 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                loaded = words[operand]
            case 0x15:
                at += if_true if loaded == operand else if_false
            case 0x35:
                at += if_true if loaded >= operand else if_false
            case 0x25:
                at += if_true if loaded > operand else if_false
            case 0x45:
                at += if_true if loaded & operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"{operation:#x} is no instruction of ours")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_listed_calls_are_denied_and_what_a_program_needs_is_not(machine):
    column = 0 if machine == "x86_64" else 1
    for name, numbers in seccomp.DENIED.items():
        if numbers[column] >= 0:
            assert decide(machine, numbers[column]) == DENIED, name
    read, write, mmap = ((0, 63), (1, 64), (9, 222))
    for number in (read[column], write[column], mmap[column]):
        assert decide(machine, number) == ALLOWED
    assert decide(machine, seccomp.NEWEST_CALL + 1) == ABSENT
    assert decide(machine, 0, architecture=0x40000003) == KILLED, "32-bit calls have other numbers"


def test_the_x32_numbers_are_no_way_around():
    assert decide("x86_64", 0x40000000 | 41) == DENIED


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("call", "arguments", "decision"),
    [
        (seccomp.CLONE3, (), ABSENT),
        (seccomp.CLONE, (0x3D0F00,), ALLOWED),
        (seccomp.CLONE, (0x10000011,), DENIED),
        (seccomp.CLONE, (0x00020011,), DENIED),
        (seccomp.CLONE, (0x00000091,), DENIED),
        (seccomp.FCNTL, (3, 4, 0o4000), ALLOWED),
        (seccomp.FCNTL, (3, 8, 1), DENIED),
        (seccomp.FCNTL, (3, 10, 9), DENIED),
        (seccomp.IOCTL, (3, 0x5401), ALLOWED),
        (seccomp.IOCTL, (3, 0x8901), DENIED),
        (seccomp.PRLIMIT, (0, 7), ALLOWED),
        (seccomp.PRLIMIT, (1234, 7), DENIED),
        (seccomp.SENDTO, (3, 0x7F00, 1, 0, 0, 0), ALLOWED),
        (seccomp.SENDTO, (3, 0x7F00, 1, 0, 0x7FFF00001000, 16), DENIED),
        (seccomp.SENDTO, (3, 0x7F00, 1, 0, 0x7FFF00000000, 16), DENIED),
    ],
)
def test_calls_that_are_harmless_with_some_arguments_are_judged_by_them(machine, call, arguments, decision):
    assert decide(machine, call[0 if machine == "x86_64" else 1], *arguments) == decision


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernel_s_headers(machine):
    header, pattern = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    numbers = {m[1]: int(m[2]) for line in header.read_text().splitlines() if (m := re.match(pattern, line))}
    column = 0 if machine == "x86_64" else 1
    conditional = {
        "clone": seccomp.CLONE,
        "clone3": seccomp.CLONE3,
        "fcntl": seccomp.FCNTL,
        "ioctl": seccomp.IOCTL,
        "prlimit64": seccomp.PRLIMIT,
        "sendto": seccomp.SENDTO,
    }
    for name, ours in (seccomp.DENIED | conditional).items():
        if name in numbers:
            assert ours[column] == numbers[name], name
