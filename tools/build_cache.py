"""Folder of the programs that are built once per user, and the lock that lets two builds at a time do the work once."""

import contextlib
import fcntl
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

HASH_CHARACTERS = 12


class BuildError(Exception):
    """A program can't be had; the message says what to do."""


def cache_folder(environment: Mapping[str, str], name: str, sources: Iterable[bytes]) -> Path:
    """Return the folder of what is built from some sources: other sources, another folder."""
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache").expanduser()
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source)
    return Path(home, "polyreme", f"{name}-{digest.hexdigest()[:HASH_CHARACTERS]}")


@contextlib.contextmanager
def locked(folder: Path, *, busy: str) -> Iterator[None]:
    """Hold a folder, which is made if there is none; say ``busy`` before a wait for another process."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(busy)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built(path: Path, build: Callable[[], None]) -> Path:
    """Return a path of the cache, and build it if it is not there, alone."""
    if not path.exists():
        with locked(path.parent, busy=f"another build is under way in {path.parent}: waiting for it"):
            if not path.exists():
                build()
    return path


def say(line: str) -> None:
    """Report progress on standard error: standard output is the result's."""
    print(line, file=sys.stderr, flush=True)
