"""Looks at the first records of a source that is being registered, and counts what they were understood to be."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.sources.chunks import chunks_of
from polyreme_datahub.sources.preference_forms import NO_PREFERENCE, REJECTED
from polyreme_datahub.sources.types import Looked

RECORDS_MAX = 1000
CHUNKS_MAX = 16
"""Chunks of work that are looked at: with images inside, these are 256 MiB at most."""
SPREAD_MAX = 64
"""Records over the whole source that are tried if none of the first is usable."""
UNREAD_MAX = 16
THREADS = 8
FIELD = "looked"
"""Of a description."""


class Lookable(Protocol):
    """A source whose records can be understood without their images."""

    def record_id(self, ordinal: int) -> str:
        """Name a record even if it can't be read."""
        ...

    def look(self, ordinal: int) -> Looked:
        """Understand a record.

        Raises:
            BadRecordError: If it breaks a rule.
        """
        ...


def look_over(source: Lookable, description: Mapping[str, Any], records: int, *, threads: int) -> dict[str, Any]:
    """Count what the first records are; JSON-able.

    Args:
        source: Of the description.
        description: Of the source.
        records: How many it has.
        threads: That read them, each its own run of records.

    Raises:
        SourceInvalidError: If none of them, nor of others over the whole source, is usable.
    """
    chunks = itertools.islice(chunks_of(description, records), CHUNKS_MAX)
    first = range(min(RECORDS_MAX, sum(count for _, count in chunks)))
    spread = [at * records // SPREAD_MAX for at in range(SPREAD_MAX)] if records > len(first) else []
    seen = _look(source, first, threads)
    if all(isinstance(one, BadRecordError) for _, one in seen):
        seen += _look(source, spread, threads)
    if not all(isinstance(one, BadRecordError) for _, one in seen):
        return _counts(seen)
    at, bad = next((at, one) for at, one in seen if isinstance(one, BadRecordError))
    raise SourceInvalidError(
        f"dataset {description['path']} has no usable record: {len(seen)} were looked at, as "
        f"{bad.sample_id or source.record_id(at)} ({bad.rule}): {bad.message}",
        field="source",
    ) from bad


def are_preferences(looked: Mapping[str, Any]) -> bool:
    """Tell whether more of the records are usable as preferences than lack a second answer."""
    return bool(looked["records"] - looked["unusable"] > looked.get("lacking", 0))


def may_be_preferences(looked: Mapping[str, Any]) -> bool:
    """Tell whether some of the records that were read as conversations could be preferences."""
    return bool(looked["unusable"] or set(REJECTED) & set(looked["unread"]))


def lacks_preferences(error: SourceInvalidError) -> bool:
    """Tell whether no record was usable as a preference since the first one has no second answer."""
    return isinstance(error.__cause__, BadRecordError) and error.__cause__.rule == NO_PREFERENCE


def sentence(looked: Mapping[str, Any]) -> str:
    """Say what the records were understood to be, and what of them is not read."""
    parts = [f"{count:,} {_counted(kind, count)}" for kind, count in looked["kinds"].items()]
    if looked["unusable"]:
        parts.append(f"{looked['unusable']:,} unusable, as {looked['first']}")
    said = f"{looked['records']:,} record{'s' * (looked['records'] != 1)} looked at: {', '.join(parts)}"
    names, more = looked["unread"], looked["unreadMore"]
    if names:
        said += f"; not read: {', '.join(names)}" + (f" and {more} more" if more else "")
    return said


def _counted(kind: str, count: int) -> str:
    first, _, rest = kind.partition(" ")
    return f"{first.removesuffix('s') if count == 1 else first} {rest}"


def _look(source: Lookable, ordinals: Sequence[int], threads: int) -> list[tuple[int, Looked | BadRecordError]]:
    def one(ordinal: int) -> Looked | BadRecordError:
        try:
            return source.look(ordinal)
        except BadRecordError as error:
            return error

    each = max(1, -(-len(ordinals) // threads))
    runs = [ordinals[at : at + each] for at in range(0, len(ordinals), each)]
    with ThreadPoolExecutor(threads) as pool:
        looked = pool.map(lambda run: [(at, one(at)) for at in run], runs)
        return list(itertools.chain.from_iterable(looked))


def _counts(seen: Sequence[tuple[int, Looked | BadRecordError]]) -> dict[str, Any]:
    good = [one for _, one in seen if isinstance(one, Looked)]
    bad = [one for _, one in seen if isinstance(one, BadRecordError)]
    unread = Counter(_printable(name) for one in good for name in one.unread)
    names = [name for name, _ in unread.most_common(UNREAD_MAX)]
    lacking = sum(one.rule == NO_PREFERENCE for one in bad)
    return {
        **({"lacking": lacking} if lacking else {}),
        "records": len(seen),
        "kinds": dict(Counter(one.kind for one in good).most_common()),
        "unusable": len(bad),
        "first": _printable(bad[0].message) if bad else "",
        "unread": names,
        "unreadMore": len(unread) - len(names),
    }


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
