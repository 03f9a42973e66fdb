"""Stop the servers of a folder when the last process that holds them has ended, however it ended.

A holder keeps a shared lock, which the kernel releases with the process. A guard, a process of its own, waits for the
exclusive one.
"""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.cluster.server_folder import remove
from tools.cluster.servers import Servers
from tools.services.postgresql import LINK_NAME

ROOT = Path(__file__).parents[2]
LOCK_NAME = ".holders"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Servers]:
    """Hold the servers of a folder until the block ends; the last holder's end stops them."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "tools.services.guard", str(folder.resolve())],
            {**os.environ, "PYTHONPATH": str(ROOT)},
            setsid=True,
        )
        try:
            yield Servers(folder)
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _stop(folder)


def main(folder: Path) -> None:
    """Wait until no process holds the servers, then stop them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(FileNotFoundError), (folder / LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK_NAME).exists():
            _stop(folder)


def _stop(folder: Path) -> None:
    Servers(folder).stop()
    remove(folder / LINK_NAME)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
