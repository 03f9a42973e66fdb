"""Limits of a child, set by itself once its operations are imported and before it reads a sample."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from polyreme_datahub.sandbox.system_calls import forbid_new_privileges, refuse_system_calls
from polyreme_system.parent_death import end_with_parent

NOBODY = 65_534
CPU_SLACK_S = 1


def confine(*, parent: int, memory_bytes: int | None, files: int, system_calls: bool) -> tuple[dict[str, bool], int]:
    """Take rights away from this process.

    Returns:
        What the kernel granted, by name, and the limit of the address space that is now in force [bytes; 0: none].

    Raises:
        OSError: If the machine's own limits are lower than those asked for.
        ValueError: The same.
    """
    limit = 0
    if memory_bytes is not None and sys.platform == "linux":
        limit = _mapped_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    granted = {"unprivileged": False, "no_new_privileges": False, "system_calls": False}
    if system_calls:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        granted["unprivileged"] = _drop_root()
        granted["no_new_privileges"] = forbid_new_privileges()
    end_with_parent(parent)  # after the change of user, which clears it
    if system_calls:
        granted["system_calls"] = refuse_system_calls()
    return granted, limit


def allow_cpu(seconds: int) -> None:
    """Allow this process so much more CPU time; beyond it, SIGXCPU ends it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + seconds + CPU_SLACK_S
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def memory_limit_was_lowered(limit: int) -> bool:
    """Tell whether the address space is limited to less than this process has set; the sample is not to blame then."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return soft != resource.RLIM_INFINITY and (limit == 0 or soft < limit)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()


def _drop_root() -> bool:
    """Stop being root, if modules that are imported later stay readable; tell whether this process is not root."""
    if os.geteuid() != 0:
        return True
    if not all(_is_readable_by_all(place) for place in _import_places()):
        return False
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    return os.geteuid() != 0


def _import_places() -> Iterable[Path]:
    return (Path(place).resolve() for place in sys.path if Path(place).is_dir())


def _is_readable_by_all(place: Path) -> bool:
    needed = stat.S_IROTH | stat.S_IXOTH
    reachable = all(parent.stat().st_mode & stat.S_IXOTH for parent in place.parents)
    return reachable and place.stat().st_mode & needed == needed
