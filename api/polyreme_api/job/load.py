"""From YAML or a cluster's object to a TrainingJob."""

from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.spec import STORED, TrainingJob
from polyreme_api.labels import GROUP
from polyreme_api.load import parse_object


def parse_job(document: object) -> TrainingJob:
    """Read the structure of a job that exists, without planning it.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    return parse_object(document, TrainingJob, context=STORED)


def parse_new_job(document: object) -> TrainingJob:
    """Read a job that a user creates; stored jobs may break the rules that are checked here alone.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    job = parse_object(document, TrainingJob)
    for at, toleration in enumerate((job.spec.workers.template.get("spec") or {}).get("tolerations") or ()):
        _check_toleration(toleration, f"spec.workers.template.spec.tolerations.{at}")
    return job


def _check_toleration(toleration: dict[str, Any], field: str) -> None:
    key = toleration.get("key") or ""
    if not key or key.startswith(f"{GROUP}/"):
        seen = f"key {key}" if key else "no key"
        raise InvalidConfigError(
            f"{field} is refused: a job may not tolerate taints of {GROUP}, this toleration has {seen}; "
            "name the key of another taint, or drop the toleration",
            field=field,
        )
