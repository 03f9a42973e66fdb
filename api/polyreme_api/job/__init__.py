"""The TrainingJob resource, group ``polyreme.dev``, version ``v1alpha1``: spec, status, validation, CRD."""

from polyreme_api.job.load import parse_job
from polyreme_api.job.spec import TrainingJob, TrainingJobSpec
from polyreme_api.job.status import TrainingJobStatus

__all__ = ["TrainingJob", "TrainingJobSpec", "TrainingJobStatus", "parse_job"]
