"""Reads of a command from the cluster: only the kinds that it shows, and of one namespace where that is enough.

A user of one namespace may read little else. What a command can do without is left out and named; what it can't do
without is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Iterable, Mapping

from polyreme.plugin.snapshot import Snapshot, snapshot_of
from polyreme.views.output import nearest
from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_api.labels import KIND_JOB, KIND_QUEUE, KIND_TOPOLOGY
from polyreme_cluster.adapters.kubernetes.resources import resource_of
from polyreme_cluster.port import CLUSTER_SCOPED, ClusterPort, ForbiddenError, Manifest, ObjectRef
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_operator.types.views import JobView

PAGES_MAX = 400
"""Pages of one kind: with 500 objects each, more than any cluster holds."""
NOT_INSTALLED = "this cluster has no TrainingJob resource: apply polyreme's manifests/crds, or choose another --context"
_MAY_BE_ABSENT = frozenset({KIND_QUEUE, KIND_TOPOLOGY})


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """Objects that the user may not list."""

    kind: str
    namespace: str | None
    """None: those of all namespaces."""


VIEWER, CLUSTER_VIEWER = "polyreme-viewer", "polyreme-cluster-viewer"
"""ClusterRoles of the chart; Kubernetes' own view and edit include the first."""


def named(hidden: Iterable[Hidden]) -> str:
    """Write ``nodes, and pods and trainingjobs in all namespaces``."""
    by_scope: dict[str, list[str]] = {}
    for each in sorted(hidden, key=lambda each: (each.kind not in CLUSTER_SCOPED, each.namespace or "", each.kind)):
        scope = f" in namespace {each.namespace}" if each.namespace else " in all namespaces"
        by_scope.setdefault("" if each.kind in CLUSTER_SCOPED else scope, []).append(resource_of(each.kind).plural)
    return ", and ".join(" and ".join(plurals) + scope for scope, plurals in by_scope.items())


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """What was read, and what may not be."""

    seen: Snapshot
    hidden: tuple[Hidden, ...] = ()
    events: tuple[Manifest, ...] = ()
    found: Mapping[str, list[Manifest]] = dataclasses.field(default_factory=dict)
    """Objects as they came, by kind."""

    def job(self, uid: str) -> JobView:
        """Return one of the jobs that were read.

        Raises:
            RefusedError: If it is stored in a form that can't be read.
        """
        found = next((job for job in self.seen.jobs if job.uid == uid), None)
        if found is None:
            raise RefusedError("the job is stored in a form that can't be read; see `kubectl get tj -o yaml`")
        return found

    def lacks(self, *kinds: str) -> bool:
        """Tell whether objects of one of these kinds may not be listed."""
        return any(each.kind in kinds for each in self.hidden)

    def left_out(self, what: str, *kinds: str) -> list[str]:
        """Return the line that says what is left out, and why; none if nothing of these kinds is hidden."""
        hidden = [each for each in self.hidden if each.kind in kinds]
        return [f"{what}: you may not list {named(hidden)}"] if hidden else []


async def look(
    cluster: ClusterPort,
    wanted: Mapping[str, str | None],
    *,
    needed: Collection[str] = (),
    home: str = "",
    known: Iterable[Manifest] = (),
    now_s: float,
) -> Sight:
    """Read the kinds that a command shows, side by side.

    Args:
        cluster: The cluster.
        wanted: By kind the namespace to list; None: all of them.
        needed: Kinds without which the command has nothing to show.
        home: Namespace that is listed instead where all may not be.
        known: Jobs that were read before.
        now_s: The time.

    Raises:
        NotFoundError: If the cluster has no TrainingJobs at all.
        RefusedError: If a needed kind may not be listed.
    """
    kinds = sorted(wanted)
    found = await asyncio.gather(
        *(_visible(cluster, kind, wanted[kind], needed=kind in needed, home=home) for kind in kinds)
    )
    lists = {kind: items for kind, (items, _) in zip(kinds, found, strict=True)}
    jobs = {item["metadata"]["uid"]: item for item in (*known, *lists.get(KIND_JOB, ()))}
    seen = snapshot_of({**lists, KIND_JOB: list(jobs.values())}, now_s=now_s)
    hidden = tuple(hidden for _, hidden in found if hidden is not None)
    return Sight(seen, hidden, tuple(lists.get("Event", ())), lists)


async def _visible(
    cluster: ClusterPort, kind: str, namespace: str | None, *, needed: bool, home: str
) -> tuple[list[Manifest], Hidden | None]:
    try:
        return await list_all(cluster, kind, namespace=namespace), None
    except NotAllowedError:
        if needed:
            raise
    if namespace is None and home and kind not in CLUSTER_SCOPED:
        items, _ = await _visible(cluster, kind, home, needed=False, home="")
        return items, Hidden(kind, None)
    return [], Hidden(kind, namespace)


class NotAllowedError(RefusedError):
    """The user may not list a kind."""


async def list_all(cluster: ClusterPort, kind: str, *, namespace: str | None = None) -> list[Manifest]:
    """Read every page of a kind; a kind that is not installed has none, except for the jobs.

    Raises:
        NotAllowedError: If the user may not list it, naming the ClusterRole that allows it.
        NotFoundError: If the cluster has no TrainingJobs.
        RefusedError: If there are more pages than anyone can have.
    """
    items: list[Manifest] = []
    token: str | None = None
    for _ in range(PAGES_MAX):
        try:
            page = await cluster.list(kind, namespace=namespace, continue_=token)
        except PortNotFoundError as error:
            if kind == KIND_JOB:
                raise NotFoundError(NOT_INSTALLED) from error
            if kind in _MAY_BE_ABSENT:
                return []
            raise
        except ForbiddenError as error:
            role = CLUSTER_VIEWER if kind in CLUSTER_SCOPED else VIEWER
            other = "" if kind in CLUSTER_SCOPED else "another namespace, or " if namespace else "one namespace, or "
            what = named([Hidden(kind, namespace)])
            raise NotAllowedError(f"you may not list {what}; ask for {other}the ClusterRole {role}") from error
        items += page.items
        token = page.continue_
        if token is None:
            return items
    raise RefusedError(f"list of {kind} has more than {PAGES_MAX} pages; name a namespace")


class NoJobError(NotFoundError):
    """The API server has no job of a name."""


async def read_job(cluster: ClusterPort, namespace: str, name: str) -> Manifest:
    """Read one job.

    Raises:
        ForbiddenError: If the user may not read it.
        NoJobError: Naming those that exist, if the user may list them.
    """
    try:
        return await cluster.get(ObjectRef(kind=KIND_JOB, namespace=namespace, name=name))
    except PortNotFoundError as error:
        items, hidden = await _visible(cluster, KIND_JOB, namespace, needed=False, home="")
        known = sorted(item["metadata"]["name"] for item in items)
        words = nearest(name, known) if hidden is None else "you may not list those that exist"
        raise NoJobError(f"no job {name!r} in namespace {namespace!r}: {words}", field="JOB or -n") from error
