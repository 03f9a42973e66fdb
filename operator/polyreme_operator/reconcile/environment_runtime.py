"""Containers with their own training program (``workers.runtime.mode: Environment``), configured by environment alone.

There is no launcher, so outcomes are read from the pods: an attempt succeeds when every pod does, and the exit code of
the first failed container ends it. Ranks can't be restarted in place, and a pod knows its attempt and world size only
from its environment, so every new attempt replaces every pod after the old ones are gone. A pod is asked to checkpoint
by its deletion: SIGTERM, with the grace period of a checkpoint. Such a container has no token and no key, unless its
template brings some of its own, so nothing is read from the job's Lease.
"""

from __future__ import annotations

import dataclasses

from polyreme_api import environment, labels
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_operator.reconcile.observe import (
    Failure,
    created_s,
    current_pods,
    late_start,
    lost_places,
)
from polyreme_operator.types.actions import DeletePod
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView, PodPhase

PET = "PET_"
"""Prefix of the variables from which torchrun takes its options (``PET_NNODES`` is ``--nnodes``)."""


def is_used(spec: TrainingJobSpec) -> bool:
    """Tell whether a job's containers run their own training program."""
    return spec.workers.runtime.mode == "Environment"


def variables(job: JobView, attempt: AttemptStatus, *, checkpoint_url: str) -> dict[str, str]:
    """Return the variables of every pod: rendezvous under torchrun's names, attempt and plan under ours."""
    master = f"{labels.job_object_name(job.name, job.uid)}.{job.namespace}.svc"
    port = str(environment.RENDEZVOUS_PORT)
    rendezvous = {
        environment.MASTER_ADDR: master,
        environment.MASTER_PORT: port,
        environment.WORLD_SIZE: str(attempt.replicas * attempt.devices),
        environment.NNODES: str(attempt.replicas),
        environment.NPROC_PER_NODE: str(attempt.devices),
    }
    torchrun = {
        f"{PET}{name}": rendezvous[name]
        for name in (
            environment.NNODES,
            environment.NPROC_PER_NODE,
            environment.MASTER_ADDR,
            environment.MASTER_PORT,
        )
    }
    place = {
        environment.JOB: job.name,
        environment.NAMESPACE: job.namespace,
        environment.JOB_UID: job.uid,
        environment.REPLICAS: str(attempt.replicas),
        environment.DEVICES: str(attempt.devices),
        environment.ATTEMPT: str(attempt.number),
        environment.CHECKPOINT_URL: checkpoint_url,
    }
    if attempt.plan:
        place[environment.PLAN] = attempt.plan
    return {**rendezvous, **torchrun, **place}


def own_variables(attempt: AttemptStatus, *, index: int, pod: str) -> dict[str, str]:
    """Return the variables of one pod: its place and its first rank."""
    return {
        environment.RANK: str(index * attempt.devices),
        environment.NODE_RANK: str(index),
        f"{PET}{environment.NODE_RANK}": str(index),
        environment.POD: pod,
        environment.INDEX: str(index),
    }


def has_succeeded(snapshot: JobSnapshot, attempt: AttemptStatus) -> bool:
    """Tell whether every pod of the attempt succeeded without being deleted."""
    pods = current_pods(snapshot)
    return len(pods) == attempt.replicas and all(
        pod.phase is PodPhase.SUCCEEDED and not pod.deleting for pod in pods.values()
    )


def started(snapshot: JobSnapshot) -> int:
    """Count the pods that run, or have succeeded without being deleted."""
    return sum(
        pod.phase is PodPhase.RUNNING or (pod.phase is PodPhase.SUCCEEDED and not pod.deleting)
        for pod in current_pods(snapshot).values()
    )


def find_failure(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> Failure | None:
    """Find what ended the attempt. Every pod is replaced, since none can join another attempt."""
    attempt = snapshot.job.attempt
    if attempt is None:
        return None
    failure = _without_ended_well(snapshot, spec, now_s)
    if failure is None:
        failure = _late_start(snapshot, spec, attempt, now_s)
    if failure is None:
        return None
    return dataclasses.replace(failure, code=failure.pod_code, replace=frozenset(range(attempt.replicas)))


def _without_ended_well(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> Failure | None:
    """Find lost places; a pod that has succeeded can't be lost."""
    done = {
        index: pod
        for index, pod in current_pods(snapshot).items()
        if pod.phase is PodPhase.SUCCEEDED and not pod.deleting
    }
    return lost_places(snapshot, spec, now_s, done=frozenset(done))


def _late_start(snapshot: JobSnapshot, spec: TrainingJobSpec, attempt: AttemptStatus, now_s: float) -> Failure | None:
    late_s = start_deadline_s(snapshot, spec)
    if late_s is None or now_s < late_s:
        return None
    timeout_s = spec.health.start_timeout_seconds
    return late_start(snapshot, attempt, f"{started(snapshot)} of {attempt.replicas} pods started in {timeout_s} s")


def start_deadline_s(snapshot: JobSnapshot, spec: TrainingJobSpec) -> float | None:
    """Return when a late start becomes a failure; None before every pod is created and once every pod has started."""
    since_s, pods = created_s(snapshot), current_pods(snapshot)
    if since_s is None or all(pod.phase is not PodPhase.PENDING for pod in pods.values()):
        return None
    return since_s + spec.health.start_timeout_seconds


def endings(snapshot: JobSnapshot, spec: TrainingJobSpec) -> tuple[DeletePod, ...]:
    """Delete the pods of an attempt that should stop, so that they checkpoint."""
    if not is_used(spec):
        return ()
    live = sorted(current_pods(snapshot).items())
    return tuple(DeletePod(ref=pod.ref, uid=pod.uid) for _, pod in live if not pod.ended and not pod.deleting)
