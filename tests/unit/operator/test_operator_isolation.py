"""A bug that one job meets does not stop the others."""

import asyncio
import random

import pytest

from polyreme_api import labels
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.controller import run_operator
from polyreme_operator.port import Manifest
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.types.actions import Decision
from polyreme_operator.types.observer import NullObserver
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_simulator.event_loop import SimClock, VirtualLoop

PATIENCE_S = 30.0


class Failures(NullObserver):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_job_failed(self, uid: str, error: Exception) -> None:
        self.seen.append(str(error))


def test_a_bug_that_one_job_meets_is_counted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(snapshot: JobSnapshot, now_s: float, **options: object) -> Decision:
        if snapshot.job.name == "cursed":
            raise LookupError("a bug of ours")
        return reconcile(snapshot, now_s, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("polyreme_operator.controller.reconcile", buggy)
    virtual, failures = VirtualLoop(), Failures()
    clock = SimClock(virtual)
    numbers = iter(range(1000))
    store = Store(new_uid=lambda: f"{next(numbers):08x}-0000", now_s=clock.now_s)

    async def story() -> None:
        for name in ("cursed", "fine"):
            store.create(job(name))
        operator = run_operator(EmbeddedCluster(store), clock, rng=random.Random(1), entropy=bytes, observer=failures)
        task = asyncio.ensure_future(operator)
        await asyncio.sleep(PATIENCE_S)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual.run_until_complete(story())
    virtual.close()
    told = {
        record.manifest["metadata"]["name"]: record.manifest.get("status") for record in store.records("TrainingJob")
    }
    assert told["fine"] is not None
    assert len(failures.seen) >= 2
    assert set(failures.seen) == {"a bug of ours"}


def job(name: str) -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 10, "packsPerStep": 2},
        },
    }
