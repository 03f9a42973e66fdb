"""The seccomp filter of a child: no new files or changes of files, no processes, no network, no signals to others.

A list of what is refused, not of what is allowed: libraries need many calls, and the files of this machine stay
readable. It keeps damaged input from doing damage; it is no wall against an operation's own author.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping

_X86, _ARM = 0xC000003E, 0xC00000B7
ARCHITECTURES: Mapping[str, tuple[int, int]] = {"x86_64": (_X86, 0), "aarch64": (_ARM, 1)}
"""Machine -> its number in seccomp's data, and its column below."""
NONE = -1
REFUSED: Mapping[str, tuple[int, int]] = {
    "accept": (43, 202),
    "add_key": (248, 217),
    "bind": (49, 200),
    "bpf": (321, 280),
    "chmod": (90, NONE),
    "chown": (92, NONE),
    "chroot": (161, 51),
    "connect": (42, 203),
    "creat": (85, NONE),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fork": (57, NONE),
    "ftruncate": (77, 46),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "lchown": (94, NONE),
    "link": (86, NONE),
    "linkat": (265, 37),
    "listen": (50, 201),
    "mkdir": (83, NONE),
    "mkdirat": (258, 34),
    "mknod": (133, NONE),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "rename": (82, NONE),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "request_key": (249, 218),
    "rmdir": (84, NONE),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "semget": (64, 190),
    "setns": (308, 268),
    "setxattr": (188, 5),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "symlink": (88, NONE),
    "symlinkat": (266, 36),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unlink": (87, NONE),
    "unlinkat": (263, 35),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utimensat": (280, 88),
    "vfork": (58, NONE),
}
UNKNOWN: Mapping[str, tuple[int, int]] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Answered as if the kernel had none: their flags lie in memory, which a filter can't read. C libraries fall back."""
OPENS: Mapping[str, tuple[int, int]] = {"open": (2, NONE), "openat": (257, 56)}
CLONE, KILLS, PRLIMIT = (56, 220), {"kill": (62, 129), "tgkill": (234, 131)}, (302, 261)
WRITING = 0o3 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""
CLONE_THREAD = 0x10000

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _ALL_THREADS = 38, 1, 1
_SECCOMP = (317, 277)


def program(machine: str, pid: int) -> bytes:
    """Build the filter for a process, as BPF instructions."""
    architecture, column = ARCHITECTURES[machine]
    code: list[bytes] = []

    def add(operation: int, value: int, *, then: int = 0, otherwise: int = 0) -> None:
        code.append(struct.pack("<HBBI", operation, then, otherwise, value))

    def when(number: int, *rest: tuple[int, int, int, int]) -> None:
        """If the call is ``number``, do the rest, which ends in returns."""
        if number != NONE:
            add(_EQUAL, number, otherwise=len(rest))
            for operation, value, then, otherwise in rest:
                add(operation, value, then=then, otherwise=otherwise)

    refuse, allow = (_RETURN, _ERRNO | errno.EPERM, 0, 0), (_RETURN, _ALLOW, 0, 0)
    add(_LOAD, _ARCHITECTURE)
    add(_EQUAL, architecture, then=1)
    add(_RETURN, _KILL)
    add(_LOAD, _NUMBER)
    add(_GREATER, 0x40000000, otherwise=1)  # x32 calls have numbers of their own
    add(_RETURN, _ERRNO | errno.ENOSYS)
    for at, numbers in ((1, OPENS["open"]), (2, OPENS["openat"])):
        when(numbers[column], _argument(at), (_ANY_BIT, WRITING, 0, 1), refuse, allow)
    when(CLONE[column], _argument(0), (_ANY_BIT, CLONE_THREAD, 1, 0), refuse, allow)
    for numbers in KILLS.values():
        when(numbers[column], _argument(0), (_EQUAL, pid, 1, 0), refuse, allow)
    when(PRLIMIT[column], _argument(0), (_EQUAL, 0, 1, 0), refuse, allow)
    for numbers in UNKNOWN.values():
        when(numbers[column], (_RETURN, _ERRNO | errno.ENOSYS, 0, 0))
    for numbers in REFUSED.values():
        when(numbers[column], refuse)
    add(_RETURN, _ALLOW)
    return b"".join(code)


def _argument(at: int) -> tuple[int, int, int, int]:
    return _LOAD, _ARGUMENTS + 8 * at, 0, 0


def forbid_new_privileges() -> bool:
    """Give up every right that executing a file could bring; tell whether the kernel did it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return hasattr(libc, "prctl") and bool(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def refuse_system_calls() -> bool:
    """Install the filter for all threads of this process; tell whether the kernel did it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES or sys.platform != "linux":
        return False
    code = program(machine, os.getpid())
    held = ctypes.create_string_buffer(code)
    described = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SECCOMP[ARCHITECTURES[machine][1]]
    return bool(libc.syscall(number, _SET_MODE_FILTER, _ALL_THREADS, described) == 0)
