"""The start of a pod's process: its secrets and token on disk, its variables, the descriptors that it inherits."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from polyreme_api import environment, labels
from polyreme_api.clock import Clock
from polyreme_cluster.port import ClusterPort, Manifest, ObjectRef, PortError
from polyreme_local.kubelet import container
from polyreme_local.kubelet.leader_sockets import LeaderSockets
from polyreme_local.kubelet.process import PodProcess, start_process, write_durably
from polyreme_local.kubelet.settings import KubeletSettings
from polyreme_local.kubelet.writes import RETRY_S

HOST_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
"""Of the host's own variables only these reach a pod; nothing of the user's secrets does."""

_log = logging.getLogger(__name__)


class PodStarter:
    """Starts the processes of one node's pods.

    Args:
        cluster: The cluster.
        settings: Of the kubelet.
        clock: Clock.
        leaders: Sockets of the jobs' leaders.
    """

    def __init__(
        self, cluster: ClusterPort, settings: KubeletSettings, *, clock: Clock, leaders: LeaderSockets
    ) -> None:
        self._cluster, self._settings, self._clock, self._leaders = cluster, settings, clock, leaders
        self._host = {name: os.environ[name] for name in HOST_VARIABLES if name in os.environ}
        self._life, self._life_held = os.pipe()
        """A pod's process reads the one end, and ends when the other one closes with this host."""

    async def start(self, pod: Manifest, directory: Path, *, is_deleting: Callable[[], bool]) -> PodProcess | None:
        """Start the pod's process; None when the pod is being deleted before that.

        Raises:
            OSError: If the machine refuses.
            ValueError: If the pod asks for what no process can have.
            LookupError: If it has no command.
        """
        files = container.PodFiles(directory=directory, secret=directory / "secret", token=directory / "token")
        secrets = await self._secrets(pod, is_deleting)
        if secrets is None:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        for data in secrets.values():
            if labels.SECRET_KEY in data:
                write_durably(files.secret, data[labels.SECRET_KEY])
        write_durably(files.token, self._settings.token_for(pod).encode())
        leader = self._leaders.of(container.job_of(pod)[1], node=self._settings.node)
        variables = container.pod_environment(
            pod,
            host={**self._host, **self._settings.variables},
            files=files,
            leader_address=f"{container.LOOPBACK}:{leader.getsockname()[1]}",
            api_url=self._settings.api_url,
            secrets=secrets,
        )
        descriptors = [self._life]
        variables[environment.HOST_FD] = str(self._life)
        if container.is_leader(pod):
            descriptors.append(leader.fileno())
            variables[environment.LEADER_FD] = str(leader.fileno())
        return start_process(
            container.pod_command(pod),
            environment=variables,
            directory=directory,
            uid=pod["metadata"]["uid"],
            token=self._settings.run_token,
            descriptors=descriptors,
        )

    def keep_leaders(self, pods: Collection[Manifest]) -> None:
        """Close the sockets of the leaders whose jobs have none of these pods."""
        self._leaders.keep({container.job_of(pod)[1] for pod in pods}, node=self._settings.node)

    def close(self) -> None:
        """Close all sockets, and the pipe by whose end every pod's process ends."""
        self.keep_leaders(())
        os.close(self._life)
        os.close(self._life_held)

    async def _secrets(self, pod: Manifest, is_deleting: Callable[[], bool]) -> dict[str, dict[str, bytes]] | None:
        """Read the pod's secrets; waits for one that does not exist yet, unless the pod is being deleted: None then."""
        found: dict[str, dict[str, bytes]] = {}
        for name in container.secret_names(pod):
            ref = ObjectRef(kind="Secret", namespace=pod["metadata"]["namespace"], name=name)
            while name not in found:
                if is_deleting():
                    return None
                try:
                    secret = await self._cluster.get(ref)
                except PortError as error:
                    _log.info("pod %s waits for its secret: %s", pod["metadata"]["name"], error)
                    await self._clock.sleep(RETRY_S)
                    continue
                data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
                found[name] = data | {key: text.encode() for key, text in (secret.get("stringData") or {}).items()}
        return None if is_deleting() else found
