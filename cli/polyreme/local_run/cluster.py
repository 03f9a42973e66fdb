"""The embedded cluster of one run: store with journal, loopback API, operator, process kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.local_run.default_cluster_objects import cluster_objects, node_labels
from polyreme.local_run.fault_options import Injection
from polyreme.local_run.store_variables import store_variables
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import checkpoint_url
from polyreme_api import environment as names
from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.data_report import data_digest
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.labels import ANNOTATION_PROGRESS, KIND_JOB
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ConflictError,
    Manifest,
    NotFoundError,
    ObjectRef,
)
from polyreme_datahub_service.reporter import Reporter
from polyreme_launcher.agent import PROCESSES_FILE
from polyreme_launcher.urls import checkpoint_folder
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.journal import Recover, open_store
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.tokens import TokenTable
from polyreme_local.kubelet.container import job_of
from polyreme_local.kubelet.kubelet import ProcessKubelet
from polyreme_local.kubelet.leader_sockets import LeaderSockets
from polyreme_local.kubelet.settings import KubeletSettings
from polyreme_operator.controller import run_operator
from polyreme_operator.reconcile.status_builder import continue_finished, reopen
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_operator.types.views import is_paused
from polyreme_system.files import read_json

NODE = "local"
DEVICES_LEAST = 8
"""Devices that this machine offers at least by default: a laptop can run a small gang, slowly."""
WRITE_TRIES_MAX = 10


class LocalCluster:
    """One job in its embedded cluster."""

    def __init__(
        self,
        *,
        port: EmbeddedCluster,
        kubelets: Sequence[ProcessKubelet],
        ref: ObjectRef,
        settings: Settings,
        checkpoints: Path,
        clock: Clock,
        lost: asyncio.Future[EnvironmentFailedError],
    ) -> None:
        self._port = port
        self._kubelets = kubelets
        self._ref = ref
        self._settings = settings
        self._clock = clock
        self._lost = lost
        self.checkpoints = checkpoints
        """The folder whose step records show the newest step at once."""

    async def serve(self) -> None:
        """Run operator and kubelet until cancelled.

        Raises:
            EnvironmentFailedError: When the journal can't be written any more.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._until_lost(), name="journal")
                for kubelet in self._kubelets:
                    tasks.create_task(self._serve_node(kubelet), name="kubelet")
                tasks.create_task(
                    run_operator(
                        self._port,
                        self._clock,
                        settings=self._settings,
                        rng=random.Random(secrets.randbits(64)),
                        entropy=secrets.token_bytes,
                    ),
                    name="operator",
                )
        except BaseExceptionGroup as group:
            raise _deepest(group) from group

    async def _serve_node(self, kubelet: ProcessKubelet) -> None:
        first = self._kubelets[0]
        if kubelet is not first:
            # The first one ends what an earlier host left in the folder that all share.
            await first.registered.wait()
        await kubelet.run()

    async def _until_lost(self) -> None:
        raise await asyncio.shield(self._lost)

    async def apply(self, job: TrainingJob, *, longer: bool = False) -> None:
        """Create the job, or give it the fields that may change under a run; one that the machine failed continues.

        Args:
            job: The job.
            longer: Whether it has more steps than it had: if it has trained those, it continues.
        """
        manifest = job.to_object()
        manifest.pop("status", None)
        for known in cluster_objects(job):
            with contextlib.suppress(AlreadyExistsError):
                await self._port.create(known)
        try:
            known_job = await self.job()
        except NotFoundError:
            await self._port.create(manifest)
            return
        status = known_job.status
        reopened = reopen(status)
        if longer and status.is_true("Succeeded"):
            # First: the newest record says that all steps are trained.
            if (lease := await self._lease()) is not None:
                await self._port.delete(ObjectRef.of(lease), uid=lease["metadata"]["uid"])
            reopened = continue_finished(status)
        if reopened is not status:
            fields = reopened.model_dump(mode="json", by_alias=True, exclude_none=True)
            await self._patch(
                {"status": {"completedAt": None, "retryAt": None, **fields}}, subresource=STATUS_SUBRESOURCE
            )
        spec = job.spec
        if is_paused(known_job.status, known_job.metadata.generation):
            # A pause ends with a change of the spec.
            await self.suspend()
        await self._patch(
            {"spec": {"suspend": spec.suspend, "workers": {"replicas": spec.workers.replicas}, **_changeable(job)}}
        )

    async def change(self, job: TrainingJob) -> None:
        """Give the job what was changed in its file and may change while ranks train."""
        await self._patch({"spec": _changeable(job)})

    async def suspend(self) -> None:
        """Ask for a checkpoint and a stop, as a person does with ``spec.suspend``."""
        await self._patch({"spec": {"suspend": True}})

    def kill_pods(self) -> None:
        """End every pod's processes at once."""
        for kubelet in self._kubelets:
            kubelet.kill()

    async def job(self) -> TrainingJob:
        """Return the job as it is now."""
        return parse_job(await self._port.get(self._ref))

    async def pods(self) -> list[Manifest]:
        """Return the job's pods."""
        page = await self._port.list("Pod", namespace=self._ref.namespace)
        return [pod for pod in page.items if pod["metadata"]["labels"].get(labels.LABEL_JOB) == self._ref.name]

    async def pods_ready(self, job: TrainingJob) -> tuple[int, int]:
        """Return how many workers have joined the attempt, and of how many."""
        attempt = job.status.attempt
        return job.status.ready_replicas, attempt.replicas if attempt else job.spec.workers.replicas

    async def progress(self) -> ProgressRecord | None:
        """Return the newest progress record on the job's Lease."""
        if (lease := await self._lease()) is None:
            return None
        text = lease["metadata"].get("annotations", {}).get(ANNOTATION_PROGRESS)
        return ProgressRecord.model_validate_json(text) if text else None

    async def _lease(self) -> Manifest | None:
        job = await self._port.get(self._ref)
        name = labels.job_object_name(self._ref.name, job["metadata"]["uid"])
        with contextlib.suppress(NotFoundError):
            return await self._port.get(ObjectRef(kind="Lease", namespace=self._ref.namespace, name=name))
        return None

    def data_reporter(self, job: TrainingJob) -> Reporter:
        """Return who reports on the job's data to the operator."""
        about = data_digest(job.spec)
        return Reporter(self._port, self._clock, ref=self._ref, uid=job.metadata.uid, about=about)

    def find(self, injection: Injection) -> int | None:
        """Find the pid that a fault shall strike, among the processes that run now."""
        folders = self._kubelets[0].pod_directory("")
        for path in sorted(folders.glob(f"*/{PROCESSES_FILE}")):
            known = read_json(path) or {}
            if known.get("launcher") not in {kubelet.pid(path.parent.name) for kubelet in self._kubelets}:
                continue
            ranks = known.get("ranks", {})
            if injection.fault != "kill-launcher" and str(injection.target) in ranks:
                return int(ranks[str(injection.target)])
            if injection.fault == "kill-launcher" and path.parent.name.split("-")[-2] == str(injection.target):
                return int(known["launcher"])
        return None

    async def _patch(self, change: dict[str, Any], *, subresource: str | None = None) -> None:
        for _ in range(WRITE_TRIES_MAX):
            seen = await self._port.get(self._ref)
            try:
                version = seen["metadata"]["resourceVersion"]
                await self._port.patch(self._ref, change, resource_version=version, subresource=subresource)
            except ConflictError:
                continue
            return
        raise ConflictError(f"{self._ref} changed {WRITE_TRIES_MAX} times while it was being patched")


def _changeable(job: TrainingJob) -> dict[str, Any]:
    spec = job.to_object()["spec"]
    return {
        "data": {name: spec["data"][name] for name in ("onDamage", "schedule")},
        "training": spec["training"],
        "checkpoint": {"keep": job.spec.checkpoint.keep},
    }


def _deepest(error: BaseException) -> BaseException:
    """Return the first error inside nested groups: one failure ends all tasks, and only it says why."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _node_names(port: EmbeddedCluster, nodes: int) -> list[str]:
    """Return the nodes to serve: as many as asked for, and those that pods of an earlier call may have."""
    names = [NODE, *(f"{NODE}-{number}" for number in range(1, nodes))]
    known = [node["metadata"]["name"] for node in (await port.list("Node")).items]
    return list(dict.fromkeys([*names, *known]))


def _kubelets(
    port: EmbeddedCluster,
    nodes: Sequence[str],
    *,
    job: TrainingJob,
    devices: int | None,
    faults: Mapping[int, str],
    directory: Path,
    clock: Clock,
    run_token: str,
    api_url: str,
    tokens: TokenTable,
    variables: Mapping[str, str],
) -> list[ProcessKubelet]:
    """Return a kubelet for each node; without a number of devices, all nodes but one have room for the gang."""
    workers, leaders = job.spec.workers, LeaderSockets()
    if devices is None and len(nodes) == 1:
        devices = max(DEVICES_LEAST, workers.replicas * workers.devices)
    least = workers.devices * math.ceil(workers.replicas / max(1, len(nodes) - 1))
    return [
        ProcessKubelet(
            port,
            KubeletSettings(
                node=node,
                devices=least if devices is None else devices // len(nodes),
                directory=directory,
                run_token=run_token,
                api_url=api_url,
                token_for=lambda pod: tokens.for_job(
                    namespace=pod["metadata"]["namespace"], job=job_of(pod)[0], uid=job_of(pod)[1]
                ),
                device_resource=workers.device_resource,
                # All are one place of every level, as they are one machine.
                node_labels=node_labels(job, NODE),
                variables={**variables, **({names.CHECK_FAULT: faults[number]} if number in faults else {})},
                ends_leftovers=number == 0,
            ),
            clock=clock,
            leaders=leaders,
        )
        for number, node in enumerate(nodes)
    ]


@contextlib.asynccontextmanager
async def open_cluster(
    home: Home,
    run: RunDirectory,
    job: TrainingJob,
    *,
    token: str,
    devices: int | None,
    clock: Clock,
    recover: Recover | None = None,
    data_gate: bool = True,
    nodes: int = 1,
    node_faults: Mapping[int, str] | None = None,
) -> AsyncIterator[LocalCluster]:
    """Open the run's embedded cluster: replay its journal, or rebuild what it lost, and listen on loopback.

    With ``data_gate`` no pod is started before the job's data is reported as ready. ``nodes`` is how many nodes this
    machine is divided into, ``node_faults`` what the checks before training find on some of them, by number.

    Raises:
        RefusedError: If another process holds the journal.
        EnvironmentFailedError: If the disk or the loopback address refuses.
    """
    lost: asyncio.Future[EnvironmentFailedError] = asyncio.get_running_loop().create_future()
    async with open_store(
        run.journal_file, clock=clock, run_token=token, on_failure=lost.set_result, recover=recover
    ) as (store, durable):
        port = EmbeddedCluster(store, durable=durable)
        tokens = TokenTable()
        server = ApiServer(port, tokens=tokens)
        url = await server.start()
        kubelets = _kubelets(
            port,
            await _node_names(port, nodes),
            job=job,
            devices=devices,
            faults=node_faults or {},
            directory=run.pods,
            clock=clock,
            run_token=token,
            api_url=url,
            tokens=tokens,
            # By the processes' own environment: the journal holds everything that a pod holds.
            variables=store_variables(home),
        )
        settings = Settings(
            data_gate=data_gate,
            pod_runs=lambda uid: any(kubelet.runs(uid) for kubelet in kubelets),
            defaults=_pod_defaults(home, run, api_url=url),
        )
        ref = ObjectRef(kind=KIND_JOB, namespace=job.metadata.namespace, name=job.metadata.name)
        try:
            yield LocalCluster(
                port=port,
                kubelets=kubelets,
                ref=ref,
                settings=settings,
                checkpoints=checkpoint_folder(checkpoint_url(run, job)) or run.checkpoints,
                clock=clock,
                lost=lost,
            )
        finally:
            await server.close()


def _pod_defaults(home: Home, run: RunDirectory, *, api_url: str) -> PodDefaults:
    return PodDefaults(
        api_url=api_url,
        checkpoint_root=home.checkpoint_root.as_uri(),
        environment=(
            (names.OBJECTS_URL, home.objects_url),
            (names.EXPORT_URL, run.export.as_uri()),
            ("OMP_NUM_THREADS", "1"),
            ("GLOO_SOCKET_IFNAME", "lo"),
        ),
    )
