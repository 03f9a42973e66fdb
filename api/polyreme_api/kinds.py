"""All kinds of the group, by name."""

from collections.abc import Mapping
from typing import TypeAlias

from polyreme_api.fault_policy import NodeFaultPolicy
from polyreme_api.incident import NodeIncident
from polyreme_api.job import TrainingJob
from polyreme_api.labels import KIND_FAULT_POLICY, KIND_INCIDENT, KIND_JOB, KIND_QUEUE, KIND_TOPOLOGY
from polyreme_api.queue import TrainingQueue
from polyreme_api.topology import ClusterTopology

AnyObject: TypeAlias = TrainingJob | TrainingQueue | ClusterTopology | NodeFaultPolicy | NodeIncident

KINDS: Mapping[str, type[AnyObject]] = {
    KIND_JOB: TrainingJob,
    KIND_QUEUE: TrainingQueue,
    KIND_TOPOLOGY: ClusterTopology,
    KIND_FAULT_POLICY: NodeFaultPolicy,
    KIND_INCIDENT: NodeIncident,
}
