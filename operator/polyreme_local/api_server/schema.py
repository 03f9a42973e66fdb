"""Schema checks that a real API server does by CRD: for the embedded cluster, the same rules from their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.load import parse_new_job
from polyreme_api.kinds import KINDS
from polyreme_api.labels import KIND_JOB
from polyreme_api.load import parse_object
from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef

_CHECKED = ("apiVersion", "kind", "metadata", "spec")
"""What people write; the status is the operator's own word."""


def check(manifest: Manifest) -> None:
    """Check an object of one of our kinds.

    Raises:
        InvalidObjectError: Naming the field, the value seen and the rule.
    """
    document = {"spec": {}} | {name: manifest[name] for name in _CHECKED if name in manifest}
    try:
        if manifest["kind"] == KIND_JOB:
            parse_new_job(document)
        else:
            parse_object(document, KINDS[manifest["kind"]])
    except InvalidConfigError as error:
        raise InvalidObjectError(f"{ObjectRef.of(manifest)} is invalid: {error.message}", field=error.field) from error


SCHEMAS: Mapping[str, Callable[[Manifest], None]] = dict.fromkeys(KINDS, check)
"""The check of each of our kinds."""
