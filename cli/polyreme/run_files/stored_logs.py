"""Lines of ranks that launchers stored in a checkpoint root, and how to get them where this machine can't read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, NotFoundError, PolyremeError
from polyreme_api.rank_logs import STORED_PREFIX, RankAttempt, of_stored_key
from polyreme_api.store import ObjectStore
from polyreme_api.urls import is_bucket
from polyreme_datahub.objects import Patience, open_store
from polyreme_launcher.urls import checkpoint_folder

NUMBERS_SHOWN_MAX = 10
PATIENCE = Patience(request_s=30, retries_s=5, tries_s=5, tries_max=3)
"""For a person who waits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredLogs:
    """The logs of one checkpoint root."""

    url: str
    store: ObjectStore
    logs: Sequence[RankAttempt]
    """By attempt and rank."""

    @property
    def attempts(self) -> list[int]:
        """Attempts with stored logs, in order."""
        return sorted({log.attempt for log in self.logs})

    def chosen(self, *, rank: int | None, attempt: int | None) -> list[RankAttempt]:
        """Return the logs of a rank, or of all, in an attempt, or in the newest that has some."""
        found = [log for log in self.logs if rank is None or log.rank == rank]
        newest = max((log.attempt for log in found), default=None) if attempt is None else attempt
        return [log for log in found if log.attempt == newest]

    def nothing_of(self, what: str, *, rank: int | None, attempt: int | None) -> NotFoundError:
        """Return the error for a rank or an attempt without stored logs; it names those that have some."""
        named = "".join(
            f", {word} {number}" for word, number in (("rank", rank), ("attempt", attempt)) if number is not None
        )
        there = f"there are attempts {_some(self.attempts)}" if self.logs else "nothing is"
        if attempt in self.attempts:
            there = f"there are ranks {_some([log.rank for log in self.logs if log.attempt == attempt])}"
        return NotFoundError(
            f"no lines of {what}{named} are stored under {location(self.url)}: {there}", field="--rank or --attempt"
        )

    def lines(self, log: RankAttempt, tail: int | None) -> list[str]:
        """Return its last lines; None: all that are stored.

        Raises:
            StoreFailedError: If the store stays away.
        """
        lines = self.store.get(log.stored_key).decode(errors="replace").removesuffix("\n").split("\n")
        return lines if tail is None else lines[max(0, len(lines) - tail) :]


def stored_logs(url: str, *, rank: int | None = None, attempt: int | None = None) -> StoredLogs:
    """List the logs of a checkpoint root.

    Args:
        url: The root.
        rank: The rank that is looked for; None: every one. Only for the sentence of an error.
        attempt: The attempt; None: the newest.

    Raises:
        EnvironmentFailedError: If this machine can't read the root; the sentence says how to get the lines.
        InvalidConfigError: If it is no URL of a root.
        NotFoundError: If the root is a folder that this machine does not have.
    """
    where = location(url, rank=rank, attempt=attempt)
    folder = checkpoint_folder(url)
    if folder is not None and not folder.is_dir():
        raise NotFoundError(
            f"stored lines are in {where} on the volume that the job's workers mount, and this machine has no folder "
            f"{folder}; read them where it is mounted"
        )
    store = open_store(url, patience=PATIENCE)
    try:
        found = [log for info in store.list(STORED_PREFIX) if (log := of_stored_key(info.key)) is not None]
    except ModuleNotFoundError as error:
        why = f"Python module {error.name!r} is not installed here"
        raise EnvironmentFailedError(_unreadable(where, why)) from error
    except InvalidConfigError:
        raise
    except PolyremeError as error:
        raise EnvironmentFailedError(_unreadable(where, error.message), field=error.field) from error
    return StoredLogs(url=url.rstrip("/"), store=store, logs=sorted(found))


def location(url: str, *, rank: int | None = None, attempt: int | None = None) -> str:
    """Return the URL of what is stored of a rank in an attempt; of an unknown one with a word in its place."""
    folder = f"{url.rstrip('/')}/{STORED_PREFIX}"
    if rank is not None and attempt is not None:
        return url.rstrip("/") + "/" + RankAttempt(attempt, rank).stored_key
    return f"{folder}a{attempt:06d}/" if attempt is not None else folder


def _some(numbers: Sequence[int]) -> str:
    """Write the newest of some numbers."""
    shown = ", ".join(map(str, numbers[-NUMBERS_SHOWN_MAX:]))
    return f"..., {shown}" if len(numbers) > NUMBERS_SHOWN_MAX else shown


def _unreadable(where: str, why: str) -> str:
    copy = f"aws s3 cp --recursive {where} ." if where.endswith("/") else f"aws s3 cp {where} -"
    command = f"; with access to the bucket: {copy}" if is_bucket(where) else ""
    return f"stored lines are in {where} and can't be read from here: {why}{command}"
