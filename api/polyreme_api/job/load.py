"""From YAML or a cluster's object to a TrainingJob."""

from polyreme_api.job.spec import TrainingJob
from polyreme_api.load import parse_object


def load_job(document: object) -> TrainingJob:
    """Read a job as a user wrote it, and refuse what no plan fits.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    job = parse_job(document)
    from polyreme_api.plan.plan import plan_for  # the plan reads job types, so it can't be imported above

    plan_for(job.spec)
    return job


def parse_job(document: object) -> TrainingJob:
    """Read a job's structure, without planning it.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    return parse_object(document, TrainingJob)
