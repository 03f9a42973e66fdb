"""The kinds of the port under the API's paths, and objects as the port hands them out."""

from __future__ import annotations

import dataclasses
from urllib.parse import quote

from polyreme_api.labels import API_VERSION, GROUP, KIND_JOB, KIND_QUEUE, PLURAL_JOB, VERSION
from polyreme_cluster.port import CLUSTER_SCOPED, InvalidObjectError, Manifest, ObjectRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Where a kind is served."""

    kind: str
    api_version: str
    plural: str

    @property
    def root(self) -> str:
        """Path of the API group."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


RESOURCES = {
    resource.kind: resource
    for resource in (
        Resource(kind="Pod", api_version="v1", plural="pods"),
        Resource(kind="Node", api_version="v1", plural="nodes"),
        Resource(kind="Service", api_version="v1", plural="services"),
        Resource(kind="Secret", api_version="v1", plural="secrets"),
        Resource(kind="ServiceAccount", api_version="v1", plural="serviceaccounts"),
        Resource(kind="ConfigMap", api_version="v1", plural="configmaps"),
        Resource(kind="Event", api_version="v1", plural="events"),
        Resource(kind="Job", api_version="batch/v1", plural="jobs"),
        Resource(kind="PodTemplate", api_version="v1", plural="podtemplates"),
        Resource(kind="Deployment", api_version="apps/v1", plural="deployments"),
        Resource(kind="Lease", api_version="coordination.k8s.io/v1", plural="leases"),
        Resource(kind="TrainingJob", api_version=f"{GROUP}/{VERSION}", plural=PLURAL_JOB),
        Resource(kind="TrainingQueue", api_version=f"{GROUP}/{VERSION}", plural="trainingqueues"),
        Resource(kind="ClusterTopology", api_version=f"{GROUP}/{VERSION}", plural="clustertopologies"),
        Resource(kind="NodeFaultPolicy", api_version=f"{GROUP}/{VERSION}", plural="nodefaultpolicies"),
        Resource(kind="NodeIncident", api_version=f"{GROUP}/{VERSION}", plural="nodeincidents"),
        Resource(kind="Role", api_version="rbac.authorization.k8s.io/v1", plural="roles"),
        Resource(kind="RoleBinding", api_version="rbac.authorization.k8s.io/v1", plural="rolebindings"),
        Resource(kind="SelfSubjectReview", api_version="authentication.k8s.io/v1", plural="selfsubjectreviews"),
        Resource(kind="PriorityClass", api_version="scheduling.k8s.io/v1", plural="priorityclasses"),
        Resource(kind="LimitRange", api_version="v1", plural="limitranges"),
        Resource(kind="Namespace", api_version="v1", plural="namespaces"),
        Resource(kind="RuntimeClass", api_version="node.k8s.io/v1", plural="runtimeclasses"),
    )
}


def resource_of(kind: str) -> Resource:
    """Return where a kind is served.

    Raises:
        InvalidObjectError: If the port has no such kind.
    """
    resource = RESOURCES.get(kind)
    if resource is None:
        raise InvalidObjectError(f"unknown kind: {kind!r}, expected one of {', '.join(RESOURCES)}", field="kind")
    return resource


def collection_path(kind: str, namespace: str | None) -> str:
    """Path of a kind's objects, in one namespace or in all."""
    resource = resource_of(kind)
    scope = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{resource.root}{scope}/{resource.plural}"


def object_path(ref: ObjectRef, subresource: str | None = None) -> str:
    """Path of one object.

    Raises:
        InvalidObjectError: If the reference can name none: a path of its own must not become another.
    """
    if ref.name in {"", ".", ".."} or bool(ref.namespace) == (ref.kind in CLUSTER_SCOPED):
        raise InvalidObjectError(
            f"{ref} is not a valid reference, expected a name, and a namespace where the kind has one", field="name"
        )
    path = f"{collection_path(ref.kind, ref.namespace)}/{quote(ref.name, safe='')}"
    return path if subresource is None else f"{path}/{quote(subresource, safe='')}"


_CUT_KINDS = frozenset({"Pod", "Node"})
"""Kinds that come in thousands. The API server writes them with the managed fields last of the metadata."""
_CUT_FROM, _CUT_TO, _NAME = b',"managedFields":[', b']},"spec":{', b'"name":"'
_OWN_HEADS = {
    kind: f'{{"apiVersion":"{API_VERSION}","kind":"{kind}","metadata":{{'.encode() for kind in (KIND_JOB, KIND_QUEUE)
}
"""How the API server begins an object of our kinds, whose fields it writes in the order of the alphabet."""
_OWN_END, _SPEC = b'],"name":"', b'"spec":{'


def without_managed_fields(body: bytes, kind: str) -> bytes:
    """Cut the managed fields out of the JSON of objects that come in thousands, before anybody parses them.

    They are a third of a pod's bytes, and half of the time that its parsing takes. No mark can be part of a string,
    where quotes are escaped, nor of managed fields, whose keys are paths (``f:spec``). What is written otherwise than
    the API server does, without these marks or with a name between them, is left as it is.
    """
    if kind in _OWN_HEADS:
        return _without_in_own(body, _OWN_HEADS[kind])
    if kind not in _CUT_KINDS:
        return body
    kept, at = [], 0
    while (begin := body.find(_CUT_FROM, at)) >= 0 and (end := body.find(_CUT_TO, begin)) >= 0:
        if body.find(_NAME, begin, end) >= 0:
            return body
        kept.append(body[at:begin])
        at = end + 1
    return b"".join((*kept, body[at:])) if kept else body


def _without_in_own(body: bytes, head: bytes) -> bytes:
    """Cut them out of objects of our kinds: before the name in the object's own metadata, nowhere deeper."""
    kept, at = [], 0
    while (begin := body.find(head, at)) >= 0:
        spec = body.find(_SPEC, begin)
        first, last = body.find(_CUT_FROM, begin, spec), body.find(_OWN_END, begin, spec)
        if spec < 0 or not 0 <= first < last:
            return body
        kept.append(body[at:first])
        at = last + 1
    return b"".join((*kept, body[at:])) if kept else body


def tidy(manifest: Manifest, kind: str) -> Manifest:
    """Drop what only the server reads, and name the kind that items of lists leave out; changes its argument."""
    resource = resource_of(kind)
    manifest["metadata"].pop("managedFields", None)
    manifest.setdefault("kind", resource.kind)
    manifest.setdefault("apiVersion", resource.api_version)
    return manifest
