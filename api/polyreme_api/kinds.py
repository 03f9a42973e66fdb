"""All kinds of the group, by name."""

from collections.abc import Mapping
from typing import TypeAlias

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fault_policy import NodeFaultPolicy
from polyreme_api.job import TrainingJob, load_job
from polyreme_api.labels import KIND_FAULT_POLICY, KIND_JOB, KIND_QUEUE, KIND_TOPOLOGY
from polyreme_api.load import parse_object
from polyreme_api.queue import TrainingQueue
from polyreme_api.topology import ClusterTopology

AnyObject: TypeAlias = TrainingJob | TrainingQueue | ClusterTopology | NodeFaultPolicy

KINDS: Mapping[str, type[AnyObject]] = {
    KIND_JOB: TrainingJob,
    KIND_QUEUE: TrainingQueue,
    KIND_TOPOLOGY: ClusterTopology,
    KIND_FAULT_POLICY: NodeFaultPolicy,
}


def load_object(document: object) -> AnyObject:
    """Read an object of any of our kinds as a user wrote it; a job is planned too.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    known = ", ".join(KINDS)
    if not isinstance(document, Mapping):
        raise InvalidConfigError(
            f"no object: a {type(document).__name__}, rule a mapping with apiVersion, kind, metadata, spec"
        )
    name = document.get("kind")
    if name == KIND_JOB:
        return load_job(document)
    if not isinstance(name, str) or name not in KINDS:
        raise InvalidConfigError(f"kind is refused: {name!r}, rule one of {known}", field="kind")
    return parse_object(document, KINDS[name])
