"""Stacks that ranks wrote when an attempt of a job hung, from its checkpoint root."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme.run_files.stacks import StackGroup, group, of_store
from polyreme.run_files.stored_logs import location, stored_logs
from polyreme_api.errors import PolyremeError
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.views import JobView


def stacks_of(job: JobView) -> tuple[Sequence[StackGroup], str]:
    """Return the stacks of the newest attempt that hung, and what can't be read of them; both empty if none did."""
    hung = [record.attempt for record in job.status.restart_records if record.cause == Cause.HUNG]
    root = job.status.checkpoint_location
    if not hung or not root:
        return [], ""
    try:
        return group(of_store(stored_logs(root, attempt=hung[-1]).store, hung[-1])), ""
    except PolyremeError as error:
        return [], f"stacks of attempt {hung[-1]} in {location(root, attempt=hung[-1])} are not shown: {error.message}"
