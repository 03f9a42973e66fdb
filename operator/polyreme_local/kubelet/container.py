"""The part of a pod that a process can be: command, arguments, environment; and the fields it can't honour. Pure."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme_api import environment
from polyreme_api.ownership import owner_of_pod
from polyreme_cluster.port import Manifest

LOOPBACK = "127.0.0.1"
_POD_FIELDS = {
    "activeDeadlineSeconds",
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "ephemeralContainers",
    "hostAliases",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "priorityClassName",
    "readinessGates",
    "resourceClaims",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
}
_CONTAINER_FIELDS = {
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
    "volumeDevices",
    "volumeMounts",
    "workingDir",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodFiles:
    """Where a pod's files lie on this machine."""

    directory: Path
    secret: Path
    token: Path


def unhonoured_fields(template: Manifest) -> list[str]:
    """Name the fields of a pod or pod template that a process can't honour, sorted; a caller warns once of them all."""
    spec = template.get("spec") or {}
    containers = spec.get("containers") or []
    found = [f"spec.{name}" for name in _POD_FIELDS if spec.get(name)]
    for container in containers[:1]:
        found += [f"spec.containers[0].{name}" for name in _CONTAINER_FIELDS if container.get(name)]
    found += [f"spec.containers[{index}]" for index in range(1, len(containers))]
    return sorted(found)


def pod_command(pod: Manifest) -> list[str]:
    """Return the command line of the pod's first container; ``python`` is this interpreter."""
    container = _container(pod)
    values = {entry["name"]: entry["value"] for entry in container.get("env") or [] if "value" in entry}
    words = [_expanded(word, values) for word in (*(container.get("command") or []), *(container.get("args") or []))]
    if words and words[0] in {"python", "python3"}:
        words[0] = sys.executable
    return words


def pod_environment(
    pod: Manifest,
    *,
    host: Mapping[str, str],
    files: PodFiles,
    leader_address: str,
    api_url: str,
    secrets: Mapping[str, Mapping[str, bytes]],
) -> dict[str, str]:
    """Return the variables of the pod's process.

    Args:
        pod: The pod.
        host: Variables that every process needs from its host (PATH, HOME, virtual environment).
        files: Where the pod's files lie; their variables replace the paths inside a container.
        leader_address: Replaces the address of the job's headless Service, which nothing resolves here.
        api_url: Replaces the API's address inside a cluster.
        secrets: Data of the secrets that the pod names, by secret and key.
    """
    variables = dict(host)
    for entry in _container(pod).get("env") or []:
        value = _value(entry, pod, secrets)
        if value is not None:
            variables[entry["name"]] = _expanded(value, variables)
    service = pod["spec"].get("subdomain")
    master = variables.get(environment.MASTER_ADDR, "")
    if service and master.split(".")[0] == service:
        variables[environment.MASTER_ADDR] = LOOPBACK
    variables |= {
        environment.POD_DIRECTORY: str(files.directory),
        environment.SECRET_FILE: str(files.secret),
        environment.TOKEN_FILE: str(files.token),
        environment.LEADER_ADDRESS: leader_address,
        environment.API_URL: api_url,
        # The output of a pod's process goes to a file that has no limit; its ranks' own files have one.
        environment.PRINT_RANK_LOGS: "off",
    }
    return variables


def secret_names(pod: Manifest) -> list[str]:
    """Name the secrets that a pod mounts or takes variables from."""
    names = [volume["secret"]["secretName"] for volume in pod["spec"].get("volumes") or [] if "secret" in volume]
    for entry in _container(pod).get("env") or []:
        reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
        if reference:
            names.append(reference["name"])
    return list(dict.fromkeys(names))


def job_of(pod: Manifest) -> tuple[str, str]:
    """Return name and UID of the job that controls a pod, empty for a pod of none."""
    owned = owner_of_pod(pod["metadata"])
    return ("", "") if owned is None else (owned[0].name, owned[0].uid)


def is_leader(pod: Manifest) -> bool:
    """Tell whether the pod fills its job's index 0."""
    owned = owner_of_pod(pod["metadata"])
    return owned is not None and owned[1] == 0


def _container(pod: Manifest) -> dict[str, Any]:
    containers = pod["spec"].get("containers") or [{}]
    first: dict[str, Any] = containers[0]
    return first


def _value(entry: Mapping[str, Any], pod: Manifest, secrets: Mapping[str, Mapping[str, bytes]]) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return str(entry.get("value", ""))
    if field := source.get("fieldRef"):
        return _field(pod, field["fieldPath"])
    if reference := source.get("secretKeyRef"):
        data = secrets.get(reference["name"], {}).get(reference["key"])
        return None if data is None else data.decode()
    return None


def _field(pod: Manifest, path: str) -> str:
    """Read a downward value, as ``metadata.name`` or ``metadata.labels['a/b']``."""
    before, bracket, key = path.partition("['")
    value: Any = pod
    for name in before.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if bracket:
        value = (value or {}).get(key.removesuffix("']"))
    if path in {"status.podIP", "status.hostIP"}:
        return LOOPBACK
    return "" if value is None else str(value)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by variables that are known, as Kubernetes does."""
    if "$(" not in text:
        return text
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text
