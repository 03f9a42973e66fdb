"""Load objects as users wrote them: parse them, and refuse a job that no plan fits."""

from __future__ import annotations

from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJob
from polyreme_api.job.load import parse_new_job
from polyreme_api.kinds import KINDS, AnyObject
from polyreme_api.labels import KIND_JOB
from polyreme_api.load import parse_object
from polyreme_planner.plan import plan_for


def load_job(document: object) -> TrainingJob:
    """Read a job as a user wrote it, and refuse one that no plan fits.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    job = parse_new_job(document)
    plan_for(job.spec)
    return job


def load_object(document: object) -> AnyObject:
    """Read an object of any of our kinds as a user wrote it; a job is planned too.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    known = ", ".join(KINDS)
    if not isinstance(document, Mapping):
        raise InvalidConfigError(
            f"not a Kubernetes object: {type(document).__name__}, "
            "expected a mapping with apiVersion, kind, metadata, spec"
        )
    name = document.get("kind")
    if name == KIND_JOB:
        return load_job(document)
    if not isinstance(name, str) or name not in KINDS:
        raise InvalidConfigError(f"kind is not supported: {name!r}, expected one of {known}", field="kind")
    return parse_object(document, KINDS[name])
