"""Records of jobs below the locations that a user names: found without listing checkpoints, each read once, and kept.

A location is the operator's checkpoint root, one namespace of it, or the root of one job. A search costs one listing
for the location, one for each namespace and one for each job; a record is never written again, so it is read once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from polyreme.console.run_fields import fields_of
from polyreme.console.run_source import RunName, RunRow
from polyreme.plugin.console.bucket_reader import NO_CREDENTIALS, WAITED_S, BucketReader
from polyreme.views.formatting import moment
from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError, NotFoundError, PolyremeError, RefusedError
from polyreme_api.load import rule_words
from polyreme_api.run_record import PREFIX, RunRecord, record_key
from polyreme_api.store import FolderStore, ObjectInfo
from polyreme_api.urls import is_bucket
from polyreme_datahub.objects import Patience, bucket_of, open_store, store_folder

T = TypeVar("T")
Children = tuple[Sequence[str], Sequence[ObjectInfo]]
LOCATIONS_MAX = 8
FOLDERS_MAX = 10_000
"""Namespaces of a location, and jobs in them, that are looked into."""
RECORDS_MAX = 10_000
"""Records that are kept of all locations."""
RECORD_BYTES_MAX = 256 * 2**10
REQUESTS_MAX = 16
"""Requests to a location at once."""
REFRESH_S, REST = 60.0, 10.0
"""A location is searched again after so long, and not before so many times as long as the search took."""
PATIENCE = Patience(request_s=10, retries_s=5, tries_s=5, tries_max=2)
"""A console that stops waits for what it has asked."""
FIRST_S = 2.0
"""So long a page waits for the first search; it then shows what was found until now."""
SAID_MAX, SAID_CHARACTERS_MAX = 3, 300
"""Sentences on one location that a page shows, and their length."""
DELETED = "Deleted"
"""State of a job whose record is there, and which the API server does not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class PastJob:
    """A job that has a record."""

    uid: str
    root: str
    """URL of its checkpoint root."""
    row: RunRow
    """In a list, if it is deleted; changed when its record was written."""
    content: bytes
    """Of its record, which takes seven times as much memory when it is parsed."""

    @property
    def record(self) -> RunRecord:
        """Its record."""
        return RunRecord.model_validate_json(self.content)

    @property
    def url(self) -> str:
        """URL of its record."""
        return f"{self.root}/{record_key(self.uid)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is known of the jobs below all locations."""

    jobs: Mapping[RunName, Sequence[PastJob]]
    """By name, the newest first: jobs of one name have one checkpoint root, and so one history of steps."""
    said: Sequence[str]
    """What keeps others from being known."""
    searched: bool
    """Whether each location was searched once."""


def location_urls(typed: Sequence[str]) -> list[str]:
    """Return the URLs of locations that a user typed: of buckets, of folders, or paths.

    Raises:
        InvalidConfigError: If one is none of them or holds credentials, or there are too many.
    """
    if len(typed) > LOCATIONS_MAX:
        raise InvalidConfigError(f"{len(typed)} locations, expected at most {LOCATIONS_MAX}", field="--past")
    try:
        return list(dict.fromkeys(map(_url, typed)))
    except InvalidConfigError as error:
        raise InvalidConfigError(error.message, field="--past") from error


def _url(text: str) -> str:
    if not text.strip():
        raise InvalidConfigError("empty location, expected s3://bucket/prefix or a folder")
    if is_bucket(text):
        bucket_of(text)
        return text.rstrip("/")
    return (store_folder(text) if "://" in text else Path(text).expanduser()).resolve().as_uri()


class PastRecords:
    """The records below some locations, searched for in the background when a page asks.

    Args:
        locations: Their URLs.
        buckets: Knows which locations can be read.
        clock: Of this machine.
    """

    def __init__(self, locations: Sequence[str], buckets: BucketReader, clock: Clock) -> None:
        self._locations, self._buckets, self._clock = locations, buckets, clock
        self._lock = threading.Lock()
        self._found: dict[str, PastJob | str] = {}
        """By URL: a record, or why it can't be read."""
        self._said: dict[str, Sequence[str]] = {}
        """By location, of those that were searched."""
        self._seen: dict[str, set[str]] = {}
        """By location: URLs of the records that are there."""
        self._known: Past | None = None
        """As pages have it; None: it has changed since."""
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._stopped = threading.Event()

    def close(self) -> None:
        """Let a search end with the requests that are on their way."""
        self._stopped.set()

    async def look(self) -> Past:
        """Return what is known, and begin a search if the last one is old; only the first one is waited for."""
        if self._task is None or (self._task.done() and self._clock.steady_s() >= self._next_s):
            self._task = asyncio.create_task(asyncio.to_thread(self._search_all))
        if len(self._said) < len(self._locations):
            await asyncio.wait({self._task}, timeout=FIRST_S)
        with self._lock:
            if self._known is None:
                self._known = self._past()
            return self._known

    def _past(self) -> Past:
        jobs: dict[RunName, list[PastJob]] = {}
        damaged = list[str]()
        for url, found in self._found.items():
            if isinstance(found, str):
                damaged.append(f"{url} is left out: {found}")
            else:
                jobs.setdefault(found.row.run, []).append(found)
        for each in jobs.values():
            each.sort(key=lambda job: job.row.changed, reverse=True)
        said = [words for each in (*self._said.values(), damaged) for words in _first(each)]
        searched = len(self._said) == len(self._locations)
        if not searched:
            said.append(f"deleted jobs are still looked for; {len(self._found):,} records are read")
        return Past(jobs=jobs, said=said, searched=searched)

    def _search_all(self) -> None:
        began_s = self._clock.steady_s()
        try:
            with ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="past") as threads:
                for location in self._locations:
                    self._search_in(location, threads)
        finally:
            ended_s = self._clock.steady_s()
            self._next_s = ended_s + max(REFRESH_S, REST * (ended_s - began_s))

    def _search_in(self, location: str, threads: ThreadPoolExecutor) -> None:
        search = _Search(location, self._take, self._clock, self._stopped)
        if self._buckets.reads(location):
            search.run(threads)
        else:
            search.said.append(f"{location} is not searched: {NO_CREDENTIALS}")
        with self._lock:
            self._seen[location] = search.seen | (set() if search.whole else self._seen.get(location, set()))
            there = set[str]().union(*self._seen.values())
            self._found = {url: found for url, found in self._found.items() if url in there}
            self._said[location] = search.said
            self._known = None

    def _take(self, store: FolderStore, root: str, info: ObjectInfo) -> None:
        """Read a record that is not known yet.

        Raises:
            RefusedError: If there are too many.
            StoreFailedError: If the store stays away.
        """
        url = url_of(root, info)
        if url in self._found:
            return
        if len(self._found) >= RECORDS_MAX:
            raise RefusedError(f"more than {RECORDS_MAX:,} records are below the locations; the others are not read")
        found = _read(store, root, info)
        with self._lock:
            self._found[url] = found
            self._known = None


class _Search:
    """One search below one location.

    Args:
        location: Its URL.
        take: Is called with each record.
        clock: Of this machine.
        stopped: Set when nothing more is to be asked.
    """

    def __init__(
        self,
        location: str,
        take: Callable[[FolderStore, str, ObjectInfo], None],
        clock: Clock,
        stopped: threading.Event,
    ) -> None:
        self.seen: set[str] = set()
        """URLs of records."""
        self.said: list[str] = []
        self.whole = False
        """Whether all that is there was seen."""
        self._location, self._take, self._clock, self._stopped = location, take, clock, stopped
        self._away = threading.Event()

    def run(self, threads: ThreadPoolExecutor) -> None:
        """Look into the location, into what is in it, and for records in what is in that."""
        try:
            store = open_store(self._location, patience=PATIENCE)
        except PolyremeError as error:
            self.said.append(str(error))
            return
        level = [""]
        for _ in range(2):
            level = [each for below in threads.map(partial(self._look_into, store), level) for each in below]
            if len(level) > FOLDERS_MAX:
                self._say(f"{self._location} has {len(level):,} folders; the first {FOLDERS_MAX:,} are looked into")
                level = level[:FOLDERS_MAX]
        deque(threads.map(partial(self._records_of, store), level), maxlen=0)
        self.whole = not self.said and not self._stopped.is_set()
        if self.whole and not self.seen:
            places = f"{PREFIX}UID.json in it, in NAME/ or in NAMESPACE/NAME/"
            self._say(f"no record of a job is below {self._location}, expected {places}")

    def _look_into(self, store: FolderStore, folder: str) -> Sequence[str]:
        """Return the folders in a folder; none if it is the root of a job, whose records are taken."""
        names, _ = self._children(store, folder)
        if PREFIX.rstrip("/") in names and self._records_of(store, folder):
            return ()
        return [f"{folder}/{name}".lstrip("/") for name in names if _is_name(name)]

    def _records_of(self, store: FolderStore, folder: str) -> bool:
        """Take the records of the root of a job; return whether there are any."""
        root = f"{self._location}/{folder}".rstrip("/")
        _, objects = self._children(store, f"{folder}/{PREFIX}".strip("/"))
        records = [info for info in objects if info.key.endswith(".json")]
        for info in records:
            self.seen.add(url_of(root, info))
            self._asked(partial(self._take, store, root, info), None)
        return bool(records)

    def _children(self, store: FolderStore, folder: str) -> Children:
        nothing: Children = (), ()
        return self._asked(lambda: store.children(folder), nothing)

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        """Ask the store. What fails at once hides nothing else; one that does not answer is asked no more."""
        if self._away.is_set() or self._stopped.is_set():
            return otherwise
        began_s = self._clock.steady_s()
        try:
            return ask()
        except PolyremeError as error:
            if self._clock.steady_s() - began_s >= WAITED_S:
                self._away.set()
            self._say(str(error)[:SAID_CHARACTERS_MAX])
            return otherwise

    def _say(self, words: str) -> None:
        if words not in self.said:
            self.said.append(words)


def url_of(root: str, info: ObjectInfo) -> str:
    """Return the URL of a record."""
    return f"{root}/{PREFIX}{info.key.rpartition('/')[2]}"


def _read(store: FolderStore, root: str, info: ObjectInfo) -> PastJob | str:
    """Read a record, or say why it can't be read.

    Raises:
        StoreFailedError: If the store stays away.
    """
    if info.size_bytes > RECORD_BYTES_MAX:
        return f"it has {info.size_bytes:,} bytes, expected at most {RECORD_BYTES_MAX:,}"
    content = store.get(info.key)
    try:
        record = RunRecord.model_validate_json(content)
        run = RunName.read(f"{record.namespace}/{record.name}")
        moment(record.written_at_s)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"it is damaged: {' '.join([*map(str, first['loc']), rule_words(first)])}"
    except (ValueError, OverflowError, NotFoundError) as error:
        return f"it is damaged: {' '.join(str(error).split())[:SAID_CHARACTERS_MAX]}"
    if not info.key.endswith(record_key(record.uid)):
        return f"it is damaged: it is of the job with uid {record.uid[:64]!r}"
    training = record.spec.get("training")
    steps = training.get("steps") if isinstance(training, dict) else None
    row = RunRow(
        namespace=run.namespace,
        name=run.name,
        state=DELETED,
        step=None,
        steps=steps if isinstance(steps, int) else None,
        loss=None,
        held_out=None,
        goodput=None,
        attempt=None,
        changed=record.written_at_s,
        message=f"its record is in {root}",
        fields={_interned(field): _interned(value) for field, value in fields_of(record.spec)},
    )
    return PastJob(record.uid, root, row, content)


def _interned(value: Any) -> Any:
    return sys.intern(value) if isinstance(value, str) else value


def _is_name(name: str) -> bool:
    try:
        RunName.read(name)
    except NotFoundError:
        return False
    return True


def _first(said: Sequence[str]) -> list[str]:
    more = len(said) - SAID_MAX
    return [*said[:SAID_MAX], *([f"{more:,} more sentences like the last one"] if more > 0 else [])]
