"""Takes system calls away from a process for good: a classic BPF filter, assembled here, for x86-64 and aarch64.

What is not listed is allowed, so this is no wall by itself: it closes what namespaces and Landlock leave open, such as
sockets, signals to others, sessions of its own, shared memory that outlives the process, and io_uring, which would do
all of that unseen. A call that is newer than this list does not exist.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator

AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_CALLS = 0x40000000
NEWEST_CALL = 462
"""mseal of Linux 6.10: numbers beyond it mean nothing here yet, and are the same on both architectures."""

# Numbers on x86-64 and aarch64; -1 where there is no such call.
DENIED: dict[str, tuple[int, int]] = {
    # Other processes: signals, memory, priorities, and leaving the group that is killed at the end.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "setsid": (112, 157), "setpgid": (109, 154), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "get_robust_list": (274, 100),
    # The network, and sockets that other processes listen to.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Memory that outlives the process or that no limit counts.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgctl": (71, 187), "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
    # What Landlock does not see: metadata of any file of this user, cutting by name, watching names.
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "truncate": (76, 45), "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsmount": (432, 432), "fsconfig": (431, 431), "fspick": (433, 433), "mount_setattr": (442, 442),
    "swapon": (167, 224), "swapoff": (168, 225),
    # The kernel's own machinery, where most of its holes were found.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116),
    "acct": (163, 89), "quotactl": (179, 60), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "personality": (135, 92),
    "vhangup": (153, 58), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "capset": (126, 91),
}  # fmt: skip

CLONE, CLONE3 = (56, 220), (435, 435)
FCNTL, IOCTL, PRLIMIT, SENDTO = (72, 25), (16, 29), (302, 261), (44, 206)
CLONE_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
FCNTL_SIGNALS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel would send the signal of our choice to a process of our choice."""
IOCTL_SIGNALS = (0x8901, 0x8902, 0x5412, 0x541C)
"""FIOSETOWN, SIOCSPGRP: the same; TIOCSTI, TIOCLINUX: type into a terminal."""

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERROR | errno.EPERM
_ABSENT = _ERROR | errno.ENOSYS

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false (both relative to the next instruction), operand."""


def program(machine: str) -> list[Instruction]:
    """The filter for an architecture as uname names it; raises KeyError for another than the two."""
    architecture, column = AUDIT_ARCHITECTURE[machine], 0 if machine == "x86_64" else 1
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, X32_CALLS),
        (_RETURN, 0, 0, _DENY),
        (_ABOVE, 0, 1, NEWEST_CALL),
        (_RETURN, 0, 0, _ABSENT),
    ]
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            code += _if_call(numbers[column], [(_RETURN, 0, 0, _DENY)])
    # Its flags lie in memory, where no filter can look; the C library then uses clone.
    code += _if_call(CLONE3[column], [(_RETURN, 0, 0, _ABSENT)])
    code += _if_call(CLONE[column], _unless((_ANY_BIT, CLONE_NEW_NAMESPACES), argument=0))
    code += _if_call(FCNTL[column], _unless(*((_EQUAL, command) for command in FCNTL_SIGNALS), argument=1))
    code += _if_call(IOCTL[column], _unless(*((_EQUAL, request) for request in IOCTL_SIGNALS), argument=1))
    # A pid of 0 is the process itself.
    code += _if_call(PRLIMIT[column], _unless((_ANY_BIT, 0xFFFFFFFF), argument=0))
    # An address, in either half of the pointer, would reach a socket that nobody is connected to.
    either_half = [*_unless((_ANY_BIT, 0xFFFFFFFF), argument=4)[:-1], *_unless((_ANY_BIT, 0xFFFFFFFF), argument=4.5)]
    code += _if_call(SENDTO[column], either_half)
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def confine() -> None:
    """Filter this thread, and all that it will start; raises OSError. no_new_privs must be set already."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program(platform.machine()))
    instructions = ctypes.create_string_buffer(code, len(code))
    filter_program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_seccomp, mode_filter = 22, 2
    if libc.prctl(pr_set_seccomp, mode_filter, filter_program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set")


def _if_call(number: int, then: list[Instruction]) -> Iterator[Instruction]:
    """`then` must return in the end: it spoils what was loaded."""
    yield (_EQUAL, 0, len(then), number)
    yield from then


def _unless(*tests: tuple[int, int], argument: float) -> list[Instruction]:
    """Deny the call if a test of an argument's lower half (`n.5`: upper half) holds, else allow it."""
    code: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + int(8 * argument))]
    for test, operand in tests:
        code += [(test, 0, 1, operand), (_RETURN, 0, 0, _DENY)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]
