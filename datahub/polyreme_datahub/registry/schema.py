"""The registry's tables, the same on SQLite and PostgreSQL. Migrations create them; a test holds both equal.

On PostgreSQL ``samples`` is hash-partitioned by the migrations: one logical table. Two indexes of digests are of the
kind ``hash`` there, which only finds equal values and is a quarter of the size.

No decision reads a time from here: ``*_s`` columns are seconds since the Unix epoch, for people and for due
times.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s"}
)

DIGEST = String(64)
NAME = String(253)

versions = Table(
    "versions",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", NAME, nullable=False),
    Column("number", Integer, nullable=False),
    Column("source", Text, nullable=False),
    Column("digest", DIGEST, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("created_s", Float(53), nullable=False),
    UniqueConstraint("name", "number"),
    UniqueConstraint("name", "digest"),
)
"""Datasets are names; a version is immutable: the digest of its source never changes."""

samples = Table(
    "samples",
    metadata,
    Column("version_id", Integer, ForeignKey("versions.id"), primary_key=True),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("sample_id", String(1024), nullable=False),
    Column("record", DIGEST, nullable=False),
    Index(None, "version_id", "sample_id"),
)
"""One row for each ingested record; ``record`` is the digest of its canonical form in the lakehouse."""

artifacts = Table(
    "artifacts",
    metadata,
    Column("digest", DIGEST, primary_key=True),
    Column("blob", DIGEST, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Index(None, "blob"),
)
"""Where bytes lie: the blob that holds them and their place in it."""

blobs = Table(
    "blobs",
    metadata,
    Column("digest", DIGEST, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("touched_s", Float(53), nullable=False),
    Column("condemned_s", Float(53), nullable=False),
    Column("marked", BigInteger, nullable=False),
    Index(None, "state"),
)
"""Stored blobs for garbage collection. Condemning a blob and reusing it lock its row; without a row it is live.

``touched_s`` is when results last named it, ``marked`` the last collection that reached it from a version.
"""

collections = Table(
    "collections",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("phase", String(63), nullable=False),
    Column("cursor", String(253), nullable=False),
    Column("started_s", Float(53), nullable=False),
)
"""Garbage collections: how far each came, so that one that was killed continues."""

actions = Table(
    "actions",
    metadata,
    Column("key", DIGEST, primary_key=True),
    Column("operation", NAME, nullable=False),
    Column("output", DIGEST, nullable=False),
    Column("value", Text),
    Index(None, "output", postgresql_using="hash"),
)
"""What was made of what: key = digest of (operation, version, parameters, inputs); the first commit wins.

``value`` is the output itself where it is a small JSON value; such an output needs no artifact.
"""

action_inputs = Table(
    "action_inputs",
    metadata,
    Column("action", DIGEST, primary_key=True),
    Column("position", SmallInteger, primary_key=True, autoincrement=False),
    Column("digest", DIGEST, nullable=False),
    Index(None, "digest", postgresql_using="hash"),
)
"""Digests that an action read, in order: the lineage."""

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("version_id", Integer, ForeignKey("versions.id"), primary_key=True),
    Column("key", DIGEST, primary_key=True),
    Column("operation", NAME, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("sample_id", String(1024), nullable=False),
    Column("rule", String(253), nullable=False),
    Column("error", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Index(None, "version_id", "ordinal"),
)
"""Records that broke a rule, by the key of the action that failed."""

drops = Table(
    "drops",
    metadata,
    Column("version_id", Integer, ForeignKey("versions.id"), primary_key=True),
    Column("key", DIGEST, primary_key=True),
    Column("operation", NAME, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("sample_id", String(1024), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Index(None, "version_id", "ordinal"),
)
"""Samples that a filter or a barrier dropped on purpose, by the key of its action: no error."""

flows = Table(
    "flows",
    metadata,
    Column("id", DIGEST, primary_key=True),
    Column("body", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
)
"""What a worker must know of a flow, as JSON: a topic carries only keys of work items."""

work = Table(
    "work",
    metadata,
    Column("key", String(512), primary_key=True),
    Column("flow", DIGEST, nullable=False),
    Column("stage", NAME, nullable=False),
    Column("version_id", Integer, nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("owner", NAME, nullable=False),
    Column("lease_until_s", Float(53), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("due_s", Float(53), nullable=False),
    Column("error", Text, nullable=False),
    Column("published_s", Float(53), nullable=False),
    Column("ended_s", Float(53), nullable=False),
    Index(None, "state", "stage", "flow", "first"),
    Index(None, "flow", "stage", "state"),
    Index(None, "state", "published_s"),
    Index(None, "version_id", "first"),
)
"""Work items. An item is open until the transaction that commits its results ends it; leases only save work."""

tags = Table(
    "tags",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("tag", String(63), primary_key=True),
    Column("version_id", Integer, ForeignKey("versions.id"), nullable=False),
    Column("moved_s", Float(53), nullable=False),
    Index(None, "version_id"),
)
"""Names of versions that can be moved: ``name@tag``."""

pins = Table(
    "pins",
    metadata,
    Column("holder", NAME, primary_key=True),
    Column("version_id", Integer, ForeignKey("versions.id"), primary_key=True),
    Column("created_s", Float(53), nullable=False),
    Index(None, "version_id"),
)
"""Versions that a job or a checkpoint needs: neither removal nor garbage collection touches them."""

messages = Table(
    "messages",
    metadata,
    Column("key", String(512), primary_key=True),
    Column("pipeline", DIGEST, nullable=False),
    Column("topic", String(63), nullable=False),
    Column("body", Text, nullable=False),
    Column("done", SmallInteger, nullable=False),
    Index(None, "pipeline", "done"),
)
"""The outbox of the first runner: a message is due until the transaction that commits its results sets ``done``."""

tries = Table(
    "tries",
    metadata,
    Column("key", String(512), primary_key=True),
    Column("count", Integer, nullable=False),
    Column("due_s", Float(53), nullable=False),
    Column("error", Text, nullable=False),
)
"""Tries of a message, written before the work; a try that the environment failed is taken back."""

tombstones = Table(
    "tombstones",
    metadata,
    Column("index_digest", DIGEST, primary_key=True),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("sample_id", String(1024), nullable=False),
    Column("error", Text, nullable=False),
)
"""Samples whose stored bytes no longer fit their digest: a loader leaves a hole of the same length."""

indexes = Table(
    "indexes",
    metadata,
    Column("key", DIGEST, primary_key=True),
    Column("version_id", Integer, ForeignKey("versions.id"), nullable=False),
    Column("manifest", DIGEST, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Index(None, "version_id"),
)
"""Finished indexes, by (version, image parameters, tokenizer, sequence length)."""

statistics = Table(
    "statistics",
    metadata,
    Column("version_id", Integer, ForeignKey("versions.id"), primary_key=True),
    Column("stage", NAME, primary_key=True),
    Column("hits", BigInteger, nullable=False),
    Column("misses", BigInteger, nullable=False),
    Column("dead", BigInteger, nullable=False),
    Column("dropped", BigInteger, nullable=False, server_default="0"),
)
"""How often each operation (``stage``) found its result, and how often it computed it."""
