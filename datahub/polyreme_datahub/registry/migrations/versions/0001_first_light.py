"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    digest, name, sample_id = sa.String(64), sa.String(253), sa.String(1024)
    op.create_table(
        "versions",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", name, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("digest", digest, nullable=False),
        sa.Column("records", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.UniqueConstraint("name", "number", name="uq_versions_name_number"),
        sa.UniqueConstraint("name", "digest", name="uq_versions_name_digest"),
    )
    op.create_table(
        "samples",
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), primary_key=True),
        sa.Column("ordinal", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("sample_id", sample_id, nullable=False),
        sa.Column("record", digest, nullable=False),
    )
    op.create_index("ix_samples_version_id_sample_id", "samples", ["version_id", "sample_id"])
    op.create_table(
        "artifacts",
        sa.Column("digest", digest, primary_key=True),
        sa.Column("blob", digest, nullable=False),
        sa.Column("start", sa.BigInteger, nullable=False),
        sa.Column("length", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "actions",
        sa.Column("key", digest, primary_key=True),
        sa.Column("operation", sa.String(63), nullable=False),
        sa.Column("input", digest, nullable=False),
        sa.Column("output", digest, nullable=False),
    )
    op.create_table(
        "dead_letters",
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), primary_key=True),
        sa.Column("key", digest, primary_key=True),
        sa.Column("stage", sa.String(63), nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("sample_id", sample_id, nullable=False),
        sa.Column("rule", name, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
    )
    op.create_index("ix_dead_letters_version_id_ordinal", "dead_letters", ["version_id", "ordinal"])
    _upgrade_work()


def _upgrade_work() -> None:
    digest = sa.String(64)
    op.create_table(
        "messages",
        sa.Column("key", sa.String(512), primary_key=True),
        sa.Column("pipeline", digest, nullable=False),
        sa.Column("topic", sa.String(63), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("done", sa.SmallInteger, nullable=False),
    )
    op.create_index("ix_messages_pipeline_done", "messages", ["pipeline", "done"])
    op.create_table(
        "tries",
        sa.Column("key", sa.String(512), primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("due_s", sa.Float(53), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )
    op.create_table(
        "tombstones",
        sa.Column("index_digest", digest, primary_key=True),
        sa.Column("ordinal", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("sample_id", sa.String(1024), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )
    op.create_table(
        "indexes",
        sa.Column("key", digest, primary_key=True),
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), nullable=False),
        sa.Column("manifest", digest, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
    )
    op.create_index("ix_indexes_version_id", "indexes", ["version_id"])
    op.create_table(
        "statistics",
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), primary_key=True),
        sa.Column("stage", sa.String(63), primary_key=True),
        sa.Column("hits", sa.BigInteger, nullable=False),
        sa.Column("misses", sa.BigInteger, nullable=False),
        sa.Column("dead", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Drop everything: before the first schema there is none. Tables that others refer to go last."""
    work = ("statistics", "indexes", "tombstones", "tries", "messages")
    for table in (*work, "dead_letters", "actions", "artifacts", "samples", "versions"):
        op.drop_table(table)
