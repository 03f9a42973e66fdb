"""The kubelet: watches the pods of one node and runs each as a process, once."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from polyreme_api.clock import Clock
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ClusterPort, GoneError, Manifest, PortError, WatchEventType
from polyreme_local.kubelet import status
from polyreme_local.kubelet.heartbeat import beat
from polyreme_local.kubelet.leader_sockets import LeaderSockets
from polyreme_local.kubelet.pod_starter import PodStarter
from polyreme_local.kubelet.process import PodProcess, end_leftovers, end_strays, has_run, last_line
from polyreme_local.kubelet.settings import KubeletSettings
from polyreme_local.kubelet.writes import RETRY_S, register_node, remove_pod, write_pod_status

CLOSE_GRACE_S = 5.0

_log = logging.getLogger(__name__)


class ProcessKubelet:
    """Runs the pods that are bound to one node.

    Args:
        cluster: The cluster.
        settings: The node.
        clock: Clock.
        leaders: Sockets of the jobs' leaders, shared with the other nodes of this host.

    Raises:
        EnvironmentFailedError: If this is no Linux: without its process descriptors and parent-death signals nothing
            could be promised about what still runs.
    """

    def __init__(
        self, cluster: ClusterPort, settings: KubeletSettings, *, clock: Clock, leaders: LeaderSockets | None = None
    ) -> None:
        if sys.platform != "linux":
            raise EnvironmentFailedError(f"pods run as processes on Linux only: this is {sys.platform}")
        self._cluster, self._settings, self._clock = cluster, settings, clock
        self._starter = PodStarter(cluster, settings, clock=clock, leaders=leaders or LeaderSockets())
        self._pods: dict[str, Manifest] = {}
        """Newest state of this node's pods, by UID."""
        self._processes: dict[str, PodProcess] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        """What is being done for a pod: running it or ending it."""
        self._stopping: dict[str, asyncio.Task[int]] = {}
        self._gone: set[str] = set()
        """Pods whose object is gone while something is still being done for them."""
        self.registered = asyncio.Event()
        """Set when the node is registered, and nothing of an earlier host is left."""

    async def run(self) -> None:
        """End what an earlier host left, register the node, then run pods until cancelled."""
        settings = self._settings
        settings.directory.mkdir(parents=True, exist_ok=True)
        killed = await asyncio.to_thread(end_leftovers, settings.directory) if settings.ends_leftovers else []
        if killed:
            _log.warning("killed %d processes left by an earlier host: %s", len(killed), killed)
        beating: asyncio.Task[None] | None = None
        try:
            await register_node(self._cluster, self._node(), clock=self._clock)
            self.registered.set()
            if settings.heartbeat_s is not None:
                beats = beat(self._cluster, settings.node, every_s=settings.heartbeat_s, clock=self._clock)
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
        return self._settings.directory / pod

    def _node(self) -> Manifest:
        settings = self._settings
        return status.node(
            settings.node,
            devices=settings.devices,
            resource=settings.device_resource,
            labels=settings.node_labels,
            at=self._now(),
        )

    async def _follow(self) -> None:
        """List once, then watch until the watch ends."""
        seen: dict[str, Manifest] = {}
        token: str | None = None
        while True:
            page = await self._cluster.list("Pod", continue_=token)
            seen |= {
                pod["metadata"]["uid"]: pod for pod in page.items if pod["spec"].get("nodeName") == self._settings.node
            }
            token = page.continue_
            if token is None:
                break
        for uid in [uid for uid in self._pods if uid not in seen]:
            self._vanished(uid)
        for pod in seen.values():
            self._take(pod)
        async for event in self._cluster.watch("Pod", resource_version=page.resource_version):
            if event.type is WatchEventType.BOOKMARK or not self._is_here(event.object):
                continue
            if event.type is WatchEventType.DELETED:
                self._vanished(event.object["metadata"]["uid"])
            else:
                self._take(event.object)

    def _is_here(self, pod: Manifest) -> bool:
        return bool(pod["spec"].get("nodeName") == self._settings.node)

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
        self._starter.keep_leaders(self._pods.values())

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
            await self._report(pod, gone)
            return
        try:
            process = await self._starter.start(pod, directory, is_deleting=lambda: self._is_deleting(uid))
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            _log.error("pod %s can't be started: %s", pod["metadata"]["name"], error)
            words = f"{type(error).__name__}: {error}"
            failed = status.ended(pod, code=status.CODE_UNKNOWN, at=self._now(), reason="StartError", message=words)
            await self._report(pod, failed)
            return
        if process is None:
            return
        self._processes[uid] = process
        try:
            await self._report(pod, status.running(pod, at=self._now()))
            code = await process.wait()
            # A pod has ended when nothing of it lives: another one may take its place from then on.
            strays = await asyncio.to_thread(end_strays, uid, self._settings.run_token)
        finally:
            process.signal(signal.SIGKILL)
            del self._processes[uid]
        _log.info("pod %s ended with %d, leaving %d processes", pod["metadata"]["name"], code, len(strays))
        words = last_line(directory) if code else ""
        await self._report(pod, status.ended(pod, code=code, at=self._now(), message=words))
        await self._confirm_deletion(uid)

    def _is_deleting(self, uid: str) -> bool:
        pod = self._pods.get(uid)
        return pod is None or pod["metadata"].get("deletionTimestamp") is not None

    async def _report(self, pod: Manifest, state: Manifest) -> None:
        await write_pod_status(self._cluster, pod, state, clock=self._clock)

    async def _confirm_deletion(self, uid: str) -> None:
        """Remove the object of a pod that is being deleted, now that nothing of it runs."""
        if self._is_deleting(uid) and uid in self._pods:
            await remove_pod(self._cluster, self._pods[uid], clock=self._clock)
            self._pods.pop(uid, None)

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
            self._starter.keep_leaders(self._pods.values())
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
        self._starter.close()
