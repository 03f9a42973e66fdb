"""Locations of the output of ranks: files of a pod, lines of a pod's log, and objects in a checkpoint root."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

STORED_PREFIX = "logs/"
"""With it begins every key of a stored log."""
STORED_LINES_MAX = 10_000
"""Last lines of a rank that are stored when its attempt did not succeed."""
STORED_BYTES_MAX = 4 << 20
"""Most bytes of them."""
ATTEMPTS_KEPT = 10
"""Attempts whose logs are kept, in a pod's folder and in a checkpoint root; older ones are removed."""
PREVIOUS = ".1"
"""Suffix of the file with the lines before those of a rank's file, which is rotated."""

_LINE = re.compile(r"\[rank ([0-9]{1,9}) attempt ([0-9]{1,9})\] ?")
_STORED = re.compile(r"logs/a([0-9]{6,9})/rank-([0-9]{5,9})\.(log|stacks)")
_FILE = re.compile(r"(?:rank|check)-([0-9]{1,9})\.a([0-9]{1,9})\.(?:log(?:\.1)?|stacks)")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class RankAttempt:
    """One rank in one attempt."""

    attempt: int
    rank: int

    @property
    def prefix(self) -> str:
        """Beginning of each of its lines in the log of its pod."""
        return f"[rank {self.rank} attempt {self.attempt}] "

    @property
    def file_name(self) -> str:
        """Name of its file in the folder of its pod."""
        return f"rank-{self.rank}.a{self.attempt}.log"

    @property
    def stacks_name(self) -> str:
        """Name of the file with the stacks of its threads, beside that one: it is empty unless they were asked for."""
        return f"rank-{self.rank}.a{self.attempt}.stacks"

    @property
    def stored_stacks_key(self) -> str:
        """Key of its stacks in the job's checkpoint root."""
        return f"{self.stored_key.removesuffix('.log')}.stacks"

    @property
    def stored_key(self) -> str:
        """Key of its last lines in the job's checkpoint root."""
        return f"{STORED_PREFIX}a{self.attempt:06d}/rank-{self.rank:05d}.log"


def split_line(line: str) -> tuple[RankAttempt | None, str]:
    """Return the rank that a line of a pod's log names, None for the launcher's own, and the text after the prefix."""
    found = _LINE.match(line)
    if found is None:
        return None, line
    return RankAttempt(int(found[2]), int(found[1])), line[found.end() :]


def of_stored_key(key: str, *, kind: Literal["log", "stacks"] = "log") -> RankAttempt | None:
    """Return the rank and the attempt of the key of a stored log, or of stored stacks; None for another key."""
    found = _STORED.fullmatch(key)
    return None if found is None or found[3] != kind else RankAttempt(int(found[1]), int(found[2]))


def check_file_name(local_rank: int, attempt: int) -> str:
    """Name of the file with the output of a check of one device."""
    return f"check-{local_rank}.a{attempt}.log"


def attempt_of_file(name: str) -> int | None:
    """Return the attempt of a file in a pod's folder; None for a file that is no log of a rank or a check."""
    found = _FILE.fullmatch(name)
    return None if found is None else int(found[2])


def expired_attempts(attempts: Iterable[int], *, kept: int = ATTEMPTS_KEPT) -> frozenset[int]:
    """Return all but the newest attempts."""
    return frozenset(sorted(set(attempts), reverse=True)[kept:])
