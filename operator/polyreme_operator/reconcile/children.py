"""Objects that a job owns beside its pods: Service, Secret, Lease, and its leader's account and rights."""

from __future__ import annotations

from polyreme_api.job import TrainingJobSpec
from polyreme_api.progress import ProgressRecord
from polyreme_operator.reconcile import environment_runtime, refusals, worker_pods
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import Action, CreateAccount, CreateChild, CreateSecret
from polyreme_operator.types.snapshot import JobSnapshot


def missing(
    snapshot: JobSnapshot, spec: TrainingJobSpec, record: ProgressRecord | None, defaults: PodDefaults, now_s: float
) -> tuple[Action, ...]:
    """Create the objects that are not known to exist, those that were refused when their next try is due."""
    job, skipped = snapshot.job, snapshot.children | refusals.waiting_kinds(snapshot, record, now_s)
    actions: list[Action] = []
    if "Service" not in skipped:
        actions.append(CreateChild(manifest=worker_pods.service(job)))
    if defaults.ca_bundle is not None:
        certificates = worker_pods.ca_secret(job, defaults.ca_bundle)
        name = certificates["metadata"]["name"]
        if name not in skipped:
            actions.append(CreateChild(manifest=certificates, key=name))
    if not environment_runtime.is_used(spec):
        actions += _for_launchers(snapshot, spec, defaults, skipped)
    if snapshot.lease is None:
        actions.append(CreateChild(manifest=worker_pods.lease(job, spec)))
    return tuple(actions)


def _for_launchers(
    snapshot: JobSnapshot, spec: TrainingJobSpec, defaults: PodDefaults, skipped: frozenset[str]
) -> list[Action]:
    """Create what only launchers need: the key that they share, and their leader's account and rights."""
    job = snapshot.job
    actions: list[Action] = []
    if "Secret" not in skipped:
        key_id = "" if job.attempt is None else job.attempt.key_id
        actions.append(CreateSecret(manifest=worker_pods.secret(job), key_id=key_id))
    if not defaults.launcher_rbac:
        return actions
    if "ServiceAccount" not in skipped and worker_pods.has_own_account(job, spec):
        actions.append(CreateAccount(manifest=worker_pods.account(job)))
    if not {"Role", "RoleBinding"} <= skipped:
        bound = CreateChild(manifest=worker_pods.role_binding(job, spec))
        if "Role" not in skipped:
            # The API server refuses a RoleBinding to an unknown Role.
            actions.append(CreateChild(manifest=worker_pods.role(job), then=bound))
        elif "Role" in snapshot.children:
            actions.append(bound)
    return actions
