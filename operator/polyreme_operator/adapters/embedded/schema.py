"""Schema checks that a real API server does by CRD: for the embedded cluster, the same rules from their source."""

from __future__ import annotations

from pydantic import ValidationError

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_operator.port import InvalidObjectError, Manifest, ObjectRef

PROBLEMS_MAX = 5


def check_job(manifest: Manifest) -> None:
    """Check a TrainingJob's specification.

    Raises:
        InvalidObjectError: Naming the fields.
    """
    try:
        TrainingJobSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as error:
        problems = [f"spec.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:PROBLEMS_MAX]]
        raise InvalidObjectError(f"{ObjectRef.of(manifest)} is invalid: {'; '.join(problems)}", field="spec") from error
