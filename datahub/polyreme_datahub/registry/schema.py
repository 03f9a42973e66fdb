"""The registry's tables, the same on SQLite and PostgreSQL. Migrations create them; a test holds both equal.

No time stands here that a decision reads: ``*_s`` columns are seconds since the Unix epoch, for people and for due
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
)
"""Where bytes lie: the blob that holds them and their place in it."""

actions = Table(
    "actions",
    metadata,
    Column("key", DIGEST, primary_key=True),
    Column("operation", String(63), nullable=False),
    Column("input", DIGEST, nullable=False),
    Column("output", DIGEST, nullable=False),
)
"""What was made of what: key = digest of (operation, version, parameters, input); the first commit wins."""

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("version_id", Integer, ForeignKey("versions.id"), primary_key=True),
    Column("key", DIGEST, primary_key=True),
    Column("stage", String(63), nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("sample_id", String(1024), nullable=False),
    Column("rule", String(253), nullable=False),
    Column("error", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Index(None, "version_id", "ordinal"),
)
"""Records that broke a rule, by the key of the action that failed."""

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
"""The outbox: a message is due until the transaction that commits its results sets ``done``."""

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
    Column("stage", String(63), primary_key=True),
    Column("hits", BigInteger, nullable=False),
    Column("misses", BigInteger, nullable=False),
    Column("dead", BigInteger, nullable=False),
)
"""How often each stage found its result, and how often it computed it."""
