"""Objects that a collection can reach: from samples to their records, from there through actions to every output.

Outputs and records are JSON that names further blobs by digest: every run of 64 hexadecimal digits counts as a name,
which may keep too much and never too little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from sqlalchemy import Connection, select

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.engine import Database, pages
from polyreme_datahub.registry.results import places_of

DEPTH_MAX = 64
"""Most operations in a row."""
CONSUMERS_MAX = 1000
"""A digest that more actions read is not followed: an action that reads it is reached through its other inputs."""
JSON_BYTES_MAX = 2**20
"""Longer outputs are no JSON that names blobs."""
MANIFEST_BYTES_MAX = 2**28
"""Longer roots are no manifests."""
NAME = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
Read = Callable[[Mapping[str, Artifact]], Mapping[str, bytes]]


def named(content: bytes) -> set[str]:
    """Return the digests that a text names."""
    return {one.decode() for one in NAME.findall(content)}


def reach(database: Database, roots: Iterable[str], read: Read) -> set[str]:
    """Return the blobs that hold what follows from some digests, and further digests that are no blobs.

    Args:
        database: The registry.
        roots: Digests of records, or of anything that must stay.
        read: Returns the bytes of artifacts (``Lakehouse.get_parts``).
    """
    held: set[str] = set()
    seen: set[str] = set()
    level = set(roots)
    for depth in range(DEPTH_MAX):
        level -= seen
        if not level:
            break
        seen |= level
        places = places_of(database, level)
        held |= (level - places.keys()) | {place.blob for place in places.values()}
        places |= database.read(partial(_whole_blobs, digests=level - places.keys()))
        bytes_max = JSON_BYTES_MAX if depth else MANIFEST_BYTES_MAX
        short = {digest: place for digest, place in places.items() if place.length <= bytes_max}
        names = {name for content in _contents(read, short) for name in named(content)}
        level = names | database.read(partial(_outputs, digests=level))
    return held


def _whole_blobs(connection: Connection, digests: Collection[str]) -> dict[str, Artifact]:
    """Return those digests that are stored blobs of their own: a manifest, a tokenizer, a shard."""
    blobs = schema.blobs.c
    found: dict[str, Artifact] = {}
    for some in pages(sorted(digests)):
        for digest, size in connection.execute(select(blobs.digest, blobs.size).where(blobs.digest.in_(some))):
            found[digest] = Artifact(digest=digest, blob=digest, start=0, length=size)
    return found


def _contents(read: Read, places: Mapping[str, Artifact]) -> list[bytes]:
    """Return what can be read: an intermediate that is lost names nothing, and is recomputed when it is needed."""
    try:
        return list(read(places).values())
    except ObjectNotFoundError:
        if len(places) == 1:
            return []
        return [content for digest, place in places.items() for content in _contents(read, {digest: place})]


def _outputs(connection: Connection, digests: Collection[str]) -> set[str]:
    """Return what actions made of digests, and what their inline values name."""
    inputs, actions = schema.action_inputs.c, schema.actions.c
    every = select(actions.output, actions.value).join(schema.action_inputs, actions.key == inputs.action)
    found: set[str] = set()
    for some in pages(sorted(digests)):
        limit = CONSUMERS_MAX * len(some)
        rows = list(connection.execute(every.where(inputs.digest.in_(some)).limit(limit)))
        if len(rows) == limit:
            few = [connection.execute(every.where(inputs.digest == one).limit(CONSUMERS_MAX)).all() for one in some]
            rows = [row for part in few if len(part) < CONSUMERS_MAX for row in part]
        for output, value in rows:
            found.add(output)
            found |= named(value.encode()) if value else set()
    return found
