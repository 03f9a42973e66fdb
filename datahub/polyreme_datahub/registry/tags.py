"""Tags: names of versions that can be moved. ``name@tag`` is taken wherever ``name@number`` is."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, select, update

from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.datasets import TAG, DatasetVersion, find_version
from polyreme_datahub.registry.engine import Database

TAGS_MAX = 1000
"""Most tags of one dataset."""
_TAGS = schema.tags.c


def set_tag(database: Database, reference: str, tag: str, *, now_s: float) -> DatasetVersion:
    """Point a tag at a version, whether it pointed elsewhere before or not; return the version.

    Args:
        database: The registry.
        reference: ``name``, ``name@number`` or ``name@tag``.
        tag: A name that begins with a letter.
        now_s: Now [s since the epoch].

    Raises:
        DatasetNotFoundError: If there is no such version.
        SourceInvalidError: If the tag is not valid, or the dataset has its most tags.
    """
    if not TAG.fullmatch(tag):
        raise SourceInvalidError(
            f"tag is not valid: {tag!r}, expected a lower-case letter, then at most 62 letters, digits, '-' or '.'",
            field="the tag",
        )
    version = find_version(database, reference)

    def work(connection: Connection) -> None:
        others = (_TAGS.name == version.name, _TAGS.tag != tag)
        count = connection.execute(select(func.count()).where(*others)).scalar_one()
        if count >= TAGS_MAX:
            raise SourceInvalidError(
                f"{version.name} has {count} tags, expected at most {TAGS_MAX}: remove one", field="the tag"
            )
        row = {"name": version.name, "tag": tag, "version_id": version.id, "moved_s": now_s}
        insert_new(connection, schema.tags, [row])
        mine = (_TAGS.name == version.name, _TAGS.tag == tag)
        connection.execute(update(schema.tags).where(*mine).values(version_id=version.id, moved_s=now_s))

    database.write(work)
    return version


def remove_tag(database: Database, name: str, tag: str) -> bool:
    """Remove a tag; return whether there was one. Its version stays."""
    query = delete(schema.tags).where(_TAGS.name == name, _TAGS.tag == tag)
    return database.write(lambda connection: connection.execute(query).rowcount > 0)


def tags_of(database: Database, name: str) -> dict[str, int]:
    """Return the number of the version of each tag of a dataset, by tag."""
    versions = schema.versions.c
    query = (
        select(_TAGS.tag, versions.number)
        .join(schema.versions, versions.id == _TAGS.version_id)
        .where(_TAGS.name == name)
        .order_by(_TAGS.tag)
        .limit(TAGS_MAX)
    )
    return database.read(lambda connection: {row.tag: row.number for row in connection.execute(query)})
