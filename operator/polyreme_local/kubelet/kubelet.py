"""The kubelet: watches the pods of one node and runs each as a process, once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from polyreme_api import environment, labels
from polyreme_api.clock import Clock
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.times import rfc3339
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    GoneError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
    WatchEventType,
)
from polyreme_local.kubelet import container, status
from polyreme_local.kubelet.heartbeat import beat
from polyreme_local.kubelet.leader_sockets import LeaderSockets
from polyreme_local.kubelet.process import (
    PodProcess,
    end_leftovers,
    end_strays,
    has_run,
    last_line,
    start_process,
    write_durably,
)

RETRY_S = 0.2
CLOSE_GRACE_S = 5.0
HOST_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
"""Of the host's own variables only these reach a pod; nothing of the user's secrets does."""

_log = logging.getLogger(__name__)


class ProcessKubelet:
    """Runs the pods that are bound to one node.

    Args:
        cluster: The cluster.
        node: Name of the node that this host registers.
        devices: Devices that the node has.
        directory: Folder of the pods' folders.
        clock: Clock.
        run_token: Random text of this host's life, by which a later host knows what this one left.
        api_url: Root of the API for the pods.
        token_for: Returns the bearer token of a pod's API access.
        device_resource: Resource that counts devices.
        variables: Further variables of every pod.
        heartbeat_s: How often the node shows that it lives; None where nothing checks it, as in the embedded cluster.
        node_labels: Labels of the node, as its places in the topology.
        leaders: Sockets of the jobs' leaders, shared with the other nodes of this host.
        ends_leftovers: Whether to end what an earlier host left in the folder; False for further nodes with one folder.

    Raises:
        EnvironmentFailedError: If this is no Linux: without its process descriptors and parent-death signals nothing
            could be promised about what still runs.
    """

    def __init__(
        self,
        cluster: ClusterPort,
        *,
        node: str,
        devices: int,
        directory: Path,
        clock: Clock,
        run_token: str,
        api_url: str,
        token_for: Callable[[Manifest], str],
        device_resource: str = labels.RESOURCE_DEVICE,
        variables: Mapping[str, str] | None = None,
        heartbeat_s: float | None = None,
        node_labels: Mapping[str, str] | None = None,
        leaders: LeaderSockets | None = None,
        ends_leftovers: bool = True,
    ) -> None:
        if sys.platform != "linux":
            raise EnvironmentFailedError(f"pods run as processes on Linux only: this is {sys.platform}")
        self._cluster = cluster
        self._node = node
        self._devices = devices
        self._directory = directory
        self._clock = clock
        self._run_token = run_token
        self._api_url = api_url
        self._token_for = token_for
        self._device_resource = device_resource
        self._heartbeat_s = heartbeat_s
        self._host = {name: os.environ[name] for name in HOST_VARIABLES if name in os.environ} | dict(variables or {})
        self._pods: dict[str, Manifest] = {}
        """Newest state of this node's pods, by UID."""
        self._processes: dict[str, PodProcess] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        """What is being done for a pod: running it or ending it."""
        self._stopping: dict[str, asyncio.Task[int]] = {}
        self._gone: set[str] = set()
        """Pods whose object is gone while something is still being done for them."""
        self._labels = dict(node_labels or {})
        self._leaders = leaders or LeaderSockets()
        self._life, self._life_held = os.pipe()
        self._ends_leftovers = ends_leftovers
        self.registered = asyncio.Event()
        """Set when the node is registered, and nothing of an earlier host is left."""

    async def run(self) -> None:
        """End what an earlier host left, register the node, then run pods until cancelled."""
        self._directory.mkdir(parents=True, exist_ok=True)
        killed = await asyncio.to_thread(end_leftovers, self._directory) if self._ends_leftovers else []
        if killed:
            _log.warning("killed %d processes left by an earlier host: %s", len(killed), killed)
        beating: asyncio.Task[None] | None = None
        try:
            await self._register()
            self.registered.set()
            if self._heartbeat_s is not None:
                beats = beat(self._cluster, self._node, every_s=self._heartbeat_s, clock=self._clock)
                beating = asyncio.get_running_loop().create_task(beats)
            while True:
                try:
                    await self._follow()
                except GoneError:
                    continue
                except PortError as error:
                    _log.warning("can't list pods, retrying: %s", error)
                    await self._clock.sleep(RETRY_S)
        finally:
            if beating is not None:
                beating.cancel()
            await self._close()

    def pid(self, pod: str) -> int | None:
        """Pid of a pod's process, by pod name; for people and tests."""
        for uid, process in self._processes.items():
            if self._pods[uid]["metadata"]["name"] == pod:
                return process.pid
        return None

    def runs(self, uid: str) -> bool:
        """Tell whether a pod's process lives and is not stopped."""
        return uid in self._processes and self._processes[uid].runs

    def kill(self) -> None:
        """End every pod's process at once; its ranks die with it."""
        for process in self._processes.values():
            process.signal(signal.SIGKILL)

    def pod_directory(self, pod: str) -> Path:
        """Folder of a pod's files."""
        return self._directory / pod

    async def _register(self) -> None:
        at = rfc3339(self._clock.now_s())
        node = status.node(
            self._node, devices=self._devices, resource=self._device_resource, labels=self._labels, at=at
        )
        while True:
            try:
                ref = ObjectRef(kind="Node", name=self._node)
                with contextlib.suppress(AlreadyExistsError):
                    await self._cluster.create(node)
                await self._cluster.patch(ref, {"metadata": {"labels": node["metadata"]["labels"]}})
                await self._cluster.patch(ref, {"status": node["status"]}, subresource=STATUS_SUBRESOURCE)
                return
            except PortError as error:
                _log.warning("node %s is not registered yet: %s", self._node, error)
                await self._clock.sleep(RETRY_S)

    async def _follow(self) -> None:
        """List once, then watch until the watch ends."""
        seen: dict[str, Manifest] = {}
        token: str | None = None
        while True:
            page = await self._cluster.list("Pod", continue_=token)
            seen |= {pod["metadata"]["uid"]: pod for pod in page.items if pod["spec"].get("nodeName") == self._node}
            token = page.continue_
            if token is None:
                break
        for uid in [uid for uid in self._pods if uid not in seen]:
            self._vanished(uid)
        for pod in seen.values():
            self._take(pod)
        async for event in self._cluster.watch("Pod", resource_version=page.resource_version):
            if event.type is WatchEventType.BOOKMARK or event.object["spec"].get("nodeName") != self._node:
                continue
            if event.type is WatchEventType.DELETED:
                self._vanished(event.object["metadata"]["uid"])
            else:
                self._take(event.object)

    def _take(self, pod: Manifest) -> None:
        """Do what a pod's state asks for, unless it is being done."""
        metadata = pod["metadata"]
        uid = metadata["uid"]
        self._pods[uid] = pod
        deleting = metadata.get("deletionTimestamp") is not None
        if deleting and uid in self._processes:
            self._stop(uid, pod)
        if uid in self._work:
            return
        if deleting:
            self._spawn(uid, self._confirm_deletion(uid))
        elif pod.get("status", {}).get("phase", "Pending") not in {"Succeeded", "Failed"}:
            self._spawn(uid, self._run_pod(uid, pod))

    def _vanished(self, uid: str) -> None:
        """The object is gone, by force: so goes the process."""
        if uid in self._work:
            self._gone.add(uid)
        if uid in self._processes:
            self._processes[uid].signal(signal.SIGKILL)
        elif uid in self._work:
            self._work[uid].cancel()
        else:
            self._pods.pop(uid, None)
        self._drop_leaders()

    def _stop(self, uid: str, pod: Manifest) -> None:
        if uid not in self._stopping:
            grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds", 30))
            process = self._processes[uid]
            self._stopping[uid] = asyncio.get_running_loop().create_task(process.stop(grace_s=grace_s))

    async def _run_pod(self, uid: str, pod: Manifest) -> None:
        directory = self.pod_directory(pod["metadata"]["name"])
        if has_run(directory, uid):
            # A pod runs once: this one did, under an earlier host, and died with it.
            gone = status.ended(pod, code=status.CODE_UNKNOWN, at=self._now(), reason="HostRestarted")
            await self._report(uid, pod, gone)
            return
        try:
            process = await self._start(uid, pod, directory)
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            _log.error("pod %s can't be started: %s", pod["metadata"]["name"], error)
            words = f"{type(error).__name__}: {error}"
            failed = status.ended(pod, code=status.CODE_UNKNOWN, at=self._now(), reason="StartError", message=words)
            await self._report(uid, pod, failed)
            return
        if process is None:
            return
        self._processes[uid] = process
        try:
            await self._report(uid, pod, status.running(pod, at=self._now()))
            code = await process.wait()
            # A pod has ended when nothing of it lives: another one may take its place from then on.
            strays = await asyncio.to_thread(end_strays, uid, self._run_token)
        finally:
            process.signal(signal.SIGKILL)
            del self._processes[uid]
        _log.info("pod %s ended with %d, leaving %d processes", pod["metadata"]["name"], code, len(strays))
        words = last_line(directory) if code else ""
        await self._report(uid, pod, status.ended(pod, code=code, at=self._now(), message=words))
        await self._confirm_deletion(uid)

    async def _start(self, uid: str, pod: Manifest, directory: Path) -> PodProcess | None:
        """Start the pod's process; None when the pod is being deleted before that.

        Raises:
            OSError: If the machine refuses.
            ValueError: If the pod asks for what no process can have.
            LookupError: If it has no command.
        """
        files = container.PodFiles(directory=directory, secret=directory / "secret", token=directory / "token")
        secrets = await self._secrets(uid, pod)
        if secrets is None:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        for data in secrets.values():
            if labels.SECRET_KEY in data:
                write_durably(files.secret, data[labels.SECRET_KEY])
        write_durably(files.token, self._token_for(pod).encode())
        leader = self._leader(pod)
        variables = container.pod_environment(
            pod,
            host=self._host,
            files=files,
            leader_address=f"{container.LOOPBACK}:{leader.getsockname()[1]}",
            api_url=self._api_url,
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
            uid=uid,
            token=self._run_token,
            descriptors=descriptors,
        )

    async def _secrets(self, uid: str, pod: Manifest) -> dict[str, dict[str, bytes]] | None:
        """Read the pod's secrets; waits for one that does not exist yet, unless the pod is being deleted: None then."""
        found: dict[str, dict[str, bytes]] = {}
        for name in container.secret_names(pod):
            ref = ObjectRef(kind="Secret", namespace=pod["metadata"]["namespace"], name=name)
            while name not in found:
                if self._is_deleting(uid):
                    return None
                try:
                    secret = await self._cluster.get(ref)
                except PortError as error:
                    _log.info("pod %s waits for its secret: %s", pod["metadata"]["name"], error)
                    await self._clock.sleep(RETRY_S)
                    continue
                data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
                found[name] = data | {key: text.encode() for key, text in (secret.get("stringData") or {}).items()}
        return None if self._is_deleting(uid) else found

    def _is_deleting(self, uid: str) -> bool:
        pod = self._pods.get(uid)
        return pod is None or pod["metadata"].get("deletionTimestamp") is not None

    async def _report(self, uid: str, pod: Manifest, state: Manifest) -> None:
        """Retry writing a status until it is stored, or the pod is gone."""
        ref = ObjectRef.of(pod)
        while True:
            try:
                now = await self._cluster.get(ref)
                if now["metadata"]["uid"] != uid:
                    return
                version = now["metadata"]["resourceVersion"]
                await self._cluster.patch(
                    ref, {"status": state}, resource_version=version, subresource=STATUS_SUBRESOURCE
                )
                return
            except NotFoundError:
                return
            except ConflictError:
                continue
            except PortError as error:
                _log.warning("status of %s is not written yet: %s", ref, error)
                await self._clock.sleep(RETRY_S)

    async def _confirm_deletion(self, uid: str) -> None:
        """Remove the object of a pod that is being deleted, now that nothing of it runs."""
        pod = self._pods.get(uid)
        while pod is not None and pod["metadata"].get("deletionTimestamp") is not None:
            try:
                with contextlib.suppress(NotFoundError, ConflictError):
                    await self._cluster.delete(ObjectRef.of(pod), uid=uid, grace_period_s=0)
                self._pods.pop(uid, None)
                return
            except PortError as error:
                _log.warning("%s is not removed yet: %s", ObjectRef.of(pod), error)
                await self._clock.sleep(RETRY_S)

    def _leader(self, pod: Manifest) -> socket.socket:
        return self._leaders.of(container.job_of(pod)[1], node=self._node)

    def _drop_leaders(self) -> None:
        self._leaders.keep({container.job_of(pod)[1] for pod in self._pods.values()}, node=self._node)

    def _spawn(self, uid: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work[uid] = task
        task.add_done_callback(lambda done: self._on_done(uid, done))

    def _on_done(self, uid: str, task: asyncio.Task[None]) -> None:
        self._work.pop(uid, None)
        self._stopping.pop(uid, None)
        if uid in self._gone:
            self._gone.discard(uid)
            self._pods.pop(uid, None)
            self._drop_leaders()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("work for pod %s failed", uid, exc_info=error)
            return
        pod = self._pods.get(uid)
        if pod is not None and pod["metadata"].get("deletionTimestamp") is not None:
            self._take(pod)

    def _now(self) -> str:
        return rfc3339(self._clock.now_s())

    async def _close(self) -> None:
        """End every pod with this host; their objects stay as they are."""
        work = list(self._work.values())
        stops = [process.stop(grace_s=CLOSE_GRACE_S) for process in self._processes.values()]
        await asyncio.gather(*stops, return_exceptions=True)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self._leaders.keep((), node=self._node)
        os.close(self._life)
        os.close(self._life_held)
