"""Names that appear on cluster objects: group, labels, annotations, resources, object names."""

from __future__ import annotations

GROUP = "polyreme.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND_JOB = "TrainingJob"
PLURAL_JOB = "trainingjobs"
KIND_QUEUE = "TrainingQueue"
KIND_TOPOLOGY = "ClusterTopology"
KIND_FAULT_POLICY = "NodeFaultPolicy"
KIND_INCIDENT = "NodeIncident"
MANAGER = f"{GROUP}/operator"
"""Value of ``spec.managedBy`` for jobs that this operator manages; the default."""

LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_INDEX = f"{GROUP}/index"
LABEL_REPLACEMENT = f"{GROUP}/replacement"
LABEL_QUEUE = f"{GROUP}/queue"
LABEL_SWEEP = f"{GROUP}/sweep"
"""On jobs that ``polyreme sweep`` made of one: the name of the sweep."""

ANNOTATION_PROGRESS = f"{GROUP}/progress"
"""On the job's Lease: the newest ``ProgressRecord`` as JSON."""
ANNOTATION_SIGNATURE = f"{GROUP}/progress-signature"
"""Beside it: its signature with the job's key (``signed_progress``)."""

RESOURCE_DEVICE = f"{GROUP}/device"
"""Extended resource that counts training devices of a node, where no vendor's resource is named."""

INTENTS_NAME = "polyreme-intents"
SECRET_KEY = "secret"
"""Key of the job's Secret that launchers prove and with which their leader signs; 32 bytes, base64."""
INSTALLATION_KEY_NAME = "polyreme-operator-key"
"""Secret in the operator's namespace from which the keys of all jobs are derived."""

_UID_CHARACTERS = 5


def job_object_name(job: str, uid: str) -> str:
    """Name of a job's Service, Lease, Secret, ServiceAccount and Role: ``<job>-<uid5>``."""
    return f"{job}-{uid.replace('-', '')[:_UID_CHARACTERS]}"


def pod_name(job: str, uid: str, *, index: int, replacement: int) -> str:
    """Name of the pod that fills a worker's place: ``<job>-<uid5>-<index>-<replacement>``."""
    return f"{job_object_name(job, uid)}-{index}-{replacement}"
