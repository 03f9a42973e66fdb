"""Work items, lineage, drops, tags, pins and blob states; samples partitioned on PostgreSQL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

DIGEST, NAME, SAMPLE_ID = sa.String(64), sa.String(253), sa.String(1024)
PARTITIONS = 16


def upgrade() -> None:
    _upgrade_work()
    _upgrade_lifecycle()
    _upgrade_lineage()
    with op.batch_alter_table("dead_letters") as table:
        table.alter_column("stage", new_column_name="operation", type_=NAME, existing_type=sa.String(63))
    op.create_table(
        "drops",
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), primary_key=True),
        sa.Column("key", DIGEST, primary_key=True),
        sa.Column("operation", NAME, nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("sample_id", SAMPLE_ID, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
    )
    op.create_index("ix_drops_version_id_ordinal", "drops", ["version_id", "ordinal"])
    with op.batch_alter_table("statistics") as table:
        table.alter_column("stage", type_=NAME, existing_type=sa.String(63))
        table.add_column(sa.Column("dropped", sa.BigInteger, nullable=False, server_default="0"))
    _partition_samples(PARTITIONS)


def downgrade() -> None:
    """Take it back: what only this schema can hold (work, tags, pins, drops, inline values) goes with it."""
    _partition_samples(0)
    with op.batch_alter_table("statistics") as table:
        table.drop_column("dropped")
        table.alter_column("stage", type_=sa.String(63), existing_type=NAME, postgresql_using="substr(stage, 1, 63)")
    op.drop_table("drops")
    with op.batch_alter_table("dead_letters") as table:
        table.alter_column(
            "operation",
            new_column_name="stage",
            type_=sa.String(63),
            existing_type=NAME,
            postgresql_using="substr(operation, 1, 63)",
        )
    _downgrade_lineage()
    for name in ("pins", "tags", "collections", "blobs", "work", "flows"):
        op.drop_table(name)


def _upgrade_work() -> None:
    op.create_table(
        "flows",
        sa.Column("id", DIGEST, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "work",
        sa.Column("key", sa.String(512), primary_key=True),
        sa.Column("flow", DIGEST, nullable=False),
        sa.Column("stage", NAME, nullable=False),
        sa.Column("version_id", sa.Integer, nullable=False),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("owner", NAME, nullable=False),
        sa.Column("lease_until_s", sa.Float(53), nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("due_s", sa.Float(53), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("published_s", sa.Float(53), nullable=False),
        sa.Column("ended_s", sa.Float(53), nullable=False),
    )
    indexes = (["state", "stage", "flow", "first"], ["flow", "stage", "state"], ["state", "published_s"])
    for columns in (*indexes, ["version_id", "first"]):
        op.create_index(f"ix_work_{'_'.join(columns)}", "work", columns)


def _upgrade_lifecycle() -> None:
    op.create_table(
        "blobs",
        sa.Column("digest", DIGEST, primary_key=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("touched_s", sa.Float(53), nullable=False),
        sa.Column("condemned_s", sa.Float(53), nullable=False),
        sa.Column("marked", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_blobs_state", "blobs", ["state"])
    op.create_table(
        "collections",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("phase", sa.String(63), nullable=False),
        sa.Column("cursor", sa.String(253), nullable=False),
        sa.Column("started_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "tags",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("tag", sa.String(63), primary_key=True),
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), nullable=False),
        sa.Column("moved_s", sa.Float(53), nullable=False),
    )
    op.create_index("ix_tags_version_id", "tags", ["version_id"])
    op.create_table(
        "pins",
        sa.Column("holder", NAME, primary_key=True),
        sa.Column("version_id", sa.Integer, sa.ForeignKey("versions.id"), primary_key=True),
        sa.Column("created_s", sa.Float(53), nullable=False),
    )
    op.create_index("ix_pins_version_id", "pins", ["version_id"])


def _upgrade_lineage() -> None:
    """Move the input of each action to rows; of several inputs the first schema kept only the first."""
    op.create_table(
        "action_inputs",
        sa.Column("action", DIGEST, primary_key=True),
        sa.Column("position", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("digest", DIGEST, nullable=False),
    )
    op.execute("INSERT INTO action_inputs (action, position, digest) SELECT key, 0, input FROM actions")
    op.create_index("ix_action_inputs_digest", "action_inputs", ["digest"], postgresql_using="hash")
    with op.batch_alter_table("actions") as table:
        table.drop_column("input")
        table.alter_column("operation", type_=NAME, existing_type=sa.String(63))
        table.add_column(sa.Column("value", sa.Text))
    op.create_index("ix_actions_output", "actions", ["output"], postgresql_using="hash")
    op.create_index("ix_artifacts_blob", "artifacts", ["blob"])


def _downgrade_lineage() -> None:
    op.drop_index("ix_artifacts_blob", "artifacts")
    op.drop_index("ix_actions_output", "actions")
    op.execute("DELETE FROM actions WHERE value IS NOT NULL")
    with op.batch_alter_table("actions") as table:
        table.drop_column("value")
        table.alter_column(
            "operation", type_=sa.String(63), existing_type=NAME, postgresql_using="substr(operation, 1, 63)"
        )
        table.add_column(sa.Column("input", DIGEST, nullable=False, server_default=""))
    op.execute(
        "UPDATE actions SET input = COALESCE((SELECT digest FROM action_inputs "
        "WHERE action_inputs.action = actions.key AND position = 0), '')"
    )
    with op.batch_alter_table("actions") as table:
        table.alter_column("input", server_default=None, existing_type=DIGEST)
    op.drop_table("action_inputs")


def _partition_samples(partitions: int) -> None:
    """Rewrite ``samples`` on PostgreSQL with so many hash partitions, or with none."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("ALTER TABLE samples RENAME TO samples_before")
    op.execute("ALTER TABLE samples_before RENAME CONSTRAINT samples_pkey TO samples_before_pkey")
    op.execute("DROP INDEX ix_samples_version_id_sample_id")
    split = "PARTITION BY HASH (version_id, ordinal)" if partitions else ""
    op.execute(
        "CREATE TABLE samples (version_id INTEGER NOT NULL REFERENCES versions (id), ordinal BIGINT NOT NULL, "
        f"sample_id VARCHAR(1024) NOT NULL, record VARCHAR(64) NOT NULL, PRIMARY KEY (version_id, ordinal)) {split}"
    )
    for part in range(partitions):
        op.execute(
            f"CREATE TABLE samples_{part:02d} PARTITION OF samples "
            f"FOR VALUES WITH (MODULUS {partitions}, REMAINDER {part})"
        )
    op.execute("INSERT INTO samples SELECT version_id, ordinal, sample_id, record FROM samples_before")
    op.execute("DROP TABLE samples_before")
    op.create_index("ix_samples_version_id_sample_id", "samples", ["version_id", "sample_id"])
