"""End a process when its parent ends (Linux): used by every plane that starts processes.

Only the first lines of a new process use it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; raise the signal now if the parent is already gone.

    Two system calls and no lock, so it may run between fork and exec. A forked child inherits none of it. On other
    systems than Linux only the second half works.

    Args:
        parent: Pid of the parent, taken before this process was started.
        number: Signal to send.

    Raises:
        OSError: If the kernel refuses.
    """
    if sys.platform == "linux" and _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        signal.raise_signal(number)
