"""From YAML or a cluster's object to a TrainingJob."""

from polyreme_api.job.spec import TrainingJob
from polyreme_api.load import parse_object


def parse_job(document: object) -> TrainingJob:
    """Read a job's structure, without planning it.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    return parse_object(document, TrainingJob)
