"""Alembic's entry: migrates over the connection that ``polyreme_datahub.registry.migrate`` hands in."""

from __future__ import annotations

from alembic import context

from polyreme_datahub.registry.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
